"""Agreement of two runs of the profiler, and how long one takes.

usage: python benchmarks/agreement.py [MODEL] [--seq-len N] [--tp N,N] [--ranks N] [--budget S] [--allowance S]

Profiles a model twice, with nothing kept in between, and prints for every operation how far the medians of the two
runs are apart: of measurements that both runs found clean and settled, and of all.  By default the model is a small
GPT, whose profile on two cores shall take less than three minutes and agree within 10 % in the median over operations
where nothing else runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable

import numpy as np

from autoplan.base.errors import AutoplanError
from autoplan.frameworks.presets import load_framework
from autoplan.profiler.crew import Crew, default_num_ranks
from autoplan.profiler.protocol import Job
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.sweep import Progress, outliers, run
from autoplan.profiler.tasks import MeasurementScope, TaskKey, ranked_tasks
from autoplan.readers.model import load_model
from autoplan.spec.model import ModelSpec

SMALL = ModelSpec(name="small-gpt", num_layers=8, hidden_size=512, vocab_size=8192, num_heads=8, ffn_size=1536)


class Kept:
    """A database of one run."""

    def __init__(self) -> None:
        self.records: dict[TaskKey, Record] = {}

    def measured_keys(self, fingerprint: Fingerprint, num_visits: int = 1) -> list[TaskKey]:
        """Nothing: every run measures everything."""
        return []

    def add(self, records: Iterable[Record]) -> None:
        """Keep records by what they measured."""
        self.records |= {
            (record.operation, record.shape, record.dtype, record.kernel, record.mode): record for record in records
        }


def profiled(scope: MeasurementScope, num_ranks: int, job: Job, budget_s: float) -> tuple[Kept, float]:
    """(the records of one run, how long it took with its start)."""
    began, kept = time.monotonic(), Kept()
    with Crew(job, None, num_ranks) as crew:
        hello = crew.start()
        assert hello is not None
        for remark in outliers(hello):
            print(f"warning: {remark}", file=sys.stderr)
        planned = ranked_tasks(scope, hello, ())
        run(crew, hello, kept, planned, budget_s=budget_s, progress=Progress(total=len(planned)))
    return kept, time.monotonic() - began


def compared(record: Kept, other: Kept) -> None:
    """Print how far two runs are apart, by operation and in the median over operations."""
    apart: dict[str, list[float]] = {}
    clean: dict[str, list[float]] = {}
    for key, first in record.records.items():
        second = other.records.get(key)
        if second is None or "failed" in (first.status, second.status):
            continue
        share = abs(first.seconds / second.seconds - 1)
        apart.setdefault(key[0], []).append(share)
        if first.status == second.status == "ok":
            clean.setdefault(key[0], []).append(share)
    print(f"{'operation':<20}{'shapes':>8}{'apart':>9}{'clean':>8}{'apart':>9}")
    for operation, shares in sorted(apart.items()):
        quiet = clean.get(operation, [])
        of_quiet = f"{100 * np.median(quiet):8.1f}%" if quiet else f"{'-':>9}"
        print(f"{operation:<20}{len(shares):>8}{100 * np.median(shares):>8.1f}%{len(quiet):>8}{of_quiet}")
    for name, found in (("all", apart), ("clean and settled", clean)):
        if found:
            median = np.median([np.median(shares) for shares in found.values()])
            print(f"{name}: median over {len(found)} operations {100 * median:.1f} %")


def main() -> None:
    """Profile twice and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--tp", default="1,2")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--budget", type=float, default=180.0)
    parser.add_argument("--allowance", type=float, default=3.0)
    arguments = parser.parse_args()
    scope = MeasurementScope(
        model=load_model(arguments.model) if arguments.model else SMALL,
        framework=load_framework("megatron-core"),
        seq_len=arguments.seq_len,
        tps=tuple(int(part) for part in arguments.tp.split(",")),
    )
    num_ranks = arguments.ranks or default_num_ranks()
    runs = []
    for number in (1, 2):
        kept, took_s = profiled(scope, num_ranks, Job(allowance_s=arguments.allowance), arguments.budget)
        counts = Counter(record.status for record in kept.records.values())
        shown = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        print(f"run {number}: {len(kept.records)} measurements on {num_ranks} ranks in {took_s:.0f} s: {shown}")
        for (operation, shape, *_), record in kept.records.items():
            if record.status == "failed":
                print(f"failed: {operation} {shape}: {record.reason}")
        runs.append(kept)
    compared(*runs)


if __name__ == "__main__":
    try:
        main()
    except AutoplanError as error:
        sys.exit(f"{error}")
