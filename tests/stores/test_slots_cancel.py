"""Cancelling, closing and forking: at once for the caller, no slot lost, no memory taken from under a thread."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from hicache_async.errors import StoreUnavailable, WrongLoopError
from hicache_async.stores._slots.segment import Segment
from hicache_async.stores._slots.store import SlotStore
from hicache_async.testing.manual import ManualThreads
from hicache_async.types import StopToken
from tests.stores.pages import PAGE_NBYTES, CountingThreads, page_of, read, until, write
from tests.stores.slot_programs import (
    KINDS,
    check_accounts,
    descriptors_of,
    finish,
    index_of,
    open_slots,
    start,
)

pytestmark = pytest.mark.every_loop


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of store."""
    return str(request.param)


@pytest_asyncio.fixture
async def slots(kind: str, tmp_path: Path) -> AsyncIterator[SlotStore]:
    """A store that holds "a", "b" and "c"."""
    store = open_slots(kind, tmp_path)
    assert await write(store, "a", "b", "c") == 3
    yield store
    await store.aclose()


class Hold:
    """Copies of a segment that wait, in their thread, until the test lets them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.inside = asyncio.Event()
        self._go_on = threading.Event()
        loop = asyncio.get_running_loop()
        copy: Callable[..., None] = getattr(Segment, name)

        def held(*args: object) -> None:
            loop.call_soon_threadsafe(self.inside.set)
            assert self._go_on.wait(30)
            copy(*args)

        monkeypatch.setattr(Segment, name, held)

    def release(self) -> None:
        self._go_on.set()


async def quiet(stop: StopToken) -> None:
    """Wait until no thread touches the buffers of a call."""
    if stop.busy:
        over = asyncio.Event()
        stop.when_quiet(over.set)
        await over.wait()


@pytest.mark.asyncio
async def test_a_cancelled_read_is_busy_until_its_thread_has_passed(
    slots: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancel in mid-read ends at once; the token is busy while the thread fills the page in hand only."""
    hold = Hold(monkeypatch, "get")
    into = [memoryview(bytearray(PAGE_NBYTES)) for _ in range(3)]
    stop = StopToken()
    reading = asyncio.create_task(slots.read(["a", "b", "c"], into, stop))
    await hold.inside.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert stop.busy
    hold.release()
    await quiet(stop)
    assert into[0] == page_of("a")
    assert not any(into[1])
    assert not any(into[2])


@pytest.mark.asyncio
async def test_a_cancelled_write_gives_its_slots_back(
    slots: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page in hand is published, the slots of those behind it are free again when the thread has passed."""
    hold = Hold(monkeypatch, "put")
    writing = asyncio.create_task(write(slots, "d", "e", "f"))
    await hold.inside.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert len(index_of(slots).writing) == 3
    hold.release()
    assert await write(slots, "g") == 1  # behind the other in the only lane for writes
    assert sorted(await slots.list_keys()) == ["a", "b", "c", "d", "g"]
    assert await read(slots, "d", "g") == 2
    await check_accounts(slots)


async def cancel_at_random(slots: SlotStore, rounds: int) -> None:
    dice = random.Random(7)
    keys = [f"key{number}" for number in range(60)]
    await write(slots, *keys[:20])
    num_files = descriptors_of(slots.path)
    for _ in range(rounds):
        stop = StopToken()
        into = [memoryview(bytearray(PAGE_NBYTES)) for _ in keys]
        tasks = [
            asyncio.create_task(slots.read(keys, into, stop)),
            asyncio.create_task(write(slots, *dice.sample(keys, 30))),
            asyncio.create_task(slots.count_prefix(keys)),
            asyncio.create_task(slots.sweep()),
        ]
        for _ in range(dice.randrange(12)):
            await asyncio.sleep(0)
        for task in dice.sample(tasks, dice.randrange(1, 5)):
            task.cancel()
        await asyncio.wait(tasks)
        await quiet(stop)
        await slots.delete(keys[30:])
    assert descriptors_of(slots.path) == num_files
    assert slots._opened
    assert not slots._opened._live
    for key in await slots.list_keys():
        assert await read(slots, key) == 1
    assert not {"checksum", "entry", "damaged", "abandoned", "taken"} & set(slots.stats)
    await check_accounts(slots)


@pytest.mark.asyncio
async def test_cancels_lose_no_slot(slots: SlotStore) -> None:
    """However calls are cancelled, no slot stays taken, no descriptor open, and every object is whole."""
    await cancel_at_random(slots, 40)


@pytest.mark.asyncio
@pytest.mark.stress
async def test_cancels_lose_no_slot_for_long(slots: SlotStore) -> None:
    """However often calls are cancelled, no slot stays taken, no descriptor open, and every object is whole."""
    await cancel_at_random(slots, 1000)


@pytest.mark.asyncio
async def test_a_write_cancelled_in_the_queue_makes_nothing(kind: str, tmp_path: Path) -> None:
    """A write whose job has not begun makes no segment when it is cancelled."""
    threads = ManualThreads()
    store = open_slots(kind, tmp_path, threads=threads)
    writing = asyncio.create_task(write(store, "a"))
    await until(lambda: threads.pending == 1)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    threads.run_all()
    assert list(tmp_path.iterdir()) == []
    await store.aclose()


@pytest.mark.asyncio
async def test_a_lookup_cancelled_while_the_segment_is_made(kind: str, tmp_path: Path) -> None:
    """It ends at once, and the next call finds the segment made."""
    threads = ManualThreads()
    store = open_slots(kind, tmp_path, threads=threads)
    looking = asyncio.create_task(store.count_prefix(["a"]))
    await until(lambda: threads.pending == 1)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    writing = asyncio.create_task(write(store, "a"))
    await until(lambda: threads.pending == 2)
    threads.run_all()
    assert await writing == 1
    assert await store.count_prefix(["a"]) == 1
    await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["get", "put"])
async def test_close_does_not_wait_and_takes_nothing_from_a_thread(
    slots: SlotStore, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Close returns while a thread is in a slot, which stays mapped until the thread has passed."""
    hold = Hold(monkeypatch, name)
    into = memoryview(bytearray(PAGE_NBYTES))
    stop = StopToken()
    call = slots.read(["a"], [into], stop) if name == "get" else write(slots, "d")
    running = asyncio.create_task(call)
    await hold.inside.wait()
    await slots.aclose()
    gc.collect()
    if name == "get":
        with pytest.raises(StoreUnavailable):
            await running
        assert stop.busy
    hold.release()
    if name == "get":
        await quiet(stop)
        assert into == page_of("a")
    else:
        assert await running == 1
    later = open_slots(kind, tmp_path)
    assert await later.count_prefix(["a", "b", "c", *["d"] * (name == "put")]) == 3 + (name == "put")
    await check_accounts(later)
    await later.aclose()
    del running, call
    await until(lambda: descriptors_of(slots.path) == 0)


@pytest.mark.asyncio
async def test_after_close_every_call_is_refused(slots: SlotStore) -> None:
    """A closed store raises StoreUnavailable, keeps its counts, and may be closed again."""
    await read(slots, "missing")
    await slots.aclose()
    await slots.aclose()
    for call in (
        slots.count_prefix(["a"]),
        read(slots, "a"),
        write(slots, "a"),
        slots.delete([]),
        slots.list_keys(),
        slots.stat(["a"]),
        slots.sweep(),
        slots.list_namespaces(),
    ):
        with pytest.raises(StoreUnavailable, match="was closed; open another one"):
            await call
    assert slots.stats == {"missing": 1}


@pytest.mark.asyncio
async def test_threads_of_the_caller_stay_open(kind: str, tmp_path: Path) -> None:
    """Closing a store leaves alone the threads that it was given."""
    threads = CountingThreads()
    store = open_slots(kind, tmp_path, threads=threads)
    await write(store, "a")
    await store.aclose()
    assert threads.submit(int, "1").result(30) == 1
    threads.shutdown()


def test_a_store_belongs_to_one_loop(kind: str, tmp_path: Path) -> None:
    """Use on a second loop is refused, as nothing could be reported to it."""
    store = open_slots(kind, tmp_path)
    asyncio.run(write(store, "a"))
    with pytest.raises(WrongLoopError, match="open one for each"):
        asyncio.run(write(store, "b"))
    asyncio.run(store.aclose())


FORK = """
async def use(store):
    calls = (store.count_prefix(["a"]), read(store, "a"), write(store, "a"), store.delete(["a"]), store.sweep())
    for call in calls:
        try:
            await call
        except WrongLoopError as error:
            assert f"process {os.getppid()}" in str(error) and f"fork {os.getpid()}" in str(error), error
            assert "open one of its own here" in str(error), error
        else:
            raise AssertionError("a fork used its parent's store")
    await store.aclose()
    own = open_slots(kind, directory)
    assert await read(own, "a") == 1 and await write(own, "child") == 1
    await own.aclose()

async def main():
    store = open_slots(kind, directory)
    await write(store, "a")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.events._set_running_loop(None)
            asyncio.run(use(store))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert await read(store, "a", "child") == 2
    await check_accounts(store)
    await store.aclose()

asyncio.run(main())
"""


def test_a_forked_child_is_refused_and_opens_its_own(kind: str, tmp_path: Path) -> None:
    """In a fork each call says whose store it is; one opened there shares the segment with the parent's."""
    finish(start(FORK, kind, tmp_path))
