"""Plans found by a search, the proof that none is better, and the confidence in the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from autoplan.base.errors import InputError
from autoplan.base.units import check_positive
from autoplan.spec.estimate import Verdict
from autoplan.spec.plan import ParallelPlan

Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Proof that no plan is better: what was neither priced nor too large has a bound (`search.bounds`) no better."""

    cells: int
    expanded: int  # cells of which plans were bounded one by one
    plans: int  # in all cells, before the rules of the framework
    bounded: int
    priced: int
    fitting: int  # of those priced
    risky: int
    best_step_s: float | None
    least_left: float | None  # least bound of what was not priced, over the best; None: all was priced or is too large
    proven: bool
    limits: tuple[str, ...]  # what the space left out, in words
    quantile: float | None = None  # of the step time that the best plan makes least, where not the predicted one
    margin: float | None = None  # plans so much slower than the fastest were looked at for that
    # Share by which the best plan is slower than the fastest, where it is the simplest that is about as fast.
    slower_than_fastest: float | None = None
    best_in: tuple[str, ...] = ()  # what no plan of the space beats the ones found in, where that is not the time alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan and the figures that rank it."""

    plan: ParallelPlan
    step_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_device: float
    mfu: float
    memory_bytes: float
    memory_headroom_bytes: float
    host_memory_bytes: float  # of a node
    oom_probability: float
    verdict: Verdict
    terms_s: dict[str, float]

    def __post_init__(self) -> None:
        for name in (
            "step_s",
            "low_s",
            "high_s",
            "tokens_per_s_per_device",
            "mfu",
            "memory_bytes",
            "host_memory_bytes",
        ):
            check_positive(name, getattr(self, name))
        if not self.plan.num_microbatches:
            raise InputError(
                f"global_batch {self.plan.global_batch} is less than micro_batch {self.plan.micro_batch} x dp "
                f"{self.plan.dp}, so no step has a micro-batch: change one of them"
            )
        if not self.low_s <= self.step_s <= self.high_s:
            raise InputError(
                f"step_s {self.step_s:g} must be inside its interval, low_s {self.low_s:g} to high_s {self.high_s:g}"
            )
        if not 0 <= self.oom_probability <= 1:
            raise InputError(f"oom_probability must be in [0, 1], got {self.oom_probability:g}")

    def scarcest_memory(self, capacity_bytes: float, host_bytes: float) -> tuple[float, float, bool]:
        """Return (bytes needed, bytes available, whether on a host) for the memory with the highest usage."""
        if self.host_memory_bytes / host_bytes > self.memory_bytes / capacity_bytes:
            return self.host_memory_bytes, host_bytes, True
        return self.memory_bytes, capacity_bytes, False

    @property
    def s_per_sequence(self) -> float:
        """Seconds per sequence, by which plans of different batches compare."""
        return self.step_s / self.plan.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryKnob:
    """Change to a plan that frees memory on the fullest device."""

    change: str  # in words
    freed_bytes: float
    plan: RankedPlan  # as changed

    def __post_init__(self) -> None:
        check_positive("freed_bytes", self.freed_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The best plan with one option that changes the numerics of training, which the search was not allowed."""

    choice: str  # AXIS=VALUE, as it is allowed
    plan: RankedPlan
    ratio: float  # of the times per sequence
    freed_bytes: float  # of device memory; less than 0 where it takes more

    def __post_init__(self) -> None:
        check_positive("ratio", self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Plans, best first, and the certificate; `closest` is the least too large plan where none fits.

    `ranked` holds the best of all plans, many of which differ in details only; `rivals` the best of every cell, plans
    with other degrees.  Both begin with the winner.
    """

    ranked: tuple[RankedPlan, ...]
    rivals: tuple[RankedPlan, ...]
    closest: RankedPlan | None
    certificate: Certificate

    def led_by(self, best: RankedPlan) -> SearchResult:
        """Return the result with another best plan in front."""
        certificate = replace(self.certificate, best_step_s=best.step_s)
        return replace(self, ranked=(best, *self.ranked), rivals=(best, *self.rivals), certificate=certificate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan that may be as fast as the best: the ratio of their times per sequence, and its 90 % interval."""

    plan: ParallelPlan
    ratio: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.ratio <= self.high:
            raise InputError(f"ratio {self.ratio:g} must be inside its interval from {self.low:g} to {self.high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip(Generic[Plan]):
    """A number that would have to be other than assumed, alone, for another plan to win: the first such plan."""

    quantity: str  # in words, such as 'NVLink bandwidth'
    factor: float  # at which the winners change, on the number
    plan: Plan
    is_proven: bool  # no plan that the search left out can win before that
    measure: tuple[str, ...] = ()  # operations of `autoplan profile` that tell the number

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObviousPlan:
    """The best plan of a family that a person would think of first: how it compares with the answer."""

    family: str
    plan: RankedPlan  # the least too large one, where none fits
    ratio: float  # of the times per sequence
    excess_bytes: float  # memory beyond what is there; 0 where it fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity(Generic[Plan]):
    """Sensitivity of the answer: relative growth of the step with each number, and the numbers that would change it."""

    elasticities: dict[str, float]  # by quantity; -0.4: 1 % more of it makes the step 0.4 % shorter
    flips: tuple[Flip[Plan], ...]  # nearest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """Confidence in the choice.  Contenders are plans in the interval of their ratio to the best, fastest first."""

    runner_up: RankedPlan | None  # the best plan that differs in more than details
    ratio: float | None  # of its time per sequence to that of the best
    width: float | None  # factor to either end of the ratio's 90 % interval
    num_contenders: int
    contenders: tuple[Contender, ...]
    sensitivity: Sensitivity[ParallelPlan] | None = None
    obvious: tuple[ObviousPlan, ...] = ()

    @property
    def is_close(self) -> bool:
        """Return whether the runner-up is a contender."""
        return self.ratio is not None and self.width is not None and self.ratio <= self.width
