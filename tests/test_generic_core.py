"""Are runs on cores that nobody measured inside the interval that is stated for them?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoplan.cost.estimate import estimate
from autoplan.readers.calibration import load_calibration
from autoplan.spec.measurement import Measurement
from autoplan.spec.plan import PlanBatch
from autoplan.spec.timing import TimingTable
from benchmarks.loop_plans import label, plans_of, problem_of

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ROW = re.compile(r"\| (?P<plan>.+?) \| \d+ ms \| (?P<measured_ms>\d+) ms \|")


def measured() -> Iterator[tuple[str, str, dict[str, float]]]:
    """(precision, model, measured seconds of a step by the name of the plan) of all closed loops on hosts."""
    for name, precision in (("closed_loop", "bf16"), ("closed_loop_fp32", "fp32")):
        for path in sorted(RESULTS.glob(f"*_{name}.md")):
            for part in path.read_text().split("\n## ")[1:]:
                steps_s = {row["plan"]: int(row["measured_ms"]) / 1e3 for row in ROW.finditer(part)}
                yield precision, part.split()[0], steps_s


def test_nine_of_ten_runs_on_unmeasured_cores_are_inside_the_interval() -> None:
    inside: list[float] = []
    for precision, model, step_s in measured():
        problem = problem_of(model)
        problem = replace(problem, training=replace(problem.training, precision=precision))  # type: ignore[arg-type]
        plans = [replace(core_plan, precision=precision) for core_plan in plans_of(model) if label(core_plan) in step_s]  # type: ignore[arg-type]
        cost = estimate(problem, PlanBatch.of(plans, problem.model.num_layers))
        took_s = np.array([step_s[label(plan)] for plan in plans])
        inside += ((cost.low_s < took_s) & (took_s < cost.high_s)).tolist()
    assert len(inside) > 200
    assert 0.85 <= np.mean(inside) <= 0.95


def test_what_was_measured_on_the_cores_takes_that_width_away(tmp_path: Path) -> None:
    problem = problem_of("tiny")
    assert problem.machine_spread > 0.5
    layer = Measurement(operation="gemm", shape=(64, 64, 64), dtype="bf16", device="cpu", seconds=1e-5)
    message = Measurement(operation="send_recv", shape=(2, 2, 1, 64), dtype="bf16", device="cpu", seconds=1e-5)
    kernels, links = (replace(problem, timings=TimingTable.of([record])) for record in (layer, message))
    assert kernels.machine_spread == 0.0
    assert links.machine_spread == problem.machine_spread
    own = tmp_path / "own.toml"
    own.write_text('name = "own"\ntime_spread = 0.1\nsources = ["3 runs of one\'s own"]\n')
    assert replace(problem, calibration=load_calibration(own)).machine_spread == 0.0


def test_other_devices_are_what_they_are_called() -> None:
    from autoplan.readers.cluster import load_cluster

    assert load_cluster("mi300x:1x8").device.rate_spread == 0.0
    with pytest.raises(ValueError, match="rate_spread must be between 0 and 5, got 6"):
        replace(load_cluster("cpu:1x2").device, rate_spread=6.0)
