"""Waiting for what many wait for: each with a future of its own, so that cancelling one is nothing to the others."""

from __future__ import annotations

import asyncio

from .._fence import resolve

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
