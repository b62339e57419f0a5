"""How long a CpuDevice takes for pages between the tiers, beside one plain copy of the same bytes."""

from __future__ import annotations

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

NUM_LAYERS, PAGE_SIZE, HEADS, HEAD_DIM = 32, 64, 4, 64
"""A plane of a page has 32 KiB in float16, a page 2 MiB."""

COPIED_PAGES, HOLD_PAGES = 32, 64


class Pages:
    """Pages of an engine and an arena, and a plan of scattered ones."""

    def __init__(self, kv: DeviceKV, arena: HostArena) -> None:
        rng = np.random.default_rng(1)
        self.plan = CopyPlan(
            kv,
            arena,
            rng.permutation(HOLD_PAGES)[:COPIED_PAGES].astype(np.int64),
            rng.permutation(HOLD_PAGES)[:COPIED_PAGES].astype(np.int64),
        )
        self.nbytes = COPIED_PAGES * kv.page_nbytes

    @classmethod
    async def make(cls, device: CpuDevice, layout: HostLayout) -> Pages:
        """Make them, all touched."""
        shape = (HOLD_PAGES, PAGE_SIZE, HEADS, HEAD_DIM)
        sides = [[torch.ones(shape, dtype=torch.float16) for _ in range(NUM_LAYERS)] for _ in range(2)]
        kv = DeviceKV.from_layers(*sides)
        buffer = await device.host_buffer(HostArena.nbytes_needed(kv, HOLD_PAGES))
        return cls(kv, HostArena(kv, layout, HOLD_PAGES, buffer))


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
    rounds = 2 if quick else 31
    device = CpuDevice()
    try:
        for layout in HostLayout:
            pages = await Pages.make(device, layout)
            source, target = np.ones(pages.nbytes, np.uint8), np.ones(pages.nbytes, np.uint8)
            plain = timed(lambda source=source, target=target: np.copyto(target, source))
            params = {"layout": layout.value}
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
