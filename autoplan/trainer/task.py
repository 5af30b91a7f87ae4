"""Task of a run of the trainer, and its report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan

Data = Literal["text", "synthetic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Run to perform.  Weights are fp32; `dtype` is that of matrix products.

    With `checks` the same steps are also trained in one process, in fp32 and with SGD, and compared.
    `micro_batches` are (sequences, number) of each replica's micro-batches if they differ.
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
    limit_s: float = 300.0  # limit of a step, after which a rank counts as hung
    seed: int = 0
    trace_folder: str | None = None  # absolute path: every rank traces some more steps and writes the file there
    micro_batches: tuple[tuple[int, int], ...] = ()

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return sum(size * number for size, number in self.micro_batches) or self.plan.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """A finished step, or a warm-up step.  Times are those of the slowest rank."""

    step: int
    step_s: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Differences between a plan and one process: the largest of a loss, and of a tensor relative to its norm."""

    loss: float
    gradients: float
    weights: float

    @property
    def holds(self) -> bool:
        """Return whether the difference is only rounding: correct plans reached 3e-6 at most, faults 1e-2 at least."""
        return all(difference <= 1e-4 for difference in (self.loss, self.gradients, self.weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """Measurements of a run, by step after the warm-up, and by rank; empty if the user's program does not log them."""

    losses: tuple[float, ...]
    step_s: tuple[float, ...]  # times of the slowest rank
    passes_s: tuple[float, ...] = ()
    optimizer_s: tuple[float, ...] = ()
    microbatch_s: tuple[float, ...] = ()  # by rank, of all but the last in which gradients are reduced; blank: too few
    other_load: float | None = None  # share of the worst host's cores used by other processes; only on CPUs
    clock_mhz: float | None = None  # of the slowest device after the last step; None if no driver tells
    peak_bytes: tuple[float, ...] = ()  # peak of each rank's tensors; empty if it was not tracked
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
    peak_bytes: float  # allocated on the rank with the highest peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A run of the user's own program with a plan."""

    model: ModelSpec
    plan: ParallelPlan
    seq_len: int
    arguments: tuple[str, ...]
    log_of: str  # the framework that wrote the log
    times_from: str  # source of the times in the log, see `autoplan.frameworks.common.log_lines.Source`
    num_steps: int  # steps covered by the times: a log may contain means of several steps

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.plan.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run with its prediction and its measurements."""

    task: Task | Command
    predicted: PredictedRun
    measured: TrainingReport
