"""`autoplan estimate`: what does one plan cost, and where do time and memory go?"""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from autoplan.frameworks.common.rules import Rule
    from autoplan.spec.plan import ParallelPlan
    from autoplan.spec.plan_file import PlanFile
    from autoplan.spec.problem import Problem

RECOMPUTE_HELP = (
    "none, selective, full, full:N (the first N layers of every chunk), or parts such as moe_act+layernorm."
)
BESIDE_A_PLAN_FILE = {"model", "memory", "verify_memory", "trace", "out", "force", "json", "quiet", "url"}
BESIDE_A_LAUNCH_FILE = {
    *BESIDE_A_PLAN_FILE,
    *("launch_file", "variables", "target", "cluster", "global_batch", "seq_len", "precision", "attention"),
    *("framework", "calibration", "timings", "reserve_memory"),
}


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
    tp: Annotated[int, whole_number("--tp", "N", "Tensor-parallel degree.")] = 1,
    cp: Annotated[int, whole_number("--cp", "N", "Context-parallel degree.")] = 1,
    pp: Annotated[int, whole_number("--pp", "N", "Pipeline stages.")] = 1,
    vp: Annotated[int, whole_number("--vp", "N", "Chunks of layers per stage.")] = 1,
    ep: Annotated[int, whole_number("--ep", "N", "Expert-parallel degree.")] = 1,
    etp: Annotated[int | None, whole_number("--etp", "N", "Tensor-parallel degree of experts; as tp.")] = None,
    dp_replicate: Annotated[int, whole_number("--dp-replicate", "N", "Copies of the group that shards states.")] = 1,
    micro_batch: Annotated[int, whole_number("--micro-batch", "N", "Sequences in a micro-batch.")] = 1,
    sharding: Annotated[str, typer.Option(help="none, zero1, zero2 or zero3.")] = "zero1",
    recompute: Annotated[str, typer.Option(metavar="WHAT", help=RECOMPUTE_HELP)] = "none",
    schedule: Annotated[str | None, typer.Option(help="1f1b, interleaved, gpipe, zb-h1, zb-v or dualpipe-v.")] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Layers of every chunk in model order; evenly spread.")
    ] = None,
    cp_kind: Annotated[str, typer.Option(help="ring or all_to_all.")] = "ring",
    offload: Annotated[str, typer.Option(help="none or optimizer.")] = "none",
    rank_order: Annotated[
        str, typer.Option(metavar="ORDER", help="tp-cp-ep-dp-pp or tp-cp-ep-pp-dp, nearest ranks first.")
    ] = "tp-cp-ep-dp-pp",
    placement: Annotated[
        str | None,
        typer.Option(metavar="NODE,NODE,...", help="Nodes in the order of the ranks; as the cluster has them."),
    ] = None,
    tp_overlap: Annotated[bool, typer.Option("--tp-overlap", help="Overlap tensor-parallel traffic.")] = False,
    ep_overlap: Annotated[
        bool, typer.Option("--ep-overlap", help="Run expert traffic beside another micro-batch.")
    ] = False,
    sp: Annotated[bool, typer.Option("--sp/--no-sp", help="Sequence parallelism where tp > 1.")] = True,
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
        wanted = PlanFlags(
            tp=tp,
            cp=cp,
            pp=pp,
            vp=vp,
            ep=ep,
            etp=etp,
            dp_replicate=dp_replicate,
            global_batch=global_batch,
            micro_batch=micro_batch,
            sharding=sharding,
            recompute=recompute,
            schedule=schedule,
            layers=layers,
            cp_kind=cp_kind,
            offload=offload,
            rank_order=rank_order,
            placement=placement,
            tp_overlap=tp_overlap,
            ep_overlap=ep_overlap,
            sp=sp,
        )
        plan = wanted.plan_for(problem)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """The flags that say a plan, as typed; None where the usual value depends on others."""

    tp: int
    cp: int
    pp: int
    vp: int
    ep: int
    etp: int | None
    dp_replicate: int
    global_batch: int
    micro_batch: int
    sharding: str
    recompute: str
    schedule: str | None
    layers: str | None
    cp_kind: str
    offload: str
    rank_order: str
    placement: str | None
    tp_overlap: bool
    ep_overlap: bool
    sp: bool

    def plan_for(self, problem: Problem) -> ParallelPlan:
        """The plan on the whole cluster: the data-parallel degree is what the other degrees leave of it."""
        from autoplan.base.files import decode
        from autoplan.frameworks.registry import book_of
        from autoplan.spec.plan import ParallelPlan, parse_recompute

        split = book_of(problem.framework).split
        degrees = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp_replicate": self.dp_replicate}
        table = {
            **degrees,
            "dp_shard": _rest(problem.cluster.num_devices, degrees),
            "vp": self.vp,
            "ep": self.ep,
            "etp": self.etp if self.etp is not None else (self.tp if problem.model.moe else 1),
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "sharding": self.sharding,
            **parse_recompute(self.recompute),
            "schedule": self.schedule or ("interleaved" if self.vp > 1 else "1f1b"),
            "layers_per_chunk": _layers(self.layers) or (split(problem.model, self.pp * self.vp) if split else None),
            "cp_kind": self.cp_kind,
            "offload": self.offload,
            "rank_order": self.rank_order,
            "placement": self.placement.split(",") if self.placement else None,
            "tp_overlap": self.tp_overlap,
            "ep_overlap": self.ep_overlap,
            "sp": self.sp and self.tp > 1 and problem.framework.network.sequence_parallel,
            "param_gather_overlap": self.sharding != "none",
            "precision": problem.training.precision,
        }
        return decode(ParallelPlan, table, "plan")


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


def _rest(num_devices: int, degrees: dict[str, int]) -> int:
    """The data-parallel degree that uses the whole cluster."""
    for axis, degree in degrees.items():
        if degree < 1:
            raise InputError(f"{axis} must be at least 1, got {degree}")
    product = math.prod(degrees.values())
    if num_devices % product:
        shown = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        raise InputError(f"{shown} must divide the {num_devices} devices of the cluster: change one degree or the size")
    return num_devices // product


def _layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise InputError(f"--layers {text!r}: write the layers of every chunk, such as 19,21,21,19")
    return [int(part) for part in parts]


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
