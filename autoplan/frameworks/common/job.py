"""Jobs that targets pass to launchers: the command per device, its environment and its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autoplan.base.errors import InputError
from autoplan.frameworks.common.rules import Rule
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.optimizers import OptimizerName
from autoplan.spec.plan_file import PlanFile

Line = list[str]  # words that stand on one line of a script


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchVariable:
    """Environment variable that the user may set; without a `default` it is required."""

    name: str
    default: str | None
    note: str
    counts_steps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentVariable:
    """An environment variable that the job relies on; a `value` of None unsets it."""

    name: str
    value: str | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionGroup:
    """A bash array of options: its name, what it holds, its lines."""

    name: str
    note: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """File of a job: a plain name without a path, and its text."""

    name: str
    text: str
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Program started on every device.  `program` and `trailing` are shell words with expansions, quoted by hand.

    `replaceable` is a group that a variable of that name with `_ARGS` in the environment replaces as a whole.
    """

    framework: str
    environment: tuple[EnvironmentVariable, ...] = ()
    variables: tuple[LaunchVariable, ...]
    program: str
    groups: tuple[OptionGroup, ...] = ()
    replaceable: OptionGroup | None = None
    trailing: tuple[str, ...] = ()
    files: tuple[File, ...] = ()  # that lie beside the launch file; "$HERE" in a program is their folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Export target: a framework that launch files are written for.

    `job` makes the job of a plan file for one of the `versions`, the default first, and refuses what the framework
    cannot express with an `InputError` that gives the reason.  The default version can express every plan that keeps to
    the `limits` beside the rules of its framework, if the model and the training can be expressed at all; another one
    those that keep to its `other_limits`, where it has any, instead of these.
    """

    name: str
    title: str  # the framework by its usual name
    rules: tuple[str, ...]  # plans priced for frameworks with these rules are taken
    job: Callable[[PlanFile, str], Job]
    versions: tuple[str, ...] = ("",)
    limits: tuple[Rule, ...] = ()
    other_limits: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)  # by version, where they are others
    # Says what of a fine-tuning it cannot express, as a noun, or nothing; None: it trains all weights.
    refused_tuning: Callable[[FineTuning], str] | None = None
    unequal_batches: bool = False  # whether replicas may have unlike micro-batches
    unequal_tp: tuple[str, ...] = ()  # versions in which stages may have unlike tensor-parallel degrees
    optimizers: tuple[OptimizerName, ...] = ("adam",)  # that it can be told to take

    @property
    def spellings(self) -> tuple[str, ...]:
        """Its name with each of its versions, NAME@VERSION, the default first; the name alone where it has none."""
        return tuple(f"{self.name}@{version}" if version else self.name for version in self.versions)

    @property
    def takes_unequal_tp(self) -> bool:
        """Whether stages may have unlike tensor-parallel degrees, if all replicas are of one kind."""
        return self.versions[0] in self.unequal_tp

    def at(self, version: str) -> Target:
        """Return the target restricted to one of its versions."""
        if version not in self.versions:
            remedy = f"known are {', '.join(self.spellings)}" if any(self.versions) else "leave the version out"
            raise InputError(f"no version {version[:40]!r} of {self.title}: {remedy}")
        return replace(self, versions=(version,), limits=self.other_limits.get(version, self.limits))


def safe_name(text: str) -> str:
    """`text` cut down to a name that every scheduler takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:48] or "autoplan"
