"""Whoever goes, by a deadline or a cancel, leaves nothing behind, and no buffer is touched once handed back."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_async._hop import Hop, HopRegistry
from hicache_async.abc import Store
from hicache_async.errors import StoreUnavailable
from hicache_async.stores import FileStore, GuardedStore, MemoryStore
from hicache_async.testing.faults import FlakyStore, HangingStore, HeldStore, StoreWrapper
from hicache_async.testing.manual import ManualClock, ManualThreads
from hicache_async.types import Stop, StopToken
from tests.stores.pages import PAGE_NBYTES, page_of, until, write
from tests.stores.test_guard import OPTIONS, fails, guarded, open_now, use

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

POISON = b"\xaa" * PAGE_NBYTES
KEYS = ("a", "b", "c", "d")


class ReadHop:
    """A read as the cache makes it: its buffers are handed back, and poisoned, when the hop settles."""

    def __init__(self, store: Store) -> None:
        self.bugs: list[BaseException] = []
        self.buffers = [bytearray(PAGE_NBYTES) for _ in KEYS]
        self.given_back = False
        self._hops = HopRegistry(asyncio.get_running_loop(), self.bugs.append)

        async def call(stop: StopToken) -> int:
            return await store.read(KEYS, [memoryview(buffer) for buffer in self.buffers], stop)

        self.hop: Hop[int] = self._hops.start_call("read", call, self._give_back)

    def _give_back(self, hop: Hop[int]) -> None:
        self.given_back = True
        for buffer in self.buffers:
            buffer[:] = POISON

    async def over(self) -> None:
        """Return when the buffers have been handed back, and nothing has touched them some turns later."""
        await asyncio.wait([self.hop.settled])
        for _ in range(20):
            await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        """Check that what was handed back is still poisoned."""
        assert self.bugs == []
        assert not self.given_back or all(buffer == POISON for buffer in self.buffers)

    async def tear(self) -> None:
        """Cancel its own task, which nobody but a loop that shuts down does."""
        assert self.hop.task is not None
        self.hop.task.cancel()
        await asyncio.wait([self.hop.task])
        await asyncio.sleep(0)


def calls_apart() -> list[asyncio.Task[Any]]:
    """Return the running tasks of guards."""
    return [task for task in asyncio.all_tasks() if task.get_name() == "hicache:guarded-call"]


async def filled(tmp_path: Path) -> tuple[FileStore, ManualThreads]:
    """Return a file store with the pages of all keys, whose threads move when told."""
    first = FileStore(tmp_path)
    await write(first, *KEYS)
    await first.aclose()
    threads = ManualThreads()
    return FileStore(tmp_path, threads=threads, num_lanes=1), threads


# Reads that miss their deadline


async def test_a_read_at_its_deadline_keeps_its_buffers_until_the_thread_has_passed(tmp_path: Path) -> None:
    """The caller hears at once; the hop settles, and the pages change hands, when the thread is out of them."""
    files, threads = await filled(tmp_path)
    store, clock = guarded(files)
    read = ReadHop(store)
    await until(lambda: threads.pending == 1)
    clock.advance(2.0)
    assert read.hop.task is not None
    await asyncio.wait([read.hop.task])
    assert isinstance(read.hop.task.exception(), StoreUnavailable)
    assert (read.given_back, read.hop.stop.stopped, read.hop.stop.busy) == (False, True, True)
    threads.run_all()
    await read.over()
    assert isinstance(read.hop.error, StoreUnavailable)
    assert not calls_apart() and store.stats["failures"] == 1
    await store.aclose()


async def test_the_thread_is_told_to_stop_at_the_deadline(tmp_path: Path) -> None:
    """After the deadline at most the page in hand is filled."""
    files, threads = await filled(tmp_path)
    store, clock = guarded(files)
    read = ReadHop(store)
    await until(lambda: threads.pending == 1)
    clock.advance(2.0)
    before = [bytes(buffer) for buffer in read.buffers]
    threads.run_all()
    assert [bytes(buffer) for buffer in read.buffers] == before
    await read.over()
    await store.aclose()


async def test_a_hung_read_gives_its_buffers_back_when_it_wakes_up() -> None:
    """However late: until then the token is busy, though its caller has long gone on."""
    hanging = HangingStore(MemoryStore(), "read")
    store, clock = guarded(hanging)
    read = ReadHop(store)
    await hanging.hung()
    clock.advance(2.0)
    for _ in range(20):
        await asyncio.sleep(0)
        clock.advance(100.0)
    assert not read.given_back and store._operations.attempts.num_left == 1
    hanging.release()
    await read.over()
    assert store._operations.attempts.num_left == 0 and not calls_apart()


@pytest.mark.parametrize("brackets", [True, False])
async def test_what_a_read_raises_that_nobody_waits_for_is_not_reported(brackets: bool) -> None:
    """Not by the loop either, as an exception that was never retrieved."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    await late_read(brackets)
    gc.collect()
    assert not reported


async def late_read(brackets: bool) -> None:
    """Read what raises after its deadline, having told of a thread or not."""

    class Late(StoreWrapper):
        async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
            if brackets:
                stop.job_started()
                stop.job_ended()
            started.append(stop)
            await gate
            raise OSError("late")

    started: list[StopToken] = []
    gate = asyncio.get_running_loop().create_future()
    store, clock = guarded(Late(MemoryStore()))
    read = ReadHop(store)
    await until(lambda: bool(started))
    clock.advance(2.0)
    await until(lambda: store._operations.attempts.num_left == 1)
    gate.set_result(None)
    await read.over()
    await until(lambda: not calls_apart())


# Reads that are stopped


class PageByPage(StoreWrapper):
    """Fill one page each time it is let, after a look at the token, as a thread does."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.may_read = asyncio.Semaphore(0)

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        self.calls["read"] += 1
        for count, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            await self.may_read.acquire()
            if stop.stopped:
                return count
            assert await self.inner.read([key], [buffer], StopToken()) == 1
        return len(keys)


async def test_a_stop_reaches_the_store_and_is_no_outcome() -> None:
    """The inner read sees the caller's token; that it came back short then is neither success nor failure."""
    pages = PageByPage(MemoryStore())
    store, clock = guarded(pages, max_failures=2)
    await write(store, *KEYS)
    await use(store, "write")
    flaky, store.inner = store.inner, FlakyStore(pages, "count_prefix", error=OSError("gone"), at=None)
    await fails(store, "count_prefix")
    store.inner = flaky
    stop = StopToken()
    into = [memoryview(bytearray(PAGE_NBYTES)) for _ in KEYS]
    call = asyncio.ensure_future(store.read(KEYS, into, stop))
    pages.may_read.release()
    await until(lambda: into[0] == page_of("a"))
    stop.stop()
    pages.may_read.release()
    assert await call == 1
    assert (store.stats["failures"], store.stats["deadline_misses"], clock.pending) == (1, 0, 0)
    store.inner = FlakyStore(pages, "count_prefix", error=OSError("gone"), at=None)
    await fails(store, "count_prefix")
    assert store.breaker == "open"  # the stopped read in between has not ended the row


async def test_a_stopped_read_that_does_not_end_is_a_failure() -> None:
    """A store that hangs although it was told to stop has missed the deadline, whoever has given up meanwhile."""
    hanging = HangingStore(MemoryStore(), "read")
    store, clock = guarded(hanging, max_failures=1)
    read = ReadHop(store)
    await hanging.hung()
    read.hop.stop.stop()
    clock.advance(2.0)
    assert store.breaker == "open"
    hanging.release()
    await read.over()


async def test_an_error_after_a_stop_is_no_outcome() -> None:
    """What a stopped read raises is passed on, is not tried again and tells nothing."""
    held = HeldStore(MemoryStore(), ["read"])
    store, _ = guarded(FlakyAfter(held), max_attempts=3, max_failures=1)
    stop = StopToken()
    call = asyncio.ensure_future(use(store, "read", stop))
    await held.arrived()
    stop.stop()
    held.open()
    with pytest.raises(OSError, match="after all"):
        await call
    assert (store.breaker, store.stats["failures"], store.stats["retries"]) == ("closed", 0, 0)


class FlakyAfter(StoreWrapper):
    """Do what is asked, and raise."""

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        await self.inner.read(keys, into, stop)
        raise OSError("after all")


async def test_a_read_stopped_in_its_pause_is_not_tried_again() -> None:
    """A stop between two attempts ends the read with what the first one raised."""
    flaky = FlakyStore(MemoryStore(), "read", error=OSError("gone"), at=None)
    store, clock = guarded(flaky, max_attempts=3, max_failures=1)
    stop = StopToken()
    call = asyncio.ensure_future(use(store, "read", stop))
    await until(lambda: clock.pending == 2)
    stop.stop()
    clock.advance(0.5)
    with pytest.raises(OSError, match="gone"):
        await call
    assert (flaky.calls["read"], store.breaker) == (1, "closed")


async def test_a_read_whose_threads_still_run_is_not_tried_again() -> None:
    """Two attempts never fill the same buffers: where the first has left a thread behind there is no second."""

    class LeavesThread(StoreWrapper):
        async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
            self.calls["read"] += 1
            stop.job_started()
            tokens.append(stop)
            raise OSError("gone")

    tokens: list[StopToken] = []
    inner = LeavesThread(MemoryStore())
    store, clock = guarded(inner, max_attempts=3)
    read = ReadHop(store)
    assert read.hop.task is not None
    await asyncio.wait([read.hop.task])
    assert (inner.calls["read"], read.given_back, clock.pending) == (1, False, 0)
    tokens[0].job_ended()
    await read.over()
    assert isinstance(read.hop.error, OSError)


# Cancels


@pytest.mark.parametrize("fault", ["held", "retried", "slow"])
@pytest.mark.parametrize("verb", ["count_prefix", "read", "write"])
async def test_a_cancel_at_each_await_leaves_nothing_behind(verb: str, fault: str) -> None:
    """Cancelled after any number of turns: no timer, no task and no outcome is left, and the next call works."""
    for num_turns in range(12):
        await cancelled_after(num_turns, verb, fault)


async def cancelled_after(num_turns: int, verb: str, fault: str) -> None:
    """Cancel one call after so many turns, and look what is left."""
    held = HeldStore(MemoryStore(), [verb] if fault == "held" else [])
    flaky = FlakyStore(held, verb, error=OSError("once"), at={1} if fault == "retried" else ())
    store, clock = guarded(Slow(flaky) if fault == "slow" else flaky, max_attempts=2, max_failures=1)
    stop = StopToken()
    call = asyncio.ensure_future(use(store, verb, stop))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    call.cancel()
    (result,) = await asyncio.gather(call, return_exceptions=True)
    held.open()
    await until(lambda: not calls_apart() and not stop.busy)
    assert clock.pending == 0
    assert isinstance(result, int | asyncio.CancelledError), (num_turns, result)
    assert (store.breaker, store.stats["failures"]) == ("closed", 0)
    store.inner = held
    assert await use(store, "write") == 1


class Slow(StoreWrapper):
    """Take some turns of the loop."""

    async def around(self, verb: str, call: Callable[[], Any], stop: StopToken) -> int:
        for _ in range(5):
            await asyncio.sleep(0)
        return int(await call())


async def test_a_read_whose_caller_is_torn_away_keeps_its_buffers(tmp_path: Path) -> None:
    """The attempt is told to stop and left alone; the pages come back when its thread has passed."""
    files, threads = await filled(tmp_path)
    store, clock = guarded(files)
    read = ReadHop(store)
    await until(lambda: threads.pending == 1)
    await read.tear()
    assert (read.given_back, read.hop.stop.stopped, clock.pending) == (False, True, 0)
    threads.run_all()
    await read.over()
    assert not calls_apart()
    await store.aclose()


async def test_a_read_torn_away_in_its_pause_gives_its_buffers_back() -> None:
    """Between two attempts nothing runs, so the pages come back at once."""
    flaky = FlakyStore(MemoryStore(), "read", error=OSError("gone"), at=None)
    store, clock = guarded(flaky, max_attempts=3)
    read = ReadHop(store)
    await until(lambda: clock.pending == 2)
    await read.tear()
    await read.over()
    assert clock.pending == 0


@pytest.mark.parametrize("brackets", [True, False])
async def test_an_attempt_that_is_torn_away_itself(brackets: bool) -> None:
    """Its pages come back when the threads it told of have passed; if it told of none, never, for nobody can tell."""

    class Threaded(StoreWrapper):
        async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
            tokens.append(stop)
            if brackets:
                stop.job_started()
            return await asyncio.get_running_loop().create_future()

    tokens: list[StopToken] = []
    store, clock = guarded(Threaded(MemoryStore()), max_failures=1, max_attempts=3)
    read = ReadHop(store)
    await until(lambda: bool(tokens))
    (attempt,) = calls_apart()
    attempt.cancel()
    assert read.hop.task is not None
    await asyncio.wait([read.hop.task])
    assert isinstance(read.hop.task.exception(), StoreUnavailable)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not read.given_back and read.hop.stop.busy
    if brackets:
        tokens[0].job_ended()
        await read.over()
    assert (store.breaker, clock.pending, store._operations.attempts.num_left) == ("closed", 0, 0)


async def test_a_store_that_cancels_something_of_its_own_has_failed() -> None:
    """A CancelledError that nobody has asked for is a fault like others, and never ends the caller."""

    class Cancels(StoreWrapper):
        async def around(self, verb: str, call: Callable[[], Any], stop: StopToken) -> int:
            raise asyncio.CancelledError

    store, _ = guarded(Cancels(MemoryStore()), max_failures=2)
    for verb in ("count_prefix", "read"):
        assert isinstance(await fails(store, verb), StoreUnavailable)
    assert store.breaker == "open"


async def test_a_cancelled_lookup_cancels_the_question() -> None:
    """A lookup owns nothing: with its caller it ends at once, in the store too."""
    held = HeldStore(MemoryStore(), ["count_prefix"])
    store, clock = guarded(held)
    call = asyncio.ensure_future(use(store, "count_prefix"))
    await held.arrived()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not held.waiting and not calls_apart())
    assert clock.pending == 0


async def test_a_cancelled_write_is_as_without_a_guard() -> None:
    """The cancel reaches the inner write in the same task: whoever tells torn calls from others still can."""
    held = HeldStore(MemoryStore(), ["write"])
    store, clock = guarded(held)
    call = asyncio.ensure_future(use(store, "write"))
    await held.arrived()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (held.waiting, clock.pending, store.stats["failures"]) == ((), 0, 0)


@pytest.mark.parametrize("verb", ["count_prefix", "read", "write"])
async def test_a_cancelled_probe_makes_room_for_the_next(verb: str) -> None:
    """It tells nothing: the breaker is open as before, and whoever comes next is the probe."""
    held = HeldStore(MemoryStore(), [verb])
    store, clock = guarded(held, max_failures=1)
    open_now(store)
    clock.advance(4.0)
    probe = asyncio.ensure_future(use(store, verb))
    await held.arrived()
    assert store.refusal() is Stop.BREAKER_OPEN
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    assert (store.breaker, store.refusal()) == ("open", None)
    held.open()
    await use(store, verb)
    assert store.breaker == "closed"


async def test_close_does_not_wait_for_what_hangs() -> None:
    """aclose() closes the store inside and returns; a hung read keeps its buffers as before."""
    hanging = HangingStore(MemoryStore(), "read")
    store = GuardedStore(hanging, **OPTIONS, clock=ManualClock())
    read = ReadHop(store)
    await hanging.hung()
    await store.aclose()
    assert not read.given_back
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.count_prefix(["a"])
    hanging.release()
    await read.over()
    assert not calls_apart()
