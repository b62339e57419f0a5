"""Stores of the flow tests, beside those of ``hicache_async.testing.faults``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from hicache_async.abc import Store, SupportsListing
from hicache_async.core.manifest import is_manifest_key
from hicache_async.testing.faults import StoreWrapper
from hicache_async.types import Stop, StopToken


class RecordingStore(StoreWrapper):
    """Remember the keys of every call for pages, by verb."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.keys: dict[str, list[Sequence[str]]] = {"count_prefix": [], "read": [], "write": []}

    async def count_prefix(self, keys: Sequence[str]) -> int:
        self.keys["count_prefix"].append(keys)
        return await super().count_prefix(keys)

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        if not is_manifest_key(keys[0]):
            self.keys["read"].append(keys)
        return await super().read(keys, into, stop)

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        if not is_manifest_key(keys[0]):
            self.keys["write"].append(keys)
        return await super().write(keys, pages)

    @property
    def num_read(self) -> int:
        """Pages asked for in all reads."""
        return sum(len(keys) for keys in self.keys["read"])


async def namespaces_met() -> None:
    """Return when each cache that is open has looked into its store and left its manifest there, or has given up."""
    meetings = [task for task in asyncio.all_tasks() if task.get_name() == "hicache:namespaces"]
    if meetings:
        await asyncio.wait(meetings)


async def page_keys(store: object) -> list[str]:
    """Return the keys of all pages in a store, without those of manifests."""
    assert isinstance(store, SupportsListing)
    return [key for key in await store.list_keys() if not is_manifest_key(key)]


class PageByPageStore(StoreWrapper):
    """Read one page whenever the test lets it, looking at the stop token before each, as a thread does.

    Attributes:
        touched: pages filled so far.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.touched = 0
        self._may_read = asyncio.Semaphore(0)

    def let_read(self, num_pages: int) -> None:
        """Let so many more pages be read."""
        for _ in range(num_pages):
            self._may_read.release()

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        self.calls["read"] += 1
        for count, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if stop.stopped:
                return count
            await self._may_read.acquire()
            if await self.inner.read([key], [buffer], StopToken()) != 1:
                return count
            self.touched += 1
        return len(keys)


class ShortReadStore(StoreWrapper):
    """Read fewer pages than asked for, and say why.

    Args:
        keep: pages that each read brings.
        reason: what the stop token is told.
    """

    def __init__(self, inner: Store, keep: int, reason: Stop | None) -> None:
        super().__init__(inner)
        self._keep = keep
        self._reason = reason

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        self.calls["read"] += 1
        count = await self.inner.read(keys[: self._keep], into[: self._keep], stop)
        stop.reason = self._reason
        return count


class FaultAt(StoreWrapper):
    """Go wrong in one call of one verb, in one way.

    Args:
        at: the number of the call, from 1; None: every one of that verb.
        kind: "raise"; "short" (half of what was asked); "hang" (until :meth:`release`); or what is
            answered instead of the count.
    """

    def __init__(self, inner: Store, verb: str, at: int | None, kind: object) -> None:
        super().__init__(inner)
        self._verb, self._at, self._kind = verb, at, kind
        self._released = asyncio.Event()

    def release(self) -> None:
        """Let what hangs go on."""
        self._released.set()

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        if verb != self._verb or self._at not in (None, self.calls[verb]):
            return await call()
        if self._kind == "raise":
            raise OSError("the disk is gone")
        if self._kind == "hang":
            stop.job_started()
            try:
                await self._released.wait()
            finally:
                stop.job_ended()
        if self._kind == "short":
            return await call() // 2
        count = await call()
        return count if self._kind == "hang" else cast("int", self._kind)
