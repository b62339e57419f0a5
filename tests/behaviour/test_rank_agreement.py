"""Ranks agree on outcomes: one that has less, nothing, or a store that hangs makes a shorter prefix for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from hicache_async import CacheConfig, HiCache, PrefetchPolicy, PrefixLease, StepGrant
from hicache_async.abc import Store
from hicache_async.errors import ConsensusError
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HangingStore, LyingStore
from hicache_async.testing.local_ranks import LocalRanks
from hicache_async.testing.manual import ManualClock
from hicache_async.testing.virtual_device import VirtualDevice
from hicache_async.types import State
from tests.flows.rig import PAGE_TOKENS, PoisoningFreeList, Rig, driven, make_kv, turns

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

ROOMY = 24


@dataclass(eq=False)
class Group:
    """Caches of one group, on one loop and one clock."""

    ranks: list[LocalRanks]
    clock: ManualClock
    rigs: list[Rig] = field(default_factory=list)

    async def open(
        self, stack: AsyncExitStack, device_pages: int, store: Store | None, options: dict[str, object]
    ) -> None:
        """Open the cache of the next rank."""
        rank = self.ranks[len(self.rigs)]
        kv, device = make_kv(device_pages), VirtualDevice(auto=True)
        defaults: dict[str, object] = {
            "page_size": PAGE_TOKENS,
            "host_bytes": 32 * kv.page_nbytes,
            "host_reserve_bytes": 0,
            "allow_small_host": True,
            "write_policy": "write_through",
            "prefetch_threshold_tokens": 0,
            "prefetch_capacity_fraction": 1.0,
            "close_timeout_s": 2.0,
            "tp_rank": rank.rank,
            "tp_size": rank.size,
            "ranks_on_host": 1,
        }
        config = CacheConfig.from_mapping({**defaults, **options})
        pool = PoisoningFreeList(kv, kv.num_pages)
        opening = HiCache.open(
            config, kv=kv, device=device, store=store, ranks=rank, clock=self.clock, device_pool=pool
        )
        cache = await stack.enter_async_context(opening)
        self.rigs.append(Rig(cache, kv, device, store, self.clock))

    async def step(self, num_pages: int = 0) -> list[StepGrant]:
        """Begin a step on every rank."""
        beginning = [rig.cache.begin_step(num_pages) for rig in self.rigs]
        return await driven(asyncio.gather(*beginning), self.clock, 0.1)

    def lease(self, letters: str, name: str) -> list[PrefixLease]:
        """Start the same request on every rank."""
        return [rig.lease(letters, name) for rig in self.rigs]

    async def fill(self, letters: str, stored: Sequence[int]) -> None:
        """Put the first pages of a prompt into the stores, on each rank as many as ``stored`` says."""
        for rig, num_pages in zip(self.rigs, stored, strict=True):
            await rig.put_in_store(letters, range(num_pages))

    def audit(self) -> None:
        """Audit every cache."""
        for rig in self.rigs:
            rig.cache.audit()


Opening = Callable[..., Awaitable[Group]]


@pytest_asyncio.fixture
async def open_group() -> AsyncIterator[Opening]:
    """Open groups of caches that are closed, and audited, at the end."""
    async with AsyncExitStack() as stack:

        async def open_all(
            device_pages: Sequence[int], stores: Sequence[Store | None] = (), **options: object
        ) -> Group:
            clock = ManualClock()
            group = Group(LocalRanks.group(len(device_pages), clock=clock), clock)
            for rank in group.ranks:
                stack.push_async_callback(rank.aclose)
            for at, num_pages in enumerate(device_pages):
                store = stores[at] if stores else MemoryStore()
                await group.open(stack, num_pages, store, options)
            stack.callback(group.audit)
            return group

        yield open_all


async def bring(leases: Sequence[PrefixLease], policy: PrefetchPolicy | None = None) -> list[int]:
    """Prefetch and load on every rank at once; returns the agreed lengths."""

    async def one(lease: PrefixLease) -> int:
        await lease.prefetch(policy)
        return (await lease.load()).tokens

    return list(await asyncio.gather(*map(one, leases)))


async def test_less_room_on_one_rank_makes_no_fewer_votes(open_group: Opening) -> None:
    """A rank whose device is nearly full votes for every request that the others vote for, and all agree."""
    group = await open_group([ROOMY, ROOMY, 5, ROOMY])
    await group.fill("abcdefgh", [8, 8, 8, 8])
    lengths = []
    waiting = []
    for number, letters in enumerate(("abcd", "abcdef", "abcdefgh", "abxy")):
        leases = group.lease(letters, f"request {number}")
        waiting += leases
        lengths.append(await driven(bring(leases), group.clock, 0.1))
    assert all(len(set(each)) == 1 for each in lengths)
    assert lengths[0] == [4 * PAGE_TOKENS] * 4
    assert lengths[2][0] < 8 * PAGE_TOKENS
    grants = await group.step()
    assert [[lease.request_id for lease in grant.loaded] for grant in grants] == [
        [f"request {number}" for number in range(4)]
    ] * 4
    votes = [[ticket for ticket, _ in rank.votes] for rank in group.ranks]
    assert len(votes[0]) == len(set(votes[0])) and [set(each) for each in votes] == [set(votes[0])] * 4
    for lease in waiting:
        lease.release()


async def test_a_rank_with_nothing_to_bring_votes_all_the_same(open_group: Opening) -> None:
    """When one rank has nothing stored and another has all, both calls return at once, with nothing."""
    group = await open_group([ROOMY, ROOMY], [None, MemoryStore()])
    await group.rigs[1].put_in_store("abcd")
    leases = group.lease("abcd", "request")
    bringing = asyncio.ensure_future(bring(leases))
    await turns(300)  # and no time
    assert bringing.done() and bringing.result() == [0, 0]
    assert [grant.loaded for grant in await group.step()] == [(lease,) for lease in leases]
    for lease in leases:
        lease.release()


async def test_room_for_one_page_less_is_less_for_all(open_group: Opening) -> None:
    """Of eight pages that both have, one rank can place seven: both load seven, and no page stays behind."""
    group = await open_group([ROOMY, 7])
    await group.fill("abcdefgh", [8, 8])
    leases = group.lease("abcdefgh", "request")
    assert await driven(bring(leases), group.clock, 0.1) == [7 * PAGE_TOKENS] * 2
    group.audit()
    for rig, lease in zip(group.rigs, leases, strict=True):
        assert len(lease.pages) == 7
        assert rig.cache.stats().device.leased == 0  # loaded pages are the tree's
        rig.check(lease, 7 * PAGE_TOKENS)
        lease.release()
    # What one has on the device already, and the other has not, makes no difference either.
    again = group.lease("abcdefgh", "request")
    assert await driven(bring(again), group.clock, 0.1) == [7 * PAGE_TOKENS] * 2
    for lease in again:
        lease.release()


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "raises"])
async def test_a_store_that_gives_up_on_the_way_costs_all_the_same(open_group: Opening, hangs: bool) -> None:
    """One rank gets two pages, the other one and then no more: both compute from one, at the deadline if it hangs."""
    inner = MemoryStore()
    broken = (
        HangingStore(inner, "read", after_calls=1)
        if hangs
        else FlakyStore(inner, "read", error=RuntimeError("gone"), at={2})
    )
    group = await open_group([ROOMY, ROOMY], [MemoryStore(), broken], store_batch_pages=1)
    await group.fill("ab", [2, 2])
    leases = group.lease("ab", "request")
    policy = PrefetchPolicy.timeout(base_s=0.5, per_ki_token_s=0.0)
    assert await driven(bring(leases, policy), group.clock, 0.1) == [PAGE_TOKENS] * 2
    group.audit()
    assert group.rigs[0].where("ab") == "bh"  # brought for nothing this time, and whole
    assert group.rigs[1].where("ab") == "b"
    assert len(group.ranks[0].results) == len(group.ranks[1].results)
    assert dict(group.ranks[0].results) == dict(group.ranks[1].results)
    grants = await group.step()
    assert [[each.local_tokens for each in grant.loaded] for grant in grants] == [[PAGE_TOKENS]] * 2
    for rig, lease in zip(group.rigs, leases, strict=True):
        rig.check(lease, PAGE_TOKENS)
        lease.release()
    if isinstance(broken, HangingStore):
        broken.release()
        await turns()


async def test_pages_that_vanish_on_one_rank_are_missed_by_all(open_group: Opening) -> None:
    """A store that counts three pages and then has one makes a prefix of one page everywhere."""
    group = await open_group(
        [ROOMY, ROOMY, ROOMY], [MemoryStore(), MemoryStore(), LyingStore(MemoryStore(), {})]
    )
    await group.fill("abc", [3, 3, 1])
    lying = group.rigs[2].store
    assert isinstance(lying, LyingStore)
    lying._answers["count_prefix"] = 3
    leases = group.lease("abc", "request")
    assert await driven(bring(leases), group.clock, 0.1) == [PAGE_TOKENS] * 3
    for lease in leases:
        lease.release()


async def test_a_request_that_ends_before_its_load_keeps_nobody(open_group: Opening) -> None:
    """A client that hangs up between match and load, on every rank, leaves no ticket that somebody waits for."""
    group = await open_group([ROOMY, ROOMY])
    await group.fill("ab", [2, 2])
    mine, other = group.lease("ab", "request")
    bringing = asyncio.ensure_future(bring([mine]))
    await turns()
    other.release()
    assert await driven(bringing, group.clock, 0.1) == [0]
    mine.release()
    assert [grant.loaded for grant in await group.step()] == [(), ()]
    assert not any(
        rig.ctx.tasks - {task for task in rig.ctx.tasks if "backups" in task.get_name()} for rig in group.rigs
    )


@pytest.mark.parametrize("lost", [0, 2])
async def test_a_lost_rank_ends_what_waits_and_all_reuse(open_group: Opening, lost: int) -> None:
    """Survivors raise from load and from one step, and then serve what nothing of before is used for."""
    group = await open_group([ROOMY] * 3)
    await group.fill("ab", [2, 2, 2])
    leases = group.lease("ab", "request")
    assert await driven(bring(leases), group.clock, 0.1) == [2 * PAGE_TOKENS] * 3
    survivors = [at for at in range(3) if at != lost]
    pending = group.lease("abc", "pending")
    loads = [asyncio.ensure_future(bring([pending[at]])) for at in survivors]
    steps = [asyncio.ensure_future(group.rigs[at].cache.begin_step(1)) for at in survivors]
    await turns()
    group.ranks[lost].kill()
    await turns(200)
    for waiting in (*loads, *steps):
        assert waiting.done()
        with pytest.raises(ConsensusError):
            waiting.result()
    for at in survivors:
        rig = group.rigs[at]
        assert rig.cache.state is State.NO_REUSE
        leases[at].release()
        pending[at].release()
        grant = await rig.cache.begin_step(ROOMY)
        assert (grant.num_pages, grant.loaded) == (ROOMY, ())
        await rig.cache.begin_step(0)
        served = await rig.serve("ab")
        assert served.tokens == 0 and served.result is not None and served.result.fetched_tokens == 0
        rig.cache.audit()
    for each in (leases[lost], pending[lost]):
        each.release()
