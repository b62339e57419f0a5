"""Our side of the files: a FileStore with checksums that remembers nothing of what it has seen."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from hicache_async import StopToken
from hicache_async.stores import FileStore

from .files_sides import Rows, files_records
from .samples import report


class Ours:
    """One call of the store for each batch."""

    def __init__(self, store: FileStore, rows: Rows) -> None:
        pages = [memoryview(row) for row in rows]  # type: ignore[arg-type]
        self._store = store
        self._stored, self._loaded = pages[: len(pages) // 2], pages[len(pages) // 2 :]

    def _keys(self, batch: int) -> list[str]:
        return [f"{batch:032x}{number:032x}" for number in range(len(self._stored))]

    async def write(self, batch: int) -> None:
        """Write by one call."""
        assert await self._store.write(self._keys(batch), self._stored) == len(self._stored)

    async def read(self, batch: int) -> None:
        """Read and verify by one call."""
        assert await self._store.read(self._keys(batch), self._loaded, StopToken()) == len(self._loaded)

    async def look_up(self, batch: int) -> None:
        """Look up by one call, which asks the directory for each."""
        assert await self._store.count_prefix(self._keys(batch)) == len(self._stored)


@asynccontextmanager
async def open_ours(directory: str, rows: Rows) -> AsyncIterator[Ours]:
    """Open a store with its defaults, but for what it would remember."""
    store = FileStore(directory, existence_ttl_s=0)
    yield Ours(store, rows)
    await store.aclose()


RECORDS = files_records({"fs": open_ours, "fs_native": open_ours})

if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    report(RECORDS)
