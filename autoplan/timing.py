"""How far are the model's rates from this cluster and framework, and how far may a prediction be off?"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.units import check_positive

# What a calibration may move, in the order in which a fit takes them up: what most runs tell apart first.
FACTORS = ("overall", "memory_bound", "host", "scale_out", "scale_up", "attention", "gemm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Multiplicative factors on the time of each component, and the residual spread that remains.

    A factor of 1 is the reference model.  The spreads are standard deviations of log(measured / predicted); the 90 %
    interval of a step time is exp(+-1.645 time_spread) around the prediction, and the probability of running out of
    memory follows from `memory_spread`.
    """

    name: str = "reference"
    overall: float = 1.0  # on the whole step
    gemm: float = 1.0
    attention: float = 1.0
    memory_bound: float = 1.0
    host: float = 1.0
    scale_up: float = 1.0  # collectives inside the scale-up domain
    scale_out: float = 1.0  # collectives over the network
    # Without calibration: covers nine tenths of the runs of a published source, in the mean over sources
    # (benchmarks/results); and between the .02 of a known framework and the .08 of an unknown one (`modelling` G3).
    time_spread: float = 0.25
    memory_spread: float = 0.06
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in FACTORS:
            check_positive(name, getattr(self, name), most=100.0)
        for name in ("time_spread", "memory_spread"):
            check_positive(name, getattr(self, name), most=5.0)
