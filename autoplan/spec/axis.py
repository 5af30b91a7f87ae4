"""Axis of a plan: what its row in the table of `spec/axes.py` says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from autoplan.base.errors import InputError
from autoplan.base.values import parse_count
from autoplan.spec.enums import CodedEnum, Precision, members

MAX_DEGREE = 10**6
MAX_TYPED = 9_999_999

Value = CodedEnum | bool


class Kind(Enum):
    """Type of the values of an axis."""

    COUNT = "a whole number"
    FLAG = "on or off"
    WORD = "a member of an enumeration"
    LIST = "several values, or none"


class Degrees(Protocol):
    """Anything with the degrees of a plan."""

    @property
    def tp(self) -> int: ...  # noqa: D102
    @property
    def cp(self) -> int: ...  # noqa: D102
    @property
    def pp(self) -> int: ...  # noqa: D102
    @property
    def ep(self) -> int: ...  # noqa: D102
    @property
    def etp(self) -> int: ...  # noqa: D102
    @property
    def dp(self) -> int: ...  # noqa: D102


class Needs(Enum):
    """Conditions on the degrees without which an axis has no effect, in the order in which changes are listed."""

    NOTHING = "nothing"
    EXPERTS = "experts"
    SPLIT_EXPERTS = "experts, and ranks over which each may be split"
    SPREAD_EXPERTS = "experts spread over ranks"
    LATENTS = "latent attention"
    TENSOR_RANKS = "tp > 1"
    CONTEXT_RANKS = "cp > 1"
    STAGES = "pp > 1"
    STAGES_AND_REPLICAS = "pp > 1 and dp > 1"
    COPIES = "parameters that several ranks hold"

    @property
    def order(self) -> int:
        """The place among the conditions."""
        return list(Needs).index(self)

    def can_be_met(self, *, has_experts: bool, has_latents: bool) -> bool:
        """Return whether the axis has an effect for some degrees, given the parts of the model."""
        if self in (Needs.EXPERTS, Needs.SPLIT_EXPERTS, Needs.SPREAD_EXPERTS):
            return has_experts
        return has_latents or self is not Needs.LATENTS

    def are_met(self, degrees: Degrees, *, has_experts: bool, has_latents: bool) -> bool:
        """Return whether the axis has an effect with these degrees, given the parts of the model."""
        if not self.can_be_met(has_experts=has_experts, has_latents=has_latents):
            return False
        match self:
            case Needs.SPLIT_EXPERTS:
                return degrees.tp > 1 or degrees.etp > 1
            case Needs.SPREAD_EXPERTS:
                return degrees.ep > 1
            case Needs.TENSOR_RANKS:
                return degrees.tp > 1
            case Needs.CONTEXT_RANKS:
                return degrees.cp > 1
            case Needs.STAGES:
                return degrees.pp > 1
            case Needs.STAGES_AND_REPLICAS:
                return degrees.pp > 1 and degrees.dp > 1
            case Needs.COPIES:
                return degrees.dp * degrees.cp > 1 or (has_experts and degrees.tp > degrees.ep * degrees.etp)
            case _:
                return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Row of the table.  `name` is the name of the field in a plan, a batch and a plan file."""

    name: str
    kind: Kind
    help: str  # of its flag in `autoplan estimate`
    default: object = None  # as in `ParallelPlan`
    most: int = 10**9  # of a count, in any plan
    needs: Needs = Needs.NOTHING
    precisions: tuple[Precision, ...] = tuple(Precision)  # of the products beside which it means something
    label: str = ""  # on screen, where the name does not say it
    phrases: Mapping[Value, str] = field(default_factory=dict, hash=False)  # of values, in descriptions of plans
    change: str | None = None  # the change of a plan that holds it, where it is not one by itself; "": none does
    searched: tuple[Value, ...] = ()  # words or flags that a search tries where the framework offers them, plain first
    # Values between which the numerics of training do not change: all of them are searched unasked.  None: any.
    exact: tuple[Value, ...] | None = None
    # Values in `searched` take no more time or memory the later they stand: a search takes the last that a plan admits.
    is_monotone: bool = False
    # Of what few frameworks offer, beyond the default: which, by the names of their rules.
    offered_by: tuple[str, ...] = ()
    of_kernels: bool = False  # whether times of kernels depend on it
    of_memory: bool = True  # whether states or stored activations of a rank, which bounds count, depend on it
    elsewhere: str = ""  # where it is said, if not by --fix
    flag: str | None = None  # of `autoplan estimate`, where it is not the name with dashes; "": none
    flag_default: object = ...  # where it is not the default: None follows from other axes
    metavar: str | None = None

    @property
    def enum(self) -> type[CodedEnum] | None:
        """Enumeration of the values of a word axis."""
        return type(self.default) if isinstance(self.default, CodedEnum) else None

    def can_matter(self, precision: Precision, *, has_experts: bool, has_latents: bool) -> bool:
        """Return whether the axis can have an effect in this precision and with these parts of a model."""
        return precision in self.precisions and self.needs.can_be_met(has_experts=has_experts, has_latents=has_latents)

    def usual(self, value: Value) -> tuple[Value, ...]:
        """Return the values that a search tries by default if `value` is the framework's default."""
        if self.exact is None:
            return self.searched
        return tuple(word for word in self.searched if word in self.exact) if value in self.exact else (value,)

    @property
    def is_column(self) -> bool:
        """Return whether a batch has an array with one number per plan for this axis."""
        return self.kind is not Kind.LIST and self.name != "dp"

    @property
    def can_be_bounded(self) -> bool:
        """Return whether a search can limit the axis with --max."""
        return self.kind is Kind.COUNT and not self.elsewhere

    @property
    def changed_as(self) -> str:
        """Name of the plan change that includes this axis."""
        return self.name if self.change is None else self.change

    @property
    def spelled(self) -> str:
        """Flag in `autoplan estimate`; empty if there is none."""
        return f"--{self.name.replace('_', '-')}" if self.flag is None else self.flag

    def code(self, value: object) -> int:
        """Return the code of a value in a batch."""
        return value.code if isinstance(value, CodedEnum) else int(value)  # type: ignore[call-overload]

    def value(self, code: int) -> int | Value:
        """Return the value of a code in a batch."""
        if enum := self.enum:
            return members(enum)[code]
        return bool(code) if self.kind is Kind.FLAG else int(code)

    def word(self, value: Value | str) -> Value:
        """Return the member of the enumeration that a text names; a flag is what it is."""
        return self.enum(str(value)) if self.enum else bool(value)

    def parse(self, text: str, option: str) -> int | Value:
        """Parse a value from `text`; an `InputError` begins with the name of the `option`."""
        if self.kind is Kind.COUNT:
            count = parse_count(text, option) if re.fullmatch(r"[0-9]{1,7}[kKmM]?", text) else 0
            if 1 <= count <= MAX_TYPED:
                return count
            raise InputError(f"{option} {self.name}={text}: must be a whole number from 1 to {MAX_TYPED}")
        if self.kind is Kind.FLAG:
            if text in ("on", "off", "true", "false"):
                return text in ("on", "true")
            raise InputError(f"{option} {self.name}={text}: must be one of on, off")
        words = tuple(self.enum or ())
        for word in words:
            if word.replace("_", "-") == text.replace("_", "-"):
                return word
        raise InputError(f"{option} {self.name}={text}: must be one of {', '.join(words)}")
