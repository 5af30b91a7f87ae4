"""Does the source hold nothing that runs what it reads, and do files that try stay inert?"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import LaunchContext
from autoplan.frameworks.common.options import parse_yaml
from autoplan.frameworks.launch_files import READERS, reader_of
from autoplan.profiler.discover.slurm import parse

ROOT = Path(__file__).parent.parent
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "torch.load", "numpy.load"}
SAFE_LOADERS = {"_LOADER", "PlainValues", "yaml.SafeLoader", "yaml.CSafeLoader"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("autoplan", "profiler", "search"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def faults(tree: ast.Module) -> Iterator[str]:
    """Yield what runs a text or an object of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in BUILTINS | CALLS:
                yield f"{name}()"
            words = {item.arg: ast.unparse(item.value) for item in node.keywords}
            if words.get("shell", "False") != "False":
                yield f"{name}(shell={words['shell']})"
            if name in ("yaml.load", "yaml.parse") and words.get("Loader") not in SAFE_LOADERS:
                yield f"{name}(Loader={words.get('Loader')})"


def test_no_source_runs_what_it_reads() -> None:
    trees = list(sources())
    assert {f"{path}: {fault}" for path, tree in trees for fault in faults(tree)} == set()
    assert len(trees) > 300


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "subprocess.run(words, shell=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text)",
        "os.system(command)",
        "torch.load(path)",
    ],
)
def test_the_search_sees_each(text: str) -> None:
    assert list(faults(ast.parse(text)))


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!!python/module:os", "!x"]
)
def test_tags_of_yaml_make_nothing(tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"a: {tag} [touch pwned]\n"
    for read in (lambda: parse_yaml(text, "file"), lambda: parse(f"- {text}")):
        with pytest.raises(InputError):
            read()
    for target in (reader.target for reader in READERS):
        with pytest.raises(InputError):
            reader_of(target).read(f"distributed_type: FSDP\n{text}", LaunchContext())
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_yaml_that_are_too_long_to_print() -> None:
    with pytest.raises(InputError, match="a number of 5,002 digits"):
        parse_yaml(f"a: 0x{'f' * 5000}", "file")


@pytest.mark.parametrize("deed", ["$(touch pwned)", "`touch pwned`", "; touch pwned", "${X:-$(touch pwned)}"])
def test_scripts_are_followed_and_not_run(deed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = f"X={deed}\n{deed}\neval {deed}\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers {deed}\n"
    with pytest.raises(InputError):
        reader_of("megatron-lm").read(script, LaunchContext(folder=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    open_ended = [text for text in project["dependencies"] if not re.fullmatch(r"[a-z]+>=[\d.]+,<[\d.]+", text)]
    assert open_ended == []
