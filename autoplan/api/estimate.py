"""Estimates: what one plan costs, and where time and memory go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from autoplan.api.options import ProblemOptions, check_names
from autoplan.api.plan_files import is_plan_file, make_plan_file, retimed_problem
from autoplan.api.plan_result import PlanResult, load_plan
from autoplan.api.problem import check_rank_order, check_tp_overlap, load_cluster, make_problem, unpriced_parts
from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.files import decode
from autoplan.cost import estimate as cost
from autoplan.frameworks.common.rules import Rule, broken
from autoplan.frameworks.registry import book_of
from autoplan.frameworks.trainer.rules import check_training
from autoplan.search.memory_knobs import memory_knobs
from autoplan.search.ranking import ranked
from autoplan.spec.axes import AXES, PARTLY_MEANT
from autoplan.spec.derived_values import derived_values
from autoplan.spec.enums import CodedEnum
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, chunk_layers, parse_recompute
from autoplan.spec.problem import Problem
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.placement import switches_of_nodes
from autoplan.trainer.question import Question


def estimate(
    model: str | Path | ModelSpec | PlanResult | None = None,
    *,
    cluster: str | Path | ClusterSpec | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    launch_file: str | Path | None = None,
    variables: Iterable[str] | Mapping[str, str] = (),
    target: str | None = None,
    plan: ParallelPlan | Mapping[str, Any] | None = None,
    memory_knobs: bool = False,
    **options: Unpack[ProblemOptions],
) -> PlanResult:
    """Price one plan: time and memory by term and by pipeline stage.

    `plan` sets the axes that differ from their defaults, by their flag names ({"tp": 8, "pp": 4}); data parallelism
    uses the remaining devices.  Alternatively, the plan comes from a `launch_file`, or from a result or plan file
    passed as `model`, which is priced again unchanged: with its own timings or, if `timings` is given, with current
    ones. `global_batch` is in sequences, `seq_len` in tokens.  `memory_knobs` adds the changes that would free memory.

    Raises InputError for arguments that cannot be used, and NoPlanError if the framework does not support the plan.  A
    plan that does not fit is not an error: the verdict says so.
    """
    check_names(options, ProblemOptions, "estimate")
    timings = options.get("timings") or ""
    if launch_file is not None:
        from autoplan.api.launch_files import start_from  # brings the readers of all frameworks

        if cluster is None:
            raise InputError("estimate --from needs --cluster: name the cluster that the file runs on")
        if isinstance(model, PlanResult):
            raise InputError("both a plan and a launch file are given: leave one of them out")
        started = start_from(
            launch_file,
            load_cluster(cluster),
            options,
            model=model,
            seq_len=seq_len,
            global_batch=global_batch,
            variables=variables,
            target=target,
        )
        problem, chosen_plan = started.problem(), started.plan
    elif variables or target:
        raise InputError("--set and --as need a launch file: give --from FILE")
    elif saved := _saved(model, None if timings else options.get("db")):
        problem, chosen_plan = saved.problem, saved.plan
        if timings:
            problem = retimed_problem(saved.file, timings, options.get("db"))
        timings = timings or saved.file.timings
    elif model is None or isinstance(model, PlanResult) or cluster is None or global_batch is None or seq_len is None:
        raise InputError("estimate needs --cluster, --global-batch and --seq-len, or a plan.json")
    else:
        problem = make_problem(model, cluster=cluster, seq_len=seq_len, **options)
        chosen_plan = plan if isinstance(plan, ParallelPlan) else make_plan(problem, global_batch, plan or {})
    return price(problem, chosen_plan, timings=timings, with_knobs=memory_knobs)


def _saved(model: str | Path | ModelSpec | PlanResult | None, db: str | None) -> PlanResult | None:
    """Return the plan if one was passed as the model, None for a model."""
    if isinstance(model, str | Path) and is_plan_file(Path(model)):
        return load_plan(model, db=db)
    return model if isinstance(model, PlanResult) else None


def price(problem: Problem, plan: ParallelPlan, *, timings: str = "", with_knobs: bool = False) -> PlanResult:
    """Price a legal plan; `timings` names the source of the problem's measured timings."""
    rules = _check_legal(problem, plan)
    costs = cost.estimate(problem, problem.batch([plan]))
    command = "autoplan.estimate() of Python"
    file = make_plan_file(problem, ranked(problem, costs, [0]), None, timings=timings, command=command)
    if with_knobs:
        file = replace(file, memory_knobs=memory_knobs(problem, plan, rules))
    warnings = unpriced_parts(problem.model)
    if file.best.verdict != "fits":
        verdict = "does not fit" if file.best.verdict == "oom" else "may not fit"
        warnings = (*warnings, f"the plan {verdict} in device memory")
    return PlanResult(file=file, problem=problem, warnings=warnings)


def make_plan(problem: Problem, global_batch: int, axes: Mapping[str, Any]) -> ParallelPlan:
    """Return the plan with these axes and defaults for the rest; data parallelism uses the remaining devices."""
    flagged = {axis.name: axis for axis in AXES if axis.spelled}
    if unknown := next((name for name in axes if name not in flagged), None):
        raise InputError(f"plan has no axis {unknown!r}: known are {', '.join(flagged)}")
    usual = {name: axis.default if axis.flag_default is ... else axis.flag_default for name, axis in flagged.items()}
    chosen = problem.framework.choices
    usual |= {
        name: problem.framework.choice(name) for name, axis in flagged.items() if axis.offered_by or name in chosen
    }
    book = book_of(problem.framework)
    if usual["sharding"] not in book.words("sharding"):  # such as before there was a distributed optimizer
        usual["sharding"] = book.words("sharding")[0]
    values: dict[str, Any] = {name: usual[name] if axes.get(name) is None else axes[name] for name in flagged}
    values = {name: str(value) if isinstance(value, CodedEnum) else value for name, value in values.items()}
    layers, placement = _layers(values["layers_per_chunk"]), values["placement"]
    values |= {
        **parse_recompute(values["recompute"]),
        "global_batch": global_batch,
        "layers_per_chunk": layers or (book.split(problem.model, values["pp"] * values["vp"]) if book.split else None),
        "placement": placement.split(",") if isinstance(placement, str) else placement,
        "sp": values["sp"] and problem.framework.network.sequence_parallel,
        "precision": problem.training.precision,
    }
    table = derived_values(
        num_devices=problem.cluster.num_devices,
        has_experts=problem.model.moe is not None,
        has_latents=problem.model.mla is not None,
        hint=": change one degree or the size of the cluster",
        **values,
    )
    # What is asked for is refused where it means nothing, not left out like a framework's usual choice.
    table |= {axis.name: axes[axis.name] for axis in PARTLY_MEANT if axes.get(axis.name)}
    return decode(ParallelPlan, table, "plan")


def _layers(layers: Sequence[int] | str | None) -> list[int] | None:
    if layers is None or not isinstance(layers, str):
        return None if layers is None else list(layers)
    parts = [part.strip() for part in layers.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise InputError(f"--layers {layers!r}: write the layers of every chunk, such as 19,21,21,19")
    return [int(part) for part in parts]


def _check_legal(problem: Problem, plan: ParallelPlan) -> tuple[Rule, ...]:
    """Return the rules of the framework; NoPlanError with the first one that the plan breaks."""
    chunk_layers(plan, problem.model.num_layers)
    if plan.tp_overlap:
        check_tp_overlap(problem.framework)
    check_rank_order(problem.framework, plan.rank_order)
    if plan.placement is not None:
        switches_of_nodes(problem.cluster, plan.placement)  # which refuses other nodes than those of the cluster
    rules = book_of(problem.framework).rules
    if faults := broken(rules, problem.workload, plan):
        raise NoPlanError(f"{problem.framework.name} does not support the plan: {faults[0]}")
    return rules


# -- the memory oracle ------------------------------------------------------------------------------------------------


def check_oracle(result: PlanResult) -> None:
    """Reject a plan that the memory oracle (torch's tensors without a device) cannot build."""
    from autoplan.trainer.verify import check  # of interest here only

    problem = result.problem
    if problem.framework.rules != "trainer":
        raise InputError(
            f"the memory oracle is plain torch, the plan is for {problem.framework.name}, which keeps other tensors: "
            "leave out --verify-memory, or price the plan with --framework torch"
        )
    check_training(problem.training)
    check(problem.model, result.plan, problem.training.seq_len)


def ask_oracle(result: PlanResult) -> Mapping[int, float]:
    """Return the bytes that torch's tensors would hold at the peak of every stage; it takes up to a minute."""
    from autoplan.trainer.verify import ask  # of interest here only

    check_oracle(result)
    problem = result.problem
    return ask(Question(model=problem.model, plan=result.plan, seq_len=problem.training.seq_len))
