"""Announcements: equal cold prompts compute once, whoever hangs up."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from hicache_async import LeaseError, PrefixLease
from hicache_async.core.tokens import token_bytes
from hicache_async.stores.memory import MemoryStore
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, tokens, turns

pytestmark = pytest.mark.asyncio


class Engine:
    """Computes page by page when the test says so, and counts how often each page was computed."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.computed: Counter[int] = Counter()
        self.computing: list[PrefixLease] = []
        self._go = asyncio.Semaphore(0)

    def let_compute(self, num_pages: int) -> None:
        """Let so many more pages be computed, by whoever computes."""
        for _ in range(num_pages):
            self._go.release()

    async def serve(self, letters: str, *, hang_up_after: int | None = None) -> int:
        """Serve one request in chunks of one page; returns how many tokens it found cached."""
        with self.rig.lease(letters) as lease:
            loading = await lease.load()
            self.computing.append(lease)
            await loading.finished()
            self.rig.check(lease, loading.tokens)
            for page in range(loading.tokens // PAGE_TOKENS, len(letters)):
                if hang_up_after is not None and page >= hang_up_after:
                    raise ConnectionError(f"hung up at page {page}")
                await self._go.acquire()
                end = (page + 1) * PAGE_TOKENS
                lease.allocate_nowait(end)
                self.rig.compute(lease, end, start=page * PAGE_TOKENS)
                self.computed[page] += 1
                assert lease.commit(end) == end
            self.rig.check(lease, len(letters) * PAGE_TOKENS)
            return loading.tokens


async def test_equal_cold_prompts_compute_once(open_cache: Opener) -> None:
    """Of 32 equal prompts started together exactly one computes; the others find all of it."""
    rig = await open_cache(store=MemoryStore())
    engine = Engine(rig)
    tasks = [asyncio.create_task(engine.serve("abcdef")) for _ in range(32)]
    await turns()
    assert len(engine.computing) == 1
    assert engine.computing[0].pending_tokens == 0
    engine.let_compute(6)
    assert sorted(await asyncio.gather(*tasks)) == [0] + [24] * 31
    assert engine.computed == dict.fromkeys(range(6), 1)
    assert rig.cache.stats().computed_tokens == 25 + 31
    assert not len(rig.ctx.announcements)


async def test_when_the_owner_hangs_up_one_takes_over(open_cache: Opener) -> None:
    """Half-way through, what was committed is reused and exactly one of the waiters computes the rest."""
    rig = await open_cache()
    engine = Engine(rig)
    owner = asyncio.create_task(engine.serve("abcdef", hang_up_after=3))
    tasks = [asyncio.create_task(engine.serve("abcdef")) for _ in range(31)]
    await turns()
    engine.let_compute(3)
    with pytest.raises(ConnectionError):
        await owner
    await turns()
    assert len(engine.computing) == 2
    engine.let_compute(3)
    assert sorted(await asyncio.gather(*tasks)) == [12] + [24] * 30
    assert engine.computed == dict.fromkeys(range(6), 1)


async def test_every_owner_hangs_up(open_cache: Opener) -> None:
    """However many owners go in turn, there is one at any time and no page is computed twice."""
    rig = await open_cache()
    engine = Engine(rig)
    quitters = [
        asyncio.create_task(engine.serve("abcdef", hang_up_after=page)) for page in (1, 2, 2, 3, 5, 5)
    ]
    last = asyncio.create_task(engine.serve("abcdef"))
    await turns()
    for _ in range(6):
        engine.let_compute(1)
        await turns()
    outcomes = await asyncio.gather(*quitters, return_exceptions=True)
    assert all(isinstance(outcome, ConnectionError) for outcome in outcomes)
    assert await last == 20
    assert engine.computed == dict.fromkeys(range(6), 1)


async def test_an_owner_that_is_cancelled_before_it_computes(open_cache: Opener) -> None:
    """An owner whose task dies with nothing committed hands the whole range on."""
    rig = await open_cache()
    engine = Engine(rig)
    tasks = [asyncio.create_task(engine.serve("abcd")) for _ in range(4)]
    await turns()
    tasks[0].cancel()
    await turns()
    assert len(engine.computing) == 2
    engine.let_compute(4)
    assert sorted(await asyncio.gather(*tasks[1:])) == [0, 16, 16]


async def test_a_waiter_that_is_cancelled_is_not_missed(open_cache: Opener) -> None:
    """A waiter may go at any time; the announcement still wakes the others."""
    rig = await open_cache()
    engine = Engine(rig)
    tasks = [asyncio.create_task(engine.serve("abcd")) for _ in range(4)]
    await turns()
    tasks[1].cancel()
    await turns()
    engine.let_compute(4)
    assert await asyncio.gather(tasks[0], *tasks[2:]) == [0, 16, 16]


async def test_a_waiter_that_was_chosen_may_be_cancelled(open_cache: Opener) -> None:
    """The cancel of who would take over, in the very turn, leaves it to the next."""
    rig = await open_cache()
    engine = Engine(rig)
    tasks = [asyncio.create_task(engine.serve("abcd")) for _ in range(4)]
    await turns()
    engine.computing[0].release()
    tasks[1].cancel()
    engine.let_compute(5)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[0], LeaseError)
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert outcomes[2:] == [0, 16]


async def test_prompts_that_part_wait_for_what_they_share(open_cache: Opener) -> None:
    """A prompt waits only for pages that it needs, and announces the rest itself."""
    rig = await open_cache()
    engine = Engine(rig)
    first = asyncio.create_task(engine.serve("abcd"))
    await turns()
    with rig.lease("abxy") as peeking, rig.lease("wxyz") as other:
        assert peeking.pending_tokens == 8
        assert other.pending_tokens == 0
    second = asyncio.create_task(engine.serve("abxy"))
    third = asyncio.create_task(engine.serve("wxyz"))
    await turns()
    assert [bytes(lease.key.data[:4]) for lease in engine.computing] == [
        token_bytes([ord(letter) * PAGE_TOKENS]) for letter in "aw"
    ]
    engine.let_compute(100)
    assert await asyncio.gather(first, second, third) == [0, 8, 0]
    assert engine.computed == {0: 2, 1: 2, 2: 3, 3: 3}


async def test_without_waiting_both_compute(open_cache: Opener) -> None:
    """With wait_pending=False a duplicate is computed; its pages stay private and go at release."""
    rig = await open_cache()
    with rig.lease("abcd") as first, rig.lease("abcd") as second:
        one = await first.load()
        two = await second.load(wait_pending=False)
        assert (one.tokens, two.tokens) == (0, 0)
        assert second.pending_tokens == 16
        for lease, loading in ((first, one), (second, two)):
            await rig.forward(lease, loading)
            assert lease.commit(17) == 16
        assert not set(first.pages.tolist()) & set(second.pages.tolist())
        rig.check(second, 16)
        rig.cache.audit()
        assert rig.cache.stats().device.leased == 6
        first.release()
        rig.check(second, 16)
    stats = rig.cache.stats().device
    assert (stats.leased, stats.in_tree, stats.free) == (0, 4, 12)
    rig.check_local("abcd")


async def test_a_short_load_announces_what_it_will_compute(open_cache: Opener) -> None:
    """The announcement ends where the request's own room ends."""
    rig = await open_cache()
    with rig.lease("abcd") as first, rig.lease("abcd") as second:
        await first.load(total_tokens=8)
        assert second.pending_tokens == 8
        first.allocate_nowait(8)
        rig.compute(first, 8)
        first.commit(8)
        assert second.pending_tokens == 0
        assert (await second.load()).tokens == 8


async def test_a_longer_prompt_takes_over_beyond_the_announced(open_cache: Opener) -> None:
    """Who waited announces what lies behind the part it waited for, and a third waits for that."""
    rig = await open_cache()
    engine = Engine(rig)
    tasks = [asyncio.create_task(engine.serve(letters)) for letters in ("ab", "abcd", "abcd")]
    await turns()
    assert len(engine.computing) == 1
    engine.let_compute(2)
    await turns()
    assert len(engine.computing) == 2
    engine.let_compute(2)
    assert await asyncio.gather(*tasks) == [0, 8, 16]
    assert engine.computed == dict.fromkeys(range(4), 1)


async def test_a_cached_prompt_of_whole_pages_holds_nobody_up(open_cache: Opener) -> None:
    """With all of a prompt of k pages cached, requests for it load side by side, each but its last page."""
    rig = await open_cache()
    await rig.serve(tokens("abcd")[:16])
    first, second = rig.lease(tokens("abcd")[:16]), rig.lease(tokens("abcd")[:16])
    for lease in (first, second):
        loading = asyncio.create_task(lease.load())
        await turns()
        assert loading.done() and loading.result().tokens == 12
        assert lease.pending_tokens == 0
    first.release()
    second.release()


async def test_only_what_can_be_reused_is_waited_for(open_cache: Opener) -> None:
    """Of a cold prompt of k pages the second request waits for k-1, and computes the last one itself."""
    rig = await open_cache()
    first, second = rig.lease(tokens("abcd")[:16]), rig.lease(tokens("abcd")[:16])
    await first.load()
    first.allocate_nowait(16)
    assert second.pending_tokens == 12
    loading = asyncio.create_task(second.load())
    await turns()
    assert not loading.done()
    rig.compute(first)
    first.commit(12)
    await turns()
    assert loading.done() and loading.result().tokens == 12
    first.release()
    second.release()
