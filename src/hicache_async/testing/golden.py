"""Golden bytes: what a page holds is a function of its hash, so a wrong page accuses itself.

Each plane of a page begins with who it is (the first 8 bytes of the hash, layer, plane) and goes on
with bytes derived from just that. A checker that meets another page's bytes can therefore name that
page, and tell a whole foreign page from a torn one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from ..abc import PagedBytes
from ..config import HostLayout
from ..core.grid import WHOLE, PageCells
from ..memory.device_kv import DeviceKV
from ..memory.host import POISON
from ..memory.layout import PageShape, plane_views

_HEADER = struct.Struct("<8sHBB")  # hash prefix, layer, plane, mark
_MARK = 0xA7
# Odd multipliers of splitmix64 (Steele, Lea, Flood 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def golden_plane(page_hash: bytes, layer: int, plane: int, nbytes: int) -> NDArray[np.uint8]:
    """Return the bytes of one plane of the page named ``page_hash``.

    Args:
        page_hash: at least its first 8 bytes tell pages apart.
        nbytes: how many; less than 12 cannot say whole who they are.
    """
    header = _HEADER.pack(page_hash[:8], layer, plane, _MARK)
    seed = np.uint64(
        int.from_bytes(header[:8], "little") ^ (layer << 8 | plane) * 0x94D049BB133111EB & (1 << 64) - 1
    )
    words = np.arange(1, nbytes // 8 + 2, dtype=np.uint64)
    words *= _STEP
    words += seed
    words ^= words >> np.uint64(30)
    words *= _MIX
    words ^= words >> np.uint64(27)
    content = words.view(np.uint8)[:nbytes]
    identity = np.frombuffer(header, np.uint8)[:nbytes]
    content[: len(identity)] = identity
    return content


def fill_page(paged: PagedBytes, page: int, page_hash: bytes) -> None:
    """Write the golden bytes of ``page_hash`` into ``page`` of a DeviceKV or a HostArena."""
    for layer in range(paged.num_layers):
        for plane, tensor in enumerate(paged.planes(layer)):
            content = golden_plane(page_hash, layer, plane, tensor[page].numel())
            tensor[page].copy_(torch.from_numpy(content).view(tensor.shape[1:]))


def check_page(paged: PagedBytes, page: int, page_hash: bytes) -> None:
    """Compare ``page`` of a DeviceKV or a HostArena with the golden bytes of ``page_hash``.

    Raises:
        AssertionError: names the layer and plane, and whose bytes were found there.
    """
    for layer in range(paged.num_layers):
        for plane, tensor in enumerate(paged.planes(layer)):
            where = f"{type(paged).__name__} page {page}"
            _check_plane(tensor[page].cpu().numpy().reshape(-1), page_hash, layer, plane, where)


def page_object(
    kv: DeviceKV,
    page_hash: bytes,
    layout: HostLayout = HostLayout.PAGE_FIRST,
    cells: PageCells = WHOLE,
) -> bytes:
    """Return the golden bytes of a whole page, as a store keeps them.

    Args:
        layout: the order of the object; layer_first objects are gathered into page_first order.
        cells: how a page is cut in head_grouped order.
    """
    content = np.empty(kv.page_nbytes, np.uint8)
    for layer, plane, part in _parts(kv, content, layout, cells):
        part[...] = golden_plane(page_hash, layer, plane, part.size).reshape(part.shape)
    return content.tobytes()


def check_object(
    kv: DeviceKV,
    data: bytes | memoryview,
    page_hash: bytes,
    layout: HostLayout = HostLayout.PAGE_FIRST,
    cells: PageCells = WHOLE,
) -> None:
    """Compare the bytes of a whole page with :func:`page_object`.

    Raises:
        AssertionError: names the layer and plane, and whose bytes were found there.
    """
    content = np.frombuffer(data, np.uint8)
    if len(content) != kv.page_nbytes:
        raise AssertionError(f"an object of {len(content)} bytes; a page takes {kv.page_nbytes}")
    for layer, plane, part in _parts(kv, content, layout, cells):
        _check_plane(part.reshape(-1), page_hash, layer, plane, "object")


def _parts(
    kv: DeviceKV, content: NDArray[np.uint8], layout: HostLayout, cells: PageCells
) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
    """Yield (layer, plane, view of its bytes) of the bytes of one page."""
    if layout is HostLayout.LAYER_FIRST:
        layout = HostLayout.PAGE_FIRST
    views = [
        np.ndarray(view.shape, np.uint8, content.data, view.offset, view.strides)
        for view in plane_views(layout, PageShape.of(kv, cells), 1)
    ]
    for layer in range(kv.num_layers):
        for plane, view in enumerate(views):
            yield layer, plane, view[layer, 0]


def _check_plane(found: NDArray[np.uint8], page_hash: bytes, layer: int, plane: int, where: str) -> None:
    wanted = golden_plane(page_hash, layer, plane, len(found))
    if not np.array_equal(found, wanted):
        raise AssertionError(
            f"{where}, layer {layer}, plane {plane}: should hold page {page_hash[:8].hex()}, "
            f"but holds {_identify(found)}; first difference at byte {int(np.argmax(found != wanted))}"
        )


def _identify(found: NDArray[np.uint8]) -> str:
    """Say whose bytes these are."""
    for value, name in ((0, "zeros"), (POISON, "poison: the page was freed")):
        if (found == value).all():
            return name
    if len(found) < _HEADER.size:
        return f"bytes too few to name a page: {found.tobytes().hex()}"
    prefix, layer, plane, mark = _HEADER.unpack(found[: _HEADER.size].tobytes())
    if mark != _MARK:
        return "bytes of no golden page"
    name = f"page {prefix.hex()}, layer {layer}, plane {plane}"
    whole = np.array_equal(found, golden_plane(prefix, layer, plane, len(found)))
    return name if whole else f"the beginning of {name}, torn"
