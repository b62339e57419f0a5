"""What both sides do to their files: the same bytes from the same kind of memory, as often and as warm."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Protocol

import numpy as np

from ..raw_files import empty_files
from .samples import NUM_SAMPLES, NUM_WARMUPS, Series, steady

NUM_PAGES = 256
PAGE_NBYTES = 1 << 20
NUM_LOOKUPS = 512
LOOKUP_NBYTES = 4096
"""Bytes of an object that is only looked up."""
ALIGNMENT = 4096
"""Of each row of memory, in bytes."""

Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
"""One object in each row."""


class Side(Protocol):
    """As many objects as there are rows to store, in files; those of each batch have names of their own."""

    async def write(self, batch: int) -> None:
        """Write every row under a name of ``batch``, until it can be read."""

    async def read(self, batch: int) -> None:
        """Read all objects of ``batch`` into the rows to load."""

    async def look_up(self, batch: int) -> None:
        """Ask which objects of ``batch`` there are, and find all."""


Open = Callable[[str, Rows], AbstractAsyncContextManager[Side]]
"""Opens a side on an empty directory; the first half of the rows is to store, the other to load."""

Opened = Callable[[int, int], AbstractAsyncContextManager[tuple[Side, str]]]
"""Opens a side for so many objects of so many bytes; gives it with its directory."""


def files_records(sides: Mapping[str, Open]) -> dict[str, Callable[[], Series]]:
    """Return what measures the record ``{name}.read``, ``.write`` and ``.lookup512`` of each side."""
    records = {"read": reads, "write": writes, "lookup512": lookups}
    return {
        f"{name}.{record}": partial(_run, measure, partial(_verified, side))
        for name, side in sides.items()
        for record, measure in records.items()
    }


async def reads(opened: Opened) -> Series:
    """Read one batch, which is in the page cache, again and again."""
    async with opened(NUM_PAGES, PAGE_NBYTES) as (side, _):
        await side.write(1)
        return steady([await _timed(side.read(1)) for _ in range(NUM_WARMUPS + NUM_SAMPLES)])


async def writes(opened: Opened) -> Series:
    """Write batch after batch; its files are emptied outside the time."""
    seconds = []
    async with opened(NUM_PAGES, PAGE_NBYTES) as (side, directory):
        for batch in range(1, 1 + NUM_WARMUPS + NUM_SAMPLES):
            seconds.append(await _timed(side.write(batch)))
            empty_files(directory)
    return steady(seconds)


async def lookups(opened: Opened) -> Series:
    """Look one batch up again and again."""
    async with opened(NUM_LOOKUPS, LOOKUP_NBYTES) as (side, _):
        await side.write(1)
        return steady([await _timed(side.look_up(1)) for _ in range(NUM_WARMUPS + NUM_SAMPLES)])


@asynccontextmanager
async def _verified(open_side: Open, num_objects: int, nbytes: int) -> AsyncIterator[tuple[Side, str]]:
    """Open a side and compare all that it reads with what it wrote, once.

    Its files are emptied in the end. Who runs the sides removes them after the last one, see ``empty_files``.
    """
    rows = _memory(2 * num_objects, nbytes)
    stored, loaded = rows[:num_objects], rows[num_objects:]
    stored[:] = np.random.default_rng(0).integers(0, 256, stored.shape, dtype=np.uint8)
    loaded[:] = 0
    directory = tempfile.mkdtemp(prefix="hicache-bench-")
    async with open_side(directory, rows) as side:
        await side.write(0)
        await side.look_up(0)
        await side.read(0)
        assert np.array_equal(loaded, stored), "what was read is not what was written"
        empty_files(directory)
        yield side, directory
    empty_files(directory)


def _memory(num_rows: int, row_nbytes: int) -> Rows:
    memory = np.empty(num_rows * row_nbytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_rows * row_nbytes].reshape(num_rows, row_nbytes)


async def _timed(work: Awaitable[None]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


def _run(measure: Callable[[Opened], Awaitable[Series]], opened: Opened) -> Series:
    async def run() -> Series:
        return await measure(opened)

    return asyncio.run(run())
