"""Allocation of devices: rounds in which all pairs meet, kinds of links between pairs, and node names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from autoplan.base.errors import InputError
from autoplan.profiler.protocol import Hello
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.placement import node_names, switches_of_nodes

Pair = tuple[int, int]  # of ranks


def matchings(count: int) -> Iterator[list[int]]:
    """Yield rounds of partners (a rank itself: idle) until all pairs of `count` have met, by the circle method."""
    seats = count + count % 2
    for turn in range(seats - 1 if count > 1 else 0):
        order = [seats - 1, *((turn + at) % (seats - 1) for at in range(seats - 1))]
        partners = list(range(count))
        for at in range(seats // 2):
            # The fixed member meets the first of the others; these meet each other from both ends.
            first, second = (order[0], order[1]) if at == 0 else (order[1 + at], order[seats - at])
            if max(first, second) < count:
                partners[first], partners[second] = second, first
        yield partners


def rounds(num_domains: int, ranks_per_domain: int) -> Iterator[tuple[int, ...]]:
    """Yield the partner of every rank in rounds until all pairs have met, first all pairs inside domains.

    In a round between domains, domains are paired, and every rank has one partner there: each NIC has one message.
    """
    per_domain = ranks_per_domain
    for inside in matchings(per_domain):
        yield tuple(domain * per_domain + partner for domain in range(num_domains) for partner in inside)
    for domains in matchings(num_domains):
        for shift in range(per_domain):
            partners = list(range(num_domains * per_domain))
            for domain, partner in enumerate(domains):
                if domain < partner:
                    for place in range(per_domain):
                        first, second = (
                            domain * per_domain + place,
                            partner * per_domain + (place + shift) % per_domain,
                        )
                        partners[first], partners[second] = second, first
            yield tuple(partners)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Devices of the connected ranks, and their cluster if it is known."""

    hello: Hello
    cluster: ClusterSpec | None = None

    def __post_init__(self) -> None:
        cluster, hello = self.cluster, self.hello
        if cluster is None:
            return
        name = f"cluster {cluster.name!r}"
        if cluster.device.name != hello.fingerprint.device:
            raise InputError(
                f"{name} has {cluster.device.name}, this job {hello.fingerprint.device}: name the right cluster"
            )
        if hello.ranks_per_node != cluster.devices_per_node or hello.num_nodes > cluster.num_nodes:
            raise InputError(
                f"{name} has {cluster.num_nodes} nodes of {cluster.devices_per_node} devices, this job "
                f"{hello.num_nodes} of {hello.ranks_per_node}: start one rank for every device"
            )
        if listed := node_names(cluster):
            unlisted = [host for host in self.hosts if _listed_name(host, listed) is None]
            if unlisted:
                raise InputError(f"{name} does not list node {unlisted[0]!r} of this job under [[nodes]]: add it there")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts, in the order of their ranks."""
        return tuple(dict.fromkeys(self.hello.hosts))

    @property
    def nodes(self) -> tuple[str, ...] | tuple[int, ...]:
        """Names of the nodes in the cluster file, in the order of their ranks; empty if the file does not tell."""
        if self.cluster is None:
            return ()
        if listed := node_names(self.cluster):
            return tuple(_listed_name(host, listed) or host for host in self.hosts)
        return tuple(range(self.hello.num_nodes)) if self.hello.num_nodes == self.cluster.num_nodes else ()

    def place(self, rank: int) -> tuple[int, int]:
        """Return (number of the node, index of the device in it)."""
        return divmod(rank, self.hello.ranks_per_node)

    def is_inside(self, pair: Pair) -> bool:
        """Return whether a pair is connected by links of a node or rack, not by NICs."""
        first, second = (rank // self.hello.ranks_per_domain for rank in pair)
        return first == second

    def link_kinds(self) -> Callable[[Pair], Hashable]:
        """Return a function from a pair to the kind of its link: levels and switches in between, and the same rail."""
        sizes = [level.num_devices for level in self.cluster.levels] if self.cluster else []
        switches = self._switches()

        def kind(pair: Pair) -> Hashable:
            first, second = pair
            if self.is_inside(pair):
                return (True, sum(first // size != second // size for size in sizes))
            (node, index), (other, other_index) = self.place(first), self.place(second)
            return (False, sum(tier[node] != tier[other] for tier in switches), index == other_index)

        return kind

    def _switches(self) -> list[list[int]]:
        """Return the switch above each node, tier by tier; empty if the cluster does not define it."""
        if self.cluster is None or not self.nodes:
            return []
        if listed := node_names(self.cluster):
            at = [listed.index(str(node)) for node in self.nodes]
            return [[int(tier[number]) for number in at] for tier in switches_of_nodes(self.cluster, None)]
        return [[int(node) // tier.num_nodes for node in self.nodes] for tier in self.cluster.network.tiers]


def _listed_name(host: str, names: Sequence[str]) -> str | None:
    """Return the entry of a host in a list of names with or without domain."""
    return next((name for name in names if name.partition(".")[0] == host.partition(".")[0]), None)
