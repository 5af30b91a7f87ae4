"""Do calibrations of the database's runs count what its timings explain once, and are others refused?"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoplan.api.calibrations import described_machine, plain_calibration
from autoplan.api.problem import make_problem
from autoplan.base.errors import InputError
from autoplan.base.version import __version__
from autoplan.cost.estimate import estimate
from autoplan.profiler.record import Record
from autoplan.profiler.run_record import RunRecord
from autoplan.profiler.store import open_store
from autoplan.readers.calibration import calibration_text, load_calibration
from autoplan.spec.calibration import Calibration, FitConditions
from autoplan.spec.enums import Sharding
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem

PLANS = [
    ParallelPlan(global_batch=64, micro_batch=1, tp=tp, pp=pp, dp_shard=16 // tp // pp, sharding=Sharding.ZERO1)
    for tp in (1, 2, 4, 8)
    for pp in (1, 2)
]


def problem(url: str, **options: str) -> Problem:
    return make_problem("llama3-8b", cluster="h100-sxm:2x8", seq_len=4096, db=url, **options)  # type: ignore[arg-type]


def steps_s(problem: Problem) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return estimate(problem, PlanBatch.of(PLANS, problem.model.num_layers)).step_s


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database of products that take twice as long as the reference, and of runs that take as long as these say."""
    path = str(tmp_path_factory.mktemp("lab") / "lab.db")
    plain = problem(path)
    machine = described_machine(plain.cluster)
    rate = plain.cluster.device.peak_flops_per_s["bf16"] * 0.35
    products = [
        Record(
            fingerprint=machine,
            operation=operation,
            shape=(m, n, k),
            dtype="bf16",
            samples_s=(2 * m * n * k / rate,) * 5,
            measured_at="2026-11-21T12:00:00Z",
        )
        for operation in ("gemm", "dgrad", "wgrad")
        for m in (512, 4096, 32768)
        for n in (512, 2048, 8192, 32768, 131072)
        for k in (512, 4096, 16384)
    ]
    with open_store(path) as store:
        store.add(products)
    truth = steps_s(problem(path, timings="db")) * 1.02
    runs = [
        RunRecord(
            fingerprint=machine,
            framework=plain.framework.name,
            model=plain.model,
            training=plain.training,
            plan=plan,
            step_s=(float(step_s),),
        )
        for plan, step_s in zip(PLANS, truth, strict=True)
    ]
    with open_store(path) as store:
        store.add(runs)
    return path


@pytest.fixture
def url(lab: str, tmp_path: Path) -> str:
    """A copy of the database, which a test may change."""
    return str(shutil.copy(lab, tmp_path))


def test_timings_and_calibration_together_count_an_error_once(url: str) -> None:
    with open_store(url, writable=False) as store:
        measured = {run.plan: run.step_s[0] for run in store.runs()}
    truth = np.array([measured[plan] for plan in PLANS])

    def error(**options: str) -> float:
        return float(np.median(np.abs(steps_s(problem(url, **options)) / truth - 1)))

    assert error(calibration="db") < error()
    alone = error(timings="db")
    assert alone == pytest.approx(1 - 1 / 1.02, rel=0.05)
    assert error(timings="db", calibration="db") <= alone
    twice = replace(problem(url, timings="db"), calibration=problem(url, calibration="db").calibration)
    assert np.median(np.abs(steps_s(twice) / truth - 1)) > 0.2


def test_a_calibration_says_what_it_was_fitted_with(url: str, tmp_path: Path) -> None:
    beside, plain = problem(url, timings="db", calibration="db"), problem(url, calibration="db")
    digest = beside.timings.digest
    assert beside.calibration.fitted_with == FitConditions(device="h100-sxm", autoplan=__version__, timings=digest)
    assert plain.calibration.fitted_with == FitConditions(device="h100-sxm", autoplan=__version__)
    path = tmp_path / "mine.toml"
    path.write_text(calibration_text(beside.calibration))
    assert load_calibration(path).fitted_with == beside.calibration.fitted_with
    again = problem(url, timings="db", calibration=str(path))
    assert steps_s(again) == pytest.approx(steps_s(beside), rel=1e-3)


def test_a_calibration_is_refused_beside_what_it_was_not_fitted_with(url: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(calibration_text(problem(url, calibration="db").calibration))
    with pytest.raises(InputError, match="was fitted without measured times, those here are"):
        problem(url, timings="db", calibration=str(path))
    beside = problem(url, timings="db", calibration="db").calibration
    path.write_text(calibration_text(beside))
    with pytest.raises(InputError, match=r"was fitted with the measured times .*, there are none here"):
        problem(url, calibration=str(path))
    with pytest.raises(InputError, match="there are none here"):
        plain_calibration(path)
    with open_store(url) as store:
        gemm = next(iter(store.records()))
        store.add([replace(gemm, shape=(1024, 1024, 1024), samples_s=(1e-3,))])
    with pytest.raises(InputError, match="was fitted with the measured times"):
        problem(url, timings="db", calibration=str(path))
    assert beside.fitted_with
    for change, says in (({"autoplan": "0.0.1"}, "with autoplan 0.0.1"), ({"device": "a100"}, "fitted on a100")):
        other = replace(beside, fitted_with=replace(beside.fitted_with, timings="", **change))
        path.write_text(calibration_text(other))
        with pytest.raises(InputError, match=says):
            problem(url, calibration=str(path))


def test_a_fit_of_before_conditions_were_kept_is_taken_without_timings_alone(url: str, tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text(calibration_text(Calibration(name="old", overall=1.2, sources=("3 runs of one's own",))))
    assert problem(url, calibration=str(path)).calibration.overall == 1.2
    with pytest.raises(InputError, match="would count an error twice"):
        problem(url, timings="db", calibration=str(path))
    path.write_text(calibration_text(Calibration(name="by hand", overall=1.2)))
    assert problem(url, timings="db", calibration=str(path)).calibration.overall == 1.2


def test_hidden_and_disturbed_runs_teach_nothing(url: str) -> None:
    with open_store(url) as store:
        runs = list(store.runs())
        before = problem(url, calibration="db").calibration
        slow = [replace(run, step_s=(5 * run.step_s[0],)) for run in runs]
        reason = "other load took 40 % of the machine"
        store.add(replace(run, status="contaminated", reason=reason) for run in slow)
        store.add(slow)
        assert store.change([run.key for run in slow], hides=True, by="ada", reason="wrong model") == len(slow)
    assert problem(url, calibration="db").calibration == before
    with open_store(url) as store:
        assert store.change([run.key for run in slow], hides=False, by="ada", reason="was right") == len(slow)
    assert problem(url, calibration="db").calibration != before
