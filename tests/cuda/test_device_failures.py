"""What fails, and what is closed: a CudaDevice gives no page away that may still be written."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from hicache_async import CacheConfig, HiCache, State
from hicache_async._fence import ThreadFence
from hicache_async.config import HostLayout, IoMode
from hicache_async.cuda import CudaDevice
from hicache_async.cuda.copy import CudaCopy
from hicache_async.errors import ClosedError
from hicache_async.testing._device_bench import Bench, device_page, host_page
from tests.cuda.fake_cuda import FakeCuda
from tests.cuda.waiting import recorded, to_end
from tests.flows.rig import make_kv

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


@pytest.mark.parametrize("io_mode", IoMode)
async def test_a_copy_that_cannot_be_queued_fails_when_nothing_of_it_moves_any_more(
    cuda: FakeCuda, device: CudaDevice, bench: Bench, io_mode: IoMode
) -> None:
    """Its fences stay open while the layers before still move: as failed they would give the pages away."""
    tiers = await bench.tiers(HostLayout.LAYER_FIRST, io_mode=io_mode)
    cuda.hold(device._to_device.at_once.stream)
    cuda.fail_at = 3  # the second plane of the second layer
    fences = bench.load(tiers.plan([0], [0]))
    await recorded(device, fences[:1])
    await asyncio.sleep(0.02)
    assert not any(fence.passed() for fence in fences)
    cuda.fail_at = None
    cuda.hold(device._to_device.at_once.stream, held=False)
    await to_end(device, fences[0])
    for fence in fences[1:]:
        with pytest.raises(RuntimeError, match="injected"):
            await device.wait(fence)
        with pytest.raises(RuntimeError, match="injected"):
            fence.block(cuda.default)
        assert fence.passed()
    later = bench.load(tiers.plan([1], [1]))
    await to_end(device, *later)


async def test_a_copy_that_fails_keeps_its_pages_until_what_it_is_behind_is_over(
    cuda: FakeCuda, device: CudaDevice, bench: Bench
) -> None:
    """Else they would be given to the next one while a kernel still works on them."""
    tiers = await bench.tiers()
    cuda.hold(cuda.default)
    cuda.fail_at = 0
    fences = bench.load(tiers.plan([0], [0]), device.fence())
    await recorded(device, fences)
    assert not any(fence.passed() for fence in fences)
    with pytest.raises(RuntimeError, match="injected"):
        fences[0].block(cuda.default)
    cuda.hold(cuda.default, held=False)
    for fence in fences:
        with pytest.raises(RuntimeError, match="injected"):
            await asyncio.wait_for(device.wait(fence), 10)


async def test_a_copy_behind_one_that_failed_fails_too(
    cuda: FakeCuda, device: CudaDevice, bench: Bench
) -> None:
    """What it would read was never written."""
    tiers = await bench.tiers()
    cuda.fail_at = 0
    offloaded = bench.offload(tiers.plan([0], [0]))
    loaded = bench.load(tiers.plan([5], [0]), offloaded)
    with pytest.raises(RuntimeError, match="injected"):
        await device.wait(loaded[0])
    tiers.check({}, {})


async def test_a_lost_device_fails_whoever_waits(cuda: FakeCuda, device: CudaDevice, bench: Bench) -> None:
    """Nobody waits for ever, and nothing raises where it was only asked."""
    tiers = await bench.tiers()
    cuda.hold(device._to_device.at_once.stream)
    fences = bench.load(tiers.plan([0], [0]))
    await recorded(device, fences)
    waiting = asyncio.create_task(device.wait(fences[-1]))
    await asyncio.sleep(0)
    cuda.is_lost = True
    with pytest.raises(RuntimeError, match="illegal memory"):
        await asyncio.wait_for(waiting, 10)
    assert all(fence.passed() for fence in fences)
    with pytest.raises(RuntimeError, match="illegal memory"):
        fences[0].block(cuda.default)
    await device.aclose()


# Close


async def test_close_waits_for_no_copy_and_lies_about_none(
    cuda: FakeCuda, device: CudaDevice, bench: Bench
) -> None:
    """Who waits for a copy that goes on goes on waiting; its memory stays pinned; what was not queued fails."""
    tiers = await bench.tiers()
    cuda.hold(device._to_device.at_once.stream)
    cuda.hold(other := cuda.new_user_stream("other"))
    gate = ThreadFence(asyncio.get_running_loop())
    running = bench.load(tiers.plan([0], [3]))
    gated = bench.load(tiers.plan([1], [1]), gate)
    await recorded(device, running)
    waiting = asyncio.create_task(device.wait(running[-1]))
    await asyncio.wait_for(device.aclose(), 10)
    with pytest.raises(ClosedError, match="before this copy was queued"):
        await device.wait(gated[-1])
    for after in ([], [gate], [device.fence(other)]):
        with pytest.raises(ClosedError, match="copies nothing any more"):
            device.host_to_device(tiers.plan([2], [2]), after)
    assert not waiting.done() and cuda.registered
    cuda.hold(device._to_device.at_once.stream, held=False)
    await asyncio.wait_for(waiting, 10)
    tiers.check({0: host_page(3)}, {})


async def test_close_unpins(cuda: FakeCuda, device: CudaDevice, bench: Bench) -> None:
    """Off the loop, when nothing moves; the memory stays readable."""
    tiers = await bench.tiers()
    await to_end(device, bench.offload(tiers.plan([1], [2])))
    assert cuda.registered
    await device.aclose()
    assert not cuda.registered
    tiers.check({}, {2: device_page(1)})


@pytest.mark.parametrize("fail_at", [0, 1])
async def test_who_is_only_ordered_behind_a_failed_copy_hears_nothing_of_it(
    cuda: FakeCuda, device: CudaDevice, bench: Bench, fail_at: int
) -> None:
    """It uses the pages, not the bytes; behind what was done of the copy it is all the same."""
    tiers = await bench.tiers()
    stream = device._to_host.at_once.stream
    cuda.hold(stream)
    cuda.fail_at = fail_at
    failed = bench.offload(tiers.plan([0, 1], [0, 1]))
    await recorded(device, [failed])
    cuda.fail_at = None
    ordering = failed.ordering()  # type: ignore[attr-defined]
    assert (ordering.stream, ordering.sequence) == (failed.stream, failed.sequence)  # type: ignore[attr-defined]
    ordering.block(cuda.default)
    seen = cuda.queue_read(cuda.default, tiers.kv.planes(0)[0][0])
    loaded = bench.load(tiers.plan([0], [5]), ordering)
    await recorded(device, loaded)
    assert not seen and not loaded[-1].passed()
    cuda.hold(stream, held=False)
    await to_end(device, *loaded, ordering, device.fence())
    with pytest.raises(RuntimeError, match="injected"):
        await device.wait(failed)
    assert seen


async def test_a_close_that_is_cancelled_goes_on(cuda: FakeCuda, device: CudaDevice, bench: Bench) -> None:
    """What it had begun is waited for by the next one."""
    tiers = await bench.tiers()
    gate, unregister = threading.Event(), cuda.unregister

    def slowly(address: int) -> None:
        gate.wait(10)
        unregister(address)

    cuda.unregister = slowly  # type: ignore[method-assign]
    closing = asyncio.create_task(device.aclose())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    again = asyncio.create_task(device.aclose())
    await asyncio.sleep(0.01)
    assert cuda.registered and not again.done()
    gate.set()
    await asyncio.wait_for(again, 10)
    assert not cuda.registered
    tiers.check({}, {})
    with pytest.raises(ClosedError, match="make a new CudaDevice"):
        await device.host_buffer(1)


async def test_memory_that_a_copy_still_uses_is_never_freed(
    cuda: FakeCuda, device: CudaDevice, bench: Bench
) -> None:
    """Neither unpinned nor given back, though cache and device are gone: the GPU writes into it."""
    tiers = await bench.tiers()
    cuda.hold(device._to_host.at_once.stream)
    offloaded = bench.offload(tiers.plan([1], [2]))
    await recorded(device, [offloaded])
    num_registered, gone = len(cuda.registered), weakref.ref(tiers.arena)
    await device.aclose()
    del tiers, offloaded, device
    bench.device = None  # type: ignore[assignment]
    gc.collect()
    assert len(cuda.registered) == num_registered, gone


async def test_a_cache_that_is_gone_keeps_no_memory(cuda: FakeCuda, device: CudaDevice, bench: Bench) -> None:
    """Its copies being over, the device holds nothing of it; nor do copies hold the ones before them."""
    tiers = await bench.tiers()
    last = bench.load(tiers.plan([0], [0]))
    for _ in range(20):
        last = bench.load(tiers.plan([0], [0]), last[-1])
    await to_end(device, last[-1])
    gc.collect()
    assert sum(type(thing) is CudaCopy for thing in gc.get_objects()) <= 1
    del tiers, last
    gc.collect()
    assert not cuda.registered
    await device.aclose()


async def test_who_cannot_be_ordered_does_not_fail_before_what_is_before_it(
    cuda: FakeCuda, device: CudaDevice, bench: Bench
) -> None:
    """CUDA refuses to order the copy: its pages stay its own until the kernel before it has ended."""
    tiers = await bench.tiers()
    cuda.hold(cuda.default)
    fence = device.fence()

    def refuse(stream: object, event: object) -> None:
        raise RuntimeError("refused")

    cuda.order = refuse  # type: ignore[method-assign]
    fences = bench.load(tiers.plan([0], [0]), fence)
    await asyncio.sleep(0.02)
    assert not any(fence.passed() for fence in fences)
    cuda.hold(cuda.default, held=False)
    with pytest.raises(RuntimeError, match="refused"):
        await asyncio.wait_for(device.wait(fences[0]), 10)


async def test_a_lost_device_fails_the_cache_and_no_request(cuda: FakeCuda, device: CudaDevice) -> None:
    """What needs a fence goes on without one: release is release, a commit keeps nothing."""
    kv = make_kv(8)
    options = {"page_size": kv.page_size, "host_bytes": 16 * kv.page_nbytes, "host_reserve_bytes": 0}
    async with HiCache.open(CacheConfig.from_mapping(options), kv=kv, device=device) as cache:
        lease = cache.match_prefix("r", list(range(9)))
        await lease.load()
        lease.allocate_nowait(9)

        def lost(stream: object) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        cuda.record = lost  # type: ignore[assignment]
        assert lease.commit(8) == 0
        lease.release()
        assert cache.state is State.FAILED
        assert cache.stats().leases == 0
