"""Number of measured trials until the best plan is found.

Replays published sweeps: to run a plan is to look up its row.  Runs that ran out of memory, failed or were refused
answer so, and cost a trial.  A group holds the plans of one source, framework, model, cluster, length and batch; those
with 8 plans and 2 finished ones or more are replayed.  A group is found when a plan within 2 % of its best was
measured.  `autoplan tune` is compared with prediction's own order, random order, and Optuna's TPE, cold and with
prediction's first plans enqueued.

Predictions come from calibrations that have not seen the group's source, or another one of the same people.  The
spreads of the surrogate are constants of the product; two of them, `SCATTER` and `DEGREES_SHARE`, are the likeliest for
the errors of all these sweeps (`surrogate_fit.py`), not those that need the fewest trials.  Traits of frameworks that
presets list as fitted stay as they ship, with all runs in view.  As predictions of a framework that nobody has measured
are worse, the same is shown with spoiled ones: times of every component are off by a factor of their own, and every
plan by another one.

usage: python benchmarks/tune_replay.py [--runs RUNS.csv] [--seeds N] [--report REPORT.md]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import optuna
from accuracy_cases import calibrations, read_cases
from measured_runs import RUNS
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState
from reports import existing, make_parser, write_report

from autoplan.base.errors import AutoplanError
from autoplan.cost.estimate import estimate
from autoplan.readers.calibration import calibration_among
from autoplan.runs.outcomes import read_outcomes
from autoplan.runs.runs import Run, read_runs
from autoplan.search.ranking import ranked
from autoplan.search.tune import TrialResult, TunedTrial, tuning_state
from autoplan.spec.calibration import Calibration
from autoplan.spec.run_outcome import RunOutcome
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.terms import COMPONENTS
from autoplan.spec.tune_report import TrialEnd

SOURCES = ("bloom", "vtrain", "hagemann", "nanotron")
ERRATIC = ("nanotron_mn",)  # a third of whose runs take several times as long as their neighbours
MIN_PLANS, MIN_FINISHED = 8, 2
NEAR = 0.02
ENQUEUED = 3  # of prediction's first plans, for a warm TPE
MAX_REPEATS = 20  # proposals that were made before, after which TPE takes any plan
SPOILED_COMPONENT, SPOILED_PLAN = 0.25, 0.10  # standard deviations; twice what good predictions have
MAX_TRIALS = 50  # that are counted: later ones are as bad as never
AIM = (3.0, 8.0)  # trials: median, 90th percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Decision: plans with their predictions, and what running each comes to."""

    source: str
    title: str
    plans: tuple[RankedPlan, ...]  # that can be priced
    answers: tuple[TrialResult, ...]
    axes: tuple[tuple[str, ...], ...]  # of every plan, as the table writes them
    size: int  # with those that cannot be priced
    best_s: float

    def is_found(self, at: int) -> bool:
        """Return whether running this plan ends the search."""
        step_s = self.answers[at].step_s
        return step_s is not None and step_s <= (1 + NEAR) * self.best_s


def main() -> None:
    """Replay, print and, if asked, write the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=existing, default=str(RUNS))
    parser.add_argument("--seeds", type=int, default=20, help="of random order and of TPE")
    options = parser.parse_args()
    groups = read_groups(options.runs)
    text = "\n".join(tables(groups, options.seeds))
    print(text)
    if options.report:
        made_by = f"`python benchmarks/tune_replay.py --seeds {options.seeds}`"
        write_report(options.report, "Trials until the best plan is found", made_by, text)


# -- sweeps -----------------------------------------------------------------------------------------------------------


Known = dict[str, dict[str, Calibration]]  # calibrations by their names, that have not seen a family


def family(source: str) -> str:
    """Sources of the same people on the same cluster, which are left out together."""
    return source.removesuffix("_mn")


def read_groups(path: Path) -> list[Group]:
    """The groups that are replayed, each priced by calibrations without its family."""
    runs = list(read_runs(path))
    cases = read_cases(path, runs)
    known = {
        name: calibrations([case for case in cases if family(case.source) != name])
        for name in {family(source) for source in (*SOURCES, *ERRATIC)}
    }
    rows: dict[tuple[str, ...], dict[tuple[str, ...], list[tuple[Run, RunOutcome]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run, outcome in zip(runs, read_outcomes(path), strict=True):
        if outcome.source in (*SOURCES, *ERRATIC):
            rows[outcome.decision][outcome.plan].append((run, outcome))
    made = (_group(decision, plans, known) for decision, plans in rows.items() if len(plans) >= MIN_PLANS)
    return [group for group in made if group is not None]


def _group(
    decision: tuple[str, ...],
    rows: dict[tuple[str, ...], list[tuple[Run, RunOutcome]]],
    known: Known,
) -> Group | None:
    answers = {plan: _answer([outcome for _, outcome in own]) for plan, own in rows.items()}
    steps = [answer.step_s for answer in answers.values() if answer.step_s is not None]
    if len(steps) < MIN_FINISHED:
        return None
    priced = {
        plan: cost for plan, own in rows.items() if (cost := _priced(own[0][0], known[family(decision[0])])) is not None
    }
    _, framework, year, model, *_, gpu, num_gpus, seq_len, batch = decision[:11]
    return Group(
        source=decision[0],
        title=f"{decision[0]}: {framework} {year}, {model}, {num_gpus} {gpu}, {seq_len} tokens, batch {batch}",
        plans=tuple(priced.values()),
        answers=tuple(answers[plan] for plan in priced),
        axes=tuple(priced),
        size=len(rows),
        best_s=min(steps),
    )


def _answer(outcomes: Sequence[RunOutcome]) -> TrialResult:
    """Result of running a plan; of repeats that finished, the mean."""
    steps = [outcome.step_s for outcome in outcomes if outcome.is_finished and outcome.step_s is not None]
    if steps:
        return TrialResult(how="measured", step_s=float(np.mean(steps)))
    how: TrialEnd = "oom" if outcomes[0].status == "oom" else "failed"
    return TrialResult(how=how, reason=outcomes[0].status)


def _priced(run: Run, known: dict[str, Calibration]) -> RankedPlan | None:
    """The row's prediction under a calibration that has not seen its family; None where there is none."""
    if run.problem is None or run.plan is None:
        return None
    problem = run.problem
    unseen = calibration_among(known, problem.framework.calibration_name, problem.cluster.device.generation)
    problem = replace(problem, calibration=replace(unseen, memory_spread=problem.calibration.memory_spread))
    try:
        cost = estimate(problem, problem.batch([run.plan]))
    except AutoplanError:
        return None
    return ranked(problem, cost, [0])[0]


# -- policies: the order in which plans are run ------------------------------------------------------------------------

Policy = Callable[[Group, int], Iterator[int]]  # plans of a group, by seed


def tuned(group: Group, seed: int) -> Iterator[int]:
    """Order in which `autoplan tune` chooses, beyond the point where it would stop."""
    trials: list[TunedTrial] = []
    while len(trials) < len(group.plans):
        view = tuning_state(group.plans, trials)
        if view.next is not None:
            at = view.next
        else:
            done = {trial.at for trial in trials}
            at = min((at for at in range(len(group.plans)) if at not in done), key=lambda at: view.surrogate.mean[at])
        yield at
        trials.append(TunedTrial(number=len(trials), at=at, job="", result=group.answers[at]))


def spoiled(group: Group, seed: int) -> Group:
    """The group with predictions that are off, by `SPOILED_COMPONENT` and `SPOILED_PLAN` (of logarithms)."""
    rng = np.random.default_rng(seed)
    factors = {name: float(np.exp(SPOILED_COMPONENT * rng.standard_normal())) for name in COMPONENTS}
    factor_of = {term: factors[name] for name, terms in COMPONENTS.items() for term in terms}
    plans = []
    for plan in group.plans:
        own = float(np.exp(SPOILED_PLAN * rng.standard_normal()))
        terms = {name: own * factor_of.get(name, 1.0) * value for name, value in plan.terms_s.items()}
        step_s = sum(terms.values())
        plans.append(replace(plan, terms_s=terms, step_s=step_s, low_s=step_s, high_s=step_s))
    return replace(group, plans=tuple(plans))


def tuned_spoiled(group: Group, seed: int) -> Iterator[int]:
    """Order in which `autoplan tune` chooses with worse predictions."""
    return tuned(spoiled(group, seed), seed)


def in_spoiled_order(group: Group, seed: int) -> Iterator[int]:
    """Order by worse predictions."""
    return in_order(spoiled(group, seed), seed)


def in_order(group: Group, seed: int) -> Iterator[int]:
    """Order by prediction: plans that fit, then those at risk, then those that do not fit, each the fastest first."""
    level = {"fits": 0, "risky": 1, "oom": 2}
    yield from sorted(
        range(len(group.plans)), key=lambda at: (level[group.plans[at].verdict], group.plans[at].s_per_sequence)
    )


def at_random(group: Group, seed: int) -> Iterator[int]:
    """Random order."""
    yield from np.random.default_rng(seed).permutation(len(group.plans)).tolist()


def by_tpe(group: Group, seed: int, *, warm: bool = False) -> Iterator[int]:
    """Order in which Optuna's TPE proposes; what was no plan of the group or was proposed before costs no trial."""
    first = list(in_order(group, seed))[:ENQUEUED] if warm else []
    words = [sorted({row[column] for row in group.axes}) for column in range(len(group.axes[0]))]
    distributions: dict[str, BaseDistribution] = {
        f"axis {column}": CategoricalDistribution(column_words)
        for column, column_words in enumerate(words)
        if len(column_words) > 1
    }
    known = {tuple(row[int(name[5:])] for name in distributions): at for at, row in enumerate(group.axes)}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    for at in first:
        study.enqueue_trial({name: group.axes[at][int(name[5:])] for name in distributions})
    done: set[int] = set()
    repeats, rng = 0, np.random.default_rng(seed)
    while len(done) < len(known):
        trial = study.ask(distributions)
        at = known.get(tuple(trial.params[name] for name in distributions), -1)
        if (at < 0 or at in done) and (repeats := repeats + 1) < MAX_REPEATS:
            _tell(study, trial, group.answers[at] if at in done else None)
            continue
        if at < 0 or at in done:
            at = int(rng.choice([value for value in known.values() if value not in done]))
        repeats = 0
        done.add(at)
        yield at
        _tell(study, trial, group.answers[at])


def _tell(study: optuna.Study, trial: optuna.Trial, answer: TrialResult | None) -> None:
    if answer is None or answer.step_s is None:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, answer.step_s)


def by_warm_tpe(group: Group, seed: int) -> Iterator[int]:
    """TPE after prediction's first plans."""
    return by_tpe(group, seed, warm=True)


POLICIES: dict[str, tuple[Policy, bool]] = {  # and whether the seed matters
    "autoplan tune": (tuned, False),
    "prediction in order": (in_order, False),
    "TPE, warm": (by_warm_tpe, True),
    "TPE, cold": (by_tpe, True),
    "random": (at_random, True),
    "tune, spoiled": (tuned_spoiled, True),
    "in order, spoiled": (in_spoiled_order, True),
}


# -- what they come to ------------------------------------------------------------------------------------------------


def trials_to_find(group: Group, order: Iterator[int]) -> int:
    """Trials up to the first one near the best, or `MAX_TRIALS`."""
    return next((count for count, at in enumerate(islice(order, MAX_TRIALS), 1) if group.is_found(at)), MAX_TRIALS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Point where `autoplan tune` stops by itself."""

    trials: int
    regret: float
    stop: str


def stopped(group: Group) -> Ended:
    """Trials until it stops, as if there was no other budget."""
    trials: list[TunedTrial] = []
    while (view := tuning_state(group.plans, trials)).stop != "separated" and view.next is not None:
        answer = group.answers[view.next]
        trials.append(TunedTrial(number=len(trials), at=view.next, job="", result=answer))
    step_s = view.best.result.step_s if view.best and view.best.result else None
    return Ended(
        trials=len(trials), regret=step_s / group.best_s - 1 if step_s else float("inf"), stop=view.stop or "exhausted"
    )


def stopping_point(groups: Sequence[Group]) -> str:
    """Words on where it stops, and how far from the best."""
    ends = [stopped(group) for group in groups]
    regrets = np.array([end.regret for end in ends])
    counted = [end.trials for end in ends]
    return (
        f"stops after {np.median(counted):.0f} trials (median; p90 {np.percentile(counted, 90):.0f}), "
        f"{np.mean(regrets <= NEAR):.0%} of the time within {NEAR:.0%} of the best; "
        f"regret: mean {regrets.mean():.2%}, worst {regrets.max():.1%}"
    )


def tables(groups: Sequence[Group], seeds: int) -> Iterator[str]:
    """Lines of the report."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for sources, what in ((SOURCES, "the sweeps of the aim"), (ERRATIC, "a sweep with erratic runs, beyond the aim")):
        own_groups = [group for group in groups if group.source in sources]
        yield f"{what}: {len(own_groups)} groups, {sum(group.size for group in own_groups)} plans"
        num_seeds = seeds if sources == SOURCES else 1
        yield f"trials until a plan within {NEAR:.0%} of the best was measured; {num_seeds} seeds where there is chance"
        yield f"{'':22}{'median':>8}{'p90':>8}{'mean':>8}   mean of {', '.join(sources)}"
        for name, (policy, is_seeded) in POLICIES.items():
            counts: dict[str, list[int]] = defaultdict(list)
            for group in own_groups:
                for seed in range(num_seeds if is_seeded else 1):
                    counts[group.source].append(trials_to_find(group, policy(group, seed)))
            everything = np.concatenate([counts[source] for source in sources])
            means = "  ".join(f"{np.mean(counts[source]):6.2f}" for source in sources)
            middle, high = np.median(everything), np.percentile(everything, 90)
            yield f"{name:22}{middle:8.1f}{high:8.1f}{everything.mean():8.2f}   {means}"
        if sources == SOURCES:
            yield f"{'aim':22}{AIM[0]:8.1f}{AIM[1]:8.1f}"
        yield f"left to itself, autoplan tune {stopping_point(own_groups)}"
        worse = [spoiled(group, seed) for group in own_groups for seed in range(num_seeds)]
        yield f"with spoiled predictions it {stopping_point(worse)}"
        yield ""
    yield "group by group: plans, finished ones; trials of autoplan tune until found and until it stops, regret then"
    for group in groups:
        end, found = stopped(group), trials_to_find(group, tuned(group, 0))
        finished = sum(answer.step_s is not None for answer in group.answers)
        yield f"{group.size:4}{finished:4}{found:5}{end.trials:5}{end.regret:9.1%}  {group.title}"


if __name__ == "__main__":
    main()
