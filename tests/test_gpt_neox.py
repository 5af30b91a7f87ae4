"""Are YAML files of GPT-NeoX read as it runs them?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.gpt_neox.read import read, recognises
from autoplan.frameworks.launch_files import read_launch
from autoplan.readers.model import load_model
from autoplan.spec.enums import AttentionKernel, Offload, Precision, Recompute, ReduceType, Sharding

# In the form of the public configurations: YAML with braces, comments, a comma behind the last key.
MODEL = """
# a model of 20 billion parameters
{
  "pipe-parallel-size": 4,
  "model-parallel-size": 2,
  "num-layers": 44, "hidden-size": 6144, "num-attention-heads": 64,
  "seq-length": 2048, "max-position-embeddings": 2048,
  "norm": "layernorm", "pos-emb": "rotary", "rotary_pct": 0.25, "no-weight-tying": true, "gpt_j_residual": true,
  "scaled-upper-triang-masked-softmax-fusion": true, "bias-gelu-fusion": true,
}
"""
RUN = """{
  "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4, "betas": [0.9, 0.95], }},
  "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 500000000},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32,
  "checkpoint-activations": true, "checkpoint-num-layers": 1, "partition-activations": false,
  "hidden-dropout": 0, "attention-dropout": 0,
  "fp16": {"enabled": true, "loss_scale": 0, "hysteresis": 2},
  "tokenizer-type": "HFTokenizer", "vocab-file": "/data/20B_tokenizer.json", "train-iters": 150000, "save": "out",
}
"""
SMALL = "pipe_parallel_size: 1\nnum_layers: 12\nhidden_size: 768\nnum_attention_heads: 12\nseq_length: 2048\n"
SMALL += "max_position_embeddings: 2048\nhidden_dropout: 0\nattention_dropout: 0\nvocab_size: 50277\n"
SMALL += "attention_config: [[['flash'], 12]]\ntrain_micro_batch_size_per_gpu: 4\nprecision: fp16\n"


def small(text: str = "", devices: int | None = 8, **context: Any) -> Launch:
    return read(SMALL + text, LaunchContext(num_devices=devices, **context))


def noted(launch: Launch) -> set[str]:
    return {item.option for item in launch.unread if item.matters}


def test_files_that_deepy_joins_are_read_as_one(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "20B.yml").write_text(MODEL)
    (tmp_path / "configs" / "run.yml").write_text(RUN)
    script = tmp_path / "train.sh"
    script.write_text(
        "#SBATCH --nodes=8\n#SBATCH --gres=gpu:a100:8\n#SBATCH --ntasks=1\n"
        "python ./deepy.py train.py -d configs 20B run.yml\n"
    )
    launch = read_launch(script, LaunchContext())
    plan, model = launch.plan, launch.model
    assert launch.target == "gpt-neox"
    assert (plan.tp, plan.pp, plan.dp, plan.micro_batch, plan.global_batch) == (2, 4, 8, 4, 1024)
    assert (plan.sharding, plan.recompute, plan.precision) == (Sharding.ZERO1, Recompute.FULL, Precision.FP16)
    assert (plan.attention, plan.dropout, launch.training.seq_len) == (AttentionKernel.UNFUSED, False, 2048)
    assert (model.vocab_size, model.ffn_size, model.position_embedding) == (50277, 4 * 6144, "rope")
    assert model.mlp_bias
    assert model.qkv_bias
    assert not model.tied_embeddings
    assert model.norm == "layernorm"
    assert not noted(launch)


def test_a_missing_file_or_a_repeated_key_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "20B.yml").write_text(MODEL)
    script = tmp_path / "train.sh"
    script.write_text("deepy.py train.py 20B.yml run.yml\n")
    with pytest.raises(InputError, match=r"32-bit training is not priced: read the script .* or pass --set"):
        read_launch(script, LaunchContext(num_devices=64))
    (tmp_path / "run.yml").write_text(RUN.replace("{", "{'num-layers': 40,", 1))
    with pytest.raises(InputError, match=r"'num-layers' is set twice, which GPT-NeoX refuses"):
        read_launch(script, LaunchContext(num_devices=64))
    script.write_text("deepy.py evaluate.py 20B.yml run.yml\n")
    with pytest.raises(InputError, match=r"starts evaluate.py, which does not train"):
        read_launch(script, LaunchContext(num_devices=64))


def test_keys_can_be_set_beside_a_file() -> None:
    variables = (("train_micro_batch_size_per_gpu", "2"), ("fp16", "{enabled: true}"), ("vocab_size", "32000"))
    launch = read(MODEL, LaunchContext(num_devices=16, variables=variables))
    assert (launch.plan.micro_batch, launch.plan.dp, launch.model.vocab_size) == (2, 2, 32000)


@pytest.mark.parametrize(
    ("keys", "ffn_size"),
    [
        ("intermediate_size: 32768\nmlp_multiple_of: 256\n", 11008),  # Llama 7B, as its configuration writes it
        ("intermediate_size: 86016\nmlp_multiple_of: 256\n", 28672),  # Llama 2 70B
        ("intermediate_size: 14336\nmlp_multiple_of: 14336\n", 14336),  # Llama 3 8B
    ],
)
def test_a_gate_leaves_a_third_of_the_intermediate_size(keys: str, ffn_size: int) -> None:
    model = small(f"activation: swiglu\n{keys}").model
    assert (model.ffn_size, model.gated_mlp) == (ffn_size, True)


def test_the_mlp_of_llama_before_2024() -> None:
    model = small("mlp_type: llama\nnorm: rmsnorm\nactivation: silu\n").model
    assert (model.ffn_size, model.gated_mlp, model.mlp_bias, model.norm) == (2048, True, False, "rmsnorm")


def test_sizes_of_a_public_model_are_its_own() -> None:
    text = "activation: swiglu\nintermediate_size: 14336\nmlp_multiple_of: 14336\nnorm: rmsnorm\npos_emb: rotary\n"
    text += "use_bias_in_norms: false\nuse_bias_in_attn_linear: false\nuse_bias_in_mlp: false\nno_weight_tying: true\n"
    text = (
        SMALL.replace("hidden_size: 768", "hidden_size: 4096").replace("heads: 12", "heads: 32\nnum_kv_heads: 8") + text
    )
    text = text.replace("num_layers: 12", "num_layers: 32").replace("50277", "128256") + "rotary_emb_base: 500000\n"
    assert read(text, LaunchContext(num_devices=8)).model == load_model("llama3-8b")


def test_stages_without_the_pipeline_engine_may_shard_more() -> None:
    zero = "zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}\n"
    with pytest.raises(InputError, match=r"takes no stage above 1 of ZeRO, not zero3: set pipe_parallel_size to 0"):
        small(zero)
    launch = read(SMALL.replace("pipe_parallel_size: 1", "pipe_parallel_size: 0") + zero, LaunchContext(num_devices=8))
    assert (launch.plan.sharding, launch.plan.offload, launch.plan.pp) == (Sharding.ZERO3, Offload.OPTIMIZER, 1)


def test_states_of_bf16_pipelines_are_always_sharded() -> None:
    text = SMALL.replace("fp16", "bfloat16") + "fp32_allreduce: True\n"
    plan = read(text, LaunchContext(num_devices=8)).plan
    assert (plan.sharding, plan.precision, plan.reduce_dtype) == (Sharding.ZERO1, Precision.BF16, ReduceType.FP32)
    older = SMALL.replace("precision: fp16", "fp16: {enabled: true, type: bfloat16}")
    plan = read(older, LaunchContext(num_devices=8)).plan
    assert (plan.sharding, plan.precision) == (Sharding.NONE, Precision.BF16)


@pytest.mark.parametrize(
    ("text", "devices", "batches"),
    [
        ("", 8, (32, 4, 8)),
        ("gradient_accumulation_steps: 3\n", 8, (96, 4, 8)),
        ("train_batch_size: 64\ngradient_accumulation_steps: 2\n", None, (64, 4, 8)),
        ("train_batch_size: 256\n", 8, (256, 4, 8)),
        ("num_gpus: 8\nnum_nodes: 2\n", None, (64, 4, 16)),
    ],
)
def test_batches_follow_from_two_of_three(text: str, devices: int | None, batches: tuple[int, int, int]) -> None:
    plan = small(text, devices).plan
    assert (plan.global_batch, plan.micro_batch, plan.dp) == batches


def test_what_is_not_priced_is_listed() -> None:
    text = "model_parallel_size: 2\nsequence_parallel: true\npartition_activations: true\nuse_bnb_optimizer: true\n"
    text += "te_layernorm_mlp: true\noptimizer: {type: Lion, params: {lr: 0.1}}\npack_impl: unpacked\n"
    listed = noted(small(text))
    assert listed >= {"sequence_parallel", "partition_activations", "use_bnb_optimizer", "te_layernorm_mlp"}
    assert listed >= {"optimizer.type", "pack_impl"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train_impl: dpo\n", r"only training on the next token"),
        ("moe_num_experts: 8\n", r"pass --model"),
        ("soft_prompt_tuning: {enabled: true}\n", r"only full training is"),
        ("train_batch_size: 30\n", r"train_batch_size 30 is not"),
        ("bf16: {enabled: true}\n", r"contradict each other"),
    ],
)
def test_what_cannot_be_priced_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(text)
    with pytest.raises(InputError, match=r"mamba is not priced: only global and flash are"):
        read(SMALL.replace("flash", "mamba"), LaunchContext(num_devices=8))


def test_stages_may_be_uneven() -> None:
    text = SMALL.replace("pipe_parallel_size: 1", "pipe_parallel_size: 8")
    assert read(text, LaunchContext(num_devices=8)).plan.layers_per_chunk == (2, 2, 2, 2, 1, 1, 1, 1)


def test_files_of_others_are_not_its_own() -> None:
    assert recognises("a.yml", MODEL)
    assert recognises("a.sh", "./deepy.py train.py a.yml\n")
    assert not recognises("a.yml", "pipeline_model_parallel_size: 4\n")
    assert not recognises("a.json", '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}')


@pytest.mark.parametrize(
    ("directives", "devices"),
    [
        ("#SBATCH --gres=gpu:RTXA6000:2\n#SBATCH --ntasks=1\n", 2),
        ("#SBATCH -N 4\n#SBATCH --gpus-per-node=8\n", 32),
        ("#SBATCH --nodes=2 --gres gpu:4\n", 8),
    ],
)
def test_ranks_are_as_many_as_the_devices_of_a_job(tmp_path: Path, directives: str, devices: int) -> None:
    (tmp_path / "a.yml").write_text(SMALL)
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\n{directives}python ./deepy.py train.py -d . a.yml\n")
    assert read_launch(script, LaunchContext()).plan.num_devices == devices
    script.write_text("#!/bin/bash\n#SBATCH --ntasks=1\npython ./deepy.py train.py a.yml\n")
    with pytest.raises(InputError, match="pass --devices"):
        read_launch(script, LaunchContext())
