"""Pages in head_grouped order: in every arena, whole and in chunks, and copied only where the arena's order differs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hicache_async.config import HostLayout
from hicache_async.core.grid import PageCells
from hicache_async.memory.device_kv import DeviceKV
from hicache_async.memory.host import HostArena
from hicache_async.testing.golden import check_object, check_page, fill_page, page_object

LAYERS, TOKENS, PAGES = 3, 4, 5
HASH = bytes(range(32))
HEAD_GROUPED = HostLayout.HEAD_GROUPED
KINDS: dict[str, tuple[int, tuple[int, ...]]] = {
    "mha": (4, (4, 4)),
    "wide k": (4, (6, 2)),
    "wide v": (2, (2, 6)),
    "mla": (1, (10,)),
}
"""KV heads, and numbers of one head of K and V."""
CUTS = [
    (kind, PageCells(groups, cells))
    for kind, (heads, _) in KINDS.items()
    for groups, cells in itertools.product([1, 2, 4], [1, 2, 4])
    if heads % groups == 0
]


def make_kv(kind: str) -> DeviceKV:
    heads, dims = KINDS[kind]
    sides = [
        [torch.zeros(PAGES, TOKENS, heads, dim, dtype=torch.float16) for _ in range(LAYERS)] for dim in dims
    ]
    return DeviceKV.from_layers(*sides)


def make_arena(
    kv: DeviceKV, layout: HostLayout, cells: PageCells, stored: HostLayout | None = HEAD_GROUPED
) -> HostArena:
    buffer = torch.zeros(HostArena.nbytes_needed(kv, PAGES), dtype=torch.uint8)
    return HostArena(kv, layout, PAGES, buffer, cells=cells, stored_layout=stored)


def grouped(kv: DeviceKV, page: int, cells: PageCells) -> bytes:
    """A page of the engine in the documented order, one number after the other."""
    heads, tokens = kv.kv_heads // cells.head_groups, TOKENS // cells.token_cells
    planes = [
        [plane[page].numpy().reshape(TOKENS, kv.kv_heads, -1) for plane in kv.planes(layer)]
        for layer in range(LAYERS)
    ]
    return b"".join(
        plane[token, group * heads : (group + 1) * heads].tobytes()
        for group in range(cells.head_groups)
        for cell in range(cells.token_cells)
        for layer in planes
        for plane in layer
        for token in range(cell * tokens, (cell + 1) * tokens)
    )


@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize(("kind", "cells"), CUTS)
def test_every_layout_stores_the_same_bytes(kind: str, cells: PageCells, layout: HostLayout) -> None:
    """Whatever the order of the arena, a page is stored in the documented one, and comes back from it."""
    kv = make_kv(kind)
    arena, other = make_arena(kv, layout, cells), make_arena(kv, layout, cells)
    fill_page(kv, 3, HASH)
    fill_page(arena, 2, HASH)
    buffers = [arena.page_bytes(2)] if arena.is_direct else arena.scratch(1)
    if not arena.is_direct:
        arena.gather(np.array([2]), buffers)
    assert bytes(buffers[0]) == grouped(kv, 3, cells) == page_object(kv, HASH, HEAD_GROUPED, cells)
    check_object(kv, buffers[0], HASH, HEAD_GROUPED, cells)
    if other.is_direct:
        other.page_bytes(4)[:] = buffers[0]
    else:
        other.scatter(np.array([4]), buffers)
    check_page(other, 4, HASH)
    assert not any(plane[:4].any() for layer in range(LAYERS) for plane in other.planes(layer))


@pytest.mark.parametrize(("kind", "cells"), CUTS)
def test_a_page_is_copied_only_where_the_orders_differ(kind: str, cells: PageCells) -> None:
    """head_grouped is direct, and of the others those that have the same bytes; all others copy a page once."""
    kv = make_kv(kind)
    direct = {layout for layout in HostLayout if make_arena(kv, layout, cells).is_direct}
    whole = {HostLayout.PAGE_FIRST} | ({HostLayout.PAGE_FIRST_DIRECT} if kv.is_mla else set())
    assert direct == {HEAD_GROUPED} | (whole if cells == PageCells() else set())
    for layout in HostLayout:
        arena = make_arena(kv, layout, cells)
        if layout not in direct:
            buffers = arena.scratch(2)
            arena.gather(np.array([0, 1]), buffers)
            arena.scatter(np.array([3]), buffers[:1])
            assert (arena.num_gathered, arena.num_scattered) == (2, 1)


@pytest.mark.parametrize(("kind", "cells"), CUTS)
def test_stored_as_it_lies(kind: str, cells: PageCells) -> None:
    """Where no order is asked for, head_grouped pages are stored as they lie, without a copy."""
    kv = make_kv(kind)
    arena = make_arena(kv, HEAD_GROUPED, cells, stored=None)
    fill_page(arena, 1, HASH)
    assert arena.is_direct
    check_object(kv, arena.page_bytes(1), HASH, HEAD_GROUPED, cells)
    arena.poison(np.array([1]))
    assert set(arena.page_bytes(1)) == {0xDD}
    assert set(arena.page_bytes(0)) | set(arena.page_bytes(2)) == {0}


def test_a_wrong_order_accuses_itself() -> None:
    """Golden bytes in another order than the one asked for are refused, although they are as many."""
    kv = make_kv("mha")
    orders = {
        layout: page_object(kv, HASH, layout, PageCells(2, 2))
        for layout in (HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT, HEAD_GROUPED)
    }
    assert len({*orders.values()}) == 3
    for one, other in itertools.permutations(orders, 2):
        with pytest.raises(AssertionError, match="should hold page"):
            check_object(kv, orders[one], HASH, other, PageCells(2, 2))
