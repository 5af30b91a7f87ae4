"""Kernels of other libraries, or of a user's own file, that are timed in place of torch's.

They are named MODULE:NAME, or FILE.py:NAME, with :compiled behind it for what torch.compile makes of them.  What is
called, with numbers in the type of the plan:

- `gemm`: a class like `torch.nn.Linear`, made with (inputs, outputs, bias=False); the products of both passes are its.
- `norm`: a class like `torch.nn.RMSNorm`, made with (hidden size).
- `attention`, `latent_attention`: a function of (queries, keys, values, causal=True), each of batch, tokens, heads,
  width; of several results the first one is the output.  Within a window of w tokens, if it takes them, it also gets
  window_size=(w - 1, 0).
- `experts`: a class like Transformer Engine's `GroupedLinear`, made with (experts, inputs, outputs, bias=False), called
  with (inputs sorted by expert, [how many each expert has]); what is between the two products is torch's.
- `optimizer`: a class like `torch.optim.AdamW`, made with ([weights in fp32], lr=...).
- `linear`, `norm_linear`: a class like `torch.nn.Linear`, that of the latter with an RMSNorm before the matrix.
- all others but `ring_attention`: a class made with the numbers of the shape by their names, without those of the
  batch and of devices, but with `group` where several ranks run it (and `tokens` for an `overlapped_mlp`); called with
  tokens, for a layer of batch, tokens and width, and returning as many.  In 8 or 4 bits modules of Transformer Engine,
  and dense layers of Megatron-Core made of them, run under the recipe of that type; torchtitan's, and Megatron-Core's
  with experts, are refused; those of others are taken to quantise by themselves.
- `ring_attention`: a function like that of `attention`, of the part of the sequence that a rank has, with `group`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from autoplan.base.errors import InputError
from autoplan.base.units import cleaned
from autoplan.profiler.operations.adapted_kernels import ADAPTERS, BACKENDS, quantised
from autoplan.profiler.operations.inputs import DTYPES, InputFactory, Run, StagedRun, in_turns, num_sets
from autoplan.profiler.operations.kernels import TINY, expert_sizes, gated, optimizer_step
from autoplan.profiler.shipped_kernels import COMPILED
from autoplan.spec.operations import (
    ATTENTIONS,
    EXPERTS,
    GIVEN_KERNELS,
    GROUPED,
    NARROW_MODULES,
    PRODUCTS,
    QUANTISING,
    SHAPES,
    Operation,
)


@dataclass(frozen=True, slots=True)
class GivenKernel:
    """Kernel that a user named, with the name under which its records are kept."""

    name: str
    call: Callable[..., Any]
    is_compiled: bool = False
    backend: Callable[[], str] = str  # what the library says of the kernel that its last call ran; blank: nothing

    @property
    def takes_windows(self) -> bool:
        """Return whether it is attention that can be restricted to a window."""
        with suppress(ValueError):  # of what is not written in Python
            return "window_size" in signature(self.call).parameters
        return False

    def runs(self, operation: Operation, dtype: str) -> bool:
        """Return whether it is called for an operation in a type: in 8 and 4 bits those that quantise by themselves."""
        if operation in ("linear", "linear_backward"):
            return dtype in NARROW_MODULES  # in others it is a product, whose gradients are measured one by one
        return dtype in DTYPES or (dtype in NARROW_MODULES and operation in QUANTISING)

    def build(
        self, operation: Operation, shape: tuple[int, ...], factory: InputFactory, group: ProcessGroup | None = None
    ) -> Run | StagedRun:
        """Build a call on the next set of inputs, by the ranks of a group where several run it together."""
        if operation == "optimizer":
            return optimizer_step(factory, shape[0], self.call)
        call = self.call if group is None else functools.partial(self.call, group=group)
        make = _MAKERS.get(operation, _whole)
        first, touched_bytes = make(call, operation, shape, factory)
        count = num_sets(touched_bytes, factory.device)
        calls = [first, *(make(call, operation, shape, factory)[0] for _ in range(count - 1))]
        if self.is_compiled:
            calls = [replace(call, forward=torch.compile(call.forward)) for call in calls]
        if operation in GIVEN_KERNELS:  # the forward pass
            return in_turns([call.forward for call in calls])
        prepare = in_turns([lambda call=call: (call, call.forward()) for call in calls])  # type: ignore[misc]
        return StagedRun(prepare=prepare, run=lambda prepared: prepared[0].backward(prepared[1]))


def given_kernels(names: Mapping[Operation, str], layer_kernels: str = "") -> dict[Operation, GivenKernel]:
    """Import what was named, by the operations that it serves; names of whole layers begin with `layer_kernels`.

    Raises InputError where something cannot be imported.
    """
    found = {operation: _imported(name) for operation, name in names.items()}
    for operation in found.keys() & {"layer", "moe_layer"}:
        found[operation] = replace(found[operation], name=f"{layer_kernels}{found[operation].name}")
    return {served: kernel for operation, kernel in found.items() for served in GIVEN_KERNELS[operation]}


def check_runs(kernels: Mapping[Operation, GivenKernel], dtype: str, device: torch.device) -> None:
    """Raise InputError for kernels that do not run here in a type; those of several ranks are not tried."""
    for operation, kernel in kernels.items():
        if operation in GROUPED:
            continue
        try:
            kernel.build(operation, TINY[operation], InputFactory(device=device, dtype=dtype, kernel=kernel.name))()
            if device.type != "cpu":
                torch.cuda.synchronize(device)
        except Exception as error:
            words = cleaned(str(error)).strip() or type(error).__name__
            raise InputError(f"--kernel {kernel.name} does not run {operation} in {dtype} here: {words}") from None


def _imported(name: str) -> GivenKernel:
    named, is_compiled = name.removesuffix(COMPILED), name.endswith(COMPILED)
    place, _, attribute = named.rpartition(":")
    path = Path(place)
    try:
        if path.suffix == ".py":
            tag = hashlib.sha256(path.read_bytes()).hexdigest()[:8]  # a changed file is another kernel
            spec = importlib.util.spec_from_file_location(f"autoplan_kernel_{tag}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # as an import would; no file of a user's shadows another module
            spec.loader.exec_module(module)
            place = path.name
        else:
            module = importlib.import_module(place)
            tag = _version(place)
        call = getattr(module, attribute)
    except Exception as error:
        raise InputError(f"--kernel {name}: cannot be imported here: {cleaned(str(error))}") from None
    if not callable(call):
        raise InputError(f"--kernel {name}: is no function or class")
    words = (f"{place}:{attribute}", tag, "compiled" if is_compiled else "")
    return GivenKernel(
        name=" ".join(filter(None, words)),
        call=ADAPTERS[named](call) if named in ADAPTERS else call,
        is_compiled=is_compiled,
        backend=BACKENDS.get(named, str),
    )


def _version(module: str) -> str:
    top = module.partition(".")[0]
    try:
        return version(packages_distributions().get(top, [top])[0])
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class _Graph:
    """Forward pass on fixed inputs, and the backward pass by some of them."""

    forward: Callable[[], Tensor]
    wanted: Sequence[Tensor]
    gradient: Tensor
    total: Tensor | None = None  # fp32 buffer to which the gradient is added

    def backward(self, output: Tensor) -> None:
        """Run it."""
        gradients = torch.autograd.grad(output, self.wanted, self.gradient, allow_unused=True)
        if self.total is not None:
            self.total.add_(gradients[0])


def _module(call: Callable[..., Any], factory: InputFactory, *sizes: int, **words: Any) -> nn.Module:
    module = call(*sizes, **words)
    if not isinstance(module, nn.Module):
        raise InputError(f"makes a {type(module).__name__}, not a torch.nn.Module")
    module = module.to(device=factory.device)
    for weight in module.parameters():  # not buffers, which may be complex, or angles that need fp32
        weight.data = weight.data.to(factory.torch_dtype)
    return quantised(module, factory.dtype)


def _product(
    call: Callable[..., Any], operation: Operation, shape: tuple[int, ...], factory: InputFactory
) -> tuple[_Graph, int]:
    m, n, k = shape
    layer = _module(call, factory, k, n, bias=False)
    x = factory.normal(m, k, grad=operation != "wgrad")
    weights = list(layer.parameters())
    for weight in weights:
        weight.requires_grad_(operation != "dgrad")
    total = factory.zeros(n, k, dtype=torch.float32) if operation == "wgrad" else None
    wanted = weights[:1] if operation == "wgrad" else [x]
    graph = _Graph(lambda: layer(x), wanted, factory.normal(m, n), total)
    return graph, factory.torch_dtype.itemsize * (m * n + n * k + m * k)


def _linear(
    call: Callable[..., Any], operation: Operation, shape: tuple[int, ...], factory: InputFactory
) -> tuple[_Graph, int]:
    m, n, k = shape
    layer, x = _module(call, factory, k, n, bias=False), factory.normal(m, k, grad=True)
    graph = _Graph(lambda: layer(x), [x, *layer.parameters()], factory.normal(m, n))
    return graph, factory.torch_dtype.itemsize * (m * n + 2 * n * k + m * k)


def _norm(
    call: Callable[..., Any], operation: Operation, shape: tuple[int, ...], factory: InputFactory
) -> tuple[_Graph, int]:
    layer = _module(call, factory, shape[1])
    x = factory.normal(*shape, grad=True)
    graph = _Graph(lambda: layer(x), [x, *layer.parameters()], factory.normal(*shape))
    return graph, 2 * factory.torch_dtype.itemsize * shape[0] * shape[1]


def _attention(
    call: Callable[..., Any], operation: Operation, shape: tuple[int, ...], factory: InputFactory
) -> tuple[_Graph, int]:
    if operation in GIVEN_KERNELS["latent_attention"]:
        batch, seq_len, num_heads, key_width, value_width = shape
        num_kv_heads, window = num_heads, 0
    else:
        batch, seq_len, num_heads, num_kv_heads, key_width, window = shape
        value_width = key_width
    sizes = ((num_heads, key_width), (num_kv_heads, key_width), (num_kv_heads, value_width))
    q, k, v = (factory.normal(batch, seq_len, heads, width, grad=True) for heads, width in sizes)
    words: dict[str, Any] = {"window_size": (window - 1, 0)} if window else {}

    def forward() -> Tensor:
        output = call(q, k, v, causal=True, **words)
        result = output[0] if isinstance(output, tuple) else output
        assert isinstance(result, Tensor)
        return result

    touched_bytes = factory.torch_dtype.itemsize * (2 * q.numel() + k.numel() + v.numel())
    return _Graph(forward, [q, k, v], factory.normal(batch, seq_len, num_heads, value_width)), touched_bytes


def _ring(
    call: Callable[..., Any], operation: Operation, shape: tuple[int, ...], factory: InputFactory
) -> tuple[_Graph, int]:
    batch, seq_len, *heads, num_devices, _ = shape
    return _attention(call, "attention", (batch, seq_len // num_devices, *heads, 0), factory)


def _experts(
    call: Callable[..., Any], operation: Operation, shape: tuple[int, ...], factory: InputFactory
) -> tuple[_Graph, int]:
    tokens, hidden_size, *sizes = shape
    num_experts, expert_tokens, width = expert_sizes(tokens, *sizes)
    rows = [expert_tokens] * num_experts
    weights_bytes = 3 * num_experts * width * hidden_size
    touched_bytes = factory.torch_dtype.itemsize * (weights_bytes + sum(rows) * (2 * hidden_size + 3 * width))
    x = factory.normal(sum(rows), hidden_size, grad=True)
    if getattr(call, "is_whole", False):
        whole = _module(call, factory, num_experts, hidden_size, width)
        return _Graph(lambda: whole(x, rows), [x, *whole.parameters()], torch.randn_like(x)), touched_bytes
    up = _module(call, factory, num_experts, hidden_size, 2 * width, bias=False)
    down = _module(call, factory, num_experts, width, hidden_size, bias=False)
    graph = _Graph(
        lambda: down(gated(up(x, rows)), rows), [x, *up.parameters(), *down.parameters()], torch.randn_like(x)
    )
    return graph, touched_bytes


_OF_BATCH = ("tokens", "batch", "tp", "num_devices", "devices_per_domain")


def _whole(
    call: Callable[..., Any], operation: Operation, shape: tuple[int, ...], factory: InputFactory
) -> tuple[_Graph, int]:
    """Build a module made with the numbers of its shape by their names, and called with tokens."""
    sizes = dict(zip(SHAPES[operation], shape, strict=True))
    if sizes.get("tp", 1) > 1:
        raise InputError("layers that somebody names are timed on one device each")
    words = {name: size for name, size in sizes.items() if name not in _OF_BATCH}
    if operation in GIVEN_KERNELS["overlapped_mlp"]:  # has buffers for them; each rank has a slice
        words["tokens"] = sizes["tokens"]
        sizes["tokens"] //= sizes["num_devices"]
    module = _module(call, factory, **words)
    leading = [sizes[name] for name in ("tokens", "batch", "seq_len") if name in sizes]
    x = factory.normal(*leading, sizes["hidden_size"], grad=True)
    weights = list(module.parameters())
    graph = _Graph(lambda: module(x), [x, *weights], torch.randn_like(x))
    return graph, 2 * factory.torch_dtype.itemsize * (sum(weight.numel() for weight in weights) + x.numel())


_Maker = Callable[[Callable[..., Any], Operation, tuple[int, ...], InputFactory], tuple[_Graph, int]]
_MAKERS: dict[Operation, _Maker] = {
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys((*GIVEN_KERNELS["linear"], *GIVEN_KERNELS["norm_linear"]), _linear),
    **dict.fromkeys(GIVEN_KERNELS["ring_attention"], _ring),
    **dict.fromkeys(ATTENTIONS, _attention),
    **dict.fromkeys(EXPERTS, _experts),
    **dict.fromkeys(GIVEN_KERNELS["norm"], _norm),
}
