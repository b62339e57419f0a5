"""Copy scattered pages in one launch: a Triton kernel that gathers or scatters the pages of one plane, in bytes.

It runs where a pinned host page and a device page are addresses alike, and reads one while it writes the other.
"""

from __future__ import annotations

import math

import torch

from ..errors import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ConfigError(
        f'io_mode is kernel, which needs triton ({error}); pip install "hicache-async[triton]", or set '
        'io_mode="direct" with host_layout "page_first_direct" or "layer_first"'
    ) from error

NUM_PROGRAMS = 64
"""Programs of a launch at most.

Each keeps one block in flight: 64 of 8 KiB are more than a PCIe 5 link moves in the microsecond or so that a byte
takes to come over it, and about what NVLink-C2C does. More would only take multiprocessors from a running matmul.
That is reckoned, not yet measured.
"""

_BLOCK_WORDS = 1024
_NUM_WARPS = 4

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_pages(
    source: torch.Tensor,
    target: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    *,
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Queue a copy of pages of one plane on the current stream of the current device, as one launch.

    Args:
        source, target: uint8 (num_pages, plane_nbytes), or the same with the last axis cut as in
            :class:`~hicache_async.memory.layout.PlaneView`; any strides but the last, which is 1. On the device
            or in pinned host memory, each its own.
        source_pages, target_pages: int64 (n,) on the device: the page ids of each copy. The caller has checked
            that all of them exist and that no target is named twice.
        num_programs: programs of the launch at most.

    **Ownership**: nothing is held. The caller keeps pages, page ids and pinned memory as they are until the
    stream is past the copy.
    """
    num_pages = source_pages.numel()
    if not num_pages:
        return
    source, target = _in_words(*_alike(source, target))
    _, *rows, row_words = source.shape
    rows = rows or [1, 1, 1]
    blocks_per_page = triton.cdiv(math.prod(rows) * row_words, _BLOCK_WORDS)
    _copy_words[(min(num_programs, num_pages * blocks_per_page),)](
        source, target, source_pages.contiguous(), target_pages.contiguous(), num_pages,
        *rows, row_words, *_strides(source), *_strides(target),
        BLOCK=_BLOCK_WORDS, num_warps=_NUM_WARPS,
    )  # fmt: skip


def copy_pages_torch(
    source: torch.Tensor,
    target: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    *,
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Copy pages as :func:`copy_pages` does, by torch alone: what it has to equal, and what stands in for it.

    It takes memory for the pages on the way. Between host and device it waits for the stream.

    Args: as :func:`copy_pages`; here host memory need not be pinned, and ``num_programs`` changes nothing.
    """
    source, target = _alike(source, target)
    moved = source.index_select(0, source_pages.to(source.device))
    target.index_copy_(0, target_pages.to(target.device), moved.to(target.device))


# Triton compiles once more for an argument that is 1 or a multiple of 16, to divide less and to join words into
# accesses of 16 bytes. What differs from launch to launch must not have it compile while a request waits.
# The types of the arguments are those of a launch.
@triton.jit(do_not_specialize=["num_pages", "source_pages", "target_pages"])  # type: ignore[untyped-decorator]
def _copy_words(  # type: ignore[no-untyped-def]
    source, target, source_pages, target_pages, num_pages,
    num_cells, num_tokens, num_groups, row_words,
    source_page, source_cell, source_token, source_group,
    target_page, target_cell, target_token, target_group,
    BLOCK: tl.constexpr,
):  # fmt: skip
    page_words = num_cells * num_tokens * num_groups * row_words
    blocks_per_page = tl.cdiv(page_words, BLOCK)
    for block in range(tl.program_id(0), num_pages * blocks_per_page, tl.num_programs(0)):
        word = block % blocks_per_page * BLOCK + tl.arange(0, BLOCK)
        row = word // row_words
        # In 64 bits from here on: an arena is larger than 32 can address.
        column = (word % row_words).to(tl.int64)
        group = (row % num_groups).to(tl.int64)
        token = (row // num_groups % num_tokens).to(tl.int64)
        cell = (row // num_groups // num_tokens).to(tl.int64)
        read = tl.load(source_pages + block // blocks_per_page).to(tl.int64) * source_page
        write = tl.load(target_pages + block // blocks_per_page).to(tl.int64) * target_page
        read += cell * source_cell + token * source_token + group * source_group + column
        write += cell * target_cell + token * target_token + group * target_group + column
        in_page = word < page_words
        tl.store(target + write, tl.load(source + read, mask=in_page), mask=in_page)


def _alike(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two views of pages of a plane in one shape, but for their number: that of the one cut into more axes."""
    if one.dim() < other.dim():
        return one.view(one.shape[0], *other.shape[1:]), other
    if one.dim() > other.dim():
        return one, other.view(other.shape[0], *one.shape[1:])
    return one, other


def _in_words(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View bytes as the widest integers that the addresses, strides and rows of both are multiples of."""
    numbers = [one.shape[-1]]
    for tensor in (one, other):
        # A view in words begins at a whole number of them, counted from its storage, which may begin anywhere.
        numbers += [tensor.data_ptr(), int(tensor.storage_offset()), *tensor.stride()[:-1]]
    word = _WORDS[math.gcd(max(_WORDS), *numbers)]
    return one.view(word), other.view(word)


def _strides(words: torch.Tensor) -> list[int]:
    page, *rows, _ = words.stride()
    return [page, *(rows or [0, 0, 0])]
