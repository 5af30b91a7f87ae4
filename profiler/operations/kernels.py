"""Kernels of training that can be run and timed.

Every operation of `operations.SHAPES` that needs one device only.  Inputs are drawn from N(0, 1), since zeros draw less
power; sets of them take turns, so that what a kernel reads has left the cache as it has in a model.  Backward passes
run alone, on a graph that is kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from torch import Tensor

from autoplan.profiler.operations import attention
from autoplan.profiler.operations.inputs import InputFactory, Run, in_turns, num_sets
from autoplan.spec.operations import (
    EXPERTS,
    HOST_COPIES,
    LAYERS,
    MOE_LAYERS,
    NARROW_MODULES,
    NARROW_PRODUCTS,
    PRODUCTS,
    Operation,
)
from autoplan.trainer.transformer import rotated

_ROPE_BASE = 10_000.0
# Rows of 16 bits to which grouped products want each expert's share of the tokens: where it is none, some versions of
# torch stop the device (aten/src/ATen/native/cuda/GroupMMCommon.cuh), so frameworks pad.
_ROWS = 8


def implementation(operation: Operation, dtype: str, device: torch.device) -> str:
    """Name of the implementation of `operation` here, which a record of it keeps.  Blank where it cannot run."""
    if dtype in NARROW_MODULES and dtype not in NARROW_PRODUCTS:
        return ""  # how an operand was quantised makes no difference to a product
    if operation in ("gemm", "dgrad"):
        return _first_working(operation, dtype, device, ["scaled_mm"] if dtype in NARROW_PRODUCTS else ["mm"])
    if operation == "wgrad":
        wide = ["addmm"] if dtype == "fp32" else ["addmm fp32", "mm + add"]
        ways = ["scaled_mm + add"] if dtype in NARROW_PRODUCTS else wide
        return _first_working(operation, dtype, device, ways)
    if dtype in NARROW_PRODUCTS:
        return ""  # torch itself has no other kernels in 8 or 4 bits
    if operation in EXPERTS:
        return _first_working(operation, dtype, device, ["grouped_mm", "mm each"])
    if operation in ("attention", "attention_backward"):
        return _first_working(operation, dtype, device, ["sdpa flash", "sdpa"])
    if operation in ("latent_attention", "latent_attention_backward"):
        # torch's own flash kernels want keys and values of one width.
        return _first_working(operation, dtype, device, ["sdpa cudnn", "sdpa"])
    return _first_working(operation, dtype, device, ["torch"])


def implementation_windowed(operation: Operation, dtype: str, device: torch.device) -> str:
    """Name the `implementation` of attention within a window; blank for other operations."""
    if operation not in ("attention", "attention_backward") or dtype in NARROW_MODULES:
        return ""
    # The flash kernel leaves out what no query of a tile sees; through `sdpa` a window is a mask, and all is computed.
    return _first_working(operation, dtype, device, ["varlen flash", "sdpa mask"], shape=(1, 128, 4, 2, 64, 32))


_WIDTHS = {"fp8": 1.0, "mxfp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5}  # bytes of a number

# The smallest shapes that every way of an operation accepts: low-precision GEMMs have scales for tiles of 128.
TINY: dict[Operation, tuple[int, ...]] = {
    **dict.fromkeys(PRODUCTS, (128, 128, 128)),
    **dict.fromkeys(("attention", "attention_backward"), (1, 128, 4, 2, 64, 0)),
    **dict.fromkeys(("latent_attention", "latent_attention_backward"), (1, 128, 4, 192, 128)),
    **dict.fromkeys(EXPERTS, (64, 32, 32, 1, 4, 1, 1)),
    **dict.fromkeys(("norm", "norm_backward", "swiglu", "swiglu_backward", "cross_entropy"), (32, 32)),
    "rope": (32, 2, 64),
    "optimizer": (64,),
    **dict.fromkeys(("linear", "linear_backward", "norm_linear", "norm_linear_backward"), (128, 128, 128)),
    **dict.fromkeys(("mlp", "mlp_backward"), (128, 128, 256)),
    **dict.fromkeys(("routing", "routing_backward"), (64, 32, 4, 2)),
    **dict.fromkeys(LAYERS[:2], (1, 128, 128, 256, 4, 2, 32, 1)),
    **dict.fromkeys(MOE_LAYERS[:2], (1, 128, 128, 256, 4, 2, 32, 1, 4, 2)),
    **dict.fromkeys(HOST_COPIES, (64,)),
}


def _first_working(
    operation: Operation,
    dtype: str,
    device: torch.device,
    ways: Iterable[str],
    *,
    shape: tuple[int, ...] | None = None,
) -> str:
    """The first of `ways` that this device and this torch can run: tried, not looked up."""
    for kernel in ways:
        with suppress(RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError, ImportError):
            build(
                operation,
                shape or TINY[operation],
                InputFactory(device=device, dtype=dtype, kernel=kernel),
                cache_bytes=0,
            )()
            if device.type != "cpu":
                torch.cuda.synchronize(device)
            return kernel
    return ""


def build(
    operation: Operation, shape: tuple[int, ...], factory: InputFactory, *, cache_bytes: int | None = None
) -> Run:
    """Take memory for `operation` of `shape`, and return a call on the next set of inputs; `num_sets` has the cache."""
    touched = _input_bytes(operation, shape, factory)
    count = num_sets(touched, factory.device, cache_bytes) if touched else 1
    return in_turns([_BUILDERS[operation](factory, *shape) for _ in range(count)])


def _input_bytes(operation: Operation, shape: tuple[int, ...], factory: InputFactory) -> int:
    """Roughly what one call touches; 0 of experts, whose weights and activations push each other out anyway."""
    width = _WIDTHS.get(factory.dtype, factory.torch_dtype.itemsize)
    if operation in PRODUCTS:
        m, n, k = shape
        return int(width * (m * n + n * k + m * k))
    if operation in ("attention", "attention_backward"):
        batch, seq_len, num_heads, num_kv_heads, head_dim, _ = shape
        return int(2 * width * batch * seq_len * (num_heads + num_kv_heads) * head_dim)
    if operation in ("latent_attention", "latent_attention_backward"):
        batch, seq_len, num_heads, qk_head_dim, v_head_dim = shape
        return int(2 * width * batch * seq_len * num_heads * (qk_head_dim + v_head_dim))
    if operation in EXPERTS:
        return 0
    return int(2 * width * math.prod(shape))


def _narrow_product(
    m: int, n: int, k: int, factory: InputFactory, *, is_forward: bool, has_weight: bool = True
) -> Callable[[], Tensor]:
    """Build x w^T in 8 or 4 bits: both operands along the summed index, which is what the kernels want.

    With one scale a tensor, sums are kept short in the forward pass alone, as frameworks do (Transformer Engine,
    `use_split_accumulator`).  Where `has_weight` is false both are activations, as for the gradient of a weight.
    """
    (x, x_scale), (w, w_scale) = factory.narrow(m, k), factory.narrow(n, k, is_weight=has_weight)
    fast = is_forward and factory.dtype == "fp8"
    turned = w_scale.t() if w_scale.dim() == 2 else w_scale
    return lambda: torch._scaled_mm(
        x, w.t(), scale_a=x_scale, scale_b=turned, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


Compute = Callable[..., tuple[Callable[..., Tensor], list[Tensor]]]  # builds (a function, its inputs) of a shape


def _forward(compute: Compute) -> Callable[..., Run]:
    """Return a builder of forward passes, which save what their backward passes need, as in training."""

    def build_pass(factory: InputFactory, *shape: int) -> Run:
        function, inputs = compute(factory, *shape)
        return lambda: function(*inputs)

    return build_pass


def _backward(compute: Compute) -> Callable[..., Run]:
    """Return a builder of backward passes of a graph that was run once, and is kept."""

    def build_pass(factory: InputFactory, *shape: int) -> Run:
        function, inputs = compute(factory, *shape)
        out = function(*inputs)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    return build_pass


def _gemm(factory: InputFactory, m: int, n: int, k: int) -> Run:
    """Build y = x w^T of m tokens, k inputs and n outputs."""
    if factory.kernel == "scaled_mm":
        return _narrow_product(m, n, k, factory, is_forward=True)
    inputs, weight, out = factory.normal(m, k), factory.normal(n, k), factory.zeros(m, n)
    return lambda: torch.mm(inputs, weight.t(), out=out)


def _dgrad(factory: InputFactory, m: int, n: int, k: int) -> Run:
    if factory.kernel == "scaled_mm":
        return _narrow_product(m, k, n, factory, is_forward=False)
    dy, weight, out = factory.normal(m, n), factory.normal(n, k), factory.zeros(m, k)
    return lambda: torch.mm(dy, weight, out=out)


def _wgrad(factory: InputFactory, m: int, n: int, k: int) -> Run:
    """Build dw += dy^T x, added to an fp32 buffer."""
    total = factory.zeros(n, k, dtype=torch.float32)
    if factory.kernel == "scaled_mm + add":
        product = _narrow_product(n, k, m, factory, is_forward=False, has_weight=False)
        return lambda: total.add_(product())
    dy, x = factory.normal(m, n), factory.normal(m, k)
    if factory.kernel == "addmm":  # everything in one type
        return lambda: torch.addmm(total, dy.t(), x, out=total)
    if factory.kernel == "addmm fp32":  # narrow inputs, added in fp32 by the product itself
        return lambda: torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)
    return lambda: total.add_(dy.t() @ x)


def _experts(
    factory: InputFactory,
    tokens: int,
    hidden_size: int,
    ffn_size: int,
    experts_per_token: int,
    num_experts: int,
    etp: int,
    ep: int,
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Build experts with the same number of tokens each, sorted by expert as after the exchange."""
    local, expert_tokens, width = expert_sizes(tokens, ffn_size, experts_per_token, num_experts, etp, ep)
    up = torch.stack([factory.weight(hidden_size, 2 * width).detach() for _ in range(local)]).requires_grad_()
    down = torch.stack([factory.weight(width, hidden_size).detach() for _ in range(local)]).requires_grad_()
    sizes = [expert_tokens] * local
    ends = torch.tensor(sizes, device=factory.device).cumsum(0).to(torch.int32)

    def grouped(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.grouped_mm(gated(F.grouped_mm(x, up, offs=ends)), down, offs=ends)

    def each(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        parts = zip(torch.split(x, sizes), up, down, strict=True)
        return torch.cat([gated(part @ into) @ back for part, into, back in parts])

    x = factory.normal(local * expert_tokens, hidden_size, grad=True)
    return grouped if factory.kernel == "grouped_mm" else each, [x, up, down]


def expert_sizes(
    tokens: int, ffn_size: int, experts_per_token: int, num_experts: int, etp: int, ep: int
) -> tuple[int, int, int]:
    """Return (experts, tokens of each, width) on one rank."""
    expert_tokens = max(round(tokens * experts_per_token / num_experts / _ROWS), 1) * _ROWS
    return num_experts // ep, expert_tokens, ffn_size // etp


def gated(x: Tensor) -> Tensor:
    """Return the products of the halves, the first through SiLU."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _norm(
    factory: InputFactory, tokens: int, hidden_size: int
) -> tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor]]:
    x, weight = factory.normal(tokens, hidden_size, grad=True), factory.normal(hidden_size, grad=True)
    return lambda x, weight: F.rms_norm(x, (hidden_size,), weight), [x, weight]


def _swiglu(factory: InputFactory, tokens: int, ffn_size: int) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    return gated, [factory.normal(tokens, 2 * ffn_size, grad=True)]


def _angles(factory: InputFactory, tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines) of rotary positions, one row a token."""
    rates = _ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=factory.device) / head_dim)
    angles = torch.outer(torch.arange(tokens, device=factory.device), rates).repeat(1, 2)
    return angles.cos().to(factory.torch_dtype)[:, None], angles.sin().to(factory.torch_dtype)[:, None]


def _rope(factory: InputFactory, tokens: int, num_heads: int, head_dim: int) -> Run:
    x, (cos, sin) = factory.normal(tokens, num_heads, head_dim, grad=True), _angles(factory, tokens, head_dim)
    gradient = torch.randn_like(x)
    return lambda: torch.autograd.grad(rotated(x, cos, sin), x, gradient)


def _cross_entropy(factory: InputFactory, tokens: int, vocab_size: int) -> Run:
    logits = factory.normal(tokens, vocab_size, grad=True)
    targets = torch.randint(vocab_size, (tokens,), device=factory.device)
    return lambda: torch.autograd.grad(F.cross_entropy(logits.float(), targets), logits)


def _optimizer(factory: InputFactory, num_parameters: int) -> Run:
    return optimizer_step(factory, num_parameters, functools.partial(torch.optim.AdamW, fused=True))


def optimizer_step(factory: InputFactory, num_parameters: int, make: Callable[..., Any]) -> Run:
    """Build a step of the optimizer that is made of fp32 weights, and the copy in the type that computes."""
    weights = factory.normal(num_parameters, grad=True, dtype=torch.float32)
    weights.grad = factory.normal(num_parameters, dtype=torch.float32)
    optimizer = make([weights], lr=1e-4)
    working = factory.zeros(num_parameters)
    if working.dtype == torch.float32:
        return lambda: optimizer.step()

    def step() -> None:
        optimizer.step()
        with torch.no_grad():
            working.copy_(weights)

    return step


def _host_copy(factory: InputFactory, num_bytes: int, *, to_host: bool) -> Run:
    near = factory.zeros(num_bytes, dtype=torch.uint8)
    far = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=factory.device.type != "cpu")
    source, target = (near, far) if to_host else (far, near)
    return lambda: target.copy_(source, non_blocking=True)


_BUILDERS: dict[Operation, Callable[..., Run]] = {
    "gemm": _gemm,
    "dgrad": _dgrad,
    "wgrad": _wgrad,
    "attention": _forward(attention.attention),
    "attention_backward": _backward(attention.attention),
    "latent_attention": _forward(attention.latent_attention),
    "latent_attention_backward": _backward(attention.latent_attention),
    "experts": _forward(_experts),
    "experts_backward": _backward(_experts),
    "norm": _forward(_norm),
    "norm_backward": _backward(_norm),
    "rope": _rope,
    "swiglu": _forward(_swiglu),
    "swiglu_backward": _backward(_swiglu),
    "cross_entropy": _cross_entropy,
    "optimizer": _optimizer,
    "copy_to_host": functools.partial(_host_copy, to_host=True),
    "copy_from_host": functools.partial(_host_copy, to_host=False),
}
KERNELS: frozenset[Operation] = frozenset(_BUILDERS)
