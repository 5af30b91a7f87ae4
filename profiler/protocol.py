"""Messages between the program and the measuring ranks: tasks, rules and outcomes.

They are exchanged between the started program and the ranks, and can be read without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoplan.profiler.record import Fingerprint, Mode, Status
from autoplan.spec.operations import Operation

BESIDE = " beside gemm"  # suffix of a collective's kernel if GEMMs run at the same time
PRODUCTS_S = "products_s"  # condition of such a record: seconds of the GEMMs alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Measurement to perform."""

    operation: Operation
    shape: tuple[int, ...]
    dtype: str
    kernel: str
    mode: Mode = "sustained"
    partners: tuple[int, ...] = ()  # partner of each rank in a round of messages; the rank itself if idle
    left_s: float = field(default=math.inf, compare=False)  # remaining budget when the task is sent

    @property
    def key(self) -> tuple[str, tuple[int, ...], str, str, str]:
        """Key of the task's measurements in a store."""
        return (self.operation, self.shape, self.dtype, self.kernel, self.mode)

    def __str__(self) -> str:
        return f"{self.operation} {'x'.join(str(size) for size in self.shape)} {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules for taking measurements; times in seconds."""

    mode: Mode = "sustained"
    num_samples: int = 20  # per round, fewer if they are long
    least_samples: int = 5
    round_s: float = 1.0  # length of a round that limits the number of samples
    sample_s: float = 0.01  # minimum length of a sample
    least_calls: int = 1  # in a sample
    warmup_calls: int = 3
    long_s: float = 0.5  # a call of this length or more needs only one warm-up
    rest_s: float = 0.0  # idle time before, so that a burst starts on a cool device
    soak_s: float = 0.0  # time of running the operation before the first sample counts
    allowance_s: float = 3.0  # time limit, after which the samples so far are used
    most_foreign: float = 0.06  # maximum share of other load in a clean round (`closed-loop` 2.2)
    most_slowdown: float = 0.15  # maximum slowdown of a core relative to its better checks in a clean round
    most_spread: float = 0.05  # maximum relative half-width of the interval of a settled median
    most_scatter: float = 0.5  # maximum interquartile range over the median: beyond it a median means little

    def of_pairs(self) -> Rules:
        """Return the rules for one of many rounds between all pairs of devices: short, since links need no soak."""
        return replace(
            self, num_samples=8, warmup_calls=2, rest_s=0.0, soak_s=0.0, allowance_s=min(self.allowance_s, 0.5)
        )

    def samples_in_round(self, sample_s: float) -> int:
        """Return the number of samples of this length in a round."""
        return max(min(self.num_samples, int(self.round_s / sample_s)), self.least_samples)

    def expected_s(self, call_s: float) -> float:
        """Return the seconds that an undisturbed measurement takes for an operation of `call_s`."""
        sample = max(self.sample_s, call_s * self.least_calls)
        return self.rest_s + self.soak_s + (self.samples_in_round(sample) + 3) * sample + self.warmup_calls * call_s


def rules_for(device_type: str, mode: Mode, *, allowance_s: float = 3.0) -> Rules:
    """Return the rules for CPUs or GPUs: sustained like training, or a burst like benchmarks (C8, C9)."""
    if device_type == "cpu":
        return Rules(mode=mode, allowance_s=allowance_s)
    if mode == "burst":
        return Rules(mode=mode, sample_s=1e-3, least_calls=10, warmup_calls=10, rest_s=0.5, allowance_s=allowance_s)
    # From idle, an H200 is 7 % faster for .3 s and 3 % faster up to .6 s; then it reaches its power limit, where its
    # speed varies by 3 % around the mean within about half a second.
    return Rules(mode=mode, sample_s=0.02, soak_s=0.7, allowance_s=allowance_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of measuring one operation: the content of a record without its identification."""

    samples_s: tuple[float, ...] = ()
    status: Status = "ok"
    reason: str = ""
    conditions: Mapping[str, str] = field(default_factory=dict)
    by_rank_s: tuple[float, ...] = ()  # median of each rank; 0 for an idle rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Settings of all measurements of one run."""

    dtypes: tuple[str, ...] = ()  # blank: bf16 on GPUs, fp32 on CPUs
    allowance_s: float = 3.0
    limit_s: float = 120.0  # limit of one measurement, after which a rank counts as hung
    compares_devices: bool = True
    devices_per_domain: int = 0  # size of the ranks' scale-up domains, in consecutive nodes; 0: nodes are domains
    kernels: Mapping[Operation, str] = field(default_factory=dict)  # named by the user instead of torch's
    layer_kernels: str = "trainer"  # beginning of the kernel names of the framework's own layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of the ranks, with what they found after connecting."""

    fingerprint: Fingerprint
    device_type: str
    hosts: tuple[str, ...]  # host of every rank
    dtypes: tuple[str, ...]
    kernels: Mapping[tuple[Operation, str], str]  # kernel of each operation and data type that runs here
    windowed: Mapping[tuple[Operation, str], str] = field(default_factory=dict)  # the same for window attention
    gemm_s: tuple[float, ...] = ()  # time of the same GEMM on each rank
    links_s: Mapping[tuple[int, int], float] = field(default_factory=dict)  # time of the same message between two ranks
    devices_per_domain: int = 0  # size of the ranks' scale-up domains; 0: nodes are domains

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
        """Number of ranks in each scale-up domain: a node, or several nodes connected by links."""
        return ranks_in_domain(len(self.hosts), self.ranks_per_node, self.devices_per_domain)

    @property
    def num_domains(self) -> int:
        """Number of scale-up domains."""
        return len(self.hosts) // self.ranks_per_domain


def ranks_in_domain(num_ranks: int, ranks_per_node: int, devices_per_domain: int) -> int:
    """Return the number of ranks in a scale-up domain: whole nodes, equally many in all domains."""
    max_ranks = min(devices_per_domain, num_ranks)
    if max_ranks > ranks_per_node and max_ranks % ranks_per_node == 0 and num_ranks % max_ranks == 0:
        return max_ranks
    return ranks_per_node
