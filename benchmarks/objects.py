"""Objects of one size that a store is timed with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol

from hicache_async import StopToken
from hicache_async.abc import Store, SupportsDelete

from .harness import Param
from .raw_files import buffers


class ClearableStore(Store, SupportsDelete, Protocol):
    """A store that can delete."""


class Objects:
    """Objects of one size for one call of the store.

    Attributes:
        keys: under which they were written last.
    """

    def __init__(self, store: ClearableStore, size: int, num_objects: int) -> None:
        self.store = store
        self.size = size
        self.pages = buffers(num_objects, size)
        self.keys: list[str] = []
        self._numbers = count()

    async def write(self) -> None:
        """Write them under names that were never used before."""
        self.keys = [f"{next(self._numbers):064x}" for _ in self.pages]
        assert await self.store.write(self.keys, self.pages) == len(self.pages)

    async def read(self) -> None:
        """Read and verify them."""
        assert await self.store.read(self.keys, self.pages, StopToken()) == len(self.pages)

    async def look_up(self, keys: Sequence[str]) -> None:
        """Ask for ``keys`` and find all."""
        assert await self.store.count_prefix(keys) == len(keys)

    def new_keys(self) -> list[str]:
        """Return ``keys`` as strings that nobody has hashed yet, as a request's are."""
        return [key[:-1] + key[-1:] for key in self.keys]

    async def clear(self) -> None:
        """Delete them."""
        await self.store.delete(self.keys)

    def params(self, **options: Param) -> dict[str, Param]:
        """Return what tells records apart."""
        return {**options, "size": self.size, "objects": len(self.pages)}
