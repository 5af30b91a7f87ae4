"""Units of the built-in trainer that can be run and timed: layers, sharded states, ends, actions of a pipeline.

Sums of kernels and collectives leave out what lies between them, 10 to 40 % of small models' steps (`closed-loop` 3):
DTensor's dispatch, FSDP2's hooks and copies, a pipeline's runtime.  Here the trainer's own modules run, spread by its
own means, so that a profile cannot drift away from what it is a profile of.  As many of them take turns as a cache does
not hold: a step comes back to a layer when all others have run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor.parallel import loss_parallel

from autoplan.base.errors import InputError
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.profiler.operations.inputs import ChainedRun, InputFactory, Run, StagedRun, in_turns, num_sets
from autoplan.spec.blocks import Experts
from autoplan.spec.enums import Sharding
from autoplan.spec.model import ModelSpec
from autoplan.spec.operations import (
    LAYER_HALVES,
    LAYER_SIZES,
    LAYERS,
    MOE_LAYER_HALVES,
    MOE_LAYERS,
    SHAPES,
    SHARED_LAYERS,
    SHARED_MOE_LAYERS,
    Operation,
)
from autoplan.spec.plan import ParallelPlan
from autoplan.trainer.parallel import DTYPES, Grid, announce, make_grid, passes, share, spread
from autoplan.trainer.step import loss_of
from autoplan.trainer.transformer import Transformer

KERNEL = "trainer"

_RECOMPUTED = dict(zip((*LAYERS, *MOE_LAYERS), 2 * ("none", "none", "selective", "full"), strict=True))
_TOUCHED_BYTES = 8  # of a weight: its value and its gradient, both in fp32
_NUM_LINKS = 4  # layers in a chain: of this many all but the last one send their gradients while another computes
_SHARDED = dict(zip((*SHARED_LAYERS, *SHARED_MOE_LAYERS), 2 * ("none", "zero1", "zero3"), strict=True))
_TP = LAYER_SIZES.index("tp")  # in the shape of any layer


class Grids:
    """The trainer's meshes over the ranks of this job, made once each; all ranks ask for the same ones."""

    def __init__(self, num_ranks: int, ranks_per_node: int, device: torch.device) -> None:
        self._num_ranks, self._ranks_per_node, self._device = num_ranks, ranks_per_node, device
        self._made: dict[tuple[int, ...], Grid] = {}

    def of(self, plan: ParallelPlan) -> Grid:
        """Return the mesh of a plan, as often as it has room side by side."""
        num_grids, remainder = divmod(self._num_ranks, plan.num_devices)
        if remainder or not num_grids:
            raise InputError(f"{plan.num_devices} devices do not divide the {self._num_ranks} ranks")
        key = (plan.tp, plan.dp, plan.pp)
        if key not in self._made:
            self._made[key] = make_grid(plan, self._device, num_beside=num_grids)
        return self._made[key]

    def check(self, num_devices: int, devices_per_domain: int, stride: int = 1) -> None:
        """Refuse groups that are no neighbours, `stride` ranks apart."""
        on_node = min(max(self._ranks_per_node // stride, 1), num_devices)
        if devices_per_domain != on_node:
            raise InputError(f"{num_devices} devices have {on_node} of them on a node, got {devices_per_domain}")


def implementation(operation: Operation, dtype: str) -> str:
    """Name of the implementation of a unit in this type; blank where the trainer has none."""
    return KERNEL if operation in UNITS and dtype in DTYPES else ""


def meets(operation: Operation, shape: tuple[int, ...]) -> bool:
    """Tell whether its ranks wait for each other, so that wall time counts instead of process time."""
    sizes = dict(zip(SHAPES[operation], shape, strict=True))
    return sizes.get("tp", 1) > 1 or (operation in _SHARDED and sizes["num_devices"] > 1)


def build(operation: Operation, shape: tuple[int, ...], factory: InputFactory, grids: Grids) -> Run | StagedRun:
    """Build a call that runs the unit once.  All ranks of the job call it."""
    return UNITS[operation](operation, shape, factory, grids)


# -- layers -----------------------------------------------------------------------------------------------------------


def _model(shape: Sequence[int], num_layers: int) -> ModelSpec:
    _, _, hidden_size, ffn_size, num_heads, num_kv_heads, head_dim, _, *experts = shape
    return ModelSpec(
        name="layers",
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=2,  # the least; the layers have no table
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=ffn_size,
        moe=Experts(num_experts=experts[0], experts_per_token=experts[1], expert_ffn_size=ffn_size)
        if experts
        else None,
    )


def _chunk(
    plan: ParallelPlan, shape: Sequence[int], num_layers: int, factory: InputFactory, grids: Grids
) -> Transformer:
    """Build layers of the trainer, spread by a plan."""
    with torch.device("meta"):
        part = Transformer(_model(shape, num_layers), shape[1], 0, num_layers, is_first=False, is_last=False)
    spread(part, plan, grids.of(plan), dtype=factory.dtype, device=factory.device, seed=0)
    return part


def _ends(shape: Sequence[int], factory: InputFactory) -> tuple[Tensor, Tensor]:
    """Return (the input of a chunk, the gradient of its output)."""
    size = shape[0], shape[1] // shape[_TP], shape[2]
    return factory.normal(*size, grad=True), factory.normal(*size)


def _num_layers(shape: Sequence[int], factory: InputFactory) -> int:
    """Number of layers that a cache does not hold."""
    num_weights = count_parameters(_model(shape, 1)) // shape[_TP]
    return num_sets(_TOUCHED_BYTES * num_weights, factory.device)


class _Layer:
    """Layer of the trainer, spread by a plan, with an input."""

    def __init__(self, plan: ParallelPlan, shape: Sequence[int], factory: InputFactory, grids: Grids) -> None:
        part = _chunk(plan, shape, 1, factory, grids)
        self.module, self.angles = part.layers["0"], part.angles(factory.device)
        self.x, self.gradient = _ends(shape, factory)
        announce(self.module, plan, is_last=False)

    def forward(self) -> Tensor:
        """The output."""
        self.x.grad = None
        result: Tensor = self.module(self.x, self.angles)
        return result

    def backward(self, output: Tensor) -> None:
        """Gradients of input and weights."""
        torch.autograd.backward(output, self.gradient)

    def input_gradient(self, output: Tensor) -> list[dict[str, object]]:
        """Compute the gradient of the input alone, as a pipeline does; return what `weight_gradients` takes."""
        _, pending = stage_backward_input([output], [self.gradient], [self.x], self.module.parameters())
        return pending

    def weight_gradients(self, pending: list[dict[str, object]]) -> None:
        """The gradients of the weights."""
        stage_backward_weight(self.module.parameters(), pending)


def _plan(
    batch: int, tp: int, *, num_devices: int = 1, sharding: str = "none", recompute: str = "none"
) -> ParallelPlan:
    return ParallelPlan(
        global_batch=batch * num_devices,
        micro_batch=batch,
        tp=tp,
        sp=tp > 1,
        dp_shard=num_devices,
        sharding=sharding,  # type: ignore[arg-type]
        param_gather_overlap=False,
        recompute=recompute,  # type: ignore[arg-type]
    )


def _staged(
    layers: Sequence[_Layer], prepare: Callable[[_Layer], Any], run: Callable[[_Layer, Any], object]
) -> StagedRun:
    """Build calls of `run` on what `prepare` made of a layer before it prepared all the others."""
    waiting = deque((layer, prepare(layer)) for layer in layers[1:])
    turns = itertools.cycle(layers)

    def before() -> tuple[_Layer, Any]:
        layer = next(turns)
        waiting.append((layer, prepare(layer)))
        return waiting.popleft()

    return StagedRun(prepare=before, run=lambda prepared: run(*prepared))


def _pass(operation: Operation, shape: tuple[int, ...], factory: InputFactory, grids: Grids) -> Run | StagedRun:
    """Build a pass of a micro-batch in the middle of a step."""
    plan = _plan(shape[0], shape[_TP], recompute=_RECOMPUTED.get(operation, "none"))
    layers = [_Layer(plan, shape, factory, grids) for _ in range(_num_layers(shape, factory))]
    if operation in (LAYERS[0], MOE_LAYERS[0]):
        return in_turns([layer.forward for layer in layers])
    if operation in (LAYER_HALVES[0], MOE_LAYER_HALVES[0]):
        return _staged(layers, _Layer.forward, _Layer.input_gradient)
    if operation in (LAYER_HALVES[1], MOE_LAYER_HALVES[1]):
        return _staged(layers, lambda layer: layer.input_gradient(layer.forward()), _Layer.weight_gradients)
    return _staged(layers, _Layer.forward, _Layer.backward)


def _shared_layer(operation: Operation, shape: tuple[int, ...], factory: InputFactory, grids: Grids) -> ChainedRun:
    """Build both passes of a step's only micro-batch through a chain of layers, which gather and reduce in turn."""
    *sizes, num_devices, devices_per_domain = shape
    grids.check(num_devices, devices_per_domain, stride=sizes[_TP])
    plan = _plan(sizes[0], sizes[_TP], num_devices=num_devices, sharding=_SHARDED[operation])

    def make() -> Run:
        part, (x, gradient) = _chunk(plan, sizes, _NUM_LINKS, factory, grids), _ends(sizes, factory)
        announce(part, plan, is_last=True)

        def run() -> None:
            x.grad = None
            torch.autograd.backward(part(x), gradient)
            part.zero_grad()

        return run

    num_chains = math.ceil(_num_layers(sizes, factory) / _NUM_LINKS)
    return ChainedRun(run=in_turns([make() for _ in range(num_chains)]), num_links=_NUM_LINKS)


# -- ends -------------------------------------------------------------------------------------------------------------


def _end(operation: Operation, shape: tuple[int, ...], factory: InputFactory, grids: Grids) -> Run:
    """Build both passes of the embedding, or of the last norm, the head and the loss."""
    tokens, hidden_size, vocab_size, tp = shape
    plan, is_head = _plan(1, tp), operation == "head"
    model = ModelSpec(
        name=operation, num_layers=1, hidden_size=hidden_size, vocab_size=vocab_size, num_heads=1, ffn_size=1
    )
    ids = torch.randint(vocab_size, (1, tokens), device=factory.device)
    context = loss_parallel if tp > 1 else contextlib.nullcontext
    # An embedding alone returns a view, which is not written to here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

    def make() -> Run:
        with torch.device("meta"):
            part = Transformer(model, tokens, 0, 0, is_first=not is_head, is_last=is_head)
        spread(part, plan, grids.of(plan), dtype=factory.dtype, device=factory.device, seed=0)
        announce(part, plan, is_last=False)
        hidden, gradient = (factory.normal(1, tokens // tp, hidden_size, grad=True) for _ in range(2))

        def run() -> None:
            if not is_head:
                torch.autograd.backward(part(ids), gradient)
                return
            hidden.grad = None
            with context():
                torch.autograd.backward(loss_of(part(hidden), ids))

        return run

    count = num_sets(_TOUCHED_BYTES * hidden_size * vocab_size // tp, factory.device)
    return in_turns([make() for _ in range(count)])


# -- pipelines --------------------------------------------------------------------------------------------------------


class _Scale(nn.Module):
    """Stage that computes next to nothing."""

    def __init__(self, factory: InputFactory) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1, device=factory.device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _pipeline_actions(operation: Operation, shape: tuple[int, ...], factory: InputFactory, grids: Grids) -> Run:
    """Passes of stages that multiply one number: their time is what the runtime takes for each."""
    num_micro_batches, num_devices, devices_per_domain = shape
    grids.check(num_devices, devices_per_domain)
    plan = ParallelPlan(
        global_batch=num_micro_batches, pp=num_devices, sharding=Sharding.NONE, param_gather_overlap=False
    )
    grid = grids.of(plan)
    part = _Scale(factory)
    share(part, plan, grid, factory.dtype)
    step = passes([part], plan, grid, factory.device, lambda output, target: (output - target).sum())
    numbers = factory.normal(num_micro_batches, 1)
    return functools.partial(step, numbers, numbers)


UNITS: dict[Operation, Callable[[Operation, tuple[int, ...], InputFactory, Grids], Run | StagedRun]] = {
    **dict.fromkeys((*LAYERS, *LAYER_HALVES, *MOE_LAYERS, *MOE_LAYER_HALVES), _pass),
    **dict.fromkeys((*SHARED_LAYERS, *SHARED_MOE_LAYERS), _shared_layer),
    "embedding": _end,
    "head": _end,
    "pipeline_actions": _pipeline_actions,
}
