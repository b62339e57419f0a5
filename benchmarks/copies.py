"""How long a CpuDevice takes for pages between the tiers, beside one plain copy of the same bytes."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator

import numpy as np
import torch

from hicache_async.abc import CopyPlan
from hicache_async.config import HostLayout
from hicache_async.device.cpu import CpuDevice
from hicache_async.memory.device_kv import DeviceKV
from hicache_async.memory.host import HostArena

from .harness import Benchmark, Record, Sample, measure, timed

NUM_LAYERS, PAGE_SIZE, HEAD_DIM, COPIED_NBYTES = 32, 64, 128, 128 << 20

HEADS = (8, 2)
"""KV heads: those of an 8B model, whose planes have 128 KiB a page in float16; and of one rank of four, 32 KiB."""


class Pages:
    """Pages of an engine and an arena, and a plan of scattered ones."""

    def __init__(self, kv: DeviceKV, arena: HostArena) -> None:
        self.plane_nbytes = kv.plane_nbytes[0]
        rng = np.random.default_rng(1)
        copied = COPIED_NBYTES // kv.page_nbytes
        self.plan = CopyPlan(
            kv,
            arena,
            rng.permutation(kv.num_pages)[:copied].astype(np.int64),
            rng.permutation(kv.num_pages)[:copied].astype(np.int64),
        )
        self.nbytes = copied * kv.page_nbytes

    @classmethod
    async def make(cls, device: CpuDevice, layout: HostLayout, heads: int) -> Pages:
        """Make twice as many as are copied, all touched."""
        page_nbytes = 2 * NUM_LAYERS * PAGE_SIZE * heads * HEAD_DIM * torch.float16.itemsize
        num_pages = 2 * COPIED_NBYTES // page_nbytes
        shape = (num_pages, PAGE_SIZE, heads, HEAD_DIM)
        sides = [[torch.ones(shape, dtype=torch.float16) for _ in range(NUM_LAYERS)] for _ in range(2)]
        kv = DeviceKV.from_layers(*sides)
        buffer = await device.host_buffer(HostArena.nbytes_needed(kv, num_pages))
        return cls(kv, HostArena(kv, layout, num_pages, buffer))


def load(device: CpuDevice, pages: Pages, *, layer: int = NUM_LAYERS - 1) -> Sample:
    """Return a sample of a copy to the device, up to the moment when ``layer`` is there."""

    async def sample() -> float:
        start = time.perf_counter()
        fences = device.host_to_device(pages.plan, ())
        fences[layer].block()
        seconds = time.perf_counter() - start
        fences[-1].block()
        return seconds

    return sample


def offload(device: CpuDevice, pages: Pages) -> Sample:
    """Return a sample of a copy to the host."""

    async def sample() -> float:
        start = time.perf_counter()
        device.device_to_host(pages.plan, ()).block()
        return time.perf_counter() - start

    return sample


async def records(quick: bool) -> AsyncIterator[Record]:
    """Measure both directions in each layout, and when the first layer is there."""
    rounds = 2 if quick else 21
    device = CpuDevice()
    try:
        for layout, heads in itertools.product(HostLayout, HEADS):
            pages = await Pages.make(device, layout, heads)
            source, target = np.ones(pages.nbytes, np.uint8), np.ones(pages.nbytes, np.uint8)
            plain = timed(lambda source=source, target=target: np.copyto(target, source))
            params = {"layout": layout.value, "plane_kib": pages.plane_nbytes >> 10}
            for name, sample in (("h2d", load(device, pages)), ("d2h", offload(device, pages))):
                yield await measure(
                    f"copy.{name}",
                    dict(params),
                    sample,
                    plain,
                    floor_name="np.copyto",
                    unit="ms",
                    rounds=rounds,
                )
            yield await measure(
                "copy.first_layer",
                dict(params),
                load(device, pages, layer=0),
                load(device, pages),
                floor_name="all layers",
                unit="ms",
                rounds=rounds,
            )
    finally:
        await device.aclose()


BENCHMARKS = [Benchmark("copy", records)]
