"""How long the file store takes for objects that it checks, beside raw system calls that check nothing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from hicache_async import StopToken
from hicache_async.stores import FileStore

from .harness import Benchmark, Param, Record, Sample, measure, timed
from .raw_files import RawFiles, buffers

SIZES = {64 << 10: 256, 1 << 20: 64, 8 << 20: 16}
"""Bytes of an object, and how many are moved by one call."""


@asynccontextmanager
async def file_store(directory: Path) -> AsyncIterator[FileStore]:
    """Open a store that looks at the directory each time, as a process does that has just started."""
    store = FileStore(directory / "store", existence_ttl_s=0)
    try:
        yield store
    finally:
        await store.aclose()


def cases(quick: bool) -> Iterator[tuple[int, int, dict[str, Param], int]]:
    """Yield bytes of an object, number of objects, the params of the record, and rounds."""
    for size, num_objects in SIZES.items():
        num_objects = min(num_objects, 4) if quick else num_objects
        yield size, num_objects, {"size": size, "objects": num_objects}, 3 if quick else 31


async def read_records(quick: bool) -> AsyncIterator[Record]:
    """Read objects that are in the page cache, all by one call."""
    for size, num_objects, params, rounds in cases(quick):
        with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
            raw = RawFiles(Path(name) / "raw")
            keys, paths = [f"{number:064x}" for number in range(num_objects)], raw.new_paths(num_objects)
            into = buffers(num_objects, size, 0)
            async with file_store(Path(name)) as store:
                pages = buffers(num_objects, size, 7)
                await store.write(keys, pages)
                raw.write(paths, pages)

                async def read() -> float:
                    start = time.perf_counter()
                    assert await store.read(keys, into, StopToken()) == len(keys)  # noqa: B023
                    return (time.perf_counter() - start) / len(keys)  # noqa: B023

                yield await measure(
                    "file.read",
                    params,
                    read,
                    timed(lambda: raw.read(paths, into)),
                    floor_name="open, readv, close",
                    unit="us",
                    rounds=rounds,
                )
