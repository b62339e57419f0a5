"""Waits of the tests of CudaDevice, none of them for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from hicache_async.abc import Fence
from hicache_async.cuda import CudaDevice


async def to_end(device: CudaDevice, *fences: Fence) -> None:
    for fence in fences:
        await asyncio.wait_for(device.wait(fence), 10)


async def recorded(device: CudaDevice, fences: Sequence[Fence]) -> None:
    await asyncio.wait_for(device.recorded(fences), 10)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop go on until the GPU has come so far."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what a stream has done tells nobody
            await asyncio.sleep(0.001)
