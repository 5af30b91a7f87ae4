"""Inputs of operations drawn on one device in one data type, and forms of repeated calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CPU_CACHE_BYTES = 32 * 2**20  # of a core's share of the last level, roughly
# Behind its L2, which is all that torch tells of: AMD CDNA 3 and CDNA 4 architecture white papers, Infinity Cache.
INFINITY_CACHE_BYTES = {"gfx942": 256 * 2**20, "gfx950": 256 * 2**20}
MAX_SETS = 8

Run = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRun:
    """Call that needs something prepared each time, such as a backward pass its graph: only `run` is timed."""

    prepare: Callable[[], Any]
    run: Callable[[Any], object]

    def __call__(self) -> object:
        """Prepare and run."""
        return self.run(self.prepare())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainedRun:
    """Call that runs `num_links` of a kind at once, as each hides behind the next one: a link's share is timed."""

    run: Run
    num_links: int

    def __call__(self) -> object:
        """Run all links."""
        return self.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideRun:
    """Call that runs something beside products, which take `products_s` alone."""

    run: Run
    products_s: float

    def __call__(self) -> object:
        """Run both, and wait for both."""
        return self.run()


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFactory:
    """Draws inputs on one device in one type of numbers."""

    device: torch.device
    dtype: str
    kernel: str = ""  # which of several ways, as `implementation` names them

    @property
    def torch_dtype(self) -> torch.dtype:
        """Data type in which a kernel that has no fp8 version works."""
        return DTYPES.get(self.dtype, torch.bfloat16)

    def normal(self, *shape: int, grad: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor from N(0, 1)."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.torch_dtype, requires_grad=grad)

    def fp8(self, *shape: int) -> Tensor:
        """A tensor from N(0, 1) in 8 bits."""
        return self.normal(*shape, dtype=torch.float32).to(_fp8_type())

    def narrow(self, rows: int, depth: int, *, is_weight: bool = False) -> tuple[Tensor, Tensor]:
        """A matrix in the factory's narrow type, numbers along the summed index together, and its scales, all 1.

        Scales lie as torch's `_scaled_mm` wants them: one; one for every 32 numbers (mxfp8) or 16 (nvfp4), in tiles of
        128 rows and 4 scales; one for every 128 numbers of a row, of a weight for 128 rows at once (fp8_block).
        Source: aten/src/ATen/native/cuda/ScaledBlas.cpp, get_scaling_type.
        """
        if self.dtype == "fp8":
            return self.fp8(rows, depth), torch.ones((), device=self.device)
        if self.dtype == "mxfp8":
            return self.fp8(rows, depth), self._scales(rows, depth // 32, torch.float8_e8m0fnu)
        if self.dtype == "nvfp4":
            pairs = torch.randint(0, 256, (rows, depth // 2), dtype=torch.uint8, device=self.device)
            return pairs.view(torch.float4_e2m1fn_x2), self._scales(rows, depth // 16, torch.float8_e4m3fn)
        blocks = math.ceil(depth / 128)
        if is_weight:
            return self.fp8(rows, depth), torch.ones(math.ceil(rows / 128), blocks, device=self.device)
        return self.fp8(rows, depth), torch.ones(blocks, rows, device=self.device).t()

    def _scales(self, rows: int, blocks: int, dtype: torch.dtype) -> Tensor:
        size = math.ceil(rows / 128) * 128 * math.ceil(blocks / 4) * 4
        return torch.ones(size, device=self.device).to(dtype)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A place for results."""
        return torch.zeros(shape, device=self.device, dtype=dtype or self.torch_dtype)

    def weight(self, outputs: int, inputs: int) -> Tensor:
        """A matrix that keeps the variance of what passes through it."""
        return (
            (torch.randn(outputs, inputs, device=self.device) / math.sqrt(inputs)).to(self.torch_dtype).requires_grad_()
        )


def num_sets(touched_bytes: int, device: torch.device, cache_bytes: int | None = None) -> int:
    """Number of input sets that exceed twice the last cache: each has left it by its turn; at most `MAX_SETS`."""
    if cache_bytes is None:
        cache_bytes = CPU_CACHE_BYTES
        if device.type != "cpu":
            properties = torch.cuda.get_device_properties(device)
            architecture = getattr(properties, "gcnArchName", "").partition(":")[0]
            cache_bytes = INFINITY_CACHE_BYTES.get(architecture, properties.L2_cache_size)
    return min(MAX_SETS, 1 + 2 * cache_bytes // touched_bytes)


def in_turns(runs: Sequence[Run]) -> Run:
    """Return a call that runs them in turn."""
    turns = itertools.cycle(runs)
    return lambda: next(turns)()


def _fp8_type() -> torch.dtype:
    """Type of 8-bit numbers with 4 exponent bits, in the version that this device multiplies."""
    if torch.version.hip and "gfx94" in torch.cuda.get_device_properties().gcnArchName:
        return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn
