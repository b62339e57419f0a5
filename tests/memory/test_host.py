"""HostArena: planes and pages are the same bytes, in every layout, and copies are counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache_async.config import HostLayout
from hicache_async.core.grid import PageCells
from hicache_async.errors import ConfigError
from hicache_async.memory.device_kv import DeviceKV
from hicache_async.memory.host import HostArena

PAGES = 6
LAYOUTS = list(HostLayout)
DIRECT = LAYOUTS[1:]


def make_kv(kind: str = "gqa", dtype: torch.dtype = torch.float16) -> DeviceKV:
    k_shape, v_shape = {
        "mha": ((4, 2, 8, 4), (4, 2, 8, 4)),
        "gqa": ((4, 2, 2, 4), (4, 2, 2, 4)),
        "wide k": ((4, 2, 2, 6), (4, 2, 2, 4)),
        "mla": ((4, 2, 1, 10), None),
    }[kind]
    k = [torch.zeros(k_shape, dtype=dtype) for _ in range(3)]
    v = None if v_shape is None else [torch.zeros(v_shape, dtype=dtype) for _ in range(3)]
    return DeviceKV.from_layers(k, v)


def make_arena(
    layout: HostLayout,
    kind: str = "gqa",
    dtype: torch.dtype = torch.float16,
    *,
    stored: HostLayout | None = None,
) -> HostArena:
    """Return an arena; in head_grouped order each head and each token of a page is a cell of its own."""
    kv = make_kv(kind, dtype)
    buffer = torch.zeros(HostArena.nbytes_needed(kv, PAGES), dtype=torch.uint8)
    cells = PageCells(kv.kv_heads, kv.page_size)
    return HostArena(kv, layout, PAGES, buffer, cells=cells, stored_layout=stored)


def fill(arena: HostArena, seed: int = 0) -> None:
    """Write random bytes through the planes."""
    random = torch.Generator().manual_seed(seed)
    for layer in range(arena.num_layers):
        for plane in arena.planes(layer):
            plane.copy_(torch.randint(0, 256, plane.shape, dtype=torch.uint8, generator=random))


def page_first(arena: HostArena, page: int) -> bytes:
    """A page in the order (layer, plane, byte), plane by plane."""
    return b"".join(
        plane[page].numpy().tobytes() for layer in range(arena.num_layers) for plane in arena.planes(layer)
    )


@pytest.mark.parametrize("kind", ["mha", "gqa", "wide k", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_and_scatter_use_the_stored_order(layout: HostLayout, kind: str) -> None:
    """Gathered pages are in the order asked for whatever the layout, and scatter reverses it."""
    page_order = HostLayout.PAGE_FIRST
    arena, other = make_arena(layout, kind, stored=page_order), make_arena(layout, kind, stored=page_order)
    fill(arena)
    pages = np.array([4, 0, 5], np.int64)
    buffers = arena.scratch(3)
    arena.gather(pages, buffers)
    assert [bytes(buffer) for buffer in buffers] == [page_first(arena, page) for page in pages]
    other.scatter(np.array([1, 2, 3], np.int64), buffers)
    assert [page_first(other, page) for page in (1, 2, 3)] == [bytes(buffer) for buffer in buffers]
    assert not any(page_first(other, page).strip(b"\0") for page in (0, 4, 5))


@pytest.mark.parametrize("kind", ["gqa", "wide k", "mla"])
def test_page_first_bytes_are_what_layer_first_gathers(kind: str) -> None:
    """The object of a page is the same bytes under layer_first and page_first."""
    gathered, direct = make_arena(HostLayout.LAYER_FIRST, kind), make_arena(HostLayout.PAGE_FIRST, kind)
    fill(gathered)
    fill(direct)
    buffers = gathered.scratch(PAGES)
    gathered.gather(np.arange(PAGES), buffers)
    assert [bytes(buffer) for buffer in buffers] == [bytes(direct.page_bytes(page)) for page in range(PAGES)]


@pytest.mark.parametrize("kind", ["gqa", "wide k", "mla"])
def test_page_first_direct_keeps_k_before_v(kind: str) -> None:
    """Under page_first_direct a page is all layers of K, then all layers of V."""
    arena = make_arena(HostLayout.PAGE_FIRST_DIRECT, kind)
    fill(arena)
    planes = range(len(arena.plane_nbytes))
    expected = b"".join(
        arena.planes(layer)[plane][2].numpy().tobytes()
        for plane in planes
        for layer in range(arena.num_layers)
    )
    assert bytes(arena.page_bytes(2)) == expected


@pytest.mark.parametrize("layout", DIRECT)
def test_a_direct_page_is_the_arenas_own_memory(layout: HostLayout) -> None:
    """Bytes written into a page's memoryview are in the planes, and no copy is counted."""
    arena = make_arena(layout)
    assert arena.is_direct
    view = arena.page_bytes(3)
    assert (len(view), view.readonly) == (arena.page_nbytes, False)
    view[:] = bytes([7]) * arena.page_nbytes
    for layer in range(arena.num_layers):
        for plane in arena.planes(layer):
            assert (plane[3] == 7).all()
            assert not plane[:3].any()
            assert not plane[4:].any()
    assert (arena.num_gathered, arena.num_scattered) == (0, 0)


def test_layer_first_counts_its_copies() -> None:
    """Under layer_first a page has no bytes of its own, and each page through scratch is counted once."""
    arena = make_arena(HostLayout.LAYER_FIRST)
    assert not arena.is_direct
    with pytest.raises(ConfigError, match="layer_first keeps no page in one place"):
        arena.page_bytes(0)
    buffers = arena.scratch(2)
    arena.gather(np.array([1, 2]), buffers)
    arena.gather(np.array([3]), buffers[:1])
    arena.scatter(np.array([4, 5]), buffers)
    assert (arena.num_gathered, arena.num_scattered) == (3, 2)


@pytest.mark.parametrize("page", [-1, PAGES])
def test_page_bytes_knows_its_range(page: int) -> None:
    """A page id outside the arena raises rather than giving a short view."""
    with pytest.raises(IndexError, match=r"pages 0 \.\. 5"):
        make_arena(HostLayout.PAGE_FIRST).page_bytes(page)


def test_scratch_pages_are_apart() -> None:
    """Scratch buffers are whole pages that share no byte with each other or with the arena."""
    arena = make_arena(HostLayout.LAYER_FIRST)
    first, second = arena.scratch(2)
    first[:], second[:] = bytes([1]) * len(first), bytes([2]) * len(second)
    assert len(first) == len(second) == arena.page_nbytes
    assert set(first) == {1}
    assert not any(page_first(arena, page).strip(b"\0") for page in range(PAGES))


def test_gather_refuses_a_buffer_of_another_size() -> None:
    """A buffer that is not one page long is an error, never a partial page."""
    arena = make_arena(HostLayout.LAYER_FIRST)
    for nbytes in (arena.page_nbytes - 1, arena.page_nbytes // 2 + arena.num_layers, 2 * arena.page_nbytes):
        buffer = memoryview(bytearray(nbytes))
        with pytest.raises(ValueError, match=f"{nbytes} bytes for a page of {arena.page_nbytes}"):
            arena.gather(np.array([0]), [buffer])
        with pytest.raises(ValueError, match=f"{nbytes} bytes for a page of {arena.page_nbytes}"):
            arena.scatter(np.array([0]), [buffer])
    with pytest.raises(ValueError, match="zip"):
        arena.gather(np.array([0, 1]), arena.scratch(1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_poison_fills_the_pages_and_no_other(layout: HostLayout) -> None:
    """Poison covers every byte of the named pages only."""
    arena = make_arena(layout, "wide k")
    arena.poison(np.array([0, 4]))
    assert [set(page_first(arena, page)) for page in range(PAGES)] == [{0xDD}, {0}, {0}, {0}, {0xDD}, {0}]


def test_a_larger_buffer_will_do() -> None:
    """The arena uses the first bytes of its buffer and leaves the rest alone."""
    kv = make_kv()
    buffer = torch.zeros(HostArena.nbytes_needed(kv, PAGES) + 100, dtype=torch.uint8)
    HostArena(kv, HostLayout.PAGE_FIRST, PAGES, buffer).poison(np.arange(PAGES))
    assert (buffer[:-100] == 0xDD).all()
    assert not buffer[-100:].any()


def test_what_cannot_work_is_refused() -> None:
    """A wrong count or buffer raises ConfigError with the numbers."""
    kv = make_kv()
    nbytes = HostArena.nbytes_needed(kv, PAGES)
    good = torch.zeros(nbytes, dtype=torch.uint8)
    for layout, num_pages, buffer, message in [
        (HostLayout.PAGE_FIRST, 0, good, "num_pages is 0"),
        (HostLayout.PAGE_FIRST, PAGES, good[1:], f"buffer has {nbytes - 1} bytes; 6 pages take {nbytes}"),
        (HostLayout.PAGE_FIRST, PAGES, good.view(torch.int8), "buffer is torch.int8"),
        (HostLayout.PAGE_FIRST, PAGES, good.view(PAGES, -1), r"shape \(6, "),
        (HostLayout.PAGE_FIRST, PAGES, torch.zeros(nbytes, dtype=torch.uint8, device="meta"), "is on meta"),
    ]:
        with pytest.raises(ConfigError, match=message):
            HostArena(kv, layout, num_pages, buffer)
