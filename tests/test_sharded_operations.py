"""Operations on DTensors that the host dispatches for tensor groups whose layers are not compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.sharded_operations import repeated_operations_s, sharded_operations_s
from autoplan.frameworks.presets import load_framework
from autoplan.readers.model import load_model
from autoplan.spec.blocks import Block
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from problems import problem_for

LLAMA = load_model("llama3.1-8b")
LAYER = (Block.ATTENTION, Block.MLP)
WIDTH, FFN_WIDTH, HEADS, TOKENS, TP = 64, 128, 8, 16, 8


def problem_of(framework: str = "torchtitan-eager", each_s: float = 1.0, **training: Any) -> Problem:
    """A problem on 16 H200 whose host takes `each_s` for an operation on DTensors."""
    changed = load_framework(framework).changed(host_s_per_dtensor_operation=each_s)
    spec = TrainingSpec(seq_len=4096, **training)
    return problem_for(LLAMA, "h200-sxm:2x8", changed, training=spec)


def batch_of(**changes: Any) -> PlanBatch:
    values = {"tp": 8, "dp_shard": 2, "sharding": "zero3", "global_batch": 2}
    return PlanBatch.of([ParallelPlan(**(values | changes))], LLAMA.num_layers)


def counted(problem: Problem, batch: PlanBatch) -> tuple[float, float, float]:
    """Seconds of a layer: forward, backward and repeated."""
    passes = [sharded_operations_s(problem, batch, block) for block in LAYER]
    again_s = sum(repeated_operations_s(problem, batch, block)[0] for block in LAYER)
    return sum(each.forward_s[0] for each in passes), sum(each.backward_s[0] for each in passes), again_s


class Counter(TorchDispatchMode):
    """Counts the operations on DTensors."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(issubclass(kind, DTensor) for kind in types)
        return function(*args, **(kwargs or {}))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (matrix(x).view(*x.shape[:2], -1, WIDTH // HEADS) for matrix in (self.wq, self.wk, self.wv))
        heads = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        return self.wo(heads.transpose(1, 2).contiguous().view(*x.shape[:2], -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, FFN_WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FFN_WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + self.attention(self.attention_norm(x))
        return hidden + self.feed_forward(self.ffn_norm(hidden))


@pytest.fixture
def layer() -> Iterator[nn.Module]:
    """A layer of Llama in 16 bits, parallel as in torchtitan, on a rank of a process group that sends nothing."""
    distributed.init_process_group("fake", rank=0, world_size=TP, store=FakeStore())
    try:
        columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
        for name in ("attention.wo", "feed_forward.w2"):
            plan[name] = RowwiseParallel(output_layouts=Shard(1))
        for name in ("attention_norm", "ffn_norm"):
            plan[name] = SequenceParallel()
        for name in ("attention", "feed_forward"):
            plan[name] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        yield parallelize_module(Layer().bfloat16(), init_device_mesh("cpu", (TP,)), plan)
    finally:
        distributed.destroy_process_group()


def operations(layer: nn.Module) -> tuple[int, int]:
    """Operations on DTensors of both passes, of a step after the first."""
    hidden = torch.randn(1, TOKENS // TP, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    layer(hidden).sum().backward()
    layer.zero_grad()
    with Counter() as forward:
        out = layer(hidden)
    with Counter() as backward:
        out.sum().backward()
    return forward.count, backward.count


def test_a_layer_has_as_many_operations_as_torch_dispatches(layer: nn.Module) -> None:
    forward, backward, again = counted(problem_of(), batch_of())
    assert (forward, backward) == operations(layer) == (46, 108)
    # What a checkpoint keeps it need not detach in the forward pass.
    first, with_repeated = operations(checkpoint_wrapper(layer, preserve_rng_state=False))
    assert first == pytest.approx(forward, rel=0.05)
    assert with_repeated == pytest.approx(backward + again, rel=0.05)


def test_compiled_layers_and_those_without_a_tensor_group_have_none() -> None:
    alone = batch_of(tp=1, sp=False, dp_shard=16, global_batch=16)
    assert counted(problem_of(), alone) == (0, 0, 0)
    assert counted(problem_of("torchtitan"), batch_of()) == (0, 0, 0)
    assert counted(problem_of("torchtitan", fused_norm=False), batch_of()) == counted(problem_of(), batch_of())


@pytest.mark.parametrize(("recompute", "a_layer"), [("none", 154), ("selective", 246), ("full", 246)])
def test_a_step_takes_what_its_hosts_dispatch_where_that_is_longer(recompute: str, a_layer: int) -> None:
    step_s = estimate(problem_of(each_s=1.0), batch_of(recompute=recompute)).step_s[0]
    assert step_s == pytest.approx(32 * a_layer, rel=1e-2)  # with the allowance for the slowest rank
    quick, free = (estimate(problem_of(each_s=each_s), batch_of(recompute=recompute)) for each_s in (1e-9, 0.0))
    assert quick.step_s[0] == pytest.approx(free.step_s[0], rel=1e-3)
