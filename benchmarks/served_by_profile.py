"""Share of the communication of the best plans that a filled `profile --for` serves with measured or scaled times.

    python benchmarks/served_by_profile.py

For each cluster the best twenty plans of a search are kept in a plan file; every task that `profile --for` can queue on
an allocation is filled in, and the plans are priced with that.  A look-up is one collective or message of one plan, of
one size; it is served where its time is not the reference's.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

import autoplan
from autoplan.api.open_ranking import OpenRanking
from autoplan.api.timings import with_timings
from autoplan.cost.estimate import estimate
from autoplan.cost.network.links import Links
from autoplan.profiler.protocol import COLLECTIVES, Hello
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.store import open_store
from autoplan.profiler.tasks import reference_s
from autoplan.read.device import load_device
from autoplan.spec.plan import PlanBatch
from autoplan.spec.timing import SHAPES

# (name, cluster, model, sequences, tokens, nodes that are measured, ranks on each)
CASES = [
    ("16 x 8 H100, all measured", "h100-sxm:16x8", "llama3-70b", 512, 8192, 16, 8),
    ("16 x 8 H100, 4 nodes measured", "h100-sxm:16x8", "llama3-70b", 512, 8192, 4, 8),
    ("GB200 NVL72, one rack", "gb200-nvl72:1x72", "llama3-8b", 576, 8192, 18, 4),
    ("GB200 NVL72, 4 racks, one measured", "gb200-nvl72:4x72", "llama3-70b", 576, 8192, 18, 4),
    ("64 x 8 H100, 8 nodes measured", "h100-sxm:64x8", "llama3-70b", 1024, 8192, 8, 8),
]


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Count by operation the look-ups of measured times, and those that were served."""
    asked: Counter[str] = Counter()
    served: Counter[str] = Counter()
    plain = Links._or_measured

    def watched(self, reference_s, operation, group, buffer_bytes):  # type: ignore[no-untyped-def]
        found = plain(self, reference_s, operation, group, buffer_bytes)
        takes_part = np.broadcast_to((np.asarray(group.size) > 1) & (buffer_bytes > 0), found.shape)
        asked[operation] += int(takes_part.sum())
        served[operation] += int((takes_part & (found != reference_s)).sum())
        return found

    with mock.patch.object(Links, "_or_measured", watched), mock.patch.object(Links, "seconds", _always_asked):
        yield asked, served


def _always_asked(self, operation, group, buffer_bytes, copies=1):  # type: ignore[no-untyped-def]
    """Look a collective up whether or not its operation was measured at all."""
    from autoplan.cost.network.links import collective_s

    reference = collective_s(self.topology, operation, group, buffer_bytes, copies)
    return self._or_measured(reference, operation, *self._as_measured(operation, group, buffer_bytes, copies))


def main() -> None:
    """Print a table of the clusters."""
    for name, cluster, model, batch, seq_len, num_nodes, per_node in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path, url = Path(folder) / "plan.json", f"{folder}/filled.db"
            autoplan.search(model, cluster=cluster, global_batch=batch, seq_len=seq_len).save(path)
            ranking = OpenRanking(path, url, ("sustained",))
            device = load_device(ranking.file.cluster.device.name)
            assert device is not None
            machine = Fingerprint(
                device=device.name, memory_bytes=int(device.memory_bytes), runtime="cuda 13.0", torch="2.13.0"
            )
            kernels = {
                (operation, dtype): "nccl" if operation in COLLECTIVES else "way"
                for operation in SHAPES
                for dtype in ranking.dtypes
            }
            hello = Hello(
                fingerprint=machine,
                device_type="cuda",
                hosts=tuple(f"node{at // per_node}" for at in range(num_nodes * per_node)),
                dtypes=ranking.dtypes,
                kernels=kernels,
                **({"devices_per_domain": device_domain(ranking)} if "devices_per_domain" in Hello.__slots__ else {}),
            )
            open_store(url).close()
            with open_store(url) as store:  # a first time: the ranking reads what there is
                store.add([_filled(machine, "gemm", (4096, 4096, 4096), "bf16", "way", 3e-4)])
            groups = ranking._groups(hello, ())
            tasks = [ranked.task for _, ranked_tasks in groups for ranked in ranked_tasks]
            with open_store(url) as store:
                store.add(
                    _filled(
                        machine, task.operation, task.shape, task.dtype, task.kernel, 1.1 * reference_s(task, device)
                    )
                    for task in tasks
                )
            problem = with_timings(ranking._problem, "db", url)
            with counted() as (asked, served):
                estimate(problem, PlanBatch.of(ranking._plans, problem.model.num_layers))
            collectives = sum(task.operation in COLLECTIVES for task in tasks)
            total = 100 * sum(served.values()) / max(sum(asked.values()), 1)
            parts = ", ".join(f"{op} {100 * served[op] / asked[op]:.0f} %" for op in sorted(asked) if asked[op])
            print(f"{name}: {total:.0f} % of {sum(asked.values())} look-ups ({parts}); {collectives} collectives of "
                  f"{len(tasks)} tasks")  # fmt: skip
            sys.stdout.flush()


def device_domain(ranking: OpenRanking) -> int:
    """Devices of a scale-up domain."""
    return ranking.file.cluster.levels[-1].num_devices


def _filled(machine: Fingerprint, operation: str, shape: tuple[int, ...], dtype: str, kernel: str, s: float) -> Record:
    return Record(
        fingerprint=machine,
        operation=operation,
        shape=shape,
        dtype=dtype,
        kernel=kernel,
        samples_s=(s,) * 3,  # type: ignore[arg-type]
    )


if __name__ == "__main__":
    main()
