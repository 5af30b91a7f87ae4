"""Kinds of rows in the option table of Megatron-Core, and writing and reading of lines of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.frameworks.common.option_table import Fields, Option, Row, Value
from autoplan.frameworks.common.option_table import written as table_written
from autoplan.frameworks.common.options import Options, typed
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile

BRIDGE = "bridge"  # the notation of Megatron-Bridge (067f987)
TRAIN, DDP, DIST, OPTIMIZER = ({BRIDGE: section} for section in ("train.", "ddp.", "dist.", "optimizer."))


@dataclass(slots=True, kw_only=True)
class Reading:
    """State of reading arguments: the model (or the model to start from), and the fields of the plan so far."""

    arguments: Options
    model: ModelSpec | None
    seq_len: int
    fields: Fields = field(default_factory=dict)
    training: Fields = field(default_factory=dict)  # of its `TrainingSpec`


@dataclass(frozen=True, slots=True)
class Special(Option):
    """Options that set several fields together: a function that writes them and one that reads them."""

    write: Callable[[PlanFile], dict[str, Value]]
    read: Callable[[Reading], Fields] | None = None
    companions: tuple[Option, ...] = ()


Line = tuple[Option, ...]  # options on one line of a script


@dataclass(frozen=True, slots=True)
class Part:
    """Group of option lines in a script, with its name and a note on its content."""

    name: str
    note: str
    lines: tuple[Line, ...]


def switches(*keys: str) -> tuple[Option, ...]:
    """Return additional switches of a `Special`."""
    return tuple(Option(key, is_switch=True) for key in keys)


def valued(*keys: str) -> tuple[Option, ...]:
    """Return additional options with values of a `Special`."""
    return tuple(Option(key) for key in keys)


# -- names and notations ----------------------------------------------------------------------------------------------

# Options whose argument has another name.
_ARGUMENTS = {
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "layernorm_epsilon": "norm_epsilon",
    "rope_fusion": "apply_rope_fusion",
    "overlap_p2p_communication": "overlap_p2p_comm",
    "bias_linear": "add_bias_linear",
    "position_embedding": "add_position_embedding",
    "use_custom_fsdp": "use_megatron_fsdp",
    "use_nccl_ub": "nccl_ub",
}
# Options whose argument keeps the "no" or "disable" that it begins with.
_ARE_NO = (
    *("no_save_optim", "no_save_rng", "no_load_optim", "no_load_rng", "no_persist_layer_norm"),
    *("disable_parameter_transpose_cache", "disable_symmetric_registration", "disable_msc", "disable_jit_fuser"),
    *("disable_bf16_reduced_precision_matmul", "disable_straggler_on_startup"),
)


def argument_of(option: str, values: Sequence[str]) -> tuple[str, Value]:
    """Return name and value of the argument set by an option: a switch is on, or off with the prefix "no-"."""
    key = option.removeprefix("--").replace("-", "_")
    on = True
    if key.startswith(("no_", "disable_")) and key not in _ARE_NO and not values:
        key, on = key.partition("_")[2], False
    key = _ARGUMENTS.get(key, key)
    if not values:
        return key, on
    return key, values[0] if len(values) == 1 else list(values)


def flat(options: Iterable[Option]) -> Iterator[Option]:
    """Return options, including the additional ones of every `Special`."""
    for option in options:
        yield option
        yield from option.companions if isinstance(option, Special) else ()


def written(option: Option, plan_file: PlanFile) -> dict[str, Value]:
    """Return the options written by a row; switches that are on are True, and those turned off begin with "no"."""
    values = option.write(plan_file) if isinstance(option, Special) else table_written((option,), plan_file)
    if option.is_on and isinstance(option, Row):
        return {} if values.get(option.key, True) else {f"no_{option.key}": True}
    return {key: value for key, value in values.items() if value is not None and value is not False}


def rows(lines: Iterable[Line]) -> Iterator[Row]:
    """Return the options of some lines that set one field each."""
    return (option for line in lines for option in line if isinstance(option, Row))


def words(line: Line, plan_file: PlanFile) -> list[str]:
    """Return a line of options as command-line words."""
    result: list[str] = []
    for option in line:
        for key, value in written(option, plan_file).items():
            values = [] if value is True else value if isinstance(value, list) else [value]
            result += [f"--{key.replace('_', '-')}", *map(str, values)]
    return result


def arguments_of(parts: Iterable[Part], plan_file: PlanFile) -> dict[str, Value]:
    """Return the arguments set by options, with numbers converted."""
    result: dict[str, Value] = {}
    for option in (option for part in parts for line in part.lines for option in line):
        for name, value in written(option, plan_file).items():
            key, is_on = argument_of(name, () if value is True else ("",))
            result[key] = is_on if value is True else typed(value)
    return result


def switched_otherwise(
    lines: Iterable[Line], defaults: Mapping[str, Value], arguments: Mapping[str, Value]
) -> dict[str, Value]:
    """Return the switches that a plan leaves as Megatron-LM has them, where the `defaults` of a program are others."""
    switches = (option for line in lines for option in line if option.is_switch and option.key not in arguments)
    return {option.key: option.is_on for option in switches if defaults.get(option.key, option.is_on) != option.is_on}


def read_lines(lines: Iterable[Line], reading: Reading, base: object | None = None) -> None:
    """Read the rows of some lines; `base` provides the defaults of their fields."""
    for line in lines:
        for option in line:
            if isinstance(option, Row):
                reading.fields |= option.read(reading.arguments, base)
            elif isinstance(option, Special) and option.read is not None:
                reading.fields |= option.read(reading)
