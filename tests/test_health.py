"""Is what is slow in an allocation found, and nothing else, and written as faults of the cluster?"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import faulty_ranks
from autoplan.api import health as api_health
from autoplan.api.health import HealthOptions, check_health, summary
from autoplan.api.outputs import CheckedHealth
from autoplan.base.errors import InputError
from autoplan.profiler.allocation import Allocation, Pair, matchings, rounds
from autoplan.profiler.crew import Crew
from autoplan.profiler.health import Health, faults
from autoplan.profiler.protocol import Hello, Task
from autoplan.profiler.record import Fingerprint
from autoplan.profiler.store import open_store
from autoplan.readers.cluster import load_cluster
from autoplan.topology.cluster import ClusterSpec, NodeGroup
from commands import run
from stores import stored_records

PRODUCT = Task(operation="gemm", shape=(8192, 8192, 8192), dtype="bf16", kernel="mm")
MESSAGE = Task(operation="send_recv", shape=(2, 2, 1, 2**28), dtype="bf16", kernel="nccl", mode="burst")
NVLINK_S, NETWORK_S = 7e-4, 5.5e-3
TWO_NODES = load_cluster("h100-sxm:2x8")


def hello(num_nodes: int, each: int, device: str = "h100-sxm") -> Hello:
    return Hello(
        fingerprint=Fingerprint(device=device),
        device_type="cuda",
        hosts=tuple(f"n{at // each:02}.lab" for at in range(num_nodes * each)),
        dtypes=("bf16",),
        kernels={("gemm", "bf16"): "mm", ("send_recv", "bf16"): "nccl"},
    )


def found(
    num_nodes: int,
    each: int,
    *,
    over_device: Callable[[int], float] = lambda rank: 1.0,
    over_pair: Callable[[Pair], float] = lambda pair: 1.0,
    cluster: ClusterSpec | None = None,
    noise: float = 0.0,
) -> Health:
    """Times of an allocation, as much longer than usual as is said, with noise that only adds."""
    rng = random.Random(0)
    allocation = Allocation(hello=hello(num_nodes, each), cluster=cluster)
    num_ranks = num_nodes * each

    def noisy() -> float:
        return 1 + abs(rng.gauss(0, noise))

    def message_s(pair: Pair) -> float:
        return (NVLINK_S if allocation.is_inside(pair) else NETWORK_S) * over_pair(pair)

    return Health(
        allocation=allocation,
        product=PRODUCT,
        message=MESSAGE,
        products_s=[tuple(1.6e-3 * over_device(rank) * noisy() for rank in range(num_ranks)) for _ in range(3)],
        messages_s={pair: [message_s(pair) * noisy()] for pair in itertools.combinations(range(num_ranks), 2)},
    )


def named(health: Health) -> list[tuple[Any, ...]]:
    return [(slow.part, slow.ranks, round(slow.rate_share, 2)) for slow in health.slow_parts()]


@pytest.mark.parametrize("count", range(1, 10))
def test_in_a_tournament_each_meets_each_once(count: int) -> None:
    met = [(at, other) for partners in matchings(count) for at, other in enumerate(partners) if at < other]
    assert sorted(met) == list(itertools.combinations(range(count), 2))
    assert len(list(matchings(count))) <= count


@pytest.mark.parametrize(("num_domains", "each"), [(1, 1), (1, 2), (1, 8), (2, 1), (3, 3), (4, 8)])
def test_all_pairs_meet_and_a_round_is_inside_domains_or_between_them(num_domains: int, each: int) -> None:
    met: list[Pair] = []
    for partners in rounds(num_domains, each):
        pairs = [(rank, partner) for rank, partner in enumerate(partners) if rank < partner]
        assert all(partners[partner] == rank for rank, partner in enumerate(partners))
        assert len({first // each == second // each for first, second in pairs}) == 1
        met += pairs
    assert sorted(met) == list(itertools.combinations(range(num_domains * each), 2))


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05, 0.3])
@pytest.mark.parametrize(("num_nodes", "each"), [(1, 2), (1, 8), (2, 8), (8, 8)])
def test_of_sound_parts_none_is_named_however_noisy(num_nodes: int, each: int, noise: float) -> None:
    assert named(found(num_nodes, each, noise=noise)) == []


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_slow_device_is_named(noise: float) -> None:
    health = found(2, 8, over_device=lambda rank: 1.25 if rank == 10 else 1.0, noise=noise)
    assert [(part, ranks) for part, ranks, _ in named(health)] == [("device", (10,))]
    assert health.slow_parts()[0].rate_share == pytest.approx(0.8, abs=0.03)
    assert named(found(1, 2, over_device=lambda rank: 1.0 + rank)) == [("device", (1,), 0.5)]


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_slow_links_and_nics_are_told_from_single_pairs(noise: float) -> None:
    def of_nic(pair: Pair) -> float:
        return 2.0 if 3 in pair and max(pair) >= 8 else 1.0

    def of_link(pair: Pair) -> float:
        return 1.5 if 3 in pair and max(pair) < 8 else 1.0

    def of_pair(pair: Pair) -> float:
        return 3.0 if pair == (1, 6) else 1.0

    for over, part, ranks, share in (
        (of_nic, "nic", (3,), 0.5),
        (of_link, "link", (3,), 0.67),
        (of_pair, "pair", (1, 6), 0.33),
    ):
        (slow,) = found(2, 8, over_pair=over, noise=noise).slow_parts()
        assert (slow.part, slow.ranks) == (part, ranks)
        assert slow.rate_share == pytest.approx(share, abs=0.03)


def test_of_a_slow_node_every_nic_is_named() -> None:
    health = found(4, 4, over_pair=lambda pair: 1.6 if min(pair) < 4 <= max(pair) else 1.0)
    assert named(health) == [("nic", (rank,), 0.62) for rank in range(4)]


def test_farther_switches_are_no_fault() -> None:
    """Pairs of two leaves of an oversubscribed tree take longer than those of one: only equals are compared."""
    leaves = ("n00", "n01", "n02"), ("n03",)
    groups = tuple(NodeGroup(names=names, switches=(f"leaf{at}",)) for at, names in enumerate(leaves))
    cluster = replace(load_cluster("h100-sxm:4x8"), nodes=groups)

    def over(pair: Pair) -> float:
        return 4.0 if pair[0] < 24 <= pair[1] else 1.0

    assert [part for part, _, _ in named(found(4, 8, over_pair=over))] == ["nic"] * 8  # all of n03
    assert named(found(4, 8, over_pair=over, cluster=cluster)) == []


def test_links_of_two_kinds_are_no_fault() -> None:
    """Where bridges join twos and the rest goes over PCIe, most pairs are slow: none is singled out."""
    assert named(found(1, 4, over_pair=lambda pair: 1.0 if pair in ((0, 1), (2, 3)) else 6.0)) == []


def test_what_is_slow_becomes_faults_of_the_cluster_and_searches_price_it(tmp_path: Path) -> None:
    def over(pair: Pair) -> float:
        return 2.0 if 12 in pair and min(pair) < 8 else 1.0

    health = found(2, 8, over_device=lambda rank: 1.25 if rank == 3 else 1.0, over_pair=over, cluster=TWO_NODES)
    out = tmp_path / "lab.toml"
    out.write_text(api_health._with_faults(health))
    cluster = load_cluster(str(out))
    assert [(fault.part, fault.node, fault.index, fault.rate_share) for fault in cluster.faults] == [
        ("device", 0, 3, 0.8),
        ("nic", 1, 4, 0.5),
    ]
    assert replace(cluster, faults=()) == TWO_NODES
    again = found(2, 8, cluster=cluster)
    out.write_text(api_health._with_faults(again))
    assert load_cluster(str(out)).faults == ()  # repaired
    named_nodes = replace(TWO_NODES, nodes=(NodeGroup(names=("n01", "n00"), switches=("leaf0",)),))
    shared = replace(TWO_NODES, network=replace(TWO_NODES.network, nics_per_device=0.5))
    assert [fault.node for fault in faults(found(2, 8, over_pair=over, cluster=named_nodes))] == ["n01"]
    assert [fault.index for fault in faults(found(2, 8, over_pair=over, cluster=shared))] == [2]


def test_an_allocation_that_is_not_of_the_cluster_is_refused() -> None:
    for cluster, says in (
        (load_cluster("a100-sxm:2x8"), "has a100-sxm, this job h100-sxm"),
        (load_cluster("h100-sxm:2x4"), "has 2 nodes of 4 devices, this job 2 of 8: start one rank for every device"),
        (load_cluster("h100-sxm:1x8"), "has 1 nodes of 8 devices"),
        (replace(TWO_NODES, nodes=(NodeGroup(names=("a", "b"), switches=("leaf0",)),)), "does not list node 'n00.lab'"),
    ):
        with pytest.raises(InputError, match=says):
            Allocation(hello=hello(2, 8), cluster=cluster)
    assert Allocation(hello=hello(2, 8), cluster=load_cluster("h100-sxm:4x8")).nodes == ()  # which two of four?


def test_rates_stand_beside_those_of_the_cluster_file() -> None:
    rates = {rate.what: rate for rate in summary(found(2, 8, cluster=TWO_NODES)).rates}
    messages = rates["messages between nodes"]
    assert messages.number == 64
    assert messages.usual == pytest.approx(2**28 / NETWORK_S)
    assert messages.described is not None
    assert 0.8 < messages.usual / messages.described < 1.2
    assert rates["matrix products"].usual == pytest.approx(2 * 8192**3 / 1.6e-3)


def checked_ranks(monkeypatch: pytest.MonkeyPatch, prepare: Any, db: Path, num_ranks: int = 4) -> CheckedHealth:
    """Check real ranks whose calls `prepare` makes."""

    def crew(*arguments: Any) -> Crew:
        return Crew(*arguments, prepare)

    monkeypatch.setattr(api_health, "Crew", crew)
    checked = check_health(HealthOptions(db=str(db), ranks=num_ranks, allowance="0.3s"))
    assert checked is not None
    assert (checked.ranks, checked.rounds, checked.rounds_left) == (num_ranks, 3, 0)
    return checked


def test_the_slow_device_of_four_real_ranks_is_found_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = tmp_path / "timings.db"
    checked = checked_ranks(monkeypatch, faulty_ranks.slow_device, db)
    assert [(slow.part, slow.devices) for slow in checked.slow if slow.part == "device"] == [("device", (1,))]
    assert 0.3 < checked.slow[0].rate_share < 0.75
    kept = [record for record in stored_records(db) if record.conditions.get("checked") == "device"]
    statuses = {record.conditions["device"]: record.status for record in kept}
    assert statuses == {"0": "ok", "1": "contaminated", "2": "ok", "3": "ok"}
    slow = next(record for record in kept if record.status != "ok")
    assert slow.reason.startswith("device slowed down: device at ")
    with open_store(str(db)) as store:  # plans are priced by the sound ones
        (time,) = store.timings(slow.fingerprint, operations=["gemm"])
    assert time.seconds in [record.seconds for record in kept if record is not slow]


def test_slow_messages_of_a_real_rank_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine pairs of it may be named instead of its link: either way all that is named is of that rank."""
    checked = checked_ranks(monkeypatch, faulty_ranks.slow_messages, tmp_path / "timings.db")
    assert checked.slow
    assert all(1 in slow.devices and slow.rate_share < 0.5 for slow in checked.slow)


def test_an_odd_number_of_ranks_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each round one of them meets nobody, in one of them rank 0, whose times decide for all elsewhere."""
    checked = checked_ranks(monkeypatch, faulty_ranks.few_samples, tmp_path / "timings.db", num_ranks=3)
    assert {rate.what: rate.number for rate in checked.rates}["messages in nodes"] == 3


def test_an_interrupted_check_keeps_what_it_measured(tmp_path: Path) -> None:
    def interrupt(health: Health) -> None:
        raise KeyboardInterrupt

    options = HealthOptions(db=str(tmp_path / "timings.db"), ranks=2, allowance="0.1s")
    with pytest.raises(KeyboardInterrupt):
        check_health(options, interrupt)
    operations = [record.operation for record in stored_records(tmp_path / "timings.db")]
    assert sorted(operations) == ["all_reduce", "gemm", "gemm", "send_recv", "send_recv"]


def test_the_command_says_what_it_found_and_writes_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "here.toml").write_text('name = "here"\ndevice = "cpu"\nnum_nodes = 1\ndevices_per_node = 2\n')
    arguments = ("--health", "--ranks", "2", "--cluster", "here.toml", "--out", "checked.toml", "--allowance", "0.1s")
    done = run(tmp_path, "profile", *arguments, "--db", "timings.db")
    assert done.returncode == 0, done.stderr
    assert "matrix products" in done.stdout
    assert "links were not compared: this needs 4 devices" in done.stderr
    assert "no link" not in done.stdout  # none was compared
    assert "\nwrote checked.toml, with slow parts as faults" in done.stderr
    assert replace(load_cluster(str(tmp_path / "checked.toml")), faults=()) == load_cluster(str(tmp_path / "here.toml"))
    for words, says in (
        (
            ("--health", "llama3-8b", "--tp", "2"),
            "--health measures without a model, without MODEL, --tp: leave them out",
        ),
        (("--health", "--out", "new.toml"), "--out writes the cluster with its slow parts: give it with --cluster"),
        (("--health", "--force"), "--force overwrites the file of --out: give --out FILE"),
        (("llama3-8b", "--out", "new.toml"), "--out and --force go with --health"),
        (("--health", "--cluster", "here.toml", "--out", "here.toml"), "here.toml exists"),
    ):
        refused = run(tmp_path, "profile", *words)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert says in refused.stderr, refused.stderr
        assert len(refused.stderr.splitlines()) == 1
