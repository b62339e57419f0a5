"""Bytes of pages as the exams see them: free ones are poison and nothing else, the others say whose they are."""

from __future__ import annotations

import functools

import numpy as np

from ..abc import DevicePool, PagedBytes
from ..memory.host import POISON
from ..types import Pages
from .golden import check_page, golden_plane
from .virtual_device import VirtualDevice


class SpoiledPages:
    """Free pages that hold poison and nothing else: spoiled when they come, looked at when they go.

    Whoever writes a page after it was freed, or between two owners, is seen.

    Args:
        inner: the book of free pages, all of which are free now.
        paged: where their bytes are.
    Attributes:
        touched: what was found on pages that nobody owned.
    """

    def __init__(self, inner: DevicePool, paged: PagedBytes) -> None:
        self._inner = inner
        self._paged = paged
        self._is_free = np.zeros(paged.num_pages, bool)
        self.capacity = inner.capacity
        self.touched: list[str] = []
        self.give_back(inner.take(inner.num_free()))

    def take(self, num_pages: int) -> Pages:
        """Take pages out, after a look at them."""
        pages = self._inner.take(num_pages)
        self._look(pages)
        self._is_free[pages] = False
        return pages

    def give_back(self, pages: Pages) -> None:
        """Spoil pages and put them back."""
        VirtualDevice.poison(self._paged, pages)
        self._is_free[pages] = True
        self._inner.give_back(pages)

    def num_free(self) -> int:
        """Return how many pages can be taken."""
        return self._inner.num_free()

    def check(self) -> None:
        """Raise AssertionError if a free page was touched, now or earlier."""
        self._look(np.flatnonzero(self._is_free))
        if self.touched:
            raise AssertionError(f"pages were written after they were freed: {'; '.join(self.touched)}")

    def _look(self, pages: Pages) -> None:
        for layer in range(self._paged.num_layers):
            for plane in self._paged.planes(layer):
                is_wrong = plane.numpy()[pages] != POISON
                wrong = pages[is_wrong.any(axis=tuple(range(1, plane.dim())))]
                if len(wrong):
                    where = type(self._paged).__name__
                    self.touched.append(f"{where} pages {wrong.tolist()}, layer {layer}")


def check(paged: PagedBytes, page: int, page_hash: bytes) -> None:
    """As ``check_page``, and quick where all is well: the exams look at the same few pages again and again."""
    for layer in range(paged.num_layers):
        for plane, tensor in enumerate(paged.planes(layer)):
            if tensor.numpy()[page].tobytes() != _golden_bytes(page_hash, layer, plane, tensor[page].numel()):
                check_page(paged, page, page_hash)


@functools.lru_cache(maxsize=1024)
def _golden_bytes(page_hash: bytes, layer: int, plane: int, nbytes: int) -> bytes:
    return golden_plane(page_hash, layer, plane, nbytes).tobytes()
