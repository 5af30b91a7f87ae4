"""A mapping whose values are made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lazily(Mapping[K, V]):
    """Values by key, each made when it is first asked for."""

    def __init__(self, makers: Mapping[K, Callable[[], V]]) -> None:
        self._makers = makers
        self._made: dict[K, V] = {}

    def __getitem__(self, key: K) -> V:
        if key not in self._made:
            self._made[key] = self._makers[key]()
        return self._made[key]

    def __contains__(self, key: object) -> bool:
        return key in self._makers

    def __iter__(self) -> Iterator[K]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    @property
    def made(self) -> Mapping[K, V]:
        """Return the values that were made, as they were asked for."""
        return self._made

    def but(self, key: K, value: V) -> Lazily[K, V]:
        """Return these with another value at a key."""
        return Lazily({**{old: partial(self.__getitem__, old) for old in self}, key: lambda: value})
