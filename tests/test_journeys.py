"""First hours of new users, from an empty folder: every step uses what the user has and what was printed before."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from commands import run

DATASHEET = """name = "box"
num_nodes = 1
devices_per_node = 8
device = {name = "card", memory_gib = 24, memory_bandwidth_gb_per_s = 1008, peak_tflops = {bf16 = 165.2}}
host = {memory_gib = 512}
"""
SLURM = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
srun torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py \\
  --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \\
  --ffn-hidden-size 14336 --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights \\
  --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256 --position-embedding-type rope \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel \\
  --micro-batch-size 1 --global-batch-size 128 --bf16 --use-distributed-optimizer --recompute-activations
"""
# A configuration of Accelerate, as its wizard writes it, and what its script is given.
FINE_TUNE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_activation_checkpointing: true
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""


def said(folder: Path, *arguments: str) -> str:
    """Output of a command, all of it; it must succeed."""
    done = run(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return str(done.stdout + done.stderr)


def step(printed: str, label: str) -> list[str]:
    """Arguments of the command behind a label of the next steps."""
    (line,) = [line for line in printed.splitlines() if line.startswith(f"{label}:")]
    words = shlex.split(line.partition(":")[2])
    assert words[0] == "autoplan"
    return words[1:]


def answer_of(printed: str) -> list[str]:
    """Lines of an answer without the messages behind it; none is wider than a terminal of 80 columns."""
    lines = [line for line in printed.splitlines() if not line.startswith(("autoplan: warning: ", "wrote "))]
    assert max(map(len, lines)) <= 80
    return lines


def test_a_box_of_consumer_cards_from_its_datasheet(tmp_path: Path) -> None:
    assert len(DATASHEET.splitlines()) <= 6
    (tmp_path / "box.toml").write_text(DATASHEET)
    printed = said(tmp_path, "search", "llama3-8b", "--cluster", "box.toml", "--global-batch", "64", "--seq-len", "4k")
    assert "optimizer on the CPU" in " ".join(printed.split())
    assert "of 512.0 GiB on the host" in printed
    assert "no run on card was measured" in printed
    assert len(answer_of(printed)) <= 20
    said(tmp_path, *step(printed, "next"))
    assert (tmp_path / "launch" / "launch.sh").exists()


def test_a_new_device_begins_with_a_file_that_loads(tmp_path: Path) -> None:
    assert "rtx-4090" in said(tmp_path, "list", "devices")
    for kind in ("device", "cluster", "model"):
        written = said(tmp_path, "new", kind)
        use = shlex.split(written.partition("autoplan search")[2])
        answer = said(tmp_path, "search", *use, "--out", f"{kind}.json")
        assert "plan " in answer
    assert run(tmp_path, "new", "cluster").returncode == 1


def test_a_slurm_script_leads_to_a_better_plan_and_its_launch_files(tmp_path: Path) -> None:
    (tmp_path / "train.sbatch").write_text(SLURM)
    printed = said(tmp_path, "search", "--from", "train.sbatch", "--cluster", "h100-sxm:2x8")
    words = " ".join(printed.split())
    assert "today tp 8 pp 2" in words
    assert "% slower than the best plan, a clear gap" in words
    assert "--tensor-model-parallel-size" in printed
    said(tmp_path, *step(printed, "next"))
    assert "binds" in said(tmp_path, *step(printed, "why"))


def test_a_fine_tune_on_one_node(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FINE_TUNE)
    asked = ["llama3.1-8b-instruct", "--from", "fsdp.yaml", "--cluster", "a100-sxm:1x8", "--global-batch", "64"]
    for _ in range(6):  # what the file does not say is asked for by the flag that says it
        done = run(tmp_path, "search", *asked)
        if done.returncode == 0:
            break
        wish = re.search(r"(--set \w+=|--seq-len)", done.stderr)
        assert wish, done.stderr
        asked += [wish[1], "4k"] if wish[1] == "--seq-len" else f"{wish[1]}1".split()
    assert "today" in done.stdout
    # Accelerate has no pipelines, so none was looked for.
    assert "nearest" not in said(tmp_path, *step(done.stdout, "next"))
    assert list((tmp_path / "launch").iterdir())


def test_experts_on_256_devices(tmp_path: Path) -> None:
    asked = ("deepseek_v3", "--cluster", "h100-sxm:32x8", "--global-batch", "2k", "--seq-len", "4k")
    printed = said(tmp_path, "search", *asked)
    assert len(answer_of(printed)) <= 21  # with how evenly experts are taken to be used
    said(tmp_path, *step(printed, "next"))
    block = said(tmp_path, *step(printed, "why"), "--markdown")
    assert block.startswith("### deepseek-v3 on 32 x 8 h100-sxm")
    assert "| time |" in block
    again = said(tmp_path, "search", *asked)
    assert "plan.json is unchanged" in again


def test_clusters_under_a_budget(tmp_path: Path) -> None:
    prices = ("--price", "h100-sxm:2x8=2.5", "--price", "a100-sxm:4x8=1.2", "--tokens", "100B")
    clusters = ("--cluster", "h100-sxm:2x8", "--cluster", "a100-sxm:4x8")
    printed = said(tmp_path, "compare", "llama3-8b", *clusters, "--global-batch", "128", "--seq-len", "8k", *prices)
    heads = " ".join(" ".join(printed.splitlines()[:2]).split())
    assert "cost/M" in heads
    assert "run" in heads
    cheapest = next(line for line in printed.splitlines() if line.startswith("cheapest"))
    assert "h100-sxm:2x8" in cheapest or "a100-sxm:4x8" in cheapest
    per_million, of_the_run = re.findall(r"([\d.,]+) (?:per M tokens|for the run)", cheapest)
    assert float(of_the_run.replace(",", "")) == pytest.approx(1e5 * float(per_million), rel=1e-3)
    assert max(map(len, printed.splitlines())) <= 80


def test_runs_of_ones_own_bring_the_answer_to_their_level(tmp_path: Path) -> None:
    asked = ("llama3-8b", "--cluster", "h100-sxm:2x8", "--global-batch", "128", "--seq-len", "8k")
    said(tmp_path, "search", *asked)
    before = json.loads((tmp_path / "plan.json").read_text())["best"]["step_s"]
    heads = "id,gpu,gpus_per_node,num_gpus,framework,model,seq_len,global_batch,micro_batch,tp,pp,dp,sharding,status"
    rows = [
        f"{at},h100-sxm,8,16,megatron-core,llama3-8b,8192,128,1,{tp},{pp},{16 // tp // pp},zero1,ok,{seconds}"
        for at, (tp, pp, seconds) in enumerate([(2, 1, 8.3), (4, 1, 8.9), (2, 2, 8.5)])
    ]
    (tmp_path / "runs.csv").write_text("\n".join([f"{heads},step_time_s", *rows]) + "\n")
    said(tmp_path, "calibrate", "--runs", "runs.csv", "--out", "ours.toml")
    said(tmp_path, "search", *asked, "--calibration", "ours.toml", "--out", "ours.json")
    assert json.loads((tmp_path / "ours.json").read_text())["best"]["step_s"] > 1.05 * before


def test_a_comparison_says_which_devices_nobody_measured(tmp_path: Path) -> None:
    clusters = ("--cluster", "h100-sxm:1x4", "--cluster", "rubin:1x4")
    printed = said(tmp_path, "compare", "llama3-8b", *clusters, "--global-batch", "32", "--seq-len", "4k")
    warnings = [line for line in printed.splitlines() if line.startswith("autoplan: warning: ")]
    assert len(warnings) == 1
    assert "rubin has the figures that its maker announced, and no run on it was measured" in warnings[0]
