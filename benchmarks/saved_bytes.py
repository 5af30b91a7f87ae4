"""Bytes that torch keeps of a forward pass for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def saved_sizes(known: set[int], *, counts: Callable[[Any], bool] = lambda tensor: True) -> Iterator[dict[int, int]]:
    """Bytes of the storages that autograd saves, by address, of tensors that count and are at no `known` address."""
    import torch

    sizes: dict[int, int] = {}
    alive = []  # so that no address comes twice

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and counts(tensor):
            alive.append(storage)
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
