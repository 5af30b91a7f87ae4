"""Tasks worth measuring for a model on this machine, best first.

A first point of every line (an operation with all sizes fixed except the one that grows with the batch) comes before a
second point of any line, since rates are interpolated along a line and constant beyond its ends; otherwise operations
with the larger share of a step come first (calls x time from the device's datasheet).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from autoplan.base.errors import InputError
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.kernels.measured_units import MeasuredLayer, measured_layer
from autoplan.cost.kernels.sizes import local_sizes
from autoplan.profiler.group_layouts import layouts
from autoplan.profiler.protocol import BESIDE, Hello, Task, rules_for
from autoplan.profiler.record import Mode
from autoplan.readers.device import load_device
from autoplan.spec.blocks import Block
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.operations import (
    COLLECTIVES,
    GIVEN_KERNELS,
    HOST_COPIES,
    LAYER_HALVES,
    LAYER_SIZES,
    LAYERS,
    MOE_LAYER_HALVES,
    MOE_LAYERS,
    PRODUCTS,
    RATE_TYPES,
    SHAPES,
    SHARED_LAYERS,
    SHARED_MOE_LAYERS,
    Operation,
)
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.timing import batch_index
from autoplan.topology.cluster import DeviceSpec

BUFFERS = {"cpu": tuple(2**power for power in range(10, 26, 3)), "cuda": tuple(2**power for power in range(16, 31, 2))}
BESIDE_LEAST_BYTES = 2**22  # smaller collectives end before a GEMM has started
ACTION_S = 5e-4  # host time of a pipeline action, by order of magnitude
OVERHEAD_S = 0.3  # overhead of a measurement: memory, first runs, messages
# Used for devices that are not shipped: H100 rates are good enough to order the operations.
_ANY_DEVICE = "h100-sxm"

TaskKey = tuple[str, tuple[int, ...], str, str, str]  # operation, shape, dtype, kernel, mode


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementScope:
    """Model, sizes and degrees to measure for."""

    model: ModelSpec
    framework: Framework
    seq_len: int
    tps: tuple[int, ...] = (1,)
    micro_batches: tuple[int, ...] = (1,)
    eps: tuple[int, ...] = (1,)
    modes: tuple[Mode, ...] = ("sustained",)
    only: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        if misfits := [tp for tp in self.tps if not self._divides(tp)]:
            raise InputError(
                f"tp {misfits[0]} must divide the {self.model.num_heads} heads and ffn_size {self.model.ffn_size} of "
                f"{self.model.name}: leave it out of --tp"
            )

    @property
    def is_latent(self) -> bool:
        """Return whether values are narrower than keys."""
        return self.model.qk_head_dim != self.model.v_head_dim

    def window_of(self, block: Block) -> int:
        """Return the number of tokens that a query of `block` attends to; 0 for all preceding tokens."""
        window = self.model.window or 0
        return window if block is Block.WINDOW_ATTENTION and window < self.seq_len else 0

    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that the model supports, among common powers of two."""
        return tuple(tp for tp in (1, 2, 4, 8, 16, 32, 64) if self._divides(tp))

    def _divides(self, tp: int) -> bool:
        return self.model.num_heads % tp == 0 and self.model.ffn_size % tp == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTask:
    """A task, its share of a step in seconds, and the expected time to measure it."""

    task: Task
    effect_s: float
    expected_s: float


def unmeasurable_parts(scope: MeasurementScope) -> list[str]:
    """Describe the parts of the model that no operation in `operations.SHAPES` measures."""
    blocks = {block for layer in scope.model.layers for block in layer}
    parts = []
    if scope.is_latent and scope.window_of(Block.WINDOW_ATTENTION) and Block.WINDOW_ATTENTION in blocks:
        parts.append("latent attention within a window")
    if Block.MAMBA in blocks:
        parts.append("state-space scans")
    return parts


def ranked_tasks(scope: MeasurementScope, hello: Hello, measured: Collection[TaskKey]) -> list[RankedTask]:
    """Return the tasks that are not measured yet for the ranks of `hello`, most valuable first."""
    device = load_device(hello.fingerprint.device) or load_device(_ANY_DEVICE)
    assert device is not None
    calls: Counter[Task] = Counter()
    measurable: set[Operation] = set()
    timed = set(scope.framework.timed_operations)
    for mode in scope.modes:
        for dtype in hello.dtypes:
            for call in (
                *_kernels(scope, hello),
                *_modules(scope, hello),
                *(_units(scope, hello) if scope.framework.is_trainer else _layers(scope)),
                *_collectives(scope, hello),
                *_host_copies(hello),
            ):
                operation = call.operation
                is_windowed = operation.startswith("attention") and call.shape[-1] > 0
                kernel = (hello.windowed if is_windowed else hello.kernels).get((operation, dtype))
                if kernel and operation in timed:
                    measurable.add(operation)
                if kernel and operation in timed and (not scope.only or operation in scope.only):
                    # FSDP2 casts the weights during the gather, so there is no separate copy in the compute type.
                    is_fp32 = operation == "optimizer" and scope.framework.memory.fsdp2_states
                    task = Task(
                        operation=operation,
                        shape=call.shape,
                        dtype="fp32" if is_fp32 else dtype,
                        kernel=kernel + call.suffix,
                        mode=mode,
                    )
                    calls[task] += call.num_calls
    if scope.only and not calls:
        raise InputError(
            f"--only {','.join(scope.only)}: nothing of plans for {scope.model.name} with {scope.framework.name} that "
            f"can be measured here; that can be {', '.join(name for name in SHAPES if name in measurable)}"
        )
    planned = []
    for task, count in calls.items():
        if task.key not in measured:
            call_s = reference_s(task, device)
            expected = rules_for(hello.device_type, task.mode).expected_s(call_s) + OVERHEAD_S
            planned.append(RankedTask(task=task, effect_s=count * call_s, expected_s=expected))
    return _ordered(planned, measured)


def _ordered(planned: Iterable[RankedTask], measured: Collection[TaskKey]) -> list[RankedTask]:
    """Return the tasks with the smallest point of every new line first, then by effect."""
    begun = {_line(*key) for key in measured}
    first: list[RankedTask] = []
    further: list[RankedTask] = []
    for ranked in sorted(planned, key=lambda item: (item.task.shape[batch_index(item.task.operation)], -item.effect_s)):
        line = _line(*ranked.task.key)
        (further if line in begun else first).append(ranked)
        begun.add(line)
    return [ranked for part in (first, further) for ranked in sorted(part, key=lambda ranked: -ranked.effect_s)]


def _line(operation: str, shape: tuple[int, ...], dtype: str, kernel: str, mode: str) -> tuple[object, ...]:
    at = batch_index(cast(Operation, operation))
    return (operation, shape[:at] + shape[at + 1 :], dtype, kernel, mode)


class _Call(NamedTuple):
    """Operation called in a step, and its calls per micro-batch."""

    operation: Operation
    shape: tuple[int, ...]
    num_calls: int
    suffix: str = ""  # suffix of the kernel's name


def _kernels(scope: MeasurementScope, hello: Hello) -> Iterator[_Call]:
    """Yield calls for computation on one device."""
    model, seq_len = scope.model, scope.seq_len
    shapes = block_shapes(model)
    counts = Counter(block for layer in model.layers for block in layer)
    for tp in scope.tps:
        batch = PlanBatch.of([ParallelPlan(global_batch=1, tp=tp)], model.num_layers)
        multiple = scope.framework.memory.pads_vocab_to * tp
        columns = math.ceil(model.vocab_size / multiple) * multiple // tp
        heads, kv_heads = model.num_heads // tp, max(model.kv_heads // tp, 1)
        for micro_batch in scope.micro_batches:
            tokens = micro_batch * seq_len
            part = tokens // tp if scope.framework.network.sequence_parallel else tokens  # between the split matrices
            for block, count in counts.items():
                for linear in shapes[block].linears:
                    if linear.is_expert:
                        continue
                    inputs, outputs = (int(sizes[0]) for sizes in local_sizes(linear, batch))
                    m = part if linear.split == "replicated" else tokens
                    for operation in PRODUCTS:
                        yield _Call(operation, (m, outputs, inputs), count * linear.copies)
                yield _Call("norm", (part, model.hidden_size), count * model.norms_per_block)
                yield _Call("norm_backward", (part, model.hidden_size), count * model.norms_per_block)
                if block in (Block.ATTENTION, Block.WINDOW_ATTENTION):
                    window = scope.window_of(block)
                    if not scope.is_latent:
                        core = (micro_batch, seq_len, heads, kv_heads, model.qk_head_dim, window)
                        yield _Call("attention", core, count)
                        yield _Call("attention_backward", core, count)
                    elif not window:
                        latent = (micro_batch, seq_len, heads, model.qk_head_dim, model.v_head_dim)
                        yield _Call("latent_attention", latent, count)
                        yield _Call("latent_attention_backward", latent, count)
                    if model.position_embedding == "rope":
                        yield _Call("rope", (tokens, heads + kv_heads, model.qk_head_dim), count)
                if block is Block.MLP and model.gated_mlp:
                    yield _Call("swiglu", (tokens, model.ffn_size // tp), count)
                    yield _Call("swiglu_backward", (tokens, model.ffn_size // tp), count)
                if block is Block.MOE and model.moe and model.gated_mlp:
                    for ep in scope.eps:
                        moe = model.moe
                        inner = moe.latent_size or model.hidden_size
                        experts = (inner, moe.expert_ffn_size, moe.experts_per_token, moe.num_experts, 1, ep)
                        yield _Call("experts", (part * ep, *experts), count)
                        yield _Call("experts_backward", (part * ep, *experts), count)
            yield _Call("cross_entropy", (tokens, columns), 1)
    # Two sizes determine its rate and its start-up time; 16 bytes per parameter are stored.
    max_parameters = max(min(count_parameters(model) // 2, hello.fingerprint.memory_bytes // 16 // 16), 8)
    for size in (max_parameters // 8, max_parameters):
        yield _Call("optimizer", (size,), 1)


def _modules(scope: MeasurementScope, hello: Hello) -> Iterator[_Call]:
    """Yield calls of modules that join several kernels, for those that somebody names."""
    model, seq_len, moe = scope.model, scope.seq_len, scope.model.moe
    shapes, counts = block_shapes(model), Counter(block for layer in model.layers for block in layer)
    is_normed = model.norm == "rmsnorm" and model.norms_per_block == 1
    groups = sorted(
        {(at.num_devices, at.devices_per_node) for at in layouts(hello.num_domains, hello.ranks_per_domain)}
    )

    def both(operation: Operation, shape: tuple[int, ...], count: int) -> Iterator[_Call]:
        return (_Call(served, shape, count) for served in GIVEN_KERNELS[operation])

    for tp, micro_batch in itertools.product(scope.tps, scope.micro_batches):
        batch, tokens = PlanBatch.of([ParallelPlan(global_batch=1, tp=tp)], model.num_layers), micro_batch * seq_len
        part = tokens // tp if scope.framework.network.sequence_parallel else tokens
        for block, count in counts.items():
            for linear in shapes[block].linears:
                if linear.is_expert:
                    continue
                inputs, outputs = (int(sizes[0]) for sizes in local_sizes(linear, batch))
                rows = part if linear.split == "replicated" else tokens
                yield from both("linear", (rows, outputs, inputs), count * linear.copies)
                if linear.name in ("qkv", "fc1") and is_normed and part == tokens:
                    yield from both("norm_linear", (rows, outputs, inputs), count)
            if block is Block.MLP and is_normed and model.gated_mlp:
                mlp = (tokens, model.hidden_size, model.ffn_size)
                if tp == 1:
                    yield from both("mlp", mlp, count)
                for group in groups:
                    if group[0] == tp:
                        yield from both("overlapped_mlp", (*mlp, *group), count)
            if block is Block.MOE and moe:
                routing = (part, model.hidden_size, moe.num_experts, moe.experts_per_token)
                yield from both("routing", routing, count)
                for group in groups:
                    if group[0] in scope.eps:
                        yield from both("exchange", (*routing, *group), count)
            if block is Block.ATTENTION and not scope.is_latent:
                heads = (model.num_heads // tp, max(model.kv_heads // tp, 1), model.qk_head_dim)
                for group in groups:
                    if seq_len % (2 * group[0]) == 0:
                        yield from both("ring_attention", (micro_batch, seq_len, *heads, *group), count)


def _layers(scope: MeasurementScope) -> Iterator[_Call]:
    """Yield calls of whole layers of a framework, on one device, for those that somebody names."""
    if kind := measured_layer(scope.model):
        for micro_batch, operation in itertools.product(scope.micro_batches, kind.passes[:2]):
            sizes = (*kind.sizes(scope.model), 1, *kind.expert_sizes(scope.model))
            yield _Call(operation, (micro_batch, scope.seq_len, *sizes), scope.model.layers.count(kind.blocks))


def _units(scope: MeasurementScope, hello: Hello) -> Iterator[_Call]:
    """Yield calls of units of the built-in trainer that fit into the ranks' memory."""
    model, seq_len, ranks_per_node = scope.model, scope.seq_len, hello.ranks_per_node
    kind = measured_layer(model)
    for tp, micro_batch in itertools.product(scope.tps, scope.micro_batches):
        if ranks_per_node % tp or seq_len % tp or model.vocab_size % tp:
            continue
        if kind:
            layer = (micro_batch, seq_len, *kind.sizes(model), tp, *kind.expert_sizes(model))
            yield from _layer_units(kind, layer, model.layers.count(kind.blocks), hello)
        ends: tuple[Operation, ...] = ("embedding", "head")
        for end in ends:
            yield _Call(end, (micro_batch * seq_len, model.hidden_size, model.vocab_size, tp), 1)
    if ranks_per_node > 1:
        # The difference is the time of an action, the rest that of the step.
        for num_micro_batches in (ranks_per_node, 4 * ranks_per_node):
            yield _Call("pipeline_actions", (num_micro_batches, ranks_per_node, ranks_per_node), 1)


def _layer_units(kind: MeasuredLayer, layer: tuple[int, ...], num_layers: int, hello: Hello) -> Iterator[_Call]:
    """Yield calls of the units of one kind of layer, whose shape is `layer`."""
    tp = layer[LAYER_SIZES.index("tp")]
    for operation in (*kind.passes, *(kind.halves if hello.ranks_per_node > tp else ())):
        yield _Call(operation, layer, num_layers)
    for replicas in _replicas(tp, hello):
        for operation in kind.shared if replicas > 1 else kind.shared[:1]:
            yield _Call(operation, (*layer, replicas, min(hello.ranks_per_node // tp, replicas)), num_layers)


def _replicas(tp: int, hello: Hello) -> list[int]:
    """Return numbers of ranks that may shard the states of `tp` ranks: 1, 2, 4 ... in a node, and all."""
    ranks_per_part = hello.ranks_per_node // tp
    return sorted(
        {size for size in (2**power for power in range(11)) if ranks_per_part % size == 0} | {len(hello.hosts) // tp}
    )


def _collectives(scope: MeasurementScope, hello: Hello) -> Iterator[_Call]:
    """Yield calls for the communication of groups in every layout: each a few times per layer."""
    group_layouts = layouts(hello.num_domains, hello.ranks_per_domain)
    for layout in group_layouts:
        is_widest = not any(
            larger.num_devices == layout.num_devices
            and larger.devices_per_node == layout.devices_per_node
            and larger.num_groups > layout.num_groups
            for larger in group_layouts
        )
        for buffer_bytes in BUFFERS[hello.device_type]:
            for operation in sorted(COLLECTIVES):
                if operation == "send_recv" and layout.num_devices != 2:
                    continue
                shape, count = layout.shape(buffer_bytes), scope.model.num_layers
                yield _Call(operation, shape, count)
                reduces = operation in ("all_gather", "all_reduce", "reduce_scatter")
                if reduces and is_widest and buffer_bytes >= BESIDE_LEAST_BYTES:
                    yield _Call(operation, shape, count, BESIDE)


def _host_copies(hello: Hello) -> Iterator[_Call]:
    """Yield copies between devices and their host, for states and activations that plans keep there."""
    if hello.device_type != "cpu":  # which is its own host
        yield from (_Call(operation, (size,), 1) for size in BUFFERS[hello.device_type] for operation in HOST_COPIES)


def reference_s(task: Task, device: DeviceSpec) -> float:
    """Return the seconds of a call at datasheet rates: good enough only for order and budget."""
    flops, numbers = _work(task.operation, task.shape)
    rates = device.peak_flops_per_s
    dtype = RATE_TYPES.get(task.dtype, task.dtype)
    peak = rates.get(dtype, rates.get("bf16", rates.get("fp16", 1e12)))  # type: ignore[call-overload]
    width = {"fp32": 4, "fp8": 1, "nvfp4": 0.5}.get(dtype, 2)
    if task.operation in COLLECTIVES:
        # Links are about a twentieth as fast as memory, from NVLink to gloo on loopback.
        return 2e-5 + task.shape[3] / (device.memory_bandwidth_bytes_per_s / 20)
    if task.operation in HOST_COPIES:
        return 2e-5 + task.shape[0] / device.host_link_bytes_per_s
    if task.operation == "pipeline_actions":
        return ACTION_S * 2 * task.shape[0]
    moved_s = numbers * width / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    return max(flops / (peak * device.gemm_efficiency), moved_s) + 5e-6


def _work(operation: Operation, shape: Sequence[int]) -> tuple[float, float]:
    """Return (floating-point operations, numbers read and written) of one call, roughly (`modelling` A2, C5)."""
    if operation in PRODUCTS or "linear" in operation:
        m, n, k = shape
        passes = 2.0 if operation.endswith("backward") else 1.0
        return passes * 2.0 * m * n * k, passes * (m * n + n * k + m * k)
    if "mlp" in operation:
        tokens, hidden_size, ffn_size, *group = shape
        passes = 2.0 if operation.endswith("backward") else 1.0
        return passes * 6.0 * tokens * hidden_size * ffn_size / (group[0] if group else 1), 0.0
    if operation.startswith("ring_attention"):
        *sizes, num_devices, _ = shape
        flops, numbers = _work(cast(Operation, operation.removeprefix("ring_")), (*sizes, 0))
        return flops / num_devices, numbers
    if operation.startswith(("routing", "exchange")):
        tokens, hidden_size, _, per_token, *_ = shape
        return 0.0, 20.0 * tokens * per_token * hidden_size
    if operation.startswith("attention"):
        batch, seq_len, heads, kv_heads, head_dim, window = shape
        passes = 2.5 if operation.endswith("backward") else 1.0
        attended = 2 * window if 0 < window < seq_len / 2 else seq_len
        numbers = 2.0 * batch * seq_len * (heads + kv_heads) * head_dim
        return passes * 2.0 * batch * seq_len * attended * heads * head_dim, numbers
    if operation.startswith("latent_attention"):
        batch, seq_len, heads, qk_head_dim, v_head_dim = shape
        passes, widths = 2.5 if operation.endswith("backward") else 1.0, qk_head_dim + v_head_dim
        return passes * batch * seq_len**2 * heads * widths, 2.0 * batch * seq_len * heads * widths
    if operation.startswith("experts"):
        tokens, hidden_size, ffn_size, per_token, _, etp, ep = shape
        passes = 2.0 if operation.endswith("backward") else 1.0
        return passes * 6.0 * tokens * per_token / ep * hidden_size * ffn_size / etp, 0.0
    if "layer" in operation:
        batch, seq_len, hidden_size, ffn_size, heads, kv_heads, head_dim, cut, *_ = shape
        tokens = batch * seq_len
        per_token = dict(zip(SHAPES[operation], shape, strict=True)).get("experts_per_token", 1)
        weights = hidden_size * ((2 * heads + 2 * kv_heads) * head_dim + 3 * ffn_size * per_token)
        passes = 1.0 if operation in (LAYERS[0], *LAYER_HALVES, MOE_LAYERS[0], *MOE_LAYER_HALVES) else 2.0
        if operation in (*SHARED_LAYERS, LAYERS[-1], *SHARED_MOE_LAYERS, MOE_LAYERS[-1]):
            passes = 3.0
        flops = 2.0 * tokens * weights + 2.0 * tokens * seq_len * heads * head_dim
        return passes * flops / cut, passes * 20.0 * tokens * hidden_size
    if operation == "head":
        tokens, hidden_size, vocab_size, cut = shape
        return 6.0 * tokens * hidden_size * vocab_size / cut, 8.0 * tokens * vocab_size / cut
    if operation == "embedding":
        tokens, hidden_size, vocab_size, cut = shape
        return 0.0, 4.0 * (tokens + vocab_size / cut) * hidden_size
    moved = {"norm": 2.0, "norm_backward": 4.0, "rope": 4.0, "swiglu": 3.0, "swiglu_backward": 5.0, "optimizer": 15.0}
    return 0.0, moved.get(operation, 10.0) * math.prod(shape)
