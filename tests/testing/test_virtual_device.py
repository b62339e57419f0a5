"""VirtualDevice: bytes move when told, and what a real device would let pass silently raises."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_async._fence import OrderedFence, ThreadFence, combine
from hicache_async.abc import CopyPlan, Fence, SupportsRecording
from hicache_async.config import HostLayout
from hicache_async.errors import ClosedError, InvariantError
from hicache_async.memory.device_kv import DeviceKV
from hicache_async.memory.host import HostArena
from hicache_async.testing.golden import check_page, fill_page
from hicache_async.testing.virtual_device import NotReadyError, NotRecordedError, VirtualDevice, VirtualFence

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


async def test_forwards_of_one_stream_end_in_order() -> None:
    """Each is queued behind those before it; a fence is behind those queued when it was made, and no others."""
    device = VirtualDevice()
    fences = []
    for _ in range(2):
        device.begin_compute("side")
        fences.append(device.fence("side"))
    assert [fence.passed() for fence in fences] == [False, False]
    with pytest.raises(NotReadyError, match="compute on 'side'"):
        fences[0].block()
    assert device.end_compute("side")
    assert [fence.passed() for fence in fences] == [True, False]
    assert device.end_compute("side")
    assert fences[1].passed() and device.fence("side").passed()
    assert not device.end_compute("side")


async def test_streams_end_in_any_order() -> None:
    """A stream that was begun later may end first, and what waits for it goes on."""
    tiers, device = Tiers(), VirtualDevice(auto=True)
    streams = [None, "side", object()]
    for stream in streams:
        device.begin_compute(stream)
    fences = [device.fence(stream) for stream in streams]
    loaded = device.host_to_device(tiers.plan([0], [0]), [fences[2]])
    offloaded = device.device_to_host(tiers.plan([1], [1]), [fences[1]])
    for ended in (1, 2, 0):
        assert (loaded[-1].passed(), offloaded.passed()) == (fences[2].passed(), fences[1].passed())
        device.end_compute(streams[ended])
        assert fences[ended].passed()
    assert loaded[-1].passed() and offloaded.passed()


async def test_a_stream_is_one_of_its_device() -> None:
    """Streams of one name on two devices, and the two directions, are different ones."""
    tiers, devices = Tiers(), [VirtualDevice(), VirtualDevice()]
    fences: list[Fence] = []
    for device in devices:
        for stream in (None, "side"):
            device.begin_compute(stream)
            fences.append(device.fence(stream))
        fences += [
            device.host_to_device(tiers.plan([0], [0]), [])[0],
            device.device_to_host(tiers.plan([1], [1]), []),
        ]
    assert len({fence.stream for fence in fences if isinstance(fence, OrderedFence)}) == len(fences) == 8


@given(st.lists(st.tuples(st.sampled_from("bbbeeefhdrmmx"), st.integers(0, 3)), max_size=40))
async def test_no_fence_passes_before_an_earlier_one_of_its_stream(steps: list[tuple[str, int]]) -> None:
    """Whatever is queued, recorded, moved, ended and failed, in whatever order; then the last stands for all."""
    tiers, device = Tiers(), VirtualDevice(holds_recording=True)
    fences: list[Fence] = []
    last_to: dict[tuple[str, int], list[Fence]] = {}
    for step, choice in steps:
        match step:
            case "b":
                device.begin_compute(choice % 2)
                fences.append(device.fence(choice % 2))
            case "e":
                device.end_compute(choice % 2)
            case "f":
                device.fail_next(OSError("no"), choice % LAYERS)
            case "h":
                after = [*fences[-1:], *last_to.get(("h", choice), ())]
                fences += device.host_to_device(tiers.plan([choice], [choice]), after)
                last_to["h", choice] = fences[-1:]
            case "d":
                after = [*fences[-1:], *last_to.get(("d", choice), ())]
                fences.append(device.device_to_host(tiers.plan([4], [4 + choice]), after))
                last_to["d", choice] = fences[-1:]
            case "r":
                device.record(choice)
            case "m":
                device.advance(copy=device.pending[choice % len(device.pending)] if device.pending else None)
            case "x" if device.pending:
                device.pending[choice % len(device.pending)].fail(OSError("no"))
        check_order(fences)
    await device.aclose()
    check_order(fences)


def check_order(fences: Sequence[Fence]) -> None:
    """Check that of each stream the first so many fences have passed, and that combined ones keep the last."""
    by_stream: dict[object, list[OrderedFence]] = {}
    for fence in fences:
        assert isinstance(fence, OrderedFence)
        by_stream.setdefault(fence.stream, []).append(fence)
    for same in by_stream.values():
        same.sort(key=lambda fence: fence.sequence)
        passed = [fence.passed() for fence in same]
        assert passed == sorted(passed, reverse=True)
        assert combine(same) is (None if passed[-1] else same[-1])


async def test_one_that_waits_may_be_passed() -> None:
    """So what writes the same page in the same direction has to be behind it; what only reads the same need not."""
    tiers, device = Tiers(), VirtualDevice()
    device.begin_compute()
    (*_, waiting) = device.host_to_device(tiers.plan([0], [1]), [device.fence()])
    device.host_to_device(tiers.plan([2], [1]), [])
    with pytest.raises(InvariantError, match="put it behind the last fence"):
        device.host_to_device(tiers.plan([0], [3]), [])
    device.host_to_device(tiers.plan([0], [3]), [waiting])
    with pytest.raises(InvariantError, match="put it behind the last fence"):
        device.host_to_device(
            tiers.plan([2], [3]), [device.fence()]
        )  # nor may it pass one that does not wait


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


async def test_a_copy_fails_at_its_turn() -> None:
    """One behind another of its direction, or behind an open fence, is open until these are over, then failed."""
    tiers, device = Tiers(), VirtualDevice()
    gate = ThreadFence(asyncio.get_running_loop())
    device.host_to_device(tiers.plan([0], [0]), [])
    second = device.host_to_device(tiers.plan([1], [1]), [gate])
    third = device.host_to_device(tiers.plan([2], [2]), [])
    device.pending[1].fail(OSError("link down"))
    assert not second[0].passed()
    assert device.advance_all() == LAYERS
    assert not second[0].passed()
    gate.set()
    assert device.advance_all() == LAYERS
    for fence in second:
        with pytest.raises(OSError, match="link down"):
            fence.block()
    third[-1].block()


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("layer", range(LAYERS))
async def test_the_next_copy_fails_at_a_layer(auto: bool, layer: int) -> None:
    """The layers before it move, the others raise and hold nothing of use, and the copy after it is whole."""
    tiers, device = Tiers(), VirtualDevice(auto)
    fill_page(tiers.arena, 0, page_hash(7))
    device.fail_next(OSError("link down"), layer)
    fences = device.host_to_device(tiers.plan([0], [0]), [])
    later = device.host_to_device(tiers.plan([1], [0]), [])
    assert device.advance_all() == (0 if auto else layer + LAYERS)
    assert layers_of(tiers, 0) == [7] * layer + [0xDB] * (LAYERS - layer)
    for fence in fences[:layer]:
        fence.block()
    for fence in fences[layer:]:
        with pytest.raises(OSError, match="link down"):
            await device.wait(fence)
    later[-1].block()
    check_page(tiers.kv, 1, page_hash(7))


async def test_each_failure_is_for_one_copy() -> None:
    """Two of them are for the next two copies, in that order; a layer that no copy has is refused."""
    tiers, device = Tiers(), VirtualDevice(auto=True)
    errors = [OSError("first"), OSError("second")]
    for error in errors:
        device.fail_next(error)
    fences = [
        device.device_to_host(tiers.plan([0], [0]), []),
        device.host_to_device(tiers.plan([1], [1]), [])[0],
        device.device_to_host(tiers.plan([2], [2]), []),
    ]
    assert [fence.error for fence in fences] == [*errors, None]
    device.fail_next(OSError("never"), LAYERS)
    with pytest.raises(AssertionError, match=f"has no layer {LAYERS}"):
        device.host_to_device(tiers.plan([0], [0]), [])


async def test_what_is_not_recorded_does_not_start() -> None:
    """Nothing is spoiled or moves, and to block on it raises; each layer moves once it is recorded."""
    tiers, device = Tiers(), VirtualDevice(auto=True, holds_recording=True)
    fill_page(tiers.kv, 0, page_hash(1))
    fill_page(tiers.arena, 0, page_hash(7))
    fences = device.host_to_device(tiers.plan([0], [0]), [])
    check_page(tiers.kv, 0, page_hash(1))
    for layer in range(LAYERS):
        with pytest.raises(NotRecordedError, match=f"#0 layer {layer} open"):
            fences[layer].block()
        assert device.record(1) == 1
        assert [fence.passed() for fence in fences] == [other <= layer for other in range(LAYERS)]
        fences[layer].block()
    assert device.record() == 0
    check_page(tiers.kv, 0, page_hash(7))


async def test_copies_are_recorded_in_the_order_of_submit() -> None:
    """One thread does it: layer by layer and copy by copy, whichever way they go."""
    tiers, device = Tiers(), VirtualDevice(holds_recording=True)
    fences = [
        *device.host_to_device(tiers.plan([0], [0]), []),
        device.device_to_host(tiers.plan([1], [1]), []),
    ]
    expected = [1, 2, 3, 3, 3, 4]
    for num_recorded in expected:
        assert device.record(1) == 1
        assert sum(fence.is_recorded for fence in fences) == num_recorded
    assert device.record(1) == 0
    with pytest.raises(NotReadyError):
        fences[0].block()
    assert device.advance_all() == 2 * LAYERS


async def test_recorded_returns_when_all_are() -> None:
    """Those of other devices count as recorded, and so does what has failed or was closed."""
    tiers, device = Tiers(), VirtualDevice(holds_recording=True)
    assert isinstance(device, SupportsRecording)
    device.begin_compute()
    others = [ThreadFence(asyncio.get_running_loop()), device.fence()]
    await device.recorded(others)
    copies = [device.host_to_device(tiers.plan([page], [page]), []) for page in range(3)]
    waits = [asyncio.create_task(device.recorded([*others, *fences])) for fences in copies]
    device.record(LAYERS - 1)
    assert await done(waits) == [False, False, False]
    waits[0].cancel()
    waits[0] = asyncio.create_task(device.recorded(copies[0]))
    device.record(1)
    assert await done(waits) == [True, False, False]
    device.pending[1].fail(OSError("link down"))
    assert await done(waits) == [True, False, False]
    device.advance_all()
    assert await done(waits) == [True, True, False]
    with pytest.raises(OSError, match="link down"):
        copies[1][0].block()
    await device.aclose()
    assert await done(waits) == [True, True, True]
    await device.recorded(copies[2])


async def done(waits: Sequence[asyncio.Task[None]]) -> list[bool]:
    """Say who has returned, once all have run that can."""
    for _ in range(4):
        await gate_callbacks()
    return [wait.done() for wait in waits]


async def test_recorded_at_submit_unless_told_otherwise() -> None:
    """By default there is nothing to wait for."""
    tiers, device = Tiers(), VirtualDevice()
    fences = device.host_to_device(tiers.plan([0], [0]), [])
    waiting = device.recorded(fences)
    with pytest.raises(StopIteration):
        waiting.send(None)  # it returns at its first step
    assert all(fence.is_recorded for fence in fences)


async def test_let_go() -> None:
    """All streams end, all copies are recorded and move, and so does what is submitted from then on."""
    tiers, device = Tiers(), VirtualDevice(holds_recording=True)
    for stream in (None, "side", "side"):
        device.begin_compute(stream)
    behind = [device.fence(), device.fence("side")]
    loaded = device.host_to_device(tiers.plan([0], [0]), behind)
    device.let_go()
    assert all(fence.passed() for fence in (*behind, *loaded))
    assert device.device_to_host(tiers.plan([0], [1]), []).passed()


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


@pytest.mark.parametrize("auto", [False, True])
async def test_close_fails_in_the_order_of_the_streams(auto: bool) -> None:
    """What is queued, recorded or not, fails one after the other, and none of it starts any more."""
    tiers, device = Tiers(), VirtualDevice(auto, holds_recording=True)
    gate = ThreadFence(asyncio.get_running_loop())
    fences = device.host_to_device(tiers.plan([0], [0]), [gate])
    device.host_to_device(tiers.plan([1], [1]), [])
    device.device_to_host(tiers.plan([2], [2]), [fences[-1]])
    copies = device.pending
    device.record(2 * LAYERS)
    over: list[int] = []
    for number, copy in enumerate(copies):
        VirtualFence(copy.progress, 0).when_settled(lambda number=number: over.append(number))  # type: ignore[misc]
    fill_page(tiers.kv, 1, page_hash(1))
    await device.aclose()
    assert over == [0, 1, 2]
    gate.set()
    await gate_callbacks()
    assert device.record() == device.advance_all() == 0
    check_page(tiers.kv, 1, page_hash(1))


async def test_host_buffer() -> None:
    """A buffer is uint8 zeros of the length asked for."""
    buffer = await VirtualDevice().host_buffer(100)
    assert (buffer.dtype, buffer.numel(), int(buffer.sum())) == (torch.uint8, 100, 0)
