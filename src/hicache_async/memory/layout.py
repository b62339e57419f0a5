"""Where each plane of a page lies, for every layout, and which copies can be joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..config import HostLayout
from ..core.grid import WHOLE, PageCells
from ..errors import InvariantError
from ..types import Pages
from .device_kv import DeviceKV


@dataclass(frozen=True, slots=True)
class PageShape:
    """What is in one page.

    Attributes:
        num_tokens: on this rank.
        plane_nbytes: bytes of one layer, per plane (K and V, which may differ; MLA: one).
        cells: what lies apart in head_grouped order.
    """

    num_layers: int
    num_tokens: int
    plane_nbytes: tuple[int, ...]
    cells: PageCells = WHOLE

    @classmethod
    def of(cls, kv: DeviceKV, cells: PageCells = WHOLE) -> Self:
        """Return the shape of the pages of ``kv``."""
        return cls(kv.num_layers, kv.page_size, kv.plane_nbytes, cells)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page."""
        return self.num_layers * sum(self.plane_nbytes)


class PlaneView(NamedTuple):
    """One plane of all pages in a buffer, in bytes: (layer, page, ...), and what follows is the plane.

    Flattened, the axes behind the page are a plane in the order of the engine's tensors, (token, head, dim).
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PageRun(NamedTuple):
    """``num_pages`` pages that follow each other in the source and in the target."""

    source: int
    target: int
    num_pages: int


def same_order(layout: HostLayout, shape: PageShape) -> HostLayout:
    """Return the simplest layout in which a page is the same bytes as in ``layout``."""
    is_uncut = shape.cells == WHOLE
    if layout is HostLayout.HEAD_GROUPED and is_uncut:
        return HostLayout.PAGE_FIRST
    if layout is HostLayout.PAGE_FIRST_DIRECT and len(shape.plane_nbytes) == 1:
        return HostLayout.PAGE_FIRST
    return layout


def plane_views(layout: HostLayout, shape: PageShape, num_pages: int) -> tuple[PlaneView, ...]:
    """Compute where each plane (K and V; MLA: one) lies in a buffer of ``num_pages`` pages.

    The planes may differ in width, so "2" in an axis order stands for K's bytes, then V's:

    ===================  ==================================================================
    layer_first          (layer, 2, page, token, head, dim)
    page_first           (page, layer, 2, token, head, dim)
    page_first_direct    (page, 2, layer, token, head, dim)
    head_grouped         (page, group, token cell, layer, 2, token, head in group, dim)
    ===================  ==================================================================

    In head_grouped order any layers of one group and token cell are one run of bytes.
    """
    before = [sum(shape.plane_nbytes[:plane]) for plane in range(len(shape.plane_nbytes))]
    placed = zip(before, shape.plane_nbytes, strict=True)
    layer_nbytes, page_nbytes = sum(shape.plane_nbytes), shape.page_nbytes
    match same_order(layout, shape):
        case HostLayout.LAYER_FIRST:
            offsets = [num_pages * start for start in before]
            strides = [(num_pages * layer_nbytes, nbytes, 1) for nbytes in shape.plane_nbytes]
        case HostLayout.PAGE_FIRST:
            offsets = before
            strides = [(layer_nbytes, page_nbytes, 1) for _ in before]
        case HostLayout.PAGE_FIRST_DIRECT:
            offsets = [shape.num_layers * start for start in before]
            strides = [(nbytes, page_nbytes, 1) for nbytes in shape.plane_nbytes]
        case HostLayout.HEAD_GROUPED:
            return tuple(_grouped(shape, num_pages, start, nbytes) for start, nbytes in placed)
    return tuple(
        PlaneView(offset, (shape.num_layers, num_pages, nbytes), stride)
        for offset, nbytes, stride in zip(offsets, shape.plane_nbytes, strides, strict=True)
    )


def _grouped(shape: PageShape, num_pages: int, before: int, plane_nbytes: int) -> PlaneView:
    # A plane in pieces, seen as (layer, page, token cell, token, head group, byte).
    groups, cells = shape.cells
    num_pieces = groups * cells
    layer_stride = sum(shape.plane_nbytes) // num_pieces
    cell_stride = shape.num_layers * layer_stride
    num_tokens = shape.num_tokens // cells
    row = plane_nbytes // shape.num_tokens // groups
    return PlaneView(
        before // num_pieces,
        (shape.num_layers, num_pages, cells, num_tokens, groups, row),
        (layer_stride, shape.page_nbytes, cell_stride, row, cells * cell_stride, 1),
    )


def alike(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return two views of the same planes in one shape, that of the one which is cut into more axes.

    Args:
        one, other: (..., plane_nbytes), or the same with the last axis cut as in :class:`PlaneView`.
    """
    if one.ndim == other.ndim:
        return one, other
    if one.ndim < other.ndim:
        return _cut(one, other), other
    return one, _cut(other, one)


def _cut(coarse: NDArray[np.uint8], fine: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if coarse.strides[-1] != 1:  # then numpy would copy without a word, and what is written would be lost
        raise InvariantError(f"a plane of strides {coarse.strides} is not one run of bytes")
    return coarse.reshape(*coarse.shape[:-1], *fine.shape[coarse.ndim - 1 :])


def page_runs(source: Pages, target: Pages) -> list[PageRun]:
    """Join pages whose ids are consecutive on both sides; returns the runs, in order.

    Args:
        source, target: page ids, int64, the same length.
    """
    if not len(source):
        return []
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(source)])))
    firsts = zip(source[starts].tolist(), target[starts].tolist(), lengths.tolist(), strict=True)
    return [PageRun(*run) for run in firsts]


def sorted_runs(source: Pages, target: Pages) -> list[PageRun]:
    """Join pages into runs whatever the order they are named in, in the order of ``source``: memory likes it."""
    order = np.argsort(source, kind="stable")
    return page_runs(source[order], target[order])
