"""How true is a step that is predicted from a profile of this very machine, and from nothing else?

usage: python benchmarks/closed_loop.py [--model NAME ...] [--steps N] [--budget S] [--busy] [--report REPORT.md]

Profiles a few small models on one rank without accelerators into a database of its own, prices training steps through
`estimate` from these timings, then runs the steps: plain torch in bf16, with the layers that the profiler measures,
AdamW on fp32 weights, several micro-batches, with and without recomputation.  Every second micro-batch size is not
profiled but interpolated.  Steps in which other programs used more than 6 % of the machine do not count; where none is
left, the time is the process's own CPU time, and the row says so.  So it is with --busy for the profile, which else
has no use for what it measured beside other load.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

# One thread for each rank, as the profiler has; before torch is there.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autoplan.cli.inputs import with_timings
from autoplan.cost.estimate import estimate
from autoplan.cost.provenance import shares
from autoplan.errors import AutoplanError
from autoplan.files import write_text
from autoplan.model import ModelSpec
from autoplan.plan import ParallelPlan, PlanBatch
from autoplan.problem import Problem
from autoplan.read.cluster import load_cluster
from autoplan.read.framework import load_framework
from autoplan.timing import Operation
from autoplan.training import TrainingSpec
from profiler.kernels import Layer, Maker
from profiler.launch import Crew
from profiler.protocol import Job, Rules
from profiler.sensors import Sensors, foreign_load
from profiler.store import open_store
from profiler.sweep import Progress, Wish, plan, run

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
WARMUP = 2
MOST_FOREIGN = Rules().most_foreign


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Steps of one plan: the median of the clean ones, else of the process's own time in all."""

    step_s: float
    num_clean: int
    foreign: float  # share of the machine that others used, in the median step


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


def train(model: ModelSpec, plan: ParallelPlan, num_steps: int, *, is_busy: bool) -> Measured:
    """Run `num_steps` steps, and on a machine that should be quiet so many again while few of them were clean."""
    sensors, training = Sensors(torch.device("cpu"), "here"), steps(model, plan)
    for _ in range(WARMUP):
        next(training)
    clean: list[float] = []
    own, foreign = [], []
    for _ in range(1 if is_busy else 3):
        for _ in range(num_steps):
            sensors.start()
            next(training)
            window = sensors.stop()
            own.append(window.own_core_s)
            foreign.append(foreign_load([window], on_cpu=True))
            if foreign[-1] <= MOST_FOREIGN:
                clean.append(window.wall_s)
        if len(clean) >= num_steps // 2:
            break
    step_s = float(np.median(clean or own))
    return Measured(step_s=step_s, num_clean=len(clean), foreign=float(np.median(foreign)))


def profile(model: ModelSpec, url: str, budget_s: float, *, is_busy: bool) -> str:
    """Measure the operations of a model on one rank into the database; what came of it, in words."""
    began, progress = time.monotonic(), Progress(total=0)
    with Crew(Job(dtypes=("bf16",), allowance_s=1.0 if is_busy else 3.0), None, 1) as crew, open_store(url) as store:
        hello = crew.start()
        assert hello is not None
        wish = Wish(
            model=model, framework=load_framework("torch"), seq_len=SEQ_LEN, micro_batches=PROFILED, only=OPERATIONS
        )
        planned = plan(wish, hello, store.known(hello.fingerprint))
        progress.total = len(planned)
        run(crew, hello, store, planned, budget_s=budget_s, progress=progress)
        if is_busy:
            spoilt = list(store.records(status=("contaminated", "unstable")))
            # Their medians: samples that scatter so would go into quarantine.
            store.add(replace(one, status="ok", reason="", samples_s=(one.seconds,)) for one in spoilt if one.samples_s)
    statuses = [outcome.status for _, outcome in progress.outcomes]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in sorted(set(statuses)))
    took_s = time.monotonic() - began
    return f"profile of {model.name}: {len(statuses)} of {progress.total} measurements in {took_s:.0f} s: {counts}"


def plans() -> list[ParallelPlan]:
    """What is trained: every micro-batch size with and without recomputation."""
    base = ParallelPlan(global_batch=GLOBAL_BATCH, sharding="none", param_gather_overlap=False)
    return [
        replace(base, micro_batch=micro_batch, recompute=recompute)
        for recompute in ("none", "full")
        for micro_batch in TRAINED
    ]


def compare(model: ModelSpec, url: str, num_steps: int, *, is_busy: bool) -> Iterator[tuple[float, bool, str]]:
    """(error, whether it was clean, row) of every plan of a model."""
    problem = Problem(
        model=model,
        training=TrainingSpec(seq_len=SEQ_LEN),
        cluster=load_cluster("cpu:1x1"),
        framework=load_framework("torch"),
    )
    problem = with_timings(problem, "db", url)
    batch = PlanBatch.of(plans(), model.num_layers)
    predicted, found = estimate(problem, batch).step_s, shares(problem, batch)
    for at, one in enumerate(plans()):
        measured = train(model, one, num_steps, is_busy=is_busy)
        error = float(predicted[at]) / measured.step_s - 1
        names = ("measured", "interpolated", "reference", "datasheet")
        rests = " / ".join(f"{100 * found[name][at]:.0f}" for name in names)  # type: ignore[index]
        row = (
            f"| {model.name} | {one.micro_batch} | {one.recompute} | {1e3 * measured.step_s:.0f} ms "
            f"| {1e3 * float(predicted[at]):.0f} ms | {100 * error:+.1f} % | {rests} "
            f"| {measured.num_clean or 'none'} | {100 * measured.foreign:.0f} % |"
        )
        yield error, measured.num_clean > 0, row


HEAD = """| model | micro-batch | recomputed | measured | predicted | error | rests on, % | clean steps | other load |
|---|--:|---|--:|--:|--:|--:|--:|--:|"""


def main() -> int:
    """Profile, predict, train and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="only this one; may be repeated")
    parser.add_argument("--steps", type=int, default=8, help="of each plan")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the profile of a model")
    parser.add_argument("--busy", action="store_true", help="take what was measured beside other load as well")
    parser.add_argument("--report", type=Path, help="write the table to this Markdown file as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = [MODELS[name] for name in options.model or MODELS]
    lines: list[str] = []
    remarks: list[str] = []
    errors: list[tuple[float, bool]] = []

    def tell(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder) / "timings.db")
        try:
            tell(HEAD)
            for model in models:
                remarks.append(profile(model, url, options.budget, is_busy=options.busy))
                for error, is_clean, row in compare(model, url, options.steps, is_busy=options.busy):
                    errors.append((abs(error), is_clean))
                    tell(row)
        except AutoplanError as error:
            print(error, file=sys.stderr)
            return 1
    clean = [error for error, is_clean in errors if is_clean]
    tell("")
    for remark in remarks:
        tell(f"{remark}.  ")
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
