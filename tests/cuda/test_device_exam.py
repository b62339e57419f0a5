"""CudaDevice passes the exam for devices, and caches on it theirs, on a stand-in stricter than a GPU."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping

import pytest

from hicache_async import CacheConfig, HiCache
from hicache_async.cuda import CudaDevice
from hicache_async.errors import WrongLoopError
from hicache_async.stores import MemoryStore
from hicache_async.testing.cancel_exam import check_cancellation
from hicache_async.testing.device_exam import CHECKS, check_device
from hicache_async.testing.fault_exam import check_store_faults
from tests.cuda.fake_cuda import FakeCuda, FakeCudaDevice
from tests.flows.rig import make_kv
from tests.testing.loops import LOOPS, each_loop


@each_loop
@pytest.mark.parametrize("low_latency", [False, True], ids=["loop", "thread"])
def test_it_passes_the_exam(low_latency: bool, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """All checks, in every layout and io mode, and nothing is asked of CUDA that it would answer with silence."""
    seeds = itertools.count()
    report = check_device(
        lambda: FakeCudaDevice(next(seeds), low_latency=low_latency), loop_factory=loop_factory
    )
    assert report.passed == tuple(CHECKS)
    assert next(seeds) == len(CHECKS)


def make_device() -> FakeCudaDevice:
    """Return a device whose engine works in the threads that ask it to block."""
    return FakeCudaDevice(is_engine_here=True)


@pytest.mark.parametrize(
    ("loop", "options", "share"),
    [
        ("asyncio", {}, 0.01),
        ("debug", {"write_policy": "write_back"}, 0.003),
        ("uvloop", {"host_layout": "page_first_direct", "io_mode": "direct"}, 0.005),
    ],
)
def test_a_share_of_all_cancels(loop: str, options: Mapping[str, object], share: float) -> None:
    """A cache on it can be cancelled anywhere: nothing is left, and the next request is served right bytes."""
    report = check_cancellation(
        lambda directory: MemoryStore(),
        make_device,
        loop_factory=LOOPS[loop],
        options=options,
        moods=["ready", "late"],
        share=share,
    )
    assert report.cancels > report.situations / 2


@pytest.mark.parametrize("io_mode", ["kernel", "direct"])
def test_a_share_of_all_faults(io_mode: str) -> None:
    """Whatever the store does, every byte that a cache on it serves is right."""
    report = check_store_faults(
        lambda directory: MemoryStore(),
        make_device,
        options={"host_layout": "layer_first", "io_mode": io_mode},
        share=0.02,
    )
    assert report.calls > 25


def test_another_loop_is_refused_when_a_cache_opens() -> None:
    """Its waits are the first loop's; a cache that found out later would take a running copy for a failed one."""
    cuda, kv = FakeCuda(), make_kv(8)
    device = CudaDevice(runtime=cuda)
    options = {"page_size": kv.page_size, "host_bytes": 16 * kv.page_nbytes, "host_reserve_bytes": 0}

    async def opened() -> None:
        async with HiCache.open(CacheConfig.from_mapping(options), kv=kv, device=device):
            pass

    asyncio.run(opened())
    with pytest.raises(WrongLoopError, match="one device for each loop"):
        asyncio.run(opened())
    cuda.end()
