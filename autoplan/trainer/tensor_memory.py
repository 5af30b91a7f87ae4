"""Peak bytes of a rank's tensors on the CPU, which has no allocator that reports them.

Storage allocated inside C++ code (staging buffers of gloo, workspaces of products) is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageTracker(TorchDispatchMode):
    """Context that counts the storages created by operations, and those that FSDP frees and reallocates by resizing."""

    live_bytes: int
    peak_bytes: int

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes, self.peak_bytes = 0, 0
        self._bytes: dict[int, int] = {}  # bytes by the address of a storage's handle
        self._resize = torch.UntypedStorage.resize_

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count its results; operations on DTensors are counted through their local parts."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        results = func(*args, **(kwargs or {}))
        for result in tree_iter(results):
            if isinstance(result, Tensor):
                self.see(result)
        return results

    def see(self, tensor: Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if tensor.device.type == "meta":  # no data
            return
        storage = tensor.untyped_storage()
        handle = storage._cdata
        if handle not in self._bytes:
            self._bytes[handle] = 0
            weakref.finalize(storage, self._gone, handle)
        self._count(handle, storage.nbytes())

    def _count(self, handle: int, num_bytes: int) -> None:
        self.live_bytes += num_bytes - self._bytes[handle]
        self._bytes[handle] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, handle: int) -> None:
        self.live_bytes -= self._bytes.pop(handle)

    def forget_peak(self) -> None:
        """Reset the peak to the live bytes."""
        self.peak_bytes = self.live_bytes

    def __enter__(self) -> Self:
        original, tracker = self._resize, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in tracker._bytes:
                tracker._count(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]
