"""A store's coroutine and the threads it started end apart; the hop waits for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from hicache_async._hop import Hop, HopRegistry
from hicache_async._threads import DaemonThreads
from hicache_async.types import StopToken
from tests.hop.book import LIMIT_S, Book, settled

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


def bracketed(threads: DaemonThreads, fn: Callable[[], int], stop: StopToken) -> Future[int]:
    """Run ``fn`` on a thread between job_started and job_ended, as a store should."""
    loop = asyncio.get_running_loop()
    stop.job_started()
    job = threads.submit(fn)
    job.add_done_callback(lambda _: loop.call_soon_threadsafe(stop.job_ended))
    return job


async def tear(hop: Hop[int]) -> None:
    """Cancel a hop's own task, which nobody but a loop that shuts down does."""
    assert hop.task is not None
    hop.task.cancel()
    await asyncio.wait([hop.task])
    await asyncio.sleep(0)  # its done callback has run


async def test_a_torn_call_that_bracketed_settles_when_its_thread_ends(
    book: Book, hops: HopRegistry, threads: DaemonThreads
) -> None:
    """The stop token knows of the thread: the page waits for it, then comes back."""
    book.take()

    async def call(stop: StopToken) -> int:
        return await asyncio.wrap_future(bracketed(threads, book.fill, stop))

    hop = hops.start_call("read", call, book.give_back)
    assert await asyncio.to_thread(book.writing.wait, LIMIT_S)
    await tear(hop)
    book.check_still_owned(hop, hops)
    book.finish.set()
    await settled(hop)
    book.check_given_back(hop, hops)
    assert isinstance(hop.error, asyncio.CancelledError)


async def test_a_torn_call_whose_bracketed_jobs_are_over_settles(
    book: Book, hops: HopRegistry, threads: DaemonThreads
) -> None:
    """Torn between two jobs there is no thread left behind, so the page comes back at once."""
    book.take()
    book.finish.set()
    between_jobs = asyncio.Event()

    async def call(stop: StopToken) -> int:
        await asyncio.wrap_future(bracketed(threads, book.fill, stop))
        assert not stop.busy
        between_jobs.set()
        return await asyncio.get_running_loop().create_future()

    hop = hops.start_call("read", call, book.give_back)
    await between_jobs.wait()
    await tear(hop)
    book.check_given_back(hop, hops)


async def test_a_torn_call_that_never_bracketed_keeps_its_page(
    book: Book, hops: HopRegistry, threads: DaemonThreads
) -> None:
    """Nobody can tell whether a thread was left behind: the hop stays live and the page is never reused."""
    book.take()
    jobs: list[Future[int]] = []

    async def call(stop: StopToken) -> int:
        jobs.append(threads.submit(book.fill))
        return await asyncio.wrap_future(jobs[0])

    hop = hops.start_call("read", call, book.give_back)
    assert await asyncio.to_thread(book.writing.wait, LIMIT_S)
    await tear(hop)
    book.finish.set()
    jobs[0].result(LIMIT_S)
    await asyncio.sleep(0)
    assert book.free == []
    assert hop in hops.live
    assert not hop.settled.done()


async def test_a_call_that_returns_early_waits_for_its_thread(
    book: Book, hops: HopRegistry, threads: DaemonThreads
) -> None:
    """A store may return as soon as it was stopped: its count is kept until the thread is quiet."""
    book.take()

    async def call(stop: StopToken) -> int:
        bracketed(threads, book.fill, stop)
        return 0

    hop = hops.start_call("read", call, book.give_back)
    assert hop.task is not None
    assert await asyncio.to_thread(book.writing.wait, LIMIT_S)
    await asyncio.wait([hop.task])
    await asyncio.sleep(0)
    book.check_still_owned(hop, hops)
    book.finish.set()
    await settled(hop)
    book.check_given_back(hop, hops)
    assert (hop.result, hop.error) == (0, None)


async def test_a_call_that_lets_out_a_cancel_of_its_own_settles(book: Book, hops: HopRegistry) -> None:
    """A store that awaited something of its own that was cancelled has ended, as with any other error."""
    book.take()
    book.bytes[:] = b"\x01\x01"

    async def call(stop: StopToken) -> int:
        connection_lost = asyncio.get_running_loop().create_future()
        connection_lost.cancel()
        return await connection_lost

    hop = hops.start_call("read", call, book.give_back)
    async with asyncio.timeout(LIMIT_S):
        await settled(hop)
    book.check_given_back(hop, hops)
    assert isinstance(hop.error, asyncio.CancelledError)
