"""On what are kernels run: inputs drawn on one device in one type of numbers?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What needs something made anew for every call, such as a backward pass its graph: only `run` is timed."""

    before: Callable[[], Any]
    run: Callable[[Any], object]

    def __call__(self) -> object:
        """Both."""
        return self.run(self.before())


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Draws inputs on one device in one type of numbers."""

    device: torch.device
    dtype: str
    kernel: str = ""  # which of several ways, as `implementation` names them

    @property
    def number(self) -> torch.dtype:
        """torch's name of the type in which a kernel that has no fp8 version works."""
        return DTYPES.get(self.dtype, torch.bfloat16)

    def normal(self, *shape: int, grad: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor from N(0, 1)."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.number, requires_grad=grad)

    def eighth(self, *shape: int) -> Tensor:
        """A tensor from N(0, 1) in 8 bits."""
        return self.normal(*shape, dtype=torch.float32).to(_fp8_type())

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A place for results."""
        return torch.zeros(shape, device=self.device, dtype=dtype or self.number)

    def weight(self, outputs: int, inputs: int) -> Tensor:
        """A matrix that keeps the variance of what passes through it."""
        return (torch.randn(outputs, inputs, device=self.device) / math.sqrt(inputs)).to(self.number).requires_grad_()


def backward(out: Tensor, inputs: list[Tensor]) -> Run:
    """The backward pass of a graph that was run once, and is kept."""
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _fp8_type() -> torch.dtype:
    """8-bit numbers of 4 exponent bits, in the version that this device multiplies."""
    if torch.version.hip and "gfx94" in torch.cuda.get_device_properties().gcnArchName:
        return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn
