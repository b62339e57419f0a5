"""Checks of what a device moves: every byte, only those, through every layout, and nothing that is wrong."""

from __future__ import annotations

import asyncio
import itertools

import torch

from ..config import IO_MODES
from ..errors import ClosedError, InvariantError
from ._device_bench import (
    DEVICE_PAGES,
    DTYPES,
    HEADS,
    HOST_PAGES,
    NUM_LAYERS,
    Bench,
    Tiers,
    device_page,
    host_page,
)

NUM_RANDOM_COPIES = 40


async def gives_host_buffers(bench: Bench) -> None:
    """A buffer is bytes in host memory, as many as asked for, writable to the last."""
    for nbytes in (1, 4095, 1 << 20):
        buffer = await bench.device.host_buffer(nbytes)
        assert (buffer.dtype, buffer.dim(), buffer.numel()) == (torch.uint8, 1, nbytes), buffer.shape
        assert buffer.device.type == "cpu" and buffer.is_contiguous(), f"the buffer is on {buffer.device}"
        buffer[-1] = 7
        assert buffer[-1] == 7


async def moves_every_layout_and_shape(bench: Bench) -> None:
    """Scattered pages and runs come there and back in every io mode, and no other page changes."""
    for layout, io_modes in IO_MODES.items():
        for heads, io_mode in itertools.product(HEADS, io_modes):
            await _there_and_back(bench, await bench.tiers(layout, heads, io_mode=io_mode))


async def moves_every_dtype(bench: Bench) -> None:
    """Bytes are not numbers: those that no number has come through as well."""
    for layout, io_modes in IO_MODES.items():
        for dtype, io_mode in itertools.product(DTYPES, io_modes):
            await _there_and_back(bench, await bench.tiers(layout, dtype=dtype, io_mode=io_mode))


async def _there_and_back(bench: Bench, tiers: Tiers) -> None:
    sources, middle, targets = [7, 2, 3, 4, 11], [15, 0, 1, 2, 9], [0, 1, 5, 6, 9]
    offloaded = bench.offload(tiers.plan(sources, middle))
    loaded = bench.load(tiers.plan(targets, middle), offloaded)
    await bench.device.wait(loaded[-1])
    pages = [device_page(page) for page in sources]
    tiers.check(dict(zip(targets, pages, strict=True)), dict(zip(middle, pages, strict=True)))


async def moves_what_was_there_when_it_was_submitted_for(bench: Bench) -> None:
    """Many copies of random pages, both ways, each behind the one before it of the other way."""
    tiers = await bench.tiers()
    on_device = {page: device_page(page) for page in range(DEVICE_PAGES)}
    on_host = {page: host_page(page) for page in range(HOST_PAGES)}
    last = None
    for _ in range(NUM_RANDOM_COPIES):
        num_pages = bench.random.randint(1, DEVICE_PAGES)
        device_pages = bench.random.sample(range(DEVICE_PAGES), num_pages)
        host_pages = bench.random.sample(range(HOST_PAGES), num_pages)
        after = () if last is None else (last,)
        pairs = list(zip(device_pages, host_pages, strict=True))
        if bench.random.random() < 0.5:
            last = bench.load(tiers.plan(device_pages, host_pages), *after)[-1]
            on_device |= {page: on_host[source] for page, source in pairs}
        else:
            last = bench.offload(tiers.plan(device_pages, host_pages), *after)
            on_host |= {target: on_device[page] for page, target in pairs}
    assert last is not None
    await bench.device.wait(last)
    tiers.check(on_device, on_host)


async def moves_in_the_order_of_submit(bench: Bench) -> None:
    """Of two copies in one direction the later one's bytes stay."""
    tiers = await bench.tiers()
    for source in range(HOST_PAGES):
        loaded = bench.load(tiers.plan([0, 1], [source, (source + 1) % HOST_PAGES]))
    await bench.device.wait(loaded[-1])
    tiers.check({0: host_page(HOST_PAGES - 1), 1: host_page(0)}, {})


async def moves_nothing_for_no_pages(bench: Bench) -> None:
    """A copy of no pages passes."""
    tiers = await bench.tiers()
    loaded = bench.load(tiers.plan([], []))
    assert len(loaded) == NUM_LAYERS, f"{len(loaded)} fences for {NUM_LAYERS} layers"
    await bench.device.wait(loaded[-1])
    await bench.device.wait(bench.offload(tiers.plan([], [])))
    tiers.check({}, {})


async def refuses_wrong_plans(bench: Bench) -> None:
    """Ids that do not pair up, or are in no tier, raise InvariantError at submit, and nothing moves."""
    tiers = await bench.tiers()
    for device_pages, host_pages in (
        ([DEVICE_PAGES], [0]),
        ([-1], [0]),
        ([0], [HOST_PAGES]),
        ([0], [-1]),
        ([0, 1], [0]),
        ([], [0]),
    ):
        for submit in (bench.load, bench.offload):
            try:
                submit(tiers.plan(device_pages, host_pages))
            except InvariantError:
                continue
            raise AssertionError(f"device pages {device_pages} and host pages {host_pages} were taken")
    await bench.device.wait(bench.load(tiers.plan([], []))[-1])
    await bench.device.wait(bench.offload(tiers.plan([], [])))
    tiers.check({}, {})


async def closes_for_good(bench: Bench) -> None:
    """After a close, which may be said twice, copies are refused, and what was submitted ends."""
    tiers = await bench.tiers()
    fences = [bench.load(tiers.plan([page], [page]))[-1] for page in range(DEVICE_PAGES)]
    await bench.device.aclose()
    await bench.device.aclose()
    for fence in fences:
        try:
            await asyncio.wait_for(bench.device.wait(fence), 10)
        except ClosedError:
            continue
        except TimeoutError:
            raise AssertionError("a copy that was submitted before the close never ends") from None
    for submit in (bench.load, bench.offload):
        try:
            submit(tiers.plan([0], [0]))
        except ClosedError:
            continue
        raise AssertionError("a closed device took a copy")


MOVE_CHECKS = (
    gives_host_buffers,
    moves_every_layout_and_shape,
    moves_every_dtype,
    moves_what_was_there_when_it_was_submitted_for,
    moves_in_the_order_of_submit,
    moves_nothing_for_no_pages,
    refuses_wrong_plans,
    closes_for_good,
)
