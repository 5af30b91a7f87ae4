"""Traces that others published: are they read, do their parts add up, and is communication hidden as HTA says?

usage: python benchmarks/public_traces.py FOLDER [--report REPORT.md]

FOLDER holds checkouts, such as of facebookresearch/HolisticTraceAnalysis and param, AMD-AGI/TraceLens,
ROCm/rocmProfileData and GindaChen/nsys-ai.
Every file in it that is known as a trace is read.  Where HolisticTraceAnalysis can be imported, its overlap stands
beside ours, both over the whole trace; it reads only some of these traces with today's pandas.
"""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from reports import make_parser

from autoplan.base.errors import InputError
from autoplan.base.files import write_text
from autoplan.profiler.imports import kineto
from autoplan.profiler.imports.kineto import RankTrace, Span
from autoplan.profiler.imports.traces import is_trace, read_ranks

MOST_APART = 0.03  # of a step, between it and the sum of its parts


def whole(path: Path) -> RankTrace | None:
    """Return a trace of torch's profiler as one step, from its first kernel to its last; None without kernels."""
    events = kineto.complete_events(kineto.decoded(path, kineto._Trace).traceEvents)
    kernels = [
        (Span(1e-6 * float(event.ts), 1e-6 * (float(event.ts) + float(event.dur)), event.name), event.name)
        for event in events
        if event.cat in kineto.DEVICE_CATEGORIES and float(event.dur) > 0
    ]
    spans = [(span, kineto.activity_of(name)) for span, name in kernels]
    return kineto.summed(str(path), spans, [], has_devices=True) if spans else None


def overlap_of_hta(path: Path) -> float | None:
    """Return the percentage of communication that HTA calls hidden; None where it reads no trace, or has none."""
    with suppress(Exception):  # its own assertions, and types of pandas that it does not expect
        analysis = import_module("hta.trace_analysis").TraceAnalysis(
            trace_files={0: str(path)}, trace_dir=str(path.parent), include_last_profiler_step=True
        )
        share = float(analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0])
        return share if share == share else None
    return None


def rows_of(path: Path, folder: Path) -> list[str]:
    """Return a table row for every rank in a file, or one that says why it was refused."""
    name = str(path.relative_to(folder))
    try:
        ranks = read_ranks(path)
    except InputError as error:
        return [f"| {name} | refused: {str(error).rpartition(f'{path.name}: ')[2]} | | | | |"]
    has_hta = find_spec("hta") is not None and path.suffix in (".json", ".gz")
    rows = []
    for rank in ranks:
        apart = abs(sum(rank.seconds.values()) + rank.idle_s - rank.step_s) / rank.step_s
        assert apart < MOST_APART, (name, apart)
        hta = overlap_of_hta(path) if has_hta and rank.communication_s else None
        ours = whole(path) if hta is not None else None
        beside = (
            f"{100 * ours.hidden_s / ours.communication_s:.1f} % | {hta:.1f} %" if ours and hta is not None else " | "
        )
        exposed = f"{100 * rank.exposed_s / rank.step_s:.1f} %" if rank.communication_s else ""
        rows.append(f"| {name} | {rank.num_steps} | {1e3 * rank.step_s:.3f} ms | {exposed} | {beside} |")
    return rows


def main() -> int:
    """Read, print and, if asked, write the report."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    rows = []
    for path in sorted(options.folder.rglob("*")):
        if path.is_file() and is_trace(path):
            rows += rows_of(path, options.folder)
            print("\n".join(rows[-1:]), flush=True)
    refused = sum("| refused: " in row for row in rows)
    summary = f"{len(rows) - refused} ranks read, {refused} files refused; the parts of every step add up to it."
    print(summary)
    if options.report:
        table = "\n".join(["| trace | steps | step | exposed | hidden | HTA |", "|---|--:|--:|--:|--:|--:|", *rows])
        write_text(options.report, f"# Traces that others published\n\n{summary}\n\n{table}\n", force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
