"""What an explanation foresees is what happens: random states, each explained and then prefetched."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from hicache_async import PrefixLease, Stop, WritePolicy
from hicache_async.abc import Store
from hicache_async.flows.forecast import evictable_host_pages
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HeldStore, StoreWrapper
from hicache_async.types import StopToken, Tier
from tests.flows.explaining import explained, places
from tests.flows.rig import PAGE_NBYTES, Opener, Rig, tokens, turns

pytestmark = pytest.mark.asyncio


class MoodyStore(StoreWrapper):
    """Answer no question while it is ``down``."""

    down = False

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        if self.down and verb == "count_prefix":
            raise OSError("gone")
        return await call()


class World:
    """A cache in the middle of a random history: requests that come and stay, pins, and a store that has holes."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rig: Rig
        self.held: list[PrefixLease] = []

    async def open(self, open_cache: Opener) -> None:
        choice = self.chance.choice
        self.rig = await open_cache(
            device_pages=40,
            host_pages=choice([3, 4, 6, 12]),
            store=self._store(),
            write_policy=choice(list(WritePolicy)),
            prefetch_overflow=choice(["shrink", "refuse"]),
            prefetch_capacity_fraction=choice([0.3, 0.6, 1.0]),
            prefetch_threshold_tokens=choice([0, 0, 7, 9]),
            store_batch_pages=choice([1, 2, 128]),
            host_eviction_policy=choice(["lru", "lfu", "fifo", "priority"]),
            pin_capacity_fraction=1.0,
        )
        for _ in range(12):
            await self.rig.put_in_store(self.prompt())

    def _store(self) -> Store:
        bound = self.chance.choice([None, None, 40 * PAGE_NBYTES])
        store: Store = MemoryStore(bound)
        kind = self.chance.randrange(6)
        if kind <= 1:
            return HeldStore(store, {"write"})
        if kind == 2:
            return MoodyStore(store)
        return store if kind < 5 else StoreWrapper(store)

    def prompt(self) -> str:
        """Return a prompt of few letters, which shares much with the others."""
        return "".join(self.chance.choices("ab", k=self.chance.choice([1, 3, 4, 5, 6])))

    async def step(self) -> None:
        """Let one thing happen, and all that follows from it."""
        if isinstance(self.rig.store, MoodyStore):
            self.rig.store.down = self.chance.random() < 0.5
        letters, kind = self.prompt(), self.chance.randrange(8)
        if kind <= 1:
            await self.rig.serve(letters, prefetch=kind == 1)
        elif kind == 2:
            pages = [page for page in range(len(letters)) if self.chance.random() < 0.8]
            await self.rig.put_in_store(letters, pages)
        elif kind == 3 and len(self.held) < 3:
            lease = self.rig.lease(letters)
            self.held.append(lease)
            await lease.prefetch()
            if self.chance.random() < 0.3:
                await self.rig.run(lease, prefetch=False)
        elif kind == 4 and self.held:
            self.held.pop(self.chance.randrange(len(self.held))).release()
        elif kind == 5:
            self.rig.cache.admin.pin(tokens(letters), ttl_s=1e6)
        elif kind == 6:
            self.rig.cache.admin.unpin(tokens(letters))
        elif kind == 7:
            await self.rig.cache.admin.clear(self.chance.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST]))
        await turns(20)

    async def check_foresight(self) -> Stop:
        """Explain a prompt, serve it as explained, and compare."""
        letters = self.prompt()
        prompt = tokens(letters)[: self.chance.choice([None, -1])]
        explanation = await explained(self.rig, prompt)
        self.rig.cache.audit()
        local = self.rig.where(letters).ljust(len(letters), "-")
        device, host, _ = places(explanation)
        assert device == local.translate(str.maketrans("bdh", "yy-"))
        assert host == local.translate(str.maketrans("bdh", "y-y"))
        with self.rig.lease(prompt) as lease:
            assert lease.device_tokens == explanation.device_tokens
            assert lease.local_tokens == explanation.local_tokens
            result = await lease.prefetch()
        foreseen = (explanation.store_tokens, explanation.fetch_tokens, explanation.prefetch_stop)
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == foreseen
        await turns(20)
        return result.stop

    async def close(self) -> None:
        for lease in self.held:
            lease.release()
        if isinstance(self.rig.store, HeldStore):
            self.rig.store.open()


async def check_worlds(open_cache: Opener, seeds: range) -> Counter[Stop]:
    """Check many worlds; returns how often each reason was met."""
    met: Counter[Stop] = Counter()
    for seed in seeds:
        world = World(seed)
        await world.open(open_cache)
        try:
            for _ in range(12):
                await world.step()
                met[await world.check_foresight()] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            await world.close()
    return met


async def test_the_next_prefetch_ends_as_explained(open_cache: Opener) -> None:
    """In any state the explained match, hit, fetch and reason are those of the request that follows."""
    met = await check_worlds(open_cache, range(40))
    assert set(met) >= {
        Stop.COMPLETE, Stop.NOTHING_MISSING, Stop.NOT_STORED, Stop.BELOW_THRESHOLD, Stop.RATE_LIMITED,
        Stop.NO_HOST_ROOM, Stop.STORE_FAULT,
    }  # fmt: skip


@pytest.mark.stress
@pytest.mark.parametrize("block", range(20))
async def test_the_next_prefetch_ends_as_explained_in_many_states(open_cache: Opener, block: int) -> None:
    """The same, in 2,000 histories more."""
    await check_worlds(open_cache, range(1000 + 100 * block, 1100 + 100 * block))


async def test_what_can_be_evicted_is_what_goes(open_cache: Opener) -> None:
    """The host pages that are said to be evictable, all or as many as asked, are those that an eviction frees."""
    for seed in range(40):
        world = World(seed)
        await world.open(open_cache)
        for _ in range(15):
            await world.step()
        ctx = world.rig.ctx
        free = ctx.host_pool.available(fenced=False)
        evictable = evictable_host_pages(ctx.tree, None, 0, 10**6)
        for enough in range(evictable + 2):
            assert evictable_host_pages(ctx.tree, None, 0, enough) >= min(enough, evictable)
        assert ctx.room.plan_room(Tier.HOST, 10**6).num_pages == free + evictable, f"seed {seed}"
        await world.close()
