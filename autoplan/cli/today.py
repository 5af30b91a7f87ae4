"""How good is what runs today?  What `autoplan search --from FILE` adds to a search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.base.errors import AutoplanError, InputError
from autoplan.cli.read import make_given

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autoplan.api.problem import ProblemOptions
    from autoplan.frameworks.common.launch import Given, Launch
    from autoplan.frameworks.common.rules import Rule
    from autoplan.search.space import Space
    from autoplan.spec.explanation import AxisChange, CurrentPlan, OptionChange
    from autoplan.spec.plan import ParallelPlan
    from autoplan.spec.plan_file import PlanFile
    from autoplan.spec.problem import Problem
    from autoplan.spec.search_result import RankedPlan, SearchResult
    from autoplan.topology.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a launch file starts, with what was typed beside it: the flags of the search, and the plan to compare."""

    path: Path
    given: Given
    launch: Launch
    options: ProblemOptions
    global_batch: str
    plan: ParallelPlan


def start_from(
    path: Path,
    cluster: ClusterSpec,
    options: ProblemOptions,
    *,
    model: str | None = None,
    seq_len: int | None = None,
    global_batch: str | None = None,
    variables: list[str] | None = None,
    target: str | None = None,
) -> Started:
    """Read the launch file on `cluster`; what is given beside it wins over what the file says.

    A range of batches leaves the file's plan at its own, one number changes it.
    """
    from autoplan.frameworks.launch_files import read_launch_on

    given = make_given(model, None, None, seq_len, variables)
    try:
        launch = read_launch_on(path, given, cluster, target)
    except InputError as error:
        raise InputError(str(error).replace("--model", "MODEL")) from None  # which is an argument of a search
    training = launch.training if seq_len is None else replace(launch.training, seq_len=seq_len)
    options = {"framework": launch.framework, **options, "training": training}
    batch = global_batch or str(launch.plan.global_batch)
    asked = int(batch) if batch.isascii() and batch.isdigit() and 0 < len(batch) < 10 else launch.plan.global_batch
    precision = options.get("precision", training.precision)
    plan = replace(launch.plan, precision=precision, global_batch=asked)  # type: ignore[arg-type]
    return Started(path=path, given=given, launch=launch, options=options, global_batch=batch, plan=plan)


def allowed_for(problem: Problem, plan: ParallelPlan) -> list[str]:
    """What a search must be allowed to find the plan of a launch file, where the framework admits that."""
    from autoplan.search.limits import default_limits
    from autoplan.spec.axes import USUAL_SCHEDULES

    if _faults(problem, plan):
        return []
    usual = default_limits(problem, (plan.global_batch,))
    allowed: list[str] = []
    if plan.sharding in ("zero2", "zero3") and plan.sharding not in usual.of("sharding"):
        allowed.append(plan.sharding)
    if plan.offload != "none":
        allowed.append("offload")
    if plan.schedule not in USUAL_SCHEDULES:
        allowed.append(f"schedule={plan.schedule}")
    if plan.tp_overlap and problem.framework.overlap.tp_overlap_share:
        allowed.append("tp_overlap")
    if plan.recompute_num_layers is not None and usual.partial_recomputes:
        allowed.append("partial_recompute")
    return allowed


def nearest_result(problem: Problem, space: Space, result: SearchResult, plan: ParallelPlan) -> SearchResult:
    """`result` with a best plan that keeps of `plan` whatever costs nothing, in front."""
    from autoplan.search.walk import nearest_equal

    best = nearest_equal(problem, space.rules, plan, result.rivals[0])
    if best == result.rivals[0]:
        return result
    certificate = replace(result.certificate, best_step_s=best.step_s)
    return replace(result, rivals=(best, *result.rivals), ranked=(best, *result.ranked), certificate=certificate)


def today_of(problem: Problem, started: Started, file: PlanFile, result: SearchResult) -> CurrentPlan:
    """How the plan of the launch file compares with the best one, which `file` holds."""
    from autoplan.frameworks.common import universal_rules as universal
    from autoplan.frameworks.registry import book_of
    from autoplan.search.choice import compared, pace
    from autoplan.search.ranking import TIE
    from autoplan.search.walk import Way, changes, prices, walk
    from autoplan.spec.explanation import CurrentPlan

    plan, launch = started.plan, started.launch
    priced = None if _broken(problem, plan, universal.RULES) else prices(problem, [plan])[0]
    way = Way(problem=problem, rules=book_of(problem.framework).rules, before=plan, after=file.best.plan)
    try:
        found, steps = changes(way), walk(way)
    except AutoplanError:  # the plan does not even add up, as `broken` says
        found, steps = (), ()
    today = CurrentPlan(
        path=str(started.path),
        target=launch.target,
        plan=plan,
        broken=_faults(problem, plan),
        priced=priced,
        gap=compared(priced, file.best) if priced else None,
        num_faster=sum(pace(one) < pace(priced) * (1 - TIE) for one in result.rivals) if priced else 0,
        changes=found,
        walk=steps,
        options=(),
        no_options="",
        unread={f"{one.option} {one.value}".strip(): one.why for one in launch.unread if one.matters},
    )
    return _with_options(started, file, today)


def _faults(problem: Problem, plan: ParallelPlan) -> tuple[str, ...]:
    """Why the framework refuses a plan; empty where it does not."""
    from autoplan.api.problem import check_rank_order
    from autoplan.frameworks.registry import book_of

    faults = _broken(problem, plan, book_of(problem.framework).rules)
    try:
        check_rank_order(problem.framework, plan.rank_order)
    except InputError as error:
        return (*faults, str(error))
    return faults


def _broken(problem: Problem, plan: ParallelPlan, rules: tuple[Rule, ...]) -> tuple[str, ...]:
    from autoplan.frameworks.common.rules import broken

    try:
        return broken(rules, problem.workload, plan)
    except AutoplanError as error:
        return (str(error),)


# -- the options of the file ------------------------------------------------------------------------------------------


def _with_options(started: Started, file: PlanFile, today: CurrentPlan) -> CurrentPlan:
    """`today` with the options that change, as a whole and axis by axis, as its target writes them."""
    from autoplan.frameworks.registry import TARGETS

    mine = dict(started.launch.options)
    if today.target not in TARGETS or not mine:
        return today
    written: dict[str, dict[str, str]] = {}
    refusals: list[str] = []
    for one in TARGETS[today.target].versions:
        try:
            written[one] = _written(started, file, file.best, one)
        except InputError as error:
            refusals.append(str(error))
    if not written:
        return replace(today, no_options=refusals[0])
    # Of several generations of a framework the file is of the one whose options it has.
    version = max(written, key=lambda one: len(written[one].keys() & mine.keys()))
    # What was not understood is not written either: it is the person's to keep.
    unread = {one.option for one in started.launch.unread}
    options = tuple(one for one in differing(mine, written[version]) if one.option not in unread)
    if today.priced is None or today.broken:
        return replace(today, options=options)
    # What the file leaves to its framework's default, which the exported file says, is no change.
    implied = _implied(started, file, today.priced, version)
    options = tuple(one for one in options if one.before is not None or implied.get(one.option) != one.after)

    def of_axis(change: AxisChange) -> AxisChange:
        if change.alone is None:
            return change
        try:
            changed = differing(before, _written(started, file, change.alone, version))
        except InputError:  # admitted by the framework, but not to be written for it
            return change
        as_written = (replace(one, before=mine.get(one.option, one.before)) for one in changed)
        return replace(change, options=tuple(as_written))

    try:
        before = _written(started, file, today.priced, version)
    except InputError:
        return replace(today, options=options)
    return replace(today, options=options, changes=tuple(map(of_axis, today.changes)))


def _implied(started: Started, file: PlanFile, priced: RankedPlan, version: str) -> dict[str, str]:
    """The options that the file itself has once it is exported; empty where it cannot be."""
    launch = started.launch
    own = replace(file, model=launch.model, training=launch.training, best=replace(priced, plan=launch.plan))
    try:
        return _written(started, replace(own, alternatives=()), own.best, version)
    except InputError:
        return {}


def _written(started: Started, file: PlanFile, plan: RankedPlan, version: str) -> dict[str, str]:
    """The options of a plan in the file that is exported for the target of the launch file."""
    from autoplan.frameworks.launch_files import reader_of
    from autoplan.launch.targets import exported

    target, cluster = started.launch.target, file.cluster
    reader = reader_of(target)
    given = replace(
        started.given, num_devices=cluster.num_devices, devices_per_node=cluster.devices_per_node, variables=()
    )
    refusal = InputError("none of its files can be read back")
    for one in exported(replace(file, best=plan), target, "torchrun", version):
        if reader.recognises(one.name, one.text):
            try:
                return dict(reader.read(one.text, given).options)
            except InputError as error:  # such as a script that starts what another file describes
                refusal = error
    raise refusal


def differing(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[OptionChange, ...]:
    """The options whose values differ, or that only one of the two has."""
    from autoplan.spec.explanation import OptionChange

    names = dict.fromkeys((*before, *after))
    return tuple(
        OptionChange(option=name, before=before.get(name), after=after.get(name))
        for name in names
        if not _is_same(before.get(name), after.get(name))
    )


def _is_same(one: str | None, other: str | None) -> bool:
    """Whether an option says the same twice: 0 is 0.0."""
    if one is None or other is None or one == other:
        return one == other
    try:
        return float(one) == float(other)
    except ValueError:
        return False
