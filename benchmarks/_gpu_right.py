"""The parts of gpu_check that say whether bytes are right: the exam, the kernel, pinned memory, a whole cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import numpy as np
import torch
from numpy.typing import NDArray

from hicache_async import HiCache, Tier
from hicache_async.config import IO_MODES, HostLayout, IoMode
from hicache_async.core.grid import PageCells
from hicache_async.cuda import CudaDevice
from hicache_async.cuda.pinned import PinnedMemory
from hicache_async.memory.host import HostArena
from hicache_async.testing._device_fences import FENCE_CHECKS
from hicache_async.testing.device_exam import CHECKS, check_device
from hicache_async.testing.golden import check_page, fill_page

from ._gpu import Gpu
from ._gpu_engine import PAGE_SIZE, Engine, Prompt, config_of, make_arena, make_kv, plan_of
from ._gpu_rows import Row, Sizes, check, why

KINDS: dict[str, tuple[int, tuple[int, ...]]] = {
    "mha": (8, (64, 64)),
    "gqa": (2, (128, 128)),
    "wide k": (2, (192, 128)),
    "mla": (1, (576,)),
    "odd": (3, (5, 7)),
}
"""KV heads, and numbers of one head of K and of V."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)

CHUNK_NBYTES = 1 << 16
"""Bytes of one registration, where copies are to lie across many."""


async def exam(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    """The exam for devices, a row for each check; those of fences again with the events asked by a thread."""
    for low_latency, names in ((False, list(CHECKS)), (True, [each.__name__ for each in FENCE_CHECKS])):
        for name in names:
            row = f"exam.{name}", {"low_latency": str(low_latency)}

            def make_device(low_latency: bool = low_latency) -> CudaDevice:
                return gpu.make_device(low_latency=low_latency)

            try:
                await asyncio.to_thread(
                    check_device, make_device, only=[name], torch_device=str(gpu.torch_device)
                )
            except AssertionError as failed:
                yield Row(*row, error=why(failed.__cause__ or failed))
            else:
                yield Row(*row)


# The kernel


async def kernel(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    """The page kernel leaves the very bytes that torch does, in both directions, and far beyond 32 bits."""
    stream = gpu.runtime.new_stream()
    for layout in HostLayout:
        for kind in KINDS:
            for dtype in DTYPES:
                _compare(gpu, stream, layout, kind, dtype)
            yield Row("kernel.equals_torch", {"layout": layout.value, "heads": kind, "dtypes": len(DTYPES)})
    for axis in ("page", "token"):
        _copy_far(gpu, stream, sizes.far_nbytes, axis)
        yield Row("kernel.far", {"axis": axis, "apart_nbytes": sizes.far_nbytes})


def _compare(gpu: Gpu, stream: object, layout: HostLayout, kind: str, dtype: torch.dtype) -> None:
    heads, head_dims = KINDS[kind]
    kv = make_kv(gpu, 7, num_layers=2, page_size=4, heads=heads, head_dims=head_dims, dtype=dtype)
    buffer = gpu.pinned(HostArena.nbytes_needed(kv, 9))
    arena = HostArena(kv, layout, 9, buffer, cells=PageCells(heads, 2))
    for plane, (on_gpu, on_host) in enumerate(zip(kv.planes(1), arena.planes(1), strict=True)):
        for source, target, pages in (
            (on_host, on_gpu, [(8, 2), (3, 6), (0, 0)]),
            (on_gpu, on_host, [(5, 0), (1, 8), (6, 3)]),
        ):
            memory = buffer if target is on_host else target
            by_torch, by_kernel = _both(gpu, stream, memory, source, target, pages)
            num_wrong = np.count_nonzero(by_torch != by_kernel)
            check(
                num_wrong == 0,
                f"{layout}, {kind}, {dtype}, plane {plane}, {'to host' if target is on_host else 'to device'}: "
                f"{num_wrong} bytes differ from what torch copies",
            )


def _both(
    gpu: Gpu,
    stream: object,
    memory: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    pages: Sequence[tuple[int, int]],
) -> list[NDArray[np.uint8]]:
    """Copy by torch and by the kernel, and return all of ``memory``, in which the target lies, after each."""
    noise = _noise(memory.shape, 1)
    source.copy_(_noise(source.shape, 2))
    source_pages, target_pages = (
        torch.tensor(ids, device=gpu.torch_device) for ids in zip(*pages, strict=True)
    )
    left: list[NDArray[np.uint8]] = []
    for copy in (gpu.copy_pages_torch, gpu.runtime.copy_pages):
        memory.copy_(noise)
        gpu.synchronize()
        with gpu.runtime.on(stream):
            copy(source, target, source_pages, target_pages)
        gpu.synchronize()
        left.append(memory.cpu().numpy().copy())
    check(not np.array_equal(left[0], noise.numpy()), "torch copied nothing, so nothing was compared")
    return left


def _noise(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, tuple(shape), np.uint8))


def _copy_far(gpu: Gpu, stream: object, far_nbytes: int, axis: str) -> None:
    num_pages = 3 if axis == "page" else 1
    shape = (3, 5) if axis == "page" else (1, 1, 3, 1, 5)
    strides = (far_nbytes, 1) if axis == "page" else (5, 5, far_nbytes, 5, 1)
    near = gpu.pinned(15)
    near.copy_(torch.arange(1, 16))
    far = gpu.zeros(2 * far_nbytes + 5).as_strided(shape, strides)
    ids = torch.arange(num_pages, device=gpu.torch_device)
    for source, target in ((near.view(shape), far), (far, near.view(shape))):
        gpu.synchronize()
        with gpu.runtime.on(stream):
            gpu.runtime.copy_pages(source, target, ids, ids)
        gpu.synchronize()
        found = target.cpu().reshape(-1).tolist()
        check(found == list(range(1, 16)), f"{shape} in steps of {strides} became {found}")
        if target is far:
            near.zero_()


# Pinned memory


async def pinning(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    """What is pinned is, until the device is closed; a refusal is over with its error; registrations join."""
    device = gpu.make_device()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(device.aclose)
        start = time.perf_counter()
        buffer = await device.host_buffer(sizes.pin_nbytes)
        seconds = time.perf_counter() - start
        ends = buffer[:1], buffer[-1:]
        check(all(map(gpu.is_pinned, ends)), "CUDA does not know the buffer as pinned")
        yield Row("pinning.pins", figures={"touched_and_pinned_gb_per_s": sizes.pin_nbytes / seconds / 1e9})
        try:
            gpu.runtime.register(buffer.data_ptr(), sizes.pin_nbytes)
        except RuntimeError:
            gpu.launch()  # raises where CUDA still tells of it
        else:
            check(False, "the same memory was pinned twice without a word")
        yield Row("pinning.refusal_leaves_no_error")
    check(not any(map(gpu.is_pinned, ends)), "the buffer is pinned still, and the device is closed")
    gpu.launch()
    yield Row("pinning.close_unpins")
    for layout, io_modes in IO_MODES.items():
        for io_mode in io_modes:
            await _across_registrations(gpu, layout, io_mode)
            yield Row(
                "pinning.copies_across_registrations", {"layout": layout.value, "io_mode": io_mode.value}
            )


async def _across_registrations(gpu: Gpu, layout: HostLayout, io_mode: IoMode) -> None:
    device = gpu.make_device()
    device._pinned = PinnedMemory(gpu.runtime, CHUNK_NBYTES)
    try:
        # Heads of 72 numbers: no plane and no page is a part of a chunk.
        kv = make_kv(gpu, 12, head_dims=(72, 72))
        arena = await make_arena(device, kv, layout, 12)
        check(len(device._pinned.cuts) > 1, "the buffer was pinned in one piece")
        names = [bytes([0xC0, page]) * 16 for page in range(12)]
        for page, name in enumerate(names):
            fill_page(arena, page, name)
        everywhere = range(12)
        await device.wait(device.host_to_device(plan_of(kv, arena, io_mode, everywhere, everywhere), ())[-1])
        for page, name in enumerate(names):
            check_page(kv, page, name)
            fill_page(arena, page, b"stale")
        backwards = everywhere[::-1]
        await device.wait(device.device_to_host(plan_of(kv, arena, io_mode, everywhere, backwards), ()))
        for page, name in enumerate(names):
            check_page(arena, 11 - page, name)
    finally:
        await device.aclose()


# A whole cache


async def cache(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    """A prompt is computed, copied down, evicted by another and loaded again, ordered by fences alone.

    It is loaded into pages that a kernel of a side stream works on until later, and read by another thread.
    """
    for layout, io_modes in IO_MODES.items():
        for io_mode in io_modes:
            for low_latency in (False, True):
                await _there_and_back(gpu, sizes, layout, io_mode, low_latency)
                yield Row(
                    "cache.there_and_back",
                    {"layout": layout.value, "io_mode": io_mode.value, "low_latency": str(low_latency)},
                )


async def _there_and_back(
    gpu: Gpu, sizes: Sizes, layout: HostLayout, io_mode: IoMode, low_latency: bool
) -> None:
    engine = Engine(gpu, num_pages=14)
    device = gpu.make_device(compute_stream=engine.compute, low_latency=low_latency)
    first, second, busy = (Prompt(number, num_pages=6) for number in (1, 2, 3))
    side = gpu.runtime.new_stream()
    try:
        config = config_of(engine.kv, layout, io_mode)
        async with HiCache.open(config, kv=engine.kv, device=device) as cache, AsyncExitStack() as leases:
            works = leases.enter_context(busy.match(cache))
            await works.load()
            works.allocate_nowait(len(busy.tokens)).block()
            await compute(gpu, engine, cache, first, sizes.pause_s)
            await compute(gpu, engine, cache, second, sizes.pause_s)
            await cache.admin.flush(Tier.HOST)
            gpu.stay_busy(side, sizes.delay_s)
            works.release(after=cache.fence(side))
            with first.match(cache) as lease:
                loading = await lease.load()
                check(
                    loading.tokens == len(first.tokens) and loading.loaded_tokens >= 4 * PAGE_SIZE,
                    f"{loading.tokens} tokens were cached and {loading.loaded_tokens} of them loaded; "
                    f"{len(first.tokens)} were computed, and 4 pages of them evicted",
                )

                def forward() -> None:
                    for layer in range(engine.kv.num_layers):
                        loading.block(layer)
                        for page in loading.pages.tolist():
                            engine.read(page, layer)

                await asyncio.to_thread(forward)
                lease.release(after=cache.fence())
            gpu.synchronize()
            for page, name in zip(loading.pages.tolist(), first.names, strict=True):
                engine.check_read(page, name)
            cache.audit()
    finally:
        gpu.synchronize()
        await device.aclose()


async def compute(gpu: Gpu, engine: Engine, cache: HiCache, prompt: Prompt, pause_s: float) -> None:
    """Let the engine compute a prompt, behind a kernel that takes a while, and commit it."""
    with prompt.match(cache) as lease:
        await lease.load()
        allocation = await lease.allocate(len(prompt.tokens))
        engine.stage(*prompt.names)
        gpu.stay_busy(engine.compute, pause_s)
        allocation.block()
        for page, name in zip(lease.pages.tolist(), prompt.names, strict=True):
            engine.write(page, name)
        written = cache.fence()
        lease.commit(len(prompt.tokens), after=written)
        lease.release(after=written)
