"""Close: drains within its limit, then abandons by name; afterwards a release is a no-op and all else says so."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
import pytest

from hicache_async import ClosedError, CpuDevice, State
from hicache_async._threads import DaemonThreads
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HangingStore, HeldStore
from tests.flows.rig import Opener, Rig, turns
from tests.flows.test_cancellation import WAITS, Waiting

pytestmark = pytest.mark.asyncio

LIMIT_S = 30
Logs = list[MutableMapping[str, Any]]


def events(logs: Logs, name: str) -> Logs:
    """Return the log lines of one event."""
    return [entry for entry in logs if entry["event"] == name]


async def test_close_drains(open_cache: Opener, logs: Logs) -> None:
    """What was on its way down is stored before close returns."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, store_batch_pages=1, close_timeout_s=LIMIT_S)
    await rig.serve("abcd", prefetch=False)
    await rig.serve("wxyz", prefetch=False)
    closing = asyncio.create_task(rig.cache.close())
    await store.arrived()
    await turns()
    assert not closing.done()
    assert rig.cache.state is State.CLOSED
    store.open()
    await closing
    assert [await rig.check_stored(letters) for letters in ("abcd", "wxyz")] == [4, 4]
    assert not events(logs, "cache.close_abandoned")


async def test_close_waits_for_copies(open_cache: Opener) -> None:
    """Copies that run in threads are over, and stored, when close returns."""
    threads = DaemonThreads(2)
    rig = await open_cache(store=MemoryStore(), device=CpuDevice(threads), close_timeout_s=LIMIT_S)
    await rig.serve("abcdef")
    await rig.cache.close()
    assert await rig.check_stored("abcdef") == 6
    await rig.device.aclose()
    threads.shutdown()


async def test_a_hung_write_is_abandoned_by_name(open_cache: Opener, logs: Logs) -> None:
    """A write that never ends is named in one line; its pages keep their owner, what waited behind it is counted."""
    store = HangingStore(MemoryStore(), "write")
    rig = await open_cache(store=store, close_timeout_s=0.05)
    for letters in ("ab", "cd", "ef"):
        await rig.serve(letters)
        await turns()
    await rig.cache.close()
    assert [
        (entry["log_level"], entry["stuck"], entry["backups_dropped"])
        for entry in events(logs, "cache.close_abandoned")
    ] == [("warning", ["store.write"], 2)]
    assert len(events(logs, "cache.closed")) == 1
    assert rig.cache.stats().hops == 1
    rig.cache.audit()
    store.release()
    await turns()
    rig.cache.audit()


async def test_a_hung_read_keeps_its_pages(open_cache: Opener, logs: Logs) -> None:
    """The pages of a read that outlives the cache stay its own, and come back to nobody's harm."""
    store = HangingStore(MemoryStore(), "read")
    rig = await open_cache(store=store, close_timeout_s=0.05)
    await rig.put_in_store("abcd")
    lease = rig.lease("abcd")
    prefetch = lease.start_prefetch()
    waiting = asyncio.create_task(prefetch.settled())
    await turns()
    lease.release()
    await rig.cache.close()
    with pytest.raises(ClosedError):
        await waiting
    assert [entry["stuck"] for entry in events(logs, "cache.close_abandoned")] == [["store.read"]]
    assert rig.cache.stats().host.in_hops == 4
    rig.cache.audit()
    store.release()
    await turns()
    assert rig.cache.stats().host.in_hops == 0
    rig.cache.audit()


async def test_a_forward_that_never_ends(open_cache: Opener, logs: Logs) -> None:
    """A host fence that is never set does not keep close."""
    rig = await open_cache(close_timeout_s=0.05)
    with rig.lease("abc") as lease:
        loading = await lease.load()
        await rig.forward(lease, loading)
        lease.commit(12, after=rig.cache.host_fence())
    await rig.cache.close()
    (line,) = events(logs, "cache.close_abandoned")
    assert set(line["stuck"]) == {"forward.fence"}


async def test_a_cache_without_work_closes_silently(open_cache: Opener, logs: Logs) -> None:
    """With nothing in flight there is nothing to report."""
    rig = await open_cache()
    await rig.cache.close()
    await rig.cache.close()
    assert [entry["log_level"] for entry in logs] == ["info", "info"]


async def test_two_close_at_once(open_cache: Opener) -> None:
    """Whoever closes second returns when the cache is closed."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, close_timeout_s=LIMIT_S)
    await rig.serve("ab", prefetch=False)
    await store.arrived()
    tasks = [asyncio.create_task(rig.cache.close()) for _ in range(2)]
    await turns()
    assert not any(task.done() for task in tasks)
    store.open()
    await asyncio.gather(*tasks)


async def cancel_natively(rig: Rig) -> None:
    task = asyncio.create_task(rig.cache.close())
    await turns(5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_by_timeout(rig: Rig) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await rig.cache.close()


async def cancel_twice(rig: Rig) -> None:
    task = asyncio.create_task(rig.cache.close())
    await turns(5)
    task.cancel()
    await turns(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("cancel", [cancel_natively, cancel_by_timeout, cancel_twice])
async def test_a_cancelled_close_abandons_at_once(
    open_cache: Opener, logs: Logs, cancel: Callable[[Rig], Awaitable[None]]
) -> None:
    """Cancelling close gives up what was not drained, and the cache is closed all the same."""
    store = HangingStore(MemoryStore(), "write")
    rig = await open_cache(store=store, close_timeout_s=LIMIT_S)
    await rig.serve("ab")
    await turns()
    await cancel(rig)
    assert len(events(logs, "cache.close_abandoned")) == 1
    await rig.cache.close()
    await turns()
    assert not rig.ctx.tasks
    store.release()


async def test_a_scope_does_not_cut_the_drain_short(open_cache: Opener) -> None:
    """Leaving ``async with`` by a cancel scope still drains: what was computed is not lost."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, close_timeout_s=LIMIT_S)
    await rig.serve("ab", prefetch=False)
    await store.arrived()
    asyncio.get_running_loop().call_soon(store.open)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await rig.cache.close()
    assert await rig.check_stored("ab") == 2


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("wait", WAITS)
async def test_waiters_hear_that_the_cache_is_closed(
    open_cache: Opener, wait: Callable[[Opener], Awaitable[Waiting]]
) -> None:
    """Whatever a request waits for when the cache closes, it is not left waiting."""
    waiting = await wait(open_cache)
    rig = waiting.rig
    task = asyncio.ensure_future(waiting.work())
    await turns()
    assert not task.done()
    closing = asyncio.create_task(rig.cache.close())
    await turns()
    rig.clock.advance(0.05)  # a stopped prefetch gives the page in hand a moment
    await turns()
    if wait.__name__.startswith("loading") or wait.__name__ == "fence":
        assert not task.done()  # the device's and the engine's own to end
        waiting.end()
        await task
    else:
        with pytest.raises(ClosedError, match="open a new one"):
            await task
    for lease in waiting.leases:
        lease.release()
    waiting.end()
    await closing


async def test_after_close(open_cache: Opener) -> None:
    """release() does nothing, and everything that would do something raises ClosedError."""
    rig = await open_cache(store=MemoryStore())
    fresh, loaded = rig.lease("abcd"), rig.lease("wxyz")
    await loaded.load()
    loaded.allocate_nowait(17)
    with pytest.warns(ResourceWarning) as caught:
        await rig.cache.close()
    assert sorted(str(warning.message) for warning in caught) == [
        "<PrefixLease 'request 1' of 17 tokens, 0 local> was not released before the cache was closed",
        "<PrefixLease 'request 2' of 17 tokens, 0 local> was not released before the cache was closed",
    ]
    calls: list[Callable[[], object]] = [
        lambda: rig.lease("abcd"),
        lambda: fresh.start_prefetch(),
        lambda: loaded.allocate_nowait(40),
        lambda: loaded.extend([1]),
        lambda: loaded.commit(16),
        lambda: loaded.discard(0),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="the cache is closed"):
            call()
    for work in (
        fresh.prefetch,
        fresh.load,
        lambda: loaded.allocate(40),
        rig.cache.begin_step,
        rig.cache.admin.flush,
    ):
        with pytest.raises(ClosedError, match="the cache is closed"):
            await work()
    assert rig.cache.state is State.CLOSED
    assert (fresh.pending_tokens, len(loaded.pages)) == (0, 5)
    for lease in (fresh, loaded):
        lease.release()
        lease.release()


async def test_a_warning_that_is_an_error_comes_last(open_cache: Opener, logs: Logs) -> None:
    """With warnings as errors close raises for the unreleased lease, and has closed everything by then."""
    rig = await open_cache(store=MemoryStore())
    lease = rig.lease("ab")
    with pytest.raises(ResourceWarning, match="'request 1'"):
        await rig.cache.close()
    assert events(logs, "cache.closed")
    await rig.cache.close()
    assert not rig.ctx.tasks
    lease.release()


async def test_a_closed_cache_can_be_collected(open_cache: Opener) -> None:
    """Nothing of a closed cache stays on the loop."""
    rig = await open_cache(store=MemoryStore())
    await rig.serve("abcd")
    await rig.cache.close()
    await turns()
    gc.collect()
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if name.startswith("hicache:")]


async def test_the_device_and_the_store_are_the_callers(open_cache: Opener) -> None:
    """What was given to open() is not closed by close(): the next cache works with it."""
    rig = await open_cache(store=MemoryStore())
    await rig.serve("abcd")
    device = rig.device
    rig = await open_cache.restart(rig, device=device)
    assert (await rig.serve("abcd")).books.store == 16


HUNG = """
import asyncio, threading, torch
from hicache_async import CacheConfig, DeviceKV, HiCache
from hicache_async._threads import DaemonThreads
from hicache_async.stores.memory import MemoryStore

threads = DaemonThreads(1)

class Hung(MemoryStore):
    async def write(self, keys, pages):
        print("writing", len(keys))
        return await asyncio.wrap_future(threads.submit(threading.Event().wait))

def tensors():
    return [torch.zeros(8, 4, 1, 2) for _ in range(2)]

async def main():
    config = CacheConfig(page_size=4, host_ratio=2, host_reserve_bytes=0, write_policy="write_through",
                         close_timeout_s=0.2)
    async with HiCache.open(config, kv=DeviceKV.from_layers(tensors(), tensors()), store=Hung()) as cache:
        with cache.match_prefix("r", list(range(9))) as lease:
            await lease.load()
            lease.allocate_nowait(9)
            lease.commit(9)
    print(cache.state)

asyncio.run(main())
"""


async def test_a_hung_thread_keeps_neither_close_nor_the_interpreter() -> None:
    """A process whose store hangs in a thread closes its cache, and exits with 0."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", HUNG],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("writing 2", "closed")
    assert len([line for line in lines if "cache.close_abandoned" in line and "store.write" in line]) == 1
