"""Share of the communication of the best plans that a filled `profile --for` serves with measured or scaled times.

    python benchmarks/served_by_profile.py

For each cluster the best twenty plans of a search are kept in a plan file; every task that `profile --for` can queue on
an allocation is filled in, and the plans are priced with that.  A look-up is one collective or message of one plan, of
one size; it is served where its time is not the reference's.  Those that leave a scale-up domain, a node or a rack, are
told from those inside one.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

import autoplan
from autoplan.api.open_ranking import OpenRanking
from autoplan.api.timings import with_timings
from autoplan.base.arrays import Floats, Ints
from autoplan.cost.estimate import estimate
from autoplan.cost.network.algorithms import ProcessGroup, collective_s
from autoplan.cost.network.links import Links
from autoplan.profiler.protocol import Hello
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.store import open_store
from autoplan.profiler.tasks import reference_s
from autoplan.readers.cluster import load_cluster
from autoplan.spec.operations import COLLECTIVES, SHAPES, Operation
from autoplan.spec.plan_file import PlanFile
from autoplan.topology.cluster import SwitchTier

LEAVES = (SwitchTier(num_nodes=4, oversubscription=1.0), SwitchTier(num_nodes=16, oversubscription=2.0))
# (name, cluster, tiers of switches instead of its own, model, sequences, nodes that are measured, ranks on each)
CASES: list[tuple[str, str, tuple[SwitchTier, ...], str, int, int, int]] = [
    ("16 x 8 H100, all measured", "h100-sxm:16x8", (), "llama3-70b", 512, 16, 8),
    ("16 x 8 H100, 4 nodes measured", "h100-sxm:16x8", (), "llama3-70b", 512, 4, 8),
    (
        "16 x 8 H100, fat tree of 4 and 16 nodes, 2:1, all measured",
        "h100-sxm:16x8",
        LEAVES,
        "llama3-70b",
        512,
        16,
        8,
    ),
    ("16 x 8 H100, the same fat tree, 4 nodes measured", "h100-sxm:16x8", LEAVES, "llama3-70b", 512, 4, 8),
    ("GB200 NVL72, one rack", "gb200-nvl72:1x72", (), "llama3-8b", 576, 18, 4),
    ("GB200 NVL72, 4 racks, all measured", "gb200-nvl72:4x72", (), "llama3-70b", 576, 72, 4),
    ("GB200 NVL72, 4 racks, 2 measured", "gb200-nvl72:4x72", (), "llama3-70b", 576, 36, 4),
    ("GB200 NVL72, 4 racks, one measured", "gb200-nvl72:4x72", (), "llama3-70b", 576, 18, 4),
    ("64 x 8 H100, 8 nodes measured", "h100-sxm:64x8", (), "llama3-70b", 1024, 8, 8),
]
SEQ_LEN = 8192


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Count the look-ups of collectives inside and across scale-up domains, and those that were served."""
    asked: Counter[str] = Counter()
    served: Counter[str] = Counter()
    plain = Links.seconds

    def watched(
        links: Links, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int = 1
    ) -> Floats:
        found = plain(links, operation, group, buffer_bytes, copies)
        if links.timings.is_empty:  # what the same plans take without any measurement, for their intervals
            return found
        reference = collective_s(links.topology, operation, group, buffer_bytes, copies)
        takes_part = np.broadcast_to((np.asarray(group.size) > 1) & (buffer_bytes > 0), found.shape)
        inside, _ = np.broadcast_arrays(links._inside(operation, group) == group.size, found)
        for where, those in (("inside", takes_part & inside), ("across", takes_part & ~inside)):
            asked[f"{operation} {where}"] += int(those.sum())
            served[f"{operation} {where}"] += int((those & (found != reference)).sum())
        return found

    with mock.patch.object(Links, "seconds", watched):
        yield asked, served


def hello_of(file: PlanFile, num_nodes: int, per_node: int, dtypes: tuple[str, ...]) -> Hello:
    """Return what so many nodes of the file's cluster say before a profile."""
    device = file.cluster.device
    return Hello(
        fingerprint=Fingerprint(
            device=device.name, memory_bytes=int(device.memory_bytes), runtime="cuda 13.0", torch="2.13.0"
        ),
        device_type="cuda",
        hosts=tuple(f"node{at // per_node}" for at in range(num_nodes * per_node)),
        dtypes=dtypes,
        kernels={(name, dtype): "nccl" if name in COLLECTIVES else "way" for name in SHAPES for dtype in dtypes},
        devices_per_domain=file.cluster.levels[-1].num_devices,
    )


def main() -> None:
    """Print a line for each cluster."""
    for name, preset, tiers, model, batch, num_nodes, per_node in CASES:
        cluster = load_cluster(preset)
        if tiers:
            cluster = replace(cluster, network=replace(cluster.network, tiers=tiers))
        with tempfile.TemporaryDirectory() as folder:
            path, url = Path(folder) / "plan.json", f"{folder}/filled.db"
            result = autoplan.search(model, cluster=cluster, global_batch=batch, seq_len=SEQ_LEN)
            result.save(path)
            open_store(url).close()
            ranking = OpenRanking(path, url, ("sustained",))
            hello = hello_of(ranking.file, num_nodes, per_node, ranking.dtypes)
            tasks, device = ranking.tasks(hello), ranking.file.cluster.device
            with open_store(url) as store:
                store.add(
                    Record(
                        fingerprint=hello.fingerprint,
                        operation=task.operation,
                        shape=task.shape,
                        dtype=task.dtype,
                        kernel=task.kernel,
                        samples_s=(1.1 * reference_s(task, device),) * 3,
                    )
                    for task in tasks
                )
            plans = [ranked.plan for ranked in (ranking.file.best, *ranking.file.alternatives)]
            with counted() as (asked, served):
                problem = with_timings(result.problem, "db", url)
                estimate(problem, problem.batch(plans))
            share = 100 * served.total() / max(asked.total(), 1)
            parts = ", ".join(
                f"{kind} {100 * served[kind] / asked[kind]:.0f} %" for kind in sorted(asked) if asked[kind]
            )
            collectives = sum(task.operation in COLLECTIVES for task in tasks)
            print(
                f"{name}: {share:.0f} % of {asked.total()} look-ups ({parts}); {collectives} collectives of "
                f"{len(tasks)} tasks",
                flush=True,
            )


if __name__ == "__main__":
    main()
