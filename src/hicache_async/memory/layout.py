"""Where each plane of a host page lies, for every layout, and which copies can be joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..config import HostLayout
from ..errors import ConfigError
from ..types import Pages


class PlaneStrides(NamedTuple):
    """Byte ``offset + layer * layer_stride + page * page_stride`` is where a plane's page begins."""

    offset: int
    layer_stride: int
    page_stride: int


class PageRun(NamedTuple):
    """``num_pages`` pages that follow each other in the source and in the target."""

    source: int
    target: int
    num_pages: int


def plane_strides(
    layout: HostLayout, *, num_layers: int, num_pages: int, plane_nbytes: Sequence[int]
) -> tuple[PlaneStrides, ...]:
    """Compute the strides of each plane (K and V; MLA: one) in a buffer of ``num_pages`` pages.

    The planes may differ in width, so "2" in an axis order stands for K's bytes, then V's:

    ===================  =======================================
    layer_first          (layer, 2, page, token, head, dim)
    page_first           (page, layer, 2, token, head, dim)
    page_first_direct    (page, 2, layer, token, head, dim)
    ===================  =======================================

    Args:
        plane_nbytes: bytes of one page of one layer, per plane.
    Raises:
        ConfigError: ``head_grouped``, whose pages are no planes.
    """
    layer_nbytes = sum(plane_nbytes)
    before = [sum(plane_nbytes[:plane]) for plane in range(len(plane_nbytes))]
    page_nbytes = num_layers * layer_nbytes
    match layout:
        case HostLayout.LAYER_FIRST:
            return tuple(
                PlaneStrides(num_pages * start, num_pages * layer_nbytes, nbytes)
                for start, nbytes in zip(before, plane_nbytes, strict=True)
            )
        case HostLayout.PAGE_FIRST:
            return tuple(PlaneStrides(start, layer_nbytes, page_nbytes) for start in before)
        case HostLayout.PAGE_FIRST_DIRECT:
            return tuple(
                PlaneStrides(num_layers * start, nbytes, page_nbytes)
                for start, nbytes in zip(before, plane_nbytes, strict=True)
            )
        case _:
            raise ConfigError(
                f"host_layout {layout} is not available: a group of heads is not one plane per layer; "
                "choose layer_first, page_first or page_first_direct"
            )


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
