"""Cancelling and closing a FileStore: at once for the caller, nothing left behind by the threads."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from pathlib import Path

import pytest

from hicache_async.errors import StoreUnavailable, WrongLoopError
from hicache_async.stores import FileStore
from hicache_async.testing.manual import ManualThreads
from hicache_async.types import StopToken
from tests.stores.pages import (
    PAGE_NBYTES,
    CountingThreads,
    files_below,
    num_open_files,
    page_of,
    read,
    until,
    write,
)

pytestmark = pytest.mark.every_loop


@pytest.mark.asyncio
async def test_a_cancelled_read_is_busy_until_its_thread_has_passed(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancel in mid-read ends at once; the token is busy while the thread fills the page in hand only."""
    await write(store, "a", "b", "c")
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    inside = asyncio.Event()
    preadv = os.preadv

    def held_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        loop.call_soon_threadsafe(inside.set)
        assert go_on.wait(30)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", held_preadv)
    num_files = num_open_files()
    into = [memoryview(bytearray(PAGE_NBYTES)) for _ in range(3)]
    stop = StopToken()
    reading = asyncio.create_task(store.read(["a", "b", "c"], into, stop))
    await inside.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert stop.busy
    assert not any(into[0])
    quiet = asyncio.Event()
    stop.when_quiet(quiet.set)
    go_on.set()
    await quiet.wait()
    assert into[0] == page_of("a")
    assert not any(into[1])
    assert not any(into[2])
    assert num_open_files() == num_files


async def cancel_at_random(store: FileStore, rounds: int) -> None:
    dice = random.Random(7)
    keys = [f"key{number}" for number in range(40)]
    await write(store, *keys[:20])
    num_files = num_open_files()
    for _ in range(rounds):
        stop = StopToken()
        into = [memoryview(bytearray(PAGE_NBYTES)) for _ in keys]
        tasks = [
            asyncio.create_task(store.read(keys, into, stop)),
            asyncio.create_task(write(store, *keys[10:])),
            asyncio.create_task(store.count_prefix(keys)),
        ]
        for _ in range(dice.randrange(12)):
            await asyncio.sleep(0)
        for task in dice.sample(tasks, dice.randrange(1, 4)):
            task.cancel()
        await asyncio.wait(tasks)
        if stop.busy:
            quiet = asyncio.Event()
            stop.when_quiet(quiet.set)
            await quiet.wait()
        await store.delete(keys[30:])
    assert files_below(store.root, "temp") == []
    assert num_open_files() == num_files
    assert not store._opened or not store._opened._live
    count = await store.count_prefix(keys)
    assert 20 <= count == await read(store, *keys[:count])


@pytest.mark.asyncio
async def test_cancels_leave_no_file_open(store: FileStore) -> None:
    """However calls are cancelled, no descriptor, no temporary file and no torn object is left."""
    await cancel_at_random(store, 50)


@pytest.mark.asyncio
@pytest.mark.stress
async def test_cancels_leave_no_file_open_for_long(store: FileStore) -> None:
    """However often calls are cancelled, no descriptor, no temporary file and no torn object is left."""
    await cancel_at_random(store, 1000)


@pytest.mark.asyncio
async def test_a_write_cancelled_in_the_queue_writes_nothing(tmp_path: Path) -> None:
    """A write whose job has not begun leaves no file when it is cancelled."""
    threads = ManualThreads()
    store = FileStore(tmp_path / "kv", threads=threads)
    writing = asyncio.create_task(write(store, "a"))
    await until(lambda: threads.pending == 1)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    threads.run_all()
    assert not os.path.exists(store.root)
    await store.aclose()


@pytest.mark.asyncio
async def test_close_does_not_wait_for_a_hung_thread(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read whose thread hangs ends at close with StoreUnavailable, its token busy until it has passed."""
    await write(store, "a")
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    inside = asyncio.Event()
    preadv = os.preadv

    def hung_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        loop.call_soon_threadsafe(inside.set)
        assert go_on.wait(30)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", hung_preadv)
    stop = StopToken()
    reading = asyncio.create_task(store.read(["a"], [memoryview(bytearray(PAGE_NBYTES))], stop))
    await inside.wait()
    await store.aclose()
    with pytest.raises(StoreUnavailable):
        await reading
    assert stop.busy
    quiet = asyncio.Event()
    stop.when_quiet(quiet.set)
    go_on.set()
    await quiet.wait()


@pytest.mark.asyncio
async def test_after_close_every_call_is_refused(store: FileStore) -> None:
    """A closed store raises StoreUnavailable, and may be closed again."""
    await write(store, "a")
    await store.aclose()
    await store.aclose()
    for call in (
        store.count_prefix(["a"]),
        read(store, "a"),
        write(store, "a"),
        store.delete([]),
        store.list_keys(),
    ):
        with pytest.raises(StoreUnavailable, match="was closed; open another one"):
            await call


@pytest.mark.asyncio
async def test_threads_of_the_caller_stay_open(tmp_path: Path) -> None:
    """Closing a store leaves alone the threads that it was given."""
    threads = CountingThreads()
    store = FileStore(tmp_path, threads=threads)
    await write(store, "a")
    await store.aclose()
    assert threads.submit(int, "1").result(30) == 1
    threads.shutdown()


def test_a_store_belongs_to_one_loop(tmp_path: Path) -> None:
    """Use on a second loop is refused, as nothing could be reported to it."""
    store = FileStore(tmp_path)
    asyncio.run(write(store, "a"))
    with pytest.raises(WrongLoopError, match="open one for each"):
        asyncio.run(write(store, "b"))
    asyncio.run(store.aclose())
