"""HostArena: the bytes of L2, one buffer seen as planes for the device and as pages for a store."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import HostLayout
from ..core.grid import WHOLE, PageCells
from ..errors import ConfigError
from ..types import Pages
from .device_kv import DeviceKV
from .layout import PageShape, alike, plane_views, same_order

POISON = 0xDD
"""What a freed page is filled with in tests: no golden page consists of it."""


class HostArena:
    """The host pages of one cache in one buffer.

    Args:
        kv: the device tensors whose pages it mirrors.
        layout: axis order of the buffer.
        num_pages: how many pages it holds.
        buffer: uint8, one dimension, at least :meth:`nbytes_needed`, from ``device.host_buffer``.
        cells: how a page is cut in head_grouped order.
        stored_layout: order of a page as a store keeps it; None: as it lies here, layer_first as page_first.
    Attributes:
        is_direct: pages lie here as a store keeps them, so it reads and writes the arena's own memory.
        num_gathered, num_scattered: pages that went through a scratch page instead.
    Raises:
        ConfigError: the buffer cannot work.

    **Ownership**: who may touch which page is decided outside; this class never checks it.
    """

    def __init__(
        self,
        kv: DeviceKV,
        layout: HostLayout,
        num_pages: int,
        buffer: torch.Tensor,
        *,
        cells: PageCells = WHOLE,
        stored_layout: HostLayout | None = None,
    ) -> None:
        nbytes = self.nbytes_needed(kv, num_pages)
        _check_buffer(buffer, nbytes, num_pages)
        shape = PageShape.of(kv, cells)
        if stored_layout is None:
            stored_layout = HostLayout.PAGE_FIRST if layout is HostLayout.LAYER_FIRST else layout
        self.layout = layout
        self.stored_layout = same_order(stored_layout, shape)
        self.num_layers = kv.num_layers
        self.num_pages = num_pages
        self.page_nbytes = kv.page_nbytes
        self.plane_nbytes = kv.plane_nbytes
        self.is_direct = same_order(layout, shape) is self.stored_layout
        self.num_gathered = 0
        self.num_scattered = 0
        self._counting = threading.Lock()
        # Each plane as (layer, page, ...), whatever the layout: all else is an index into these.
        self._planes = tuple(
            buffer.as_strided(view.shape, view.strides, view.offset)
            for view in plane_views(layout, shape, num_pages)
        )
        self._arrays = tuple(plane.numpy() for plane in self._planes)
        self._stored_views = plane_views(self.stored_layout, shape, 1)
        self._memory = buffer.numpy().data

    @staticmethod
    def nbytes_needed(kv: DeviceKV, num_pages: int) -> int:
        """Return how many bytes an arena of ``num_pages`` takes; the same for every layout."""
        return num_pages * kv.page_nbytes

    def planes(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the uint8 planes of ``layer``, not copied.

        Returns: each (num_pages, plane_nbytes); in head_grouped order (num_pages, token cells, tokens,
            groups, bytes), where a page is not cut into one cell only.
        """
        return tuple(plane[layer] for plane in self._planes)

    def page_bytes(self, page: int) -> memoryview:
        """Return the arena's own memory of ``page``, writable, in the layout's order, not copied.

        Raises:
            ConfigError: a page lies in many places, or in another order than stored; use :meth:`gather`.
        """
        if not self.is_direct:
            raise ConfigError(
                f"host_layout {self.layout} keeps no page in one place and in {self.stored_layout} order; gather it "
                "instead"
            )
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page is {page}; the arena holds pages 0 .. {self.num_pages - 1}")
        return self._memory[page * self.page_nbytes : (page + 1) * self.page_nbytes]

    def scratch(self, num_pages: int) -> list[memoryview]:
        """Allocate ``num_pages`` fresh page buffers, for a layout that is not direct.

        **Ownership**: the caller's; nothing else refers to them.
        """
        memory = np.empty(num_pages * self.page_nbytes, np.uint8).data
        return [memory[at : at + self.page_nbytes] for at in range(0, len(memory), self.page_nbytes)]

    def gather(self, pages: Pages, out: Sequence[memoryview]) -> None:
        """Copy pages into buffers, one copy a page. Blocks: run it in a worker thread.

        Args:
            pages: page ids.
            out: one writable buffer of ``page_nbytes`` for each; filled in the order of ``stored_layout``.
        """
        for page, buffer in zip(pages.tolist(), out, strict=True):
            for stored, plane in self._pairs(buffer, page):
                stored[...] = plane
        with self._counting:
            self.num_gathered += len(out)

    def scatter(self, pages: Pages, data: Sequence[memoryview]) -> None:
        """Copy buffers into pages: the reverse of :meth:`gather`. Blocks: run it in a worker thread."""
        for page, buffer in zip(pages.tolist(), data, strict=True):
            for stored, plane in self._pairs(buffer, page):
                plane[...] = stored
        with self._counting:
            self.num_scattered += len(data)

    def poison(self, pages: Pages, value: int = POISON) -> None:
        """Fill pages with ``value``, so that a test sees who reads them after they were freed."""
        for array in self._arrays:
            array[:, pages] = value

    def _pairs(self, buffer: memoryview, page: int) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Pair each plane's part of a page buffer with that plane of ``page`` here, alike in shape."""
        if len(buffer) != self.page_nbytes:
            raise ValueError(f"a buffer of {len(buffer)} bytes for a page of {self.page_nbytes}")
        parts = [
            np.ndarray(view.shape, np.uint8, buffer, view.offset, view.strides)[:, 0]
            for view in self._stored_views
        ]
        return [alike(part, array[:, page]) for part, array in zip(parts, self._arrays, strict=True)]


def _check_buffer(buffer: torch.Tensor, nbytes: int, num_pages: int) -> None:
    if num_pages < 1:
        raise ConfigError(f"num_pages is {num_pages}; an arena needs at least 1")
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ConfigError(
            f"buffer is {buffer.dtype} of shape {tuple(buffer.shape)}; give contiguous uint8 of one dimension"
        )
    if buffer.device.type != "cpu":
        raise ConfigError(f"buffer is on {buffer.device}; host pages need a buffer in host memory")
    if buffer.numel() < nbytes:
        raise ConfigError(f"buffer has {buffer.numel()} bytes; {num_pages} pages take {nbytes}")
