"""Cases of `same_answers.py`: a table of runs, exports, and searches.

Nothing of autoplan is imported, and names of presets are written out, so that every checkout gets the same cases.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

GROUPS = ("predict", "exports", "searches")
NUM_SEARCHES = 200
SEED = 20

EVERY_FILE = "{every-file}"  # in a command: it is run for every file of the folder launch/
RUNS = "runs.csv"  # the table of measured runs, in the folder of a case that needs it


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Commands that run one after another in an empty folder, with the files that they find there."""

    group: str
    name: str
    commands: list[list[str]]
    files: dict[str, str] = field(default_factory=dict)
    needs_runs: bool = False


PREDICT = Case(
    group="predict",
    name="runs",
    commands=[
        ["predict", "--runs", RUNS, "--out", "predictions.csv", "--json"],
        ["score", "--runs", RUNS, "--predictions", "predictions.csv"],
    ],
    needs_runs=True,
)

# -- plans that are exported ------------------------------------------------------------------------------------------

LAB = """\
name = "lab"
device = "h100-sxm"
num_nodes = 4
devices_per_node = 8
[[levels]]
name = "nvlink"
kind = "nvlink"
num_devices = 8
bandwidth_gb_per_s = 450
latency_us = 1.1
[network]
kind = "infiniband"
nic_gb_per_s = 50
[[network.tiers]]
name = "leaf"
num_nodes = 2
oversubscription = 4
[[network.tiers]]
name = "spine"
num_nodes = 64
[[nodes]]
names = ["n03", "n17"]
switches = ["leaf1", "spine1"]
[[nodes]]
names = ["n04"]
switches = ["leaf2", "spine1"]
[[nodes]]
names = ["n21"]
switches = ["leaf3", "spine1"]
"""
TRAIN_SH = (Path(__file__).parent.parent / "examples" / "train.sh").read_text()

# Model, cluster, framework, global batch, sequence length | flags of `estimate` | flags of `export`.
ESTIMATED = """
llama3-8b h100-sxm:2x8 megatron-core 128 8192 | --tp 2 --pp 2 --recompute full | --to megatron-lm
llama3-8b h100-sxm:2x8 megatron-core 128 8192 | --tp 2 --cp 2 --cp-kind all_to_all | --to megatron-lm --launcher slurm
llama3-8b h100-sxm:2x8 megatron-core 128 8192 | --sharding zero3 --dp-replicate 2 | --to megatron-lm
llama3-8b h100-sxm:2x8 megatron-core 128 8192 | --sharding zero2 --recompute full | --to megatron-lm --launcher mpirun
llama3-8b lab.toml megatron-core 128 8192 | --tp 8 --pp 2 --placement n17,n03,n21,n04 | --to megatron-lm --launcher slurm
llama3-8b lab.toml megatron-core 128 4096 | --tp 8 --pp 2 --rank-order tp-cp-ep-pp-dp | --to megatron-lm
llama3-70b h100-sxm:16x8 megatron-core 512 8192 | --tp 4 --pp 4 --vp 5 --cp 2 | --to megatron-lm --launcher slurm
llama3-70b h100-sxm:16x8 megatron-core 512 8192 | --tp 8 --pp 4 --layers 19,21,21,19 | --to megatron-lm
llama3-70b h100-sxm:16x8 megatron-core 512 8192 | --tp 8 --pp 4 --recompute full:3 | --to megatron-bridge
llama3-70b h200-sxm:16x8 nemo 512 8192 | --tp 8 --pp 4 --precision fp8 --tp-overlap | --to megatron-bridge --launcher slurm
llama3-70b b200:8x8 nemo-26.06 512 8192 | --tp 4 --pp 4 --precision mxfp8 | --to megatron-bridge@0.3
llama3-70b b200:8x8 nemo-26.06 512 8192 | --tp 4 --pp 4 --precision nvfp4 | --to megatron-bridge
gpt3-175b a100-sxm:64x8 megatron-lm-2021 1024 2048 | --tp 8 --pp 8 --vp 6 --recompute full --no-sp | --to megatron-lm
gpt3-175b a100-sxm:64x8 megatron-core 1024 2048 | --tp 8 --pp 8 --recompute selective | --to megatron-lm
llama3.1-405b h100-sxm:64x8 megatron-core 512 8192 | --tp 8 --pp 16 --recompute full | --to megatron-lm --launcher pytorchjob --image lab/train:1
deepseek-v3 h100-sxm:64x8 megatron-core-te 2048 4096 | --pp 16 --ep 32 --precision fp8 --recompute full | --to megatron-lm
deepseek-v3 h200-sxm:32x8 megatron-core-te 1024 4096 | --tp 2 --pp 8 --ep 16 --recompute mla_up_proj+moe_act+layernorm+mlp+shared_experts | --to megatron-lm
deepseek-v3 b200:32x8 nemo-25.09 1024 4096 | --pp 8 --ep 32 --recompute mla_up_proj+moe --precision mxfp8 | --to megatron-bridge
deepseek-v2-lite h100-sxm:2x8 megatron-core 256 4096 | --ep 8 --sharding zero1 | --to megatron-lm
mixtral-8x7b h100-sxm:8x8 megatron-core 256 4096 | --tp 2 --ep 4 --etp 2 --pp 4 | --to megatron-lm --launcher jobset --image lab/train:1
mixtral-8x7b h100-sxm:8x8 megatron-core 256 4096 | --tp 2 --ep 8 --etp 1 --offload optimizer | --to megatron-lm
qwen3-30b-a3b h100-sxm:4x8 megatron-core 256 4096 | --ep 8 --recompute moe_act+layernorm --pp 2 --vp 2 --ep-overlap | --to megatron-lm
gpt-oss-20b h100-sxm:2x8 megatron-core 128 4096 | --ep 4 --cp 2 --cp-kind all_to_all | --to megatron-bridge --launcher skypilot --image lab/train:1
gpt-oss-20b h100-sxm:2x8 megatron-core 128 4096 | --ep 4 --recompute full | --to megatron-lm
llama3-8b mi300x:2x8 primus 128 8192 | --pp 2 --vp 2 | --to primus
llama3-70b mi300x:8x8 primus 512 8192 | --tp 8 --pp 2 --recompute full | --to primus --launcher slurm
deepseek-v2-lite mi300x:2x8 primus 256 4096 | --ep 8 --precision fp8 | --to primus
llama3-8b h100-sxm:2x8 torchtitan 128 8192 | --sharding zero3 --recompute full | --to torchtitan
llama3-8b h100-sxm:2x8 torchtitan 128 8192 | --tp 2 --sharding zero2 --dp-replicate 2 --recompute full | --to torchtitan@0.2
llama3-70b h100-sxm:16x8 torchtitan 512 8192 | --tp 8 --pp 4 --sharding zero3 --recompute full --vp 2 | --to torchtitan@main --launcher slurm
llama3-8b b200:2x8 torchtitan 128 8192 | --sharding zero3 --precision mxfp8 --cp 2 --recompute selective | --to torchtitan
llama3-8b h100-sxm:2x8 torchtitan 128 8192 | --sharding zero3 --precision fp8 --tp 2 --recompute full | --to torchtitan
deepseek-v2-lite h100-sxm:4x8 torchtitan 256 4096 | --pp 2 --ep 8 --sharding zero3 --recompute full | --to torchtitan
llama3-8b h100-sxm:2x8 nanotron 128 4096 | --tp 4 --pp 2 --recompute full | --to nanotron
llama3-8b h100-sxm:2x8 nanotron 128 4096 | --tp 8 --schedule gpipe --pp 2 --recompute full | --to nanotron --launcher slurm
qwen2.5-1.5b a100-sxm:1x8 nanotron 64 4096 | --tp 2 --sharding none | --to nanotron
llama3-8b h100-sxm:2x8 deepspeed-zero 128 4096 | --sharding zero2 --recompute full | --to deepspeed
llama3-8b h100-sxm:2x8 deepspeed-zero 128 4096 | --sharding zero3 --offload optimizer --recompute full | --to deepspeed --launcher mpirun
llama3-8b h100-sxm:2x8 deepspeed-zero 128 4096 | --sharding zero3 --dp-replicate 2 --recompute full | --to deepspeed@0.19.6
llama3-8b h100-sxm:2x8 deepspeed-zero 128 8192 | --sharding zero1 --cp 4 --cp-kind all_to_all --recompute full | --to deepspeed --launcher trainjob --image lab/train:1
llama3-8b h100-sxm:2x8 pytorch-fsdp 128 4096 | --sharding zero3 --recompute full | --to fsdp2
llama3-8b h100-sxm:2x8 pytorch-fsdp 128 4096 | --sharding zero2 --dp-replicate 2 --recompute full | --to accelerate --launcher slurm
llama3-8b h100-sxm:2x8 pytorch-fsdp 128 4096 | --sharding zero3 --precision fp8 --recompute full | --to accelerate
llama3-8b h100-sxm:2x8 pytorch-fsdp 128 8192 | --sharding zero3 --tp 2 --no-sp --recompute full | --to fsdp2 --launcher mpirun
llama3-8b h200-sxm:1x8 torch 64 2048 | --tp 2 --pp 2 --sharding zero1 --recompute full | --to autoplan
qwen2.5-0.5b h100-sxm:1x8 torch 64 2048 | --sharding zero3 --precision fp32 | --to autoplan --launcher slurm
"""  # noqa: E501

# The same, of plans that are searched.
SEARCHED = """
llama3-8b h100-sxm:2x8 megatron-core 128 8192 | | --to megatron-lm
llama3-70b h100-sxm:16x8 megatron-core 512 8192 | --forbid tp-overlap --forbid sharding=zero3 | --to megatron-lm
llama3-8b mi300x:2x8 primus 128 8192 | --fix schedule=zb-v | --to primus
llama3-70b mi300x:8x8 primus 512 8192 | --fix schedule=zb-h1 | --to primus
llama3-8b h100-sxm:2x8 torchtitan 128 8192 | --fix schedule=zb-v | --to torchtitan
llama3-8b h100-sxm:4x8 torchtitan 256 8192 | --fix schedule=dualpipe-v | --to torchtitan
qwen3-14b h100-sxm:4x8 torchtitan 256 4096 | | --to torchtitan --launcher jobset --image lab/train:1
llama2-7b a100-sxm:2x8 nanotron 128 4096 | | --to nanotron
llama2-13b a100-sxm:4x8 deepspeed-zero 128 4096 | | --to deepspeed
mistral-7b h100-sxm:1x8 pytorch-fsdp 128 4096 | | --to accelerate
qwen3-8b h100-sxm:2x8 pytorch-fsdp 128 4096 | --forbid uneven-stages | --to fsdp2 --launcher skypilot --image lab/train:1
qwen3-1.7b h200-sxm:1x8 torch 64 4096 | | --to autoplan
deepseek-v3 h200-sxm:32x8 nemo-25.09 1024 4096 | --forbid partial-recompute --precision fp8 | --to megatron-bridge
qwen3-30b-a3b h100-sxm:4x8 nemo 256 4096 | | --to megatron-bridge
"""  # noqa: E501


def _num_devices(cluster: str) -> int:
    nodes, _, per_node = cluster.rpartition(":")[2].partition("x")
    return 32 if cluster == "lab.toml" else int(nodes) * int(per_node)


def _read_back_flags(target: str, model: str, cluster: str, seq_len: str) -> list[str]:
    """Flags for what the files of `target` do not say."""
    devices = ["--devices", str(_num_devices(cluster))]
    batch = ["--set", "PER_DEVICE_TRAIN_BATCH_SIZE=1", "--set", "GRADIENT_ACCUMULATION_STEPS=8"]
    if target in ("deepspeed", "fsdp2", "accelerate"):
        return ["--model", model, "--seq-len", seq_len, *devices, *(batch if target == "accelerate" else [])]
    return devices if target in ("megatron-bridge", "primus") else []


def _export_cases(table: str, command: str, first: int) -> Iterator[Case]:
    for number, line in enumerate(table.strip().splitlines(), first):
        problem, flags, export = (part.split() for part in line.split("|"))
        model, cluster, framework, batch, seq_len = problem
        given = ["--cluster", cluster, "--framework", framework, "--global-batch", batch, "--seq-len", seq_len]
        target = export[export.index("--to") + 1]
        yield Case(
            group="exports",
            name=f"{number:02}-{command}-{model}-{target}",
            files={"lab.toml": LAB} if cluster == "lab.toml" else {},
            commands=[
                [command, model, *given, *flags, "--out", "plan.json", "--quiet"],
                ["export", "plan.json", *export, "--out", "launch"],
                ["read", EVERY_FILE, *_read_back_flags(target, model, cluster, seq_len), "--json"],
            ],
        )


# -- searches ---------------------------------------------------------------------------------------------------------

SMALL = (
    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "gemma-2b", "gemma3-1b",
    "gemma3-4b",
)  # fmt: skip
MEDIUM = (
    "llama3-8b", "llama3.1-8b", "llama2-7b", "llama2-13b", "mistral-7b", "gemma-7b", "gemma2-9b", "gemma3-12b",
    "qwen2.5-7b", "qwen2.5-14b", "qwen3-8b", "qwen3-14b", "phi-4", "olmo2-7b", "mpt-7b", "nemotron3-8b",
    "nemotron4-15b", "internlm-7b", "deepseek-v2-lite", "gpt-oss-20b",
)  # fmt: skip
LARGE = (
    "llama3-70b", "llama2-70b", "qwen2.5-32b", "qwen2.5-72b", "qwen3-32b", "gemma2-27b", "gemma3-27b", "nemotron-h-56b",
    "nemotron3-nano", "qwen3-30b-a3b", "mixtral-8x7b", "llama4-scout", "gpt-oss-120b", "mixtral-8x22b",
)  # fmt: skip
HUGE = (
    "gpt3-175b", "bloom-176b", "nemotron4-340b", "llama3.1-405b", "deepseek-v2", "deepseek-v3", "kimi-k2",
    "qwen3-235b-a22b", "llama4-maverick",
)  # fmt: skip
SIZES = {SMALL: (1, 2), MEDIUM: (1, 2, 4, 8), LARGE: (8, 16, 32, 64), HUGE: (64, 128, 256)}
LEARNED_POSITIONS = ("gpt3-175b", "bloom-176b", "mpt-7b")  # of 2,048 tokens

AMPERE = ("a100-sxm", "a100-sxm", "a800-sxm", "aws-p4d", "a100-sxm-40")
HOPPER = (
    "h100-sxm",
    "h100-sxm",
    "h100-sxm",
    "h200-sxm",
    "h800",
    "h20",
    "aws-p5",
    "aws-p5en",
    "grand-teton-h100",
    "gh200",
)
BLACKWELL = ("b200", "b300", "gb200-nvl72", "gb300-nvl72")
AMD = ("mi300x", "mi325x", "mi355x", "frontier")
FEW = ("h100-pcie", "a100-pcie", "l40s", "v100")  # for small models
DEVICES_PER_NODE = {"gh200": 4, "gb200-nvl72": 4, "gb300-nvl72": 4, "v100": 16}

MEGATRON = (
    "megatron-core", "megatron-core", "megatron-core", "megatron-core-te", "megatron-core-0.8", "nemo", "nemo-24.07",
    "nemo-25.04", "nemo-25.09", "nemo-26.06",
)  # fmt: skip
OLD_MEGATRON = ("megatron-lm-2021", "megatron-lm-2022")
TORCHTITAN = ("torchtitan", "torchtitan", "torchtitan-0.1")
NANOTRON = ("nanotron",)
PRIMUS, TORCH = ("primus",), ("torch",)
SHARDED = ("deepspeed-zero", "pytorch-fsdp", "llm-foundry")  # with neither pipelines nor, most of them, wide experts
FAMILIES = (
    MEGATRON, MEGATRON, MEGATRON, MEGATRON, OLD_MEGATRON, TORCHTITAN, TORCHTITAN, NANOTRON, SHARDED, SHARDED, PRIMUS,
    TORCH,
)  # fmt: skip

FORBIDDEN = {
    MEGATRON: ("sharding=zero2", "sharding=zero3", "offload", "partial-recompute", "uneven-stages", "partial-sharding"),
    OLD_MEGATRON: ("uneven-stages", "partial-recompute"),
    TORCHTITAN: ("uneven-stages", "partial-sharding", "schedule=zb-v", "schedule=zb-h1"),
    NANOTRON: ("sharding=none",),
    SHARDED: ("partial-sharding",),
    PRIMUS: ("schedule=zb-v", "schedule=zb-h1", "uneven-stages", "partial-recompute"),
    TORCH: ("sharding=zero2", "sharding=zero3", "uneven-stages"),
}
FIXED = ("micro_batch=1", "micro_batch=2", "recompute=full", "recompute=none")
FIXED_DEGREES = ("tp=2", "tp=4", "pp=2", "cp=1", "pp=1")
BESIDE = (
    ["--max", "tp=4"],
    ["--max", "micro_batch=4"],
    ["--max-tp", "2"],
    ["--robust", "0.9"],
    ["--why"],
    ["--reserve-memory", "4GiB"],
    ["--tokens", "2T"],
    ["--tokens", "1T", "--price", "2.5"],
    ["--device-mtbf", "2112d", "--checkpoint-time", "60s", "--restart-time", "10m"],
    ["--objective", "memory-headroom", "--objective", "step-time"],
    ["--objective", "energy-per-token"],
    ["--objective", "cost-per-token", "--price", "3"],
    ["--attention", "flash2"],
    ["--sampler", "random", "--trials", "20", "--seed", "3"],
    ["--sampler", "tpe", "--trials", "20"],
)


def _precisions(family: tuple[str, ...], clusters: tuple[str, ...], cluster: str) -> tuple[str, ...]:
    """The precisions that framework and device have, usual ones several times."""
    if cluster == "v100":
        return ("fp16",)
    if family == TORCH:
        return ("bf16", "bf16", "fp32")
    if family in (NANOTRON, SHARDED, OLD_MEGATRON) or clusters == AMPERE or cluster in (*FEW, "frontier"):
        return ("bf16",) if family == TORCHTITAN else ("bf16", "bf16", "bf16", "fp16")
    if clusters == BLACKWELL:
        return ("bf16", "fp8", "mxfp8", "mxfp8") if family == TORCHTITAN else ("bf16", "mxfp8", "nvfp4", "fp8")
    return ("bf16", "bf16", "bf16", "fp8")


def _random_search(rng: random.Random) -> list[str]:
    """Return a search for a model on a cluster that can hold it, with options at random."""
    models = rng.choices((SMALL, MEDIUM, LARGE, HUGE), (20, 45, 25, 10))[0]
    model = rng.choice(models)
    family = MEGATRON if models is HUGE else rng.choice(FAMILIES)
    if models is LARGE and family in (NANOTRON, TORCH):
        family = MEGATRON
    clusters = rng.choices((HOPPER, AMPERE, BLACKWELL, AMD, FEW), (10, 4, 4, 3, 3 if models is SMALL else 0))[0]
    if family == PRIMUS:
        clusters = AMD
    cluster = rng.choice(clusters)
    per_node = DEVICES_PER_NODE.get(cluster, 8)
    num_devices = rng.choice(SIZES[models]) * 8
    num_nodes = max(num_devices // per_node, 1)
    batch = num_nodes * per_node * rng.choice((2, 4, 4, 8))
    seq_len = 2048 if model in LEARNED_POSITIONS else rng.choice((2048, 4096, 4096, 8192, 8192, 16384, 32768))
    command = ["search", model, "--cluster", f"{cluster}:{num_nodes}x{per_node}", "--framework", rng.choice(family)]
    command += ["--global-batch", str(batch), "--seq-len", str(seq_len)]
    command += ["--precision", rng.choice(_precisions(family, clusters, cluster))]
    if rng.random() < 0.3:
        for choice in rng.sample(FORBIDDEN[family], k=min(len(FORBIDDEN[family]), rng.choice((1, 1, 2)))):
            command += ["--forbid", choice]
    if rng.random() < 0.15:
        command += ["--fix", rng.choice(FIXED if family == SHARDED else (*FIXED, *FIXED_DEGREES))]
    if rng.random() < 0.35:
        command += rng.choice(BESIDE)
    return command


def _random_searches(count: int) -> Iterator[tuple[str, list[list[str]]]]:
    rng = random.Random(SEED)
    for number in range(count):
        command = _random_search(rng)
        form = ["--quiet"] if number % 8 == 0 else ["--json", "--quiet"]
        yield f"{command[1]}-{command[5]}", [[*command, *form]]


# Each case is its commands, one a line, behind a name.  All find lab.toml, sites.toml, train.sh and ds_config.json.
WRITTEN = """
mixed-hopper-ampere
  search llama3-8b --cluster h100-sxm:1x8+a100-sxm:1x8 --global-batch 128 --seq-len 8192
  explain plan.json --json -q
  estimate plan.json --memory --json -q
mixed-hopper-blackwell
  search llama3-70b --cluster h100-sxm:4x8+b200:4x8 --global-batch 256 --seq-len 4096 --json -q
mixed-sites
  search llama3-8b --cluster sites.toml --global-batch 128 --seq-len 4096 --json -q
  report plan.json --out report.html -q
mixed-three
  search llama2-7b --cluster a100-sxm:1x8+h100-sxm:1x8+h200-sxm:1x8 --global-batch 192 --seq-len 4096 --json -q
mixed-nemo
  search qwen2.5-14b --cluster h100-sxm:2x8+a100-sxm:4x8 --framework nemo --global-batch 256 --seq-len 4096 --json -q
mixed-like
  search llama3-8b --cluster h200-sxm:1x8+h100-sxm:2x8 --global-batch 128 --seq-len 8192 --json -q
mixed-old
  search llama-7b --cluster v100:1x16+a100-sxm-40:1x8 --global-batch 128 --seq-len 2048 --precision fp16 --json -q
mixed-amd
  search llama3-8b --cluster mi300x:1x8+mi325x:1x8 --global-batch 128 --seq-len 4096 --json -q
from-script
  read train.sh --json
  read train.sh
  search --from train.sh --cluster h100-sxm:2x8 --json -q
from-script-tables
  search --from train.sh --cluster h100-sxm:2x8 -q
from-script-larger
  search --from train.sh --cluster h200-sxm:4x8 --global-batch 256 --set SLURM_NNODES=4 --json -q
from-script-bounded
  search --from train.sh --cluster h100-sxm:2x8 --max tp=4 --json -q
from-script-narrowed
  search --from train.sh --cluster h100-sxm:2x8 --forbid uneven-stages --forbid partial-recompute --why --json -q
from-script-priced
  estimate --from train.sh --cluster h100-sxm:2x8 --json -q
from-deepspeed
  search llama3-8b --seq-len 8192 --from ds_config.json --cluster h100-sxm:2x8 --json -q
from-exported-torchtitan
  estimate llama3-8b --cluster h100-sxm:2x8 --framework torchtitan --global-batch 128 --seq-len 4096 --tp 4 --sharding zero3 --recompute full --out old.json -q
  export old.json --to torchtitan --out launch
  search --from launch/plan_cfg.py --cluster h100-sxm:2x8 --json -q
from-exported-primus
  estimate llama3-8b --cluster mi300x:2x8 --framework primus --global-batch 128 --seq-len 4096 --tp 4 --out old.json -q
  export old.json --to primus --out launch
  search --from launch/primus.yaml --cluster mi300x:2x8 --json -q
from-exported-megatron
  estimate mixtral-8x7b --cluster h100-sxm:8x8 --global-batch 256 --seq-len 4096 --tp 2 --ep 8 --pp 2 --out old.json -q
  export old.json --to megatron-lm --out launch
  search --from launch/launch.sh --cluster h100-sxm:8x8 --json -q
from-exported-bridge
  estimate llama3-8b --cluster h100-sxm:2x8 --framework nemo --global-batch 128 --seq-len 4096 --tp 2 --cp 2 --out old.json -q
  export old.json --to megatron-bridge --out launch
  search --from launch/recipe.py --cluster h100-sxm:2x8 --json -q
from-plan-file
  search llama3-8b --cluster h100-sxm:1x8 --global-batch 128 --seq-len 4096 --out old.json -q
  search --from old.json --cluster h100-sxm:1x8 --global-batch 128 --json -q
explain-dense
  search llama3-8b --cluster h100-sxm:2x8 --global-batch 128 --seq-len 8192 --why --json -q
  explain plan.json --json -q
  explain plan.json -q
  explain plan.json --versus tp=2,cp=1,pp=1 --json -q
explain-experts
  search qwen3-30b-a3b --cluster h100-sxm:4x8 --global-batch 256 --seq-len 4096 --json -q
  explain plan.json --json -q
explain-latent
  search deepseek-v2-lite --cluster h100-sxm:2x8 --framework nemo --global-batch 256 --seq-len 4096 --json -q
  explain plan.json --json --trace trace.json -q
explain-torchtitan
  search llama3-70b --cluster h100-sxm:8x8 --framework torchtitan --global-batch 256 --seq-len 8192 --json -q
  explain plan.json --json -q
explain-two
  search llama3-8b --cluster h100-sxm:2x8 --global-batch 128 --seq-len 8192 --fix tp=4 --out four.json -q
  search llama3-8b --cluster h100-sxm:2x8 --global-batch 128 --seq-len 8192 --fix tp=2 --out two.json -q
  explain two.json --versus four.json --json -q
  explain two.json --versus four.json -q
compare-prices
  compare llama3-8b --cluster h100-sxm --cluster mi300x --nodes 1,2 --global-batch 128 --seq-len 8192 --price 2.5 --price mi300x=2 --json -q
compare-tables
  compare llama3-8b --cluster h100-sxm --cluster b200 --nodes 1:4 --global-batch 128 --seq-len 8192 --tokens 1T --svg rates.svg -q
compare-framework
  compare qwen2.5-7b --cluster a100-sxm:2x8 --cluster h100-sxm:2x8 --framework torchtitan --global-batch 128 --seq-len 4096 --json -q
compare-experts
  compare deepseek-v2-lite --cluster h100-sxm:2x8 --cluster h200-sxm:2x8 --global-batch 256 --seq-len 4096 --device-mtbf 2112d --json -q
report-dense
  search llama3-8b --cluster h100-sxm:2x8 --global-batch 128 --seq-len 8192 --json -q
  report plan.json --out report.html -q
report-experts
  search deepseek-v2-lite --cluster h100-sxm:2x8 --global-batch 256 --seq-len 4096 --json -q --report report.html
report-front
  search llama3-8b --cluster h100-sxm:1x8 --global-batch 64 --seq-len 8192 --objective step-time --objective memory-headroom --json -q
  report plan.json --out report.html -q
estimate-tables
  estimate llama3-70b --cluster h100-sxm:16x8 --global-batch 512 --seq-len 8192 --tp 4 --pp 4 --vp 5 --memory
estimate-trace
  estimate llama3-8b --cluster h100-sxm:2x8 --global-batch 128 --seq-len 8192 --pp 2 --vp 2 --trace trace.json --json -q
estimate-experts
  estimate deepseek-v3 --cluster h100-sxm:32x8 --framework megatron-core-te --global-batch 1024 --seq-len 4096 --pp 8 --ep 32 --precision fp8 --recompute full --memory --json -q
estimate-dualpipe
  estimate llama3-8b --cluster h100-sxm:2x8 --framework torchtitan --global-batch 128 --seq-len 8192 --pp 2 --vp 2 --schedule dualpipe-v --sharding zero3 --json -q
estimate-gemma
  estimate gemma3-27b --cluster h100-sxm:8x8 --global-batch 256 --seq-len 8192 --tp 4 --pp 2 --json -q
estimate-unpriced
  estimate llama3-8b --cluster h100-sxm:2x8 --framework hai-llm --global-batch 128 --seq-len 8192 --tp 2 --json -q
nodes-deadline
  search llama3-8b --cluster h100-sxm:4x8 --global-batch 256 --seq-len 8192 --tokens 200B --deadline 30d --json -q
nodes-tried
  search llama3-8b --cluster h100-sxm:4x8 --nodes 1,2,4 --objective cost-per-token --price 2.5 --global-batch 256 --seq-len 4096 --json -q
nodes-bounded
  search llama3-8b --cluster h100-sxm:8x8 --max-nodes 8 --objective devices --objective step-time --global-batch 256 --seq-len 4096 --json -q
nodes-hours
  search llama3-8b --cluster h100-sxm:8x8 --max-nodes 8 --objective tokens --gpu-hours 50000 --deadline 60d --global-batch 256 --seq-len 4096 --json -q
batches
  search llama3-8b --cluster h100-sxm:2x8 --global-batch 64:256 --seq-len 8192 --json -q
batches-objectives
  search qwen2.5-7b --cluster h200-sxm:2x8 --global-batch 64:128 --seq-len 4096 --objective tokens-per-device --json -q
placed
  search llama3-8b --cluster lab.toml --global-batch 128 --seq-len 8192 --json -q
  topo lab.toml
  export plan.json --to megatron-lm --launcher slurm --out launch
placed-experts
  search qwen3-30b-a3b --cluster lab.toml --global-batch 256 --seq-len 4096 --json -q
stored
  search llama3-8b --cluster h100-sxm:2x8 --global-batch 128 --seq-len 8192 --storage study.db --study kept --json -q
  search llama3-8b --cluster h100-sxm:2x8 --global-batch 128 --seq-len 8192 --storage study.db --study kept --json -q --force
nearest
  estimate llama3-8b --cluster h100-sxm:2x8 --framework nemo --global-batch 128 --seq-len 8192 --tp 2 --no-sp --rank-order tp-cp-ep-pp-dp --pp 2 --out plan.json -q
  export plan.json --to megatron-bridge --nearest --out launch
  estimate llama3-8b --cluster h100-sxm:2x8 --framework deepspeed-zero --global-batch 128 --seq-len 8192 --pp 2 --sharding zero1 --recompute full --out stages.json -q
  export stages.json --to deepspeed --nearest --out launch-stages
"""  # noqa: E501

WRITTEN_FILES = {
    "lab.toml": LAB,
    "sites.toml": '[[parts]]\ncluster = "h100-sxm:1x8"\n[[parts]]\ncluster = "mi300x:1x8"\n'
    "[between]\nbandwidth_gb_per_s = 1.25\nlatency_ms = 10\ncross_vendor_collectives = false\n",
    "train.sh": TRAIN_SH,
    "ds_config.json": '{"train_batch_size": 128, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, '
    '"zero_optimization": {"stage": 3}}\n',
}


def _written() -> Iterator[tuple[str, list[list[str]]]]:
    name, commands = "", list[list[str]]()
    for line in WRITTEN.strip().splitlines():
        if line.startswith(" "):
            commands.append(line.split())
        else:
            if commands:
                yield name, commands
            name, commands = line, []
    yield name, commands


def _search_cases() -> Iterator[Case]:
    written = list(_written())
    every = [*written, *_random_searches(NUM_SEARCHES - len(written))]
    for number, (name, commands) in enumerate(every):
        words = {word for command in commands for word in command}
        files = {file: text for file, text in WRITTEN_FILES.items() if file in words}
        yield Case(group="searches", name=f"{number:03}-{name}", commands=commands, files=files)


def make_cases() -> list[Case]:
    """Cases, the longest first."""
    num_estimated = len(ESTIMATED.strip().splitlines())
    return [
        PREDICT,
        *_export_cases(ESTIMATED, "estimate", 0),
        *_export_cases(SEARCHED, "search", num_estimated),
        *_search_cases(),
    ]
