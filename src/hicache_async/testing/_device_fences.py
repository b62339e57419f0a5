"""Checks of what a device's fences promise: what has passed is there, and what is behind has not begun."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable

from .._fence import POLL_S, AllFences, PassedFence, ThreadFence
from ..abc import Fence
from ._device_bench import NUM_LAYERS, Bench, Tiers, device_page, host_page, new_page
from .golden import check_page, fill_page

SETTLE_S = 0.02
"""How long a copy that must not begin is given to begin."""

BLOCK_S = 10.0


class ForeignFence:
    """A fence of the engine's own kind: it can be asked and blocked on, nothing more."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._error: Exception | None = None

    def passed(self) -> bool:
        """Return whether it was settled."""
        return self._passed.is_set()

    def block(self, stream: object | None = None) -> None:
        """Wait in the calling thread."""
        self._passed.wait()
        if self._error is not None:
            raise self._error

    def settle(self, error: Exception | None = None) -> None:
        """Let everybody pass."""
        self._error = error
        self._passed.set()


class SubmitWaitsError(AssertionError):
    """A submit waits in the loop for what only the loop would let pass, so every other check would hang."""


async def submits_without_waiting(bench: Bench) -> None:
    """Whatever a copy stays behind, or queues behind, its submit returns before that has passed."""
    # The fence that passes without the loop comes first: from a submit that waits it is the way out.
    thread_fence, engine_fence = ThreadFence(asyncio.get_running_loop()), ForeignFence()
    await _submits_without_waiting(bench, engine_fence, engine_fence.settle)
    await _submits_without_waiting(bench, thread_fence, thread_fence.set)


async def _submits_without_waiting(bench: Bench, fence: Fence, let_pass: Callable[[], None]) -> None:
    tiers = await bench.tiers()
    way_out = threading.Timer(BLOCK_S, let_pass)
    way_out.start()
    try:
        fences = [
            *bench.load(tiers.plan([0], [0]), fence),
            *bench.load(tiers.plan([1], [1])),
            bench.offload(tiers.plan([2], [2]), fence),
            bench.offload(tiers.plan([3], [3])),
        ]
        if fence.passed():
            raise SubmitWaitsError("a submit did not return before the fence that its copy is behind")
    finally:
        way_out.cancel()
        let_pass()
    for submitted in fences:
        await bench.device.wait(submitted)
    tiers.check({0: host_page(0), 1: host_page(1)}, {2: device_page(2), 3: device_page(3)})


async def gives_a_fence_for_each_layer(bench: Bench) -> None:
    """In layer order: when one has passed, that layer and those before it are there."""
    tiers = await bench.tiers()
    for layer in range(NUM_LAYERS):
        fences = bench.load(tiers.plan([layer], [layer]))
        assert len(fences) == NUM_LAYERS, f"{len(fences)} fences for {NUM_LAYERS} layers"
        assert len(set(map(id, fences))) == NUM_LAYERS, (
            "layers share a fence, so none can be used before another"
        )
        await bench.device.wait(fences[layer])
        _check_layers(tiers, layer, host_page(layer), layer)
        assert all(fence.passed() for fence in fences[: layer + 1]), "a fence before it has not passed"
        await bench.device.wait(fences[-1])
    tiers.check({page: host_page(page) for page in range(NUM_LAYERS)}, {})


def _check_layers(tiers: Tiers, page: int, page_hash: bytes, last_layer: int) -> None:
    class Layers:
        """The layers that must be there."""

        num_layers = last_layer + 1
        num_pages = tiers.kv.num_pages
        planes = tiers.kv.planes

    check_page(Layers(), page, page_hash)


async def stays_behind_a_thread_fence(bench: Bench) -> None:
    """What is written before the fence passes is what is copied, in both directions."""
    fence = ThreadFence(asyncio.get_running_loop())
    await _stays_behind(bench, fence, fence.set)


async def stays_behind_a_fence_of_the_engine(bench: Bench) -> None:
    """The same for one that can only be asked, or blocked on."""
    fence = ForeignFence()
    await _stays_behind(bench, fence, fence.settle)


async def _stays_behind(bench: Bench, fence: Fence, let_pass: Callable[[], None]) -> None:
    tiers = await bench.tiers()
    loaded = bench.load(tiers.plan([0], [1]), fence)
    offloaded = bench.offload(tiers.plan([2], [3]), fence)
    await asyncio.sleep(SETTLE_S)
    assert not loaded[0].passed() and not offloaded.passed(), "a copy ended before the fence it is behind"
    fill_page(tiers.arena, 1, new_page(1))
    fill_page(tiers.kv, 2, new_page(2))
    let_pass()
    await bench.device.wait(loaded[-1])
    await bench.device.wait(offloaded)
    tiers.check({0: new_page(1), 2: new_page(2)}, {1: new_page(1), 3: new_page(2)})


async def keeps_its_directions_apart(bench: Bench) -> None:
    """A copy that is held in one direction does not hold one of the other."""
    tiers = await bench.tiers()
    fence = ThreadFence(asyncio.get_running_loop())
    loaded = bench.load(tiers.plan([0], [0]), fence)
    await bench.device.wait(bench.offload(tiers.plan([5], [5])))
    assert not loaded[-1].passed()
    fence.set()
    await bench.device.wait(loaded[-1])
    offloaded = bench.offload(tiers.plan([6], [6]), other := ThreadFence(asyncio.get_running_loop()))
    await bench.device.wait(bench.load(tiers.plan([7], [7]))[-1])
    assert not offloaded.passed()
    other.set()
    await bench.device.wait(offloaded)
    tiers.check({0: host_page(0), 7: host_page(7)}, {5: device_page(5), 6: device_page(6)})


async def chains_copies_without_the_loop(bench: Bench) -> None:
    """A copy behind one of the other direction moves although the loop stands still meanwhile."""
    tiers = await bench.tiers()
    offloaded = bench.offload(tiers.plan([0, 1], [8, 9]))
    loaded = bench.load(tiers.plan([4, 5], [8, 9]), offloaded)

    def see_it_passed() -> None:
        loaded[-1].block()
        while not loaded[-1].passed():  # where there are streams it was one of them that was told to wait
            time.sleep(POLL_S)

    _in_thread(see_it_passed)
    tiers.check({4: device_page(0), 5: device_page(1)}, {8: device_page(0), 9: device_page(1)})


def _in_thread(work: Callable[[], None]) -> None:
    # The loop's own thread waits for it: nothing here may need the loop to go on.
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that examines
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="exam-block")
    thread.start()
    thread.join(BLOCK_S)
    assert not thread.is_alive(), "block() never returned, with the loop standing still"
    if errors:
        raise errors[0]


async def fails_behind_a_failed_fence(bench: Bench) -> None:
    """The copy moves nothing, its fences raise the very error, and the next copy goes on.

    Wherever it is among the fences that the copy is behind, one that is combined with others too.
    """
    for kind, given in itertools.product(("thread", "engine"), ("alone", "last", "combined")):
        tiers = await bench.tiers()
        error = RuntimeError("the forward failed")
        fence = ThreadFence(asyncio.get_running_loop()) if kind == "thread" else ForeignFence()
        after: list[Fence] = [fence] if given == "alone" else [PassedFence(), fence]
        if given == "combined":
            after = [AllFences(after)]
        loaded = bench.load(tiers.plan([0], [0]), *after)
        offloaded = bench.offload(tiers.plan([1], [1]), *after)
        later = bench.load(tiers.plan([2], [2])), bench.offload(tiers.plan([3], [3]))
        fence.fail(error) if isinstance(fence, ThreadFence) else fence.settle(error)
        for failed in (*loaded, offloaded):
            await expect_error(bench.device.wait(failed), error)
            assert failed.passed(), "a fence that failed has not passed: who asks it would ask for ever"
        await bench.device.wait(later[0][-1])
        await bench.device.wait(later[1])
        tiers.check({2: host_page(2)}, {3: device_page(3)})


async def expect_error(waiting: Awaitable[None], error: Exception) -> None:
    """Wait for what must fail, with this very error."""
    try:
        await waiting
    except Exception as found:  # noqa: BLE001 - compared with the one that must come
        assert found is error, f"a copy behind a fence that failed raised {found!r}, not {error!r}"
        return
    raise AssertionError("a copy behind a fence that failed passed for whole")


async def waits_for_any_fence(bench: Bench) -> None:
    """Its own, those of threads and those of an engine; the error of a failed one is raised."""
    await bench.device.wait(bench.device.fence())
    bench.device.fence().block()
    thread_fence, engine_fence = ThreadFence(asyncio.get_running_loop()), ForeignFence()
    waits = [asyncio.create_task(bench.device.wait(fence)) for fence in (thread_fence, engine_fence)]
    await asyncio.sleep(SETTLE_S)
    assert not any(wait.done() for wait in waits), "a wait ended before its fence passed"
    thread_fence.set()
    engine_fence.settle(error := OSError("the stream is lost"))
    await waits[0]
    await expect_error(waits[1], error)


async def goes_on_when_a_wait_is_cancelled(bench: Bench) -> None:
    """The copy and who else waits for it are not concerned."""
    tiers = await bench.tiers()
    fence = ThreadFence(asyncio.get_running_loop())
    loaded = bench.load(tiers.plan([0], [1]), fence)
    waits = [asyncio.create_task(bench.device.wait(loaded[-1])) for _ in range(3)]
    await asyncio.sleep(0)
    for wait in waits[:2]:
        wait.cancel()
    await asyncio.wait(waits[:2])
    assert all(wait.cancelled() for wait in waits[:2]), "a cancelled wait went on"
    assert not waits[2].done()
    fence.set()
    await waits[2]
    tiers.check({0: host_page(1)}, {})


FENCE_CHECKS = (
    submits_without_waiting,
    gives_a_fence_for_each_layer,
    stays_behind_a_thread_fence,
    stays_behind_a_fence_of_the_engine,
    keeps_its_directions_apart,
    chains_copies_without_the_loop,
    fails_behind_a_failed_fence,
    waits_for_any_fence,
    goes_on_when_a_wait_is_cancelled,
)
