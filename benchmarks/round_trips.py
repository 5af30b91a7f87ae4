"""Round trips of plans: does what `autoplan export` writes of a plan come back by `autoplan read`?

usage: python benchmarks/round_trips.py [--plans N] [--seed N] [--report FILE]

Legal plans are drawn of every framework that has rules, for models of every kind, with options switched at random:
those that a search leaves out, and those that change the numerics of training, too.  Each is exported to every target
that takes it, in every version, and read back.  The plan that comes back has to be the one that was exported and to
cost the same to nine digits, or the export refuses it; what files cannot hold of the training (the attention kernel,
the length of documents, fused norms, the optimizer of the person's program) they have to say in words.  A trip that
breaks this is told, and the exit status is 1.  The table counts, for every value of an option and every target, the
plans that came back and those that were refused.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from drawn_problems import draw_model, draw_plans
from reports import make_parser, write_report

from autoplan.api.plan_files import make_plan_file
from autoplan.api.problem import make_problem, make_space
from autoplan.base.errors import AutoplanError, InputError
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.launch_files import reader_of
from autoplan.frameworks.megatron_lm.notation import graph_scopes
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.frameworks.registry import TARGETS, book_of
from autoplan.launch.targets import exported
from autoplan.search.axes import WITH_TP, axes_of
from autoplan.search.flags import ALLOWED
from autoplan.search.ranking import ranked
from autoplan.spec.axes import AXES, DEFAULT_RECOMPUTE_MODULES
from autoplan.spec.axis import Axis, Kind
from autoplan.spec.enums import CudaGraphs, Precision, Recompute, RecomputeModule
from autoplan.spec.lengths import BATCHINGS, Lengths
from autoplan.spec.model import ModelSpec
from autoplan.spec.optimizers import OPTIMIZERS, TRAITS
from autoplan.spec.plan import ParallelPlan, PlanBatch, chunk_layers, even_chunks
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec

SEED = 23
PROGRAMS = ("accelerate", "deepspeed", "fsdp2")  # targets of programs that choose their attention
SAME = 1e-9  # prices this close are equal
CLUSTERS = ("h100-sxm:1x8", "h100-sxm:2x8", "b200:1x8", "b200:2x8", "h100-sxm:1x4", "mi300x:2x8", "h100-sxm:8x8")
LENGTHS = (1024, 2048, 4096, 8192)
MAX_SWITCHED = 3  # options of a plan
# Degrees and batches are drawn with the plan; orders of nodes are in files of machines, grids are not priced.
DRAWN = {"tp", "cp", "pp", "vp", "ep", "dp", "dp_shard", "micro_batch", "global_batch", "precision"}
SWITCHED = tuple(axis for axis in AXES if axis.name not in DRAWN | {"placement"})

Rng = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan, its problem and its plan file."""

    problem: Problem
    file: PlanFile

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""
        return self.file.best.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Outcome of a trip to a target and back: "same", "in words", "refused" or "wrong", and the reason."""

    outcome: str
    why: str = ""


@dataclass(slots=True)
class Tally:
    """Outcomes by target and version, and by value of an option and target."""

    plans: int = 0
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    came_back: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


# -- plans -------------------------------------------------------------------------------------------------------------


@cache
def frameworks() -> dict[str, tuple[str, ...]]:
    """The presets under every book of rules."""
    found: dict[str, tuple[str, ...]] = {}
    for name in preset_frameworks():
        rules = load_framework(name).rules
        found[rules] = (*found.get(rules, ()), name)
    found.pop("unknown")
    return found


def draw_problem(rng: Rng, rules: str) -> Problem | None:
    """A random problem under a book of rules; None where what was drawn does not go together."""
    training: dict[str, Any] = {
        "seq_len": int(rng.choice(LENGTHS)),
        "precision": str(rng.choice([Precision.BF16, *Precision])),
    }
    if rng.random() < 0.15:
        training["optimizer"] = str(rng.choice(OPTIMIZERS))
    if rng.random() < 0.1:
        training["fused_norm"] = bool(rng.random() < 0.5)
    if rng.random() < 0.1:
        training["document_len"] = 512
    elif rng.random() < 0.1:
        training |= {"lengths": Lengths(histogram=((512, 3), (2048, 1))), "batching": str(rng.choice(BATCHINGS))}
    if rng.random() < 0.1:
        training |= {"capacity_factor": float(rng.choice((0.75, 1.25, 2.0))), "pads_experts": bool(rng.random() < 0.5)}
    framework = str(rng.choice(frameworks()[rules]))
    try:
        spec = TrainingSpec(**training)
        return make_problem(draw_model(rng), cluster=str(rng.choice(CLUSTERS)), framework=framework, training=spec)
    except AutoplanError:
        return None


def draw_file(rng: Rng, problem: Problem) -> Exported | None:
    """A random legal plan of a problem; None where none was found."""
    batch = problem.cluster.num_devices * int(rng.choice((2, 4, 8)))
    allowed: list[str] = []
    try:
        space = make_space(problem, batch)
        for choice in (choice for choice in ALLOWED if "=" not in choice):
            try:
                space = make_space(problem, batch, allow=[*allowed, choice])
            except InputError:
                continue
            allowed.append(choice)
        plans = draw_plans(space, space.cells(), rng, 1)
        if not len(plans):
            return None
        plan = plans.plan(0)
        for _ in range(int(rng.integers(MAX_SWITCHED + 1))):
            axis = SWITCHED[int(rng.integers(len(SWITCHED)))]
            plan = legal_switch(rng, problem, plan, axis) or plan
        return priced(problem, plan)
    except AutoplanError:
        return None


def priced(problem: Problem, plan: ParallelPlan) -> Exported:
    """A plan with its plan file."""
    costs = estimate(problem, problem.batch([plan]))
    file = make_plan_file(problem, ranked(problem, costs, [0]), None, timings="", command="benchmarks/round_trips.py")
    return Exported(problem=problem, file=file)


def legal_switch(rng: Rng, problem: Problem, plan: ParallelPlan, axis: Axis) -> ParallelPlan | None:
    """The plan with another value of an axis; None where it is not legal."""
    try:
        changed = replace(plan, **switch(rng, problem.model, plan, axis))
        is_legal = not broken(book_of(problem.framework).rules, problem.workload, changed)
    except AutoplanError:
        return None
    return changed if is_legal and changed != plan else None


def switch(rng: Rng, model: ModelSpec, plan: ParallelPlan, axis: Axis) -> dict[str, Any]:
    """Another value of an axis of a plan, at random, with those that depend on it."""
    plain = {"recompute_modules": DEFAULT_RECOMPUTE_MODULES, "recompute_num_layers": None}
    match axis.name:
        case "etp":
            return {"etp": int(rng.choice((1, 2, plan.tp)))}
        case "dp_replicate":
            copies = int(rng.choice([count for count in range(1, plan.dp + 1) if plan.dp % count == 0]))
            return {"dp_replicate": copies, "dp_shard": plan.dp // copies}
        case "recompute":
            return {"recompute": str(rng.choice(list(Recompute))), **plain}
        case "recompute_modules":
            parts = rng.choice(list(RecomputeModule), size=int(rng.integers(1, 4)), replace=False)
            return {"recompute": Recompute.SELECTIVE, **plain, "recompute_modules": tuple(map(str, parts))}
        case "recompute_num_layers":
            most = max(model.num_layers // (plan.pp * plan.vp), 2)
            return {"recompute": Recompute.FULL, **plain, "recompute_num_layers": int(rng.integers(1, most))}
        case "layers_per_chunk":
            even = even_chunks(model.num_layers, plan.pp * plan.vp)
            layers = list(plan.layers_per_chunk or even)
            taker, giver = rng.integers(len(layers), size=2)
            layers[giver] -= 1
            layers[taker] += 1
            return {"layers_per_chunk": None if tuple(layers) == even else tuple(layers)}
        case name if axis.kind is Kind.FLAG:
            return {name: not getattr(plan, name)}
        case "offload_percent":
            return {"offload": "optimizer", "offload_percent": int(rng.integers(1, 100))}
        case "secondary_shard":
            return {"secondary_shard": int(rng.choice((1, 2, 4)))}
        case name:
            return {name: str(rng.choice(list(axis.enum or ())))}


# -- trips -------------------------------------------------------------------------------------------------------------


def trip(subject: Exported, to: str) -> Trip:
    """Export to a target, in some version, and read back."""
    problem, plan = subject.problem, subject.plan
    try:
        files = exported(subject.file, to, "torchrun")
    except InputError as error:
        return Trip(outcome="refused", why=str(error))
    reader = reader_of("plan.json" if to == "autoplan" else to.partition("@")[0])
    with tempfile.TemporaryDirectory() as folder:
        for written in files:
            (Path(folder) / written.name).write_text(written.text)
        known = [written for written in files if reader.recognises(written.name, written.text)]
        if not known:
            return Trip(outcome="wrong", why="no file is recognised")
        launch, why = None, ""
        text = "\n".join(written.text for written in files)
        for given in givens(subject, Path(folder), text):
            try:
                launch = reader.read(known[0].text, given)
                break
            except InputError as error:
                why = str(error)
    if launch is None:
        return Trip(outcome="wrong", why=f"not read: {why}")
    if to.partition("@")[0] in PROGRAMS and f"Priced with {plan.attention} attention" in text:
        launch = replace(launch, plan=replace(launch.plan, attention=plan.attention))
    if differing := different_axes(problem, plan, launch.plan):
        return Trip(outcome="wrong", why=f"other {', '.join(differing)}")
    in_words = dict(said_in_words(problem.training, launch.training, text))
    training = replace(launch.training, **{name: getattr(problem.training, name) for name in in_words})
    ratios = price_ratios(subject, replace(launch, training=training))
    if max(abs(ratio - 1) for ratio in ratios) > SAME:
        return Trip(outcome="wrong", why=f"step and memory are {ratios[0]:.6g} and {ratios[1]:.6g} of the plan's")
    return Trip(outcome="in words", why=", ".join(in_words)) if in_words else Trip(outcome="same")


def givens(subject: Exported, folder: Path, text: str) -> Iterator[LaunchContext]:
    """Yield what a person says beside the file: nothing, then what several formats do not hold, as the files say it."""
    problem, plan = subject.problem, subject.plan
    yield LaunchContext(folder=folder)
    whole = LaunchContext(
        folder=folder,
        model=problem.model,
        num_devices=plan.num_devices,
        devices_per_node=problem.cluster.devices_per_node,
        seq_len=problem.training.seq_len,
    )
    yield whole
    program: dict[str, Any] = {
        "PER_DEVICE_TRAIN_BATCH_SIZE": plan.micro_batch,
        "GRADIENT_ACCUMULATION_STEPS": plan.num_microbatches,
    }
    if "--gradient_checkpointing true" in text:
        program["GRADIENT_CHECKPOINTING"] = "true"
    if "--dtype bfloat16" in text:
        program["DTYPE"] = "bfloat16"
    yield replace(whole, variables=tuple((name, str(count)) for name, count in program.items()))


def different_axes(problem: Problem, plan: ParallelPlan, other: ParallelPlan) -> list[str]:
    """Return the axes that mean something in either of two plans and have unlike values."""
    before, after = meant(problem, plan), meant(problem, other)
    return [axis for axis in {**before, **after} if before.get(axis) != after.get(axis)]


def meant(problem: Problem, plan: ParallelPlan) -> dict[str, Any]:
    """Return the values of the axes that mean something in a plan, in one form."""
    model, rules = problem.model, problem.framework.rules
    axes = axes_of(model, plan) | {"precision": plan.precision, "dp": plan.dp}
    if axes.get("etp") == WITH_TP:
        axes["etp"] = plan.tp
    if rules == "deepspeed" and plan.precision == Precision.FP16:  # whose gradients have 16 bits in any case
        del axes["grad_dtype"]
    # Graphs of more that a model has not are the same graphs.
    if plan.cuda_graphs not in (CudaGraphs.NONE, CudaGraphs.FULL_ITERATION):
        axes["cuda_graphs"] = tuple(graph_scopes(plan.cuda_graphs, model))
    if plan.sharding != "none" and plan.dp_shard * plan.cp > 1:
        axes["dp_shard"] = plan.dp_shard
    if plan.pp > 1:
        axes["layers"] = chunk_layers(plan, model.num_layers)
    return axes


def said_in_words(training: TrainingSpec, read: TrainingSpec, text: str) -> Iterator[tuple[str, str]]:
    """Yield what no option of the files holds of the training, and the words in which they say it."""
    norms = "norms in one kernel" if training.fused_norm else "norms of several kernels"
    words = {
        "document_len": f"documents of {training.document_len or 0:,} tokens",
        "fused_norm": f"Priced with {norms}",
        "finetuning": "puts the adapters of adapter_config.json on it",
        "lengths": "Samples have",
        "batching": "Samples have",
        "optimizer": f"takes {TRAITS[training.optimizer].title}",
        "balancing_loss": f"as uneven as a balancing loss of {training.balancing_loss:g} says",
    }
    for name, sentence in words.items():
        if getattr(training, name) == getattr(read, name):
            continue
        # An optimizer may be an option of the program, which stands in the script.
        if sentence in text or (name == "optimizer" and "--optim " in text):
            yield name, sentence


def price_ratios(subject: Exported, launch: Launch) -> tuple[float, float]:
    """Step time and memory of what was read, over those of what was exported."""
    problem = replace(subject.problem, model=launch.model, training=launch.training)
    if (problem, launch.plan) == (subject.problem, subject.plan):
        return 1.0, 1.0
    costs = estimate(problem, PlanBatch.of([launch.plan], launch.model.num_layers))
    best = subject.file.best
    return float(costs.step_s[0]) / best.step_s, float(costs.memory_bytes[0]) / best.memory_bytes


# -- counts ------------------------------------------------------------------------------------------------------------


def values_of(plan: ParallelPlan) -> Iterator[str]:
    """Yield the values of the options of a plan: "tp=1", "tp>1", "recompute=full"."""
    for axis in AXES:
        value = getattr(plan, axis.name)
        if axis.kind is Kind.COUNT:
            yield f"{axis.name}{'=1' if value == 1 else '>1'}"
        elif axis.kind is Kind.LIST:
            yield f"{axis.name} {'usual' if value == axis.default else 'given'}"
        else:
            yield f"{axis.name}={value}"


def check(tally: Tally, subject: Exported) -> None:
    """Make all trips of a plan, and count."""
    tally.plans += 1
    for name in TARGETS:
        if subject.problem.framework.rules not in TARGETS[name].rules:
            continue
        for to in TARGETS[name].spellings:
            made = trip(subject, to)
            tally.outcomes.setdefault(to, Counter())[made.outcome] += 1
            counts = tally.refused if made.outcome == "refused" else tally.came_back
            counts.update((value, name) for value in values_of(subject.plan))
            if made.outcome == "wrong":
                problem = subject.problem
                tally.wrong.append(
                    f"{to}: {made.why}: {subject.plan.describe()} of {problem.model.name}, "
                    f"{problem.framework.name}, {problem.cluster.name}, {problem.training}"
                )


def table(tally: Tally) -> Iterator[str]:
    """Yield the table of outcomes, and that of values: plans that came back / were refused."""
    for name, outcomes in sorted(tally.outcomes.items()):
        yield f"{name:24} " + ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
    yield ""
    targets = sorted({to for _, to in (*tally.came_back, *tally.refused)})
    yield f"{'came back / refused':32}" + "".join(f"{to:>17}" for to in targets)
    for value in dict.fromkeys(value for value, _ in (*tally.came_back, *tally.refused)):
        counts = (f"{tally.came_back[value, to]:,} / {tally.refused[value, to]:,}" for to in targets)
        yield f"{value:32}" + "".join(f"{count:>17}" for count in counts)


def main(arguments: list[str] | None = None) -> int:
    """Draw plans, make their trips, print the counts and what was lost; 1 where anything was."""
    parser = make_parser(__doc__)
    parser.add_argument("--plans", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(arguments)
    tally, start, rng = Tally(), time.process_time(), np.random.default_rng(options.seed)
    while tally.plans < options.plans:
        problem = draw_problem(rng, str(rng.choice(list(frameworks()))))
        for _ in range(4):
            if problem and (subject := draw_file(rng, problem)):
                check(tally, subject)
    lines = [
        f"{tally.plans:,} plans, seed {options.seed}, {time.process_time() - start:.0f} s of CPU time",
        *table(tally),
        *tally.wrong,
    ]
    print("\n".join(lines))
    if options.report:
        write_report(options.report, "Round trips of plans", "`python benchmarks/round_trips.py`", "\n".join(lines))
    return int(bool(tally.wrong))


if __name__ == "__main__":
    sys.exit(main())
