"""Errors of curves and interpolation on measured kernels and collectives that were held out.

usage: python benchmarks/interpolation.py [--tables FOLDER] [--devices NAME ...] [--report REPORT.md]

Reads the tables of aiconfigurator-core (extra `reference`), fits the curves of every device, and prints them as the
presets hold them, with the errors on held-out shapes: of the fitted curve, of one efficiency and one launch, and of the
curve by eye that came before, or for experts of the cost model.  Then hides measured shapes from a table of times, and
compares what it answers for them with radial basis functions and with the curves.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import kernel_fits
import numpy as np
from reports import curve_toml, make_parser
from scipy.interpolate import RBFInterpolator

from autoplan.base import interpolation
from autoplan.base.arrays import Bools, Floats
from autoplan.base.curves import AttentionCurve, CollectiveCurve, GemmCurve
from autoplan.base.errors import AutoplanError
from autoplan.base.files import write_text
from autoplan.cost.network.algorithms import ProcessGroup, collective_s
from autoplan.profiler import fit
from autoplan.profiler.imports.aiconfigurator import read_measurements
from autoplan.profiler.selection import COLLECTIVES_KERNEL, EXPERTS_KERNEL, for_training
from autoplan.readers.cluster import load_cluster
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import Operation
from autoplan.spec.timing import TimingTable
from autoplan.topology.cluster import ClusterSpec, DeviceSpec, LinkLevel
from autoplan.topology.levels import Topology, compile_topology

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
SEED, HIDDEN_SHARE = 0, 0.8  # TABLE_LEGEND tells them
VARIANTS: dict[str, dict[str, float]] = {
    "as it is": {},
    "no sum of products, time per operation alone": {"UNSEEN": 0},
    "6 neighbours": {"NEIGHBOURS": 6},
    "24 neighbours": {"NEIGHBOURS": 24},
    "no regard to tiles": {"PADDING": 0},
    "tiles, three times the distance": {"PADDING": 1},
    "tiles of 64": {"TILE": 64},
    "tiles of 256": {"TILE": 256},
}
RATIOS = (1, 1.5, 2, 3, 4, 6, 10)
CONSTANT = GemmCurve(half_m=0, half_n=0, half_k=0, half_output=0, start_s=4e-6, source="")


def _level(predicted_s: Floats, measured_s: Floats) -> float:
    """The factor that takes the median bias out of predictions, so that shapes alone are compared."""
    return float(np.exp(np.median(np.log(measured_s / predicted_s))))


def _error(predicted_s: Floats, measured_s: Floats) -> float:
    return fit.mean_error(predicted_s * _level(predicted_s, measured_s), measured_s)


def _gemms(device: DeviceSpec, measurements: list[Measurement]) -> tuple[str, str]:
    points = kernel_fits.training_gemms(fit.points_of(measurements))
    found: fit.Fit[GemmCurve] = kernel_fits.fit_gemm(device, points)
    unseen = points.where(kernel_fits.held_out_gemms(points))
    large = unseen.where(np.all(unseen.shapes >= 512, axis=1))
    row = [device.name, "GEMM", found.num_points, found.num_held_out, found.error]
    for curve in (CONSTANT, BY_EYE):
        row.append(_error(kernel_fits.gemm_s(device, curve, found.plateau, unseen.shapes), unseen.seconds))
    row.append(_error(kernel_fits.gemm_s(device, found.curve, found.plateau, large.shapes), large.seconds))
    return _row(row), curve_toml("gemm", found.curve)


def _flash(device: DeviceSpec, measurements: list[Measurement]) -> fit.Points:
    return kernel_fits.training_attention(fit.points_of(for_training(measurements, device)))


def _attention(device: DeviceSpec, measurements: list[Measurement]) -> tuple[str, str]:
    points = _flash(device, measurements)
    found: fit.Fit[AttentionCurve] = kernel_fits.fit_attention(device, points)
    unseen = points.where(kernel_fits.held_out_attention(points))
    long = unseen.where(unseen.shapes[:, 1] >= 2048)
    flat = kernel_fits.attention_s(device, OCCUPANCY_ALONE, found.plateau, unseen.shapes)
    at_long = kernel_fits.attention_s(device, found.curve, found.plateau, long.shapes)
    row = [device.name, "attention", found.num_points, found.num_held_out, found.error, None]
    row += [_error(flat, unseen.seconds), _error(at_long, long.seconds)]
    return _row(row), curve_toml("attention", found.curve)


def _experts(device: DeviceSpec, measurements: list[Measurement]) -> tuple[str, str]:
    usable = [measurement for measurement in measurements if measurement.kernel == EXPERTS_KERNEL]
    if not usable:
        return _row([device.name, "experts", *[None] * 6]), "# experts: not measured with balanced routing"
    points = kernel_fits.training_experts(fit.points_of(usable))
    found = kernel_fits.fit_experts(device, points)
    unseen = points.where(kernel_fits.held_out_experts(points))
    by_model = functools.partial(kernel_fits.dense_experts_s, device, found.curve.start_s)
    many = unseen.where(unseen.shapes[:, 0] * unseen.shapes[:, 3] / unseen.shapes[:, 4] >= 128)
    row = [device.name, "experts", found.num_points, found.num_held_out, found.error, None]
    row.append(_error(by_model(unseen.shapes), unseen.seconds))
    row.append(fit.mean_error(kernel_fits.experts_s(device, found.curve, 1.0, many.shapes), many.seconds))
    bias = by_model(many.shapes) / many.seconds
    shown = [f"# experts, {name}: {value:.3g}" for name, value in asdict(found.curve).items()]
    return _row(row), "\n".join([*shown, f"# experts, time of the cost model: {np.median(bias):.2f} x measured"])


def _collectives(name: str, link: LinkLevel, measurements: list[Measurement]) -> tuple[str, str]:
    points = fit.collective_points(measurements)
    found: fit.Fit[CollectiveCurve] = fit.fit_collectives(link, points)
    large = points.where(points.shapes[:, 3] >= 2**20)
    at_large = fit.mean_error(fit.collective_s(link, found.curve, found.plateau, large.shapes), large.seconds)
    unseen = points.where(fit.held_out_collectives(points))
    by_eye = fit.mean_error(_without_curve(link, unseen.shapes), unseen.seconds)
    row = [name, "collectives", found.num_points, found.num_held_out, found.error, None, by_eye, at_large]
    return _row(row), curve_toml("levels.collectives", found.curve, efficiency=found.plateau)


def _without_curve(link: LinkLevel, rows: Floats) -> Floats:
    """Seconds of collectives, rows as `fit.collective_s` takes them, by the latency and ramp of the link alone."""
    level = compile_topology(replace(load_cluster("h100-sxm:1x8"), levels=(link,), devices_per_node=2)).levels[0]
    result = np.empty(len(rows))
    for at, (volume, exchanges, members, buffer_bytes) in enumerate(rows.tolist()):
        topology = Topology(levels=(replace(level, num_devices=int(members), collectives=None),))
        operation: Operation = "all_to_all" if exchanges else "all_reduce" if volume > 1 else "all_gather"
        group = ProcessGroup(np.array([1]), np.array([int(members)]))
        result[at] = collective_s(topology, operation, group, np.array([buffer_bytes]))[0]
    return result


def _by_operation(measurements: Iterable[Measurement]) -> dict[Operation, list[Measurement]]:
    """Measurements looked at: bf16 kernels, and NCCL in fp16; in ascending order of shape."""
    result: dict[Operation, list[Measurement]] = defaultdict(list)
    for measurement in sorted(measurements, key=lambda measurement: measurement.shape):
        nccl = measurement.kernel == COLLECTIVES_KERNEL and measurement.dtype == "fp16"
        if nccl if measurement.operation in fit.VOLUMES else measurement.dtype == "bf16":
            result[measurement.operation].append(measurement)
    return result


def _products(measurements: list[Measurement]) -> fit.Points:
    points = fit.points_of(measurements)
    return points.where(points.shapes[:, 0] >= 256)


def _hidden_rows(points: fit.Points, share: float = HIDDEN_SHARE) -> Bools:
    return np.random.default_rng(SEED).random(len(points.seconds)) < share


def _hidden_matrices(points: fit.Points) -> Bools:
    """Rows of some (n, k)."""
    matrices, matrix_of = np.unique(points.shapes[:, 1:], axis=0, return_inverse=True)
    return (np.random.default_rng(SEED).random(len(matrices)) < HIDDEN_SHARE)[matrix_of.ravel()]


def _hidden_sizes(points: fit.Points) -> Bools:
    """Alternate buffers, of powers of two."""
    return np.log2(points.shapes[:, -1]) % 2 == 0


def _table_s(operation: Operation, known: fit.Points, shapes: Floats) -> Floats:
    table = TimingTable.of(
        Measurement(operation=operation, shape=tuple(shape), dtype="bf16", device="", seconds=seconds)
        for shape, seconds in zip(known.shapes.astype(int).tolist(), known.seconds.tolist(), strict=True)
    )
    return table.lookup(operation, "bf16", shapes).seconds


def _radial_s(operation: Operation, known: fit.Points, shapes: Floats) -> Floats:
    """Times by linear radial basis functions of the 50 nearest points: log of time per product of sizes.

    Of collectives those of as many devices.
    """
    seconds = np.empty(len(shapes))
    group, groups = (at[:, 0] * (operation in fit.VOLUMES) for at in (shapes, known.shapes))
    for number in np.unique(group):
        points, asked = known.where(groups == number), shapes[group == number]
        varied = np.ptp(points.shapes, axis=0) > 0
        places = points.shapes[:, varied]
        values = np.log(points.seconds / places.prod(axis=1))
        found = RBFInterpolator(np.log(places), values, kernel="linear", degree=0, neighbors=50)
        seconds[group == number] = np.exp(found(np.log(asked[:, varied]))) * asked[:, varied].prod(axis=1)
    return seconds


def _curve_s(cluster: ClusterSpec, operation: Operation, shapes: Floats) -> Floats:
    """Times by the curves that the device and its innermost link ship with; NaN where they have none."""
    device, link = cluster.device, cluster.levels[-1]
    if operation == "gemm":
        return kernel_fits.gemm_s(device, device.gemm, device.gemm.burst_efficiency, shapes)
    if operation == "attention":
        return kernel_fits.attention_s(device, device.attention, device.attention.burst_efficiency, shapes)
    if link.collectives is None:
        return np.full(len(shapes), np.nan)
    kind = np.tile((fit.VOLUMES[operation], float(operation == "all_to_all")), (len(shapes), 1))
    return fit.collective_s(link, link.collectives, link.efficiency, np.hstack([kind, shapes[:, [0, -1]]]))


def _spread(predicted_s: Floats, measured_s: Floats) -> list[float | None]:
    """Median and 95th percentile of |predicted / measured - 1|, of what was not refused."""
    errors = np.abs(predicted_s / measured_s - 1)
    errors = errors[~np.isnan(errors)]
    return np.quantile(errors, (0.5, 0.95)).tolist() if len(errors) else [None, None]


def _left_out(cluster: ClusterSpec, operation: Operation, what: str, points: fit.Points, hidden: Bools) -> str:
    known, unseen = points.where(~hidden), points.where(hidden)
    found = _table_s(operation, known, unseen.shapes)
    others = (_radial_s(operation, known, unseen.shapes), _curve_s(cluster, operation, unseen.shapes))
    cells = [cell for way in (found, *others) for cell in _spread(way, unseen.seconds)]
    head = [cluster.device.name, operation, what, len(known.seconds), len(unseen.seconds)]
    return _row([*head, *cells, float(np.isnan(found).mean())])


def _left_out_rows(cluster: ClusterSpec, of: dict[Operation, list[Measurement]]) -> list[str]:
    """Rows of all leave-out tests of one device."""
    gemms, attention = _products(of["gemm"]), _flash(cluster.device, of["attention"])
    rows = [
        _left_out(cluster, "gemm", "rows", gemms, _hidden_rows(gemms)),
        _left_out(cluster, "gemm", "(n, k) pairs", gemms, _hidden_matrices(gemms)),
        _left_out(cluster, "attention", "rows", attention, _hidden_rows(attention)),
    ]
    for operation in fit.VOLUMES:
        points = fit.points_of(of[operation])
        rows.append(_left_out(cluster, operation, "every second size", points, _hidden_sizes(points)))
    return rows


@contextmanager
def _set(constants: dict[str, float]) -> Iterator[None]:
    """The table's interpolation with other constants."""
    before = {name: getattr(interpolation, name) for name in constants}
    vars(interpolation).update(constants)
    try:
        yield
    finally:
        vars(interpolation).update(before)


def _variant(constants: dict[str, float], gemms: list[fit.Points]) -> list[float | None]:
    """Errors of the leave-out tests of products, of all devices together."""
    cells = []
    for hide in (_hidden_rows, _hidden_matrices):
        ratios = []
        for points in gemms:
            hidden = hide(points)
            unseen = points.where(hidden)
            with _set(constants):
                ratios.append(_table_s("gemm", points.where(~hidden), unseen.shapes) / unseen.seconds)
        cells += _spread(np.concatenate(ratios), np.ones(1))
    return cells


def _by_distance(gemms: dict[str, fit.Points]) -> list[str]:
    """Rows of the errors of table and curve by the distance of the nearest point, of tables of few points."""
    found, ratio = [], []
    for name, points in gemms.items():
        hidden = _hidden_rows(points, share=0.99)
        known, unseen = points.where(~hidden), points.where(hidden)
        with _set({"FAR": math.inf}):
            table_s = _table_s("gemm", known, unseen.shapes)
        curve_s = _curve_s(load_cluster(CLUSTERS[name]), "gemm", unseen.shapes)
        found.append(np.stack([table_s, curve_s]) / unseen.seconds)
        steps = np.log(unseen.shapes)[:, None] - np.log(known.shapes)
        ratio.append(np.exp(np.sqrt(np.sum(steps**2, axis=-1)).min(axis=1)))
    errors, ratios, rows = np.concatenate(found, axis=1), np.concatenate(ratio), []
    for low, high in itertools.pairwise(RATIOS):
        own = (ratios >= low) & (ratios < high)
        cells = [cell for way in errors[:, own] for cell in _spread(way, np.ones(1))]
        rows.append(_row([f"{low:g} to {high:g}", int(own.sum()), *cells]))
    return rows


def _row(cells: list[Any]) -> str:
    shown = ["-" if cell is None else f"{100 * cell:.1f} %" if isinstance(cell, float) else str(cell) for cell in cells]
    return f"| {' | '.join(shown)} |"


HEAD = """| device | operation | shapes | held out | fitted | one rate and launch | by eye | fitted, large |
|---|---|--:|--:|--:|--:|--:|--:|"""
TABLE_HEAD = """| device | operation | hidden | known | hidden | table | p95 | radial | p95 | curve | p95 | refused |
|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""
VARIANT_HEAD = """| table | rows | p95 | (n, k) pairs | p95 |
|---|--:|--:|--:|--:|"""
DISTANCE_HEAD = """| ratio | shapes | table | p95 | curve | p95 |
|---|--:|--:|--:|--:|--:|"""


LEGEND = """Fitted to the tables of aiconfigurator-core {} (bf16; GEMM: median of its libraries, attention: the fastest
flash kernel, collectives: NCCL, experts: balanced, with CUTLASS, at the dense plateau).  Errors are mean
|predicted / measured - 1| on shapes held out; those of GEMMs, attention and experts that were not fitted have their
median bias taken out.  By eye: the cost model before this fit, for experts that of now.  Large: GEMMs of 512 and more
in every direction, sequences of 2,048, messages of 1 MiB, 128 tokens for each expert.  l40s: its two kinds of links fit
no one curve, none is shipped.
"""

TABLE_LEGEND = """## Times between measured shapes

A `TimingTable` of the known shapes is asked for the hidden ones.  Errors are the median and the 95th percentile of
|predicted / measured - 1|.  Products are those of m >= 256, of each shape the median over all libraries and versions of
the wheel; attention is the fastest flash kernel, collectives are the median over the versions of NCCL, in fp16.  Hidden
are 80 % of the rows, 80 % of the pairs (n, k) with all their m (in ascending order, numpy's default_rng(0)), or every
second buffer size.  Radial: linear radial basis functions, scipy's RBFInterpolator with 50 neighbours, on the logarithm
of time per product of the sizes.  Curve: as shipped, fitted to training shapes, many of which are hidden here.
Refused: share of the hidden shapes for which the table gives no answer; no error of the table counts them.
"""

VARIANT_LEGEND = """What the parts of the table are worth, over all products above together:
"""

DISTANCE_LEGEND = """Products by the distance of the nearest known point, where 99 % of the rows are hidden and none is
refused for its distance.  A ratio of 4 is one size four times as large, or two sizes 2.7 times:
"""


def main() -> int:
    """Fit, print and, if asked, write the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--tables", type=Path, help="folder systems/data of the wheel, if it is not installed")
    parser.add_argument("--devices", nargs="+", choices=tuple(CLUSTERS), default=list(CLUSTERS))
    options = parser.parse_args()
    rows, tables, left_out, gemms = [], [], [], {}
    try:
        for name in options.devices:
            cluster = load_cluster(CLUSTERS[name])
            of = _by_operation(read_measurements(options.tables, devices=[name]))
            parts = [
                _gemms(cluster.device, of["gemm"]),
                _attention(cluster.device, of["attention"]),
                _experts(cluster.device, of["experts"]),
                _collectives(
                    name, cluster.levels[-1], [measurement for kind in fit.VOLUMES for measurement in of[kind]]
                ),
            ]
            rows += [row for row, _ in parts]
            tables.append("\n\n".join([f"# {name}", *(table for _, table in parts)]))
            left_out += _left_out_rows(cluster, of)
            gemms[name] = _products(of["gemm"])
            print("\n".join(row for row, _ in parts), tables[-1], sep="\n\n", flush=True)
    except AutoplanError as error:
        print(error, file=sys.stderr)
        return 1
    variants = [_row([name, *_variant(constants, list(gemms.values()))]) for name, constants in VARIANTS.items()]
    sections = [
        "\n".join([TABLE_LEGEND, TABLE_HEAD, *left_out]),
        "\n".join([VARIANT_LEGEND, VARIANT_HEAD, *variants]),
        "\n".join([DISTANCE_LEGEND, DISTANCE_HEAD, *_by_distance(gemms)]),
    ]
    print("\n\n".join(sections))
    if options.report:
        version = metadata.version("aiconfigurator-core")
        head = f"# Curves of kernels and collectives, {datetime.date.today().isoformat()}\n\n{LEGEND.format(version)}"
        curves = "\n".join([head, HEAD, *rows, "", "```toml", "\n\n".join(tables), "```"])
        write_text(options.report, "\n\n".join([curves, *sections]) + "\n", force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
