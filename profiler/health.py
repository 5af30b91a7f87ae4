"""Health of an allocation: devices and links that are slower than their peers, from a GEMM and all pairs.

Every device runs the same GEMM at once; in rounds, every device exchanges a message with every other one.  Background
load only adds to a time, so the minimum of several visits counts, and apparent slow parts are measured again first.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from autoplan.base.errors import AutoplanError
from autoplan.profiler.allocation import Allocation, Pair, rounds
from autoplan.profiler.crew import Crew
from autoplan.profiler.group_layouts import Layout
from autoplan.profiler.protocol import Outcome, Task
from autoplan.profiler.record import SLOWED, Record
from autoplan.profiler.sweep import SLOW_DEVICE, SLOW_LINK, record_of
from autoplan.topology.cluster import Fault

PRODUCT_SIZE = {"cpu": 512, "cuda": 8192}
MESSAGE_BYTES = {"cpu": 2**22, "cuda": 2**28}
VISITS = 3
# A time is slow if it is more standard deviations above its peers than the expected maximum of n values, sqrt(2 ln n),
# plus a margin.  One deviation is 1.48 median deviations; the median of n times scatters by 1.25 / sqrt(n) of it.
DEVIATIONS, PER_MEDIAN, OF_MEDIAN = 2.0, 1.48, 1.25
MIN_PEERS = 4  # minimum number of peers to identify a slow one
MAX_SLOW_PAIRS = 0.5  # share of all pairs: if more are slow, they have another kind of link

Part = Literal["device", "link", "nic", "pair"]  # link: between a device and its node; nic: to other nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPart:
    """A part that is slower than its peers: of one rank's device, or between two ranks."""

    part: Part
    ranks: tuple[int, ...]
    rate_share: float  # remaining share of the usual rate


@dataclass(slots=True, kw_only=True)
class Health:
    """Times of the devices and links of an allocation."""

    allocation: Allocation
    product: Task
    message: Task
    products_s: list[tuple[float, ...]] = field(default_factory=list)  # times of all ranks, by visit
    messages_s: dict[Pair, list[float]] = field(default_factory=dict)  # times by visit
    groups: list[tuple[Task, Outcome]] = field(default_factory=list)  # collectives
    disturbance: str = ""  # of the GEMMs, if every visit was disturbed
    num_rounds: int = 0  # planned rounds of messages
    num_left: int = 0  # rounds beyond the budget
    elapsed_s: float = 0.0

    def slow_parts(self) -> list[SlowPart]:
        """Return the parts that are slower than their peers: devices, their links, their NICs, then single pairs."""
        return [*self._slow_devices(), *self._slow_links(is_inside=True), *self._slow_links(is_inside=False)]

    def link_shares(self) -> dict[Pair, float]:
        """Return the rate of every pair as a share of the usual rate for its kind of link."""
        shares: dict[Pair, float] = {}
        for pairs in self._pairs_by_kind().values():
            usual_s = usual(pairs.values())
            shares |= {pair: usual_s / seconds for pair, seconds in pairs.items()}
        return shares

    def suspects(self) -> set[Pair]:
        """Return the pairs that were slower than usual in every visit so far, possibly by chance."""
        return {pair for pair, share in self.link_shares().items() if share * SLOW_LINK < 1}

    def _pairs_by_kind(self) -> dict[Hashable, dict[Pair, float]]:
        """Return the shortest time of every pair in seconds, by kind of link."""
        kind_of, by_kind = self.allocation.link_kinds(), defaultdict[Hashable, dict[Pair, float]](dict)
        for pair, times in self.messages_s.items():
            by_kind[kind_of(pair)][pair] = min(times)
        return by_kind

    def _slow_devices(self) -> list[SlowPart]:
        by_rank = list(zip(*self.products_s, strict=True))
        least = [min(times) for times in by_rank]
        over = {rank: seconds / usual(least) for rank, seconds in enumerate(least)}
        slow_over = max(SLOW_DEVICE, 1 + _swing(by_rank), 1 + _scatter(over.values()))
        return [
            SlowPart(part="device", ranks=(rank,), rate_share=1 / times)
            for rank, times in over.items()
            if times > slow_over
        ]

    def _slow_links(self, *, is_inside: bool) -> list[SlowPart]:
        over = {
            pair: 1 / share
            for pair, share in self.link_shares().items()
            if self.allocation.is_inside(pair) == is_inside
        }
        by_rank = defaultdict[int, list[float]](list)
        for pair, times in over.items():
            for rank in pair:
                by_rank[rank].append(times)
        if len(by_rank) < MIN_PEERS:
            return []
        visits = [self.messages_s[pair] for pair in over]
        least_over = max(SLOW_LINK, 1 + _swing(visits))
        scatter = _scatter(over.values())
        part: Part = "link" if is_inside else "nic"
        slow: dict[int, float] = {}
        for rank, ratios in by_rank.items():
            if usual(ratios) > max(least_over, 1 + scatter * OF_MEDIAN / math.sqrt(len(ratios))):
                slow[rank] = 1 / usual(ratios)
        slow_parts = [SlowPart(part=part, ranks=(rank,), rate_share=share) for rank, share in slow.items()]
        pairs = [
            pair
            for pair, times in over.items()
            if times > max(least_over, 1 + _swing(visits, of_most=True), 1 + scatter)
        ]
        if len(pairs) <= MAX_SLOW_PAIRS * len(over):
            slow_parts += [
                SlowPart(part="pair", ranks=pair, rate_share=1 / over[pair])
                for pair in sorted(pairs)
                if not slow.keys() & set(pair)
            ]
        return slow_parts


def usual(times: Collection[float]) -> float:
    """Return the low median, because background load only adds to a time."""
    return statistics.median_low(times)


def _swing(visits: Iterable[Sequence[float]], *, of_most: bool = False) -> float:
    """Return the variation of times between visits: twice the median variation, or the 90th percentile if `of_most`.

    A part of a machine with fast and slow phases must be slower than this to count as slow.
    """
    swings = sorted(max(times) / min(times) - 1 for times in visits if len(times) > 1)
    if not swings:
        return 0.0
    return swings[math.ceil(0.9 * len(swings)) - 1] if of_most else 2 * statistics.median(swings)


def _scatter(over: Collection[float]) -> float:
    """Return the deviation from the usual time expected by chance, from the nearer half; 0 for too few times."""
    if len(over) < MIN_PEERS:
        return 0.0
    deviations = DEVIATIONS + math.sqrt(2 * math.log(len(over)))
    return deviations * PER_MEDIAN * usual([abs(times - 1) for times in over])


def unmeasured(allocation: Allocation) -> Health:
    """Return the measurements of an allocation, still without times."""
    hello = allocation.hello
    dtype, size = hello.dtypes[0], PRODUCT_SIZE[hello.device_type]
    layout = Layout(num_devices=2, devices_per_node=2, num_groups=1)
    return Health(
        allocation=allocation,
        product=Task(operation="gemm", shape=(size, size, size), dtype=dtype, kernel=hello.kernels["gemm", dtype]),
        message=Task(
            operation="send_recv",
            shape=layout.shape(MESSAGE_BYTES[hello.device_type]),
            dtype=dtype,
            kernel=hello.kernels["send_recv", dtype],
            mode="burst",
        ),
    )


def check(
    crew: Crew, health: Health, *, budget_s: float, advance: Callable[[Health], None] = lambda health: None
) -> None:
    """Measure every device, groups and all pairs of an allocation, as far as the budget allows."""
    hello, began = health.allocation.hello, time.monotonic()
    all_rounds = list(rounds(hello.num_domains, hello.ranks_per_domain))
    health.num_rounds = health.num_left = len(all_rounds)

    def visit_devices() -> None:
        outcome, is_first = _measured(crew, health.product), not health.products_s
        health.products_s.append(outcome.by_rank_s)
        is_calm = outcome.status != "contaminated"
        health.disturbance = "" if is_calm else outcome.reason if is_first else health.disturbance and outcome.reason

    def visit_pairs(partners: tuple[int, ...]) -> None:
        by_rank_s = _measured(crew, replace(health.message, partners=partners)).by_rank_s
        for rank, partner in enumerate(partners):
            if rank < partner:
                health.messages_s.setdefault((rank, partner), []).append(max(by_rank_s[rank], by_rank_s[partner]))

    def has_time() -> bool:
        health.elapsed_s = time.monotonic() - began
        return health.elapsed_s < budget_s

    visit_devices()
    for task in _group_tasks(health):
        health.groups.append((task, _measured(crew, task)))
    for partners in all_rounds:
        if not has_time():
            break
        visit_pairs(partners)
        health.num_left -= 1
        advance(health)
    for _ in range(VISITS - 1):
        visit_devices()
        suspects = health.suspects()
        for partners in all_rounds:
            if any((rank, partners[rank]) in suspects for rank in partners) and has_time():
                visit_pairs(partners)
    health.elapsed_s = time.monotonic() - began


def _measured(crew: Crew, task: Task) -> Outcome:
    outcome = crew.ask(task)
    if outcome.status == "failed":
        raise AutoplanError(f"{task} failed: {outcome.reason}")
    return outcome


def _group_tasks(health: Health) -> Iterator[Task]:
    """Yield all-reduces inside each domain, over one device per domain, and over all devices, to use every link."""
    hello = health.allocation.hello
    domains, per_domain = hello.num_domains, hello.ranks_per_domain
    layouts = []
    if per_domain > 1:
        layouts.append(Layout(num_devices=per_domain, devices_per_node=per_domain, num_groups=1))
    if domains > 1:
        layouts.append(Layout(num_devices=domains, devices_per_node=1, num_groups=per_domain))
    if per_domain > 1 and domains > 1:
        layouts.append(Layout(num_devices=domains * per_domain, devices_per_node=per_domain, num_groups=1))
    for layout in layouts:
        shape = layout.shape(MESSAGE_BYTES[hello.device_type])
        yield replace(health.message, operation="all_reduce", shape=shape, mode="sustained")


def faults(health: Health) -> list[Fault]:
    """Return the slow parts as faults of the cluster, by its node names; single pairs are not faults."""
    allocation = health.allocation
    assert allocation.cluster is not None
    shares: dict[tuple[str, str | int, int], float] = {}
    for slow in health.slow_parts():
        if slow.part == "pair":
            continue
        node, index = allocation.place(slow.ranks[0])
        if slow.part == "nic":
            index = int(index * allocation.cluster.network.nics_per_device)
        key = (slow.part, allocation.nodes[node], index)
        shares[key] = min(slow.rate_share, shares.get(key, 1.0))
    return [
        Fault(part=part, node=node, index=index, rate_share=max(round(share, 2), 0.01))  # type: ignore[arg-type]
        for (part, node, index), share in shares.items()
    ]


def records(health: Health, measured_by: str) -> list[Record]:
    """Return a record of each device, of its messages inside and between nodes, and of each group.

    Records of slow parts are marked, so that they are not used for prices.  Samples of messages are ordered by the rank
    of the other device.
    """
    allocation, hello = health.allocation, health.allocation.hello
    slow_parts = {(slow.part, slow.ranks[0]): slow for slow in health.slow_parts()}

    def record(task: Task, part: Part, rank: int, samples_s: tuple[float, ...]) -> Record:
        slow = slow_parts.get((part, rank))
        outcome = Outcome(
            samples_s=samples_s,
            status="contaminated" if slow else "ok",
            reason=f"{SLOWED}: {part} at {100 * slow.rate_share:.0f} % of the usual rate" if slow else "",
            conditions={"device": str(allocation.place(rank)[1]), "checked": part},
        )
        return replace(record_of(task, outcome, hello, measured_by), host=hello.hosts[rank])

    part_records = [
        record(health.product, "device", rank, times) for rank, times in enumerate(zip(*health.products_s, strict=True))
    ]
    per_domain = hello.ranks_per_domain
    ways: tuple[tuple[Part, int, int], ...] = (("link", 2, per_domain // 2), ("nic", 1, per_domain))
    for part, on_node, num_groups in ways:
        shape = (2, on_node, max(num_groups, 1), health.message.shape[3])
        for rank in range(len(hello.hosts)):
            times = [
                min(seconds)
                for pair, seconds in sorted(health.messages_s.items())
                if rank in pair and allocation.is_inside(pair) == (part == "link")
            ]
            if times:
                part_records.append(record(replace(health.message, shape=shape), part, rank, tuple(times)))
    return [*part_records, *(record_of(task, outcome, hello, measured_by) for task, outcome in health.groups)]
