"""Does a calibration find the factors that made the measurements, and state how far off it is?"""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

import autoplan
from autoplan.cost.calibration import (
    RUNS_PER_FACTOR,
    MeasuredRun,
    Pricer,
    calibrated,
    conformal_spread,
    factors_for,
    fit,
    fit_cluster,
)
from autoplan.cost.estimate import estimate
from autoplan.cost.spreads import NORMAL_90, spread_range
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.readers.calibration import built_in_calibration, calibration_text, load_calibration
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.readers.model import load_model
from autoplan.spec.calibration import FACTORS, Calibration
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from commands import run
from problems import problem_for

MODELS = {name: load_model(name) for name in ("llama3-8b", "llama2-13b", "llama3-70b")}
SIZES = ((1, 2048), (2, 4096), (4, 8192))  # nodes, tokens of a sequence
PLACES = ((1, 1), (2, 1), (4, 2), (8, 1))  # tp, pp


@cache
def problem_of(model: str, nodes: int, seq_len: int) -> Problem:
    return problem_for(MODELS[model], f"h100-sxm:{nodes}x8", seq_len=seq_len, calibration=Calibration())


@cache
def measured_under(truth: Calibration, noise: float = 0.0, seed: int = 0) -> list[MeasuredRun]:
    """Runs of several models, sizes and plans, as if measured where `truth` holds."""
    random = np.random.default_rng(seed)
    runs = []
    for model, (nodes, seq_len) in itertools.product(MODELS, SIZES):
        problem = problem_of(model, nodes, seq_len)
        plans = [
            ParallelPlan(global_batch=64, tp=tp, sp=tp > 1, pp=pp, dp_shard=nodes * 8 // (tp * pp)) for tp, pp in PLACES
        ]
        batch = PlanBatch.of(plans, problem.model.num_layers)
        costs_s = estimate(replace(problem, calibration=truth), batch).step_s.tolist()
        for plan, cost_s in zip(plans, costs_s, strict=True):
            step_s = cost_s * float(np.exp(noise * random.standard_normal()))
            runs.append(MeasuredRun(problem=problem, plan=plan, step_s=step_s))
    return runs


@pytest.mark.parametrize(("overall", "memory_bound"), [(0.85, 1.2), (1.2, 0.9)])
def test_a_fit_recovers_the_factors_that_made_the_runs(overall: float, memory_bound: float) -> None:
    runs = measured_under(Calibration(overall=overall, memory_bound=memory_bound))
    found = fit(runs, Calibration())
    assert len(factors_for(len(runs))) == 2
    errors = np.log(Pricer(runs).calibrated_s(found) / [run.step_s for run in runs])
    assert np.abs(errors).max() < 0.02
    assert found.overall == pytest.approx(overall, rel=0.05)


def test_runs_at_the_level_of_the_base_leave_it_as_it_is() -> None:
    base = Calibration(overall=1.2, memory_bound=0.9)
    found = fit(measured_under(base), base)
    assert [getattr(found, name) for name in FACTORS] == pytest.approx([getattr(base, name) for name in FACTORS])


def test_an_erratic_run_does_not_move_the_others() -> None:
    runs = measured_under(Calibration(overall=1.1), noise=0.02)
    erratic = [replace(runs[0], step_s=10 * runs[0].step_s), *runs[1:]]
    assert fit(erratic, Calibration(), FACTORS[:1]).overall == pytest.approx(1.1, rel=0.02)


def test_every_fifteen_runs_allow_another_factor() -> None:
    assert [len(factors_for(count)) for count in (1, 14, 15, 29, 30, 45, 10_000)] == [1, 1, 1, 1, 2, 3, len(FACTORS)]
    assert RUNS_PER_FACTOR == 15


@pytest.mark.parametrize("count", [3, 5])
def test_three_runs_are_enough_and_make_the_others_of_the_cluster_no_worse(count: int) -> None:
    truth = Calibration(overall=1.25, scale_up=1.2)
    runs = measured_under(truth, noise=0.03)
    few = calibrated(runs[::13][:count], name="mine")
    before, after = (
        np.abs(np.log(Pricer(runs).calibrated_s(calibration) / [run.step_s for run in runs]))
        for calibration in (Calibration(), few.calibration)
    )
    assert np.median(after) < np.median(before) / 3
    assert after.max() <= before.max()
    assert few.median_error < few.median_error_before
    assert few.calibration.time_spread is not None
    assert 0.03 < few.calibration.time_spread <= spread_range(runs[0].problem)[1]


def test_runs_that_contradict_each_other_teach_nothing() -> None:
    runs = measured_under(Calibration())[::13][:3]
    scattered = [replace(run, step_s=run.step_s * factor) for run, factor in zip(runs, (0.5, 1.0, 2.0), strict=True)]
    before = Pricer(runs).calibrated_s(Calibration())
    assert np.abs(np.log(Pricer(runs).calibrated_s(fit_cluster(scattered)) / before)).max() < 0.02


@pytest.mark.parametrize("level", [0.6, 1.5])
def test_three_runs_that_agree_move_the_level_however_far(level: float) -> None:
    runs = measured_under(Calibration(overall=level), noise=0.01)[::13][:3]
    before = Pricer(runs).calibrated_s(Calibration())
    assert Pricer(runs).calibrated_s(fit_cluster(runs)) / before == pytest.approx(level, rel=0.03)


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_an_erratic_run_of_three_changes_nothing_where_the_other_two_agree(factor: float) -> None:
    runs = measured_under(Calibration(), noise=0.01)[::13][:3]
    erratic = [replace(runs[0], step_s=runs[0].step_s * factor), *runs[1:]]
    before = Pricer(runs).calibrated_s(Calibration())
    assert np.abs(np.log(Pricer(runs).calibrated_s(fit_cluster(erratic)) / before)).max() < 0.02


@pytest.mark.parametrize("factors", [(2.0, 3.0, 5.0), (8.0, 8.0, 35.0)])
def test_three_runs_that_are_slow_by_different_factors_are_no_level(factors: tuple[float, ...]) -> None:
    base = Calibration(time_spread=0.1)
    runs = [replace(run, problem=replace(run.problem, calibration=base)) for run in measured_under(base)[::13][:3]]
    slow = [replace(run, step_s=run.step_s * factor) for run, factor in zip(runs, factors, strict=True)]
    before = Pricer(runs).calibrated_s(base)
    assert np.abs(np.log(Pricer(runs).calibrated_s(fit_cluster(slow)) / before)).max() < 0.1


def test_one_factor_of_a_cluster_is_told_from_its_level_by_more_runs() -> None:
    truth = Calibration(scale_up=1.3)
    errors = []
    for count in (3, 18):
        runs = measured_under(truth, noise=0.01)
        found = fit_cluster(runs[:: len(runs) // count])
        errors.append(abs(np.log(found.scale_up / truth.scale_up)))
    assert errors[1] < errors[0]


def test_kinds_of_plans_without_runs_keep_their_interval() -> None:
    base = Calibration(time_spread=0.1, pipeline_time_spread=0.5)
    one_stage = [run for run in measured_under(Calibration(overall=1.2), noise=0.02) if run.plan.pp == 1]
    one_stage = [replace(run, problem=replace(run.problem, calibration=base)) for run in one_stage]
    found = calibrated(one_stage, name="mine").calibration
    assert found.pipeline_time_spread == 0.5
    assert found.time_spread < 0.1


def test_a_conformal_interval_covers_nine_tenths_of_new_errors() -> None:
    random = np.random.default_rng(1)
    covered = []
    for _ in range(400):
        errors = random.standard_t(3, size=31)
        covered.append(abs(errors[-1]) <= NORMAL_90 * conformal_spread(errors[:-1]))
    assert 0.87 <= np.mean(covered) <= 0.95


def test_a_calibration_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    mine = Calibration(
        name='my "cluster"',
        overall=1.125,
        host=0.5,
        time_spread=0.08,
        spine_time_spread=0.9,
        most_devices=512,
        blocks=("dense", "experts"),
        precisions=("bf16",),
        exposed_share=0.25,
        sources=("three runs",),
    )
    path.write_text(calibration_text(mine))
    assert load_calibration(path) == mine


def test_every_shipped_calibration_is_of_a_framework_and_a_generation() -> None:
    folder = resources.files("autoplan.presets") / "calibrations"
    names = [entry.name.removesuffix(".toml") for entry in folder.iterdir()]
    assert names
    devices = [load_cluster(name).device for name in preset_clusters()]
    for name in names:
        framework, _, generation = name.rpartition("-")
        assert framework in preset_frameworks(), name
        measured = next(device for device in devices if (device.generation, device.rate_spread) == (generation, 0))
        assert built_in_calibration(load_framework(framework), measured).sources, name


def test_factors_of_a_generation_are_no_measurement_of_a_device_whose_rates_nobody_measured() -> None:
    framework, card = load_framework("pytorch-fsdp"), load_cluster("rtx-3090").device
    found, shipped = (
        built_in_calibration(framework, card),
        built_in_calibration(framework, load_cluster("a100-sxm").device),
    )
    assert (found.sources, found.gemm) == ((), shipped.gemm)
    assert shipped.sources


# -- the command ------------------------------------------------------------------------------------------------------

COLUMNS = ("id", "framework", "gpu", "num_gpus", "model", "seq_len", "global_batch", "tp", "sp", "pp", "step_time_s")


def table_of(path: Path, runs: list[MeasuredRun], gpu: str = "h100-sxm") -> Path:
    with path.open("a", newline="") as stream:
        writer = csv.writer(stream)
        if not stream.tell():
            writer.writerow(COLUMNS)
        for at, run in enumerate(runs):
            plan, problem = run.plan, run.problem
            degrees = (plan.tp, int(plan.sp), plan.pp, run.step_s)
            name = f"{gpu}-{at}"
            size = (gpu, problem.cluster.num_devices, problem.model.name, problem.training.seq_len, plan.global_batch)
            writer.writerow((name, "Megatron-Core", *size, *degrees))
    return path


def test_the_command_writes_a_calibration_that_predict_and_score_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from autoplan.cli.score import score

    table = table_of(tmp_path / "mine.csv", measured_under(Calibration(overall=1.5))[::6])
    done = run(tmp_path, "calibrate", "--runs", "mine.csv", "--out", "mine.toml")
    assert "6 runs: median error" in done.stderr
    errors = []
    for calibration in (None, tmp_path / "mine.toml"):
        score(runs=table, calibration=calibration)
        row = capsys.readouterr().out.splitlines()[1].split()
        errors.append(float(row[4]))
    assert errors[1] < errors[0] / 4


def test_the_api_predicts_scores_and_calibrates_a_table(tmp_path: Path) -> None:
    table = table_of(tmp_path / "mine.csv", measured_under(Calibration(overall=1.5))[::6])
    shipped = autoplan.predict(table)
    assert [row["id"] for row in shipped.table()] == [f"h100-sxm-{at}" for at in range(6)]
    shipped.save(tmp_path / "shipped.csv")
    with pytest.raises(autoplan.InputError, match="exists"):
        shipped.save(tmp_path / "mine.csv")
    saved, now = autoplan.score(table, predictions=tmp_path / "shipped.csv"), autoplan.score(table)
    assert saved.by_source["h100-sxm"]["medAPE"] == pytest.approx(now.by_source["h100-sxm"]["medAPE"], rel=1e-3)
    found = autoplan.calibrate(table)
    assert (found.runs, found.warnings) == (6, ())
    assert found.median_error < found.median_error_before / 4
    found.save(tmp_path / "mine.toml")
    own = autoplan.score(table, calibration=tmp_path / "mine.toml")
    assert own.by_source["all runs"]["medAPE"] < 5
    assert {row["source"] for row in own.table()} == {"h100-sxm", "all runs", "mean of sources"}


@pytest.mark.parametrize(
    ("gpus", "says"),
    [(("h100-sxm",), "a calibration needs 3"), (("h100-sxm", "a100-sxm"), "its own table")],
)
def test_too_few_runs_or_runs_of_two_kinds_are_refused(tmp_path: Path, gpus: tuple[str, ...], says: str) -> None:
    for gpu in gpus:
        table_of(tmp_path / "mine.csv", measured_under(Calibration())[:2], gpu)
    done = run(tmp_path, "calibrate", "--runs", "mine.csv", "--out", "out.toml")
    assert (done.returncode, says in done.stderr) == (1, True)
    assert not (tmp_path / "out.toml").exists()
