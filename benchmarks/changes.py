"""Changes of the answers of searches: is one of them faster than the plan that is called proven best?

usage: python benchmarks/changes.py [--problems N] [--seed N] [--report FILE]

Problems are drawn as for `certificate.py`, with the whole space that `autoplan search` looks at.  The answer of each is
explained, and a random plan of it is searched from as a launch file.  Every plan that `explain` or `search --from`
names, that is legal and as safe as the best is compared with it.  One that is faster by more than a thousandth has to
be one of those that the search leaves out and says so: its options change the numerics of training, or a limit that the
certificate states excludes it.  Anything else is told, and the exit status is 1.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from certificate import cell_of
from drawn_problems import Case, draw, draw_plans, kind_of
from reports import make_parser, write_report

import autoplan
from autoplan.api.plan_result import PlanResult
from autoplan.api.problem import make_space
from autoplan.base.errors import NoPlanError
from autoplan.search.axes import axes_of, differing
from autoplan.search.choice import is_as_safe
from autoplan.search.space import Space
from autoplan.spec.axes import AXIS, SEARCHED
from autoplan.spec.plan import SPLIT_SCHEDULES, ParallelPlan
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import Certificate, RankedPlan

SEED = 19
LARGE = 0.25  # share of problems with 256 devices or more
STARTED = 0.4  # share of problems that are searched from a launch file, too
# Zero-bubble pipelines are priced pass by pass, which takes long: of the problems that have them so many are kept.
KEPT_SPLIT = 0.2
MAX_PLANS = 10_000_000
TOLERANCE = 1e-3  # a plan that is faster by less is none that anybody would change for

# What a certificate says of an axis that has not its name.
_SAYS = {
    "schedule": ("schedule", "vp"),
    "sharding": ("sharding", "states sharded"),
    "dp": ("global batch",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A plan that is named beside the best one, and where it is."""

    plan: RankedPlan
    named_by: str


@dataclass(slots=True)
class Tally:
    """Count of what was searched, what was named, and what is faster."""

    problems: int = 0
    unsolved: int = 0  # without a plan that fits
    proven: int = 0  # answers, those of searches from a launch file among them
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


# -- what is named -----------------------------------------------------------------------------------------------------


def answer_of(case: Case, launch_file: Path | None = None) -> PlanResult:
    """The answer of a default search, or of one from a launch file."""
    problem = case.problem
    return autoplan.search(
        problem.model,
        cluster=problem.cluster,
        global_batch=case.batch,
        seq_len=problem.training.seq_len,
        framework=problem.framework,
        precision=problem.training.precision,
        reserve_memory=problem.reserve_bytes,
        launch_file=launch_file,
    )


def explained(answer: PlanResult) -> Iterator[Change]:
    """Yield the plans with one or two changes that `explain` calls possible."""
    found = autoplan.explain(answer).explanation
    for near in (*found.changes, *found.better):
        if near.is_possible:
            yield Change(plan=near.plan, named_by="explain")


def started_from(answer: PlanResult) -> Iterator[Change]:
    """Yield the plans on the way from a launch file to the best plan, and those with one change of the file's."""
    today = answer.file.today
    if today is None:
        return
    for change in today.changes:
        if change.alone is not None:
            yield Change(plan=change.alone, named_by="search --from")
    for step in today.walk:
        yield Change(plan=step.plan, named_by="search --from")
    if today.priced is not None and not today.broken:
        yield Change(plan=today.priced, named_by="search --from")


# -- what may be faster ------------------------------------------------------------------------------------------------


def left_out(problem: Problem, space: Space, certificate: Certificate, best: ParallelPlan, plan: ParallelPlan) -> str:
    """Say which option of `plan` is left out of the space, and why; empty where nothing says that it is."""
    for axis in SEARCHED:
        if axis.exact is not None and getattr(plan, axis.name) not in space.limits.of(axis.name):
            return f"{axis.name} changes the numerics of training"
    if is_in(space, plan):
        return ""
    before, after = axes_of(problem.model, best), axes_of(problem.model, plan)
    changed = differing(before, after)
    for change in changed:
        if _is_told(change, certificate) and not _is_admitted(change, space, plan):
            return f"{change} is limited, as the certificate says"
    return ""


def _is_told(change: str, certificate: Certificate) -> bool:
    """Return whether a limit that the certificate states is about the axis that was changed."""
    words = "|".join(map(re.escape, _SAYS.get(change, (change,))))
    return any(re.match(rf"({words})\b", limit) for limit in certificate.limits)


def _is_admitted(change: str, space: Space, plan: ParallelPlan) -> bool:
    """Return whether the space's limits admit the plan's value of an axis that is searched value by value."""
    axis = AXIS.get(change)
    if axis and axis.can_be_bounded:
        return space.limits.admits(change, getattr(plan, change))
    return axis in SEARCHED and getattr(plan, change) in space.limits.of(change)


def is_in(space: Space, plan: ParallelPlan) -> bool:
    """Return whether a space holds a plan."""
    cell = cell_of(plan)
    if cell not in space.cells():
        return False
    batch, _ = space.plans([cell])
    same = batch.micro_batch == plan.micro_batch
    for name in ("schedule", "recompute", "sharding", "vp"):
        same &= getattr(batch, name) == AXIS[name].code(getattr(plan, name))
    return any(batch.plan(int(at)) == plan for at in np.flatnonzero(same))


def check(tally: Tally, case: Case, seed: int) -> None:
    """Search, explain, search from a random plan, and add to the tally what is faster than the best."""
    rng = np.random.default_rng(seed)
    answer = answer_of(case)
    tally.problems += 1
    tally.kinds.update((kind_of(case.problem.model), f"rules of {case.problem.framework.rules}"))
    compare(tally, case, answer, explained(answer))
    plans = draw_plans(case.space, case.space.cells(), rng, 1)
    if not len(plans) or rng.random() >= STARTED:
        return
    start = autoplan.estimate(
        case.problem.model,
        cluster=case.problem.cluster,
        global_batch=plans.plan(0).global_batch,
        seq_len=case.problem.training.seq_len,
        framework=case.problem.framework,
        precision=case.problem.training.precision,
        plan=plans.plan(0),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        start.save(path)
        found = answer_of(case, path)
    compare(tally, case, found, started_from(found))
    best = fastest_pace(answer)
    if keeps_numerics(plans.plan(0), answer.file.best.plan) and not found.file.best.s_per_sequence <= best * (
        1 + TOLERANCE
    ):
        tally.wrong.append(
            f"{case.command}: searched from {plans.plan(0).describe()}: {found.file.best.plan.describe()} is "
            f"{found.file.best.s_per_sequence / best - 1:.2%} slower than {answer.file.best.plan.describe()}"
        )


def keeps_numerics(start: ParallelPlan, best: ParallelPlan) -> bool:
    """Return whether a search that keeps what `start` chose of the numerics of training may find `best`."""
    axes = (axis for axis in SEARCHED if axis.exact is not None)
    return all(getattr(best, axis.name) in axis.usual(getattr(start, axis.name)) for axis in axes)


def fastest_pace(answer: PlanResult) -> float:
    """Seconds per sequence of the fastest plan, before which a simpler one may stand."""
    certificate = answer.file.certificate
    slower = certificate.slower_than_fastest if certificate else None
    return answer.file.best.s_per_sequence / (1 + (slower or 0.0))


def compare(tally: Tally, case: Case, answer: PlanResult, changes: Iterator[Change]) -> None:
    """Compare plans with the best one."""
    file: PlanFile = answer.file
    best, certificate = file.best, file.certificate
    assert certificate is not None
    tally.proven += certificate.proven
    space = make_space(answer.problem, case.batch)
    batches = space.limits.global_batches
    for change in changes:
        outcomes = tally.outcomes.setdefault(change.named_by, Counter())
        if not is_as_safe(change.plan, best):
            outcomes["less safe"] += 1
            continue
        gain = 1 - change.plan.s_per_sequence / fastest_pace(answer)
        if gain <= TOLERANCE:
            outcomes["no faster"] += 1
            continue
        if change.plan.plan.global_batch not in batches:
            outcomes["of another batch"] += 1
            continue
        why = left_out(answer.problem, space, certificate, best.plan, change.plan.plan)
        outcomes["faster, left out" if why else "faster"] += 1
        tally.reasons[why] += bool(why)
        if not why:
            changed = differing(
                axes_of(answer.problem.model, best.plan), axes_of(answer.problem.model, change.plan.plan)
            )
            where = "in the space" if is_in(space, change.plan.plan) else f"not in the space: {certificate.limits}"
            tally.wrong.append(
                f"{case.command}: {change.named_by} names {change.plan.plan.describe()} ({', '.join(changed)}), "
                f"{gain:.2%} faster than {best.plan.describe()}, {where}"
            )


# -- problems ----------------------------------------------------------------------------------------------------------


def is_kept(case: Case, rng: np.random.Generator) -> bool:
    """Return whether a problem is looked at."""
    splits = any(AXIS["schedule"].code(schedule) in SPLIT_SCHEDULES for schedule in case.space.limits.of("schedule"))
    if splits and case.problem.cluster.num_devices > 1 and rng.random() >= KEPT_SPLIT:
        return False
    return case.space.size(case.space.cells()) <= MAX_PLANS


def main(arguments: list[str] | None = None) -> int:
    """Draw problems, search and explain them, and print what is faster than the answers; 1 where anything is."""
    parser = make_parser(__doc__)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(arguments)
    tally, start, rng = Tally(), time.process_time(), np.random.default_rng(options.seed)
    while tally.problems < options.problems:
        case = draw(rng, is_large=bool(rng.random() < LARGE), is_narrowed=False)
        if case is None or not is_kept(case, rng):
            continue
        seed = int(rng.integers(2**32))
        try:
            check(tally, case, seed)
        except NoPlanError:
            tally.unsolved += 1
            continue
        print(f"{tally.problems}: {case.command}", file=sys.stderr, flush=True)
    lines = [
        f"{tally.problems} problems ({tally.unsolved} others have no plan that fits), seed {options.seed}, "
        f"{time.process_time() - start:.0f} s of CPU time",
        ", ".join(f"{count} {kind}" for kind, count in sorted(tally.kinds.items())),
        f"{tally.proven} answers are proven; of the plans named beside them, legal and priced:",
        *(
            f"{name:13} " + ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
            for name, outcomes in sorted(tally.outcomes.items())
        ),
        *(f"{count:5} faster since {reason}" for reason, count in tally.reasons.most_common()),
        *tally.wrong,
    ]
    print("\n".join(lines))
    if options.report:
        write_report(options.report, "Changes of proven answers", "`python benchmarks/changes.py`", "\n".join(lines))
    return int(bool(tally.wrong))


if __name__ == "__main__":
    sys.exit(main())
