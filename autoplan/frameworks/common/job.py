"""Jobs that targets hand to launchers: the command of every device, its environment and the files that it reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from autoplan.frameworks.common.rules import Rule
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.optimizers import OptimizerName
from autoplan.spec.plan_file import PlanFile

Line = list[str]  # words that stand on one line of a script


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchVariable:
    """Variable that a person may set in the environment; without a `default` it must be set."""

    name: str
    default: str | None
    note: str
    counts_steps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentVariable:
    """A variable of the environment that the job relies on; a `value` of None takes it out."""

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
    """File of a set: a plain name, no path, and its text."""

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
    """A framework that plans are written for.

    `job` makes the job of a plan file for one of the `versions`, the default first, and refuses what the framework
    cannot express with an `InputError` that gives the reason.  The default version can express every plan that keeps to
    the `limits` beside the rules of its framework, if the model and the training can be expressed at all.
    """

    name: str
    title: str  # the framework by its usual name
    rules: tuple[str, ...]  # plans priced for frameworks with these rules are taken
    job: Callable[[PlanFile, str], Job]
    versions: tuple[str, ...] = ("",)
    limits: tuple[Rule, ...] = ()
    # Says what of a fine-tuning it cannot express, as a noun, or nothing; None: it trains all weights.
    refused_tuning: Callable[[FineTuning], str] | None = None
    unequal_batches: bool = False  # whether replicas may take unlike numbers of micro-batches
    optimizers: tuple[OptimizerName, ...] = ("adam",)  # that it can be told to take


def safe_name(text: str) -> str:
    """`text` cut down to a name that every scheduler takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:48] or "autoplan"
