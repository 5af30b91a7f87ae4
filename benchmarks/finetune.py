"""Fine-tuning against published figures: memory of 100 runs with LoRA, QLoRA and full, and steps of MLPerf's LoRA.

usage: python benchmarks/finetune.py [--report FILE]

The figures stand in `tests/data/finetuning_runs.csv` and `tests/data/mlperf_lora_runs.csv`, with their sources.  What a
framework does is that of the facts that ship, but for what a source says of itself (`_frameworks`).
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from reports import make_parser, write_report

from autoplan.base.units import GIB
from autoplan.cost.estimate import estimate
from autoplan.frameworks.presets import load_framework
from autoplan.readers.calibration import built_in_calibration
from autoplan.readers.cluster import load_cluster
from autoplan.readers.model import load_model
from autoplan.spec.enums import Precision
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch, parse_recompute
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec

DATA = Path(__file__).parent.parent / "tests" / "data"
UNITS = {"GiB": GIB, "GB": 1e9}


def _qwen(size: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int) -> ModelSpec:
    return ModelSpec(
        name=f"qwen-{size}",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=ffn,
        vocab_size=vocab,
        qkv_bias=True,
    )


def _neox(name: str, layers: int, hidden: int, ffn: int, vocab: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=32,
        ffn_size=ffn,
        vocab_size=vocab,
        gated_mlp=False,
        norm="layernorm",
        qkv_bias=True,
        mlp_bias=True,
        attention_output_bias=True,
    )


# Sizes of the config.json of each on the Hugging Face hub; intermediate_size of the first Qwen counts both matrices.
MODELS = {
    model.name: model
    for model in (
        _qwen("1.8b", 24, 2048, 16, 5504, 151936),
        _qwen("7b", 32, 4096, 32, 11008, 151936),
        _qwen("14b", 40, 5120, 40, 13696, 152064),
        _qwen("72b", 80, 8192, 64, 24576, 152064),
        _neox("phi-1.5", 24, 2048, 8192, 51200),
        _neox("stablelm-alpha-3b", 16, 4096, 16384, 50688),
    )
}


def _frameworks() -> Mapping[str, Framework]:
    """The software of each source, by its name in the table."""
    trainer, deepspeed = load_framework("transformers"), load_framework("deepspeed-hf")
    # PEFT before 0.8 makes adapters of the type of the weights (tuners/lora/layer.py), and Adam's moments follow.
    narrow = {"bytes_per_weight": 2.0, "bytes_per_grad": 2.0, "bytes_per_optimizer_state": 4.0}
    return {
        "trainer": trainer.changed(**narrow, bytes_per_update_copy=4.0),
        "trainer-fp32": trainer,
        # Qwen's model computes its loss in the type of its logits (modeling_qwen.py); nothing casts under DeepSpeed.
        "deepspeed": deepspeed.changed(logs_memory="device", bytes_per_logit=8.0),
        # --precision bf16-true; logits in pieces; max_memory_allocated; q, k and v are cut from one tensor.
        "litgpt": trainer.changed(
            **narrow,
            bytes_per_update_copy=4.0,
            bytes_per_logit=8.0,
            logs_memory="allocated",
            keeps_packed_qkv=True,
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A predicted figure beside a published one."""

    group: str
    what: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.published - 1.0


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of a table of published figures."""
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def compared_memory() -> Iterator[Compared]:
    """Peak memory of every fine-tuning run; of several devices their sum, as published."""
    frameworks = _frameworks()
    for row in read_rows("finetuning_runs.csv"):
        model, count = MODELS.get(row["model"]) or load_model(row["model"]), int(row["devices"])
        precision, sharding = Precision(row["precision"]), row["sharding"]
        training = TrainingSpec(seq_len=int(row["seq_len"]), precision=precision, finetuning=_finetuning(row))
        problem = Problem(
            model=model,
            training=training,
            cluster=load_cluster(row["cluster"]),
            framework=frameworks[row["framework"]],
        )
        plan = ParallelPlan(
            global_batch=int(row["micro_batch"]) * int(row["num_microbatches"]) * count,
            micro_batch=int(row["micro_batch"]),
            dp_shard=count,
            sharding=sharding,  # type: ignore[arg-type]
            precision=precision,
            param_gather_overlap=sharding != "none",
            **parse_recompute(row["recompute"]),  # type: ignore[arg-type]
        )
        found = estimate(problem, PlanBatch.of([plan], model.num_layers))
        method = {"none": "LoRA", "": ""}.get(row["quantization"], f"LoRA, {row['quantization']}")
        method = "full" if row["method"] == "full" else method + (" and embeddings" if row["trained"] else "")
        yield Compared(
            group=f"{row['source']}: {row['model']}, {method}, {row['cluster']}",
            what=f"{row['micro_batch']} x {row['seq_len']}",
            published=float(row["memory"]),
            predicted=float(found.logged_memory_bytes[0]) * count / UNITS[row["unit"]],
        )


def _finetuning(row: Mapping[str, str]) -> FineTuning:
    if row["method"] == "full":
        return FineTuning()
    return FineTuning(
        rank=int(row["rank"]),
        targets=tuple(row["targets"].split(",")),
        dropout=float(row["dropout"]),
        quantization=row["quantization"],  # type: ignore[arg-type]
        saved_modules=tuple(name for name in row["trained"].split(",") if name),
    )


def compared_steps() -> Iterator[Compared]:
    """Step times of MLPerf's Llama-2-70B LoRA: rank 16 on the matrices of attention, packed sequences of 8,192."""
    model = load_model("llama2-70b")
    finetuning = FineTuning(rank=16, targets=("linear_qkv", "linear_proj"), dropout=0.1)
    for row in read_rows("mlperf_lora_runs.csv"):
        framework, cluster = load_framework(row["framework"]), load_cluster(row["cluster"])
        tp, cp = int(row["tp"]), int(row["cp"])
        problem = Problem(
            model=model,
            training=TrainingSpec(
                seq_len=8192,
                precision=Precision(row["precision"]),
                finetuning=finetuning,
            ),
            cluster=cluster,
            framework=framework,
            calibration=built_in_calibration(framework, cluster.device),
        )
        plan = ParallelPlan(
            global_batch=int(row["global_batch"]),
            tp=tp,
            cp=cp,
            dp_shard=cluster.num_devices // (tp * cp),
            sp=row["sp"] == "1",
            tp_overlap=row["tp_overlap"] == "1",
            precision=Precision(row["precision"]),
            fp8_attention=row["fp8_attention"] == "1",
            **framework.choices,
            **parse_recompute(row["recompute"]),  # type: ignore[arg-type]
        )
        found = estimate(problem, PlanBatch.of([plan], model.num_layers))
        yield Compared(
            group=f"{cluster.device.generation}: {row['source']}",
            what=f"{row['system']}, {row['cluster']}",
            published=float(row["step_s"]),
            predicted=float(found.step_s[0]),
        )


def median_error(rows: list[Compared]) -> float:
    """The median of the absolute relative errors."""
    return float(np.median([abs(row.error) for row in rows]))


def table(rows: list[Compared], unit: str, *, alone: bool) -> str:
    """The errors by group; `alone` shows every row on a line."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    lines = [f"median error {100 * median_error(rows):.1f} % of {len(rows)} published figures in {unit}", ""]
    for group, members in groups.items():
        lines.append(f"{group}: median {100 * median_error(members):.1f} %")
        shown = [f"{row.what}: {row.published:g} {row.predicted:.3g} ({100 * row.error:+.0f} %)" for row in members]
        lines += [f"    {text}" for text in (shown if alone else ["; ".join(shown)])]
    return "\n".join(lines)


def main() -> int:
    """Print both comparisons: published, predicted, error."""
    arguments = make_parser(__doc__).parse_args()
    memory = table(list(compared_memory()), "GiB or GB", alone=False)
    steps = table(list(compared_steps()), "seconds", alone=True)
    for block in (memory, steps):
        print(block, end="\n\n")
    if arguments.report:
        write_report(arguments.report, "Fine-tuning against published figures", "benchmarks/finetune.py", memory, steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
