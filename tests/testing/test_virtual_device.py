"""VirtualDevice: bytes move when told, and what a real device would let pass silently raises."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hicache_async._fence import ThreadFence
from hicache_async.abc import CopyPlan, Fence
from hicache_async.config import HostLayout
from hicache_async.errors import ClosedError, InvariantError
from hicache_async.memory.device_kv import DeviceKV
from hicache_async.memory.host import HostArena
from hicache_async.testing.golden import check_page, fill_page
from hicache_async.testing.virtual_device import NotReadyError, VirtualDevice

LAYERS = 3
pytestmark = pytest.mark.asyncio


class Tiers:
    """A device pool of 6 pages and a host arena of 8, and plans between them."""

    def __init__(self) -> None:
        self.kv = DeviceKV.from_layers(
            [torch.zeros(6, 2, 2, 4) for _ in range(LAYERS)], [torch.zeros(6, 2, 2, 4) for _ in range(LAYERS)]
        )
        buffer = torch.zeros(HostArena.nbytes_needed(self.kv, 8), dtype=torch.uint8)
        self.arena = HostArena(self.kv, HostLayout.PAGE_FIRST, 8, buffer)

    def plan(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> CopyPlan:
        return CopyPlan(self.kv, self.arena, np.array(device_pages, np.int64), np.array(host_pages, np.int64))


def page_hash(number: int) -> bytes:
    return bytes([number]) * 32


def layers_of(tiers: Tiers, page: int) -> list[int]:
    """The first byte of each layer of a device page."""
    return [int(tiers.kv.planes(layer)[0][page, 0]) for layer in range(LAYERS)]


async def test_nothing_moves_before_it_is_told() -> None:
    """Layers arrive one advance at a time, in order, and each fence passes with its layer."""
    tiers, device = Tiers(), VirtualDevice()
    fill_page(tiers.arena, 5, page_hash(7))
    fences = device.host_to_device(tiers.plan([2], [5]), [])
    for moved in range(LAYERS):
        assert [fence.passed() for fence in fences] == [layer < moved for layer in range(LAYERS)]
        assert layers_of(tiers, 2) == [7] * moved + [0xDB] * (LAYERS - moved)
        assert device.advance() == 1
    check_page(tiers.kv, 2, page_hash(7))
    assert device.pending == ()
    assert device.advance() == 0


async def test_advance_to_a_layer() -> None:
    """advance(layer) moves what is missing up to that layer, and advance_all the rest."""
    tiers, device = Tiers(), VirtualDevice()
    fences = device.host_to_device(tiers.plan([0], [0]), [])
    assert device.advance(1) == 2
    assert device.advance(1) == 0
    assert [fence.passed() for fence in fences] == [True, True, False]
    assert device.advance_all() == 1


async def test_block_too_early_raises() -> None:
    """Blocking on a layer that has not moved is an error that names the copy; afterwards it returns."""
    tiers, device = Tiers(), VirtualDevice()
    fences = device.host_to_device(tiers.plan([0], [0]), [])
    device.advance(0)
    fences[0].block()
    with pytest.raises(NotReadyError, match="host_to_device #0 layer 1 open"):
        fences[1].block()
    device.advance_all()
    fences[1].block()


async def test_source_is_read_as_late_as_it_may_be() -> None:
    """A source page that changes between submit and move shows up in the target."""
    tiers, device = Tiers(), VirtualDevice()
    fill_page(tiers.kv, 1, page_hash(1))
    fence = device.device_to_host(tiers.plan([1], [4]), [])
    device.poison(tiers.kv, np.array([1]))
    device.advance_all()
    assert fence.passed()
    with pytest.raises(AssertionError, match="poison: the page was freed"):
        check_page(tiers.arena, 4, page_hash(1))


async def test_targets_are_spoiled_when_the_copy_may_start() -> None:
    """A target is undefined from submit on, but not while a fence before the copy is open."""
    tiers, device = Tiers(), VirtualDevice()
    fill_page(tiers.kv, 0, page_hash(1))
    fill_page(tiers.kv, 1, page_hash(2))
    gate = ThreadFence(asyncio.get_running_loop())
    device.host_to_device(tiers.plan([0], [0]), [])
    assert layers_of(tiers, 0) == [0xDB] * LAYERS
    device.host_to_device(tiers.plan([1], [1]), [gate])
    device.advance_all()
    check_page(tiers.kv, 1, page_hash(2))
    gate.set()
    device.advance_all()
    assert layers_of(tiers, 1) == [0] * LAYERS


async def test_the_next_copy_starts_when_the_one_before_it_is_over() -> None:
    """Its targets are undefined as soon as the lane is free, before any of its layers has moved."""
    tiers, device = Tiers(), VirtualDevice()
    device.host_to_device(tiers.plan([0], [0]), [])
    device.host_to_device(tiers.plan([1], [1]), [])
    device.advance(LAYERS - 2)
    assert layers_of(tiers, 1) == [0] * LAYERS
    device.advance()
    assert layers_of(tiers, 1) == [0xDB] * LAYERS


async def test_a_copy_stays_behind_its_fences() -> None:
    """While a fence before it is open nothing moves; in its direction what follows waits too."""
    tiers, device = Tiers(), VirtualDevice()
    gate = ThreadFence(asyncio.get_running_loop())
    first = device.host_to_device(tiers.plan([0], [0]), [gate])
    second = device.host_to_device(tiers.plan([1], [1]), [])
    other = device.device_to_host(tiers.plan([2], [2]), [])
    assert device.advance_all() == LAYERS
    assert (first[-1].passed(), second[-1].passed(), other.passed()) == (False, False, True)
    gate.set()
    assert device.advance_all() == 2 * LAYERS


@pytest.mark.parametrize("auto", [False, True])
async def test_a_failed_fence_before_it_fails_the_copy(auto: bool) -> None:
    """No byte moves, every fence raises the same error, and the copies after it go on."""
    tiers, device = Tiers(), VirtualDevice(auto)
    fill_page(tiers.kv, 0, page_hash(1))
    gate = ThreadFence(asyncio.get_running_loop())
    fences = device.host_to_device(tiers.plan([0], [0]), [gate])
    later = device.host_to_device(tiers.plan([1], [1]), [])
    error = RuntimeError("forward failed")
    gate.fail(error)
    await gate_callbacks()
    device.advance_all()
    for fence in fences:
        with pytest.raises(RuntimeError) as caught:
            await device.wait(fence)
        assert caught.value is error
    check_page(tiers.kv, 0, page_hash(1))
    await device.wait(later[-1])


async def gate_callbacks() -> None:
    """Let what ``call_soon_threadsafe`` has queued run: it is in front of this turn's own callback."""
    turn = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon_threadsafe(turn.set_result, None)
    await turn


async def test_auto_moves_at_submit_and_when_a_fence_passes() -> None:
    """With auto=True bytes are there when submit returns, or right after the fences before it pass."""
    tiers, device = Tiers(), VirtualDevice(auto=True)
    fill_page(tiers.arena, 0, page_hash(1))
    fences = device.host_to_device(tiers.plan([3], [0]), [])
    assert all(fence.passed() for fence in fences)
    gate = ThreadFence(asyncio.get_running_loop())
    back = device.device_to_host(tiers.plan([3], [6]), [gate])
    assert not back.passed()
    gate.set()
    await device.wait(back)
    check_page(tiers.arena, 6, page_hash(1))


async def test_compute_fences_stay_open_until_the_forward_ends() -> None:
    """Between begin_compute and end_compute a fence is open, and a copy behind it does not move."""
    tiers, device = Tiers(), VirtualDevice(auto=True)
    assert device.fence().passed()
    device.begin_compute()
    fence = device.fence()
    copied = device.device_to_host(tiers.plan([0], [0]), [fence])
    assert not fence.passed()
    assert not copied.passed()
    device.end_compute()
    assert fence.passed()
    assert copied.passed()


async def test_a_test_may_fail_a_copy() -> None:
    """The layers that moved stay right, the others raise what the test chose."""
    tiers, device = Tiers(), VirtualDevice()
    fences = device.host_to_device(tiers.plan([0], [0]), [])
    device.advance()
    copy = device.pending[0]
    copy.fail(OSError("link down"))
    copy.fail(OSError("too late"))
    fences[0].block()
    for fence in fences[1:]:
        with pytest.raises(OSError, match="link down"):
            fence.block()
    assert device.pending == ()


@pytest.mark.parametrize("waits_for", ["nothing", "a layer", "the whole"])
async def test_unordered_copies_of_one_page_are_refused(waits_for: str) -> None:
    """Copies in both directions that share a page must be ordered by the last fence of the first."""
    tiers, device = Tiers(), VirtualDevice()
    fences = device.host_to_device(tiers.plan([0, 1], [0, 1]), [])
    after: dict[str, list[Fence]] = {"nothing": [], "a layer": [fences[0]], "the whole": [fences[-1]]}
    if waits_for == "the whole":
        device.device_to_host(tiers.plan([1], [2]), after[waits_for])
        return
    with pytest.raises(InvariantError, match=r"device pages \[1\] and host pages \[\] of .*#0"):
        device.device_to_host(tiers.plan([1], [2]), after[waits_for])
    with pytest.raises(InvariantError, match=r"device pages \[\] and host pages \[0\] of .*#0"):
        device.device_to_host(tiers.plan([5], [0]), after[waits_for])
    device.device_to_host(tiers.plan([2], [2]), after[waits_for])
    assert len(device.pending) == 2


async def test_a_later_copy_of_that_direction_orders_too() -> None:
    """Being behind a copy is being behind those before it in its direction."""
    tiers, device = Tiers(), VirtualDevice()
    device.host_to_device(tiers.plan([0], [0]), [])
    fences = device.host_to_device(tiers.plan([1], [1]), [])
    device.device_to_host(tiers.plan([0], [2]), [fences[-1]])
    assert device.advance_all() == 3 * LAYERS


async def test_wrong_plans_are_refused() -> None:
    """Ids out of range, unpaired, or a target named twice never reach the queue."""
    tiers, device = Tiers(), VirtualDevice()
    for device_pages, host_pages, message in [
        ([6], [0], "device pages 6"),
        ([0], [-1], "host pages -1"),
        ([0, 1], [0], "2 device pages for 1 host pages"),
        ([3, 3], [0, 1], "writes a page twice"),
    ]:
        with pytest.raises(InvariantError, match=message):
            device.host_to_device(tiers.plan(device_pages, host_pages), [])
    assert device.pending == ()


async def test_either_direction_may_be_chosen() -> None:
    """Without a choice the first submitted copy moves; a copy named by the test moves instead."""
    tiers, device = Tiers(), VirtualDevice()
    first = device.host_to_device(tiers.plan([0], [0]), [])
    second = device.device_to_host(tiers.plan([1], [1]), [])
    device.advance(copy=device.pending[1], layer=LAYERS - 1)
    assert (first[0].passed(), second.passed()) == (False, True)
    device.advance()
    assert first[0].passed()


async def test_close_fails_what_has_not_moved() -> None:
    """After close the open fences raise ClosedError, and so does a submit."""
    tiers, device = Tiers(), VirtualDevice()
    fences = device.host_to_device(tiers.plan([0], [0]), [])
    device.advance()
    await device.aclose()
    fences[0].block()
    with pytest.raises(ClosedError):
        await device.wait(fences[1])
    with pytest.raises(ClosedError):
        device.host_to_device(tiers.plan([0], [0]), [])


async def test_host_buffer() -> None:
    """A buffer is uint8 zeros of the length asked for."""
    buffer = await VirtualDevice().host_buffer(100)
    assert (buffer.dtype, buffer.numel(), int(buffer.sum())) == (torch.uint8, 100, 0)
