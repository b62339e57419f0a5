"""What the tests of stores share: pages that tell whose they are."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from hicache_async._threads import DaemonThreads
from hicache_async.abc import Store
from hicache_async.types import StopToken

PAGE_NBYTES = 1000


def page_of(key: str, nbytes: int = PAGE_NBYTES) -> bytes:
    """Return bytes that only this key has."""
    return random.Random(ascii(key)).randbytes(nbytes)


async def write(store: Store, *keys: str, nbytes: int = PAGE_NBYTES) -> int:
    """Write the page of each key."""
    return await store.write(keys, [memoryview(page_of(key, nbytes)) for key in keys])


async def read(store: Store, *keys: str, nbytes: int = PAGE_NBYTES) -> int:
    """Read, and check that every counted page is the page of its key."""
    into = [memoryview(bytearray(nbytes)) for _ in keys]
    count = await store.read(keys, into, StopToken())
    for key, buffer in zip(keys[:count], into, strict=False):
        assert buffer == page_of(key, nbytes), f"{key} came back as something else"
    return count


def files_below(root: str | Path, part: str) -> list[Path]:
    """Return the files of a FileStore: "objects", or those under construction, "temp"."""
    return [path for path in Path(root, "v2", part).rglob("*") if path.is_file()]


def num_open_files() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something on it has happened."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


class CountingThreads(DaemonThreads):
    """Threads that count the jobs they were given."""

    def __init__(self, max_workers: int = 4) -> None:
        super().__init__(max_workers, "test-store")
        self.num_jobs = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Count and submit."""
        self.num_jobs += 1
        return super().submit(fn, *args, **kwargs)
