"""Gated delta nets: their parameters, operations, layers, and what is refused of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan.api.problem import make_problem
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.arithmetic import DELTA_CHUNK_TOKENS, linear_attention_flops_per_token, model_flops_per_token
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.registry import book_of
from autoplan.readers.model import load_model
from autoplan.spec.blocks import Block, LinearAttention
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.workload import Workload

QWEN = load_model("qwen3-next-80b-a3b")
NET = LinearAttention(num_key_heads=2, num_value_heads=4, key_head_dim=32, value_head_dim=48)
SMALL = ModelSpec(
    name="small",
    num_layers=8,
    hidden_size=64,
    vocab_size=100,
    num_heads=4,
    ffn_size=128,
    linear_attention=NET,
    full_attention_interval=4,
)


def test_every_fourth_layer_sees_all() -> None:
    kinds = [layer[0] for layer in SMALL.layers]
    assert kinds == [*[Block.LINEAR_ATTENTION] * 3, Block.ATTENTION] * 2


def test_parameters_of_a_net_are_those_counted_by_hand() -> None:
    keys, values = 2 * 32, 4 * 48
    projections = 64 * (2 * keys + 2 * values + 2 * 4) + values * 64
    convolution, decay, norms = (2 * keys + values) * 4, 2 * 4, 64 + 48
    assert block_shapes(SMALL)[Block.LINEAR_ATTENTION].num_parameters == projections + convolution + decay + norms


def test_operations_are_those_that_torch_counts_in_the_code_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = transformers.Qwen3NextConfig(
        hidden_size=64,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=48,
    )
    tokens = 8 * DELTA_CHUNK_TOKENS
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Qwen3NextGatedDeltaNet(config, 0)(torch.zeros(1, tokens, 64))
    counted = {str(operation): flops for operation, flops in counter.get_flop_counts()["Global"].items()}
    # Torch counts no triangular solves, by which this code gets the corrections of keys and of values.
    solves = NET.num_value_heads * 2 * DELTA_CHUNK_TOKENS * (NET.key_head_dim + NET.value_head_dim)
    convolution = 2 * NET.conv_width * NET.conv_kernel
    core = counted["aten.bmm"] / tokens + solves + convolution
    assert linear_attention_flops_per_token(SMALL, DELTA_CHUNK_TOKENS) == core
    assert counted["aten.convolution"] / tokens == pytest.approx(convolution, rel=0.01)  # which pads the sequence


def test_operations_of_linear_layers_do_not_grow_with_the_sequence() -> None:
    only = replace(SMALL, full_attention_interval=0)
    assert model_flops_per_token(only, 1024) == model_flops_per_token(only, 65536)
    assert model_flops_per_token(SMALL, 1024) < model_flops_per_token(SMALL, 65536)


def test_a_long_sequence_costs_a_hybrid_less_than_softmax_attention_in_every_layer() -> None:
    plan = ParallelPlan.derived(num_devices=8, global_batch=8, tp=2, sp=True, sharding="zero1", has_experts=True)

    def step_s(model: ModelSpec) -> float:
        problem = make_problem(model=model, cluster="h100-sxm:1x8", seq_len=65536, precision="bf16")
        return float(estimate(problem, PlanBatch.of([plan], model.num_layers)).step_s[0])

    softmax = replace(QWEN, linear_attention=None, full_attention_interval=0)
    assert step_s(QWEN) < 0.7 * step_s(softmax)


@pytest.mark.parametrize(("degrees", "is_legal"), [({"tp": 2}, True), ({"tp": 4}, False), ({"cp": 2}, False)])
def test_tensor_parallelism_divides_key_heads_and_contexts_are_not_split(
    degrees: dict[str, int], is_legal: bool
) -> None:
    plan = ParallelPlan.derived(num_devices=4, global_batch=4, sharding="zero1", **degrees)
    problem = make_problem(model=SMALL, cluster="h100-sxm:1x4", seq_len=2048)
    workload = Workload(model=SMALL, training=problem.training, num_devices=4)
    found = broken(book_of(problem.framework).rules, workload, plan)
    assert (found == ()) == is_legal
    assert is_legal or "linear attention" in found[0]


def test_a_window_beside_it_is_refused() -> None:
    with pytest.raises(InputError, match="with window in a layer_pattern"):
        replace(SMALL, window=128)
