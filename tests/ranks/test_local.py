"""LocalRanks: what a test can do to a rank, and that nothing in it depends on chance."""

from __future__ import annotations

import asyncio
import random

import pytest

from hicache_async.errors import ConfigError, ConsensusError
from hicache_async.testing.local_ranks import LocalRanks
from hicache_async.testing.manual import ManualClock
from tests.ranks.conftest import Opener
from tests.ranks.groups import ticket_of, turns

pytestmark = pytest.mark.asyncio


def locals_of(group: object) -> list[LocalRanks]:
    """Return the ranks of a group over queues."""
    return list(group.ranks)  # type: ignore[attr-defined]


async def test_a_waiter_goes_on_in_the_next_turn(open_local: Opener) -> None:
    """Between the result and the caller of agree lies one turn of the loop, and no task."""
    group = await open_local(2)
    waiting = group.start(1, 1, 5)
    await turns()
    group.ranks[1]._book.settle(ticket_of(1), (3,))
    await asyncio.sleep(0)
    assert waiting.done()


async def test_a_held_rank_is_mute_and_comes_back(open_local: Opener) -> None:
    """What waits for it is missed after the consensus timeout and not before; resumed, it is in again."""
    group = await open_local(3)
    ranks = locals_of(group)
    ranks[2].hold()
    waiting = [group.start(rank, 1, 7) for rank in range(3)]
    await turns()
    group.clock.advance(1.0)
    await turns()
    assert [task.done() for task in waiting] == [False] * 3
    group.clock.advance(0.4)
    await turns()
    assert [task.done() for task in waiting] == [True, True, False]
    ranks[2].resume()
    assert [list(await task) for task in waiting] == [[0]] * 3
    assert await group.agree(2, (5,), (6,), (7,)) == [(5,)] * 3


async def test_a_patient_ticket_waits_for_a_mute_rank(open_local: Opener) -> None:
    """Until it answers, beyond the time that a ticket may take; a vote of zeros settles it as any other."""
    group = await open_local(3, ticket_timeout_s=2.0, group_timeout_s=30.0)
    ranks = locals_of(group)
    ranks[2].hold()
    waiting = [asyncio.ensure_future(rank.agree(ticket_of(1), (7,), patient=True)) for rank in ranks[:2]]
    given_up = asyncio.ensure_future(ranks[0].agree(ticket_of(2), (7,), patient=True))
    for _ in range(20):
        await turns()
        group.clock.advance(0.3)
    await turns()
    assert not any(task.done() for task in waiting)
    ranks[1].cast(ticket_of(2), (0,), patient=True)
    assert tuple(await given_up) == (0,)
    ranks[2].resume()
    ranks[2].cast(ticket_of(1), (5,), patient=True)
    assert [tuple(await task) for task in waiting] == [(5,)] * 2


async def test_a_patient_ticket_ends_when_a_rank_leaves_or_is_lost(open_local: Opener) -> None:
    """At zeros for one that has left; with the group for one that is lost."""
    group = await open_local(3, group_timeout_s=5.0)
    ranks = locals_of(group)
    waiting = asyncio.ensure_future(ranks[0].agree(ticket_of(1), (7,), patient=True))
    await turns()
    await ranks[2].aclose()
    assert tuple(await waiting) == (0,)
    ranks[1].hold()
    lost = asyncio.ensure_future(ranks[0].agree(ticket_of(2), (7,), patient=True))
    assert tuple(await lost) == (0,)
    group = await open_local(2, group_timeout_s=5.0)
    locals_of(group)[1].hold()
    lost = asyncio.ensure_future(group.ranks[0].agree(ticket_of(1), (7,), patient=True))
    for _ in range(20):
        await turns()
        group.clock.advance(0.3)
    with pytest.raises(ConsensusError, match="rank 1 answered nothing"):
        await lost


async def test_a_rank_that_is_held_for_long_is_lost(open_local: Opener) -> None:
    """On the others at the group timeout; on itself when it is resumed."""
    group = await open_local(3, group_timeout_s=5.0)
    ranks = locals_of(group)
    ranks[2].hold()
    waiting = [group.start(rank, 1, 7) for rank in (0, 2)]
    for _ in range(20):
        await turns()
        group.clock.advance(0.3)
    assert list(await waiting[0]) == [0]
    assert not waiting[1].done()
    for rank in (0, 1):
        with pytest.raises(ConsensusError, match="rank 2 answered nothing for 5.0 s"):
            await group.start(rank, 2, 7)
    ranks[2].resume()
    assert list(await waiting[1]) == [0]
    with pytest.raises(ConsensusError, match="rank 2 answered nothing"):
        await group.start(2, 2, 7)


async def test_a_held_rank_0_stops_all_and_goes_on(open_local: Opener) -> None:
    """Nothing settles meanwhile, not even by time, and nobody is taken for mute after it."""
    group = await open_local(3)
    ranks = locals_of(group)
    ranks[0].hold()
    waiting = [group.start(rank, 1, 7) for rank in range(3)]
    for _ in range(10):
        await turns()
        group.clock.advance(0.3)
    assert not any(task.done() for task in waiting)
    ranks[0].resume()
    assert [list(await task) for task in waiting] == [[7]] * 3


async def test_a_hung_rank_0_is_lost(open_local: Opener) -> None:
    """On who waits, at the group timeout; the others hear of it when rank 0 goes on."""
    group = await open_local(3, group_timeout_s=5.0)
    ranks = locals_of(group)
    ranks[0].hold()
    waiting = group.start(1, 1, 7)
    for _ in range(20):
        await turns()
        group.clock.advance(0.3)
    with pytest.raises(ConsensusError, match="rank 0, which counts the votes, answered nothing for 5.0 s"):
        await waiting
    ranks[0].resume()
    await turns()
    with pytest.raises(ConsensusError, match="rank 1 exited"):
        await group.start(2, 1, 7)


async def test_a_rank_that_works_slowly_is_waited_for_and_no_longer_than_a_ticket_may_take(
    open_local: Opener,
) -> None:
    """A store that hangs costs a miss when the ticket's time is over; the rank that waited for it is not lost."""
    group = await open_local(2, ticket_timeout_s=30.0, group_timeout_s=5.0)
    waiting = group.start(0, 1, 7)
    for _ in range(95):
        await turns()
        assert not waiting.done()
        group.clock.advance(0.3)
    for _ in range(10):
        await turns()
        group.clock.advance(0.3)
    assert list(await waiting) == [0]
    assert await group.agree(2, (5,), (6,)) == [(5,)] * 2


@pytest.mark.parametrize("vote", [1, 0])
async def test_a_rank_that_hangs_or_fails_half_way_votes_what_it_has(open_local: Opener, vote: int) -> None:
    """At its own deadline a rank votes for what arrived; both get that, and as many answers each."""
    group = await open_local(2)
    ranks = locals_of(group)
    waiting = group.start(0, 1, 2)
    for _ in range(10):
        await turns()
        group.clock.advance(0.3)
    assert not waiting.done()
    assert list(await group.start(1, 1, vote)) == [vote]
    assert list(await waiting) == [vote]
    assert [len(rank.results) for rank in ranks] == [1, 1]


async def test_a_killed_rank_has_said_what_was_on_its_way(open_local: Opener) -> None:
    """Others hear its last vote, and of its end behind it; its own callers raise."""
    group = await open_local(3, delay_turns=lambda: 5)
    ranks = locals_of(group)
    waiting = [group.start(rank, 1, 7) for rank in range(3)]
    await asyncio.sleep(0)
    lost = group.start(1, 2, 7)
    await asyncio.sleep(0)
    ranks[2].kill()
    for task in (waiting[2], lost):
        with pytest.raises(ConsensusError):
            await task
    assert [list(await task) for task in waiting[:2]] == [[7], [7]]


async def test_delays_keep_each_ranks_order() -> None:
    """However long messages take, votes are counted in the order cast, and results heard in the order settled."""
    rng = random.Random(3)
    ranks = LocalRanks.group(4, clock=ManualClock(), delay_turns=lambda: rng.randrange(6))
    numbers = list(range(60))

    async def voter(rank: LocalRanks) -> None:
        mine = numbers[:]
        rng.shuffle(mine)
        async with asyncio.TaskGroup() as callers:
            for number in mine:
                callers.create_task(call(rank, number))
                await turns(rng.randrange(3))

    async def call(rank: LocalRanks, number: int) -> None:
        vote = rng.randrange(1, 9)
        assert (await rank.agree(ticket_of(number), (vote,)))[0] <= vote

    await asyncio.gather(*map(voter, ranks))
    assert len(ranks[0].results) == 60
    assert all(rank.results == ranks[0].results for rank in ranks)
    for ticket, result in ranks[0].results:
        assert result == min(vote for rank in ranks for voted, vote in rank.votes if voted == ticket)
    for rank in ranks:
        await rank.aclose()


async def test_a_run_can_be_repeated() -> None:
    """With the same seeds a group does the same, turn by turn."""

    async def run() -> list[object]:
        rng = random.Random(8)
        ranks = LocalRanks.group(3, clock=ManualClock(), delay_turns=lambda: rng.randrange(4))
        heard: list[object] = []

        async def call(rank: LocalRanks, number: int) -> None:
            heard.append((rank.rank, number, await rank.agree(ticket_of(number), (rng.randrange(1, 9),))))

        async with asyncio.TaskGroup() as callers:
            for number in range(30):
                for rank in ranks:
                    callers.create_task(call(rank, number))
        for rank in ranks:
            await rank.aclose()
        return heard

    assert await run() == await run()


async def test_a_group_has_a_rank() -> None:
    """None at all is refused."""
    with pytest.raises(ConfigError, match="size is 0; a group has at least one rank"):
        LocalRanks.group(0)
