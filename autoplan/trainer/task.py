"""Task of a run of the trainer, and its report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan

Data = Literal["text", "synthetic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Run to make.  Weights are fp32; `dtype` is that of the products.

    With `checks` the same steps are trained by one process too, in fp32 and with SGD, and compared.
    `num_microbatches` are those of each replica where they differ.
    """

    model: ModelSpec
    plan: ParallelPlan
    seq_len: int
    dtype: Literal["bf16", "fp32"]
    num_steps: int = 10
    num_warmup: int = 2
    data: Data = "text"
    checks: bool = False
    tracks_memory: bool = True
    limit_s: float = 300.0  # of one step, after which a rank counts as hung
    seed: int = 0
    trace_folder: str | None = None  # absolute: every rank traces some more steps, and leaves the file there
    num_microbatches: tuple[int, ...] = ()

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return sum(self.num_microbatches) * self.plan.micro_batch or self.plan.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """A step is done; the first ones warm up.  Times are those of the slowest rank."""

    step: int
    step_s: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Differences of a plan from one process: the largest of a loss, and of a tensor over its norm."""

    loss: float
    gradients: float
    weights: float

    @property
    def holds(self) -> bool:
        """Return whether the difference is rounding: the worst plans seen are at 3e-6, the mildest fault at 1e-2."""
        return all(difference <= 1e-4 for difference in (self.loss, self.gradients, self.weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """Measurements of a run, by step after the warm-up, and by rank; empty where the user's program does not tell."""

    losses: tuple[float, ...]
    step_s: tuple[float, ...]  # of the slowest rank
    passes_s: tuple[float, ...] = ()
    optimizer_s: tuple[float, ...] = ()
    other_load: float | None = None  # share of the worst host's cores that others used; where these are the devices
    peak_bytes: tuple[float, ...] = ()  # of every rank: what its tensors held at once; empty where it was not tracked
    device: str  # such as cpu or the name of the GPU
    check: Deviation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """Prediction for a run, on the device of the plan's cluster; `terms_s` add up to `step_s`."""

    device: str
    step_s: float
    low_s: float
    high_s: float
    terms_s: dict[str, float]
    peak_bytes: float  # handed out by the allocator on the fullest rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A run of the user's own program by a plan."""

    model: ModelSpec
    plan: ParallelPlan
    seq_len: int
    arguments: tuple[str, ...]
    log_of: str  # the framework that its log is one of
    times_from: str  # how that log tells times, see `autoplan.frameworks.common.log_lines.Source`
    num_steps: int  # that the times cover: a log may tell the mean of many

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.plan.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run, what was predicted of it, and what it measured."""

    task: Task | Command
    predicted: PredictedRun
    measured: TrainingReport
