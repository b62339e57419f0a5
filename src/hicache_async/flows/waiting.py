"""Waiting for what many wait for: each with a future of its own, so that cancelling one is nothing to the others."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from .._fence import resolve

T = TypeVar("T")

Waiters = list[asyncio.Future[None]]


async def wait_among(waiters: Waiters) -> None:
    """Return when :func:`wake` was called. Cancellation: ends this wait and leaves nothing behind."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(waiter)
    try:
        await waiter
    finally:
        waiters.remove(waiter)


def wake(waiters: Waiters) -> None:
    """Let all who wait now go on."""
    for waiter in waiters:
        resolve(waiter)


def end_of(work: asyncio.Future[T]) -> asyncio.Future[None]:
    """Return a future of one's own for the end of ``work``, to which it is nothing if that is cancelled or resolved."""
    ended: asyncio.Future[None] = work.get_loop().create_future()

    def over(work: asyncio.Future[T]) -> None:
        if not work.cancelled():
            work.exception()  # seen, whoever asks for the result
        resolve(ended)

    work.add_done_callback(over)
    return ended
