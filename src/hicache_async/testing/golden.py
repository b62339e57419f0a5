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
from ..memory.device_kv import DeviceKV
from ..memory.host import POISON
from ..memory.layout import plane_strides

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
            content = golden_plane(page_hash, layer, plane, tensor.shape[1])
            tensor[page].copy_(torch.from_numpy(content))


def check_page(paged: PagedBytes, page: int, page_hash: bytes) -> None:
    """Compare ``page`` of a DeviceKV or a HostArena with the golden bytes of ``page_hash``.

    Raises:
        AssertionError: names the layer and plane, and whose bytes were found there.
    """
    for layer in range(paged.num_layers):
        for plane, tensor in enumerate(paged.planes(layer)):
            where = f"{type(paged).__name__} page {page}"
            _check_plane(tensor[page].cpu().numpy(), page_hash, layer, plane, where)


def page_object(kv: DeviceKV, page_hash: bytes, layout: HostLayout = HostLayout.PAGE_FIRST) -> bytes:
    """Return the golden bytes of a whole page, as a store keeps them.

    Args:
        layout: the order of the object; layer_first objects are gathered into page_first order.
    """
    content = np.empty(kv.page_nbytes, np.uint8)
    for layer, plane, place in _places(kv, layout):
        content[place] = golden_plane(page_hash, layer, plane, place.stop - place.start)
    return content.tobytes()


def check_object(
    kv: DeviceKV, data: bytes | memoryview, page_hash: bytes, layout: HostLayout = HostLayout.PAGE_FIRST
) -> None:
    """Compare the bytes of a whole page with :func:`page_object`.

    Raises:
        AssertionError: names the layer and plane, and whose bytes were found there.
    """
    content = np.frombuffer(data, np.uint8)
    if len(content) != kv.page_nbytes:
        raise AssertionError(f"an object of {len(content)} bytes; a page takes {kv.page_nbytes}")
    for layer, plane, place in _places(kv, layout):
        _check_plane(content[place], page_hash, layer, plane, "object")


def _places(kv: DeviceKV, layout: HostLayout) -> Iterator[tuple[int, int, slice]]:
    """Yield (layer, plane, where its bytes lie in one page); one page alone is page_first if layer_first."""
    strides = plane_strides(layout, num_layers=kv.num_layers, num_pages=1, plane_nbytes=kv.plane_nbytes)
    for layer in range(kv.num_layers):
        for plane, (at, nbytes) in enumerate(zip(strides, kv.plane_nbytes, strict=True)):
            start = at.offset + layer * at.layer_stride
            yield layer, plane, slice(start, start + nbytes)


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
