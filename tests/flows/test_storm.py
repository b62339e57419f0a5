"""Many requests at once on a moody store and a slow device, hung up at any time: no foreign byte, no lost page."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from hicache_async import CapacityError, HostFence, PrefetchPolicy, PrefixLease, State
from hicache_async.abc import Store
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import StoreWrapper
from hicache_async.testing.golden import check_page, fill_page
from hicache_async.testing.virtual_device import VirtualDevice
from hicache_async.types import StopToken
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, turns

pytestmark = pytest.mark.asyncio


class ForwardError(Exception):
    """A forward went wrong."""


class MoodyStore(StoreWrapper):
    """Raise, answer nonsense, dawdle or hang, by chance."""

    def __init__(self, inner: Store, rng: random.Random, mood: float) -> None:
        super().__init__(inner)
        self._rng = rng
        self._mood = mood
        self._calm = asyncio.Event()

    def calm_down(self) -> None:
        """Let what hangs go on, and do everything right from now on."""
        self._mood = 0
        self._calm.set()

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)
        if self._rng.random() >= self._mood:
            return await call()
        match self._rng.randrange(4):
            case 0:
                raise OSError(f"no {verb} today")
            case 1:
                return cast("int", self._rng.choice([-1, None, 10**9, True]))
            case 2:
                return max(0, await call() - 1)
            case _:
                stop.job_started()
                try:
                    await self._calm.wait()
                    return await call()
                finally:
                    stop.job_ended()


class Storm:
    """An engine whose forwards run on while requests come and go."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.rig = rig
        self.rng = rng
        self.forwards: list[asyncio.Task[None]] = []

    async def request(self, letters: str) -> None:
        """One request, with everything an engine may do; ends by itself or by a cancel."""
        rng = self.rng
        with self.rig.lease(letters, whole=rng.random() < 0.2) as lease:
            fences: list[HostFence] = []
            try:
                await self.bring(lease)
                for _ in range(rng.randrange(1, 4)):
                    await self.step(lease, fences)
                    if rng.random() < 0.5:
                        lease.extend([rng.randrange(3) for _ in range(rng.randrange(1, 6))])
            except CapacityError:
                pass
            finally:
                lease.release(after=fences[-1] if fences else None, offload=rng.random() < 0.3)

    async def bring(self, lease: PrefixLease) -> None:
        """Prefetch, perhaps, and load."""
        rng = self.rng
        if rng.random() < 0.7:
            policy = rng.choice([PrefetchPolicy.best_effort(), PrefetchPolicy.wait_complete(), None])
            prefetch = lease.start_prefetch(policy)
            if rng.random() < 0.3:
                await turns(rng.randrange(10))
                prefetch.stop()
            await prefetch.settled()
        total = rng.choice([None, None, 0, lease.num_tokens + 9])
        loading = await lease.load(total, wait_pending=rng.random() < 0.7, priority=rng.randrange(3))
        await loading.finished()
        self.rig.check(lease, loading.tokens)
        assert lease.pages.tolist() == loading.pages.tolist()

    async def step(self, lease: PrefixLease, fences: list[HostFence]) -> None:
        """Start a forward over all tokens, and commit behind it; it runs on after this returns.

        Forwards of one request run in order, as on a stream: the fence of the last is behind them all.
        """
        rng, holding = self.rng, lease._holding
        start = len(lease.pages)
        allocation = await lease.allocate(lease.num_tokens)
        fence = self.rig.cache.host_fence()
        num_pages = lease.num_tokens // PAGE_TOKENS
        hashes, pages = list(holding.hashes(num_pages)[:num_pages]), lease.pages.tolist()
        if allocation.after is not None:
            while not allocation.after.passed():  # noqa: ASYNC110 - the storm moves the device
                await asyncio.sleep(0)
        first = min(start, holding.committed_pages)
        before = fences[-1] if fences else None
        fences.append(fence)
        forward = self.forward(before, fence, pages[:num_pages], hashes, first, rng.randrange(1, 8))
        task = asyncio.get_running_loop().create_task(forward)
        self.forwards.append(task)
        for _ in range(rng.randrange(1, 3)):
            lease.commit(rng.choice([lease.num_tokens, lease.num_tokens // 2]), after=fence)
        if rng.random() < 0.5:
            while not fence.passed():  # noqa: ASYNC110 - as an engine that waits for its step
                await asyncio.sleep(0)

    async def forward(
        self,
        before: HostFence | None,
        fence: HostFence,
        pages: list[int],
        hashes: list[bytes],
        first: int,
        num_turns: int,
    ) -> None:
        """Read the cached pages and write the others, over some turns, as a thread would; then set the fence."""
        rig, rng = self.rig, self.rng
        while before is not None and not before.passed():  # noqa: ASYNC110 - the storm moves the forwards
            await asyncio.sleep(0)
        try:
            for page in range(first, len(pages)):
                fill_page(rig.kv, pages[page], hashes[page])
            for _ in range(num_turns):
                for page, page_hash in zip(pages, hashes, strict=True):
                    check_page(rig.kv, page, page_hash)
                await asyncio.sleep(0)
            if rng.random() < 0.1:
                fence.fail(ForwardError())
        finally:
            fence.set()


def prompt(rng: random.Random) -> str:
    """Return one of the prompts of a small tree."""
    return "".join(rng.choice("ab") for _ in range(rng.randrange(1, 8)))


async def rage(storm: Storm, device: VirtualDevice) -> None:
    """Start requests, move the device and the time, hang up; until nothing is left to happen."""
    rng, rig = storm.rng, storm.rig
    tasks = [asyncio.create_task(storm.request(prompt(rng))) for _ in range(rng.randrange(4, 14))]
    running = tasks
    for _ in range(4000):
        running = [task for task in [*tasks, *storm.forwards] if not task.done()]
        if not running:
            break
        await turns(rng.randrange(1, 6))
        device.advance()
        if rng.random() < 0.05:
            rig.clock.advance(rng.choice([0.05, 1, 6]))
        if rng.random() < 0.02:
            rng.choice(tasks).cancel()
        if rng.random() < 0.3:
            rig.cache.audit()
    assert not running, "something waits that nothing will end"
    await asyncio.gather(*storm.forwards)
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if outcome is not None and not isinstance(outcome, asyncio.CancelledError | ForwardError):
            raise outcome
    assert rig.cache.state is State.OPEN, rig.ctx.failure


async def storm_of(open_cache: Opener, seed: int) -> None:
    """Let one storm rage, and see that everything is in its place afterwards."""
    rng = random.Random(seed)
    store = MoodyStore(MemoryStore(), rng, rng.choice([0, 0.1, 0.4]))
    device = VirtualDevice(auto=rng.random() < 0.3)
    policy = rng.choice(["write_through", "write_through_selective", "write_back"])
    rig = await open_cache(
        store=store,
        device=device,
        device_pages=rng.choice([8, 12, 24]),
        host_pages=rng.choice([4, 12, 40]),
        write_policy=policy,
        host_layout=rng.choice(["page_first", "page_first", "layer_first"]),
        store_batch_pages=rng.choice([1, 3, 128]),
        max_loads_in_flight=rng.choice([1, 3]),
        max_offloads_in_flight=rng.choice([1, 64]),
        prefetch_capacity_fraction=rng.choice([0.3, 1.0]),
    )
    for _ in range(rng.randrange(6)):  # what another process has left there
        await rig.put_in_store(prompt(rng))
    storm = Storm(rig, rng)
    await rage(storm, device)
    device.auto = True
    device.advance_all()
    store.calm_down()
    await rig.cache._movers.finish()  # of a read that nobody waits for, too
    await turns()
    rig.cache.audit()
    stats = rig.cache.stats()
    assert (stats.leases, stats.hops, stats.device.leased, stats.device.in_hops) == (0, 0, 0, 0)
    assert (stats.host.in_hops, rig.ctx.prefetch_pages, len(rig.ctx.announcements)) == (0, 0, 0)
    for _ in range(6):
        letters = prompt(rng)
        await rig.serve(letters)
        await rig.cache.admin.flush()
        await rig.check_everywhere(letters)
        rig.cache.audit()


@pytest.mark.parametrize("seed", range(40))
async def test_a_storm(open_cache: Opener, seed: int) -> None:
    """Whatever happens, every page read is the right one, every page comes back, and the cache serves on."""
    await storm_of(open_cache, seed)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(1000, 2000))
async def test_many_storms(open_cache: Opener, seed: int) -> None:
    """As above, a thousand times."""
    await storm_of(open_cache, seed)
