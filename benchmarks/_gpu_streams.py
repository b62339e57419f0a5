"""The parts of gpu_check about who waits for whom: block() from a thread, fences of side streams, long kernels."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from hicache_async import HiCache, Tier
from hicache_async.config import HostLayout, IoMode
from hicache_async.testing.golden import check_page, fill_page

from ._gpu import Gpu
from ._gpu_engine import Engine, Prompt, config_of, make_arena, plan_of
from ._gpu_right import compute
from ._gpu_rows import Row, Sizes, check

BOTH_MODES = ((HostLayout.PAGE_FIRST, IoMode.KERNEL), (HostLayout.PAGE_FIRST_DIRECT, IoMode.DIRECT))

STALE, OLD, NEW = (bytes([mark]) * 32 for mark in (0x0A, 0x0B, 0x0C))
"""Names of pages."""


async def block(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    """A thread blocks on each layer of a copy that cannot begin yet: it goes on at once, its kernels wait."""
    for layout, io_mode in BOTH_MODES:
        seconds = await _block_in_a_thread(gpu, sizes, layout, io_mode)
        params = {"layout": layout.value, "io_mode": io_mode.value}
        yield Row("block.from_a_thread", params, {"us_per_layer": seconds * 1e6})


async def _block_in_a_thread(gpu: Gpu, sizes: Sizes, layout: HostLayout, io_mode: IoMode) -> float:
    engine = Engine(gpu, num_pages=2)
    device = gpu.make_device(compute_stream=engine.compute)
    try:
        arena = await make_arena(device, engine.kv, layout, 2)
        plan = plan_of(engine.kv, arena, io_mode, [1], [0])
        fill_page(arena, 0, OLD)
        await device.wait(device.host_to_device(plan, ())[-1])  # compiles the kernel
        fill_page(arena, 0, NEW)
        engine.write_now(1, STALE)

        gpu.stay_busy(side := gpu.runtime.new_stream(), sizes.delay_s)
        gate = device.fence(side)
        fences = device.host_to_device(plan, [gate])
        await device.recorded(fences)

        def forward() -> float:
            blocking_s = 0.0
            for layer, fence in enumerate(fences):
                start = time.perf_counter()
                fence.block(engine.compute)
                blocking_s += time.perf_counter() - start
                engine.read(1, layer)
            return blocking_s / len(fences)

        seconds = await asyncio.to_thread(forward)
        check(not gate.passed(), "block() came back only when the copy could begin: it waited in the thread")
        gpu.synchronize()
        engine.check_read(1, NEW)
        return seconds
    finally:
        gpu.synchronize()
        await device.aclose()


async def fence(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    """A fence is on the compute stream while another one is current, or on the stream that is named."""
    for is_named in (False, True):
        await _fence_beside(gpu, sizes, is_named=is_named)
        yield Row("fence.of_a_side_stream" if is_named else "fence.of_the_compute_stream")


async def _fence_beside(gpu: Gpu, sizes: Sizes, *, is_named: bool) -> None:
    engine = Engine(gpu, num_pages=2)
    device = gpu.make_device(compute_stream=engine.compute)
    try:
        arena = await make_arena(device, engine.kv, HostLayout.PAGE_FIRST_DIRECT, 2)
        side = gpu.runtime.new_stream()
        busy, idle = (side, engine.compute) if is_named else (engine.compute, side)
        engine.write_now(0, STALE)
        engine.stage(NEW)
        gpu.stay_busy(busy, sizes.delay_s)
        engine.write(0, NEW, busy)
        with gpu.runtime.on(side):
            written = device.fence(side if is_named else None)
            nothing = device.fence(idle)
        plan = plan_of(engine.kv, arena, IoMode.DIRECT, [0], [1])
        offloaded = device.device_to_host(plan, [written])
        await device.wait(nothing)
        check(not written.passed(), "a fence passed before what its stream had queued")
        gpu.synchronize()
        await device.wait(offloaded)
        check_page(arena, 1, NEW)
    finally:
        gpu.synchronize()
        await device.aclose()


# A long kernel


async def long_kernel(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    """While a kernel runs on the compute stream, pages that it does not touch are loaded, and offloaded."""
    for layout, io_mode in BOTH_MODES:
        params = {"layout": layout.value, "io_mode": io_mode.value}
        alone_s, beside_s, offload_s = await _beside_a_long_kernel(gpu, sizes, layout, io_mode)
        figures = {"alone_ms": alone_s * 1e3, "beside_it_ms": beside_s * 1e3}
        yield Row("long_kernel.delays_no_load", params, figures)
        yield Row("long_kernel.delays_no_offload", params, {"beside_it_ms": offload_s * 1e3})


async def _beside_a_long_kernel(
    gpu: Gpu, sizes: Sizes, layout: HostLayout, io_mode: IoMode
) -> tuple[float, float, float]:
    engine = Engine(gpu, num_pages=20)
    device = gpu.make_device(compute_stream=engine.compute)
    compiling, alone, beside, touched = (Prompt(number, num_pages=4) for number in range(1, 5))
    try:
        config = config_of(engine.kv, layout, io_mode)
        spare = await make_arena(device, engine.kv, layout, 4)
        async with HiCache.open(config, kv=engine.kv, device=device) as cache, AsyncExitStack() as leases:
            for prompt in (compiling, alone, beside):
                await compute(gpu, engine, cache, prompt, sizes.pause_s)
            await cache.admin.flush(Tier.HOST)
            await cache.admin.clear(Tier.DEVICE)
            await _load(cache, compiling)
            alone_pages, alone_s = await _load(cache, alone)
            offload = plan_of(engine.kv, spare, io_mode, alone_pages, range(4))
            await device.wait(device.device_to_host(offload, ()))  # compiles the way down

            works = leases.enter_context(touched.match(cache))
            await works.load()
            works.allocate_nowait(len(touched.tokens)).block()
            engine.stage(*touched.names)
            gpu.stay_busy(engine.compute, sizes.long_s)
            for page, name in zip(works.pages.tolist(), touched.names, strict=True):
                engine.write(page, name)
            running = cache.fence()
            works.release(after=running)

            beside_pages, beside_s = await _load(cache, beside)
            check(not running.passed(), "a load ended only when a kernel did that touches none of its pages")
            start = time.perf_counter()
            await device.wait(device.device_to_host(offload, ()))
            offload_s = time.perf_counter() - start
            check(
                not running.passed(), "an offload ended only when a kernel did that touches none of its pages"
            )

            gpu.synchronize()
            for page, name in zip(beside_pages, beside.names, strict=True):
                check_page(engine.kv, page, name)
            for page, name in enumerate(alone.names):
                check_page(spare, page, name)
            cache.audit()
        return alone_s, beside_s, offload_s
    finally:
        gpu.synchronize()
        await device.aclose()


async def _load(cache: HiCache, prompt: Prompt) -> tuple[list[int], float]:
    """Load a prompt, which is on the host only; returns its pages, and the seconds until all of it is there."""
    start = time.perf_counter()
    with prompt.match(cache) as lease:
        loading = await lease.load()
        await loading.finished()
        seconds = time.perf_counter() - start
        check(loading.loaded_tokens == len(prompt.tokens), f"{loading.loaded_tokens} tokens were loaded")
        return loading.pages.tolist(), seconds


__all__ = ["block", "fence", "long_kernel"]
