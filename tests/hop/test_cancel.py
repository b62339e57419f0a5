"""However a waiter is cancelled, what a thread may touch stays with its hop until the thread has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import pytest

from hicache_async._hop import Hop, HopRegistry
from hicache_async._threads import DaemonThreads
from hicache_async.types import StopToken
from tests.hop.book import LIMIT_S, Book, settled

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


async def cancel_natively(hop: Hop[int]) -> None:
    waiter = asyncio.create_task(settled(hop))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter


async def cancel_before_it_ran(hop: Hop[int]) -> None:
    waiter = asyncio.create_task(settled(hop))
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter


async def cancel_by_scope(hop: Hop[int]) -> None:
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(settled, hop)
            await asyncio.sleep(0)
            scope.cancel()
    assert scope.cancelled_caught


async def cancel_by_timeout(hop: Hop[int]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await settled(hop)


async def cancel_twice(hop: Hop[int]) -> None:
    async def stubborn() -> None:
        try:
            await settled(hop)
        finally:
            await settled(hop)

    waiter = asyncio.create_task(stubborn())
    for _ in range(2):
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await waiter


CANCELS = [cancel_natively, cancel_before_it_ran, cancel_by_scope, cancel_by_timeout, cancel_twice]


@pytest.mark.parametrize("cancel", CANCELS)
async def test_cancelling_a_waiter_frees_nothing(
    cancel: Callable[[Hop[int]], Awaitable[None]], hop: Hop[int], book: Book, hops: HopRegistry
) -> None:
    """However a waiter is cancelled, the page comes back only after the thread's last byte."""
    neighbour = asyncio.create_task(settled(hop))
    await asyncio.sleep(0)
    await cancel(hop)
    book.check_still_owned(hop, hops)
    assert not neighbour.done()
    book.finish.set()
    await neighbour
    book.check_given_back(hop, hops)
    assert (hop.result, hop.error) == (2, None)


@pytest.mark.parametrize("cancel", CANCELS)
async def test_cancelling_the_waiter_of_a_call_leaves_the_call(
    cancel: Callable[[Hop[int]], Awaitable[None]], book: Book, hops: HopRegistry, threads: DaemonThreads
) -> None:
    """A store's coroutine is nobody's to cancel: it goes on, and settles the hop with its result."""
    book.take()

    async def call(stop: StopToken) -> int:
        return await asyncio.wrap_future(threads.submit(book.fill))

    hop = hops.start_call("read", call, book.give_back)
    assert await asyncio.to_thread(book.writing.wait, LIMIT_S)
    await cancel(hop)
    book.check_still_owned(hop, hops)
    book.finish.set()
    await settled(hop)
    book.check_given_back(hop, hops)
    assert (hop.result, hop.error) == (2, None)
