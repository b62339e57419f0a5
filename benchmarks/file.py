"""How long the file store takes for objects that it checks, beside raw system calls that check nothing."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from hicache_async import StopToken
from hicache_async.stores import FileStore

from .harness import Benchmark, Record, measure, timed, timed_async, undone
from .raw_files import RawFiles, buffers

SIZES = {64 << 10: 256, 1 << 20: 64, 8 << 20: 16}
"""Bytes of an object, and how many objects one call moves."""


class Objects:
    """Objects of one size for one call of the store.

    Attributes:
        keys: under which they were written last.
    """

    def __init__(self, store: FileStore, size: int, num_objects: int) -> None:
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

    async def clear(self) -> None:
        """Delete them."""
        await self.store.delete(self.keys)

    @property
    def params(self) -> dict[str, int | str]:
        """What tells records apart."""
        return {"size": self.size, "objects": len(self.pages)}


@asynccontextmanager
async def workload(size: int, num_objects: int) -> AsyncIterator[tuple[Objects, RawFiles]]:
    """Make a store and the floor's files in one temporary directory.

    The store believes nothing of what it has seen, like one that was just opened.
    """
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
        store = FileStore(Path(name) / "store", existence_ttl_s=0)
        try:
            yield Objects(store, size, num_objects), RawFiles(Path(name) / "raw")
        finally:
            await store.aclose()


async def read_records(quick: bool) -> AsyncIterator[Record]:
    """Read objects that are in the page cache by one call of the store; for each object."""
    for size, num_objects in SIZES.items():
        yield await (_read(size, 4, rounds=3) if quick else _read(size, num_objects, rounds=31))


async def _read(size: int, num_objects: int, rounds: int) -> Record:
    async with workload(size, num_objects) as (objects, raw):
        await objects.write()
        raw.write(objects.pages)
        return await measure(
            "file.read",
            objects.params,
            timed_async(objects.read, pieces=num_objects),
            timed(lambda: raw.read(objects.pages), pieces=num_objects),
            floor_name="open, readv, close",
            unit="us",
            rounds=rounds,
        )


async def write_records(quick: bool) -> AsyncIterator[Record]:
    """Write objects under fresh names by one call of the store, not synced; for each object."""
    for size, num_objects in SIZES.items():
        yield await (_write(size, 4, rounds=3) if quick else _write(size, num_objects, rounds=31))


async def _write(size: int, num_objects: int, rounds: int) -> Record:
    async with workload(size, num_objects) as (objects, raw):

        async def clear_raw() -> None:
            raw.clear()

        return await measure(
            "file.write",
            objects.params,
            undone(timed_async(objects.write, pieces=num_objects), objects.clear),
            undone(timed(lambda: raw.write(objects.pages), pieces=num_objects), clear_raw),
            floor_name="open, write, close, rename",
            unit="us",
            rounds=rounds,
        )


BENCHMARKS = [Benchmark("file.read", read_records), Benchmark("file.write", write_records)]
