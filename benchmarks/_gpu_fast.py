"""The parts of gpu_check that measure copies: over the link, to the first layer, and beside a matmul."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np
import torch

from hicache_async.abc import CopyPlan, PagedBytes
from hicache_async.config import IO_MODES, HostLayout, IoMode
from hicache_async.core.grid import PageCells
from hicache_async.cuda import CudaDevice
from hicache_async.cuda.runtime import Stream
from hicache_async.memory.device_kv import DeviceKV
from hicache_async.memory.host import HostArena

from ._gpu import Gpu
from ._gpu_engine import make_kv, plan_of
from ._gpu_rows import Row, Sizes, check
from ._gpu_streams import BOTH_MODES
from .harness import Param, Record, Sample, measure

MAX_PAGES = 256
"""Pages of one copy at most: of small ones as many as bytes allow take longer to queue than there is time for."""

RUN_PAGES = 16
GOAL_SHARE = 0.9
GOAL_PAGE_NBYTES = 1 << 20
"""From this page size on copies are to take their share of what the link gives to one contiguous copy."""


class Transfers:
    """Copies of one plan between a GPU and pinned memory, beside plain copies of the same bytes.

    Args:
        buffer: pinned, of the device, for twice as many pages as are copied.
    """

    def __init__(
        self, gpu: Gpu, device: CudaDevice, kv: DeviceKV, buffer: torch.Tensor, plan: CopyPlan
    ) -> None:
        self._gpu = gpu
        self._device = device
        self._kv = kv
        self._buffer = buffer
        self._plan = plan
        self._stream = gpu.runtime.new_stream()
        self.nbytes = len(plan.host_pages) * kv.page_nbytes
        self._plain = gpu.zeros(self.nbytes), gpu.pinned(self.nbytes)
        numbers = buffer[: buffer.numel() // 8 * 8].view(torch.int64)
        torch.arange(len(numbers), out=numbers)
        self._expected = [plane.clone() for plane in self._host_planes()]

    def load(self, layer: int = -1) -> Sample:
        """Return a sample of a copy to the device, from the submit until ``layer`` is there."""

        async def sample() -> float:
            start = time.perf_counter()
            fences = self._device.host_to_device(self._plan, ())
            await self._device.recorded([fences[layer]])
            fences[layer].block(self._stream)
            self._gpu.runtime.synchronize(self._stream)
            seconds = time.perf_counter() - start
            await self._device.wait(fences[-1])
            return seconds

        return sample

    def recording(self) -> Sample:
        """Return a sample of a copy to the device, from the submit until every layer of it is recorded."""

        async def sample() -> float:
            start = time.perf_counter()
            fences = self._device.host_to_device(self._plan, ())
            await self._device.recorded(fences)
            seconds = time.perf_counter() - start
            await self._device.wait(fences[-1])
            return seconds

        return sample

    def offload(self) -> Sample:
        """Return a sample of a copy to the host."""

        async def sample() -> float:
            start = time.perf_counter()
            fence = self._device.device_to_host(self._plan, ())
            await self._device.recorded([fence])
            fence.block(self._stream)
            self._gpu.runtime.synchronize(self._stream)
            return time.perf_counter() - start

        return sample

    def plain(self, direction: str) -> Sample:
        """Return a sample of one copy of as many bytes, contiguous and pinned."""
        on_gpu, on_host = self._plain
        target, source = (on_gpu, on_host) if direction == "h2d" else (on_host, on_gpu)

        async def sample() -> float:
            start = time.perf_counter()
            self._gpu.copy(self._stream, target, source)
            self._gpu.runtime.synchronize(self._stream)
            return time.perf_counter() - start

        return sample

    async def figures(self, direction: str, rounds: int) -> Record:
        """Measure one direction, the way up first, and check that the bytes have come.

        Raises: AssertionError: they have not.
        """
        if direction == "h2d":
            for plane in self._checked(self._kv):
                plane.zero_()
            self._gpu.synchronize()
        else:
            self._buffer.zero_()
        record = await measure(
            direction,
            {},
            self.load() if direction == "h2d" else self.offload(),
            self.plain(direction),
            floor_name="one pinned copy",
            unit="s",
            rounds=rounds,
        )
        planes = self._device_planes() if direction == "h2d" else self._host_planes()
        for found, expected in zip(planes, self._expected, strict=True):
            check(torch.equal(found, expected), f"{direction}: other bytes have arrived than were sent")
        return record

    def _checked(self, tier: PagedBytes) -> Iterator[torch.Tensor]:
        # Of the first and the last layer; all of them would take longer than what is measured.
        for layer in (0, tier.num_layers - 1):
            yield from tier.planes(layer)

    def _host_planes(self) -> Iterator[torch.Tensor]:
        for plane in self._checked(self._plan.arena):
            pages = plane[torch.from_numpy(self._plan.host_pages)]
            yield pages.reshape(len(pages), -1)

    def _device_planes(self) -> Iterator[torch.Tensor]:
        for plane in self._checked(self._kv):
            yield plane[torch.from_numpy(self._plan.device_pages).to(plane.device)].cpu()


def make_pages(gpu: Gpu, sizes: Sizes, page_size: int, heads: int) -> DeviceKV:
    """Return twice as many pages as are copied."""
    page_nbytes = 2 * sizes.num_layers * page_size * heads * sizes.head_dim * 2
    num_pages = min(MAX_PAGES, max(1, sizes.copied_nbytes // page_nbytes))
    return make_kv(
        gpu,
        2 * num_pages,
        num_layers=sizes.num_layers,
        page_size=page_size,
        heads=heads,
        head_dims=(sizes.head_dim, sizes.head_dim),
    )


def make_plan(
    kv: DeviceKV, buffer: torch.Tensor, layout: HostLayout, io_mode: IoMode, run_pages: int
) -> CopyPlan:
    """Return a plan of half the pages in random places, so many that follow each other at once."""
    arena = HostArena(kv, layout, kv.num_pages, buffer, cells=PageCells(kv.kv_heads))
    return plan_of(kv, arena, io_mode, *(_places(kv.num_pages, run_pages, seed) for seed in (1, 2)))


def _places(num_pages: int, run_pages: int, seed: int) -> list[int]:
    run_pages = min(run_pages, max(1, num_pages // 2))
    starts = np.random.default_rng(seed).permutation(num_pages // run_pages)
    pages = (starts[:, None] * run_pages + np.arange(run_pages)).reshape(-1)
    return [int(page) for page in pages[: num_pages // 2]]


async def copy(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    """Bytes a second in each layout, io mode and page size, beside one contiguous copy of the same bytes."""
    device = gpu.make_device()
    try:
        largest = max(heads * tokens for tokens, heads in sizes.pages) * sizes.head_dim * 4 * sizes.num_layers
        buffer = await device.host_buffer(2 * max(sizes.copied_nbytes, largest))
        for page_size, heads in reversed(sizes.pages):
            kv = make_pages(gpu, sizes, page_size, heads)
            for layout, io_modes in IO_MODES.items():
                for io_mode in io_modes:
                    for run_pages in (1, RUN_PAGES) if io_mode is IoMode.DIRECT else (1,):
                        plan = make_plan(kv, buffer, layout, io_mode, run_pages)
                        transfers = Transfers(gpu, device, kv, buffer, plan)
                        params: dict[str, Param] = {
                            "layout": layout.value,
                            "io_mode": io_mode.value,
                            "page_kib": kv.page_nbytes // 1024,
                            "run_pages": run_pages,
                        }
                        for direction in ("h2d", "d2h"):
                            record = await transfers.figures(direction, sizes.rounds)
                            yield _copy_row(direction, params, transfers.nbytes, record, kv.page_nbytes)
                        gpu.synchronize()
    finally:
        await device.aclose()


def _copy_row(direction: str, params: dict[str, Param], nbytes: int, record: Record, page_nbytes: int) -> Row:
    share = record.floor / record.value
    figures = {
        "gb_per_s": nbytes / record.value / 1e9,
        "one_copy_gb_per_s": nbytes / record.floor / 1e9,
        "share": share,
        "spread": record.spread,
    }
    is_goal_met = share >= GOAL_SHARE if page_nbytes >= GOAL_PAGE_NBYTES else None
    return Row(f"copy.{direction}", params, figures, is_goal_met)


async def first_layer(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    """When the first layer of a load is there, when load() returns, and when all of it is there."""
    page_size, heads = sizes.pages[1 % len(sizes.pages)]
    device = gpu.make_device()
    try:
        kv = make_pages(gpu, sizes, page_size, heads)
        buffer = await device.host_buffer(kv.num_pages * kv.page_nbytes)
        for layout, io_mode in BOTH_MODES:
            transfers = Transfers(gpu, device, kv, buffer, make_plan(kv, buffer, layout, io_mode, 1))
            samples = {
                "first_layer": transfers.load(0),
                "recorded": transfers.recording(),
                "all_layers": transfers.load(),
            }
            seconds: dict[str, list[float]] = {name: [] for name in samples}
            for _ in range(1 + sizes.rounds):
                for name, sample in samples.items():
                    seconds[name].append(await sample())
            median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
            figures = {f"{name}_ms": value * 1e3 for name, value in median.items()}
            figures["first_of_all"] = median["first_layer"] / median["all_layers"]
            params: dict[str, Param] = {
                "layout": layout.value,
                "io_mode": io_mode.value,
                "mib": transfers.nbytes >> 20,
                "layers": kv.num_layers,
            }
            yield Row("first_layer.load", params, figures)
            gpu.synchronize()
    finally:
        await device.aclose()


# Beside a matmul


async def overlap(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    """What copies and matrix products cost each other when both run."""
    page_size, heads = sizes.pages[1 % len(sizes.pages)]
    compute = gpu.runtime.new_stream()
    device = gpu.make_device(compute_stream=compute, low_latency=True)
    try:
        kv = make_pages(gpu, sizes, page_size, heads)
        buffer = await device.host_buffer(kv.num_pages * kv.page_nbytes)
        _matmul_seconds(gpu, compute, 2)
        one_matmul_s = _matmul_seconds(gpu, compute, 10) / 10
        for layout, io_mode in BOTH_MODES:
            plan = make_plan(kv, buffer, layout, io_mode, 1)
            nbytes = len(plan.host_pages) * kv.page_nbytes
            for direction in ("h2d", "d2h"):
                await _copies(device, plan, direction, 1)
                alone_s = await _copies(device, plan, direction, sizes.rounds)
                num_matmuls = min(500, max(1, int(2 * alone_s / one_matmul_s)))  # twice as long as the copies
                matmuls_alone_s = _matmul_seconds(gpu, compute, num_matmuls)
                start = _queue_matmuls(gpu, compute, num_matmuls)
                end = gpu.mark(compute)
                beside_s = await _copies(device, plan, direction, sizes.rounds)
                matmuls_beside_s = gpu.seconds_between(start, end)
                figures = {
                    "gb_per_s_alone": sizes.rounds * nbytes / alone_s / 1e9,
                    "gb_per_s_beside_it": sizes.rounds * nbytes / beside_s / 1e9,
                    "copies_slower": beside_s / alone_s,
                    "matmuls_slower": matmuls_beside_s / matmuls_alone_s,
                    "matmuls_of_copies": matmuls_alone_s / alone_s,
                }
                params: dict[str, Param] = {"io_mode": io_mode.value, "direction": direction}
                yield Row("overlap.matmul", params, figures)
                gpu.synchronize()
    finally:
        gpu.synchronize()
        await device.aclose()


def _queue_matmuls(gpu: Gpu, stream: Stream, number: int) -> object:
    start = gpu.mark(stream)
    for _ in range(number):
        gpu.matmul(stream)
    return start


def _matmul_seconds(gpu: Gpu, stream: Stream, number: int) -> float:
    start = _queue_matmuls(gpu, stream, number)
    return gpu.seconds_between(start, gpu.mark(stream))


async def _copies(device: CudaDevice, plan: CopyPlan, direction: str, rounds: int) -> float:
    """Return the seconds of so many copies, one behind the other on their stream."""
    start = time.perf_counter()
    for _ in range(rounds):
        is_up = direction == "h2d"
        last = device.host_to_device(plan, ())[-1] if is_up else device.device_to_host(plan, ())
    await device.wait(last)
    return time.perf_counter() - start


__all__ = ["copy", "first_layer", "overlap"]
