"""A store's threads are its own, few jobs carry many pages, and a stop reaches them within two pages."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hicache_async import PrefetchPolicy, Stop
from hicache_async._threads import DaemonThreads
from hicache_async.stores import FileStore
from hicache_async.stores.memory import MemoryStore
from hicache_async.types import StopToken
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, prefetched
from tests.flows.stores import RecordingStore, page_keys

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

BEST_EFFORT = PrefetchPolicy.best_effort()


class CountingThreads(DaemonThreads):
    """Count the jobs."""

    num_jobs = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_jobs += 1
        return super().submit(fn, *args, **kwargs)


async def test_the_loops_own_threads_may_all_be_blocked(open_cache: Opener, tmp_path: Path) -> None:
    """With every thread of the default executor blocked, writing, looking up, reading and closing go on."""
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    executor = ThreadPoolExecutor(2)
    loop.set_default_executor(executor)
    try:
        blocked = [loop.run_in_executor(None, go_on.wait, 50) for _ in range(4)]
        rig = await open_cache(store=f"file://{tmp_path / 'kv'}")
        await rig.serve("abcd")
        await rig.cache.admin.flush()
        await rig.cache.close()
        again = await open_cache(store=f"file://{tmp_path / 'kv'}")
        assert await prefetched(again, "abcd", BEST_EFFORT) == (16, 16, Stop.COMPLETE)
        await again.cache.close()
        assert not any(job.done() for job in blocked)
    finally:
        go_on.set()
    await asyncio.gather(*blocked)
    open_cache.rigs.clear()


async def test_pages_share_the_hops_to_the_threads(open_cache: Opener, tmp_path: Path) -> None:
    """A prompt of 512 pages is looked up and read in a few thread jobs a batch, not in one a page."""
    threads = CountingThreads(3)
    store = FileStore(tmp_path / "kv", threads=threads)
    rig = await open_cache(store=RecordingStore(MemoryStore()), device_pages=600, host_pages=600)
    letters = "".join(chr(0x100 + page) for page in range(512))
    await rig.serve(letters, prefetch=False)
    await rig.cache.admin.flush()
    await copy_to(store, rig)
    again = await open_cache(store=store, device_pages=600, host_pages=600)
    before = threads.num_jobs
    assert await prefetched(again, letters, BEST_EFFORT) == (2048, 2048, Stop.COMPLETE)
    assert threads.num_jobs - before <= 3 * math.ceil(512 / again.ctx.config.store_batch_pages)
    await again.cache.close()
    open_cache.rigs.remove(again)
    await store.aclose()
    threads.shutdown()


async def copy_to(store: FileStore, rig: Rig) -> None:
    """Copy all that a memory store has into ``store``."""
    recording = rig.store
    assert isinstance(recording, RecordingStore) and isinstance(recording.inner, MemoryStore)
    names = await page_keys(recording.inner)
    pages = [bytearray(rig.kv.page_nbytes) for _ in names]
    assert await recording.inner.read(names, [memoryview(page) for page in pages], StopToken()) == len(names)
    assert await store.write(names, [memoryview(page) for page in pages]) == len(names)


class StoppingDirectory:
    """Stop a prefetch from within a thread that reads, and count the pages read after that."""

    def __init__(self, inner: Any, at_page: int) -> None:
        self._inner = inner
        self._at_page = at_page
        self._lock = threading.Lock()
        self.num_read = 0
        self.num_read_after_stop = 0
        self.stop: Callable[[], None] = lambda: None
        self.stopped = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, key: str, into: memoryview) -> object:
        with self._lock:
            self.num_read += 1
            self.num_read_after_stop += self.stopped.is_set()
            if self.num_read == self._at_page:
                self.stop()
        return self._inner.read(key, into)


@pytest.mark.parametrize("at_page", [1, 7, 60])
async def test_a_stopped_prefetch_touches_two_pages_more_at_most(
    open_cache: Opener, tmp_path: Path, at_page: int
) -> None:
    """Counted in the threads of a store of files: after stop() the pages in hand and no more, two at the most."""
    store = FileStore(tmp_path / "kv", num_lanes=4)
    rig = await open_cache(store=RecordingStore(MemoryStore()), device_pages=200, host_pages=200)
    letters = "".join(chr(0x100 + page) for page in range(128))
    await rig.serve(letters, prefetch=False)
    await rig.cache.admin.flush()
    await copy_to(store, rig)
    directory = StoppingDirectory(store._directory, at_page)
    store._directory = directory  # type: ignore[assignment]
    again = await open_cache(store=store, device_pages=200, host_pages=200, store_timeout_s=1e6)
    loop = asyncio.get_running_loop()
    with again.lease(letters) as lease:
        prefetch = lease.start_prefetch(BEST_EFFORT)

        def stop() -> None:
            prefetch.stop()
            directory.stopped.set()

        def stop_and_wait() -> None:
            loop.call_soon_threadsafe(stop)
            assert directory.stopped.wait(30)

        directory.stop = stop_and_wait
        result = await prefetch.settled()
        while again.ctx.hops.live:
            await asyncio.wait([hop.settled for hop in again.ctx.hops.live])
        assert directory.num_read_after_stop <= 2
        assert result.stop in (Stop.STOPPED, Stop.COMPLETE)
        assert result.fetched_tokens <= directory.num_read * PAGE_TOKENS
        again.cache.audit()
    await again.cache.close()
    open_cache.rigs.remove(again)
    await store.aclose()
