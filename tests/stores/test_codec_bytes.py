"""Pages of any size and content come back: exactly, or for fp8 within the bound that it states."""

from __future__ import annotations

import asyncio
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_async.stores import MemoryStore
from hicache_async.stores._codecs.fp8 import ITEM_NBYTES
from hicache_async.stores.codec import Codec, CodecStore, Fp8
from hicache_async.types import StopToken
from tests.stores.wrappers import CODECS, LOSSLESS, key_in_environment

__all__ = ["key_in_environment"]

DTYPES = {name: getattr(torch, name) for name in ITEM_NBYTES}
BLOCK = 32


def through(codec: Codec, page: bytes) -> bytes:
    """Write a page, read it, and return what came back; odd addresses, as in an arena of other pages."""
    whole, back = memoryview(bytearray(b"?" + page)), bytearray(len(page) + 1)

    async def call() -> None:
        store = CodecStore(MemoryStore(), codec)
        assert await store.write(["a"], [whole[1:]]) == 1
        assert await store.read(["a"], [memoryview(back)[1:]], StopToken()) == 1
        await store.aclose()

    asyncio.run(call())
    assert bytes(whole) == b"?" + page and back[0] == 0
    return bytes(back[1:])


def values(page: bytes, dtype: str) -> torch.Tensor:
    """Return the elements of a page as float64."""
    return (
        torch.frombuffer(bytearray(page), dtype=DTYPES[dtype]).double() if page else torch.empty(0).double()
    )


def check_bound(page: bytes, back: bytes, dtype: str, block: int) -> None:
    """Check every element against the documented bound, block by block."""
    info = torch.finfo(DTYPES[dtype])
    for before, after in zip(values(page, dtype).split(block), values(back, dtype).split(block), strict=True):
        finite = torch.isfinite(before)
        largest = before[finite].abs().max().item() if finite.any() else 0.0
        scale = max(largest / 448, 2.0**-126)
        rounding = before.abs() * info.eps + info.smallest_normal * info.eps
        bound = before.abs() / 16 + scale / 1024 + rounding
        assert torch.equal(before.isnan(), after.isnan())
        assert ((after - before).abs()[finite] <= bound[finite]).all()
        for sign in (1, -1):
            infinite = after[before == sign * math.inf]
            assert ((infinite * sign - largest).abs() <= largest * 2 * info.eps + 2.0**-117).all()
        assert (after[before == 0] == 0).all()


@pytest.mark.parametrize("name", LOSSLESS)
@given(
    page=st.binary(max_size=300)
    | st.integers(0, 64 << 10).map(os.urandom)
    | st.integers(0, 64 << 10).map(bytes)
)
@settings(max_examples=40, deadline=None)
def test_lossless_codecs_bring_every_byte_back(name: str, page: bytes) -> None:
    """Of pages of 0 to 64 KiB, whether they compress or not."""
    os.environ.setdefault("HICACHE_TEST_KEY", "00" * 32)
    assert through(CODECS[name](), page) == page


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_fp8_keeps_its_bound_for_any_bits(dtype: str, data: st.DataObject) -> None:
    """Whatever the bits mean, subnormals, infinities and NaN too."""
    num_elements = data.draw(st.integers(0, (64 << 10) // ITEM_NBYTES[dtype]) | st.integers(0, 70))
    seed = data.draw(st.integers(0, 2**32))
    noise = torch.randint(0, 256, (num_elements * ITEM_NBYTES[dtype],), generator=_seeded(seed))
    page = noise.to(torch.uint8).numpy().tobytes()
    check_bound(page, through(Fp8(dtype, block=BLOCK), page), dtype, BLOCK)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32), st.floats(-30, 30), st.integers(0, 3000))
@settings(max_examples=40, deadline=None)
def test_fp8_keeps_its_bound_for_usual_elements(
    dtype: str, seed: int, exponent: float, num_elements: int
) -> None:
    """Normal elements of any magnitude."""
    elements = torch.randn(num_elements, generator=_seeded(seed), dtype=torch.float64) * 2**exponent
    page = elements.to(DTYPES[dtype]).view(torch.uint8).numpy().tobytes()
    check_bound(page, through(Fp8(dtype), page), dtype, 128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_of_the_largest_elements(dtype: str) -> None:
    """The largest magnitude of a dtype comes back finite, exact zeros stay, and infinity becomes the largest."""
    largest = torch.finfo(DTYPES[dtype]).max
    elements = torch.tensor(
        [largest, -largest, 0.0, math.inf, -math.inf, math.nan] * 6000, dtype=DTYPES[dtype]
    )
    page = elements.view(torch.uint8).numpy().tobytes()
    back = values(through(Fp8(dtype, block=96), page), dtype)
    assert back[5::6].isnan().all()
    for at, expected in enumerate([largest, -largest, 0.0, largest, -largest]):
        assert torch.allclose(back[at::6], torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


def test_fp8_halves_bfloat16() -> None:
    """A page of 1 MiB becomes half of it, 4 bytes for each block of 128, and a head of 48."""
    codec = Fp8("bfloat16")
    assert codec.frame_nbytes(1 << 20) == (1 << 19) + 4 * (1 << 12) + 48
    for nbytes in [0, 2, 256, 258, 510, 512, 1 << 20]:
        assert codec.page_nbytes(codec.max_frame_nbytes(nbytes)) == nbytes
    for frame_nbytes in (0, 47, 49, 51, 52, 48 + 132 + 1):
        assert codec.page_nbytes(frame_nbytes) is None


def test_fp8_leaves_the_threads_of_torch_alone() -> None:
    """No piece is large enough for torch to share it among threads, and their number stays as it was."""
    before = torch.get_num_threads()
    page = torch.randn(1 << 18).view(torch.uint8).numpy().tobytes()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        frame = Fp8("float32").encoder()(b"a", memoryview(page))
        assert Fp8("float32").decoder()(b"a", frame, memoryview(bytearray(len(page)))) is None
    kernels = {f"aten::{name}" for name in ("abs", "amax", "clamp_", "copy_", "div", "mul_", "nan_to_num_")}
    computing = [event for event in profile.events() if event.name in kernels]
    assert {event.name for event in computing} == kernels
    sizes = [math.prod(shape) for event in computing for shape in event.input_shapes or [] if shape]
    assert sizes and max(sizes) < 1 << 15
    assert torch.get_num_threads() == before


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
