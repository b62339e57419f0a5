"""CudaDevice on a stand-in stricter than a GPU: right bytes behind the right events, and a loop that never waits."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading

import pytest
import torch

from hicache_async import CacheConfig, HiCache, Tier
from hicache_async._fence import ThreadFence
from hicache_async.cuda import CudaDevice
from hicache_async.cuda.lines import MAX_LINES
from hicache_async.errors import ConfigError
from hicache_async.testing._device_bench import DEVICE_PAGES, HOST_PAGES, Bench, device_page, host_page
from tests.cuda.fake_cuda import FakeCuda
from tests.cuda.waiting import recorded, to_end, until
from tests.flows.rig import make_kv

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


# Recording


async def test_a_submit_queues_nothing_in_the_calling_thread(cuda: FakeCuda, bench: Bench) -> None:
    """The loop only hands over; the one submit thread queues and records, and says when."""
    tiers = await bench.tiers()
    queued_by: set[str] = set()
    copy_pages = cuda.copy_pages

    def watched(*args: torch.Tensor) -> None:
        queued_by.add(threading.current_thread().name)
        copy_pages(*args)

    cuda.copy_pages = watched  # type: ignore[method-assign]
    fences = bench.load(tiers.plan([0, 1], [2, 3]))
    offloaded = bench.offload(tiers.plan([5], [6]))
    await recorded(bench.device, [*fences, offloaded])  # type: ignore[arg-type]
    await to_end(bench.device, fences[-1], offloaded)  # type: ignore[arg-type]
    assert queued_by == {"hicache-submit-1"}


async def test_recorded_waits_for_every_layer(cuda: FakeCuda, device: CudaDevice, bench: Bench) -> None:
    """Behind a fence of a thread nothing is recorded; then all is, though the stream has not begun to move."""
    tiers = await bench.tiers()
    stream = device._to_device.line_for(frozenset({"threads"})).stream
    cuda.hold(stream)
    gate = ThreadFence(asyncio.get_running_loop())
    fences = bench.load(tiers.plan([0], [0]), gate)
    waiting = asyncio.create_task(device.recorded(fences))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    gate.set()
    await asyncio.wait_for(waiting, 10)
    assert not any(fence.passed() for fence in fences)
    cuda.hold(stream, held=False)
    await to_end(device, *fences)


async def test_block_orders_a_stream_and_waits_for_nobody(
    cuda: FakeCuda, device: CudaDevice, bench: Bench
) -> None:
    """From any thread, with the copy still standing still: what the stream does next sees the layer's bytes."""
    tiers = await bench.tiers()
    cuda.hold(device._to_device.at_once.stream)
    fences = bench.load(tiers.plan([4], [9]))
    await recorded(device, fences)
    engine = cuda.new_user_stream("engine")
    await asyncio.to_thread(lambda: [fence.block(engine) for fence in fences])
    seen = cuda.queue_read(engine, tiers.kv.planes(2)[0][4])
    assert not fences[0].passed()
    cuda.hold(device._to_device.at_once.stream, held=False)
    await to_end(device, device.fence(engine))
    assert torch.equal(seen[0], tiers.arena.planes(2)[0][9].reshape(-1))


async def test_block_before_the_recording_waits_for_it(
    cuda: FakeCuda, device: CudaDevice, bench: Bench
) -> None:
    """A stream that waits for an event which is not recorded does not wait at all; so the thread does."""
    tiers = await bench.tiers()
    gate = ThreadFence(asyncio.get_running_loop())
    fences = bench.load(tiers.plan([4], [9]), gate)
    blocking = asyncio.create_task(asyncio.to_thread(fences[1].block, cuda.default))
    await asyncio.sleep(0.02)
    assert not blocking.done()
    gate.set()
    await asyncio.wait_for(blocking, 10)
    await to_end(device, *fences)


async def test_events_are_fresh(cuda: FakeCuda, device: CudaDevice, bench: Bench) -> None:
    """One event for each layer of each load; one for all of an offload."""
    tiers = await bench.tiers()
    loads = [bench.load(tiers.plan([page], [page])) for page in range(3)]
    offloads = [bench.offload(tiers.plan([page], [page + 8])) for page in range(3)]
    await to_end(device, *(fences[-1] for fences in loads), *offloads)
    events = [fence.event for fences in loads for fence in fences]  # type: ignore[attr-defined]
    assert len({id(event) for event in events}) == 3 * tiers.kv.num_layers
    assert len({id(fence.event) for fence in offloads}) == 3  # type: ignore[attr-defined]


# Fences of the engine


async def test_a_fence_is_on_the_compute_stream(cuda: FakeCuda, bench: Bench) -> None:
    """Not on the stream that is current where it is made: on a loop's thread that is anybody's."""
    compute, side = cuda.new_user_stream("compute"), cuda.new_user_stream("side")
    device = CudaDevice(runtime=cuda, compute_stream=compute)
    cuda.hold(compute)
    with cuda.on(side):
        fence, other = device.fence(), device.fence(side)
    await to_end(device, other)
    assert not fence.passed()
    cuda.hold(compute, held=False)
    await to_end(device, fence)
    await device.aclose()


async def test_an_unrelated_long_kernel_delays_no_load(
    cuda: FakeCuda, device: CudaDevice, bench: Bench
) -> None:
    """A copy waits for the fences that its pages need, not for the engine's stream."""
    tiers = await bench.tiers()
    cuda.hold(cuda.default)  # a forward that never ends
    cuda.queue_write(cuda.default, tiers.kv.planes(0)[0][11], 1)
    device.fence()
    loaded = bench.load(tiers.plan([0, 1], [4, 5]))
    offloaded = bench.offload(tiers.plan([6], [7]))
    await to_end(device, loaded[-1], offloaded)
    behind = bench.load(tiers.plan([2], [8]), device.fence())
    await recorded(device, behind)
    assert not behind[0].passed(), "and one that needs it waits for it"
    cuda.hold(cuda.default, held=False)
    await to_end(device, behind[-1])


async def test_a_copy_that_waits_for_the_engine_holds_up_no_other(
    cuda: FakeCuda, device: CudaDevice, bench: Bench
) -> None:
    """Nor does one behind such a copy; each moves when what it waits for is over."""
    tiers = await bench.tiers()
    cuda.hold(cuda.default)
    gate = ThreadFence(asyncio.get_running_loop())
    waiting = [
        bench.load(tiers.plan([0], [0]), device.fence())[-1],
        bench.offload(tiers.plan([1], [9]), gate),
    ]
    waiting += [
        bench.load(tiers.plan([2], [9]), waiting[1])[-1],
        bench.offload(tiers.plan([0], [10]), waiting[0]),
    ]
    await to_end(device, bench.load(tiers.plan([5], [5]))[-1], bench.offload(tiers.plan([6], [6])))
    assert not any(fence.passed() for fence in waiting)
    gate.set()
    await to_end(device, waiting[1], waiting[2])
    assert not waiting[0].passed() and not waiting[3].passed()
    cuda.hold(cuda.default, held=False)
    await to_end(device, *waiting)
    on_device = {0: host_page(0), 2: device_page(1), 5: host_page(5)}
    tiers.check(on_device, {6: device_page(6), 9: device_page(1), 10: host_page(0)})


async def test_copies_behind_different_streams_hold_up_none_of_each_other(
    cuda: FakeCuda, device: CudaDevice, bench: Bench
) -> None:
    """One for a long kernel, one for a short one: each begins when its own has ended."""
    tiers = await bench.tiers()
    streams = [cuda.new_user_stream(f"engine {number}") for number in range(MAX_LINES)]
    for stream in streams:
        cuda.hold(stream)
    loads = [
        bench.load(tiers.plan([page], [page]), device.fence(stream)) for page, stream in enumerate(streams)
    ]
    for number in (3, 1):
        cuda.hold(streams[number], held=False)
        await to_end(device, loads[number][-1])
        assert not loads[0][-1].passed()
    for stream in streams:
        cuda.hold(stream, held=False)
    await to_end(device, *(fences[-1] for fences in loads))
    tiers.check({page: host_page(page) for page in range(MAX_LINES)}, {})


async def test_streams_are_its_own(cuda: FakeCuda) -> None:
    """Though they are given out in turn from a few: none is the engine's, nor that of another line."""
    few = [cuda.new_user_stream(f"stream {number}") for number in range(5)]
    turns = itertools.cycle(few)
    cuda.new_stream = lambda: next(turns)  # type: ignore[method-assign]
    device = CudaDevice(runtime=cuda, compute_stream=few[2])
    directions = device._to_device, device._to_host
    streams = [
        direction.line_for(name).stream for direction in directions for name in (None, frozenset({"threads"}))
    ]
    assert {stream.name for stream in streams} == {f"stream {number}" for number in (0, 1, 3, 4)}
    await device.aclose()


async def test_fences_of_one_stream_keep_their_order(cuda: FakeCuda, device: CudaDevice) -> None:
    """The later one tells of the earlier ones: they are not asked any more."""
    cuda.hold(cuda.default)
    fences = [device.fence() for _ in range(5)]
    assert [fence.sequence for fence in fences] == [0, 1, 2, 3, 4]
    assert len({fence.stream for fence in fences}) == 1
    cuda.hold(cuda.default, held=False)
    await to_end(device, fences[-1])
    asked = [fence.event.num_queries for fence in fences[:-1]]  # type: ignore[attr-defined]
    assert all(fence.passed() for fence in fences)
    assert [fence.event.num_queries for fence in fences[:-1]] == asked  # type: ignore[attr-defined]


async def test_streams_are_forgotten(cuda: FakeCuda, device: CudaDevice) -> None:
    """An engine that makes a stream for every step grows nothing."""
    for step in range(50):
        await to_end(device, device.fence(cuda.new_user_stream(f"step {step}")))
    gc.collect()
    assert len(device._orders) <= 1


async def test_what_is_no_stream_is_refused(device: CudaDevice) -> None:
    """By name, where it is given."""
    with pytest.raises(ConfigError, match="stream is a str"):
        device.fence("compute")
    with pytest.raises(ConfigError, match="stream is a int"):
        CudaDevice(runtime=FakeCuda(), compute_stream=7)


# The engine's kernels and the copies


async def test_bytes_are_right_whatever_the_streams_do(
    cuda: FakeCuda, device: CudaDevice, bench: Bench
) -> None:
    """An engine writes pages on its stream while they travel both ways, ordered by fences alone."""
    tiers = await bench.tiers()
    planes = [plane for layer in range(tiers.kv.num_layers) for plane in tiers.kv.planes(layer)]
    for turn in range(20):
        page, host, value = turn % DEVICE_PAGES, turn % HOST_PAGES, turn + 1
        for plane in planes:
            cuda.queue_write(cuda.default, plane[page], value)
        offloaded = bench.offload(tiers.plan([page], [host]), device.fence())
        await recorded(device, [offloaded])
        offloaded.block()  # what the engine writes next comes behind the copy
        for plane in planes:
            cuda.queue_write(cuda.default, plane[page], 0xEE)
        loaded = bench.load(tiers.plan([page], [host]), offloaded, device.fence())
        await recorded(device, loaded)
        loaded[-1].block()
        seen = [cuda.queue_read(cuda.default, plane[page]) for plane in planes]
        await to_end(device, device.fence())
        assert all((tensors[0] == value).all() for tensors in seen), f"turn {turn}"


# With a cache


async def test_a_cache_that_could_not_copy_does_not_open(cuda: FakeCuda, device: CudaDevice) -> None:
    """What is missing is said when it opens, not by a request; what needs no kernel opens."""
    cuda.has_kernels = False
    kv = make_kv(8)
    options = {"page_size": kv.page_size, "host_bytes": 16 * kv.page_nbytes, "host_reserve_bytes": 0}
    with pytest.raises(ConfigError, match="needs Triton"):
        async with HiCache.open(CacheConfig.from_mapping(options), kv=kv, device=device):
            pass
    direct = {**options, "host_layout": "page_first_direct", "io_mode": "direct"}
    async with HiCache.open(CacheConfig.from_mapping(direct), kv=kv, device=device):
        pass
    cuda.device_type = "cuda"
    with pytest.raises(ConfigError, match="kv is on cpu"):
        async with HiCache.open(CacheConfig.from_mapping(direct), kv=kv, device=device):
            pass
    await device.aclose()
    assert not cuda.registered


async def test_a_request_is_served_by_streams_alone(cuda: FakeCuda) -> None:
    """A prompt is computed on the compute stream, leaves the device, comes back, and is read behind its layers."""
    compute = cuda.new_user_stream("compute")
    device = CudaDevice(runtime=cuda)  # its default is another stream: the one that the tensors name counts
    cuda.hold(cuda.default)
    kv = make_kv(8, compute_stream=compute)
    planes = [plane for layer in range(kv.num_layers) for plane in kv.planes(layer)]
    options = {
        "page_size": kv.page_size,
        "host_bytes": 16 * kv.page_nbytes,
        "host_reserve_bytes": 0,
        "write_policy": "write_through",
        "load_threshold_tokens": 0,
    }
    prompt, num_tokens = list(range(4 * kv.page_size + 1)), 4 * kv.page_size
    async with HiCache.open(CacheConfig.from_mapping(options), kv=kv, device=device) as cache:
        with cache.match_prefix("first", prompt) as lease:
            await lease.load()
            allocation = lease.allocate_nowait(num_tokens)
            allocation.block()
            for plane in planes:
                for number, page in enumerate(allocation.pages.tolist()):
                    cuda.queue_write(compute, plane[page], 10 + number)
            lease.commit(num_tokens, after=cache.fence())
        await until(lambda: cache.stats().host.in_tree == 4 and not cache.stats().hops)
        await cache.admin.clear(Tier.DEVICE)
        for plane in planes:
            cuda.queue_write(compute, plane, 0xEE)
        with cache.match_prefix("second", prompt) as lease:
            cuda.hold(device._to_device.at_once.stream)
            loading = await asyncio.wait_for(lease.load(), 10)
            assert (loading.tokens, loading.loaded_tokens, loading.done) == (num_tokens, num_tokens, False)
            seen = []
            for layer in range(kv.num_layers):
                await asyncio.to_thread(loading.block, layer)
                seen += [cuda.queue_read(compute, plane) for plane in kv.planes(layer)]
            cuda.hold(device._to_device.at_once.stream, held=False)
            await to_end(device, cache.fence())
            for tensors in seen:
                assert [set(tensors[0][page].tolist()) for page in loading.pages] == [{10}, {11}, {12}, {13}]
            lease.release(after=cache.fence())
        cache.audit()
    await device.aclose()
