"""Predicted memory of plain torch beside that of its tensors.

usage: python benchmarks/memory_oracle.py [--real] [--large] [--report FILE]

(a) small plans on real gloo ranks of this machine, whose tensors are tracked in an untimed step; (b) plans of layers as
wide as those of Llama 3 8B, Mixtral 8x7B and Qwen3-30B-A3B, counted by the memory oracle without their devices.  What
is compared are bytes of tensors: no gaps of an allocator, no context, no communicators.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np
from reports import make_parser

from autoplan.base.errors import AutoplanError
from autoplan.base.files import write_text
from autoplan.cost.estimate import stage_costs
from autoplan.frameworks.presets import load_framework
from autoplan.readers.cluster import load_cluster
from autoplan.report.verified import tensor_bytes
from autoplan.spec.blocks import Experts
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from autoplan.trainer.question import Question
from autoplan.trainer.run import run_task
from autoplan.trainer.task import Task
from autoplan.trainer.verify import ask

MIB = 2.0**20
SMALL = ModelSpec(
    name="small", num_layers=4, hidden_size=256, vocab_size=2048, num_heads=8, num_kv_heads=4, ffn_size=704
)
SMALL_MOE = replace(
    SMALL, name="small-moe", ffn_size=0, moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=256)
)
LLAMA = ModelSpec(
    name="llama3-8b", num_layers=32, hidden_size=4096, vocab_size=128256, num_heads=32, num_kv_heads=8, ffn_size=14336
)
MIXTRAL = replace(
    LLAMA,
    name="mixtral-8x7b",
    vocab_size=32000,
    ffn_size=0,
    moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=14336),
)
QWEN = ModelSpec(
    name="qwen3-30b-a3b",
    num_layers=48,
    hidden_size=2048,
    vocab_size=151936,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    qk_norm="head",
    moe=Experts(num_experts=128, experts_per_token=8, expert_ffn_size=768),
)
RECOMPUTED: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "full"},
    {"recompute": "selective", "recompute_modules": ("mlp",)},
)
RECOMPUTED_EXPERTS = (*RECOMPUTED[:2], {"recompute": "selective", "recompute_modules": ("moe",)})


def real_questions() -> Iterator[Question]:
    """Small plans of 1, 2 and 4 ranks, four micro-batches or more."""
    spreads: tuple[dict[str, Any], ...] = (
        *RECOMPUTED,
        {"micro_batch": 2},
        *({"dp_shard": 2, "sharding": kind} for kind in ("none", "zero1", "zero2", "zero3")),
        {"tp": 2},
        {"tp": 2, "sp": True},
        {"tp": 2, "sp": True, "recompute": "full"},
        {"pp": 2},
        {"pp": 2, "schedule": "gpipe"},
        {"pp": 2, "vp": 2, "schedule": "interleaved"},
        {"pp": 2, "vp": 2, "schedule": "zb-v"},
        {"pp": 2, "recompute": "full"},
        {"tp": 2, "sp": True, "dp_shard": 2, "sharding": "zero3"},
        {"pp": 2, "tp": 2, "sp": True},
        {"pp": 2, "dp_shard": 2, "sharding": "zero1"},
        {"dp_shard": 4, "sharding": "zero3", "recompute": "full"},
        {"dp_shard": 2, "dp_replicate": 2, "sharding": "zero3"},
        {"pp": 4},
        {"pp": 4, "schedule": "gpipe", "recompute": "full"},
        {"pp": 4, "schedule": "zb-h1"},
    )
    for spread in spreads:
        plan = ParallelPlan(**{"global_batch": 8, "micro_batch": 1, "sharding": "none", **spread})
        yield Question(model=SMALL, plan=plan, seq_len=256, fused_norm=False)
    for sharded in (
        {"dp_shard": 2, "sharding": "zero3"},
        {"dp_shard": 2, "sharding": "zero1", "recompute": "full"},
        {"pp": 2, "sharding": "none"},
    ):
        plan = ParallelPlan(**{"global_batch": 8, "micro_batch": 1, **sharded})  # type: ignore[arg-type]
        yield Question(model=SMALL_MOE, plan=plan, seq_len=256, fused_norm=False)


def large_questions() -> Iterator[Question]:
    """Plans of TP, FSDP2 and both, with every kind of recomputation; of a step with one micro-batch and with four."""
    spreads: dict[ModelSpec, tuple[dict[str, Any], ...]] = {
        LLAMA: (
            *({"dp_shard": 8, "sharding": "zero3", **again} for again in RECOMPUTED),
            {"dp_shard": 8, "sharding": "zero1"},
            {"tp": 8, "sp": True, "sharding": "none"},
            *({"tp": 4, "sp": True, "dp_shard": 8, "sharding": "zero3", **again} for again in RECOMPUTED),
            {"tp": 4, "dp_shard": 4, "sharding": "zero2"},
            {"dp_shard": 64, "sharding": "zero3", "recompute": "full"},
        ),
        MIXTRAL: (
            *({"dp_shard": 8, "sharding": "zero3", **again} for again in RECOMPUTED_EXPERTS),
            {"tp": 4, "sp": True, "dp_shard": 8, "sharding": "zero3"},
        ),
        QWEN: ({"dp_shard": 32, "sharding": "zero3"}, {"dp_shard": 32, "sharding": "zero3", "recompute": "full"}),
    }
    for model, plans in spreads.items():
        for spread in plans:
            for count in (1, 4):
                plan = ParallelPlan(**{"global_batch": 1, "micro_batch": 1, **spread})
                yield Question(model=model, plan=replace(plan, global_batch=count * plan.dp), seq_len=4096)


def predicted(question: Question) -> list[float]:
    """Bytes of the tensors of every stage."""
    cluster = load_cluster(f"h100-sxm:1x{question.plan.num_devices}")
    training = TrainingSpec(seq_len=question.seq_len, fused_norm=question.fused_norm)
    problem = Problem(model=question.model, training=training, cluster=cluster, framework=load_framework("torch"))
    return [tensor_bytes(stage) for stage in stage_costs(problem, question.plan)]


def tracked(question: Question) -> list[float]:
    """Bytes tracked on the first real rank of every stage."""
    plan = question.plan
    report = run_task(
        Task(
            model=question.model,
            plan=plan,
            seq_len=question.seq_len,
            dtype="bf16",
            num_steps=1,
            num_warmup=0,
            data="synthetic",
        )
    )
    assert report is not None
    return list(report.peak_bytes[:: plan.num_devices // plan.pp])


def counted(question: Question) -> list[float]:
    """Bytes counted by the oracle for every stage."""
    return [peak for _, peak in sorted(ask(question, budget_s=600.0).items())]


def compared(title: str, questions: Iterator[Question], truth: Any) -> str:
    """A section of the report: one row for each stage of each plan."""
    rows, errors = [], []
    for question in questions:
        began = time.monotonic()
        true = truth(question)
        took_s = time.monotonic() - began
        for stage, (predicted_bytes, other) in enumerate(zip(predicted(question), true, strict=True)):
            errors.append(predicted_bytes / other - 1)
            row = f"{question.model.name:15}{question.plan.describe()[:64]:66}{stage:2}{predicted_bytes / MIB:10,.1f}"
            rows.append(f"{row}{other / MIB:10,.1f}{errors[-1]:+8.1%}{took_s:7.1f} s")
            print(rows[-1], file=sys.stderr, flush=True)
    size = np.abs(errors)
    summary = f"{len(errors)} peaks: median {np.median(size):.1%}, worst {size.max():.1%}"
    head = f"{'model':15}{'plan':66}{'st':>2}{'predicted':>10}{'counted':>10}{'error':>8}   took"
    return "\n".join([f"## {title}", "", summary, "", "```", head, *rows, "```"])


def main() -> int:
    """Print both comparisons, or those asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--real", action="store_true", help="only (a), against real ranks")
    parser.add_argument("--large", action="store_true", help="only (b), against the oracle")
    options = parser.parse_args()
    sections = []
    try:
        if options.real or not options.large:
            sections.append(compared("Tracked on real gloo ranks, MiB", real_questions(), tracked))
        if options.large or not options.real:
            sections.append(compared("Counted by the memory oracle, MiB", large_questions(), counted))
        head = f"# Predicted memory of plain torch, {datetime.now(UTC):%Y-%m-%d}"
        made_by = f"`python benchmarks/memory_oracle.py`: torch {version('torch')}, Python {platform.python_version()}."
        text = "\n\n".join([head, made_by, *sections])
        print(text)
        if options.report:
            write_text(options.report, text + "\n", force=True)
    except AutoplanError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
