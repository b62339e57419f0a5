"""Whoever goes while pages are coded leaves nothing behind, and no buffer is touched once handed back."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from hicache_async.errors import StoreUnavailable
from hicache_async.stores import MemoryStore
from hicache_async.stores._codecs.scratch import Scratch
from hicache_async.stores.codec import AesGcm, CodecStore
from hicache_async.testing.faults import HangingStore, HeldStore
from hicache_async.testing.manual import ManualThreads
from hicache_async.types import StopToken
from tests.stores.pages import page_of, read, until, write
from tests.stores.wrappers import CODECS, KEY_ENV, ReadCall, Telling, key_in_environment

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]
__all__ = ["key_in_environment"]

KEYS = ("a", "b", "c")


async def filled(codec: str = "aesgcm") -> MemoryStore:
    """Return a store with the frames of all keys."""
    memory = MemoryStore()
    store = CodecStore(memory, CODECS[codec]())
    await write(store, *KEYS)
    return memory


async def test_a_cancelled_read_keeps_its_buffers_until_its_thread_has_passed() -> None:
    """Cancelled before the thread began, nothing is decoded; the buffers come back when that is certain."""
    threads = ManualThreads()
    store = CodecStore(await filled(), AesGcm(KEY_ENV), threads=threads)
    call = ReadCall(store, KEYS, 1000)
    await until(lambda: threads.pending == 1)
    await call.tear()
    threads.run_all()
    await call.over()
    assert store._scratch.used_nbytes == 0


async def test_a_read_cancelled_in_its_thread_ends_after_the_page_in_hand() -> None:
    """The thread sees the cancel before the next page; the buffers are handed back after it, not before."""
    entered, decoded = [], []

    class Stopping(AesGcm):
        def decoder(self):  # type: ignore[no-untyped-def]
            decode = super().decoder()

            def slow(key: bytes, frame: memoryview, into: memoryview) -> object:
                entered.append(key)
                assert call.hop.task is not None
                call.hop.stop.stop()
                assert not call.given_back
                decoded.append(key)
                return decode(key, frame, into)

            return slow

    threads = ManualThreads()
    store = CodecStore(await filled(), Stopping(KEY_ENV), threads=threads)
    call = ReadCall(store, KEYS, 1000)
    await until(lambda: threads.pending == 1)
    threads.run_all()
    await call.over()
    assert decoded == [b"a"] and call.filled == [page_of("a")]


@pytest.mark.parametrize("verb", ["read", "write"])
async def test_a_cancel_reaches_the_thread(verb: str) -> None:
    """The call ends at once, the thread after the page in hand; until then a read's buffers are its own."""
    entered, may_go, done = threading.Event(), threading.Event(), []

    class Gated(AesGcm):
        def encoder(self):  # type: ignore[no-untyped-def]
            return through(super().encoder())

        def decoder(self):  # type: ignore[no-untyped-def]
            return through(super().decoder())

    def through(code):  # type: ignore[no-untyped-def]
        def gated(key: bytes, *buffers: memoryview) -> object:
            entered.set()
            assert may_go.wait(30)
            done.append(key)
            return code(key, *buffers)

        return gated

    store = CodecStore(await filled(), Gated(KEY_ENV))
    loop = asyncio.get_running_loop()
    if verb == "read":
        call = ReadCall(store, KEYS, 1000)
        await loop.run_in_executor(None, entered.wait)
        await call.tear()
        assert not call.given_back and call.hop.stop.busy
        may_go.set()
        await call.over()
    else:
        task = asyncio.ensure_future(write(store, "x", "y", "z"))
        await loop.run_in_executor(None, entered.wait)
        task.cancel()
        await asyncio.wait([task])
        assert store._scratch.used_nbytes > 0
        may_go.set()
        while store._scratch.used_nbytes:
            await loop.run_in_executor(None, threading.Event().wait, 0.001)
    assert len(done) == 1
    await store.aclose()


async def test_a_waiter_that_is_admitted_and_cancelled_in_one_turn_takes_nothing() -> None:
    """What it was given goes to the next."""
    scratch = Scratch(10)
    taken = await scratch.take(10, StopToken())
    first, second = (asyncio.ensure_future(scratch.take(10, StopToken())) for _ in range(2))
    await asyncio.sleep(0)
    scratch.give_back(taken)
    first.cancel()
    assert await second == 10
    await asyncio.wait([first])
    assert (first.cancelled(), scratch.used_nbytes) == (True, 10)
    scratch.give_back(10)
    await scratch.take(10, StopToken())
    turned_away = asyncio.ensure_future(scratch.take(5, StopToken()))
    await asyncio.sleep(0)
    scratch.close()
    turned_away.cancel()
    await asyncio.wait([turned_away])
    assert scratch.used_nbytes == 10


@pytest.mark.parametrize("codec", CODECS)
async def test_a_store_that_hangs_below_holds_no_buffer_of_the_caller(codec: str) -> None:
    """It fills scratch memory: a cancelled read gives its buffers back at once, the scratch when it wakes up."""
    hanging = HangingStore(MemoryStore(), "read")
    store = CodecStore(Telling(hanging), CODECS[codec]())
    await store.write(KEYS, [memoryview(bytes(1000))] * 3)
    call = ReadCall(store, KEYS, 1000)
    await hanging.hung()
    assert store._scratch.used_nbytes > 0
    await call.tear()
    await call.over()
    assert store._scratch.used_nbytes > 0
    hanging.release()
    assert store._scratch.used_nbytes == 0


async def test_a_cancelled_write_stops_after_the_page_in_hand() -> None:
    """Nothing of it is stored, the scratch is free, and the thread reads no further page."""
    threads = ManualThreads()
    memory = MemoryStore()
    store = CodecStore(memory, AesGcm(KEY_ENV), threads=threads)
    call = asyncio.ensure_future(write(store, *KEYS))
    await until(lambda: threads.pending == 1)
    call.cancel()
    await asyncio.wait([call])
    threads.run_all()
    await until(lambda: store._scratch.used_nbytes == 0)
    assert call.cancelled() and await memory.list_keys() == ()


async def test_who_waits_for_scratch_can_leave() -> None:
    """A cancelled waiter takes nothing and stands in nobody's way."""
    threads = ManualThreads()
    store = CodecStore(await filled(), AesGcm(KEY_ENV), threads=threads, scratch_bytes=1100)
    first, second, third = (
        asyncio.ensure_future(store.read([key], [memoryview(bytearray(1000))], StopToken())) for key in KEYS
    )
    await until(lambda: threads.pending == 1)
    second.cancel()
    await asyncio.wait([second])
    threads.run_all()
    await until(lambda: threads.pending == 1)
    threads.run_all()
    assert await asyncio.gather(first, third) == [1, 1]
    assert store._scratch.used_nbytes == 0


async def test_closing_turns_away_who_waits() -> None:
    """For scratch memory or for a thread: both get StoreUnavailable, and no buffer stays busy."""
    threads = ManualThreads()
    store = CodecStore(await filled(), AesGcm(KEY_ENV), threads=threads, scratch_bytes=1100)
    calls = [ReadCall(store, [key], 1000) for key in KEYS]
    await until(lambda: threads.pending == 1)
    await store.aclose()
    threads.shutdown()
    for call in calls:
        await call.over()
        assert isinstance(call.hop.error, StoreUnavailable)
    assert store._scratch.used_nbytes == 0
    with pytest.raises(StoreUnavailable, match="closed"):
        await write(store, "a")


async def test_threads_that_were_shut_down_are_a_fault() -> None:
    """A store on threads that take no job any more says so, and leaves nothing behind."""
    threads = ManualThreads()
    store = CodecStore(await filled(), AesGcm(KEY_ENV), threads=threads)
    threads.shutdown()
    for verb in (read(store, "a"), write(store, "z")):
        with pytest.raises(StoreUnavailable, match="did not take the job"):
            await verb
    assert store._scratch.used_nbytes == 0


async def test_an_encode_that_fails_is_raised() -> None:
    """What a codec raises in its thread comes to the caller of the write."""

    class Broken(AesGcm):
        def encoder(self):  # type: ignore[no-untyped-def]
            raise OSError("no entropy")

    store = CodecStore(MemoryStore(), Broken(KEY_ENV))
    with pytest.raises(OSError, match="no entropy"):
        await write(store, "a")
    assert store._scratch.used_nbytes == 0
    await store.aclose()


async def test_a_held_store_lets_others_pass() -> None:
    """A read that is held below keeps its share of scratch only; others go on."""
    held = HeldStore(await filled(), ["read"])
    store = CodecStore(held, AesGcm(KEY_ENV))
    first = asyncio.ensure_future(read(store, "a"))
    await held.arrived(1, "read")
    held._held.clear()
    assert await read(store, "b", "c") == 2
    held.open()
    assert await first == 1
    await store.aclose()
    assert os.environ[KEY_ENV]
