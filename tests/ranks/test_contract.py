"""What every group keeps to, whatever carries its votes: minima, two orders, cancels, losses, goodbyes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
from collections.abc import Sequence

import pytest

from hicache_async.abc import Ranks
from hicache_async.errors import ConfigError, ConsensusError, WrongLoopError
from tests.ranks.conftest import Opener
from tests.ranks.groups import Group, ticket_of, turns

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


async def test_a_group_agrees_on_the_minimum_of_each_number(open_group: Opener) -> None:
    """Every rank gets the same, and knows who it is."""
    group = await open_group(3)
    ranks: Sequence[Ranks] = group.ranks
    assert [(rank.rank, rank.size) for rank in ranks] == [(0, 3), (1, 3), (2, 3)]
    assert await group.agree(1, (5, 2**63 - 1), (4, 7), (6, 8)) == [(4, 7)] * 3


async def test_a_group_of_one_agrees_with_itself(open_group: Opener) -> None:
    """There is nobody to wait for."""
    group = await open_group(1)
    assert await group.agree(1, (5,)) == [(5,)]


async def test_votes_count_though_nobody_waits(open_group: Opener) -> None:
    """A vote that was cast is counted, and whoever asks later gets the result, again and again."""
    group = await open_group(2)
    group.ranks[1].cast(ticket_of(1), (3,))
    assert list(await group.start(0, 1, 5)) == [3]
    for _ in range(2):
        assert list(await group.start(1, 1, 9)) == [3]


async def test_the_first_vote_of_a_rank_counts(open_group: Opener) -> None:
    """A second vote, by cast or by agree, is only a wait."""
    group = await open_group(2)
    for rank in group.ranks:
        rank.cast(ticket_of(1), (4,))
        rank.cast(ticket_of(1), (2,))
    assert await group.agree(1, (1,), (9,)) == [(4,)] * 2


async def test_zeros_are_not_waited_for(open_group: Opener) -> None:
    """One rank without anything to offer settles the ticket for all, and who votes later reads zeros."""
    group = await open_group(3)
    group.ranks[1].cast(ticket_of(1), (0, 0))
    assert list(await group.start(2, 1, 5, 5)) == [0, 0]
    assert list(await group.start(0, 1, 7, 7)) == [0, 0]


async def test_results_come_in_the_same_order_everywhere(open_group: Opener) -> None:
    """Callers go on in the order in which the group settled, the same on all ranks, however they voted."""
    group = await open_group(3)
    rng = random.Random(5)
    heard: list[list[int]] = [[] for _ in group.ranks]
    values: dict[int, set[tuple[int, ...]]] = {}

    async def caller(rank: int, number: int, vote: int) -> None:
        result = tuple(await group.ranks[rank].agree(ticket_of(number), (vote,)))
        heard[rank].append(number)
        values.setdefault(number, set()).add(result)

    async def voter(rank: int) -> None:
        numbers = list(range(120))
        rng.shuffle(numbers)
        async with asyncio.TaskGroup() as callers:
            # All wait before the first ticket settles: nobody asks for what has settled.
            for number in numbers:
                callers.create_task(caller(rank, number, rng.randrange(1, 50)))
                if rank == 0 and number % 7 == 0:
                    await asyncio.sleep(0)

    await asyncio.gather(*(voter(rank) for rank in range(3)))
    assert heard[0] == heard[1] == heard[2]
    assert sorted(heard[0]) == list(range(120))
    assert all(len(results) == 1 for results in values.values())


async def test_a_ticket_that_settles_at_once_waits_its_turn(open_local: Opener) -> None:
    """A caller whose own vote settles its ticket goes on behind the one whose ticket settled just before."""
    group = await open_local(2)
    group.ranks[1].cast(ticket_of(2), (5,))
    await turns()
    heard = []
    for number in (1, 2):
        if number == 2:
            group.ranks[1].cast(ticket_of(1), (5,))  # comes in right before the next task runs
        group.start(0, number, 7).add_done_callback(lambda task, number=number: heard.append(number))
        if number == 1:
            await turns()
    await turns()
    assert heard == [1, 2]


async def test_a_cancelled_waiter_disturbs_nobody(open_group: Opener) -> None:
    """Its vote stands, and others of its rank who wait for the same ticket get the result."""
    group = await open_group(2)
    first, second = group.start(1, 1, 4), group.start(1, 1, 9)
    await turns()
    first.cancel()
    await turns()
    assert first.cancelled()
    assert not second.done()
    assert list(await group.start(0, 1, 7)) == [4]
    assert list(await second) == [4]


async def test_a_caller_that_is_cancelled_before_it_runs_has_not_voted(open_group: Opener) -> None:
    """Nothing was cast, and a later vote is the first."""
    group = await open_group(2)
    early = group.start(1, 1, 4)
    early.cancel()
    await turns()
    assert await group.agree(1, (9,), (8,)) == [(8,)] * 2


async def test_who_leaves_votes_zeros_from_then_on(open_group: Opener) -> None:
    """What waited for it settles at zeros, and so does all that comes."""
    group = await open_group(3)
    waiting = [group.start(rank, 2, 7) for rank in (0, 1)]
    await turns()
    await group.ranks[2].aclose()
    assert [list(await task) for task in waiting] == [[0], [0]]
    assert [list(await group.start(rank, 3, 6)) for rank in (0, 1)] == [[0], [0]]


async def test_what_a_leaver_voted_before_counts(open_group: Opener) -> None:
    """Its vote is one of all."""
    group = await open_group(3)
    group.ranks[2].cast(ticket_of(1), (5,))
    await group.ranks[2].aclose()
    waiting = [group.start(rank, 1, 6) for rank in (0, 1)]
    assert [list(await task) for task in waiting] == [[5], [5]]


async def test_without_rank_0_all_is_zeros(open_group: Opener) -> None:
    """When the rank that counts leaves, what was open settles at zeros on every rank, and what comes does."""
    group = await open_group(3)
    waiting = [group.start(rank, 1, 7, 7) for rank in (1, 2)]
    await turns()
    await group.ranks[0].aclose()
    assert [list(await task) for task in waiting] == [[0, 0], [0, 0]]
    assert [list(await group.start(rank, 2, 6)) for rank in (1, 2)] == [[0], [0]]


async def test_who_has_left_agrees_on_nothing(open_group: Opener) -> None:
    """Its waiters and later callers raise, votes do nothing, and nobody is told of a loss."""
    group = await open_group(2)
    losses: list[ConsensusError] = []
    for rank in group.ranks:
        rank.when_lost(losses.append)
    waiting = group.start(1, 1, 7)
    await turns()
    await group.ranks[1].aclose()
    await group.ranks[1].aclose()
    for task in (waiting, group.start(1, 1, 7)):
        with pytest.raises(ConsensusError, match="rank 1 has left its group"):
            await task
    group.ranks[1].cast(ticket_of(3), (1,))
    assert list(await group.start(0, 4, 7)) == [0]
    assert losses == []


async def test_a_dead_rank_ends_the_group_at_once(open_group: Opener) -> None:
    """On every survivor callbacks come first, then all waiters raise, and so does whoever asks later."""
    group = await open_group(3)
    log: list[str] = []
    assert await group.agree(1, (5,), (5,), (5,)) == [(5,)] * 3

    async def caller(rank: int, number: int) -> None:
        with pytest.raises(ConsensusError, match="rank 2 exited, or its connection broke"):
            await group.ranks[rank].agree(ticket_of(number), (7,))
        log.append(f"waiter {rank}")

    def told(rank: int) -> None:
        group.ranks[rank].when_lost(lambda error: log.append(f"callback {rank}: {error}"))

    told(0), told(1)
    async with asyncio.TaskGroup() as callers:
        for rank in (0, 1):
            callers.create_task(caller(rank, 2))
            callers.create_task(caller(rank, 3))
        await turns()
        group.kill(2)
    for rank in (0, 1):
        mine = [line for line in log if f" {rank}" in line[:12]]
        reason = "rank 2 exited, or its connection broke"
        assert mine == [f"callback {rank}: {reason}", f"waiter {rank}", f"waiter {rank}"]
        for number in (1, 4):  # what had settled, too
            with pytest.raises(ConsensusError, match="rank 2"):
                await group.start(rank, number, 5)
        group.ranks[rank].cast(ticket_of(5), (5,))
        late: list[ConsensusError] = []
        group.ranks[rank].when_lost(late.append)
        assert [str(error) for error in late] == [reason]


async def test_a_dead_rank_0_ends_the_group_at_once(open_group: Opener) -> None:
    """Every other rank raises, and the error says who counted."""
    group = await open_group(3)
    waiting = [group.start(rank, 1, 7) for rank in (1, 2)]
    await turns()
    group.kill(0)
    for task in waiting:
        with pytest.raises(ConsensusError, match="rank 0, which counts the votes, exited"):
            await task


async def test_a_callback_that_raises_keeps_nothing_from_others(open_group: Opener) -> None:
    """The other callbacks are called, the waiters raise, and the loop's handler hears of the bug."""
    group = await open_group(2)
    bugs: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: bugs.append(context))
    heard: list[ConsensusError] = []

    def raising(error: ConsensusError) -> None:
        raise ZeroDivisionError

    for callback in (raising, heard.append):
        group.ranks[0].when_lost(callback)
    waiting = group.start(0, 1, 5)
    await turns()
    group.kill(1)
    with pytest.raises(ConsensusError):
        await waiting
    assert len(heard) == 1
    assert [type(bug["exception"]) for bug in bugs] == [ZeroDivisionError]


async def test_ranks_that_vote_on_unlike_things_end_the_group(open_group: Opener) -> None:
    """A vote of another number of values is a bug of somebody's, and is not counted."""
    group = await open_group(2)
    waiting = [group.start(0, 1, 5, 5), group.start(1, 1, 5)]
    for task in waiting:
        with pytest.raises(ConsensusError, match="rank [01].* broke the protocol of the votes"):
            await task


@pytest.mark.parametrize(
    ("ticket", "vote"),
    [
        (b"short", (1,)),
        ("sixteen letters!", (1,)),
        (ticket_of(1), ()),
        (ticket_of(1), (1,) * 9),
        (ticket_of(1), (-1,)),
        (ticket_of(1), (2**63,)),
        (ticket_of(1), (1.5,)),
        (ticket_of(1), ("1",)),
    ],
)
async def test_what_is_no_vote_is_refused(open_local: Opener, ticket: bytes, vote: Sequence[int]) -> None:
    """The error shows it and says what would be right; nothing is cast."""
    group = await open_local(2)
    with pytest.raises(ConfigError, match="give"):
        group.ranks[1].cast(ticket, vote)
    with pytest.raises(ConfigError, match="give"):
        await group.ranks[1].agree(ticket, vote)
    assert await group.agree(1, (9,), (8,)) == [(8,)] * 2


async def test_another_loop_is_refused(open_group: Opener) -> None:
    """From another loop, and from a thread without one, every call says what is wrong."""
    group = await open_group(2)
    rank = group.ranks[1]

    async def elsewhere() -> None:
        with pytest.raises(WrongLoopError, match="the loop that they were joined on"):
            await rank.agree(ticket_of(1), (1,))
        with pytest.raises(WrongLoopError):
            await rank.aclose()

    def in_a_thread() -> None:
        with pytest.raises(WrongLoopError):
            rank.cast(ticket_of(1), (1,))
        with pytest.raises(WrongLoopError):
            rank.when_lost(lambda error: None)
        asyncio.run(elsewhere())

    await asyncio.to_thread(in_a_thread)


async def test_a_fork_is_refused(open_group: Opener) -> None:
    """A forked child that uses its parent's ranks is told so, and says nothing in its parent's name."""
    group = await open_group(2)

    def child() -> None:
        try:
            group.ranks[1].cast(ticket_of(1), (0,))
        except WrongLoopError as error:
            os._exit(42 if "fork" in str(error) else 1)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    while process.is_alive():
        await asyncio.to_thread(process.join, 10)
    assert process.exitcode == 42
    assert await group.agree(1, (9,), (8,)) == [(8,)] * 2


async def test_ranks_that_ask_in_other_orders_meet(open_group: Opener) -> None:
    """One rank that has less room, and asks in the opposite order, gets as many answers, all equal."""
    group = await open_group(4)

    async def serve(rank: int) -> list[Sequence[int]]:
        numbers = range(20) if rank % 2 else reversed(range(20))
        room = 3 if rank == 2 else 50
        tasks = {number: group.start(rank, number, min(room, 5 + number)) for number in numbers}
        return [await tasks[number] for number in range(20)]

    answers = await asyncio.gather(*(serve(rank) for rank in range(4)))
    assert answers == [[(3,)] * 20] * 4


async def test_a_rank_with_nothing_to_offer_votes_too(open_group: Opener) -> None:
    """To have nothing is a vote, and nobody waits for the rank that has nothing to do."""
    group = await open_group(2)
    assert await group.agree(1, (0,), (7,)) == [(0,)] * 2
    assert await group.agree(2, (7,), (0,)) == [(0,)] * 2


async def test_settled_results_survive_a_loss_that_follows(open_group: Opener) -> None:
    """What settled before a rank died reaches the waiters of every survivor."""
    group: Group = await open_group(3)
    tasks = [group.start(rank, 1, 5) for rank in (0, 1)]
    await turns()
    group.ranks[2].cast(ticket_of(1), (5,))
    if group.clock is None:
        assert list(await tasks[0]) == [5]
    group.kill(2)
    assert [list(await task) for task in tasks] == [[5], [5]]
