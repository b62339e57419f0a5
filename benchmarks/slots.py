"""How long stores in fixed slots of one file take for objects that they check, beside a plain copy."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import numpy as np

from hicache_async.stores.mmap import MmapStore
from hicache_async.stores.shm import ShmStore

from .harness import Benchmark, Record, measure, timed, timed_async, undone
from .objects import Objects
from .raw_files import buffers

SIZES = {64 << 10: 256, 1 << 20: 64}
"""Bytes of an object, and how many objects one call moves."""


@asynccontextmanager
async def workload(kind: str, size: int, num_objects: int) -> AsyncIterator[Objects]:
    """Make a store with twice the room that is needed, and remove it."""
    max_bytes = 2 * size * num_objects + (16 << 20)
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as directory, contextlib.ExitStack() as remove:
        store: ShmStore | MmapStore
        if kind == "shm":
            name = f"bench-{os.getpid()}"
            store = ShmStore(name, max_bytes=max_bytes, slot_bytes=size)
            remove.callback(ShmStore.unlink, name)
        else:
            store = MmapStore(f"{directory}/slots", max_bytes=max_bytes, slot_bytes=size)
        try:
            yield Objects(store, size, num_objects)
        finally:
            await store.aclose()


def copying(objects: Objects) -> Callable[[], None]:
    """Return what copies all pages to or from other memory, page by page."""
    others = buffers(len(objects.pages), objects.size)
    pairs = [(np.asarray(there), np.asarray(here)) for there, here in zip(others, objects.pages, strict=True)]

    def copy() -> None:
        for there, here in pairs:
            np.copyto(there, here)

    return copy


async def read_records(quick: bool) -> AsyncIterator[Record]:
    """Read objects by one call of the store; for each object."""
    for kind, size, num_objects, rounds in _runs(quick):
        async with workload(kind, size, num_objects) as objects:
            await objects.write()
            yield await measure(
                "slots.read",
                objects.params(store=kind),
                timed_async(objects.read, pieces=num_objects),
                timed(copying(objects), pieces=num_objects),
                floor_name="np.copyto",
                unit="us",
                rounds=rounds,
            )


async def write_records(quick: bool) -> AsyncIterator[Record]:
    """Write objects under fresh names by one call of the store; for each object."""
    for kind, size, num_objects, rounds in _runs(quick):
        async with workload(kind, size, num_objects) as objects:
            yield await measure(
                "slots.write",
                objects.params(store=kind),
                undone(timed_async(objects.write, pieces=num_objects), objects.clear),
                timed(copying(objects), pieces=num_objects),
                floor_name="np.copyto",
                unit="us",
                rounds=rounds,
            )


def _runs(quick: bool) -> Iterator[tuple[str, int, int, int]]:
    for kind in ("shm", "mmap"):
        for size, num_objects in SIZES.items():
            yield (kind, size, 4, 3) if quick else (kind, size, num_objects, 31)


BENCHMARKS = [Benchmark("slots.read", read_records), Benchmark("slots.write", write_records)]
