"""How long the file store takes for objects that it checks, beside raw system calls that check nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_async.stores import FileStore

from .harness import Benchmark, Record, measure, prepared, repeated, timed, timed_async, undone
from .objects import Objects
from .raw_files import RawFiles, empty_files, scratch_directory

SIZES = {64 << 10: 256, 1 << 20: 64, 8 << 20: 16}
"""Bytes of an object, and how many objects one call moves."""

WRITE_OPTIONS: list[dict[str, Any]] = [{"max_bytes": 1 << 40}, {"unnamed_temp": True}]
"""Options that a write may cost something; measured with the smallest objects."""

DURABLE_SIZES = {64 << 10: 64, 1 << 20: 16}
"""Like ``SIZES``, for calls that wait for the disk."""

NUM_LOOKUPS = 512
LOOKUP_NBYTES = 4096
"""Bytes of an object that is only looked up."""
LOOKUP_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Workload:
    """A store's objects, and files of the floor beside it.

    Attributes:
        directory: where both are.
    """

    directory: Path
    objects: Objects
    raw: RawFiles

    async def clear(self) -> None:
        """Take from all files what they hold."""
        empty_files(self.directory, min_nbytes=self.objects.size)
        self.raw.paths.clear()


@asynccontextmanager
async def workload(size: int, num_objects: int, **options: Any) -> AsyncIterator[Workload]:
    """Make a workload.

    Args:
        options: of the store. It believes nothing of what it has seen, unless one says otherwise.
    """
    with scratch_directory() as path:
        store = FileStore(path / "store", **{"existence_ttl_s": 0, **options})
        try:
            yield Workload(path, Objects(store, size, num_objects), RawFiles(path / "raw"))
        finally:
            await store.aclose()


async def read_records(quick: bool) -> AsyncIterator[Record]:
    """Read objects that are in the page cache by one call of the store; for each object."""
    for size, num_objects in SIZES.items():
        yield await (_read(size, 4, rounds=3) if quick else _read(size, num_objects, rounds=31))


async def _read(size: int, num_objects: int, rounds: int) -> Record:
    async with workload(size, num_objects) as load:
        objects, raw = load.objects, load.raw
        await objects.write()
        raw.write(objects.pages)
        return await measure(
            "file.read",
            objects.params(),
            timed_async(objects.read, pieces=num_objects),
            timed(lambda: raw.read(objects.pages), pieces=num_objects),
            floor_name="open, readv, close",
            unit="us",
            rounds=rounds,
        )


async def write_records(quick: bool) -> AsyncIterator[Record]:
    """Write objects under fresh names by one call of the store, not synced; for each object."""
    for size, options in [*((size, {}) for size in SIZES), *((min(SIZES), each) for each in WRITE_OPTIONS)]:
        num_objects, rounds = (4, 3) if quick else (SIZES[size], 31)
        yield await _write(size, num_objects, rounds, **options)


async def _write(size: int, num_objects: int, rounds: int, **options: Any) -> Record:
    async with workload(size, num_objects, **options) as load:
        objects, raw = load.objects, load.raw
        return await measure(
            "file.write",
            objects.params(**{name: str(value) for name, value in options.items()}),
            undone(timed_async(objects.write, pieces=num_objects), load.clear),
            undone(timed(lambda: raw.write(objects.pages), pieces=num_objects), load.clear),
            floor_name="open, write, close, rename",
            unit="us",
            rounds=rounds,
        )


async def write_durable_records(quick: bool) -> AsyncIterator[Record]:
    """Write objects under fresh names by one call of the store, as durable as each mode is; for each object.

    The files stay to the end: the next sync would have to write down that they are gone.
    """
    for size, num_objects in DURABLE_SIZES.items():
        for mode in ("none", "batch", "each"):
            yield await _write_durable(mode, size, *((4, 2) if quick else (num_objects, 15)))


async def _write_durable(mode: str, size: int, num_objects: int, rounds: int) -> Record:
    async with (
        workload(size, num_objects, durability=mode) as load,
        workload(size, num_objects, durability="each") as other,
    ):
        objects, in_turn, raw = load.objects, other.objects, load.raw
        floors = {
            "mode=each": timed_async(in_turn.write, pieces=num_objects),
            "the same calls, raw": timed(lambda: raw.write(objects.pages, synced=True), pieces=num_objects),
        }
        floor_name = "the same calls, raw" if mode == "each" else "mode=each"
        return await measure(
            "file.write_durable",
            objects.params(mode=mode),
            timed_async(objects.write, pieces=num_objects),
            floors[floor_name],
            floor_name=floor_name,
            unit="us",
            rounds=rounds,
        )


async def exists_records(quick: bool) -> AsyncIterator[Record]:
    """Look up objects that all exist: known to the index, or asked of the directory in one hop."""
    rounds = 3 if quick else 51
    async with workload(LOOKUP_NBYTES, NUM_LOOKUPS, existence_ttl_s=5.0) as load:
        objects = load.objects
        await objects.write()
        known = frozenset(objects.keys)

        async def compare(keys: Sequence[str]) -> None:
            assert known.issuperset(keys)

        yield await measure(
            "file.exists512",
            objects.params(indexed="yes"),
            repeated(prepared(objects.new_keys, objects.look_up), LOOKUP_REPEATS),
            repeated(prepared(objects.new_keys, compare), LOOKUP_REPEATS),
            floor_name="set.issuperset",
            unit="us",
            rounds=rounds,
        )
    async with workload(LOOKUP_NBYTES, NUM_LOOKUPS) as load:
        objects, raw = load.objects, load.raw
        await objects.write()
        raw.write(objects.pages)
        yield await measure(
            "file.exists512",
            objects.params(indexed="no"),
            timed_async(lambda: objects.look_up(objects.keys)),
            timed_async(lambda: asyncio.to_thread(raw.exist)),
            floor_name="os.path.exists in a thread",
            unit="us",
            rounds=rounds,
        )


BENCHMARKS = [
    Benchmark("file.read", read_records),
    Benchmark("file.write", write_records),
    Benchmark("file.write_durable", write_durable_records),
    Benchmark("file.exists512", exists_records),
]
