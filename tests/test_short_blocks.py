"""Gated convolutions (LFM2), scans of Mamba-1, heads of two sizes: are they counted as torch does, and priced?"""

from __future__ import annotations

import json
from typing import Any

import pytest
from saved_bytes import saved_sizes

from autoplan.api.problem import make_problem
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.arithmetic import count_parameters, model_flops_per_token
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.memory.recompute import activation_parts, whole_bytes
from autoplan.frameworks.common.rules import check_legal
from autoplan.frameworks.common.universal_rules import RULES
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.blocks import Block, WindowAttention
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.training import TrainingSpec

LFM2_1_2B: dict[str, Any] = {  # huggingface.co/LiquidAI/LFM2-1.2B/blob/main/config.json
    **{"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16},
    **{
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    **{"block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "conv_L_cache": 3},
}
MAMBA_2_8B: dict[str, Any] = {  # huggingface.co/state-spaces/mamba-2.8b-hf/blob/main/config.json
    **{"architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64},
    **{"intermediate_size": 5120, "state_size": 16, "conv_kernel": 4, "time_step_rank": 160, "vocab_size": 50280},
    **{"use_bias": False, "use_conv_bias": True},
}
SMALL: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 96, "intermediate_size": 300, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "layer_types": ["conv", "full_attention", "conv"]},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def _lfm2() -> tuple[Any, ModelSpec]:
    """A small model of transformers, and what its config is read as."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("lfm2", attn_implementation="eager", **SMALL)
    spec = read_huggingface(json.loads(json.dumps(config.to_dict(), default=str)), "small")
    return transformers.AutoModelForCausalLM.from_config(config), spec


def test_published_configs_have_the_parameters_of_their_checkpoints() -> None:
    lfm2, mamba = read_huggingface(LFM2_1_2B, "lfm2-1.2b"), read_huggingface(MAMBA_2_8B, "mamba-2.8b")
    assert count_parameters(lfm2) == pytest.approx(1.17e9, rel=0.002)  # of the model card
    assert lfm2.ffn_size == 8192
    assert lfm2.layer_pattern == "C-C-*-C-C-*-C-C-*-C-*-C-*-C-*-C-"
    assert count_parameters(mamba) == 2_768_345_600


def test_operations_of_a_convolution_are_those_that_torch_counts() -> None:
    """The forward pass alone: torch counts the gradient of a convolution of channels as one over all of them."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    model, spec = _lfm2()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(3, 99, (1, 160)))
    causal = 2 * (160 / 2) * 2 * 96  # both halves of the square, of the one layer of attention
    ours = 160 * (model_flops_per_token(spec, 160) / 3 + causal)
    assert ours == pytest.approx(counter.get_total_flops(), rel=2e-3)


def test_bytes_kept_by_a_layer_with_a_convolution_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    model, spec = _lfm2()
    layer = model.to(torch.bfloat16).train().model.layers[0]
    hidden = torch.randn(2, 160, 96, dtype=torch.bfloat16, requires_grad=True)
    known = {tensor.untyped_storage().data_ptr() for tensor in layer.parameters()}
    with saved_sizes(known) as sizes:
        layer(hidden, position_embeddings=None)
    problem = make_problem(spec, cluster="h100-sxm:1x1", seq_len=160, framework="transformers")
    batch = PlanBatch.of([ParallelPlan(global_batch=2, micro_batch=2)], spec.num_layers)
    shapes = block_shapes(spec)
    blocks = (Block.CONVOLUTION, Block.MLP)
    ours = sum(float(whole_bytes(activation_parts(problem, batch, block, shapes[block]))[0]) for block in blocks)
    assert ours == pytest.approx(sum(sizes.values()), rel=0.01)


def test_parameters_of_a_scan_of_mamba_1_are_those_counted_by_hand() -> None:
    shape = block_shapes(read_huggingface(MAMBA_2_8B, "mamba-2.8b"))[Block.MAMBA]
    assert {linear.name: (linear.in_size, linear.out_size) for linear in shape.linears} == {
        "in": (2560, 2 * 5120),
        "x": (5120, 160 + 2 * 16),
        "dt": (160, 5120),
        "out": (5120, 2560),
    }
    assert shape.num_other_parameters == 5120 * (4 + 1) + 5120 * 16 + 5120


def test_layers_with_a_window_have_heads_of_another_size_that_are_not_split() -> None:
    """By hand: queries and outputs of 4 heads of 32, keys and values of 1; with a window of 8 heads of 16 and 4."""
    model = ModelSpec(
        name="two-sizes",
        num_layers=2,
        hidden_size=128,
        vocab_size=512,
        ffn_size=256,
        num_heads=4,
        num_kv_heads=1,
        head_dim=32,
        window=64,
        full_attention_interval=2,
        window_attention=WindowAttention(num_heads=8, num_kv_heads=4, head_dim=16),
    )
    shapes = block_shapes(model)
    parameters = {
        block: sum(linear.in_size * linear.out_size for linear in shapes[block].linears)
        for block in (Block.ATTENTION, Block.WINDOW_ATTENTION)
    }
    assert parameters == {
        Block.ATTENTION: 128 * (128 + 2 * 32) + 128 * 128,
        Block.WINDOW_ATTENTION: 128 * (128 + 2 * 64) + 128 * 128,
    }
    for tp, cp in ((2, 1), (1, 2)):
        plan = ParallelPlan(global_batch=8, micro_batch=1, tp=tp, cp=cp)
        with pytest.raises(InputError, match=f"heads of two sizes with tp {tp} and cp {cp}: only tp 1 and cp 1 are"):
            check_legal(RULES, model, TrainingSpec(seq_len=4096), plan, "")


@pytest.mark.parametrize(
    ("config", "says"),
    [(LFM2_1_2B, "convolutions with cp 2: only cp 1 is priced"), (MAMBA_2_8B, "scans of Mamba-1 with tp 2")],
)
def test_they_are_priced_where_they_are_not_cut(config: dict[str, Any], says: str) -> None:
    model = read_huggingface(config, "model")
    plan = ParallelPlan(global_batch=64, micro_batch=1, dp_shard=8, sharding="zero3")
    problem = make_problem(model, cluster="h100-sxm:1x8", seq_len=4096, framework="transformers")
    priced = estimate(problem, PlanBatch.of([plan], model.num_layers))
    flops = 64 * 4096 / 8 * model_flops_per_token(model, 4096)
    assert flops / 989e12 < float(priced.step_s[0]) < 10 * flops / 989e12
    cut = {"tp": 2} if "tp" in says else {"cp": 2}
    with pytest.raises(InputError, match=says):
        check_legal(
            RULES,
            model,
            TrainingSpec(seq_len=4096),
            ParallelPlan(global_batch=64, micro_batch=1, dp_shard=4, **cut),
            "",
        )
