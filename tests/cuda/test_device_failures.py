"""What fails, and what is closed: a CudaDevice gives no page away that may still be written."""

from __future__ import annotations

import asyncio

import pytest

from hicache_async._fence import ThreadFence
from hicache_async.config import HostLayout, IoMode
from hicache_async.cuda import CudaDevice
from hicache_async.errors import ClosedError
from hicache_async.testing._device_bench import Bench, device_page, host_page
from tests.cuda.fake_cuda import FakeCuda
from tests.cuda.waiting import recorded, to_end

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
    gate = ThreadFence(asyncio.get_running_loop())
    running = bench.load(tiers.plan([0], [3]))
    gated = bench.load(tiers.plan([1], [1]), gate)
    await recorded(device, running)
    waiting = asyncio.create_task(device.wait(running[-1]))
    await asyncio.wait_for(device.aclose(), 10)
    with pytest.raises(ClosedError, match="before this copy was queued"):
        await device.wait(gated[-1])
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
