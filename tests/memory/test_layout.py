"""Where each byte lies in each host layout, against the axis orders written down, and the joining of pages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hicache_async.config import HostLayout
from hicache_async.core.grid import PageCells
from hicache_async.errors import InvariantError
from hicache_async.memory.layout import PageRun, PageShape, alike, page_runs, plane_views, same_order

LAYERS, PAGES, TOKENS, HEADS = 3, 5, 4, 6
DIM_NBYTES = 7
AXES = {
    HostLayout.LAYER_FIRST: "layer, plane, page, cell, token, group, head",
    HostLayout.PAGE_FIRST: "page, layer, plane, cell, token, group, head",
    HostLayout.PAGE_FIRST_DIRECT: "page, plane, layer, cell, token, group, head",
    HostLayout.HEAD_GROUPED: "page, group, cell, layer, plane, token, head",
}


def shape_of(plane_nbytes: tuple[int, ...], cells: PageCells) -> PageShape:
    return PageShape(LAYERS, TOKENS, plane_nbytes, cells)


@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize("cells", list(itertools.product([1, 3, 6], [1, 2, 4])))
@pytest.mark.parametrize("num_planes", [1, 2])
def test_axis_order(layout: HostLayout, cells: tuple[int, int], num_planes: int) -> None:
    """With K and V alike each byte lies where a dense array in the layout's axis order has it."""
    groups, token_cells = cells
    sizes = {
        "layer": LAYERS, "plane": num_planes, "page": PAGES, "cell": token_cells, "token": TOKENS // token_cells,
        "group": groups, "head": HEADS // groups * DIM_NBYTES,
    }  # fmt: skip
    order = AXES[layout].split(", ")
    dense = np.arange(np.prod([*sizes.values()])).reshape([sizes[axis] for axis in order])
    wanted = dense.transpose([order.index(axis) for axis in AXES[HostLayout.LAYER_FIRST].split(", ")])
    shape = shape_of((TOKENS * HEADS * DIM_NBYTES,) * num_planes, PageCells(*cells))
    for plane, view in enumerate(plane_views(layout, shape, PAGES)):
        places = view.offset + sum(
            axis * stride for axis, stride in zip(np.indices(view.shape), view.strides, strict=True)
        )
        assert np.array_equal(places.reshape(-1), wanted[:, plane].reshape(-1))


@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize("cells", list(itertools.product([1, 2], [1, 2, 4])))
@pytest.mark.parametrize("plane_nbytes", [(16,), (16, 16), (16, 40)])
def test_planes_tile_the_buffer(
    layout: HostLayout, cells: tuple[int, int], plane_nbytes: tuple[int, ...]
) -> None:
    """Every byte of the buffer belongs to exactly one (layer, plane, page), K and V alike or not."""
    owners = np.zeros(LAYERS * PAGES * sum(plane_nbytes), np.uint8)
    for view in plane_views(layout, shape_of(plane_nbytes, PageCells(*cells)), PAGES):
        part = np.ndarray(view.shape, np.uint8, owners.data, view.offset, view.strides)
        part += 1
    assert (owners == 1).all()


@pytest.mark.parametrize("cells", list(itertools.product([1, 2], [1, 2, 4])))
@pytest.mark.parametrize("plane_nbytes", [(16,), (16, 16), (16, 40)])
def test_any_layers_of_one_cell_are_one_run_of_bytes(
    cells: tuple[int, int], plane_nbytes: tuple[int, ...]
) -> None:
    """In head_grouped order a range of layers of one head group and token cell is one (offset, length)."""
    groups, token_cells = cells
    page = np.zeros(LAYERS * sum(plane_nbytes), np.uint8)
    shape = shape_of(plane_nbytes, PageCells(*cells))
    length = sum(plane_nbytes) // (groups * token_cells)
    marks = iter(range(1, 256))
    expected: list[int] = []
    for group, cell, layer in itertools.product(range(groups), range(token_cells), range(LAYERS)):
        mark = next(marks)
        expected += [mark] * length
        for view in plane_views(HostLayout.HEAD_GROUPED, shape, 1):
            part = np.ndarray(view.shape, np.uint8, page.data, view.offset, view.strides)[layer, 0]
            if groups * token_cells == 1:
                part[:] = mark
            else:
                part[cell, :, group] = mark
    assert page.tolist() == expected


def test_layouts_of_the_same_bytes() -> None:
    """Uncut pages are page_first under head_grouped, and so is one plane alone under page_first_direct."""
    whole, cut = PageCells(), PageCells(1, 2)
    both, latent = (8, 8), (8,)
    same = {
        (layout, planes, cells): same_order(layout, shape_of(planes, cells))
        for layout in HostLayout
        for planes in (both, latent)
        for cells in (whole, cut)
    }
    other = {key for key, simplest in same.items() if key[0] is not simplest}
    assert {same[key] for key in other} == {HostLayout.PAGE_FIRST}
    assert other == {
        (HostLayout.HEAD_GROUPED, both, whole),
        (HostLayout.HEAD_GROUPED, latent, whole),
        (HostLayout.PAGE_FIRST_DIRECT, latent, whole),
        (HostLayout.PAGE_FIRST_DIRECT, latent, cut),
    }


def test_a_plane_is_cut_without_a_copy() -> None:
    """What is written through the finer shape is in the coarser array, whichever side is the coarser one."""
    coarse, fine = np.zeros((2, 24), np.uint8), np.ones((2, 2, 3, 4), np.uint8)
    for one, other in ((coarse, fine), (fine, coarse)):
        left, right = alike(one, other)
        assert left.shape == right.shape == fine.shape
        assert np.shares_memory(left, one)
        assert np.shares_memory(right, other)
    with pytest.raises(InvariantError, match="not one run of bytes"):
        alike(np.zeros((2, 48), np.uint8)[:, ::2], fine)


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
