"""Messages between the program and the measuring ranks: tasks, rules and outcomes.

These go between the program that was started and the ranks; torch is not needed to read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoplan.profiler.record import Fingerprint, Mode, Status
from autoplan.spec.operations import Operation

BESIDE = " beside gemm"  # ending of a collective's kernel where products run at the same time
PRODUCTS_S = "products_s"  # condition of such a record: seconds of these products alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Measurement to make."""

    operation: Operation
    shape: tuple[int, ...]
    dtype: str
    kernel: str
    mode: Mode = "sustained"
    partners: tuple[int, ...] = ()  # of a round of messages between pairs: whom each rank meets; itself: nobody
    left_s: float = field(default=math.inf, compare=False)  # of the budget when it is asked for

    @property
    def key(self) -> tuple[str, tuple[int, ...], str, str, str]:
        """Key by which a store finds measurements of the task."""
        return (self.operation, self.shape, self.dtype, self.kernel, self.mode)

    def __str__(self) -> str:
        return f"{self.operation} {'x'.join(str(size) for size in self.shape)} {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules by which measurements are taken; times in seconds."""

    mode: Mode = "sustained"
    num_samples: int = 20  # in a round, fewer where they are long
    least_samples: int = 5
    round_s: float = 1.0  # length of a round up to which they are not fewer
    sample_s: float = 0.01  # least length of a sample
    least_calls: int = 1  # in a sample
    warmup_calls: int = 3
    long_s: float = 0.5  # length of a call from which on one is warm-up enough
    rest_s: float = 0.0  # idle before, so that a burst finds a cool device
    soak_s: float = 0.0  # the operation itself, before the first sample counts
    allowance_s: float = 3.0  # after which what was seen is taken as it is
    most_foreign: float = 0.06  # share of other load up to which a round is clean (`closed-loop` 2.2)
    most_slowdown: float = 0.15  # of a core against its better checks, up to which a round is clean
    most_spread: float = 0.05  # half-width of the interval of the median, relative, at which it has settled
    most_scatter: float = 0.5  # middle half of the samples over their median: beyond it a median says little

    def of_pairs(self) -> Rules:
        """The rules for one of many rounds in which all pairs of devices meet: a short look, as links need no soak."""
        return replace(
            self, num_samples=8, warmup_calls=2, rest_s=0.0, soak_s=0.0, allowance_s=min(self.allowance_s, 0.5)
        )

    def samples_in_round(self, sample_s: float) -> int:
        """Number of samples of that length in a round."""
        return max(min(self.num_samples, int(self.round_s / sample_s)), self.least_samples)

    def expected_s(self, call_s: float) -> float:
        """Seconds that a quiet measurement takes of an operation of `call_s`."""
        sample = max(self.sample_s, call_s * self.least_calls)
        return self.rest_s + self.soak_s + (self.samples_in_round(sample) + 3) * sample + self.warmup_calls * call_s


def rules_for(device_type: str, mode: Mode, *, allowance_s: float = 3.0) -> Rules:
    """The rules for CPUs, or those for GPUs: sustained as training runs, or a burst as benchmarks do (C8, C9)."""
    if device_type == "cpu":
        return Rules(mode=mode, allowance_s=allowance_s)
    if mode == "burst":
        return Rules(mode=mode, sample_s=1e-3, least_calls=10, warmup_calls=10, rest_s=0.5, allowance_s=allowance_s)
    # An H200 that is set to work from idle is 7 % faster for .3 s and 3 % for .6, then at the limit of its power, where
    # it swings by 3 % around its mean, within half a second or so.
    return Rules(mode=mode, sample_s=0.02, soak_s=0.7, allowance_s=allowance_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of measuring one operation: the content of a record beside its name."""

    samples_s: tuple[float, ...] = ()
    status: Status = "ok"
    reason: str = ""
    conditions: Mapping[str, str] = field(default_factory=dict)
    by_rank_s: tuple[float, ...] = ()  # median of each rank; 0 of one that stood by


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Settings of all measurements of one run."""

    dtypes: tuple[str, ...] = ()  # blank: bf16 on GPUs, fp32 on CPUs
    allowance_s: float = 3.0
    limit_s: float = 120.0  # of one measurement, after which a rank counts as hung
    compares_devices: bool = True
    devices_per_domain: int = 0  # of the scale-up domains that the ranks lie in, node after node; 0: nodes are domains


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of the ranks: what they found when they had met."""

    fingerprint: Fingerprint
    device_type: str
    hosts: tuple[str, ...]  # of every rank
    dtypes: tuple[str, ...]
    kernels: Mapping[tuple[Operation, str], str]  # how each operation runs here in each type, where it does
    windowed: Mapping[tuple[Operation, str], str] = field(default_factory=dict)  # the same of attention in a window
    gemm_s: tuple[float, ...] = ()  # of each rank, the same product
    links_s: Mapping[tuple[int, int], float] = field(default_factory=dict)  # the same message between two ranks
    devices_per_domain: int = 0  # of the scale-up domains that the ranks lie in; 0: nodes are domains

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return len(set(self.hosts))

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each host, the same on all."""
        return len(self.hosts) // self.num_nodes

    @property
    def ranks_per_domain(self) -> int:
        """Number of ranks in each scale-up domain: a node, or several where links join them."""
        return ranks_in_domain(len(self.hosts), self.ranks_per_node, self.devices_per_domain)

    @property
    def num_domains(self) -> int:
        """Number of scale-up domains."""
        return len(self.hosts) // self.ranks_per_domain


def ranks_in_domain(num_ranks: int, ranks_per_node: int, devices_per_domain: int) -> int:
    """Return how many ranks one scale-up domain holds: whole nodes, and all domains equally many."""
    max_ranks = min(devices_per_domain, num_ranks)
    if max_ranks > ranks_per_node and max_ranks % ranks_per_node == 0 and num_ranks % max_ranks == 0:
        return max_ranks
    return ranks_per_node
