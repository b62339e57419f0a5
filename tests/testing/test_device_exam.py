"""The exam for devices: ours pass it on every loop, and whatever is broken is caught by the check of its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from hicache_async._fence import AllFences, ThreadFence
from hicache_async._progress import CopyProgress, LayerFence
from hicache_async.abc import CopyPlan, Device, Fence
from hicache_async.device.cpu import CpuDevice
from hicache_async.errors import ConfigError, InvariantError
from hicache_async.testing.device_exam import CHECKS, check_device
from hicache_async.testing.virtual_device import VirtualDevice
from tests.testing.loops import each_loop

DEVICES: dict[str, Callable[[], Device]] = {"cpu": CpuDevice, "virtual": partial(VirtualDevice, auto=True)}


@each_loop
@pytest.mark.parametrize("name", DEVICES)
def test_our_devices_pass(name: str, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """All checks, on every loop."""
    assert check_device(DEVICES[name], loop_factory=loop_factory).passed == tuple(CHECKS)


def changed(plan: CopyPlan, device_pages: np.ndarray, host_pages: np.ndarray) -> CopyPlan:
    return CopyPlan(plan.kv, plan.arena, device_pages, host_pages)


class Broken(CpuDevice):
    """A device with one fault."""


class ShortBuffer(Broken):
    async def host_buffer(self, nbytes: int) -> torch.Tensor:
        return (await super().host_buffer(nbytes))[: nbytes - 1]


class LeavesOutTheLastPage(Broken):
    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        super().host_to_device(plan, [])  # so that the plan is checked
        return super().host_to_device(changed(plan, plan.device_pages[:-1], plan.host_pages[:-1]), after)


class SwapsPages(Broken):
    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        if len(plan.device_pages) > 1:
            plan = changed(plan, plan.device_pages[::-1].copy(), plan.host_pages)
        return super().device_to_host(plan, after)


class ClampsPages(Broken):
    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        most = plan.kv.num_pages - 1
        return super().host_to_device(
            changed(plan, np.clip(plan.device_pages, 0, most), plan.host_pages), after
        )


class ReversesTheOrder(Broken):
    """Keeps copies back, and does the last one first."""

    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        if len(plan.host_pages) and plan.host_pages[0] == 15:
            plan = changed(plan, plan.device_pages, (plan.host_pages + 1) % 16)
        return super().host_to_device(plan, after)


class IgnoresFences(Broken):
    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        return super().host_to_device(plan, [])


class IgnoresEngineFences(Broken):
    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        return super().device_to_host(
            plan, [fence for fence in after if isinstance(fence, ThreadFence | LayerFence)]
        )


class OneFence(Broken):
    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        return super().host_to_device(plan, after)[-1:]


class PassesEarly(Broken):
    """Layer fences that are those of the first layer, or of nothing."""

    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        super().device_to_host(plan, after)
        done = CopyProgress(1, "nothing", object(), 0)
        done.advance()
        return LayerFence(done, 0)


class OneLane(Broken):
    """Both directions wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self._to_host = self._to_device


class HidesFailures(Broken):
    async def wait(self, fence: Fence) -> None:
        try:
            await super().wait(fence)
        except RuntimeError:
            return


class PassesFailedFences(Broken):
    """A copy behind a fence that failed moves all the same."""

    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        class Quiet:
            def __init__(self, fence: Fence) -> None:
                self.passed = fence.passed
                self._block = fence.block

            def block(self, stream: object | None = None) -> None:
                try:
                    self._block()
                except RuntimeError:
                    return

        return super().host_to_device(plan, [Quiet(fence) for fence in after])


class NeedsTheLoop(Broken):
    """Fences that pass on the loop only."""

    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        fences = super().host_to_device(plan, after)
        loop = asyncio.get_running_loop()
        late = CopyProgress(plan.kv.num_layers, "late", object(), 0)

        def done() -> None:
            if fences[-1].error is not None:
                late.fail(fences[-1].error)
            while not late.is_over:
                late.advance()

        fences[-1].when_settled(lambda: loop.call_soon_threadsafe(done))  # type: ignore[arg-type, return-value]
        return [LayerFence(late, layer) for layer in range(plan.kv.num_layers)]


class CancelsWithTheWait(Broken):
    """Who stops waiting takes the wait of the others along."""

    def __init__(self) -> None:
        super().__init__()
        self._waits: dict[int, asyncio.Task[None]] = {}

    async def wait(self, fence: Fence) -> None:
        wait = self._waits.setdefault(id(fence), asyncio.create_task(super().wait(fence)))
        await wait


class NeverCloses(Broken):
    async def aclose(self) -> None:
        self._own_threads.shutdown()  # type: ignore[union-attr]


class BlocksForEver(Broken):
    def fence(self, stream: object | None = None) -> Fence:
        return ThreadFence(asyncio.get_running_loop())


class WaitsForTheFirstFence(Broken):
    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        return super().host_to_device(plan, after[:1])


class IgnoresCombinedFences(Broken):
    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        return super().device_to_host(plan, [fence for fence in after if not isinstance(fence, AllFences)])


class WaitsForTheFirstPart(Broken):
    async def wait(self, fence: Fence) -> None:
        await super().wait(fence.fences[0] if isinstance(fence, AllFences) else fence)


class Orders(LayerFence):
    """What a fence of a copy is to who does not ask whether the copy failed."""

    @property
    def error(self) -> None:
        return None


class ForgetsThatCopiesFail(Broken):
    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        quiet = [
            Orders(fence.progress, fence.layer) if isinstance(fence, LayerFence) else fence for fence in after
        ]
        return super().device_to_host(plan, quiet)


class RaisesWhatItOnlyOrders(Broken):
    """The failure comes along with the place."""

    class Raises(LayerFence):
        def ordering(self) -> LayerFence:
            return self

    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        fence = super().device_to_host(plan, after)
        return self.Raises(fence.progress, fence.layer)


class SharesOneFence(Broken):
    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        return [super().host_to_device(plan, after)[-1]] * plan.kv.num_layers


class CountsDown(Broken):
    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        fences = super().host_to_device(plan, after)
        for fence in fences:
            fence.sequence = -fence.sequence
        return fences


class GivesOnePlace(Broken):
    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        fence = super().device_to_host(plan, after)
        fence.sequence = 0
        return fence


class ClaimsOneStream(Broken):
    """Both directions count as one, each for itself."""

    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        fences = super().host_to_device(plan, after)
        for fence in fences:
            fence.stream = self
        return fences

    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        fence = super().device_to_host(plan, after)
        fence.stream = self
        return fence


class PassesHeldCopies(Broken):
    """Copies that wait are passed by others, which claim places behind them."""

    def __init__(self) -> None:
        super().__init__()
        self._others = CpuDevice()
        self._next = 0

    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        device = self._others if after else super()
        fences = device.host_to_device(plan, after)
        for fence in fences:
            fence.stream, fence.sequence = self, self._next
            self._next += 1
        return fences

    async def aclose(self) -> None:
        await self._others.aclose()
        await super().aclose()


class Unrecorded(LayerFence):
    @property
    def is_recorded(self) -> bool:
        return self.passed()


class SaysThatAllIsRecorded(Broken):
    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        fence = super().device_to_host(plan, after)
        return Unrecorded(fence.progress, fence.layer)

    async def recorded(self, fences: Sequence[Fence]) -> None:
        return


class SubmitWaits(Broken):
    """Copies in the calling thread, what has nothing to wait for."""

    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
        fences = super().host_to_device(plan, after)
        if all(fence.passed() for fence in after):
            fences[-1].block()
        return fences


class SubmitWaitsForFences(Broken):
    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> LayerFence:
        for fence in after:
            fence.block()
        return super().device_to_host(plan, after)


CAUGHT_BY: dict[type[Broken], str] = {
    ShortBuffer: "gives_host_buffers",
    LeavesOutTheLastPage: "moves_what_was_there_when_it_was_submitted_for",
    SwapsPages: "moves_every_layout_and_shape",
    ClampsPages: "refuses_wrong_plans",
    ReversesTheOrder: "moves_in_the_order_of_submit",
    IgnoresFences: "stays_behind_a_thread_fence",
    IgnoresEngineFences: "stays_behind_a_fence_of_the_engine",
    OneFence: "gives_a_fence_for_each_layer",
    PassesEarly: "stays_behind_a_thread_fence",
    OneLane: "keeps_its_directions_apart",
    HidesFailures: "fails_behind_a_failed_fence",
    PassesFailedFences: "fails_behind_a_failed_fence",
    NeedsTheLoop: "chains_copies_without_the_loop",
    CancelsWithTheWait: "goes_on_when_a_wait_is_cancelled",
    NeverCloses: "closes_for_good",
    BlocksForEver: "waits_for_any_fence",
    WaitsForTheFirstFence: "stays_behind_every_fence",
    IgnoresCombinedFences: "stays_behind_combined_fences",
    WaitsForTheFirstPart: "stays_behind_combined_fences",
    ForgetsThatCopiesFail: "fails_behind_a_copy_that_failed",
    RaisesWhatItOnlyOrders: "orders_behind_a_failure",
    SharesOneFence: "gives_a_fence_for_each_layer",
    CountsDown: "gives_places_that_ascend",
    GivesOnePlace: "gives_places_that_ascend",
    ClaimsOneStream: "has_streams_for_each_direction",
    PassesHeldCopies: "passes_in_the_order_of_places",
    SaysThatAllIsRecorded: "has_recorded_when_it_says_so",
    SubmitWaits: "submits_without_waiting",
    SubmitWaitsForFences: "submits_without_waiting",
}


@pytest.mark.parametrize("broken", CAUGHT_BY, ids=lambda broken: broken.__name__)
def test_a_broken_device_is_caught(broken: type[Broken], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check of its name, which says what is wrong."""
    monkeypatch.setattr("hicache_async.testing.device_exam.LIMIT_S", 2.0)
    monkeypatch.setattr("hicache_async.testing._device_fences.BLOCK_S", 0.5)
    with pytest.raises(AssertionError, match=CAUGHT_BY[broken]):
        check_device(broken, only=[CAUGHT_BY[broken]])


@pytest.mark.parametrize("broken", [SubmitWaits, SubmitWaitsForFences], ids=lambda broken: broken.__name__)
def test_a_submit_that_waits_ends_the_exam(broken: type[Broken], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked first, and nothing else then: a copy of another check would hold the loop for ever."""
    monkeypatch.setattr("hicache_async.testing._device_fences.BLOCK_S", 0.5)
    with pytest.raises(AssertionError, match="a submit did not return") as caught:
        check_device(broken)
    assert str(caught.value).startswith("1 of ")


def test_a_report_names_every_fault() -> None:
    """One device, several faults: each check that fails is told with its error."""

    class Refuses(CpuDevice):
        def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[LayerFence]:
            raise InvariantError("not today")

    with pytest.raises(AssertionError, match="not today") as caught:
        check_device(Refuses)
    assert "waits_for_any_fence" not in str(caught.value)
    assert "moves_every_dtype: InvariantError: not today" in str(caught.value)


def test_an_unknown_check_is_refused() -> None:
    """By name, with those there are."""
    with pytest.raises(ConfigError, match="moves_every_dtype"):
        check_device(CpuDevice, only=["speed"])
