"""What do the frameworks' own launch files start, as a person reads them?  From checkouts, by path; skipped without."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autoplan.frameworks.common.launch import LaunchContext, Reader
from autoplan.frameworks.megatron_bridge import read as megatron_bridge
from autoplan.frameworks.megatron_lm import read as megatron_lm
from autoplan.frameworks.primus import read as primus
from autoplan.readers.model import load_model
from autoplan.spec.blocks import Experts
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from model_specs import gpt


@dataclass(frozen=True)
class Example:
    reader: Reader
    checkout: str  # by its variable
    path: str
    model: ModelSpec
    plan: ParallelPlan
    seq_len: int
    precision: str = "bf16"
    given: dict[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # options that cost something and are not in the plan


LLAMA_8B = replace(load_model("llama3-8b"), name="megatron", rope_base=1e6, aliases=(), sources=())
OVERLAP = {"grad_reduce_overlap": True, "param_gather_overlap": True}
PLAIN = {"grad_reduce_overlap": False, "param_gather_overlap": False}
# Transformer Engine's default recipe, with parameters that are gathered in 8 bits.
DELAYED = {"precision": "fp8", "fp8_scaling": "delayed", "narrow_params": True}
UNSHARDED = {**PLAIN, "sharding": "none"}

EXAMPLES: dict[str, Example] = {
    "gpt3 175b": Example(
        megatron_lm.READER,
        "MEGATRON_LM_DIR",
        "examples/gpt3/train_gpt3_175b_distributed.sh",
        gpt(96, 12288, 96, vocab_size=50257, name="megatron"),
        # The script starts one node; its degrees need 16.  In fp16 gradients have 16 bits, unless it says otherwise.
        ParallelPlan(global_batch=1536, tp=8, pp=16, precision="fp16", grad_dtype="bf16", dropout=True, **UNSHARDED),
        seq_len=2048,
        precision="fp16",
        given={"variables": (("NUM_NODES", "16"),)},
        unread=("--vocab-file",),
    ),
    "llama3 8b in fp8": Example(
        megatron_lm.READER,
        "MEGATRON_LM_DIR",
        "examples/llama/train_llama3_8b_h100_fp8.sh",
        LLAMA_8B,
        ParallelPlan(
            global_batch=128,
            dp_shard=8,
            attention="cudnn",
            grad_dtype="bf16",
            cross_entropy_fusion="native",
            **DELAYED,
            **OVERLAP,
        ),
        seq_len=8192,
        precision="fp8",
        unread=("--empty-unused-memory-level",),
    ),
    "mixtral 8x7b": Example(
        megatron_lm.READER,
        "MEGATRON_LM_DIR",
        "examples/mixtral/train_mixtral_8x7b_distributed.sh",
        load_model("mixtral-8x7b"),
        ParallelPlan(global_batch=256, pp=4, ep=8, dp_shard=16, **OVERLAP),
        seq_len=4096,
        given={"variables": (("SLURM_NNODES", "8"),)},
        unread=("--tokenizer-type", "--attention-backend", "moe_permute_fusion"),
    ),
    "llama3 8b sharded whole": Example(
        megatron_lm.READER,
        "MEGATRON_LM_DIR",
        "examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh",
        LLAMA_8B,
        ParallelPlan(
            global_batch=128,
            dp_shard=8,
            sharding="zero3",
            attention="cudnn",
            cross_entropy_fusion="native",
            gradient_accumulation_fusion=False,
            **DELAYED,
            **OVERLAP,
        ),
        seq_len=8192,
        precision="fp8",
        unread=(
            "--use-nccl-ub",
            "--fsdp-double-buffer",
            "--fsdp-manual-registration",
            "--empty-unused-memory-level",
        ),
    ),
    "deepseek v3 in a here-document of sbatch": Example(
        megatron_lm.READER,
        "MEGATRON_LM_DIR",
        "examples/megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh",
        load_model("deepseek-v3"),
        ParallelPlan(
            global_batch=2048,
            micro_batch=4,
            ep=8,
            dp_shard=512,
            sharding="zero3",
            recompute="selective",
            recompute_modules=("mlp", "moe", "mla_up_proj", "layernorm"),
            dispatcher="hybridep",
            rope_fusion=True,
            gradient_accumulation_fusion=False,
            **OVERLAP,
        ),
        seq_len=4096,
        given={"num_devices": 512},
        unread=(
            "--make-vocab-size-divisible-by",
            "--use-nccl-ub",
            "--fsdp-double-buffer",
            "--megatron-fsdp-grad-comm-dtype",
            "--megatron-fsdp-main-grads-dtype",
            "NVTE_FWD_LAYERNORM_SM_MARGIN",
            "NVTE_BWD_LAYERNORM_SM_MARGIN",
        ),
    ),
    "gpt-oss": Example(
        megatron_lm.READER,
        "MEGATRON_LM_DIR",
        "examples/gptoss/02_train.sh",
        ModelSpec(
            name="megatron",
            num_layers=12,
            hidden_size=512,
            vocab_size=128256,
            num_heads=64,
            num_kv_heads=8,
            attention_sinks=True,
            window=128,
            clamped_activation=True,
            full_attention_interval=2,
            moe=Experts(num_experts=4, experts_per_token=2, expert_ffn_size=2048),
        ),
        # As many stages as devices: its own 8 do not divide the 12 layers, which Megatron-LM refuses.
        ParallelPlan(global_batch=128, pp=4, recompute="selective", dropout=True, **DELAYED, **OVERLAP),
        seq_len=8192,
        precision="fp8",
        given={"variables": (("GPUS_PER_NODE", "4"),)},
        unread=(
            "--no-rope-fusion",
            "--export-force-local-attention",
            "--disable-bf16-reduced-precision-matmul",
        ),
    ),
    "primus llama3.1 8b": Example(
        primus.READER,
        "PRIMUS_DIR",
        "examples/megatron/configs/MI300X/llama3.1_8B-BF16-pretrain.yaml",
        load_model("llama3-8b"),  # of the same sizes
        ParallelPlan(
            global_batch=128,
            micro_batch=2,
            dp_shard=8,
            cross_entropy_fusion="te",
            gradient_accumulation_fusion=False,
            **OVERLAP,
        ),
        seq_len=8192,
        given={"num_devices": 8},
        unread=("enable_primus_turbo",),
    ),
    "primus deepseek v3": Example(
        primus.READER,
        "PRIMUS_DIR",
        "examples/megatron/configs/MI355X/deepseek_v3-BF16-pretrain.yaml",
        load_model("deepseek-v3"),
        ParallelPlan(
            global_batch=4096,
            micro_batch=2,
            pp=16,
            vp=2,
            schedule="interleaved",
            layers_per_chunk=(1, 1, *(2,) * 29, 1),
            ep=8,
            dp_shard=16,
            recompute="full",
            cross_entropy_fusion="te",
            rope_fusion=True,
            grad_dtype="bf16_main",
            main_weights="remainders",
            moment_dtype="bf16",
            **OVERLAP,
        ),
        seq_len=4096,
        given={"num_devices": 256},
        unread=(
            "recompute_layer_ids",
            "enable_primus_turbo",
            "use_turbo_rms_norm",
            "use_turbo_deepep",
            "turbo_deepep_num_cu",
            "turbo_sync_free_moe_stage",
            "moe_use_fused_router_with_aux_score",
        ),
    ),
    "primus zero bubble": Example(
        primus.READER,
        "PRIMUS_DIR",
        "tests/trainer/test_megatron_trainer_zero_bubble.yaml",
        replace(load_model("llama2-7b"), name="megatron", num_layers=16, aliases=(), sources=()),
        ParallelPlan(global_batch=32, pp=8, vp=2, schedule="zb-v", **PLAIN),
        seq_len=4096,
        given={"num_devices": 8},
        unread=(
            "pp_algorithm",
            "enable_primus_turbo",
            "use_turbo_attention",
            "use_turbo_grouped_gemm",
            "use_turbo_gemm",
        ),
    ),
    "bridge llama3 8b of 16k tokens": Example(
        megatron_bridge.READER,
        "MEGATRON_BRIDGE_DIR",
        "src/megatron/bridge/recipes/llama/h100/llama3.py",
        load_model("llama3-8b"),
        ParallelPlan(global_batch=512, tp=4, sp=True, cp=2, pp=2, cross_entropy_fusion="te", **OVERLAP),
        seq_len=16384,
        given={"variables": (("RECIPE", "llama3_8b_pretrain_16gpu_h100_bf16_16k_config"),), "num_devices": 16},
    ),
    "bridge llama3 70b": Example(
        megatron_bridge.READER,
        "MEGATRON_BRIDGE_DIR",
        "src/megatron/bridge/recipes/llama/h100/llama3.py",
        load_model("llama3-70b"),
        ParallelPlan(
            global_batch=512,
            tp=4,
            sp=True,
            cp=2,
            pp=4,
            vp=5,
            schedule="interleaved",
            tp_overlap=True,
            cross_entropy_fusion="te",
            **OVERLAP,
        ),
        seq_len=8192,
        given={"variables": (("RECIPE", "llama3_70b_pretrain_32gpu_h100_bf16_config"),), "num_devices": 32},
        unread=("comm_overlap.tp_comm_overlap_cfg",),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_read_as_a_person_reads_it(name: str) -> None:
    example = EXAMPLES[name]
    path = Path(os.environ.get(example.checkout, "/nowhere")) / example.path
    if not path.is_file():
        pytest.skip(f"{example.checkout} names no checkout that has {example.path}")
    text = path.read_text()
    assert example.reader.recognises(path.name, text)
    launch = example.reader.read(text, LaunchContext(folder=path.parent, **example.given))
    assert launch.model == example.model
    assert launch.plan == example.plan
    assert (launch.training.seq_len, launch.training.precision) == (example.seq_len, example.precision)
    assert {option.option for option in launch.unread if option.matters} == set(example.unread)
