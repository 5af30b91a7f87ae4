"""`autoplan estimate`: what does one plan cost, and where do time and memory go?"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.base.errors import InputError, NoPlanError
from autoplan.cli.complete import clusters, presets
from autoplan.cli.inputs import check_output, check_untyped, problem_options
from autoplan.cli.options import (
    AsOption,
    AttentionOption,
    CalibrationOption,
    DbOption,
    ForceOption,
    FrameworkOption,
    JsonOption,
    PrecisionOption,
    QuietOption,
    ReserveOption,
    SetOption,
    TimingsOption,
    TraceOption,
    whole_number,
)
from autoplan.cli.plan_flags import plan_flags, plan_of_flags

if TYPE_CHECKING:
    from autoplan.frameworks.common.rules import Rule
    from autoplan.spec.plan import ParallelPlan
    from autoplan.spec.plan_file import PlanFile
    from autoplan.spec.problem import Problem

BESIDE_A_PLAN_FILE = {"model", "memory", "verify_memory", "trace", "out", "force", "json", "quiet", "url"}
BESIDE_A_LAUNCH_FILE = {
    *BESIDE_A_PLAN_FILE,
    *("launch_file", "variables", "target", "cluster", "global_batch", "seq_len", "precision", "attention"),
    *("framework", "calibration", "timings", "reserve_memory"),
}


@plan_flags(after="seq_len")
def estimate(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|PLAN",
            help="As for search; or a plan.json, which is priced again as it is.",
            autocompletion=presets("models"),
        ),
    ] = None,
    launch_file: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="A launch file, whose plan is priced as it is.")
    ] = None,
    variables: SetOption = None,
    target: AsOption = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="CLUSTER", help="As for search.", autocompletion=clusters)
    ] = None,
    global_batch: Annotated[int | None, whole_number("--global-batch", "N", "Sequences in a step.")] = None,
    seq_len: Annotated[int | None, whole_number("--seq-len", "TOKENS", "Sequence length.")] = None,
    precision: PrecisionOption = "bf16",
    attention: AttentionOption = "flash",
    framework: FrameworkOption = "megatron-core",
    calibration: CalibrationOption = None,
    timings: TimingsOption = None,
    url: DbOption = None,
    reserve_memory: ReserveOption = "0",
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Show memory by term and stage, and what would free how much."),
    ] = False,
    verify_memory: Annotated[
        bool,
        typer.Option("--verify-memory", help="Compare with what torch's tensors would hold; needs torch, no device."),
    ] = False,
    trace: TraceOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a plan file here.")] = None,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    **axes: Any,
) -> None:
    """Price one plan: time and memory by term and by pipeline stage.

    The data-parallel degree is what the other degrees leave of the cluster.
    """
    from autoplan.api.plan_files import is_mixed_file, is_plan_file, load_mixed_file, read_plan
    from autoplan.api.problem import load_cluster, make_problem

    if verify_memory and json:
        raise InputError("--verify-memory prints a table: leave out --json")
    output = EstimateFlags(
        memory=memory, verify_memory=verify_memory, out=out, trace=trace, force=force, json=json, quiet=quiet
    )
    output.check()
    if model is not None and is_mixed_file(Path(model)):
        from autoplan.cli.mixed import estimate_saved

        check_untyped(context, context.params.keys() - BESIDE_A_PLAN_FILE, "a plan file is priced as it is")
        if verify_memory:
            raise InputError("--verify-memory is not there for mixed clusters: leave it out")
        estimate_saved(load_mixed_file(Path(model)), output)
        return
    options = problem_options(context)
    if launch_file is not None:
        from autoplan.cli.today import start_from

        check_untyped(
            context, context.params.keys() - BESIDE_A_LAUNCH_FILE, "the plan of a launch file is priced as it is"
        )
        if cluster is None:
            raise InputError("estimate --from needs --cluster: name the cluster that the file runs on")
        batch = None if global_batch is None else str(global_batch)
        place = load_cluster(cluster)
        started = start_from(
            launch_file,
            place,
            options,
            model=model,
            seq_len=seq_len,
            global_batch=batch,
            variables=variables,
            target=target,
        )
        problem, plan = make_problem(started.launch.model, cluster=place, **started.options), started.plan
    elif variables or target:
        raise InputError("--set and --as are about a launch file: give --from FILE")
    elif model is None:
        context.fail("give MODEL or a plan.json, or a launch file: --from FILE")
    elif is_plan_file(Path(model)):
        check_untyped(context, context.params.keys() - BESIDE_A_PLAN_FILE, "a plan file is priced as it is")
        problem, plan, timings = read_plan(Path(model), options.get("db"))
    else:
        if cluster is None or global_batch is None or seq_len is None:
            raise InputError("estimate needs --cluster, --global-batch and --seq-len, or a plan.json")
        problem = make_problem(model, cluster=cluster, seq_len=seq_len, **options)
        plan = plan_of_flags(problem, {**axes, "global_batch": global_batch})
    _price(problem, plan, timings or "", output)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateFlags:
    """The flags that say what is told of the price of a plan, and where it goes, as typed."""

    memory: bool
    verify_memory: bool
    out: Path | None
    trace: Path | None
    force: bool
    json: bool
    quiet: bool

    def check(self) -> None:
        """Refuse, before any work, files that exist or cannot be written."""
        for path in (self.out, self.trace):
            if path is not None:
                check_output(path, force=self.force)


def _price(problem: Problem, plan: ParallelPlan, timings: str, output: EstimateFlags) -> None:
    """Price a legal plan, print it and write what was asked for; `timings` says whose the measured times are."""
    import autoplan.cost.estimate as cost
    from autoplan.api.plan_files import make_plan_file
    from autoplan.base.files import encode, write_text
    from autoplan.cli.trace import write_trace
    from autoplan.search.ranking import ranked
    from autoplan.spec.plan import PlanBatch

    rules = _check_legal(problem, plan)
    if output.verify_memory:
        _check_oracle(problem, plan)
    costs = cost.estimate(problem, PlanBatch.of([plan], problem.model.num_layers))
    file = make_plan_file(problem, ranked(problem, costs, [0]), None, timings=timings)
    if output.memory:
        from autoplan.search.knobs import memory_knobs

        file = replace(file, memory_knobs=memory_knobs(problem, plan, rules))
    text = encode(file)
    if output.out is not None:
        write_text(output.out, text, force=output.force)
    if output.trace is not None:
        from autoplan.cost.timeline import timeline

        write_trace(timeline(problem, plan), plan.describe(), output.trace, force=output.force, quiet=output.quiet)
    if output.json:
        typer.echo(text, nl=False)
    else:
        _print(problem, file, output)
    if not output.quiet and file.best.verdict != "fits":
        what = "does not fit" if file.best.verdict == "oom" else "may not fit"
        print(f"autoplan: warning: the plan {what} in device memory", file=sys.stderr)


def _print(problem: Problem, file: PlanFile, output: EstimateFlags) -> None:
    from autoplan.report.terminal import make_console, print_estimate, print_memory, print_next_steps

    show = print_memory if output.memory else print_estimate
    show(make_console(), file)
    if output.verify_memory:
        _verify_memory(problem, file, quiet=output.quiet)
    if output.out is not None:
        print_next_steps(make_console(), ("next", f"autoplan explain {shlex.quote(str(output.out))}"))


def _check_oracle(problem: Problem, plan: ParallelPlan) -> None:
    """Refuse what the memory oracle cannot tell."""
    from autoplan.trainer.verify import check

    if problem.framework.rules != "trainer":
        raise InputError(
            f"the memory oracle is plain torch, the plan is for {problem.framework.name}, which keeps other tensors: "
            "leave out --verify-memory, or price the plan with --framework torch"
        )
    check(problem.model, plan, problem.training.seq_len)


def _verify_memory(problem: Problem, file: PlanFile, *, quiet: bool) -> None:
    from autoplan.report.terminal import make_console
    from autoplan.report.verified import print_verified
    from autoplan.trainer.verify import Question, ask

    if not quiet:
        print("autoplan: asking the memory oracle, in a minute at most", file=sys.stderr)
    found = ask(Question(model=problem.model, plan=file.best.plan, seq_len=problem.training.seq_len))
    print_verified(make_console(), file, found)


def _check_legal(problem: Problem, plan: ParallelPlan) -> tuple[Rule, ...]:
    """The rules that the plan obeys; refused with the first that it breaks."""
    from autoplan.api.problem import check_rank_order, check_tp_overlap
    from autoplan.frameworks.common.rules import broken
    from autoplan.frameworks.registry import book_of
    from autoplan.spec.plan import chunk_layers

    chunk_layers(plan, problem.model.num_layers)
    if plan.tp_overlap:
        check_tp_overlap(problem.framework)
    check_rank_order(problem.framework, plan.rank_order)
    rules = book_of(problem.framework).rules
    if faults := broken(rules, problem.workload, plan):
        raise NoPlanError(f"{problem.framework.name} does not admit the plan: {faults[0]}")
    return rules
