"""Engine: stands for a model on a stream of a GPU, with KV that says which page it is of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hicache_async import CacheConfig, DeviceKV, HiCache, PrefixLease
from hicache_async.abc import CopyPlan, Device
from hicache_async.config import HostLayout, IoMode
from hicache_async.core.grid import PageCells
from hicache_async.cuda.runtime import Stream
from hicache_async.memory.host import HostArena
from hicache_async.testing.golden import check_page, fill_page

from ._gpu import Gpu

NUM_LAYERS, PAGE_SIZE, HEADS, HEAD_DIM = 4, 16, 2, 64


def make_kv(
    gpu: Gpu,
    num_pages: int,
    *,
    num_layers: int = NUM_LAYERS,
    page_size: int = PAGE_SIZE,
    heads: int = HEADS,
    head_dims: Sequence[int] = (HEAD_DIM, HEAD_DIM),
    dtype: torch.dtype = torch.float16,
    compute_stream: Stream | None = None,
) -> DeviceKV:
    """Return zeros on the GPU as the K and V of an engine; one of ``head_dims``: MLA."""
    sides = [
        [
            gpu.zeros(num_pages * page_size * heads * dim * dtype.itemsize)
            .view(dtype)
            .view(num_pages, page_size, heads, dim)
            for _ in range(num_layers)
        ]
        for dim in head_dims
    ]
    return DeviceKV.from_layers(*sides, compute_stream=compute_stream)


async def make_arena(device: Device, kv: DeviceKV, layout: HostLayout, num_pages: int) -> HostArena:
    """Return host pages in a buffer of the device; head_grouped ones are cut by heads."""
    buffer = await device.host_buffer(HostArena.nbytes_needed(kv, num_pages))
    return HostArena(kv, layout, num_pages, buffer, cells=PageCells(kv.kv_heads))


def plan_of(
    kv: DeviceKV, arena: HostArena, io_mode: IoMode, device_pages: Sequence[int], host_pages: Sequence[int]
) -> CopyPlan:
    """Pair pages of the two tiers."""
    pages = np.array(device_pages, np.int64), np.array(host_pages, np.int64)
    return CopyPlan(kv, arena, *pages, io_mode)


class Engine:
    """An engine whose kernels are copies on its stream.

    Args:
        num_pages: of its KV.
    Attributes:
        compute: the stream of its forward.
    """

    def __init__(self, gpu: Gpu, num_pages: int) -> None:
        self._gpu = gpu
        self.compute = gpu.runtime.new_stream()
        self.kv = make_kv(gpu, num_pages, compute_stream=self.compute)
        self._staged: dict[bytes, DeviceKV] = {}
        self._seen = make_kv(gpu, num_pages)

    def stage(self, *names: bytes) -> None:
        """Make ready what :meth:`write` copies from; beside a kernel that runs, to allocate might wait for it."""
        for name in names:
            self._staged[name] = make_kv(self._gpu, 1)
            fill_page(self._staged[name], 0, name)

    def write(self, page: int, name: bytes, stream: Stream | None = None) -> None:
        """Queue what computes ``page``: from then on it holds the KV of ``name``, which is staged.

        Args:
            stream: None: :attr:`compute`.
        """
        staged = self._staged[name]
        for layer in range(self.kv.num_layers):
            for target, source in zip(self.kv.planes(layer), staged.planes(layer), strict=True):
                self._gpu.copy(self.compute if stream is None else stream, target[page], source[0])

    def write_now(self, page: int, name: bytes) -> None:
        """Write a page, and wait for that."""
        fill_page(self.kv, page, name)

    def read(self, page: int, layer: int) -> None:
        """Queue what reads a layer of ``page``. Any thread."""
        for target, source in zip(self._seen.planes(layer), self.kv.planes(layer), strict=True):
            self._gpu.copy(self.compute, target[page], source[page])

    def check_read(self, page: int, name: bytes) -> None:
        """Compare what was read of all layers of ``page``; the reads are over.

        Raises: AssertionError: whose KV it was instead.
        """
        check_page(self._seen, page, name)


class Prompt:
    """A prompt of whole pages: the tokens, and the name of the KV of each page."""

    def __init__(self, number: int, num_pages: int) -> None:
        self.request_id = f"prompt {number}"
        self.tokens = [1000 * number + index for index in range(num_pages * PAGE_SIZE)]
        self.names = [bytes([0x50 + number, page]) * 16 for page in range(num_pages)]

    def match(self, cache: HiCache) -> PrefixLease:
        """Ask a cache for it."""
        return cache.match_prefix(self.request_id, self.tokens, whole=True)


def config_of(
    kv: DeviceKV, layout: HostLayout = HostLayout.PAGE_FIRST, io_mode: IoMode = IoMode.KERNEL
) -> CacheConfig:
    """Return options under which everything committed is copied down at once, to twice as many pages."""
    return CacheConfig(
        page_size=kv.page_size,
        host_bytes=2 * kv.num_pages * kv.page_nbytes,
        host_reserve_bytes=0,
        write_policy="write_through",  # type: ignore[arg-type]
        host_layout=layout,
        io_mode=io_mode,
        head_group=1 if layout is HostLayout.HEAD_GROUPED else None,
        close_timeout_s=5.0,
    )
