"""What the checks of a device work with: pages of an engine, an arena, plans, and pages that accuse themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from ..abc import CopyPlan, Device, Fence
from ..config import HostLayout, IoMode
from ..core.grid import PageCells
from ..memory.device_kv import DeviceKV
from ..memory.host import HostArena
from .golden import check_page, fill_page

NUM_LAYERS, DEVICE_PAGES, HOST_PAGES, PAGE_SIZE = 3, 12, 16, 2

HEADS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "mha": ((8, 4), (8, 4)),
    "gqa": ((2, 4), (2, 4)),
    "wide k": ((2, 6), (2, 4)),
    "mla": ((1, 10), None),
}
"""Heads and elements of one head, of K and of V."""

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
)


class Tiers:
    """The pages of an engine and an arena of the device, both filled with who they are."""

    def __init__(self, kv: DeviceKV, arena: HostArena, io_mode: IoMode) -> None:
        self.kv = kv
        self.arena = arena
        self.io_mode = io_mode
        for page in range(DEVICE_PAGES):
            fill_page(kv, page, device_page(page))
        for page in range(HOST_PAGES):
            fill_page(arena, page, host_page(page))

    def plan(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> CopyPlan:
        """Pair pages of the two."""
        pages = np.array(device_pages, np.int64), np.array(host_pages, np.int64)
        return CopyPlan(self.kv, self.arena, *pages, self.io_mode)

    def check(self, on_device: dict[int, bytes], on_host: dict[int, bytes]) -> None:
        """Check every page of both: those named hold what is said, all others what they held at first."""
        for page in range(DEVICE_PAGES):
            check_page(self.kv, page, on_device.get(page, device_page(page)))
        for page in range(HOST_PAGES):
            check_page(self.arena, page, on_host.get(page, host_page(page)))


class Bench:
    """A device under examination.

    Attributes:
        random: the same each time.
    """

    def __init__(self, device: Device, torch_device: str) -> None:
        self.device = device
        self.random = random.Random(1)
        self._torch_device = torch_device

    async def tiers(
        self,
        layout: HostLayout = HostLayout.PAGE_FIRST,
        heads: str = "gqa",
        dtype: torch.dtype = torch.float16,
        io_mode: IoMode = IoMode.KERNEL,
    ) -> Tiers:
        """Make pages of both tiers; the arena is in a buffer of the device."""
        k_shape, v_shape = HEADS[heads]
        kv = DeviceKV.from_layers(
            [self._zeros(k_shape, dtype) for _ in range(NUM_LAYERS)],
            None if v_shape is None else [self._zeros(v_shape, dtype) for _ in range(NUM_LAYERS)],
        )
        buffer = await self.device.host_buffer(HostArena.nbytes_needed(kv, HOST_PAGES))
        cells = PageCells(kv.kv_heads, kv.page_size)  # the finest that there are
        return Tiers(kv, HostArena(kv, layout, HOST_PAGES, buffer, cells=cells), io_mode)

    def load(self, plan: CopyPlan, *after: Fence) -> Sequence[Fence]:
        """Submit a copy to the device."""
        return self.device.host_to_device(plan, after)

    def offload(self, plan: CopyPlan, *after: Fence) -> Fence:
        """Submit a copy to the host."""
        return self.device.device_to_host(plan, after)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(DEVICE_PAGES, PAGE_SIZE, *shape, device=self._torch_device).to(dtype)


def device_page(page: int) -> bytes:
    """Return the hash of what a page of the device holds at first."""
    return bytes([0xD0, page]) * 16


def host_page(page: int) -> bytes:
    """Return the hash of what a page of the host holds at first."""
    return bytes([0x40, page]) * 16


def new_page(number: int) -> bytes:
    """Return the hash of a page that is in neither tier at first."""
    return bytes([0x4E, number]) * 16
