"""Is the next trial the one that pays most, is every end of a trial a result, and is nothing lost on the way?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.api.plan_files import make_plan_file
from autoplan.api.problem import make_problem, make_space
from autoplan.base.errors import InputError
from autoplan.base.files import encode
from autoplan.frameworks.logs import LogReader
from autoplan.jobs.job import LOG, MESSAGES, OUTCOME, PLAN, Cause, JobStatus, LocalJobs, SilentError
from autoplan.profiler.store import open_store
from autoplan.search.choice import distinct
from autoplan.search.storage import opened
from autoplan.search.study import search
from autoplan.search.surrogate import RUN_SPREAD, MeasuredPlan, Surrogate, fit_chance, pool_runs
from autoplan.search.trial_results import read_result
from autoplan.search.trials import Budget, Trials
from autoplan.search.tune import CHANCE, MARGIN, MAX_RUNS, TOLERANCE, TrialResult, TunedTrial, Tuning, tuning_state
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from commands import run
from logged import read_log
from search_cases import PLAIN

TINY = 'name = "tiny"\nnum_layers = 4\nhidden_size = 64\nnum_heads = 4\nffn_size = 176\nvocab_size = 256\n'


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem("llama3-8b", cluster="h100-sxm:1x8", seq_len=4096)


@pytest.fixture(scope="module")
def plans(problem: Problem) -> tuple[RankedPlan, ...]:
    space = make_space(problem, "64", fix=[], at_most=[], forbid=PLAIN)
    found = distinct(search(problem, space, margin=MARGIN))
    assert len(found) >= 20
    return found


def measured(plans: Sequence[RankedPlan], at: int, factor: float = 1.0) -> TrialResult:
    return TrialResult(how="measured", step_s=plans[at].step_s * factor, seconds=60.0)


def trial(number: int, at: int, result: TrialResult | None) -> TunedTrial:
    return TunedTrial(number=number, at=at, job=f"job {number}", result=result)


# -- the surrogate ----------------------------------------------------------------------------------------------------


def test_what_was_measured_is_known_and_plans_alike_follow_it(plans: Sequence[RankedPlan]) -> None:
    before = Surrogate.of(plans)
    assert before.mean == pytest.approx(np.log([plan.step_s / 64 for plan in plans]))
    after = Surrogate.of(plans, [MeasuredPlan(at=0, step_s=plans[0].step_s * 1.1)])
    assert after.mean[0] == pytest.approx(before.mean[0] + np.log(1.1))
    assert after.spread[0] == pytest.approx(RUN_SPREAD)
    moved = after.mean - before.mean
    assert (moved > 0).all()
    # The one that spends its step most like the measured one moves most, and nothing moves beyond it.
    assert moved.max() <= np.log(1.1) + 1e-12
    assert np.ptp(moved[1:]) > 0.005


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_measurement_never_makes_anything_less_certain_nor_depends_on_order(
    plans: Sequence[RankedPlan], data: st.DataObject
) -> None:
    tried = data.draw(st.lists(st.integers(0, 19), unique=True, min_size=1, max_size=5))
    factors = data.draw(st.lists(st.floats(0.8, 1.05), min_size=len(tried), max_size=len(tried)))
    runs = [MeasuredPlan(at=at, step_s=plans[at].step_s * factor) for at, factor in zip(tried, factors, strict=True)]
    before, after = Surrogate.of(plans), Surrogate.of(plans, runs)
    assert (after.spread <= before.spread + 1e-12).all()
    again = Surrogate.of(plans, runs[::-1])
    assert again.mean == pytest.approx(after.mean)


def test_all_plans_off_alike_changes_no_choice(plans: Sequence[RankedPlan]) -> None:
    orders = []
    for factor in (0.7, 1.0, 1.3):
        trials: list[TunedTrial] = []
        for number in range(4):
            at = tuning_state(plans, trials).next
            assert at is not None
            trials.append(trial(number, at, measured(plans, at, factor)))
        orders.append([trial.at for trial in trials[:2]])
    assert orders[0] == orders[1] == orders[2]


def test_one_erratic_run_teaches_little_and_many_that_agree_teach_all(plans: Sequence[RankedPlan]) -> None:
    prior = Surrogate.of(plans).mean
    after = Surrogate.of(plans, [MeasuredPlan(at=0, step_s=plans[0].step_s * 5)])
    assert (after.mean - prior)[1:].max() < 0.25  # of 1.6
    many = Surrogate.of(plans, [MeasuredPlan(at=at, step_s=plans[at].step_s * 5) for at in range(15)])
    assert (many.mean - prior)[15:].min() > 1.2
    # A step is never fast by chance: that is believed at once.
    fast = Surrogate.of(plans, [MeasuredPlan(at=0, step_s=plans[0].step_s / 3)])
    assert (fast.mean - prior)[1:].max() < -0.5


# Two ranks on two cores, 8 layers of 256: what was predicted and what ran, in ms, and the spread of a trial.
TWO_CORES: tuple[tuple[dict[str, Any], float, float, float], ...] = (
    ({"dp_shard": 2, "sharding": "zero1"}, 379.7, 664.3, 0.03),
    ({"dp_shard": 2, "sharding": "zero3"}, 385.5, 808.8, 0.06),
    ({"tp": 2, "micro_batch": 8}, 405.0, 1008.0, 0.14),
    ({"dp_shard": 2, "micro_batch": 2, "sharding": "zero1"}, 429.8, 688.5, 0.05),
    ({"tp": 2, "micro_batch": 4}, 438.8, 1236.3, 0.06),
    ({"dp_shard": 2, "micro_batch": 2, "sharding": "zero3"}, 443.4, 1049.4, 0.03),
    ({"pp": 2, "micro_batch": 4}, 458.6, 621.8, 0.03),
    ({"dp_shard": 2, "recompute": "full"}, 488.8, 758.3, 0.04),
)  # fmt: skip


def two_cores(plans: Sequence[RankedPlan]) -> tuple[RankedPlan, ...]:
    """Plans that spend all their time on the same things except for the waiting of the pipeline's stages."""
    nothing = dict.fromkeys(plans[0].terms_s, 0.0)
    made = []
    for axes, predicted_ms, *_ in TWO_CORES:
        step_s, waits = predicted_ms / 1000, 0.07 if "pp" in axes else 0.0
        terms = nothing | {"gemm": step_s * (1 - waits), "pipeline_bubble": step_s * waits}
        plan = ParallelPlan(**{"global_batch": 8, "micro_batch": 4} | axes)
        made.append(
            replace(plans[0], plan=plan, step_s=step_s, low_s=step_s, high_s=step_s, terms_s=terms, oom_probability=0.0)
        )
    return tuple(made)


def test_trials_that_contradict_each_other_widen_the_surrogate_and_trials_that_agree_narrow_it(
    plans: Sequence[RankedPlan],
) -> None:
    plans_here = two_cores(plans)
    agreeing = [MeasuredPlan(at=at, step_s=1.75 * plans_here[at].step_s) for at in range(3)]
    contradicting = [MeasuredPlan(at=at, step_s=ms / 1000) for at, (_, _, ms, _) in enumerate(TWO_CORES[:3])]
    agreed, other = Surrogate.of(plans_here, agreeing), Surrogate.of(plans_here, contradicting)
    scales = np.arange(len(agreed.weights))
    assert agreed.weights @ scales < Surrogate.of(plans_here).weights @ scales < other.weights @ scales
    assert (agreed.spread[3:] < other.spread[3:]).all()
    assert agreed.weights.sum() == pytest.approx(1.0)


def test_plans_of_the_same_degrees_follow_a_measured_one_most(plans: Sequence[RankedPlan]) -> None:
    plans_here = two_cores(plans)
    moved = (
        Surrogate.of(plans_here, [MeasuredPlan(at=2, step_s=1.2 * plans_here[2].step_s)]).mean
        - Surrogate.of(plans_here).mean
    )
    assert moved[4] > moved[3] + 0.003 > moved[6]
    assert moved[0] == pytest.approx(moved[3])


def test_a_plan_of_other_degrees_is_tried_after_two_that_contradict_each_other_and_found_to_be_the_best(
    plans: Sequence[RankedPlan],
) -> None:
    plans_here = two_cores(plans)
    trials: list[TunedTrial] = []
    for number in range(5):
        at = tuning_state(plans_here, trials).next
        assert at is not None
        _, _, measured_ms, spread = TWO_CORES[at]
        trials.append(trial(number, at, TrialResult(how="measured", step_s=measured_ms / 1000, spread=spread)))
    best = tuning_state(plans_here, trials).best
    assert best is not None
    assert plans_here[best.at].plan.pp == 2


def test_the_plans_given_up_are_together_unlikely_to_hold_a_better_one(plans: Sequence[RankedPlan]) -> None:
    done = [trial(at, at, measured(plans, at)) for at in range(3)]
    view = tuning_state(plans, done)
    chance = view.surrogate.chance_below(float(np.log(plans[0].step_s / 64) + np.log1p(-TOLERANCE)))
    given_up = sorted(set(range(3, len(plans))) - set(view.worth_trying))
    assert chance[given_up].sum() < CHANCE <= chance[given_up].sum() + chance[list(view.worth_trying)].min()
    assert chance[given_up].max() <= chance[list(view.worth_trying)].min()


def test_expected_improvement_is_what_sampling_says(plans: Sequence[RankedPlan]) -> None:
    surrogate = Surrogate.of(plans)
    bar = float(surrogate.mean[0])
    rng = np.random.default_rng(0)
    scales = rng.choice(len(surrogate.weights), 200_000, p=surrogate.weights)
    draws = rng.normal(surrogate.means[scales], surrogate.spreads[scales])
    assert surrogate.mean == pytest.approx(draws.mean(axis=0), abs=3e-3)
    assert surrogate.spread == pytest.approx(draws.std(axis=0), rel=0.01)
    assert surrogate.improvement(bar) == pytest.approx(np.maximum(bar - draws, 0).mean(axis=0), rel=0.05, abs=1e-4)
    assert surrogate.chance_below(bar) == pytest.approx((draws < bar).mean(axis=0), abs=0.01)


def test_out_of_memory_rules_out_what_needs_as_much_unless_more_has_fit(plans: Sequence[RankedPlan]) -> None:
    needed = np.array([plan.memory_bytes for plan in plans])
    order = np.argsort(needed).tolist()
    low, middle, high = order[2], order[len(order) // 2], order[-2]
    chance = fit_chance(plans, [low], [middle])
    assert (chance[needed >= needed[middle]] == 0).all()
    assert (chance[needed <= needed[low]] == 1).all()
    between = (needed > needed[low]) & (needed < needed[middle])
    assert chance[between] == pytest.approx([1 - plans[at].oom_probability for at in np.flatnonzero(between)])
    assert (fit_chance(plans, [high], [middle])[needed <= needed[high]] == 1).all()


def test_runs_of_one_plan_that_disagree_make_all_less_certain_and_runs_that_agree_make_it_more_so() -> None:
    single = MeasuredPlan(at=1, step_s=2.0)
    assert pool_runs([single]) == [single]
    alike = {
        pool_run.at: pool_run
        for pool_run in pool_runs([MeasuredPlan(at=0, step_s=1.0), MeasuredPlan(at=0, step_s=1.0), single])
    }
    # The one degree of freedom of the prior and that of the pair: half the variance, over two runs.
    assert alike[0].spread == pytest.approx(RUN_SPREAD / 2)
    assert alike[1].spread == pytest.approx(RUN_SPREAD / np.sqrt(2))
    apart = {
        pool_run.at: pool_run
        for pool_run in pool_runs([MeasuredPlan(at=0, step_s=1.0), MeasuredPlan(at=0, step_s=1.21), single])
    }
    assert apart[0].step_s == pytest.approx(1.1)
    assert apart[1].spread == pytest.approx(np.sqrt((RUN_SPREAD**2 + np.log(1.21) ** 2 / 2) / 2))
    assert apart[0].spread == pytest.approx(apart[1].spread / np.sqrt(2))


# -- choosing and stopping --------------------------------------------------------------------------------------------


def test_the_first_trial_is_the_plan_that_is_predicted_best(plans: Sequence[RankedPlan]) -> None:
    view = tuning_state(plans, [])
    assert view.next == min(range(len(plans)), key=lambda at: plans[at].step_s)
    assert view.best is None
    assert view.stop is None


def test_trials_go_on_until_no_plan_is_likely_to_be_faster(plans: Sequence[RankedPlan]) -> None:
    trials: list[TunedTrial] = []
    sizes = []
    while (view := tuning_state(plans, trials)).stop is None:
        assert view.next is not None
        assert view.next not in {trial.at for trial in trials}
        trials.append(trial(len(trials), view.next, measured(plans, view.next)))
        sizes.append(len(view.worth_trying))
    assert view.stop == "separated"
    assert view.best is not None
    assert view.best.at == 0
    assert len(trials) < len(plans) / 2
    assert sizes[-1] < sizes[0]
    bar = np.log(plans[0].step_s / 64) + np.log1p(-TOLERANCE)
    rest = [at for at in range(len(plans)) if at not in {trial.at for trial in trials}]
    assert view.surrogate.chance_below(float(bar))[rest].max() < 0.05


def test_plans_that_are_as_far_apart_as_their_own_runs_are_run_again(plans: Sequence[RankedPlan]) -> None:
    rng, truth = np.random.default_rng(1), {0: 1.0, 1: 1.03}
    trials: list[TunedTrial] = []
    while (view := tuning_state(plans, trials)).stop is None:
        assert view.next is not None
        # Runs of one plan differ by 10 %; except for two all are far slower.
        step_s = plans[0].step_s * truth.get(view.next, 1.6) * float(np.exp(rng.normal(0.0, 0.1)))
        result = TrialResult(how="measured", step_s=step_s, spread=0.1, peak_bytes=1.0)
        trials.append(trial(len(trials), view.next, result))
    runs = Counter(trial.at for trial in trials)
    assert view.stop == "alike"
    assert runs[0] == runs[1] == MAX_RUNS
    assert max(count for at, count in runs.items() if at not in truth) == 1
    own = [trial.result.step_s for trial in trials if trial.at == 0 and trial.result and trial.result.step_s]
    middle = {measured.at: measured.step_s for measured in view.measured}
    assert middle[0] == pytest.approx(np.exp(np.mean(np.log(own))))
    assert view.best_s == min(middle.values())


def test_a_repeated_run_that_fails_is_not_run_for_ever(plans: Sequence[RankedPlan]) -> None:
    trials = [trial(at, at, measured(plans, 0, 1.0 + at / 1000)) for at in range(len(plans))]
    while (view := tuning_state(plans, trials)).stop is None:
        assert view.next is not None
        trials.append(trial(len(trials), view.next, TrialResult(how="failed", reason=f"fault {len(trials)}")))
    assert view.stop == "alike"
    assert max(Counter(trial.at for trial in trials).values()) == MAX_RUNS


def test_a_plan_out_of_memory_is_no_candidate_again_and_takes_those_above_with_it(plans: Sequence[RankedPlan]) -> None:
    first = tuning_state(plans, []).next
    assert first is not None
    view = tuning_state(plans, [trial(0, first, TrialResult(how="oom", reason="CUDA out of memory"))])
    assert view.next is not None
    assert plans[view.next].memory_bytes < plans[first].memory_bytes
    assert all(plans[at].memory_bytes < plans[first].memory_bytes for at in view.worth_trying)


def test_what_fails_teaches_nothing_of_others_and_alike_failures_end_it(plans: Sequence[RankedPlan]) -> None:
    trials: list[TunedTrial] = []
    for number in range(3):
        view = tuning_state(plans, trials)
        assert view.stop is None
        assert view.next is not None
        trials.append(trial(number, view.next, TrialResult(how="failed", reason="no module named megatron")))
    assert len({trial.at for trial in trials}) == 3
    assert tuning_state(plans, trials).stop == "failing"
    trials[1] = trial(1, trials[1].at, TrialResult(how="failed", reason="something else"))
    assert tuning_state(plans, trials).stop is None


def test_a_lost_job_is_tried_once_more_and_a_cancelled_one_as_if_never(plans: Sequence[RankedPlan]) -> None:
    lost, cancelled = TrialResult(how="lost"), TrialResult(how="cancelled")
    assert tuning_state(plans, [trial(0, 0, lost)]).next == 0
    assert tuning_state(plans, [trial(0, 0, lost), trial(1, 0, lost)]).next != 0
    assert tuning_state(plans, [trial(number, 0, cancelled) for number in range(5)]).next == 0


def test_trials_at_once_are_of_different_plans_and_a_slow_start_counts_as_slow(plans: Sequence[RankedPlan]) -> None:
    done = trial(0, 0, measured(plans, 0))
    second = tuning_state(plans, [done]).next
    assert second is not None
    third = tuning_state(plans, [done, trial(1, second, None)]).next
    assert third not in (None, 0, second)
    slow = replace(measured(plans, second, 0.9), how="slower")
    view = tuning_state(plans, [done, trial(1, second, slow)])
    assert view.best == done


# -- the study --------------------------------------------------------------------------------------------------------


def test_the_study_holds_all_and_another_program_goes_on(
    tmp_path: Path, problem: Problem, plans: Sequence[RankedPlan]
) -> None:
    path = str(tmp_path / "journal")
    with opened(path) as storage:
        tuning = Tuning.joined(storage, problem, plans, name=None, about={"steps": "10"})
        tuning.begin(3)
        tuning.started(0, "job of 3")
        tuning.begin(1)
        tuning.tell(1, TrialResult(how="oom", reason="CUDA out of memory", seconds=5.0))
        tuning.begin(0)
        tuning.tell(2, replace(measured(plans, 0), steps_s=2 * (plans[0].step_s,)))
        tuning.tell(2, TrialResult(how="failed", reason="a second word"))
        study = tuning._study
        states = [trial.state.name for trial in study.get_trials()]
        assert states == ["RUNNING", "PRUNED", "COMPLETE"]
        assert [trial.constraints.get("memory") for trial in study.get_trials()[1:]] == [1.0, 0.0]
        assert study.best_value == pytest.approx(plans[0].step_s / 64)
        assert study.get_trials()[1].values is None
        assert study.get_trials()[2].params["micro_batch"] == plans[0].plan.micro_batch
        # What a dashboard shows: the plan in words, every step, and what the values are.
        assert study.get_trials()[2].user_attrs["label"] == plans[0].plan.describe()
        assert list(study.get_trials()[2].intermediate_values.values()) == pytest.approx([plans[0].step_s / 64] * 2)
        assert study.metric_names == ["seconds per sequence"]
    with opened(path) as storage:
        again = Tuning.joined(storage, problem, plans, name=None, about={"steps": "10"}).trials()
        assert [(previous.at, previous.job, previous.result and previous.result.how) for previous in again] == [
            (3, "job of 3", None), (1, "", "oom"), (0, "", "measured"),
        ]  # fmt: skip
        named = Tuning.joined(storage, problem, plans, name="mine", about={"steps": "10"})
        assert named.trials() == ()
        with pytest.raises(InputError, match=r"belongs to another problem \(steps 10, here 20"):
            Tuning.joined(storage, problem, plans, name="mine", about={"steps": "20"})
        with pytest.raises(InputError, match=r"belongs to another problem \(plans"):
            Tuning.joined(storage, problem, plans[1:], name="mine", about={"steps": "10"})


# -- running trials ---------------------------------------------------------------------------------------------------


class Cluster:
    """A cluster that is not there: what a job leaves in its folder is written at once, and its state is as told."""

    def __init__(self, play: Callable[[int, Path], JobStatus]) -> None:
        self._play, self.started, self.cancelled = play, [], []  # type: ignore[var-annotated]

    def start(self, folder: Path) -> str:
        assert (folder / PLAN).is_file()
        self.started.append(folder)
        return folder.name

    def find(self, folder: Path) -> str:
        return ""

    def poll(self, names: Sequence[str]) -> dict[str, JobStatus]:
        return {name: self._play(int(name), self.folder(name)) for name in names}

    def cancel(self, names: Sequence[str]) -> None:
        self.cancelled += names

    def folder(self, name: str) -> Path:
        return next(job for job in self.started if job.name == name)


ENDED, FAILED = JobStatus(state="ended", status=0), JobStatus(state="ended", status=1)
RUNNING = JobStatus(state="running")


def finish(folder: Path, *step_s: float) -> JobStatus:
    outcome = {
        "measured": {"losses": [], "step_s": step_s, "peak_bytes": [1e9], "device": "h100-sxm", "other_load": 0.03}
        | {"clock_mhz": 1755.0}
    }
    (folder / OUTCOME).write_text(json.dumps(outcome))
    return ENDED


def iteration(number: int, seconds: float) -> str:
    return f" iteration {number:8d}/ 100 | elapsed time per iteration (ms): {seconds * 1000:.1f} | lm loss: 3.0 |\n"


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoplan.search.trials.POLL_S", 0.02)


def trials_of(
    tmp_path: Path, problem: Problem, plans: Sequence[RankedPlan], jobs: object, budget: Budget, **more: float
) -> tuple[str, tuple[TunedTrial, ...], list[str]]:
    lines: list[str] = []
    with opened(str(tmp_path / "journal")) as storage:
        tuning = Tuning.joined(storage, problem, plans, name=None, about={"steps": "10"})
        trials = Trials(
            tuning=tuning,
            jobs=jobs,  # type: ignore[arg-type]
            problem=problem,
            folder=tmp_path / "work",
            prepare=lambda at: encode(make_plan_file(problem, [plans[at]], None)),
            budget=budget,
            parallel=int(more.get("parallel", 1)),
            warmup=2,
            limit_s=more.get("limit_s", 60.0),
            show=lines.append,
        )
        return trials.run(), tuning.trials(), lines


def test_every_way_to_end_is_a_result_with_its_reason_and_the_study_goes_on(
    tmp_path: Path, problem: Problem, plans: Sequence[RankedPlan]
) -> None:
    best_s = plans[0].step_s

    def play(number: int, folder: Path) -> JobStatus:
        match number:
            case 0:
                return finish(folder, best_s, best_s * 1.01, best_s * 0.99)
            case 1:
                (folder / LOG).write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
                return FAILED
            case 2:
                (folder / OUTCOME).write_text('{"measured": {"step_s": [0.1,')
                return ENDED
            case 3:
                (folder / MESSAGES).write_text("autoplan: log.txt: cannot be written: No space left on device\n")
                return FAILED
            case 4:
                return JobStatus(state="ended", status=-9)
            case 5:
                (folder / LOG).write_bytes(b"\x00\xff\xfe not a log of anything\n" * 20)
                return ENDED
            case 6:
                return JobStatus(state="lost", reason="no job of that number is known")
            case 7:
                return RUNNING
            case 8:
                (folder / LOG).write_text("".join(iteration(step, 2 * best_s) for step in range(1, 7)))
                return RUNNING
            case _:
                (folder / LOG).write_text("".join(iteration(step, 0.999 * best_s) for step in range(1, 7)))
                return ENDED

    cluster = Cluster(play)
    ended, trials, lines = trials_of(tmp_path, problem, plans, cluster, Budget(trials=10), limit_s=0.2)
    results = [trial.result for trial in trials]
    assert all(result is not None for result in results)
    assert [result.other_load for result in results if result] == [0.03] + [None] * 9
    assert [result.clock_mhz for result in results if result] == [1755.0] + [None] * 9
    assert any("trial 0" in line and ", other load 3.0 %, 1,755 MHz" in line for line in lines)
    assert [result.how for result in results if result] == [
        "measured", "oom", "failed", "failed", "failed", "failed", "lost", "timeout", "slower", "measured",
    ]  # fmt: skip
    for result, said in zip(
        results,
        [
            "", "CUDA out of memory", "not valid JSON", "No space left on device", "ended by signal 9",
            "the log contains no step time", "no job of that number", "--limit", "its first 4 times", "",
        ],
        strict=True,
    ):  # fmt: skip
        assert result is not None
        assert said in result.reason
    assert cluster.cancelled == ["0007", "0008"]
    assert results[0] is not None
    assert results[0].step_s == pytest.approx(best_s)
    assert results[0].spread > RUN_SPREAD
    assert "trials" in ended
    assert sum("left that could be faster" in line for line in lines) == 10


def test_what_cannot_be_started_is_recorded_and_budgets_are_kept(
    tmp_path: Path, problem: Problem, plans: Sequence[RankedPlan]
) -> None:
    class Full(Cluster):
        def start(self, folder: Path) -> str:
            raise InputError(f"{folder}: cannot be written: No space left on device")

    ended, trials, _ = trials_of(tmp_path, problem, plans, Full(lambda number, folder: ENDED), Budget(trials=9))
    assert ended.startswith("all trials fail in the same way")
    assert len(trials) == 3
    assert all(trial.result and "No space left on device" in trial.result.reason for trial in trials)

    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    slow = Cluster(lambda number, folder: finish(folder, plans[0].step_s))
    ended, _, _ = trials_of(tmp_path / "b", problem, plans, slow, Budget(trials=9, seconds=0.0))
    assert "--budget" in ended
    assert not slow.started

    hours = Cluster(lambda number, folder: RUNNING)
    ended, trials, _ = trials_of(tmp_path / "c", problem, plans, hours, Budget(trials=9, seconds=0.3))
    assert "--budget" in ended
    assert [trial.result and trial.result.how for trial in trials] == ["cancelled"]
    assert hours.cancelled == ["0000"]


def test_what_is_under_way_is_ended_when_the_program_is_and_tried_again_by_the_next(
    tmp_path: Path, problem: Problem, plans: Sequence[RankedPlan]
) -> None:
    def interrupt(number: int, folder: Path) -> JobStatus:
        raise KeyboardInterrupt

    first = Cluster(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trials_of(tmp_path, problem, plans, first, Budget(trials=2), parallel=2)
    assert first.cancelled == ["0000", "0001"]
    again = Cluster(lambda number, folder: finish(folder, plans[0].step_s))
    _, trials, _ = trials_of(tmp_path, problem, plans, again, Budget(trials=2))
    assert [trial.result and trial.result.how for trial in trials] == ["cancelled", "cancelled", "measured", "measured"]
    assert trials[2].at == trials[0].at


def test_what_a_scheduler_did_to_a_job_is_told_apart(
    tmp_path: Path, problem: Problem, plans: Sequence[RankedPlan]
) -> None:
    causes: tuple[Cause, ...] = ("out of memory", "time limit", "failed", "node failure", "preempted", "cancelled")

    def play(number: int, folder: Path) -> JobStatus:
        if number >= len(causes):
            return finish(folder, plans[0].step_s)
        return JobStatus(state="ended", reason=f"{causes[number]} (Slurm)", cause=causes[number])

    _, trials, _ = trials_of(tmp_path, problem, plans, Cluster(play), Budget(trials=7))
    assert [trial.result and trial.result.how for trial in trials] == [
        "oom", "timeout", "failed", "lost", "lost", "lost", "measured",
    ]  # fmt: skip
    assert all(
        ended.result and ended.result.reason == f"{cause} (Slurm)" for ended, cause in zip(trials, causes, strict=False)
    )


def test_a_scheduler_that_stays_silent_leaves_its_jobs_to_the_next_program(
    tmp_path: Path, problem: Problem, plans: Sequence[RankedPlan]
) -> None:
    class Silent(Cluster):
        def poll(self, names: Sequence[str]) -> dict[str, JobStatus]:
            raise SilentError("nobody answers")

    silent = Silent(lambda number, folder: RUNNING)
    with pytest.raises(SilentError):
        trials_of(tmp_path, problem, plans, silent, Budget(trials=1))
    assert silent.cancelled == []
    following = Cluster(lambda number, folder: finish(folder, plans[0].step_s))
    following.started = silent.started
    _, trials, _ = trials_of(tmp_path, problem, plans, following, Budget(trials=1))
    assert [trial.result and trial.result.how for trial in trials] == ["measured"]


def test_trials_run_side_by_side_where_that_is_asked_for(
    tmp_path: Path, problem: Problem, plans: Sequence[RankedPlan]
) -> None:
    most = 0
    polled: dict[int, int] = {}

    class Wide(Cluster):
        def poll(self, names: Sequence[str]) -> dict[str, JobStatus]:
            nonlocal most
            most = max(most, len(names))
            return super().poll(names)

    def play(number: int, folder: Path) -> JobStatus:
        polled[number] = polled.get(number, 0) + 1
        return RUNNING if polled[number] < 3 else finish(folder, plans[0].step_s * (1 + 0.01 * number))

    _, trials, _ = trials_of(tmp_path, problem, plans, Wide(play), Budget(trials=5), parallel=3)
    assert most == 3
    assert len({trial.at for trial in trials}) == len(trials)


def test_a_second_program_in_the_same_folder_is_refused(
    tmp_path: Path, problem: Problem, plans: Sequence[RankedPlan]
) -> None:
    seen: list[str] = []

    def play(number: int, folder: Path) -> JobStatus:
        if not seen:
            seen.append("")
            with pytest.raises(InputError, match="another autoplan tune"):
                trials_of(tmp_path, problem, plans, Cluster(play), Budget(trials=1))
        return finish(folder, plans[0].step_s)

    trials_of(tmp_path, problem, plans, Cluster(play), Budget(trials=1))
    assert seen


def test_a_log_alone_is_a_result(tmp_path: Path, plans: Sequence[RankedPlan]) -> None:
    (tmp_path / LOG).write_text("".join(iteration(step, 1.5) for step in range(1, 9)))
    reader = LogReader()
    reader.feed((tmp_path / LOG).read_bytes())
    result = read_result(tmp_path, reader, JobStatus(state="lost", reason="accounting is off"), seconds=9.0)
    assert (result.how, result.step_s, result.seconds) == ("measured", 1.5, 9.0)


# -- real runs on this machine ----------------------------------------------------------------------------------------


def tuned(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "tiny.toml").write_text(TINY)
    return run(
        folder, "tune", "tiny.toml", "--cluster", "cpu:1x2", "--global-batch", "8", "--seq-len", "32",
        "--steps", "3", "--warmup", "1", *more,
    )  # fmt: skip


def test_plans_are_trained_here_and_the_best_is_written(tmp_path: Path) -> None:
    done = tuned(tmp_path, "--trials", "1", "--out", "best.json", "--db", "runs.db")
    assert done.returncode == 0, done.stderr
    assert "--trials 1" in done.stdout
    assert "autoplan export best.json" in done.stdout
    assert "trial 0: " in done.stderr
    assert json.loads((tmp_path / "best.json").read_text())["best"]["plan"]["dp_shard"] >= 1
    assert read_log(tmp_path / "tune" / "0000" / LOG, warmup=1).num_steps == 3
    with open_store(str(tmp_path / "runs.db")) as store:
        assert [run.framework for run in store.runs()] == ["torch"]
    # The same again has nothing left to do, and starts nothing.
    again = tuned(tmp_path, "--trials", "1", "--out", "again.json", "--db", "runs.db", "--json")
    assert again.returncode == 0, again.stderr
    study = json.loads(again.stdout)
    assert [trial["number"] for trial in study["trials"]] == [0]
    assert study["best"]["plan"] == json.loads((tmp_path / "best.json").read_text())["best"]["plan"]


def test_a_killed_program_leaves_its_trial_running_and_the_next_one_follows_it(tmp_path: Path) -> None:
    """The trial sleeps, so that it outlives the program that is killed."""
    script = tmp_path / "train.py"
    script.write_text(
        "import time\n"
        "for step in range(1, 9):\n"
        "    print(f' iteration {step}/ 9 | elapsed time per iteration (ms): 50.0 | lm loss: 3.0 |', flush=True)\n"
        "    time.sleep(0.05 if step < 2 else 0.4)\n"
    )
    (tmp_path / "tiny.toml").write_text(TINY)
    arguments = [
        "tune", "tiny.toml", "--cluster", "cpu:1x2", "--global-batch", "8", "--seq-len", "32", "--trials", "1",
        "--steps", "6", "--warmup", "1", "--command", "--", sys.executable, str(script), "{plan}",
    ]  # fmt: skip
    first = subprocess.Popen(
        [sys.executable, "-c", "from autoplan.cli import main; main()", *arguments],
        cwd=tmp_path, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    log = tmp_path / "tune" / "0000" / LOG
    while not (log.exists() and b"iteration 2" in log.read_bytes()):
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert "following trial 0 again" in done.stderr
    assert "trial 0: " in done.stdout or "measured" in done.stdout
    assert not (tmp_path / "tune" / "0001").exists()
    assert log.read_bytes().count(b"iteration 1/") == 1


def test_local_jobs_are_found_by_name_and_ended_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoplan.jobs.job.GRACE_S", 0.2)
    plan = run(
        tmp_path, "search", "llama3-8b", "--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "4096",
        "--out", PLAN, "--quiet",
    )  # fmt: skip
    assert plan.returncode == 0
    program = str(Path(__file__).parent / "support" / "logging_program.py")
    jobs = LocalJobs(["--command", "--", sys.executable, program, "hang", "1", "{folder}/pids"])
    name = jobs.start(tmp_path)
    until = time.monotonic() + 60
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 3:
        assert time.monotonic() < until
        time.sleep(0.02)
    other = LocalJobs()
    assert other.poll([name])[name] == RUNNING
    other.cancel([name])
    assert other.poll([name])[name].state == "ended"
    for pid in (tmp_path / "pids").read_text().split():
        assert not (Path("/proc") / pid / "cmdline").exists() or not (Path("/proc") / pid / "cmdline").read_bytes()
    until = time.monotonic() + 60
    while jobs.poll([name])[name] == RUNNING:  # its parent may wait for it a moment after it is seen to have ended
        assert time.monotonic() < until
        time.sleep(0.02)
    assert jobs.poll([name])[name].state == "ended"
    elsewhere = "otherhost" + name[name.index(":") :]
    assert other.poll([elsewhere])[elsewhere].state == "lost"


def test_flags_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    for more, said in (
        (("--parallel", "2"), "share its devices"),
        (("--trials", "0"), "--trials 0: must be 1 or more"),
        (("--gpu-hours", "nan"), "--gpu-hours 'nan': write a number above 0"),
        (("--gpu-hours", ""), "--gpu-hours '': write a number above 0"),
        (("--framework", "megatron-core"), "name your own program with --command"),
        (("--command",), "--command and PROGRAM go together"),
    ):
        done = tuned(tmp_path, *more)
        assert done.returncode == 1
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    (tmp_path / "kept.json").write_text('{"schema_version": 2}')
    done = run(tmp_path, "tune", "kept.json", "--framework", "nemo", "--fix", "tp=2")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "without --framework, --fix: leave them out" in done.stderr
    assert not (tmp_path / "tune").exists()
