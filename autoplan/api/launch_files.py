"""Reading of launch files, and comparison of their plan with the best one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from autoplan.api.options import ProblemOptions
from autoplan.api.problem import check_rank_order, load_framework, load_model, make_problem, with_usual_routing
from autoplan.api.results import Result, Table
from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import encode
from autoplan.base.units import check_count
from autoplan.cost.input_rate import with_input
from autoplan.frameworks import plan_file
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.common.rules import Rule, broken
from autoplan.frameworks.launch_files import read_launch, read_launch_on, reader_of
from autoplan.frameworks.registry import TARGETS, book_of
from autoplan.launch.targets import exported
from autoplan.search.choice import compared
from autoplan.search.plan_changes import Difference, changes, fastest_path, nearest_equal, prices
from autoplan.search.ranking import TIE
from autoplan.search.space import Space
from autoplan.spec.explanation import AxisChange, CurrentPlan, OptionChange
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan, SearchResult
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult(Result):
    """A launch file as understood; `launch` has its target, framework, model, training, plan and options."""

    path: Path
    launch: Launch

    @property
    def headline(self) -> str:
        """The file, its target and the framework that it is priced as."""
        kind = "a plan file" if self.launch.target == plan_file.NAME else f"a file of {self.launch.target}"
        return f"{self.path}: {kind}, priced as {self.launch.framework}"

    def table(self) -> Table:
        """Return the options that were not understood, and whether they may affect time or memory."""
        columns = ("option", "value", "why", "matters")
        return Table(columns=columns, rows=tuple((u.option, u.value, u.why, u.matters) for u in self.launch.unread))

    def to_json(self) -> str:
        """Return what was read as JSON."""
        return encode(self.launch)


def read(
    path: str | Path,
    *,
    model: str | Path | ModelSpec | None = None,
    devices: int | None = None,
    devices_per_node: int | None = None,
    seq_len: int | None = None,
    variables: Iterable[str] | Mapping[str, str] = (),
    target: str | None = None,
) -> ReadResult:
    """Read a launch script or configuration of any export target, without executing it.

    `model`, `devices` (in total), `devices_per_node` and `seq_len` (in tokens) override the file.  `variables` are its
    shell variables ({"NAME": "VALUE"}), and `target` names the format of an ambiguous file.

    Raises InputError if the file cannot be read or does not contain enough.
    """
    context = make_context(
        model, devices=devices, devices_per_node=devices_per_node, seq_len=seq_len, variables=variables
    )
    return ReadResult(path=Path(path), launch=read_launch(Path(path), context, target))


def make_context(
    model: str | Path | ModelSpec | None = None,
    *,
    devices: int | None = None,
    devices_per_node: int | None = None,
    seq_len: int | None = None,
    variables: Iterable[str] | Mapping[str, str] = (),
) -> LaunchContext:
    """Return the context of a launch file: what the user states in addition to it."""
    for flag, value in (("--devices", devices), ("--devices-per-node", devices_per_node), ("--seq-len", seq_len)):
        if value is not None:
            check_count(flag, value, at_most=10**8)
    texts = [f"{name}={value}" for name, value in variables.items()] if isinstance(variables, Mapping) else variables
    pairs = []
    for text in texts:
        name, sign, value_of = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,3}", name):
            raise InputError(
                f"--set {text[:60]!r}: write NAME=VALUE with the name of a variable of the shell, "
                "or the place of an argument of the script"
            )
        pairs.append((name, value_of))
    return LaunchContext(
        model=load_model(model) if model is not None else None,
        num_devices=devices,
        devices_per_node=devices_per_node,
        seq_len=seq_len,
        variables=tuple(pairs),
    )


# -- a search that starts from one -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStart:
    """Start of a search from a launch file: its problem, and the plan to compare with."""

    path: Path
    context: LaunchContext
    launch: Launch
    cluster: ClusterSpec
    options: ProblemOptions
    global_batch: str
    plan: ParallelPlan

    @property
    def target(self) -> str | None:
        """Return the export target whose file it is; None for a plan file, and where no plan can be exported for it."""
        target = TARGETS.get(self.launch.target)
        framework = load_framework(self.options["framework"])
        return target.name if target and framework.rules in target.rules else None

    def problem(self) -> Problem:
        """Return the problem that the file describes."""
        return make_problem(self.launch.model, cluster=self.cluster, **self.options)

    def nearest_result(self, problem: Problem, space: Space, result: SearchResult) -> SearchResult:
        """Return `result` with a best plan that keeps whatever costs nothing from the file's plan."""
        best = nearest_equal(problem, space.rules, self.plan, result.rivals[0])
        return result if best == result.rivals[0] else result.led_by(best)

    def compared(self, problem: Problem, file: PlanFile, result: SearchResult) -> CurrentPlan:
        """Compare the plan of the launch file with the best one, in `file`."""
        plan, launch = self.plan, self.launch
        unpriced = _broken(problem, plan, universal.PRICED_RULES)
        priced = None if unpriced else with_input(problem, prices(problem, [plan])[0])
        rivals = [with_input(problem, rival) for rival in result.rivals]
        difference = Difference(
            problem=problem, rules=book_of(problem.framework).rules, before=plan, after=file.best.plan
        )
        try:
            axis_changes, steps = changes(difference), fastest_path(difference)
        except AutoplanError:  # the plan does not even add up, as `broken` says
            axis_changes, steps = (), ()
        today = CurrentPlan(
            path=str(self.path),
            target=launch.target,
            plan=plan,
            broken=_faults(problem, plan),
            priced=priced,
            gap=compared(priced, file.best) if priced else None,
            num_faster=sum(rival.s_per_sequence < priced.s_per_sequence * (1 - TIE) for rival in rivals)
            if priced
            else 0,
            changes=axis_changes,
            walk=steps,
            options=(),
            no_options="",
            unread={
                f"{unread.option} {unread.value}".strip(): unread.why for unread in launch.unread if unread.matters
            },
        )
        return _with_options(self, file, today)


def with_routing(launch: Launch, framework: Framework, training: TrainingSpec) -> TrainingSpec:
    """Return a launch file's training with experts as even as they usually are, which only plan files say."""
    return training if launch.target == plan_file.NAME else with_usual_routing(launch.model, framework, training)


def start_from(
    path: str | Path,
    cluster: ClusterSpec,
    options: ProblemOptions,
    *,
    model: str | Path | ModelSpec | None = None,
    seq_len: int | None = None,
    global_batch: int | str | None = None,
    variables: Iterable[str] | Mapping[str, str] = (),
    target: str | None = None,
) -> LaunchStart:
    """Read the launch file on `cluster`; arguments override it, except that a range of batches keeps the file's own."""
    context = make_context(model, seq_len=seq_len, variables=variables)
    context = replace(context, has_lengths=options.get("lengths") is not None)
    try:
        launch = read_launch_on(Path(path), context, cluster, target)
    except InputError as error:
        raise InputError(str(error).replace("--model", "MODEL")) from None  # which is an argument of a search
    training = launch.training if seq_len is None else replace(launch.training, seq_len=seq_len)
    options = {"framework": launch.framework, **options}
    if options.get("expert_imbalance") is None and options.get("balancing_loss") is None:
        training = with_routing(launch, load_framework(options["framework"]), training)
    options = {**options, "training": training}
    batch = str(global_batch or launch.plan.global_batch)
    is_number = batch.isascii() and batch.isdigit() and 0 < len(batch) < 10
    num_sequences = int(batch) if is_number else launch.plan.global_batch
    precision = options.get("precision", training.precision)
    plan = replace(launch.plan, precision=precision, global_batch=num_sequences)  # type: ignore[arg-type]
    return LaunchStart(
        path=Path(path),
        context=context,
        launch=launch,
        cluster=cluster,
        options=options,
        global_batch=batch,
        plan=plan,
    )


def _faults(problem: Problem, plan: ParallelPlan) -> tuple[str, ...]:
    """Reasons why the framework refuses a plan; empty where it does not."""
    faults = _broken(problem, plan, book_of(problem.framework).rules)
    try:
        check_rank_order(problem.framework, plan.rank_order)
    except InputError as error:
        return (*faults, str(error))
    return faults


def _broken(problem: Problem, plan: ParallelPlan, rules: tuple[Rule, ...]) -> tuple[str, ...]:
    try:
        return broken(rules, problem.workload, plan)
    except AutoplanError as error:
        return (str(error),)


# -- the options of the file ------------------------------------------------------------------------------------------


def _with_options(started: LaunchStart, file: PlanFile, today: CurrentPlan) -> CurrentPlan:
    """`today` with the options that change, as a whole and axis by axis, as its target writes them."""
    in_file = dict(started.launch.options)
    if today.target not in TARGETS or not in_file:
        return today
    written: dict[str, dict[str, str]] = {}
    refusals: list[str] = []
    for to in TARGETS[today.target].spellings:
        try:
            written[to] = _written(started, file, file.best, to)
        except InputError as error:
            refusals.append(str(error))
    if not written:
        return replace(today, no_options=refusals[0])
    # Of several generations of a framework the file is of the one whose options it has.
    to = max(written, key=lambda name: len(written[name].keys() & in_file.keys()))
    # What was not understood is not written either: it is the person's to keep.
    unread = {option.option for option in started.launch.unread}
    options = tuple(change for change in differing(in_file, written[to]) if change.option not in unread)
    if today.priced is None or today.broken:
        return replace(today, options=options)
    options = _needed(options, in_file, _implied(started, file, today.priced, to), written[to])

    def of_axis(change: AxisChange) -> AxisChange:
        if change.alone is None:
            return change
        try:
            changed = differing(before, _written(started, file, change.alone, to))
        except InputError:  # admitted by the framework, but not to be written for it
            return change
        as_written = (replace(option, before=in_file.get(option.option, option.before)) for option in changed)
        return replace(change, options=tuple(as_written))

    try:
        before = _written(started, file, today.priced, to)
    except InputError:
        return replace(today, options=options)
    return replace(today, options=options, changes=tuple(map(of_axis, today.changes)))


def _needed(
    options: tuple[OptionChange, ...], in_file: Mapping[str, str], implied: Mapping[str, str], after: Mapping[str, str]
) -> tuple[OptionChange, ...]:
    """Return the changes that the plan needs, with what is written for today's plan and for the best one.

    Left out is what is written alike for both: what the file leaves to its framework's default, says in other words
    (`--recompute-activations` for a granularity, unless what is said in other words changes) or sets for other reasons
    (`--max-position-embeddings` beyond the sequence).  Options about the same thing share a long word.
    """
    if not implied:
        return options
    in_other_words = implied.keys() - in_file.keys()
    changed_words = {
        word
        for change in differing(implied, after)
        if change.option in in_other_words
        for word in _long_words(change.option)
    }

    def is_needed(change: OptionChange) -> bool:
        if change.after is None and change.option not in implied:
            return bool(changed_words & _long_words(change.option))
        return implied.get(change.option) != change.after

    return tuple(filter(is_needed, options))


def _long_words(option: str) -> set[str]:
    """Return the words that say what an option is about; shorter ones are such as `parallel`, `size` and `use`."""
    return {word for word in re.split(r"[^a-z]+", option.rpartition(".")[2].casefold()) if len(word) > len("parallel")}


def _implied(started: LaunchStart, file: PlanFile, priced: RankedPlan, to: str) -> dict[str, str]:
    """Return the options that an export of the file's own plan has; empty if it cannot be exported."""
    launch = started.launch
    launched = replace(file, model=launch.model, training=launch.training, best=replace(priced, plan=launch.plan))
    try:
        return _written(started, replace(launched, alternatives=()), launched.best, to)
    except InputError:
        return {}


def _written(started: LaunchStart, file: PlanFile, plan: RankedPlan, to: str) -> dict[str, str]:
    """Return the options of a plan exported for `to`, the file's target in a version, as the launch file names them."""
    cluster, reader = file.cluster, reader_of(started.launch.target)
    files = exported(replace(file, best=plan), to, "torchrun")
    refusal = InputError("none of its files can be read back")
    with TemporaryDirectory() as folder:  # files name each other
        for written in files if len(files) > 1 else ():
            Path(folder, written.name).write_text(written.text, "utf-8")
        context = replace(
            started.context,
            model=started.launch.model,  # a file that a program's arguments complete does not say them again
            seq_len=started.launch.training.seq_len,
            num_devices=cluster.num_devices,
            devices_per_node=cluster.devices_per_node,
            variables=(),
            folder=Path(folder),
        )
        for written in files:
            if reader.recognises(written.name, written.text):
                try:
                    options, in_file = reader.read(written.text, context).options, dict(started.launch.options)
                    return {reader.name_in(option, in_file): value for option, value in options}
                except InputError:  # such as a file beside the arguments of a program
                    refusal = InputError(f"{written.name} of the export leaves arguments to the program")
    raise refusal


def differing(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[OptionChange, ...]:
    """Return the options whose values differ, or that only one of the two has."""
    names = dict.fromkeys((*before, *after))
    return tuple(
        OptionChange(option=name, before=before.get(name), after=after.get(name))
        for name in names
        if not _is_same(before.get(name), after.get(name))
    )


def _is_same(first: str | None, second: str | None) -> bool:
    """Return whether two values of an option mean the same: 0 is 0.0, and True is true."""
    if first is None or second is None or first == second:
        return first == second
    if first.casefold() in ("true", "false"):
        return first.casefold() == second.casefold()
    try:
        return float(first) == float(second)
    except ValueError:
        return False
