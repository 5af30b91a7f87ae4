"""Launch files of frameworks, parsed into model, training and plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoplan.spec.lengths import UNEVEN, Batching
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """Context of a launch file: values from the user, which override the file.

    Some formats contain no model or no number of devices.  `variables` are shell variables by name; `folder` contains
    the files next to the script; `assumed` decides a condition that only a running shell knows.
    """

    model: ModelSpec | None = None
    num_devices: int | None = None
    devices_per_node: int | None = None
    seq_len: int | None = None
    has_lengths: bool = False  # of samples
    variables: tuple[tuple[str, str], ...] = ()
    folder: Path | None = None
    assumed: tuple[str, bool] | None = None  # an undecided condition of a script, and whether it holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """An option that was not understood, with its value and the reason; `matters` if it may affect time or memory."""

    option: str
    value: str
    why: str
    matters: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent(Unread):
    """An option that only the checks of every format look at, such as one that costs nothing."""

    matters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The run in a launch file.  `options` are the options that plan, model and training were read from, as written.

    Silent ones among `unread` are kept apart.
    """

    target: str  # by its name among the targets of export
    framework: str  # by the name of its preset
    model: ModelSpec
    training: TrainingSpec
    plan: ParallelPlan
    options: tuple[tuple[str, str], ...] = ()
    unread: tuple[Unread, ...] = ()
    silent: tuple[Silent, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "silent", (*self.silent, *(item for item in self.unread if isinstance(item, Silent))))
        object.__setattr__(self, "unread", tuple(item for item in self.unread if not isinstance(item, Silent)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reader of a target's files, recognised by name and text; InputError says what is wrong."""

    target: str
    recognises: Callable[[str, str], bool]
    read: Callable[[str, LaunchContext], Launch]  # of the text
    # Whether a script that no reader recognises starts a program in its folder that this one follows.
    starts: Callable[[str, LaunchContext], bool] = lambda text, context: False
    # Names for a file of the user's own, of which the options are given, of an option in an exported file.
    name_in: Callable[[str, Mapping[str, str]], str] = lambda option, options: option


def priced_as_even(batching: Batching, context: LaunchContext) -> str:
    """Describe how samples of unknown length are priced; empty if the lengths are known or do not matter."""
    if context.has_lengths:
        return ""
    if batching == "packed":
        return "samples are packed, and attention is priced over the whole sequence: pass --lengths"
    if batching in UNEVEN and context.seq_len is None:
        return (
            "sequences are not packed, and shorter than that: priced as all of this length; pass --lengths, or "
            "--seq-len their mean"
        )
    return ""
