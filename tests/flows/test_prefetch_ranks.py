"""Prefetch among ranks: one vote for each, whatever becomes of it, and nothing attached that was not agreed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from hicache_async import ConsensusError, PrefetchPolicy, PrefixLease, State, Stop
from hicache_async.abc import Store
from hicache_async.errors import LeaseError
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HeldStore
from hicache_async.testing.local_ranks import LocalRanks
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, driven, turns
from tests.flows.stores import RecordingStore

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

BEST_EFFORT = PrefetchPolicy.best_effort()


@dataclass(eq=False)
class OtherRanks:
    """The rest of a group of two, as the test has it: nothing is settled before :meth:`settle`.

    Attributes:
        cast_votes: ticket and vote of every vote of this rank, in that order.
    """

    rank: int = 0
    size: int = 2
    cast_votes: list[tuple[bytes, tuple[int, ...]]] = field(default_factory=list)
    _open: dict[bytes, asyncio.Future[Sequence[int]]] = field(default_factory=dict)
    _on_loss: Callable[[ConsensusError], None] | None = None
    _lost: ConsensusError | None = None

    def cast(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> None:
        self.cast_votes.append((ticket, tuple(vote)))

    async def agree(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> Sequence[int]:
        self.cast(ticket, vote)
        if self._lost is not None:
            raise self._lost
        settled = self._open[ticket] = asyncio.get_running_loop().create_future()
        return await settled

    def settle(self, tokens: int) -> None:
        """Settle the oldest open ticket as if another rank had voted ``tokens``."""
        ticket = next(iter(self._open))
        vote = next(vote for each, vote in self.cast_votes if each == ticket)
        self._open.pop(ticket).set_result([min(tokens, each) for each in vote])

    def plans(self, lease: PrefixLease) -> list[int]:
        """Return what this rank voted for the prefetch of a lease."""
        ticket = lease._ticket(b"plan")
        return [vote[0] for each, vote in self.cast_votes if each == ticket]

    @property
    def num_open(self) -> int:
        return len(self._open)

    def lose(self) -> None:
        """Lose the other rank."""
        self._lost = ConsensusError("rank 1 was lost")
        assert self._on_loss is not None
        self._on_loss(self._lost)
        for settled in self._open.values():
            settled.set_exception(self._lost)
        self._open.clear()

    def when_lost(self, callback: Callable[[ConsensusError], None]) -> None:
        self._on_loss = callback

    async def aclose(self) -> None:
        for settled in self._open.values():
            settled.cancel()


async def with_ranks(
    open_cache: Opener, store: Store | None = None, **options: object
) -> tuple[Rig, OtherRanks]:
    """Open a cache of which the test is the other rank."""
    rig = await open_cache(store=store, **options)  # type: ignore[arg-type]
    ranks = OtherRanks()
    ranks.when_lost(rig.ctx.lose_ranks)
    rig.ctx.ranks = ranks
    return rig, ranks


async def test_a_shorter_peer(open_cache: Opener) -> None:
    """What another rank does not have is not fetched, and counted as such."""
    rig, ranks = await with_ranks(open_cache, store := RecordingStore(MemoryStore()))
    await rig.put_in_store("abcdef")
    with rig.lease("abcdef") as lease:
        prefetch = lease.start_prefetch(BEST_EFFORT)
        await turns()
        assert ranks.plans(lease) == [24]
        assert store.keys["read"] == []
        ranks.settle(9)
        result = await prefetch.settled()
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == (8, 8, Stop.PEER_SHORTER)
    assert rig.unfulfilled() == {Stop.PEER_SHORTER: 16}
    assert rig.where("abcdef") == "hh"


async def test_a_peer_without_anything(open_cache: Opener) -> None:
    """A peer that has less than is local here leaves nothing to fetch."""
    rig, ranks = await with_ranks(open_cache, MemoryStore())
    await rig.put_in_store("abcdef")
    with rig.lease("abcdef") as lease:
        prefetch = lease.start_prefetch(BEST_EFFORT)
        await turns()
        ranks.settle(0)
        result = await prefetch.settled()
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == (0, 0, Stop.PEER_SHORTER)
    assert rig.unfulfilled() == {Stop.PEER_SHORTER: 24}


async def test_votes_are_lengths_from_the_root(open_cache: Opener) -> None:
    """What is local already counts in the vote, and a peer that lacks it cuts what is fetched, not what is local."""
    rig, ranks = await with_ranks(open_cache, MemoryStore())
    await rig.put_in_store("abcdef")
    with rig.lease("ab") as lease:
        prefetch = lease.start_prefetch(BEST_EFFORT)
        await turns()
        ranks.settle(8)
        await prefetch.settled()
    with rig.lease("abcdef") as lease:
        prefetch = lease.start_prefetch(BEST_EFFORT)
        await turns()
        assert ranks.plans(lease) == [24]
        ranks.settle(12)
        result = await prefetch.settled()
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == (4, 4, Stop.PEER_SHORTER)
        assert prefetch.start_page == 2


# One vote for each


async def nothing_missing(open_cache: Opener) -> tuple[Rig, OtherRanks, int]:
    rig, ranks = await with_ranks(open_cache, MemoryStore())
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        prefetch = lease.start_prefetch(BEST_EFFORT)
        await turns()
        ranks.settle(16)
        await prefetch.settled()
    return rig, ranks, 16


async def nothing_stored(open_cache: Opener) -> tuple[Rig, OtherRanks, int]:
    return *await with_ranks(open_cache, MemoryStore()), 0


async def no_store(open_cache: Opener) -> tuple[Rig, OtherRanks, int]:
    return *await with_ranks(open_cache), 0


async def too_little_missing(open_cache: Opener) -> tuple[Rig, OtherRanks, int]:
    return *await with_ranks(open_cache, MemoryStore(), prefetch_threshold_tokens=17), 0


async def store_that_raises(open_cache: Opener) -> tuple[Rig, OtherRanks, int]:
    store = FlakyStore(MemoryStore(), "count_prefix", error=OSError("gone"), at=None)
    return *await with_ranks(open_cache, store), 0


async def failed_cache(open_cache: Opener) -> tuple[Rig, OtherRanks, int]:
    rig, ranks = await with_ranks(open_cache, MemoryStore())
    await rig.put_in_store("abcd")
    rig.ctx.fail(ValueError("a bug"))
    return rig, ranks, 0


CAUSES = [nothing_missing, nothing_stored, no_store, too_little_missing, store_that_raises, failed_cache]
Cause = Callable[[Opener], Awaitable[tuple[Rig, OtherRanks, int]]]


@pytest.mark.parametrize("cause", CAUSES)
async def test_who_has_nothing_to_fetch_votes_all_the_same(open_cache: Opener, cause: Cause) -> None:
    """Whatever keeps this rank from looking or from finding, it votes for what it has, once, and waits for nobody."""
    rig, ranks, tokens = await cause(open_cache)
    with rig.lease("abcd") as lease:
        result = await driven(lease.prefetch(), rig.clock)
        assert (result.hit_tokens, result.fetched_tokens) == (0, 0)
        assert ranks.plans(lease) == [tokens]


async def test_a_prompt_without_a_page_is_not_voted_on(open_cache: Opener) -> None:
    """What is the same on every rank needs no vote."""
    rig, ranks = await with_ranks(open_cache, MemoryStore())
    with rig.lease(list(range(PAGE_TOKENS))) as lease:
        assert (await lease.prefetch()).stop is Stop.NOTHING_MISSING
        assert ranks.cast_votes == []


async def test_found_below_the_threshold(open_cache: Opener) -> None:
    """A hit too small to fetch here is voted for, and agreed upon, like any other."""
    rig, ranks = await with_ranks(open_cache, MemoryStore(), prefetch_threshold_tokens=9)
    await rig.put_in_store("ab")
    with rig.lease("abcd") as lease:
        prefetch = lease.start_prefetch()
        await turns()
        ranks.settle(100)
        result = await prefetch.settled()
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == (8, 0, Stop.BELOW_THRESHOLD)
        assert ranks.plans(lease) == [8]


# Ending early


async def stage(open_cache: Opener, name: str) -> tuple[Rig, OtherRanks, HeldStore]:
    """Return a cache in which the next prefetch of a prompt of four stored pages will stay in a stage."""
    store = HeldStore(MemoryStore(), {"count_prefix"} if name != "agreeing" else ())
    rig, ranks = await with_ranks(open_cache, store, max_prefetches_in_flight=1, store_batch_pages=2)
    await rig.put_in_store("abcd")
    if name == "queued":
        rig.lease("zz").start_prefetch(BEST_EFFORT)
        await store.arrived()
    return rig, ranks, store


@pytest.mark.parametrize("way", ["stop", "deadline", "cancel", "release"])
@pytest.mark.parametrize(
    ("name", "tokens"), [("queued", 0), ("looking", 0), ("looking further", 8), ("agreeing", 16)]
)
async def test_one_that_ends_early_has_voted(open_cache: Opener, name: str, tokens: int, way: str) -> None:
    """Whenever and however it ends before the agreement it ends at once, its vote stands, and nothing is attached."""
    rig, ranks, store = await stage(open_cache, name)
    lease = rig.lease("abcd")
    waiting = asyncio.create_task(lease.prefetch(PrefetchPolicy.timeout(base_s=1, per_ki_token_s=0)))
    await turns()
    if name == "looking further":
        store.let_in("count_prefix")
        await turns()
    prefetch = lease._prefetch
    assert prefetch is not None
    if way == "stop":
        prefetch.stop()
    elif way == "deadline":
        rig.clock.advance(1)
    elif way == "cancel":
        waiting.cancel()
    else:
        lease.release()
    await turns(3)
    assert waiting.done()
    assert ranks.plans(lease) == [tokens]
    result = await prefetch.settled()
    assert (result.hit_tokens, result.fetched_tokens) == (tokens, 0)
    assert result.stop is (Stop.DEADLINE if way == "deadline" else Stop.STOPPED)
    store.open()
    if ranks.num_open:
        ranks.settle(100)
    await turns()
    assert rig.where("abcd") == ""
    assert ranks.plans(lease) == [tokens]
    rig.cache.audit()
    for each in list(rig.cache._leases):
        each.release()


async def test_an_agreement_that_never_comes_keeps_nobody(open_cache: Opener) -> None:
    """A prefetch whose peers never answer holds no slot: others look, and agree, meanwhile."""
    rig, ranks = await with_ranks(open_cache, MemoryStore(), max_prefetches_in_flight=1)
    leases = [rig.lease(letters) for letters in ("ab", "cd", "ef")]
    for letters in ("ab", "cd", "ef"):
        await rig.put_in_store(letters)
    prefetches = [lease.start_prefetch(BEST_EFFORT) for lease in leases]
    await turns()
    assert ranks.num_open == 3
    for prefetch in prefetches:
        ranks.settle(8)
        assert (await prefetch.settled()).fetched_tokens == 8
    for lease in leases:
        lease.release()


# A lost rank


async def test_a_lost_rank_is_told_to_those_who_wait(open_cache: Opener) -> None:
    """Who waits for the agreement, or has not voted yet, hears ConsensusError; the cache has not failed."""
    store = HeldStore(MemoryStore(), set())
    rig, ranks = await with_ranks(open_cache, store)
    await rig.put_in_store("abcd")
    await rig.put_in_store("wxyz")
    agreeing, looking = rig.lease("abcd"), rig.lease("wxyz")
    waiting = [asyncio.create_task(agreeing.prefetch(BEST_EFFORT))]
    await turns()
    assert ranks.num_open == 1
    store.hold("count_prefix")
    waiting.append(asyncio.create_task(looking.prefetch(BEST_EFFORT)))
    await turns()
    ranks.lose()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ConsensusError, ConsensusError]
    assert rig.cache.state is State.NO_REUSE
    with rig.lease("abcd") as later:
        result = await later.prefetch()
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == (0, 0, Stop.DETACHED)
        assert ranks.plans(later) == []
    store.open()
    agreeing.release()
    looking.release()
    await turns()
    rig.cache.audit()
    with pytest.raises(LeaseError):
        looking.start_prefetch()


# Real votes


async def test_a_group_whose_ranks_admit_in_different_orders(open_cache: Opener) -> None:
    """With one slot each and requests in opposite orders two ranks agree on all of them, and on the least."""
    ranks = LocalRanks.group(2)
    rigs = []
    for rank in ranks:
        rig = await open_cache(store=MemoryStore(), max_prefetches_in_flight=1, host_pages=64)
        rig.ctx.ranks = rank
        rigs.append(rig)
    prompts = [chr(ord("A") + 4 * number) * 1 + chr(ord("B") + 4 * number) for number in range(8)]
    for number, letters in enumerate(prompts):
        await rigs[0].put_in_store(letters)
        await rigs[1].put_in_store(letters, [0] if number % 2 else None)
    leases = [
        {letters: rig.lease(letters, letters) for letters in prompts[:: 1 if rig is rigs[0] else -1]}
        for rig in rigs
    ]
    results = await asyncio.gather(
        *(lease.prefetch(BEST_EFFORT) for mine in leases for lease in mine.values())
    )
    for rig, mine in zip(rigs, leases, strict=True):
        for number, letters in enumerate(prompts):
            assert rig.where(letters) == ("h" if number % 2 else "hh")
            mine[letters].release()
    assert {result.stop for result in results} == {Stop.COMPLETE, Stop.PEER_SHORTER}
    for rank in ranks:
        await rank.aclose()
