"""CpuDevice: what the exam for devices does not ask: its threads, its queues, its runs, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from hicache_async._fence import ThreadFence
from hicache_async._threads import DaemonThreads
from hicache_async.abc import CopyPlan, Fence
from hicache_async.config import HostLayout
from hicache_async.device import cpu
from hicache_async.device.cpu import CpuDevice
from hicache_async.errors import ClosedError
from hicache_async.memory import buffer
from hicache_async.memory.device_kv import DeviceKV
from hicache_async.memory.host import HostArena
from hicache_async.testing._device_fences import ForeignFence
from hicache_async.testing.golden import check_page, fill_page
from hicache_async.testing.manual import ManualThreads

LAYERS, DEVICE_PAGES, HOST_PAGES = 4, 12, 16
pytestmark = pytest.mark.asyncio


class Tiers:
    """A device pool and a host arena, and plans between them."""

    def __init__(self) -> None:
        layers = [torch.zeros(DEVICE_PAGES, 2, 2, 4, dtype=torch.float16) for _ in range(2 * LAYERS)]
        self.kv = DeviceKV.from_layers(layers[:LAYERS], layers[LAYERS:])
        buffer = torch.zeros(HostArena.nbytes_needed(self.kv, HOST_PAGES), dtype=torch.uint8)
        self.arena = HostArena(self.kv, HostLayout.PAGE_FIRST, HOST_PAGES, buffer)

    def plan(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> CopyPlan:
        return CopyPlan(self.kv, self.arena, np.array(device_pages, np.int64), np.array(host_pages, np.int64))


def page_hash(number: int) -> bytes:
    return bytes([number + 1]) * 32


def state(fences: Sequence[Fence]) -> list[bool]:
    return [fence.passed() for fence in fences]


def hicache_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hicache-")]


async def test_submit_returns_before_a_byte_moves() -> None:
    """Submitting queues one job and moves nothing in the calling thread."""
    tiers, threads = Tiers(), ManualThreads()
    fill_page(tiers.arena, 3, page_hash(1))
    fences = CpuDevice(threads).host_to_device(tiers.plan([0], [3]), [])
    assert threads.pending == 1
    assert state(fences) == [False] * LAYERS
    assert not any(plane.any() for plane in tiers.kv.planes(0))
    threads.run_next()
    assert state(fences) == [True] * LAYERS
    check_page(tiers.kv, 0, page_hash(1))


async def test_each_layer_passes_as_soon_as_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """When layer n is about to be copied, the fences before it have passed and the others have not."""
    tiers, threads = Tiers(), ManualThreads()
    seen: list[list[bool]] = []
    copy_layer = cpu.copy_layer

    def watched(*args: Any) -> None:
        seen.append(state(fences))
        copy_layer(*args)

    monkeypatch.setattr(cpu, "copy_layer", watched)
    fences = CpuDevice(threads).host_to_device(tiers.plan([0], [0]), [])
    threads.run_next()
    assert seen == [[passed < layer for passed in range(LAYERS)] for layer in range(LAYERS)]
    assert state(fences) == [True] * LAYERS


async def test_a_direction_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many free workers a direction still copies one at a time, in the order of submit."""
    tiers, threads = Tiers(), DaemonThreads(4, "hicache-test")
    order: list[int] = []
    at_work, most_at_work = 0, 0
    copy_layer = cpu.copy_layer

    def watched(source: Any, target: Any, layer: int, runs: Any) -> None:
        nonlocal at_work, most_at_work
        at_work += 1
        most_at_work = max(most_at_work, at_work)
        order.append(runs[0].target)
        copy_layer(source, target, layer, runs)
        at_work -= 1

    monkeypatch.setattr(cpu, "copy_layer", watched)
    device = CpuDevice(threads)
    fences = [device.host_to_device(tiers.plan([page], [page]), [])[-1] for page in range(DEVICE_PAGES)]
    await device.wait(fences[-1])
    assert order == [page for page in range(DEVICE_PAGES) for _ in range(LAYERS)]
    assert most_at_work == 1
    threads.shutdown()


async def test_a_direction_queues_one_job_at_a_time() -> None:
    """However many copies wait, each direction has at most one job in the executor."""
    tiers, threads = Tiers(), ManualThreads()
    device = CpuDevice(threads)
    loads = [device.host_to_device(tiers.plan([page], [page]), [])[-1] for page in range(3)]
    assert threads.pending == 1
    offload = device.device_to_host(tiers.plan([7], [7]), [])
    assert threads.pending == 2
    for num_loaded, is_offloaded in ((1, False), (1, True), (2, True), (3, True)):
        threads.run_next()
        assert state(loads) == [page < num_loaded for page in range(3)]
        assert offload.passed() is is_offloaded
    assert threads.pending == 0


async def test_consecutive_pages_are_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that follow each other on both sides are copied by one slice per plane."""
    tiers, threads = Tiers(), ManualThreads()
    counts: list[int] = []
    monkeypatch.setattr(cpu, "copy_layer", lambda source, target, layer, runs: counts.append(len(runs)))
    device = CpuDevice(threads)
    device.host_to_device(tiers.plan([3, 4, 5, 6], [8, 9, 10, 11]), [])
    device.host_to_device(tiers.plan([3, 4, 5, 6], [8, 9, 11, 10]), [])
    threads.run_next()
    threads.run_next()
    assert counts == [1] * LAYERS + [3] * LAYERS


async def test_open_fences_hold_no_worker() -> None:
    """Behind an open fence no job is queued at all, and the other direction goes on."""
    tiers, threads = Tiers(), ManualThreads()
    device = CpuDevice(threads)
    gates = [ThreadFence(asyncio.get_running_loop()) for _ in range(2)]
    held = device.host_to_device(tiers.plan([0], [0]), gates)
    behind = device.host_to_device(tiers.plan([1], [1]), [])
    assert not threads.pending
    other = device.device_to_host(tiers.plan([2], [2]), [])
    threads.run_next()
    assert other.passed()
    for gate in gates:
        assert not threads.pending
        gate.set()
        await gate.wait()
        await loop_turn()
    threads.run_next()
    assert (held[-1].passed(), behind[-1].passed()) == (True, False)
    threads.run_next()
    assert behind[-1].passed()


async def loop_turn() -> None:
    """Return after the callbacks that threads have posted so far."""
    turn = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon_threadsafe(turn.set_result, None)
    await turn


@pytest.mark.parametrize("error", [None, OSError("stream lost")])
async def test_a_foreign_fence_is_waited_for(error: Exception | None) -> None:
    """A fence that can only block is blocked on in a thread of its own, and its failure is kept."""
    tiers, threads = Tiers(), ManualThreads()
    device = CpuDevice(threads)
    gate, submitted = ForeignFence(), threading.Event()
    submit = threads.submit

    def announced(*args: Any) -> Future[Any]:
        future = submit(*args)
        submitted.set()
        return future

    threads.submit = announced  # type: ignore[method-assign]
    fences = device.host_to_device(tiers.plan([0], [0]), [gate])
    assert not threads.pending
    gate.settle(error)
    await asyncio.to_thread(submitted.wait, 10)
    threads.run_next()
    if error is None:
        fences[-1].block()
    else:
        with pytest.raises(OSError, match="stream lost"):
            fences[0].block()
    await device.aclose()


@pytest.mark.parametrize("when", ["before submit", "after submit"])
@pytest.mark.parametrize("kind", ["thread", "copy", "foreign"])
async def test_a_failed_fence_before_it_fails_the_copy(kind: str, when: str) -> None:
    """The fences carry the very error, no byte moves, and the next copy is not touched."""
    tiers, device = Tiers(), CpuDevice()
    fill_page(tiers.arena, 0, page_hash(1))
    error = RuntimeError("forward failed")
    thread_fence, foreign = ThreadFence(asyncio.get_running_loop()), ForeignFence()
    cause = ThreadFence(asyncio.get_running_loop())
    copied = device.device_to_host(tiers.plan([5], [5]), [cause])
    gate: Fence = {"thread": thread_fence, "copy": copied, "foreign": foreign}[kind]

    def fail() -> None:
        thread_fence.fail(error)
        cause.fail(error)
        foreign.settle(error)

    if when == "before submit":
        fail()
        with pytest.raises(RuntimeError):
            await device.wait(gate)
    fences = device.host_to_device(tiers.plan([3], [0]), [gate])
    later = device.host_to_device(tiers.plan([4], [0]), [])
    fail()
    await device.wait(later[-1])
    for fence in fences:
        with pytest.raises(RuntimeError) as caught:
            fence.block()
        assert caught.value is error
    assert not any(plane[3].any() for layer in range(LAYERS) for plane in tiers.kv.planes(layer))
    check_page(tiers.kv, 4, page_hash(1))
    await device.aclose()


async def test_a_copy_that_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers copied before the fault pass, the others raise it, and the lane goes on."""
    tiers, device = Tiers(), CpuDevice()
    copy_layer = cpu.copy_layer

    def failing(source: Any, target: Any, layer: int, runs: Any) -> None:
        if layer == 2 and runs[0].target == 0:
            raise MemoryError("layer 2")
        copy_layer(source, target, layer, runs)

    monkeypatch.setattr(cpu, "copy_layer", failing)
    fences = device.host_to_device(tiers.plan([0], [0]), [])
    later = device.host_to_device(tiers.plan([1], [1]), [])
    await device.wait(later[-1])
    fences[0].block()
    await device.wait(fences[1])
    for fence in fences[2:]:
        assert fence.passed()
        with pytest.raises(MemoryError, match="layer 2"):
            await device.wait(fence)
    await device.aclose()


async def test_an_engine_thread_blocks_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that blocks on a layer wakes when that layer is there, while the next is not."""
    tiers, device = Tiers(), CpuDevice()
    may_copy = [threading.Event() for _ in range(LAYERS)]
    copy_layer = cpu.copy_layer

    def held(source: Any, target: Any, layer: int, runs: Any) -> None:
        may_copy[layer].wait(10)
        copy_layer(source, target, layer, runs)

    monkeypatch.setattr(cpu, "copy_layer", held)
    fences = device.host_to_device(tiers.plan([0], [0]), [])

    def forward() -> list[list[bool]]:
        seen = []
        for layer, fence in enumerate(fences):
            may_copy[layer].set()
            fence.block()
            seen.append(state(fences))
        return seen

    seen = await asyncio.to_thread(forward)
    assert seen == [[passed <= layer for passed in range(LAYERS)] for layer in range(LAYERS)]
    await device.aclose()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (1 << 20) + 3])
async def test_host_buffer(nbytes: int) -> None:
    """A buffer is zeros of the length asked for, on a memory page boundary."""
    device = CpuDevice()
    memory = await device.host_buffer(nbytes)
    assert (memory.dtype, tuple(memory.shape), bool(memory.any())) == (torch.uint8, (nbytes,), False)
    assert nbytes == 0 or memory.data_ptr() % 4096 == 0
    await device.aclose()


async def test_host_buffer_is_touched_off_the_loop_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocation is one job of a worker, and a cancelled one stops at the next chunk."""
    monkeypatch.setattr(buffer, "_TOUCH_NBYTES", 10)
    threads = ManualThreads()
    device = CpuDevice(threads)
    wanted = asyncio.create_task(device.host_buffer(100))
    await loop_turn()
    assert threads.pending == 1
    threads.run_next()
    assert not (await wanted).any()

    class Counting(threading.Event):
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 3

    cancelled = Counting()
    buffer.touched_buffer(100, cancelled)
    assert cancelled.asked == 4


async def test_close_fails_what_has_not_started_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one copy hung, close returns, queued copies raise ClosedError, and the hung one may still end."""
    tiers, device = Tiers(), CpuDevice()
    started, release = threading.Event(), threading.Event()
    copy_layer = cpu.copy_layer

    def hung(*args: Any) -> None:
        started.set()
        release.wait(10)
        copy_layer(*args)

    monkeypatch.setattr(cpu, "copy_layer", hung)
    running = device.host_to_device(tiers.plan([0], [0]), [])
    queued = device.host_to_device(tiers.plan([1], [1]), [])
    gated = device.device_to_host(tiers.plan([2], [2]), [running[-1]])
    await asyncio.to_thread(started.wait, 10)
    await device.aclose()
    for fence in (queued[0], queued[-1], gated):
        with pytest.raises(ClosedError):
            await device.wait(fence)
    assert not running[0].passed()
    with pytest.raises(ClosedError):
        device.host_to_device(tiers.plan([3], [3]), [])
    release.set()
    await device.wait(running[-1])
    await device.aclose()


@pytest.mark.parametrize("how", ["refused", "cancelled"])
async def test_an_executor_that_is_shut_down_hangs_nobody(how: str) -> None:
    """When the caller's executor takes or runs no job any more, the fences raise."""
    tiers, threads = Tiers(), DaemonThreads(1, "hicache-test")
    device = CpuDevice(threads)
    busy, release = threading.Event(), threading.Event()
    threads.submit(lambda: (busy.set(), release.wait(10)))
    await asyncio.to_thread(busy.wait, 10)
    if how == "refused":
        threads.shutdown()
        fences = device.host_to_device(tiers.plan([0], [0]), [])
    else:
        fences = device.host_to_device(tiers.plan([0], [0]), [])
        threads.shutdown()
    with pytest.raises((RuntimeError, ClosedError), match="shut down"):
        await device.wait(fences[-1])
    release.set()


async def test_nothing_is_left_behind() -> None:
    """After copies, failures and close no thread lives, and nothing keeps the tensors but their owner."""
    before = set(hicache_threads())
    tiers, device = Tiers(), CpuDevice()
    gate = ForeignFence()
    fences = [
        *device.host_to_device(tiers.plan([0], [0]), [gate]),
        device.device_to_host(tiers.plan([1], [1]), []),
    ]
    gate.settle()
    for fence in fences:
        await device.wait(fence)
    await device.aclose()
    for thread in set(hicache_threads()) - before:
        thread.join(10)
    assert not set(hicache_threads()) - before
    arena = weakref.ref(tiers.arena)
    del tiers
    gc.collect()
    assert arena() is None
    assert state(fences) == [True] * len(fences)


async def test_the_engines_thread_count_is_left_alone() -> None:
    """Copying never calls torch.set_num_threads, whose effect is the whole process's."""
    count = torch.get_num_threads()
    tiers, device = Tiers(), CpuDevice()
    await device.wait(device.host_to_device(tiers.plan([0], [3]), [])[-1])
    await device.aclose()
    assert torch.get_num_threads() == count
