"""DeviceKV: which tensors are taken, what is said of those that are not, and that bytes are not copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hicache_async.errors import ConfigError
from hicache_async.memory.device_kv import DeviceKV
from hicache_async.testing._device_bench import DTYPES


def layers(*shape: int, count: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_page_axis(dtype: torch.dtype) -> None:
    """Of tensors with a page axis every attribute follows from shape and dtype alone."""
    kv = DeviceKV.from_layers(layers(5, 4, 2, 8, dtype=dtype), layers(5, 4, 2, 6, dtype=dtype))
    assert (kv.num_layers, kv.num_pages, kv.page_size) == (3, 5, 4)
    assert (kv.kv_heads, kv.head_dims, kv.is_mla) == (2, (8, 6), False)
    assert kv.dtype == str(dtype).removeprefix("torch.")
    assert kv.plane_nbytes == (4 * 2 * 8 * dtype.itemsize, 4 * 2 * 6 * dtype.itemsize)
    assert kv.page_nbytes == 3 * sum(kv.plane_nbytes)
    assert kv.device == torch.device("cpu")
    for layer in range(3):
        assert [plane.shape for plane in kv.planes(layer)] == [(5, nbytes) for nbytes in kv.plane_nbytes]
        assert all(plane.dtype == torch.uint8 for plane in kv.planes(layer))


def test_token_axis_is_cut_into_pages() -> None:
    """(num_tokens, heads, dim) with page_size holds the same pages as (num_pages, page_size, heads, dim)."""
    k, v = layers(20, 2, 8), layers(20, 2, 8)
    kv = DeviceKV.from_layers(k, v, page_size=4)
    assert (kv.num_pages, kv.page_size, kv.kv_heads, kv.head_dims) == (5, 4, 2, (8, 8))
    v[1][12:16] = 1.5
    expected = v[1][12:16].flatten().view(torch.uint8)
    assert torch.equal(kv.planes(1)[1][3], expected)


@pytest.mark.parametrize(
    ("shape", "page_size"),
    [
        ((5, 4, 1, 8), None),
        ((5, 4, 1, 8), 4),
        ((5, 4, 8), None),
        ((5, 4, 8), 4),
        ((20, 1, 8), 4),
        ((20, 8), 4),
    ],
)
def test_mla_shapes(shape: tuple[int, ...], page_size: int | None) -> None:
    """Every way to write one latent plane describes the same pages."""
    kv = DeviceKV.from_layers(layers(*shape), page_size=page_size)
    assert (kv.num_pages, kv.page_size, kv.kv_heads, kv.head_dims) == (5, 4, 1, (8,))
    assert kv.is_mla
    assert kv.plane_nbytes == (4 * 8 * 2,)
    assert len(kv.planes(0)) == 1


def test_mla_page_size_one() -> None:
    """With page_size 1, (n, 1, dim) reads as pages or as tokens alike."""
    kv = DeviceKV.from_layers(layers(20, 1, 8), page_size=1)
    assert (kv.num_pages, kv.page_size) == (20, 1)


def test_planes_are_the_engines_own_memory() -> None:
    """A byte written through a plane is seen in the engine's tensor: nothing is copied."""
    k, v = layers(5, 4, 2, 8), layers(5, 4, 2, 8)
    kv = DeviceKV.from_layers(k, v)
    assert kv.planes(2)[0].data_ptr() == k[2].data_ptr()
    kv.planes(2)[1][4].fill_(0x3F)
    assert (v[2][4].view(torch.uint8) == 0x3F).all()
    assert not v[2][:4].any()


def test_pages_need_not_follow_each_other() -> None:
    """K and V interleaved by page in one tensor are two planes with a page stride."""
    both = torch.zeros(5, 2, 4, 2, 8, dtype=torch.float16)
    kv = DeviceKV.from_layers([both[:, 0]], [both[:, 1]])
    kv.planes(0)[1][3].fill_(1)
    assert (both[3, 1].view(torch.uint8) == 1).all()
    both[3, 1] = 0
    assert not both.any()


def test_stream_and_reserved_pages_are_kept() -> None:
    """What the engine says of its stream and its own pages comes back as given."""
    stream = object()
    kv = DeviceKV.from_layers(layers(5, 4, 8), compute_stream=stream, reserved_pages=[0, 4])
    assert kv.compute_stream is stream
    assert kv.reserved_pages == (0, 4)


def odd(position: int, odd_one: torch.Tensor) -> list[torch.Tensor]:
    """Three alike layers (5, 4, 2, 8), but for one."""
    tensors = layers(5, 4, 2, 8)
    tensors[position] = odd_one
    return tensors


GOOD = (5, 4, 2, 8)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no layers": (lambda: DeviceKV.from_layers([]), "k is empty"),
    "no v layers": (lambda: DeviceKV.from_layers(layers(*GOOD), []), "v is empty"),
    "counts": (lambda: DeviceKV.from_layers(layers(*GOOD), layers(*GOOD, count=2)), "3 layers and v has 2"),
    "no tensor": (lambda: DeviceKV.from_layers([[1.0]], layers(*GOOD, count=1)), r"k\[0\] is a list"),
    "dtype": (
        lambda: DeviceKV.from_layers(odd(1, torch.zeros(GOOD)), layers(*GOOD)),
        r"k\[1\] has dtype torch.float32; it must be torch.bfloat16, as k\[0\]",
    ),
    "dtype of v": (
        lambda: DeviceKV.from_layers(layers(*GOOD), layers(*GOOD, dtype=torch.float16)),
        r"v\[0\] has dtype torch.float16; it must be torch.bfloat16, as k\[0\]",
    ),
    "num_pages": (
        lambda: DeviceKV.from_layers(layers(*GOOD), odd(2, layers(6, 4, 2, 8)[0])),
        r"v\[2\] has num_pages 6; it must be 5",
    ),
    "page_size of v": (
        lambda: DeviceKV.from_layers(layers(*GOOD), layers(5, 8, 2, 8)),
        r"v\[0\] has page_size 8; it must be 4",
    ),
    "kv_heads": (
        lambda: DeviceKV.from_layers(layers(*GOOD), layers(5, 4, 1, 8)),
        r"v\[0\] has kv_heads 1; it must be 2",
    ),
    "head_dim": (
        lambda: DeviceKV.from_layers(odd(1, layers(5, 4, 2, 16)[0]), layers(*GOOD)),
        r"k\[1\] has head_dim 16; it must be 8",
    ),
    "dimensions": (lambda: DeviceKV.from_layers(layers(5, 8), layers(5, 8)), r"k\[0\] has shape \(5, 8\)"),
    "mla dimensions": (lambda: DeviceKV.from_layers(layers(8)), r"k\[0\] has shape \(8,\)"),
    "mla heads": (lambda: DeviceKV.from_layers(layers(*GOOD)), r"k\[0\] has 2 kv_heads .* v is None"),
    "no page_size": (
        lambda: DeviceKV.from_layers(layers(20, 2, 8), layers(20, 2, 8)),
        r"page_size is None and k\[0\] has shape",
    ),
    "no page_size, mla": (lambda: DeviceKV.from_layers(layers(20, 1, 8)), "page_size is None"),
    "page_size 0": (lambda: DeviceKV.from_layers(layers(20, 8), page_size=0), "page_size is 0"),
    "page_size disagrees": (
        lambda: DeviceKV.from_layers(layers(*GOOD), layers(*GOOD), page_size=8),
        r"page_size is 8 and k\[0\] .* whose page_size is 4",
    ),
    "part of a page": (
        lambda: DeviceKV.from_layers(layers(21, 2, 8), layers(21, 2, 8), page_size=4),
        r"k\[0\] has 21 tokens; it must be a multiple of page_size 4",
    ),
    "nothing in it": (lambda: DeviceKV.from_layers(layers(0, 4, 8)), r"k\[0\] has shape \(0, 4, 8\)"),
    "meta": (lambda: DeviceKV.from_layers([torch.zeros(5, 4, 8, device="meta")]), r"k\[0\] is .* on meta"),
    "sparse": (lambda: DeviceKV.from_layers([torch.zeros(5, 4, 8).to_sparse()]), r"k\[0\] is torch.sparse"),
    "grad": (
        lambda: DeviceKV.from_layers([torch.zeros(5, 4, 8, requires_grad=True)]),
        r"k\[0\] requires grad",
    ),
    "head-major page": (
        lambda: DeviceKV.from_layers([torch.zeros(5, 2, 4, 8).transpose(1, 2)], [torch.zeros(5, 4, 2, 8)]),
        r"k\[0\] has strides .* \(token, head, dim\)",
    ),
    "tokens apart": (
        lambda: DeviceKV.from_layers([torch.zeros(20, 16)[:, :8]], page_size=4),
        r"k\[0\] has strides",
    ),
    "pages overlap": (
        lambda: DeviceKV.from_layers([torch.zeros(1, 4, 8).expand(5, 4, 8)]),
        r"k\[0\] has page stride 0; its pages overlap",
    ),
    "reserved beyond": (
        lambda: DeviceKV.from_layers(layers(5, 4, 8), reserved_pages=[5]),
        r"reserved_pages names page 5; pages are 0 .. 4",
    ),
    "reserved negative": (lambda: DeviceKV.from_layers(layers(5, 4, 8), reserved_pages=[-1]), "page -1"),
    "reserved twice": (
        lambda: DeviceKV.from_layers(layers(5, 4, 8), reserved_pages=[2, 2]),
        "names a page twice",
    ),
    "reserved all": (
        lambda: DeviceKV.from_layers(layers(2, 4, 8), reserved_pages=[0, 1]),
        "names all 2 pages",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case: str) -> None:
    """Each bad tensor or argument raises ConfigError naming it, its value and what would be right."""
    build, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        build()
