"""Measure the kernels of training on a GPU as a set, sustained and in bursts, and fit the curves that its preset holds.

usage: python benchmarks/device_set.py measure FOLDER [--budget TIME]
       python benchmarks/device_set.py report FOLDER [--report REPORT.md]

`measure` keeps what `autoplan profile` would measure of the models below in a database in FOLDER, within its budget,
and goes on where it stopped.  `report` fits the curves to the records of this database, prints them as a preset holds
them, and tells by operation how far the preset that is shipped is from what was measured.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kernel_fits
import numpy as np
from reports import curve_toml, make_parser, write_report

from autoplan.base.arrays import Floats
from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.values import parse_duration
from autoplan.frameworks.presets import load_framework
from autoplan.profiler import fit
from autoplan.profiler.crew import Crew
from autoplan.profiler.operations.kernels import KERNELS
from autoplan.profiler.protocol import Job
from autoplan.profiler.record import Mode, Record
from autoplan.profiler.store import open_store
from autoplan.profiler.sweep import Progress, run
from autoplan.profiler.tasks import MeasurementScope, ranked_tasks
from autoplan.readers.device import load_device
from autoplan.readers.model import load_model
from autoplan.spec.operations import PRODUCTS, SHAPES, Operation
from autoplan.topology.cluster import DeviceSpec

DTYPES = ("bf16", "fp8")
ATTENTION: tuple[Operation, ...] = ("attention", "attention_backward")
EXPERTS: tuple[Operation, ...] = ("experts", "experts_backward")
MODES: tuple[Mode, ...] = ("sustained", "burst")
POINTWISE: tuple[Operation, ...] = tuple(sorted(KERNELS.difference(PRODUCTS, ATTENTION, EXPERTS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Models and degrees whose kernels are of the set."""

    models: tuple[str, ...]
    seq_lens: tuple[int, ...] = (4096,)
    tps: tuple[int, ...] = (1, 2, 4, 8)
    micro_batches: tuple[int, ...] = (1, 2)
    eps: tuple[int, ...] = (1,)
    modes: tuple[Mode, ...] = ("sustained",)
    dtype: str = "bf16"
    only: tuple[Operation, ...]

    def scopes(self) -> Iterable[MeasurementScope]:
        """A scope for each model and length."""
        for name in self.models:
            for seq_len in self.seq_lens:
                yield MeasurementScope(
                    model=load_model(name),
                    framework=load_framework("megatron-core"),
                    seq_len=seq_len,
                    tps=self.tps,
                    micro_batches=self.micro_batches,
                    eps=self.eps,
                    modes=self.modes,
                    only=self.only,
                )


# In the order of what they are worth: a budget that is spent leaves out the last ones.
PARTS = (
    Part(models=("llama3-8b",), only=("gemm",)),
    Part(models=("llama3-8b",), tps=(1, 8), micro_batches=(1,), only=("dgrad", "wgrad")),
    Part(models=("llama3-8b",), seq_lens=(1024, 4096, 16_384), tps=(1, 8), only=ATTENTION),
    Part(models=("llama3-8b",), tps=(1,), only=POINTWISE),
    Part(models=("llama3-70b",), tps=(1, 4), micro_batches=(1,), only=("gemm",)),
    Part(models=("llama3-8b",), modes=("burst",), only=("gemm", *ATTENTION)),
    Part(models=("llama3-8b",), tps=(1,), dtype="fp8", only=PRODUCTS),
    Part(models=("qwen3-30b-a3b", "mixtral-8x7b"), tps=(1,), eps=(1, 8), only=EXPERTS),
    Part(models=("qwen2.5-0.5b",), tps=(1,), micro_batches=(1, 4), only=ATTENTION),
    Part(models=("llama3-8b",), seq_lens=(2048, 8192), tps=(1, 2, 4, 8), only=ATTENTION),
    Part(models=("llama3-70b",), modes=("burst",), tps=(1, 4), micro_batches=(1,), only=("gemm",)),
    Part(models=("llama3-70b",), tps=(1, 4), micro_batches=(1,), only=("dgrad", "wgrad")),
    Part(models=("llama3-8b",), seq_lens=(1024, 4096, 16_384), tps=(2, 4), only=ATTENTION),
    Part(models=("gpt3-175b",), seq_lens=(2048,), tps=(1, 8), only=(*PRODUCTS, *ATTENTION)),
    Part(models=("llama3-8b",), tps=(2, 4), micro_batches=(1,), only=("dgrad", "wgrad")),
)


def measure(folder: Path, budget_s: float) -> None:
    """Measure what the database does not hold."""
    until = time.monotonic() + budget_s
    job = Job(dtypes=DTYPES, allowance_s=1.0)
    with open_store(str(folder / "timings.db")) as store, Crew(job, None, 1) as crew:
        hello = crew.start()
        assert hello is not None
        for part in PARTS:
            for scope in part.scopes():
                known = store.measured_keys(hello.fingerprint, 1)
                planned = [record for record in ranked_tasks(scope, hello, known) if record.task.dtype == part.dtype]
                progress, left_s = Progress(total=len(planned)), until - time.monotonic()
                run(crew, hello, store, planned, budget_s=left_s, progress=progress, visits_spoilt=False)
                counts = sum(progress.counts().values(), Counter())
                print(
                    f"{scope.model.name}, {scope.seq_len} tokens, {', '.join(part.modes)}, {part.dtype}: "
                    f"{dict(counts)}, {progress.num_left} left, {progress.elapsed_s:.0f} s",
                    flush=True,
                )
                if progress.num_left:
                    print("the budget is spent; the same command goes on")
                    return


# -- what comes of it --------------------------------------------------------------------------------------------------


def records_of(folder: Path) -> list[Record]:
    """Records that settled."""
    with open_store(str(folder / "timings.db")) as store:
        found = [record for record in store.records() if record.status == "ok"]
    if not found:
        raise InputError(f"nothing has been measured in {folder}: measure first")
    return found


def points_of(records: Iterable[Record], operation: Operation, mode: Mode, dtype: str = "bf16") -> fit.Points:
    """Shapes and median seconds of an operation, the last record of each."""
    found = {
        record.shape: record.seconds
        for record in records
        if record.operation == operation and record.mode == mode and record.dtype == dtype
    }
    shapes = np.array(list(found), dtype=np.float64).reshape(len(found), len(SHAPES[operation]))
    return fit.Points(shapes=shapes, seconds=np.array(list(found.values())))


def turned(operation: Operation, shapes: Floats) -> Floats:
    """The (m, n, k) that a product has, of the tokens, outputs and inputs of its matrix."""
    m, n, k = shapes.T
    return {"gemm": shapes, "dgrad": np.stack([m, k, n], 1), "wgrad": np.stack([n, k, m], 1)}[operation]


def error_line(name: str, predicted_s: Floats, measured_s: Floats) -> str:
    """Line of a table: how far off and in which direction."""
    errors = predicted_s / measured_s - 1
    return (
        f"{name:24s} {len(errors):4d}  {100 * np.median(np.abs(errors)):5.1f} %  "
        f"{100 * np.quantile(np.abs(errors), 0.9):5.1f} %  {100 * np.median(errors):+5.1f} %"
    )


def report(folder: Path) -> list[str]:
    """Blocks of text."""
    records = records_of(folder)
    fingerprint = records[-1].fingerprint
    device = load_device(fingerprint.device)
    if device is None:
        raise InputError(f"no preset is shipped for {fingerprint.device}: there is nothing to compare with")
    days = sorted({record.measured_at[:10] for record in records})
    made = "\n".join(f"{name}: {value}" for name, value in asdict(fingerprint).items())
    return [f"{made}\nmeasured: {' to '.join(dict.fromkeys((days[0], days[-1])))}, {len(records)} records"] + [
        "\n".join(block) for block in (curves(device, records), compared(device, records), listed(records))
    ]


def curves(device: DeviceSpec, records: list[Record]) -> list[str]:
    """Fitted to these records, each mode apart."""
    lines: list[str] = []
    for mode in MODES:
        gemms, attention = (points_of(records, operation, mode) for operation in ("gemm", "attention"))
        lines += fitted("gemm", mode, functools.partial(kernel_fits.fit_gemm, device, gemms))
        lines += fitted("attention", mode, functools.partial(kernel_fits.fit_attention, device, attention))
    return lines


def fitted(head: str, mode: Mode, make: Callable[[], fit.Fit[Any]]) -> list[str]:
    """A fit as a preset holds it, or why there is none."""
    try:
        found = make()
    except InputError as error:
        return [f"# {head}, {mode}: {error}"]
    summary = f"{found.num_held_out} of {found.num_points} shapes held out: mean error {100 * found.error:.1f} %"
    return [f"# {mode}, {summary}", curve_toml(head, found.curve, plateau=found.plateau)]


def compared(device: DeviceSpec, records: list[Record]) -> list[str]:
    """The shipped curves beside what was measured."""
    lines = [f"{'shipped curve against':24s}    n   median      p90     bias"]
    gemm, attention = device.gemm, device.attention
    plateaus: dict[Mode, tuple[float, float]] = {
        "sustained": (device.gemm_efficiency, attention.efficiency),
        "burst": (gemm.burst_efficiency, attention.burst_efficiency),
    }
    for mode, (dense, core) in plateaus.items():
        for operation in (*PRODUCTS, "attention"):
            points = points_of(records, operation, mode)
            if not len(points.seconds):
                continue
            if operation == "attention":
                predicted = kernel_fits.attention_s(device, attention, core, points.shapes)
            else:
                predicted = kernel_fits.gemm_s(device, gemm, dense, turned(operation, points.shapes))
            lines.append(error_line(f"{operation} {mode}", predicted, points.seconds))
    return lines


def listed(records: list[Record]) -> list[str]:
    """Records of all measurements."""
    lines = ["operation, mode, type and shape: time, kernel, clock and power"]
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.operation, record.mode, record.dtype].append(record)
    for (operation, mode, dtype), own in sorted(groups.items()):
        for record in sorted(own, key=lambda record: record.shape):
            seen = f"{record.conditions.get('clock_mhz', '-')} MHz {record.conditions.get('power_w', '-')} W"
            shape = "x".join(str(size) for size in record.shape)
            name = f"{operation:18s} {mode:9s} {dtype:4s} {shape:32s}"
            lines.append(f"{name} {1e6 * record.seconds:10.1f} us  {record.kernel:12s} {seen}")
    return lines


def main() -> int:
    """Do a part."""
    parser = make_parser(__doc__)
    parser.add_argument("part", choices=("measure", "report"))
    parser.add_argument("folder", type=Path, help="of the database")
    parser.add_argument("--budget", type=parse_duration, default=parse_duration("10m"), help="such as 90s or 10m")
    options: argparse.Namespace = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        if options.part == "measure":
            measure(options.folder, options.budget)
            return 0
        blocks = report(options.folder)
    except AutoplanError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n\n".join(blocks))
    if options.report:
        write_report(options.report, "Kernels of training on a GPU", "benchmarks/device_set.py", *blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
