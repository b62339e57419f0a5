"""Checks of how a device puts copies in order: behind every fence, behind each other, and by the places it gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from .._fence import AllFences, OrderedFence, ThreadFence
from ..abc import Fence, SupportsRecording
from ._device_bench import Bench, Tiers, device_page, host_page, new_page
from ._device_fences import SETTLE_S, ForeignFence, expect_error
from .golden import fill_page


async def stays_behind_every_fence(bench: Bench) -> None:
    """Of several fences each alone holds a copy, the first, the last and those between."""
    await _stays_behind_each(bench, lambda fences: fences)


async def stays_behind_combined_fences(bench: Bench) -> None:
    """The same where they come as one: each of its parts holds a copy, and a wait."""
    await _stays_behind_each(bench, lambda fences: [AllFences(fences)])
    parts = [ForeignFence(), ForeignFence()]
    wait = asyncio.create_task(bench.device.wait(AllFences(parts)))
    parts[0].settle()
    await asyncio.sleep(SETTLE_S)
    assert not wait.done(), "a wait for two fences ended with the first"
    parts[1].settle()
    await wait


async def _stays_behind_each(bench: Bench, given: Callable[[Sequence[Fence]], Sequence[Fence]]) -> None:
    loop = asyncio.get_running_loop()
    for held in range(3):
        tiers = await bench.tiers()
        fences: list[ThreadFence | ForeignFence] = [ThreadFence(loop), ForeignFence(), ThreadFence(loop)]
        after = given(fences)
        loaded = bench.load(tiers.plan([0], [1]), *after)
        offloaded = bench.offload(tiers.plan([2], [3]), *after)
        for fence in [fence for index, fence in enumerate(fences) if index != held]:
            _let_pass(fence)
        await asyncio.sleep(SETTLE_S)
        assert not loaded[0].passed() and not offloaded.passed(), (
            f"a copy ended before fence {held} of the {len(fences)} that it is behind"
        )
        fill_page(tiers.arena, 1, new_page(1))
        fill_page(tiers.kv, 2, new_page(2))
        _let_pass(fences[held])
        await bench.device.wait(loaded[-1])
        await bench.device.wait(offloaded)
        tiers.check({0: new_page(1), 2: new_page(2)}, {1: new_page(1), 3: new_page(2)})


def _let_pass(fence: ThreadFence | ForeignFence) -> None:
    fence.set() if isinstance(fence, ThreadFence) else fence.settle()


async def fails_behind_a_copy_that_failed(bench: Bench) -> None:
    """In both directions, however long the chain, known to have failed or not; each fence raises the very error."""
    tiers = await bench.tiers()
    error, fence = RuntimeError("the forward failed"), ThreadFence(asyncio.get_running_loop())
    chain = _chain(bench, tiers, fence)
    fence.fail(error)
    for failed in chain:
        await expect_error(bench.device.wait(failed), error)
    for first in (chain[0], chain[-1]):
        for failed in _chain(bench, tiers, first):
            await expect_error(bench.device.wait(failed), error)
    for failed in _chain(bench, tiers, AllFences(chain)):
        await expect_error(bench.device.wait(failed), error)
    await bench.device.wait(bench.load(tiers.plan([5], [5]))[-1])
    tiers.check({5: host_page(5)}, {})


def _chain(bench: Bench, tiers: Tiers, first: Fence) -> list[Fence]:
    """Submit copies each behind the one before: to the host, to the device twice, and to the host again."""
    offloaded = bench.offload(tiers.plan([0], [8]), first)
    loaded = bench.load(tiers.plan([1], [8]), offloaded)
    again = bench.load(tiers.plan([2], [10]), loaded[-1])
    return [offloaded, *loaded, *again, bench.offload(tiers.plan([2], [9]), again[-1])]


async def orders_behind_a_failure(bench: Bench) -> None:
    """What ``ordering()`` gives for a fence has its place, waits as it does, and never raises."""
    for is_to_device in (True, False):
        tiers = await bench.tiers()
        held = ThreadFence(asyncio.get_running_loop())
        failing = (
            bench.load(tiers.plan([0], [0]), held)[-1]
            if is_to_device
            else bench.offload(tiers.plan([0], [0]), held)
        )
        if isinstance(failing, OrderedFence):
            ordering = failing.ordering()
            assert (ordering.stream, ordering.sequence) == (failing.stream, failing.sequence), (
                f"{ordering!r} has another place than {failing!r}"
            )
            loaded = bench.load(tiers.plan([1], [1]), ordering)
            offloaded = bench.offload(tiers.plan([2], [2]), ordering)
            assert not ordering.passed(), f"{ordering!r} has passed before its copy"
            assert not loaded[-1].passed() and not offloaded.passed(), (
                "a copy ended before the one it is behind"
            )
        held.fail(error := RuntimeError("the forward failed"))
        await expect_error(bench.device.wait(failing), error)
        if isinstance(failing, OrderedFence):
            await bench.device.wait(ordering)
            ordering.block()
            await bench.device.wait(loaded[-1])
            await bench.device.wait(offloaded)
            tiers.check({1: host_page(1)}, {2: device_page(2)})


async def gives_places_that_ascend(bench: Bench) -> None:
    """On each of its streams every fence has a higher sequence than all before it, layer by layer, copy by copy."""
    submitted = await _mixed_copies(bench)
    fences = _ordered(submitted)
    for stream in {fence.stream for fence in fences}:
        places = [fence.sequence for fence in fences if fence.stream == stream]
        assert all(before < behind for before, behind in pairwise(places)), (
            f"in the order of submit the places on {stream!r} are {places}"
        )
    for fence in submitted:
        await bench.device.wait(fence)


async def has_streams_for_each_direction(bench: Bench) -> None:
    """No stream is that of both directions, or of the engine as well, for neither waits for another."""
    tiers = await bench.tiers()
    loaded = bench.load(tiers.plan([0], [0]))
    offloaded = bench.offload(tiers.plan([1], [1]))
    engine = bench.device.fence()
    streams = [{fence.stream for fence in _ordered(fences)} for fences in (loaded, [offloaded], [engine])]
    assert len(set().union(*streams)) == sum(map(len, streams)), f"directions share a stream: {streams}"
    await bench.device.wait(loaded[-1])
    await bench.device.wait(offloaded)


async def passes_in_the_order_of_places(bench: Bench) -> None:
    """While copies are held none of a stream has passed that has a higher place than one that has not."""
    held = ForeignFence()
    submitted = await _mixed_copies(bench, held)
    await bench.device.wait(submitted[0])
    await asyncio.sleep(SETTLE_S)
    fences = _ordered(submitted)
    for later in sorted(fences, key=lambda fence: fence.sequence, reverse=True):
        if later.passed():  # asked first, so that one that passes meanwhile is not taken for early
            early = [
                fence
                for fence in fences
                if fence.stream == later.stream and fence.sequence < later.sequence and not fence.passed()
            ]
            assert not early, f"{later!r} has passed, and {early} of the same stream have not"
    held.settle()
    for fence in submitted:
        await bench.device.wait(fence)


async def _mixed_copies(bench: Bench, held: Fence | None = None) -> list[Fence]:
    """Submit copies of both directions, some behind ``held``; return all their fences in the order of submit."""
    tiers = await bench.tiers()
    fences: list[Fence] = []
    for page in range(0, 8, 2):
        after = (held,) if held is not None and page in (2, 4) else ()
        fences += bench.load(tiers.plan([page], [page]), *after)
        fences.append(bench.device.fence())
        fences.append(bench.offload(tiers.plan([page + 1], [page + 1]), *after))
    return fences


def _ordered(fences: Iterable[Fence]) -> list[OrderedFence]:
    return [fence for fence in fences if isinstance(fence, OrderedFence)]


async def has_recorded_when_it_says_so(bench: Bench) -> None:
    """Of a device that queues from a thread: what ``recorded()`` has returned for is recorded, or has failed."""
    if not isinstance(bench.device, SupportsRecording):
        return
    for error in (None, RuntimeError("the forward failed")):
        tiers = await bench.tiers()
        held = ForeignFence()
        fences = [*bench.load(tiers.plan([0], [0]), held), bench.offload(tiers.plan([1], [1]), held)]
        cancelled, recorded = (asyncio.create_task(bench.device.recorded(fences)) for _ in range(2))
        await asyncio.sleep(SETTLE_S)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        if recorded.done():
            _check_recorded(fences)
        held.settle(error)
        await recorded
        _check_recorded(fences)
        for fence in fences:
            waiting = bench.device.wait(fence)
            await (waiting if error is None else expect_error(waiting, error))


def _check_recorded(fences: Iterable[Fence]) -> None:
    unrecorded = [fence for fence in _ordered(fences) if not fence.is_recorded]
    assert not unrecorded, f"recorded() returned, and no stream can be ordered behind {unrecorded}"


ORDER_CHECKS = (
    stays_behind_every_fence,
    stays_behind_combined_fences,
    fails_behind_a_copy_that_failed,
    orders_behind_a_failure,
    gives_places_that_ascend,
    has_streams_for_each_direction,
    passes_in_the_order_of_places,
    has_recorded_when_it_says_so,
)
