"""Does selective checkpointing keep what its policy names, and FSDP2 reserve what its streams allocate?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan.cost.memory.activations import block_bytes, layer_parts
from autoplan.cost.memory.stage_memory import CACHED_SHARE, StageMemory, stage_memory
from autoplan.cost.parameters import stage_parameters
from autoplan.cost.pipeline.layout import stage_blocks
from autoplan.frameworks.presets import load_framework
from autoplan.spec.blocks import Block, Experts
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from problems import problem_for

TOKENS = 128
MODEL = ModelSpec(name="small", num_layers=2, hidden_size=64, vocab_size=512, num_heads=4, num_kv_heads=2, ffn_size=128)
MIXTURE = replace(
    MODEL,
    ffn_size=0,
    moe=Experts(num_experts=4, experts_per_token=2, expert_ffn_size=32, shared_expert_ffn_size=32),
)
COMPILED, EARLIER = load_framework("torchtitan"), load_framework("torchtitan-0.2")
EAGER = load_framework("torchtitan-eager")
# Of a token: half of the layer's input, and attention's output with a logarithm in fp32 for each head.
HALF_INPUT, CORE = 64, 2 * 64 + 4 * 4


def kept(model: ModelSpec, framework: Framework, **of_plan: object) -> dict[Block, float]:
    """Bytes of a token that each block keeps under selective recomputation."""
    problem = problem_for(model, "h100-sxm:8x8", framework, seq_len=TOKENS)
    batch = problem.batch([ParallelPlan(**{"global_batch": 8, "recompute": "selective"} | of_plan)])  # type: ignore[arg-type]
    sizes = block_bytes(problem, batch, layer_parts(problem, batch))
    return {block: float(size[0]) / TOKENS for block, size in sizes.items()}


@pytest.mark.parametrize(("framework", "down"), [(COMPILED, 0), (EAGER, 2 * 64)])
def test_every_second_product_stays(framework: Framework, down: int) -> None:
    sizes = kept(MODEL, framework)
    # Of q, k, v, out, gate, up and down: q, v, gate, and, where no compiler drops it, down.
    assert sizes[Block.ATTENTION] == pytest.approx(HALF_INPUT + CORE + 2 * 64 + 2 * 32)
    assert sizes[Block.MLP] == pytest.approx(HALF_INPUT + 2 * 128 + down)


@pytest.mark.parametrize(("framework", "products"), [(COMPILED, 64 + 2 * 32), (EARLIER, 0)])
def test_products_with_a_bias_do_not_count(framework: Framework, products: int) -> None:
    sizes = kept(replace(MODEL, qkv_bias=True), framework)
    # Of out, gate, up and down: out and up; of q, k and v all or none.
    assert sizes[Block.ATTENTION] == pytest.approx(HALF_INPUT + CORE + 2 * 64 + 2 * products)
    assert sizes[Block.MLP] == pytest.approx(HALF_INPUT + 2 * 128)


def test_reduce_scatters_stay_too() -> None:
    alone, pair = kept(MODEL, COMPILED), kept(MODEL, COMPILED, tp=2, sp=True)
    assert pair[Block.ATTENTION] == pytest.approx((alone[Block.ATTENTION] + 2 * 64) / 2)


def test_products_of_shared_experts_count_and_those_of_routed_ones_do_not() -> None:
    sizes = kept(MIXTURE, EAGER)
    assert sizes[Block.MOE] == pytest.approx(HALF_INPUT + 2 * 32 + 2 * 64)  # gate and down


def test_mixtures_compiled_in_parts_keep_the_output_of_attention_alone() -> None:
    sizes = kept(MIXTURE, EARLIER)
    assert sizes[Block.ATTENTION] == pytest.approx(HALF_INPUT + CORE)
    assert sizes[Block.MOE] == pytest.approx(HALF_INPUT)


def test_exchanged_tokens_stay_where_the_policy_names_them() -> None:
    alone, spread = kept(MIXTURE, COMPILED), kept(MIXTURE, COMPILED, ep=2, dp_shard=2)
    # Two tensors of two experts a token.
    assert spread[Block.MOE] - alone[Block.MOE] == pytest.approx(2 * 2 * 2 * 64)


def memory_of(model: ModelSpec, framework: Framework, seq_len: int, **of_plan: object) -> StageMemory:
    """Memory of one plan."""
    problem = problem_for(model, "h100-sxm:8x8", framework, seq_len=seq_len)
    batch = problem.batch([ParallelPlan(**{"global_batch": 8} | of_plan)])  # type: ignore[arg-type]
    blocks = stage_blocks(problem.model, batch, 1)
    return stage_memory(problem, batch, blocks, stage_parameters(problem, batch, blocks))


def test_streams_of_fsdp2_reserve_gradients_and_a_gathered_unit() -> None:
    memory = memory_of(MODEL, COMPILED, 2**15, dp_shard=8, sharding="zero3", global_batch=8)
    assert memory.terms["logits"][0, 0] > 0  # the loss is the peak, when no gradient lives
    assert memory.terms["gradients"][0, 0] == 0
    layer = 64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    total = 2 * layer + 2 * 512 * 64 + 64
    pools = 4 * total / 8 + 2 * max(512 * 64, layer)
    assert memory.terms["cached"][0, 0] == pytest.approx(CACHED_SHARE * pools)
    assert memory.pass_spare_bytes[0, 0] == pytest.approx((1 - CACHED_SHARE) * pools)


def test_experts_are_sharded_over_the_ranks_beside_their_own_group() -> None:
    shape = {"dp_shard": 8, "ep": 2, "sharding": "zero3", "global_batch": 8}
    memory = memory_of(MIXTURE, COMPILED, TOKENS, **shape)
    expert = 2 * 4 * 3 * 64 * 32
    ends = 2 * 512 * 64 + 64
    dense = 2 * (64 * 128 + 64 * 64 + 2 * 64 + 64 * 4 + 3 * 64 * 32) + ends
    # Two local experts a layer lie on two of the four ranks that share them.
    assert memory.terms["weights"][0, 0] == pytest.approx(4 * (dense / 8 + expert / 2 / 2), rel=1e-3)


def test_zero2_of_fsdp_keeps_shards_and_16_bit_copies() -> None:
    fsdp = load_framework("pytorch-fsdp")
    plans = {name: memory_of(MODEL, fsdp, TOKENS, dp_shard=8, sharding=name) for name in ("none", "zero2", "zero3")}
    whole, copied, sharded = (plans[name].terms["weights"][0, 0] for name in ("none", "zero2", "zero3"))
    assert sharded == pytest.approx(whole / 8)
    assert copied == pytest.approx(whole / 8 + whole / 2)
