"""Golden bytes: right pages pass, and a wrong one names the page it holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache_async.config import HostLayout
from hicache_async.memory.device_kv import DeviceKV
from hicache_async.memory.host import HostArena
from hicache_async.testing.golden import check_object, check_page, fill_page, golden_plane, page_object

HASH, OTHER = bytes(range(32)), bytes(range(100, 132))
LAYOUTS = [HostLayout.LAYER_FIRST, HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT]


def make_kv(dtype: torch.dtype = torch.bfloat16, dim: int = 8) -> DeviceKV:
    return DeviceKV.from_layers(
        [torch.zeros(4, 2, 2, dim).to(dtype) for _ in range(3)],
        [torch.zeros(4, 2, 2, 2 * dim).to(dtype) for _ in range(3)],
    )


def make_arena(kv: DeviceKV, layout: HostLayout) -> HostArena:
    return HostArena(kv, layout, 4, torch.zeros(HostArena.nbytes_needed(kv, 4), dtype=torch.uint8))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8],
    ids=str,
)
def test_every_dtype(dtype: torch.dtype) -> None:
    """A filled page passes its check whatever its dtype, and leaves its neighbours alone."""
    kv = make_kv(dtype)
    fill_page(kv, 2, HASH)
    check_page(kv, 2, HASH)
    for page in (1, 3):
        with pytest.raises(AssertionError, match="holds zeros"):
            check_page(kv, page, HASH)


def test_content_differs_by_hash_layer_and_plane() -> None:
    """No two of hash, layer and plane give the same bytes, beyond the names at their head too."""
    contents = {
        golden_plane(page_hash, layer, plane, 64)[12:].tobytes()
        for page_hash in (HASH, OTHER)
        for layer in range(80)
        for plane in range(2)
    }
    assert len(contents) == 2 * 80 * 2


def test_a_short_plane_is_the_beginning_of_a_long_one() -> None:
    """The length only cuts, so that any dtype and width can be asked for; none is too short."""
    whole = golden_plane(HASH, 1, 0, 100)
    for nbytes in (0, 1, 7, 8, 11, 12, 13, 99):
        assert golden_plane(HASH, 1, 0, nbytes).tobytes() == whole[:nbytes].tobytes()


def test_a_wrong_page_accuses_itself() -> None:
    """The message names the page asked for and the page found."""
    kv = make_kv()
    fill_page(kv, 2, OTHER)
    expected = (
        f"page 2, layer 0, plane 0: should hold page {HASH[:8].hex()}, but holds page {OTHER[:8].hex()}"
    )
    with pytest.raises(AssertionError, match=expected):
        check_page(kv, 2, HASH)


def test_a_swapped_layer_accuses_itself() -> None:
    """Bytes of the right page in the wrong layer are named by their layer."""
    kv = make_kv()
    fill_page(kv, 0, HASH)
    first, second = kv.planes(1)[1], kv.planes(2)[1]
    first[0] = second[0]
    with pytest.raises(AssertionError, match=rf"layer 1, plane 1: .*page {HASH[:8].hex()}, layer 2, plane 1"):
        check_page(kv, 0, HASH)


def test_one_changed_byte_is_torn() -> None:
    """A page that is right but for one byte is called torn, and the byte is named."""
    kv = make_kv()
    fill_page(kv, 0, HASH)
    kv.planes(2)[0][0, 40] ^= 1
    with pytest.raises(AssertionError, match="layer 2, plane 0: .* torn; first difference at byte 40"):
        check_page(kv, 0, HASH)


def test_freed_and_strange_pages() -> None:
    """Poison is called a freed page, and anything else no golden page."""
    kv = make_kv()
    arena = make_arena(kv, HostLayout.PAGE_FIRST)
    arena.poison(np.array([1]))
    with pytest.raises(AssertionError, match="poison: the page was freed"):
        check_page(arena, 1, HASH)
    arena.poison(np.array([1]), 0x11)
    with pytest.raises(AssertionError, match="bytes of no golden page"):
        check_page(arena, 1, HASH)


def test_tiny_planes_still_check() -> None:
    """A plane too short for a name is compared all the same."""
    kv = make_kv(torch.uint8, dim=1)
    fill_page(kv, 0, HASH)
    check_page(kv, 0, HASH)
    with pytest.raises(AssertionError, match="too few to name a page"):
        check_page(kv, 0, OTHER)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arena_pages_and_objects_agree(layout: HostLayout) -> None:
    """A page filled in the arena is the object of that hash, and an object put there is that page."""
    kv = make_kv()
    arena = make_arena(kv, layout)
    fill_page(arena, 3, HASH)
    if arena.is_direct:
        data = arena.page_bytes(3)
    else:
        data = arena.scratch(1)[0]
        arena.gather(np.array([3]), [data])
    assert bytes(data) == page_object(kv, HASH, layout)
    check_object(kv, data, HASH, layout)
    check_page(arena, 3, HASH)


def test_wrong_objects() -> None:
    """An object of another page, order or length does not pass."""
    kv = make_kv()
    with pytest.raises(AssertionError, match=f"object, layer 0, plane 0: .*holds page {OTHER[:8].hex()}"):
        check_object(kv, page_object(kv, OTHER), HASH)
    with pytest.raises(AssertionError, match="layer 0, plane 1: .*holds"):
        check_object(kv, page_object(kv, HASH, HostLayout.PAGE_FIRST_DIRECT), HASH)
    with pytest.raises(AssertionError, match="an object of 3 bytes"):
        check_object(kv, b"abc", HASH)
