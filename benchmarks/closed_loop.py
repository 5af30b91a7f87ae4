"""How true is a step that is predicted from a profile of this very machine, and from nothing else?

usage: python benchmarks/closed_loop.py [--model NAME ...] [--rounds N] [--steps N] [--busy] [--report FILE]

Profiles small models on one rank without accelerators, prices training steps through `estimate` from these timings in
a database of their own, and runs the steps: plain torch in bf16, with the layers that the profiler measures, AdamW on
fp32 weights, several micro-batches, with and without recomputation.  Every second size of micro-batch is not profiled
but interpolated.  Profile and steps take turns, and medians over the rounds count.  What other programs used more than
6 % of the machine beside does not count; with --busy it does where nothing else is left: then times are the process's
own CPU time, and the row says that none was clean.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

# One thread for each rank, as the profiler has; before torch is there.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autoplan.cli.inputs import with_timings
from autoplan.cost.estimate import estimate
from autoplan.cost.provenance import shares
from autoplan.errors import AutoplanError, InputError
from autoplan.files import write_text
from autoplan.model import ModelSpec
from autoplan.plan import ParallelPlan, PlanBatch
from autoplan.problem import Problem
from autoplan.read.cluster import load_cluster
from autoplan.read.framework import load_framework
from autoplan.timing import PROVENANCES, Operation
from autoplan.training import TrainingSpec
from profiler.kernels import Layer
from profiler.launch import Crew
from profiler.maker import Maker
from profiler.protocol import Job, Rules
from profiler.record import Fingerprint, Record
from profiler.sensors import Sensors, foreign_load
from profiler.store import open_store
from profiler.sweep import Progress, run
from profiler.wishes import Key, Wish, plan

Floats = NDArray[np.float64]

SMALL = ModelSpec(name="wide", num_layers=4, hidden_size=1024, vocab_size=8192, num_heads=16, ffn_size=2816)
MODELS = {
    model.name: model
    for model in (
        SMALL,
        replace(SMALL, name="grouped", num_layers=8, hidden_size=512, num_heads=8, num_kv_heads=2, ffn_size=1536),
        replace(SMALL, name="deep", num_layers=16, hidden_size=256, num_heads=4, ffn_size=768, tied_embeddings=True),
    )
}
SEQ_LEN, GLOBAL_BATCH = 256, 4
PROFILED, TRAINED = (1, 4), (1, 2, 4)  # sequences in a micro-batch
# What a step on one rank is made of; kernels of their own would only stand in for layers that were not measured.
OPERATIONS: tuple[Operation, ...] = ("layer", "layer_backward", "head", "optimizer")
FRAMEWORK = load_framework("torch")
WARMUP = 2
MOST_FOREIGN = Rules().most_foreign


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step as it was measured."""

    wall_s: float
    own_s: float  # of the process on its core
    foreign: float  # share of the machine that others used

    @property
    def is_clean(self) -> bool:
        """Whether other load left it alone."""
        return self.foreign <= MOST_FOREIGN


class Kept:
    """The records of one profile."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def known(self, fingerprint: Fingerprint) -> list[Key]:
        """Nothing: every round measures everything."""
        return []

    def add(self, records: Iterable[Record]) -> None:
        """Keep records."""
        self.records += records


class Gpt(torch.nn.Module):
    """A decoder of the profiler's layers, computing in bf16."""

    def __init__(self, model: ModelSpec, micro_batch: int, *, recomputes: bool) -> None:
        super().__init__()
        maker = Maker(device=torch.device("cpu"), dtype="bf16")
        sizes = (model.hidden_size, model.ffn_size, model.num_heads, model.kv_heads, model.qk_head_dim)
        layers = (Layer(maker, micro_batch, SEQ_LEN, *sizes, 1) for _ in range(model.num_layers))
        self.layers, self.recomputes = torch.nn.ModuleList(layers), recomputes
        self.table = torch.nn.Parameter(maker.weight(model.vocab_size, model.hidden_size).detach())
        self.head = self.table
        if not model.tied_embeddings:
            self.head = torch.nn.Parameter(maker.weight(model.vocab_size, model.hidden_size).detach())
        self.norm = torch.nn.Parameter(torch.ones(model.hidden_size, dtype=torch.bfloat16))

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each token from those before it; `tokens` are (sequences, SEQ_LEN + 1)."""
        x = F.embedding(tokens[:, :-1].reshape(-1), self.table)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        logits = F.rms_norm(x, x.shape[-1:], self.norm) @ self.head.t()
        return F.cross_entropy(logits.float(), tokens[:, 1:].reshape(-1))


def steps(model: ModelSpec, plan: ParallelPlan) -> Iterator[None]:
    """Train with random tokens: every turn is one step."""
    torch.manual_seed(0)
    gpt = Gpt(model, plan.micro_batch, recomputes=plan.recompute == "full")
    weights = list(gpt.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights]
    adam = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    num_micro_batches = plan.global_batch // plan.micro_batch
    while True:
        batch = torch.randint(model.vocab_size, (num_micro_batches, plan.micro_batch, SEQ_LEN + 1))
        for tokens in batch:
            (gpt(tokens) / num_micro_batches).backward()
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        adam.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
        yield


def train(model: ModelSpec, plan: ParallelPlan, num_steps: int) -> list[Step]:
    """Run some steps."""
    sensors, training, found = Sensors(torch.device("cpu"), "here"), steps(model, plan), []
    for _ in range(WARMUP):
        next(training)
    for _ in range(num_steps):
        sensors.start()
        next(training)
        window = sensors.stop()
        foreign = foreign_load([window], on_cpu=True)
        found.append(Step(wall_s=window.wall_s, own_s=window.own_core_s, foreign=foreign))
    return found


def profile(model: ModelSpec, budget_s: float) -> list[Record]:
    """Measure the operations of a model on one rank."""
    wish = Wish(model=model, framework=FRAMEWORK, seq_len=SEQ_LEN, micro_batches=PROFILED, only=OPERATIONS)
    kept = Kept()
    with Crew(Job(dtypes=("bf16",)), None, 1) as crew:
        hello = crew.start()
        assert hello is not None
        planned = plan(wish, hello, ())
        run(crew, hello, kept, planned, budget_s=budget_s, progress=Progress(total=len(planned)))
    return kept.records


def settled(records: Iterable[Record], *, is_busy: bool) -> list[Record]:
    """One record of each shape, with the median over the rounds: of clean ones, else on request of the others."""
    shapes: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        if record.samples_s:
            shapes.setdefault((record.operation, record.shape), []).append(record)
    found = []
    for repeats in shapes.values():
        usable = [one for one in repeats if one.status == "ok"] or (repeats if is_busy else [])
        if usable:
            median_s = float(np.median([one.seconds for one in usable]))
            found.append(replace(usable[0], status="ok", reason="", samples_s=(median_s,)))
    return found


def plans() -> list[ParallelPlan]:
    """What is trained: every micro-batch size with and without recomputation."""
    base = ParallelPlan(global_batch=GLOBAL_BATCH, sharding="none", param_gather_overlap=False)
    return [
        replace(base, micro_batch=micro_batch, recompute=recompute)
        for recompute in ("none", "full")
        for micro_batch in TRAINED
    ]


def predict(model: ModelSpec, records: Iterable[Record], url: str) -> tuple[Floats, list[str]]:
    """(step times of the plans in seconds, what each rests on), from these records and nothing else."""
    with open_store(url) as store:
        store.add(records)
    training = TrainingSpec(seq_len=SEQ_LEN)
    problem = Problem(model=model, training=training, cluster=load_cluster("cpu:1x1"), framework=FRAMEWORK)
    problem, batch = with_timings(problem, "db", url), PlanBatch.of(plans(), model.num_layers)
    found = shares(problem, batch)
    rests = [" / ".join(f"{100 * found[name][at]:.0f}" for name in PROVENANCES) for at in range(len(batch))]
    return estimate(problem, batch).step_s, rests


def compare(model: ModelSpec, url: str, options: argparse.Namespace) -> Iterator[tuple[float, bool, str]]:
    """(error, whether its steps were clean, row) of every plan of a model."""
    records: list[Record] = []
    trained: dict[ParallelPlan, list[Step]] = {one: [] for one in plans()}
    for _ in range(options.rounds):
        records += profile(model, options.budget)
        for one, own in trained.items():
            own += train(model, one, options.steps)
    usable = settled(records, is_busy=options.busy)
    if not usable:
        raise InputError("other load spoilt every measurement: wait until the machine is quiet, or say --busy")
    predicted, rests = predict(model, usable, url)
    for at, (one, own) in enumerate(trained.items()):
        clean = [step.wall_s for step in own if step.is_clean]
        measured = float(np.median(clean or [step.own_s for step in own]))
        error = float(predicted[at]) / measured - 1
        foreign = float(np.median([step.foreign for step in own]))
        row = (
            f"| {model.name} | {one.micro_batch} | {one.recompute} | {1e3 * measured:.0f} ms "
            f"| {1e3 * float(predicted[at]):.0f} ms | {100 * error:+.1f} % | {rests[at]} "
            f"| {len(clean)} of {len(own)} | {100 * foreign:.0f} % |"
        )
        yield error, bool(clean), row
    ok = sum(record.status == "ok" for record in records)
    print(f"{model.name}: {ok} of {len(records)} measurements of the profile were clean", file=sys.stderr)


HEAD = """| model | micro-batch | recomputed | measured | predicted | error | rests on, % | clean steps | other load |
|---|--:|---|--:|--:|--:|--:|--:|--:|"""


def main() -> int:
    """Profile, predict, train and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=2, help="of profile and steps")
    parser.add_argument("--steps", type=int, default=4, help="of each plan in a round")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the profile of a model")
    parser.add_argument("--busy", action="store_true", help="take what was measured beside other load as well")
    parser.add_argument("--report", type=Path, help="write the table to this Markdown file as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = [MODELS[name] for name in options.model or MODELS]
    lines: list[str] = []
    errors: list[tuple[float, bool]] = []

    def tell(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder) / "timings.db")
        try:
            tell(HEAD)
            for model in models:
                for error, is_clean, row in compare(model, url, options):
                    errors.append((abs(error), is_clean))
                    tell(row)
        except AutoplanError as error:
            print(error, file=sys.stderr)
            return 1
    clean = [error for error, is_clean in errors if is_clean]
    tell("")
    for name, some in (("all", [error for error, _ in errors]), ("clean", clean)):
        if some:
            median, worst = 100 * np.median(some), 100 * max(some)
            tell(f"{name}: median error {median:.1f} %, worst {worst:.1f} % of {len(some)} plans")
    if options.report:
        intro = (__doc__ or "").split("\n\n")[2].replace("\n", " ")
        where = f"On {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}."
        text = f"# Steps predicted from a profile, {time.strftime('%Y-%m-%d')}\n\n{intro}\n\n{where}\n\n" + "\n".join(
            lines
        )
        write_text(options.report, text + "\n", force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
