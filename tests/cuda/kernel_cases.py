"""copy_pages beside an oracle: the same bytes at the same places, and not one byte besides.

Run by its name alone: with TRITON_INTERPRET=1 on a machine without a GPU, as ``test_kernels.py`` does, or without
on one that has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_async.abc import PagedBytes
from hicache_async.config import HostLayout
from hicache_async.core.grid import WHOLE, PageCells
from hicache_async.cuda import kernels
from hicache_async.cuda.kernels import copy_pages, copy_pages_torch
from hicache_async.memory.device_kv import DeviceKV
from hicache_async.memory.host import HostArena
from hicache_async.testing.golden import check_page, fill_page

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
KINDS: dict[str, tuple[int, tuple[int, ...]]] = {
    "mha": (4, (16, 16)),
    "gqa": (2, (8, 8)),
    "wide k": (2, (12, 8)),
    "mla": (1, (18,)),
    "odd": (2, (3, 5)),
}
"""KV heads, and numbers of one head of K and V."""
TOKENS = {1: 1, 3: 3, 4: 2}
"""Page sizes, and in how many cells of tokens a page of each is cut."""
LAYERS, DEVICE_PAGES, HOST_PAGES = 2, 7, 9

BLOCK = kernels._BLOCK_WORDS
Copy = Callable[..., None]


def host_bytes(nbytes: int) -> torch.Tensor:
    """Return host memory that the kernel can reach."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")


def device_bytes(nbytes: int) -> torch.Tensor:
    """Return memory of the device."""
    return torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)


def fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Fill a tensor's memory with bytes of every value, each seed its own."""
    memory = whole(tensor)
    noise = np.random.default_rng(seed).integers(0, 256, memory.numel(), np.uint8)
    memory.copy_(torch.from_numpy(noise))
    return tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all the memory behind a view, in bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def on_device(pages: Sequence[int]) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int64, device=DEVICE)


def copy_now(copy: Copy, *tensors: torch.Tensor, num_programs: int = kernels.NUM_PROGRAMS) -> None:
    """Copy and wait until it is done."""
    copy(*tensors, num_programs=num_programs)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def check_copy(
    source: torch.Tensor, target: torch.Tensor, pages: Sequence[tuple[int, int]], num_programs: int = 64
) -> None:
    """Copy by the kernel and by torch, and compare all memory with what a copy of page after page leaves."""
    before, source_before = whole(target).cpu().clone(), whole(source).cpu().clone()
    expected = before.clone()
    places = expected.as_strided(target.shape, target.stride(), int(target.storage_offset()))
    for taken, given_ in pages:
        places[given_] = source[taken].cpu().reshape(-1).reshape(target.shape[1:])
    ids = on_device([page for page, _ in pages]), on_device([page for _, page in pages])
    for copy in (copy_pages_torch, copy_pages):
        whole(target).copy_(before)
        copy_now(copy, source, target, *ids, num_programs=num_programs)
        wrong = torch.nonzero(whole(target).cpu() != expected).flatten().tolist()
        assert not wrong, f"{copy.__name__}: {len(wrong)} of {len(before)} bytes, the first at {wrong[0]}"
        assert torch.equal(whole(source).cpu(), source_before)


# Planes of caches


def make_kv(kind: str, page_size: int, dtype: torch.dtype) -> DeviceKV:
    """Return device pages of every byte value; the first token of each page is NaN in every dtype that has one."""
    heads, dims = KINDS[kind]
    shapes = [(DEVICE_PAGES, page_size, heads, dim) for dim in dims]
    sides = []
    for side, shape in enumerate(shapes):
        layers = [
            fill(torch.empty(shape, dtype=dtype, device=DEVICE), seed=10 * side + layer)
            for layer in range(LAYERS)
        ]
        for layer in layers:
            layer.view(torch.uint8)[:, 0] = 0xFF
        sides.append(layers)
    return DeviceKV.from_layers(*sides)


def make_arena(kv: DeviceKV, layout: HostLayout) -> HostArena:
    cells = WHOLE
    if layout is HostLayout.HEAD_GROUPED:
        cells = PageCells(kv.kv_heads, TOKENS[kv.page_size])
    buffer = fill(host_bytes(HostArena.nbytes_needed(kv, HOST_PAGES)), seed=99)
    return HostArena(kv, layout, HOST_PAGES, buffer, cells=cells)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planes_of_every_cache(dtype: torch.dtype, layout: HostLayout, kind: str) -> None:
    """Pages of every dtype, layout and width arrive whole, both ways; any two of these with every page size."""
    turn = DTYPES.index(dtype) + list(HostLayout).index(layout) + list(KINDS).index(kind)
    kv = make_kv(kind, list(TOKENS)[turn % len(TOKENS)], dtype)
    arena = make_arena(kv, layout)
    for on_gpu, on_host in zip(kv.planes(LAYERS - 1), arena.planes(LAYERS - 1), strict=True):
        check_copy(on_gpu, on_host, [(5, 0), (1, 8)])
        check_copy(on_host, on_gpu, [(8, 2), (3, 6)])


@pytest.mark.parametrize("layout", HostLayout)
def test_pages_say_who_they_are(layout: HostLayout) -> None:
    """Pages that went down and up again say their own name in all layers, and those not named keep their bytes."""
    kv = make_kv("wide k", 4, torch.float16)
    arena = make_arena(kv, layout)
    names = [bytes([page]) * 32 for page in range(DEVICE_PAGES)]
    for page, name in enumerate(names):
        fill_page(kv, page, name)

    def copy(source: PagedBytes, target: PagedBytes, pages: list[int], to: list[int]) -> None:
        for layer in range(LAYERS):
            for taken, given_ in zip(source.planes(layer), target.planes(layer), strict=True):
                copy_now(copy_pages, taken, given_, on_device(pages), on_device(to))

    copy(kv, arena, [4, 1, 2], [0, 8, 5])
    for page, name in [(0, names[4]), (8, names[1]), (5, names[2])]:
        check_page(arena, page, name)
    copy(arena, kv, [5, 0], [3, 6])
    for page, now in enumerate([0, 1, 2, 2, 4, 5, 4]):
        check_page(kv, page, names[now])


# Any memory


@dataclass(frozen=True)
class Axes:
    """How one side of a copy lies in memory: its axes from the outermost, and how many bytes are left between."""

    is_cut: bool
    order: tuple[int, ...]
    gaps: tuple[int, ...]
    start: int

    def lay(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a view of memory of its own: (page, cell, token, group, byte), or where not cut (page, byte)."""
        strides, nbytes = [1] * len(shape), shape[-1]
        for axis in reversed(self.order if self.is_cut else range(4)):
            # What is not cut is a run of bytes behind the page.
            strides[axis] = nbytes + (self.gaps[axis] if self.is_cut or axis == 0 else 0)
            nbytes = strides[axis] * shape[axis]
        memory = device_bytes(self.start + nbytes)
        view = memory.as_strided(shape, strides, self.start)
        return view if self.is_cut else view.flatten(1)


axes = st.builds(
    Axes,
    is_cut=st.booleans(),
    order=st.permutations(range(4)).map(tuple),
    gaps=st.tuples(*[st.sampled_from([0, 0, 1, 4, 8, 16])] * 4),
    start=st.sampled_from([0, 0, 1, 2, 8, 20]),
)


@settings(deadline=None, max_examples=100)
@given(
    source=axes,
    target=axes,
    num_pages=st.tuples(*[st.integers(1, 6)] * 2),
    inner=st.tuples(*[st.integers(1, 3)] * 3, st.sampled_from([1, 2, 3, 7, 8, 16, 24, 400])),
    num_programs=st.integers(1, 5),
    data=st.data(),
)
def test_any_strides(
    source: Axes,
    target: Axes,
    num_pages: tuple[int, int],
    inner: tuple[int, ...],
    num_programs: int,
    data: st.DataObject,
) -> None:
    """However the axes of either side are ordered, padded, aligned and cut, every byte finds its place."""
    taken = fill(source.lay((num_pages[0], *inner)), seed=1)
    given_ = fill(target.lay((num_pages[1], *inner)), seed=2)
    to = data.draw(st.lists(st.integers(0, num_pages[1] - 1), min_size=1, unique=True), "to")
    pages = data.draw(st.lists(st.integers(0, num_pages[0] - 1), min_size=len(to), max_size=len(to)), "pages")
    check_copy(taken, given_, list(zip(pages, to, strict=True)), num_programs)


ORDERS = {
    "scattered": [(4, 6), (0, 1), (3, 5), (5, 0), (1, 2)],
    "consecutive": [(page, page + 1) for page in range(6)],
    "reversed": [(page, 6 - page) for page in range(6)],
    "one source": [(3, 5), (3, 1)],
    "single": [(5, 6)],
    "none": [],
}


@pytest.mark.parametrize("num_programs", [1, 2, 5, 6, 7, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_and_counts_of_pages(order: str, num_programs: int) -> None:
    """Pages in any order arrive, be they fewer than the programs, as many or more."""
    source = fill(device_bytes(6 * 40), seed=1).view(6, 40)
    target = fill(host_bytes(7 * 40), seed=2).view(7, 40)
    check_copy(source, target, ORDERS[order], num_programs)


@pytest.mark.parametrize("past", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_ends_of_blocks(word: int, blocks: int, past: int) -> None:
    """A page of a word less than whole blocks, of just as many and of one more arrives, in words of each width."""
    nbytes = (blocks * BLOCK + past) * word
    page = nbytes + (
        word if word < 8 else 0
    )  # a stride which leaves a gap, and where it can the words as they are
    source = fill(device_bytes(3 * page + word), seed=1).as_strided((3, nbytes), (page, 1), word)
    target = fill(host_bytes(4 * page + word), seed=2).as_strided((4, nbytes), (page, 1), word)
    check_copy(source, target, [(2, 0), (0, 3)], num_programs=3)


def test_k_and_v_of_one_tensor() -> None:
    """K and V that alternate in one tensor, a page stride of two planes, do not touch each other."""
    both = fill(torch.empty(DEVICE_PAGES, 2, 4, 2, 8, dtype=torch.float16, device=DEVICE), seed=1)
    kv = DeviceKV.from_layers([both[:, 0]], [both[:, 1]])
    arena = make_arena(kv, HostLayout.PAGE_FIRST)
    for on_gpu, on_host in zip(kv.planes(0), arena.planes(0), strict=True):
        assert on_gpu.stride(0) == 2 * on_gpu.shape[1]
        check_copy(on_host, on_gpu, [(7, 3), (2, 0)])
        check_copy(on_gpu, on_host, [(1, 1), (6, 4)])


def test_page_ids_from_a_table() -> None:
    """Page ids that are not contiguous, as a column of a table, are read where they lie."""
    source, target = fill(device_bytes(60), seed=1).view(6, 10), fill(device_bytes(60), seed=2).view(6, 10)
    table = on_device([3, 1, 4, 0, 5, 2]).view(3, 2)
    copy_now(copy_pages, source, target, table[:, 0], table[:, 1])
    assert torch.equal(target[[1, 0, 2]], source[[3, 4, 5]])


# Above what 32 bits can address

FAR = (2**31 // 2 | 1) + 2**20
"""Bytes: two of it do not fit 31 bits, and it is odd, so that words are bytes."""


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("axis", ["page", "cell", "token", "group"])
def test_offsets_above_32_bits(axis: str, side: str) -> None:
    """An offset that no single stride and no page id shows to be large is computed in 64 bits, along every axis."""
    shape = [3 if name == axis else 1 for name in ("page", "cell", "token", "group")] + [5]
    strides = [FAR if size == 3 else 5 for size in shape[:-1]] + [1]
    near = fill(device_bytes(15), seed=1).view(shape)
    far = device_bytes(2 * FAR + 5).as_strided(shape, strides)  # of which only what is copied is ever touched
    pages = on_device(range(shape[0]))
    if side == "target":
        copy_now(copy_pages, near, far, pages, pages)
        assert torch.equal(far, near)
    else:
        far.copy_(near)
        near.zero_()
        copy_now(copy_pages, far, near, pages, pages)
        assert near.any()
        assert torch.equal(far, near)


# What is launched


@dataclass(frozen=True)
class Launch:
    """What one launch was given."""

    num_programs: int
    word: torch.dtype


class Recorder:
    """Stands where the kernel does, and writes down its launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int]) -> Recorder:
        self.grid = grid
        return self

    def __call__(self, source: torch.Tensor, target: torch.Tensor, *args: object, **options: object) -> None:
        assert source.dtype == target.dtype
        self.launches.append(Launch(*self.grid, word=source.dtype))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Give a stand-in for the kernel."""
    recorder = Recorder()
    monkeypatch.setattr(kernels, "_copy_words", recorder)
    return recorder


@pytest.mark.parametrize(
    ("num_pages", "blocks", "num_programs", "launched"),
    [(0, 1, 8, []), (1, 1, 8, [1]), (3, 2, 8, [6]), (4, 2, 8, [8]), (9, 3, 8, [8]), (500, 1, 64, [64])],
)
def test_one_launch_of_few_programs(
    recorder: Recorder, num_pages: int, blocks: int, num_programs: int, launched: list[int]
) -> None:
    """However many pages: one launch, of no more programs than allowed or of use; no pages, no launch."""
    source, target = (
        device_bytes(blocks * BLOCK * 8).expand(2, -1),
        device_bytes(blocks * BLOCK * 8).expand(2, -1),
    )
    pages = on_device([0] * num_pages)
    copy_pages(source, target, pages, pages, num_programs=num_programs)
    assert [launch.num_programs for launch in recorder.launches] == launched


@pytest.mark.parametrize(
    ("row", "stride", "start", "word"),
    [
        (48, 48, 0, torch.int64),
        (48, 64, 16, torch.int64),
        (48, 52, 0, torch.int32),
        (44, 48, 0, torch.int32),
        (48, 48, 4, torch.int32),
        (48, 50, 0, torch.int16),
        (48, 48, 2, torch.int16),
        (47, 48, 0, torch.uint8),
        (48, 49, 0, torch.uint8),
        (48, 48, 1, torch.uint8),
    ],
)
@pytest.mark.parametrize("is_source", [True, False])
def test_words_are_as_wide_as_they_can(
    recorder: Recorder, row: int, stride: int, start: int, word: torch.dtype, is_source: bool
) -> None:
    """Words are the widest that row, stride and start of both sides allow."""
    one = device_bytes(4 * stride + start).as_strided((4, row), (stride, 1), start)
    other = device_bytes(4 * 64).as_strided((4, row), (64, 1))
    pages = on_device([0, 2])
    copy_pages(*((one, other) if is_source else (other, one)), pages, pages)
    assert [launch.word for launch in recorder.launches] == [word]


@pytest.mark.parametrize(
    ("skipped", "start", "word"),
    [
        (0, 8, torch.int64),
        (4, 4, torch.int32),
        (2, 0, torch.int16),
        (1, 0, torch.uint8),
        (1, 7, torch.uint8),  # a good address, but no whole number of words from where the memory begins
    ],
)
def test_memory_may_begin_anywhere(recorder: Recorder, skipped: int, start: int, word: torch.dtype) -> None:
    """Memory that itself begins at an odd address, as a part of a larger one, narrows the words too."""
    memory = torch.from_numpy(np.zeros(200, np.uint8)[skipped:])
    one, other = memory[start : start + 96].view(2, 48), device_bytes(96).view(2, 48)
    pages = on_device([0])
    copy_pages(one, other, pages, pages)
    copy_pages(other, one, pages, pages)
    assert [launch.word for launch in recorder.launches] == [word, word]
