from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.frameworks import registry
from autoplan.frameworks.common.rules import Rulebook, broken
from autoplan.frameworks.presets import framework_schema, load_framework
from autoplan.readers.model import load_model
from autoplan.spec.framework import GROUP_OF, GROUPS
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec
from autoplan.spec.workload import Workload


def test_a_framework_that_extends_another_differs_in_what_it_says() -> None:
    base, later = load_framework("nemo"), load_framework("nemo-24.07")
    differ = {f.name for f in dataclasses.fields(base) if getattr(base, f.name) != getattr(later, f.name)}
    assert differ == {
        "name",
        "calibrated_as",
        "sources",
        "usual",
        "lacks",
        "offers",
        "interleaves_mamba",
        "memory",
        "kernels",
    }
    traits = {trait for trait in GROUP_OF if base.trait(trait) != later.trait(trait)}
    assert traits == {"bytes_per_optimizer_state", "flash_kernel", "fused_squared_relu"}
    assert later.calibration_name == "nemo"


def test_a_file_may_extend_a_shipped_framework(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nextends = "torchtitan"\n[kernels]\nflash_kernel = "cudnn"\n')
    base, mine = load_framework("torchtitan"), load_framework(str(path))
    expected = dataclasses.replace(base, name="mine", calibrated_as="torchtitan").changed(flash_kernel="cudnn")
    assert mine == expected


def test_what_was_fitted_is_inherited_unless_it_is_stated_anew(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nextends = "nemo"\n[experts]\nnarrow_sync_s = 1e-3\ns_per_local_expert = 1e-5\n')
    assert set(load_framework("nemo").fitted) - set(load_framework(str(path)).fitted) == {
        "narrow_sync_s",
        "s_per_local_expert",
    }
    path.write_text(
        'fitted = ["step_overhead_s", "narrow_sync_s"]\n' + path.read_text() + "[host]\nstep_overhead_s = 1e-2\n"
    )
    assert load_framework(str(path)).fitted == (
        "host_s_per_launch",
        "kernel_bytes_factor",
        "step_overhead_s",
        "narrow_sync_s",
    )


def test_every_trait_has_a_name_of_its_own() -> None:
    assert len(GROUP_OF) == sum(len(dataclasses.fields(kind)) for kind in GROUPS.values())


@pytest.mark.parametrize("name", ["nothing", "nemo-24.07"])
def test_only_whole_shipped_frameworks_are_extended(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nextends = "{name}"\n')
    with pytest.raises(InputError, match=rf"mine.toml: extends '{name}', which must be one of .*nemo, "):
        load_framework(str(path))


def test_the_schema_of_a_framework_lets_it_extend_another() -> None:
    described = framework_schema()["$defs"]["Framework"]["properties"]["extends"]
    assert "nemo" in described["enum"]
    assert "nemo-26.06" not in described["enum"]


def test_rules_that_no_folder_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nrules = "megatron"\n')
    with pytest.raises(InputError, match=r"mine\.toml: rules must be one of megatron-lm, .*, got 'megatron'"):
        load_framework(str(path))


def test_every_folder_has_a_line_and_every_line_what_it_says() -> None:
    folders = {path.name for path in registry.HERE.iterdir() if (path / "__init__.py").is_file()} - {"common"}
    logs = {log.name for log in registry.LOGS.values()}
    assert folders == {entry.folder for entry in registry.FRAMEWORKS}
    for entry in registry.FRAMEWORKS:
        assert set(entry.logs) <= logs
        assert bool(entry.rules) == entry.has("rules")
        assert bool(entry.target) == (entry.has("export") or entry.has("read"))
        if entry.rules:
            assert isinstance(registry.BOOKS[entry.rules], Rulebook)
        if entry.has("export"):
            assert registry.TARGETS[entry.target].name == entry.target
        if entry.has("read"):
            assert registry.READERS[entry.target].target == entry.target
        assert bool(entry.facts) == bool(entry.target)
        if entry.has("export"):
            assert load_framework(entry.facts).rules in registry.TARGETS[entry.target].rules
    assert len(registry.facts_files()) == len(list(registry.HERE.glob("*/facts/*.toml")))


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("nemo", "nemo"),
        ("megatron-bridge", "nemo"),
        ("megatron-bridge@25.09", "nemo-25.09"),
        ("nemo-25.09", "nemo-25.09"),
        ("megatron-lm", "megatron-core"),
        ("megatron-lm@2021.07", "megatron-lm-2021.07"),
        ("megatron-core@0.8", "megatron-core-0.8"),
        ("deepspeed@2021", "deepspeed-2021"),
        ("fsdp2", "pytorch-fsdp"),
        ("axolotl", "transformers"),
        ("torchtitan@0.1", "torchtitan-0.1"),
    ],
)
def test_a_framework_goes_by_its_name_that_of_a_target_and_a_version(text: str, facts: str) -> None:
    assert load_framework(text).name == facts


@pytest.mark.parametrize("to", registry.TARGETS)
def test_a_target_takes_the_plans_of_the_framework_of_its_name(to: str) -> None:
    assert registry.find_target(to, load_framework(to)).name == to
    assert load_framework(registry.facts_of(to)) == load_framework(to)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nemo@27", "no version '27' of nemo: known are 23.06, 24.07, 25.04, 25.09, 26.06, and the present one"),
        ("nanotron@", "no version '' of nanotron: only the present one is known, which nanotron alone names"),
        ("megatron-brigde", "unknown framework 'megatron-brigde': did you mean megatron-bridge"),
    ],
)
def test_a_name_or_version_that_is_unknown_is_refused_with_those_known(text: str, says: str) -> None:
    with pytest.raises(InputError) as refused:
        load_framework(text)
    assert says in str(refused.value)


def test_names_of_targets_are_known_before_any_module_is_imported() -> None:
    code = "import sys; from autoplan.frameworks.registry import TARGETS; print(*TARGETS, *sys.modules)"
    words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"megatron-lm", "autoplan"} <= set(words)
    assert not [name for name in words if name.startswith("autoplan.frameworks.") and name.count(".") > 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('lacks = ["zero2"]', "lacks names no option: zero2"),
        ('lacks = ["sharding=zero4"]', "lacks sharding=zero4: must be one of"),
        ('usual = ["tp=8"]', "usual names no option of few frameworks: tp"),
    ],
)
def test_what_a_file_lacks_are_options_and_their_words(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nextends = "nemo"\n{line}\n')
    with pytest.raises(InputError, match=message):
        load_framework(str(path))


def test_chunks_of_mamba_layers_are_those_of_later_versions() -> None:
    hybrid = load_model("nemotron-h-56b")
    plan = ParallelPlan(global_batch=64, tp=8, sp=True, pp=2, vp=2, schedule="interleaved", dp_shard=4)
    training = TrainingSpec(seq_len=4096, precision="bf16")
    workload = Workload(model=hybrid, training=training, num_devices=plan.num_devices)
    for name, is_told in (("nemo-25.09", True), ("nemo", False)):
        says = broken(registry.book_of(load_framework(name)).rules, workload, plan)
        assert any("vp 2 of a model with Mamba layers" in text for text in says) == is_told
