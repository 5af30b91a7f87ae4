"""How well do curves and interpolation predict kernels and collectives that were measured but not shown to them?

usage: python benchmarks/interpolation.py [--tables FOLDER] [--devices NAME ...] [--report REPORT.md]

Reads the tables of aiconfigurator-core (extra `reference`), fits the curves of every device, and prints them as the
presets hold them, with the errors on held-out shapes: of the fitted curve, of one efficiency and one launch, and of the
curve by eye that came before.  The table's own interpolation is judged on the shapes off its powers of two.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from dataclasses import asdict, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import DeviceSpec, LinkLevel
from autoplan.cost.communication import all_gather_s, all_reduce_s, all_to_all_s
from autoplan.cost.compute import GROUPED_HALF_M, GROUPED_SHARE
from autoplan.curves import AttentionCurve, CollectiveCurve, GemmCurve
from autoplan.errors import AutoplanError
from autoplan.files import write_text
from autoplan.read.cluster import load_cluster
from autoplan.timing import Measurement, TimingTable
from autoplan.topology import Topology, compile_topology
from autoplan.units import file_units
from profiler import fit
from profiler.choice import COLLECTIVES_KERNEL, EXPERTS_KERNEL, for_training
from profiler.imports.aiconfigurator import read_measurements

Floats = NDArray[np.float64]

CLUSTERS = {
    "a100-sxm": "a100-sxm",
    "h100-sxm": "h100-sxm",
    "h200-sxm": "h200-sxm",
    "b200": "b200",
    "b300": "b300",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "l40s": "l40s",
}
BY_EYE = GemmCurve(half_m=64, half_n=64, half_k=110, half_output=0, start_s=0, source="")
OCCUPANCY_ALONE = AttentionCurve(half_seq_len=0, half_blocks=1, half_head_dim=0, start_s=0, source="")
CONSTANT = GemmCurve(half_m=0, half_n=0, half_k=0, half_output=0, start_s=4e-6, source="")


def _level(predicted_s: Floats, measured_s: Floats) -> float:
    """The factor that takes the median bias out of predictions, so that shapes alone are compared."""
    return float(np.exp(np.median(np.log(measured_s / predicted_s))))


def _error(predicted_s: Floats, measured_s: Floats) -> float:
    return fit.mean_error(predicted_s * _level(predicted_s, measured_s), measured_s)


def _toml(head: str, curve: Any, **more: float) -> str:
    lines = [f"[{head}]"]
    for one in fields(curve):
        if one.name in ("source", "efficiency"):  # the level is that of training, not of the tables
            continue
        value, key = getattr(curve, one.name), one.name
        for human, inside, factor in file_units(one.name):
            if human in ("_us", "_mib"):
                key, value = one.name[: -len(inside)] + human, value / factor
        lines.append(f"{key} = {value:.3g}")
    return "\n".join([*lines, *(f"# {name}: {value:.3g}" for name, value in more.items())])


def _gemms(device: DeviceSpec, measurements: list[Measurement]) -> tuple[str, str]:
    points = fit.training_gemms(fit.points_of(measurements))
    found: fit.Fit[GemmCurve] = fit.fit_gemm(device, points)
    unseen = points.where(fit.held_out_gemms(points))
    large = unseen.where(np.all(unseen.shapes >= 512, axis=1))
    row = [device.name, "GEMM", found.num_points, found.num_held_out, found.error]
    for curve in (CONSTANT, BY_EYE):
        row.append(_error(fit.gemm_s(device, curve, found.plateau, unseen.shapes), unseen.seconds))
    row.append(_error(fit.gemm_s(device, found.curve, found.plateau, large.shapes), large.seconds))
    row.append(_interpolation(measurements))
    return _row(row), _toml("gemm", found.curve)


def _interpolation(measurements: list[Measurement]) -> float:
    """Error of a table that holds the powers of two alone, on the other shapes that training has."""
    known = [one for one in measurements if all(size & (size - 1) == 0 for size in one.shape)]
    points = fit.training_gemms(fit.points_of(measurements))
    others = points.where(np.any(np.log2(points.shapes) % 1 != 0, axis=1))
    found = TimingTable.of(known).lookup("gemm", "bf16", others.shapes).seconds
    inside = ~np.isnan(found)
    return fit.mean_error(found[inside], others.seconds[inside])


def _attention(device: DeviceSpec, measurements: list[Measurement]) -> tuple[str, str]:
    points = fit.training_attention(fit.points_of(for_training(measurements, device)))
    found: fit.Fit[AttentionCurve] = fit.fit_attention(device, points)
    unseen = points.where(fit.held_out_attention(points))
    long = unseen.where(unseen.shapes[:, 1] >= 2048)
    flat = fit.attention_s(device, OCCUPANCY_ALONE, found.plateau, unseen.shapes)
    at_long = fit.attention_s(device, found.curve, found.plateau, long.shapes)
    row = [device.name, "attention", found.num_points, found.num_held_out, found.error, None]
    return _row([*row, _error(flat, unseen.seconds), _error(at_long, long.seconds), None]), _toml(
        "attention", found.curve
    )


def _experts(device: DeviceSpec, measurements: list[Measurement]) -> tuple[str, str]:
    usable = [one for one in measurements if one.kernel == EXPERTS_KERNEL]
    if not usable:
        return _row([device.name, "experts", *[None] * 7]), "# experts: not measured with balanced routing"
    points = fit.training_experts(fit.points_of(usable))
    found = fit.fit_experts(device, points)
    unseen = points.where(fit.held_out_experts(points))
    by_eye = fit.ExpertsCurve(half_tokens=GROUPED_HALF_M, traffic=1.0, start_s=found.curve.start_s)
    many = unseen.where(unseen.shapes[:, 0] * unseen.shapes[:, 3] / unseen.shapes[:, 4] >= 128)
    row = [device.name, "experts", found.num_points, found.num_held_out, found.error, None]
    row.append(_error(fit.experts_s(device, by_eye, GROUPED_SHARE, unseen.shapes), unseen.seconds))
    row.append(fit.mean_error(fit.experts_s(device, found.curve, 1.0, many.shapes), many.seconds))
    bias = fit.experts_s(device, by_eye, GROUPED_SHARE, many.shapes) / many.seconds
    shown = [f"# experts, {name}: {value:.3g}" for name, value in asdict(found.curve).items()]
    return _row([*row, None]), "\n".join(
        [*shown, f"# experts, time of the cost model: {np.median(bias):.2f} x measured"]
    )


def _collectives(name: str, link: LinkLevel, measurements: list[Measurement]) -> tuple[str, str]:
    points = fit.collective_points(
        one for one in measurements if one.kernel == COLLECTIVES_KERNEL and one.dtype == "fp16"
    )
    found: fit.Fit[CollectiveCurve] = fit.fit_collectives(link, points)
    large = points.where(points.shapes[:, 3] >= 2**20)
    at_large = fit.mean_error(fit.collective_s(link, found.curve, found.plateau, large.shapes), large.seconds)
    unseen = points.where(fit.held_out_collectives(points))
    by_eye = fit.mean_error(_without_curve(link, unseen.shapes), unseen.seconds)
    row = [name, "collectives", found.num_points, found.num_held_out, found.error, None, by_eye, at_large, None]
    return _row(row), _toml("levels.collectives", found.curve, efficiency=found.plateau)


def _without_curve(link: LinkLevel, rows: Floats) -> Floats:
    """Seconds of collectives, rows as `fit.collective_s` takes them, by the latency and ramp of the link alone."""
    level = compile_topology(replace(load_cluster("h100-sxm:1x8"), levels=(link,), devices_per_node=2)).levels[0]
    result = np.empty(len(rows))
    for at, (volume, exchanges, members, buffer_bytes) in enumerate(rows.tolist()):
        topology = Topology(levels=(replace(level, num_devices=int(members), collectives=None),))
        collective = all_to_all_s if exchanges else all_reduce_s if volume > 1 else all_gather_s
        result[at] = collective(topology, np.array([1]), np.array([int(members)]), np.array([buffer_bytes]))[0]
    return result


def _row(cells: list[Any]) -> str:
    shown = ["-" if cell is None else f"{100 * cell:.1f} %" if isinstance(cell, float) else str(cell) for cell in cells]
    return f"| {' | '.join(shown)} |"


HEAD = """| device | operation | shapes | held out | fitted | one rate and launch | by eye | fitted, large | table |
|---|---|--:|--:|--:|--:|--:|--:|--:|"""


LEGEND = """Fitted to the tables of aiconfigurator-core {} (bf16; GEMM: median of its libraries, attention: the fastest
flash kernel, collectives: NCCL, experts: balanced, with CUTLASS, at the dense plateau).  Errors are mean
|predicted / measured - 1| on shapes held out; those of GEMMs, attention and experts that were not fitted have their
median bias taken out.  By eye: the cost model before this fit, for experts also now.  Large: GEMMs of 512 and more in
every direction, sequences of 2,048, messages of 1 MiB, 128 tokens for each expert.  Table: interpolated between the
powers of two.  l40s: its two kinds of links fit no one curve, none is shipped.
"""


def main() -> int:
    """Fit, print and, if asked, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=Path, help="folder systems/data of the wheel, if it is not installed")
    parser.add_argument("--devices", nargs="+", choices=tuple(CLUSTERS), default=list(CLUSTERS))
    parser.add_argument("--report", type=Path, help="write the table to this Markdown file as well")
    options = parser.parse_args()
    rows, tables = [], []
    try:
        for name in options.devices:
            cluster = load_cluster(CLUSTERS[name])
            held = [one for one in read_measurements(options.tables, devices=[name]) if one.dtype in ("bf16", "fp16")]
            of = {kind: [one for one in held if one.operation == kind] for kind in ("gemm", "attention", "experts")}
            parts = [
                _gemms(cluster.device, of["gemm"]),
                _attention(cluster.device, of["attention"]),
                _experts(cluster.device, of["experts"]),
                _collectives(name, cluster.levels[-1], held),
            ]
            rows += [row for row, _ in parts]
            tables.append("\n\n".join([f"# {name}", *(table for _, table in parts)]))
            print("\n".join(row for row, _ in parts), tables[-1], sep="\n\n", flush=True)
    except AutoplanError as error:
        print(error, file=sys.stderr)
        return 1
    if options.report:
        version = metadata.version("aiconfigurator-core")
        head = f"# Curves of kernels and collectives, {datetime.date.today().isoformat()}\n\n{LEGEND.format(version)}"
        body = "\n".join([head, HEAD, *rows, "", "```toml", "\n\n".join(tables), "```", ""])
        write_text(options.report, body, force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
