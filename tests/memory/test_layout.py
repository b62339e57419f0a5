"""Strides of each host layout against the axis orders written down, and the joining of pages."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_async.config import HostLayout
from hicache_async.errors import ConfigError
from hicache_async.memory.layout import PageRun, page_runs, plane_strides

LAYERS, PAGES = 3, 5


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (HostLayout.LAYER_FIRST, "layer, plane, page"),
        (HostLayout.PAGE_FIRST, "page, layer, plane"),
        (HostLayout.PAGE_FIRST_DIRECT, "page, plane, layer"),
    ],
)
@pytest.mark.parametrize("num_planes", [1, 2])
def test_axis_order(layout: HostLayout, axes: str, num_planes: int) -> None:
    """With K and V alike the strides are those of a dense array in the layout's axis order."""
    sizes = {"layer": LAYERS, "plane": num_planes, "page": PAGES}
    order = axes.split(", ")
    dense = np.empty([sizes[axis] for axis in order] + [7], np.uint8)
    stride = dict(zip(order, dense.strides[:-1], strict=True))
    strides = plane_strides(layout, num_layers=LAYERS, num_pages=PAGES, plane_nbytes=(7,) * num_planes)
    assert list(strides) == [
        (plane * stride["plane"], stride["layer"], stride["page"]) for plane in range(num_planes)
    ]


@pytest.mark.parametrize(
    "layout", [HostLayout.LAYER_FIRST, HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT]
)
@pytest.mark.parametrize("plane_nbytes", [(6,), (6, 6), (6, 10)])
def test_planes_tile_the_buffer(layout: HostLayout, plane_nbytes: tuple[int, ...]) -> None:
    """Every byte of the buffer belongs to exactly one (layer, plane, page), K and V alike or not."""
    owners = np.zeros(LAYERS * PAGES * sum(plane_nbytes), np.int64)
    strides = plane_strides(layout, num_layers=LAYERS, num_pages=PAGES, plane_nbytes=plane_nbytes)
    for at, nbytes in zip(strides, plane_nbytes, strict=True):
        for layer in range(LAYERS):
            for page in range(PAGES):
                start = at.offset + layer * at.layer_stride + page * at.page_stride
                assert start + nbytes <= len(owners)
                owners[start : start + nbytes] += 1
    assert (owners == 1).all()


def test_head_grouped_is_refused() -> None:
    """A layout that is not there says so, and which are."""
    with pytest.raises(ConfigError, match=r"head_grouped is not available.*page_first_direct"):
        plane_strides(HostLayout.HEAD_GROUPED, num_layers=1, num_pages=1, plane_nbytes=(8, 8))


@pytest.mark.parametrize(
    ("source", "target", "runs"),
    [
        ([], [], []),
        ([4], [9], [(4, 9, 1)]),
        ([4, 5, 6], [0, 1, 2], [(4, 0, 3)]),
        ([4, 5, 6], [0, 1, 3], [(4, 0, 2), (6, 3, 1)]),
        ([4, 6, 7], [0, 1, 2], [(4, 0, 1), (6, 1, 2)]),
        ([6, 5, 4], [2, 1, 0], [(6, 2, 1), (5, 1, 1), (4, 0, 1)]),
    ],
)
def test_page_runs(source: list[int], target: list[int], runs: list[tuple[int, int, int]]) -> None:
    """Pages join where both sides count up by one, and only there."""
    found = page_runs(np.array(source, np.int64), np.array(target, np.int64))
    assert found == [PageRun(*run) for run in runs]
