"""Reference time of collectives and messages: the fastest algorithm, with all sibling groups communicating at once.

`ALGORITHMS` lists the algorithms of each operation.  Rates are per device: siblings on a node each use their own
devices' links and NICs, so a group with one member per node sees one NIC (`modelling` D4).  Sizes are full buffers in
bytes, times are in seconds; every array argument has one element per plan, or groups have the shape (plans, 1) and
buffers (plans, stages).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.spec.operations import Operation
from autoplan.topology.levels import Gaps, Topology
from autoplan.topology.placement import Pattern
from autoplan.topology.traffic import (
    Spans,
    all_to_all_bytes,
    chain_bytes,
    hierarchical_bytes,
    in_network_bytes,
    level_rate,
    ring_bytes,
)

# Share of the faster levels' time that a hierarchical collective does not hide behind the slowest level: 4 GiB over
# 4 x 8 B200 with EFA took 22.05 ms where the node alone takes 10.15 ms and the NICs 16.1 ms (`modelling` D4).
UNHIDDEN_SHARE = 0.6

# Nodes below a leaf of a fat tree of 64-port switches; in-network reduction takes hops in proportion to the logarithm
# of nodes.
SWITCH_DOWN_PORTS = 32

# An all-reduce of a few numbers goes up a tree and down again: start-up time, and latency of one link inside a domain
# and over the network (NCCL src/graph/tuning.cc, tree and LL protocol; `modelling` D2).
SHORT_START_S, SHORT_LINK_S, SHORT_NETWORK_S = 6.8e-6, 0.6e-6, 5.0e-6


class ProcessGroup(NamedTuple):
    """Communicating ranks at distance `stride`, one element per plan; `gaps` describes irregular distances."""

    stride: Ints
    size: Ints
    gaps: Gaps | None = None

    def take(self, rows: Ints) -> ProcessGroup:
        """Return the groups of the plans at the given indices."""
        gaps = Gaps(self.gaps.run[rows], self.gaps.step[rows]) if self.gaps else None
        return ProcessGroup(self.stride[rows], self.size[rows], gaps)

    def for_stages(self) -> ProcessGroup:
        """Return the groups in the shape (plans, 1), for buffers of the shape (plans, stages)."""
        gaps = Gaps(self.gaps.run[:, None], self.gaps.step[:, None]) if self.gaps else None
        return ProcessGroup(self.stride[:, None], self.size[:, None], gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Algorithm of an operation: bytes on the links of every level, shape (levels, groups), and its time."""

    moved_bytes: Callable[
        [Topology, Spans, Floats, Ints | int], Floats
    ]  # for a buffer with this many copies of each token
    seconds: Callable[[Topology, Spans, Floats, Floats], Floats]  # from bytes moved and buffer size
    serves: Callable[[Topology, Spans], Bools] | None = None  # groups that may use it; None: all


def _in_steps_s(
    topology: Topology,
    spans: Spans,
    moved: Floats,
    buffer_bytes: Floats,
    *,
    steps_of: Callable[[Topology, Spans], Floats],
    volume: float,
) -> Floats:
    """Time of a collective that moves `moved` bytes over the links of each level in `volume` x steps.

    `moved` and the steps have shape (levels, groups).  A fabric is as fast as its slowest links, since data is
    forwarded by switches while more arrives over the NICs; latencies of the levels add up.
    """
    steps = steps_of(topology, spans)
    times: list[Floats] = []  # per fabric
    wire = beyond = np.zeros_like(buffer_bytes)
    for at, level in enumerate(topology.levels):
        domains = spans.outer[at] / spans.inner[at]
        rate = level_rate(level, domains)
        level_wire = moved[at] / rate
        if curve := level.collectives:
            level_wire = level_wire * curve.slowdown(domains)
            level_beyond = curve.overhead_s(volume * steps[at], buffer_bytes / spans.inner[at])
        else:
            # If a device's part of the buffer is half_rate_bytes, the measured rate is half of the plateau.  The
            # implied time beyond the wire time starts at the latency, grows with the message and then stays constant
            # (pipeline fill), as nccl-tests tables show.
            latency = volume * steps[at] * level.latency_s
            part = buffer_bytes / spans.reach[at]
            max_fill_s = volume * level.half_rate_bytes * steps[at] / rate
            fill = max_fill_s * np.minimum(2 * part / (part + level.half_rate_bytes), 1.0)
            level_beyond = np.maximum(latency, fill)
        if at in topology.tiers:
            wire, beyond = np.maximum(wire, level_wire), beyond + level_beyond
            times.pop()
        else:
            wire, beyond = level_wire, level_beyond
        times.append(np.where(spans.reach[at] > spans.base[at], wire + beyond, 0.0))
    slowest, total = reduce(np.maximum, times), reduce(np.add, times)
    moves = (spans.outer[-1] > 1) & (buffer_bytes > 0)
    return np.where(moves, slowest + UNHIDDEN_SHARE * (total - slowest), 0.0)


def _message_s(topology: Topology, spans: Spans, moved: Floats, message_bytes: Floats) -> Floats:
    """Time of one message between neighbours of a chain, by the slowest hop."""
    pair = np.full(len(message_bytes), 2.0)
    time = wire = np.zeros(len(message_bytes))
    for at, level in enumerate(topology.levels):
        level_wire = moved[at] / level_rate(level, pair)
        wire = np.maximum(wire, level_wire) if at in topology.tiers else level_wire
        crosses = spans.outer[at] > spans.inner[at]
        time = np.where(crosses, np.maximum(time, level.latency_s + wire), time)
    return time


def _ring_steps(_: Topology, spans: Spans) -> Floats:
    return spans.hops


def _switch_steps(topology: Topology, spans: Spans) -> Floats:
    """Steps of in-network reduction over a switch tree, with rings inside nodes: shape (levels, groups)."""
    steps = spans.hops
    for at in topology.network:
        domains = spans.outer[at] / spans.inner[at]
        steps[at] = np.where(domains > 1, np.maximum(np.log2(domains) / np.log2(SWITCH_DOWN_PORTS), 1.0), 0.0)
    return steps


def _exchange_steps(_: Topology, spans: Spans) -> Floats:
    """Steps of an all-to-all, whose messages are in flight concurrently, unlike those of a ring."""
    return 2 * np.log2(spans.outer / spans.inner)


def _switches_add_up(topology: Topology, spans: Spans) -> Bools:
    """Return whether all switches that a group crosses support in-network reduction."""
    if not any(level.is_reducing for level in topology.levels):
        return np.zeros(spans.outer.shape[1:], dtype=np.bool_)
    plain = [at for at in topology.network if not topology.levels[at].is_reducing]
    return np.asarray(~spans.is_crossed[plain].any(axis=0))


def _rings_s(topology: Topology, spans: Spans, moved: Floats, buffer_bytes: Floats, *, volume: float) -> Floats:
    """Time of rings inside every domain and between domains; the faster levels are partly hidden.

    If devices share a NIC, all rings go through it and take at least the wire time of one ring through all devices;
    with one NIC per device, alternating rings of nodes and of devices match the measured times (`modelling` D4).
    """
    in_steps = _in_steps_s(topology, spans, moved, buffer_bytes, steps_of=_ring_steps, volume=volume)
    shared = [at for at in topology.network if topology.levels[at].devices_per_nic > 1.0]
    if not shared:
        return in_steps
    sent_bytes = ring_bytes(topology, spans, buffer_bytes, volume)
    return np.maximum(in_steps, reduce(np.maximum, [sent_bytes[at] / topology.levels[at].bytes_per_s for at in shared]))


def _rings(volume: float) -> Algorithm:
    """Return the algorithm of rings in and between domains, `volume` x the buffer (nccl-tests doc/PERFORMANCE.md)."""
    return Algorithm(
        moved_bytes=lambda _, spans, buffer_bytes, copies: hierarchical_bytes(spans, buffer_bytes, volume),
        seconds=partial(_rings_s, volume=volume),
    )


_SWITCHES = Algorithm(
    moved_bytes=lambda topology, spans, buffer_bytes, copies: in_network_bytes(topology, spans, buffer_bytes),
    seconds=partial(_in_steps_s, steps_of=_switch_steps, volume=2.0),
    serves=_switches_add_up,
)


# With copies > 1 the buffer of an all-to-all contains each token that often, for experts on random members.  A
# dispatcher that exploits this sends one copy per node, which distributes it inside, and one per rank, which passes it
# to its experts (DeepEP's `is_token_in_rank`; DeepSeek-V3, arXiv:2412.19437).
_EXCHANGE = Algorithm(
    moved_bytes=lambda _, spans, buffer_bytes, copies: all_to_all_bytes(spans, buffer_bytes, copies),
    seconds=partial(_in_steps_s, steps_of=_exchange_steps, volume=1.0),
)


_CHAIN = Algorithm(
    moved_bytes=lambda topology, spans, message_bytes, copies: chain_bytes(topology, spans, message_bytes),
    seconds=_message_s,
)


# Algorithms of each operation: the first supports every group; later ones are used if supported and faster.
# NCCL's trees are omitted, as predictions of measured runs are worse with them (nanotron 3.95 % off instead of 3.87).
ALGORITHMS: dict[Operation, tuple[Algorithm, ...]] = {
    "all_reduce": (_rings(2.0), _SWITCHES),
    "all_gather": (_rings(1.0),),
    "reduce_scatter": (_rings(1.0),),
    "all_to_all": (_EXCHANGE,),
    "send_recv": (_CHAIN,),
}

# Communication patterns of operations that are not rings.
PATTERNS: dict[Operation, Pattern] = {"all_to_all": "all_to_all", "send_recv": "chain"}


def members_by_level(topology: Topology, operation: Operation, group: ProcessGroup) -> Ints | Floats:
    """Return the numbers of members of each group inside a unit of every level."""
    pattern = PATTERNS.get(operation, "ring")
    return topology.members(group.stride, group.size, gaps=group.gaps, pattern=pattern)


def _fastest(
    topology: Topology, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int
) -> tuple[Floats, Floats]:
    """Return (time, bytes over the links of every level) of the fastest algorithm for each group."""
    spans = Spans.of(topology, members_by_level(topology, operation, group))
    first, *further = ALGORITHMS[operation]
    moved = first.moved_bytes(topology, spans, buffer_bytes, copies)
    time = first.seconds(topology, spans, moved, buffer_bytes)
    for algorithm in further:
        may_use = np.True_ if algorithm.serves is None else algorithm.serves(topology, spans)
        if may_use.any():
            other_moved = algorithm.moved_bytes(topology, spans, buffer_bytes, copies)
            other_time = algorithm.seconds(topology, spans, other_moved, buffer_bytes)
            is_faster = (other_time < time) & may_use
            time, moved = np.where(is_faster, other_time, time), np.where(is_faster, other_moved, moved)
    return time, moved


def collective_s(
    topology: Topology, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int = 1
) -> Floats:
    """Time of a collective; `buffer_bytes` is what every rank reduces, gathers, or exchanges."""
    if not buffer_bytes.any():  # e.g. experts of a dense model
        return np.zeros_like(buffer_bytes)
    return _fastest(topology, operation, group, buffer_bytes, copies)[0]


def link_bytes(
    topology: Topology, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int = 1
) -> Floats:
    """Bytes of a collective on the links of every level, per device and direction: shape (levels, groups)."""
    return _fastest(topology, operation, group, buffer_bytes, copies)[1]
