"""Registry of the frameworks, one row each; rules, exporters, readers, log readers and facts are found through it.

A framework is a folder next to this module, which may contain

    rules.py     BOOK: rules on the plans that it supports
    export.py    TARGET: export of launch files
    read.py      READER: reader of its launch files
    log.py       LOG: reader of its log lines
    facts/       a TOML file of traits for each of its versions

Names are available without imports, as the command-line help needs them; modules are imported on first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from autoplan.base.errors import InputError
from autoplan.base.names import close_names
from autoplan.spec.axes import AXES

if TYPE_CHECKING:
    from autoplan.frameworks.common.job import Target
    from autoplan.frameworks.common.launch import Reader
    from autoplan.frameworks.common.log_lines import LogFormat
    from autoplan.frameworks.common.rules import Rule, Rulebook
    from autoplan.spec.framework import Framework

T = TypeVar("T")

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Folder of a framework: the name of its rules in facts, its export target, and the id of the facts for planning.

    `logs` are the frameworks that may write the log of a launch file for the target, if not every framework may.
    `distributions` are the names of the Python distributions that install it; `also` names programs that it starts.
    """

    folder: str
    rules: str = ""
    target: str = ""
    facts: str = ""
    logs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    distributions: Mapping[str, str] = field(default_factory=dict)

    def has(self, module: str) -> bool:
        """Return whether the folder contains a module of that name."""
        return (HERE / self.folder / f"{module}.py").is_file()


# fmt: off
FRAMEWORKS = (  # in the order in which they are tried for a log
    Entry(folder="megatron_lm", rules="megatron-lm", target="megatron-lm", facts="megatron-core",
          logs=("Megatron-LM", "MLPerf"), distributions={"Megatron-Core": "megatron-core"}),
    Entry(folder="megatron_bridge", target="megatron-bridge", facts="nemo",
          logs=("Megatron-LM", "MLPerf"), distributions={"Megatron-Bridge": "megatron-bridge", "NeMo": "nemo-toolkit"}),
    Entry(folder="primus", rules="primus", target="primus", facts="primus",
          logs=("Megatron-LM", "torchtitan", "MLPerf"), distributions={"Primus": "primus"}),
    Entry(folder="torchtitan", rules="torchtitan", target="torchtitan", facts="torchtitan",
          logs=("torchtitan",), distributions={"torchtitan": "torchtitan"}),
    Entry(folder="nanotron", rules="nanotron", target="nanotron", facts="nanotron",
          logs=("nanotron",), distributions={"nanotron": "nanotron"}),
    Entry(folder="deepspeed", rules="deepspeed", target="deepspeed", facts="deepspeed-zero",
          logs=("DeepSpeed", "HF Trainer", "Megatron-LM"), distributions={"DeepSpeed": "deepspeed"}),
    Entry(folder="gpt_neox", target="gpt-neox", facts="megatron-deepspeed", logs=("Megatron-LM", "DeepSpeed"),
          distributions={"GPT-NeoX": "gpt-neox"}),
    Entry(folder="fsdp2", rules="fsdp2", target="fsdp2", facts="pytorch-fsdp"),
    Entry(folder="accelerate", rules="accelerate", target="accelerate", facts="pytorch-fsdp",
          logs=("HF Trainer", "DeepSpeed"), distributions={"accelerate": "accelerate"}),
    Entry(folder="hf_trainer", target="hf-trainer", facts="transformers", logs=("HF Trainer", "DeepSpeed"),
          also=("trl",)),
    Entry(folder="llama_factory", target="llama-factory", facts="transformers", logs=("HF Trainer", "DeepSpeed")),
    Entry(folder="axolotl", target="axolotl", facts="transformers", logs=("HF Trainer", "DeepSpeed")),
    Entry(folder="ms_swift", target="ms-swift", facts="megatron-core"),
    Entry(folder="verl", target="verl", facts="megatron-core", distributions={"verl": "verl"}),
    Entry(folder="automodel", rules="automodel", target="automodel", facts="nemo-automodel",
          distributions={"NeMo AutoModel": "nemo-automodel"}),
    Entry(folder="maxtext", rules="maxtext", target="maxtext", facts="maxtext", distributions={"MaxText": "maxtext"}),
    Entry(folder="mlperf"),
    Entry(folder="trainer", rules="trainer", target="autoplan", facts="torch"),
    Entry(folder="others", rules="unknown"),
)
# fmt: on


class Modules(Mapping[str, T], Generic[T]):
    """Objects defined by the modules of one kind, by name."""

    def __init__(self, module: str, attribute: str, folders: dict[str, str]) -> None:
        self._module, self._attribute, self._folders = module, attribute, folders

    def __getitem__(self, name: str) -> T:
        defined: T = getattr(import_module(f"{__package__}.{self._folders[name]}.{self._module}"), self._attribute)
        return defined

    def __iter__(self) -> Iterator[str]:
        return iter(self._folders)

    def __len__(self) -> int:
        return len(self._folders)


BOOKS: Modules[Rulebook] = Modules("rules", "BOOK", {entry.rules: entry.folder for entry in FRAMEWORKS if entry.rules})
_EXPORTED = sorted((entry for entry in FRAMEWORKS if entry.target), key=lambda entry: entry.target)
TARGETS: Modules[Target] = Modules(
    "export", "TARGET", {entry.target: entry.folder for entry in _EXPORTED if entry.has("export")}
)
READERS: Modules[Reader] = Modules(
    "read", "READER", {entry.target: entry.folder for entry in _EXPORTED if entry.has("read")}
)
LOGS: Modules[LogFormat] = Modules(
    "log", "LOG", {entry.folder: entry.folder for entry in FRAMEWORKS if entry.has("log")}
)


def book_of(framework: Framework) -> Rulebook:
    """Return the rules of `framework`."""
    check_rules(framework)
    lacks = framework.lacks
    if framework.offers is not None:
        lacks += tuple(name for name in BOOKS[framework.rules].extras if name not in framework.offers)
    return _without(framework.rules, lacks, framework.interleaves_mamba)


@cache
def _without(rules: str, lacks: tuple[str, ...], interleaves_mamba: bool) -> Rulebook:
    """Return the rules of a version that lacks some options, or values of them, that other versions offer."""
    from autoplan.frameworks.common.universal_rules import ONE_CHUNK_OF_MAMBA, options_lacked, words_left

    book = BOOKS[rules]
    if not lacks and interleaves_mamba:
        return book
    axes = {text for text in lacks if "=" not in text} - {
        axis.name for axis in AXES if axis.offered_by and axis.name not in book.extras
    }
    pairs = (text.partition("=") for text in lacks if "=" in text)
    narrowed = words_left(book, ((axis, word) for axis, _, word in pairs))
    return replace(
        book,
        rules=book.rules
        + options_lacked(axes)
        + tuple(words.rule() for words in narrowed)
        + (() if interleaves_mamba else (ONE_CHUNK_OF_MAMBA,)),
        supported=(*narrowed, *book.supported),
        extras=tuple(option for option in book.extras if option not in axes),
        shards_over_part=book.shards_over_part and "dp_replicate" not in axes,
        repeats_parts=book.repeats_parts and "recompute_modules" not in axes,
        repeats_some_layers=book.repeats_some_layers and "recompute_num_layers" not in axes,
    )


def check_rules(framework: Framework) -> None:
    """Raise an error for a framework whose rules have an unknown name."""
    if framework.rules not in BOOKS:
        raise InputError(f"rules must be one of {', '.join(BOOKS)}, got {framework.rules[:40]!r}")


def facts_of(target: str) -> str:
    """Return the id of the facts to plan with for a target."""
    return next(entry.facts for entry in FRAMEWORKS if entry.target == target)


def facts_of_version(to: str) -> str:
    """Return the id of the facts to plan with for NAME or NAME@VERSION of a target: those of its version, if any."""
    name, _, version = usual_target(to).partition("@")
    return versions_of(facts_of(name)).get(version, facts_of(name))


def target_of(facts: str) -> str:
    """Return the target of the folder that contains the facts; blank for a user's own file or without a target."""
    folder = facts_files()[facts].parents[1].name if facts in facts_files() else ""
    return next((entry.target for entry in FRAMEWORKS if entry.folder == folder), "")


def target_called(framework: object) -> str | None:
    """Return the target that a framework is named after, if its facts come from another framework."""
    name = framework if isinstance(framework, str) and framework in TARGETS else None
    return name if name is not None and target_of(facts_of(name)) != name else None


def usual_target(to: str) -> str:
    """Return NAME or NAME@VERSION with the target's own name for that of its facts or of a program that it starts."""
    name, at, version = to.partition("@")
    known = (entry.target for entry in _EXPORTED if entry.has("export") and name in (entry.facts, *entry.also))
    return (name if name in TARGETS else next(known, name)) + at + version


def find_target(to: str, framework: Framework | None = None) -> Target:
    """Return the target NAME in its default version, or NAME@VERSION; the name may be any of `usual_target`.

    Raises InputError with the known targets, or if the target does not run plans of `framework`.
    """
    name, at, version = usual_target(to).partition("@")
    if name not in TARGETS:
        close = close_names(name, TARGETS)
        meant = f"did you mean {', '.join(close)}? " * bool(close)
        raise InputError(f"unknown target {name[:40]!r}: {meant}known are {', '.join(TARGETS)}")
    target = TARGETS[name].at(version if at else TARGETS[name].versions[0])
    if framework is not None and framework.rules not in target.rules:
        raise InputError(
            f"the plan was made for {framework.name}, not for {target.title}: "
            f"search with --framework {name} for a plan that it can run"
        )
    return target


def rules_for(framework: Framework, to: str = "") -> tuple[Rule, ...]:
    """Return the rules of plans under `framework`, with those of the target `to` if given."""
    return book_of(framework).rules + (find_target(to, framework).limits if to else ())


@cache
def facts_files() -> dict[str, Path]:
    """Return the files of facts by their ids, in alphabetical order."""
    files = {path.stem: path for entry in FRAMEWORKS for path in (HERE / entry.folder / "facts").glob("*.toml")}
    return dict(sorted(files.items()))


def names_of(facts: str) -> tuple[str, ...]:
    """Return the names of a framework: the id of its facts, the targets planned with them, and programs these start."""
    names = (name for entry in FRAMEWORKS if entry.facts == facts for name in (entry.target, *entry.also))
    return (facts, *(name for name in names if name not in ("", facts)))


def versions_of(facts: str) -> dict[str, str]:
    """Return the ids of the facts for other versions of a framework, by version: "nemo-25.09" by 25.09."""
    return {
        version_name.removeprefix(f"{name}-"): version_name
        for name in names_of(facts)
        for version_name in facts_files()
        if re.match(rf"{re.escape(name)}-\d", version_name)
    }
