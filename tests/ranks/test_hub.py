"""A group over real connections: what goes over them, who does not read, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

import pytest

from hicache_async.errors import ConsensusError
from hicache_async.ranks import _connection
from hicache_async.ranks._connection import Connection
from hicache_async.ranks._frames import Frame, Kind, encode, hear
from hicache_async.ranks.hub import HubRanks
from tests.ranks.conftest import Opener
from tests.ranks.groups import Group, connections_of, ticket_of, turns

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[Kind]:
    """Count the frames that go over all connections, by kind."""
    counts: Counter[Kind] = Counter()
    send = Connection.send

    def counted(self: Connection, frame: Frame) -> None:
        counts[frame.kind] += 1
        send(self, frame)

    monkeypatch.setattr(Connection, "send", counted)
    return counts


def stop_reading(rank: HubRanks) -> None:
    """Let a rank hear nothing, as if its process were stopped; it may still say something."""
    for link in rank._connections:
        assert link._transport is not None
        link._transport.pause_reading()


def read_again(rank: HubRanks) -> None:
    """Let it hear all it missed."""
    for link in rank._connections:
        assert link._transport is not None
        link._transport.resume_reading()


async def test_an_idle_group_exchanges_nothing(open_hub: Opener, sent: Counter[Kind]) -> None:
    """A ticket costs a vote and a result for each rank but 0; before and after it nothing is sent."""
    group = await open_hub(4, consensus_timeout_s=0.03)
    sent.clear()
    await asyncio.sleep(0.1)
    assert not sent
    assert await group.agree(1, *[(5,)] * 4) == [(5,)] * 4
    assert sent == {Kind.VOTE: 3, Kind.RESULT: 3}
    await asyncio.sleep(0.1)
    assert sent == {Kind.VOTE: 3, Kind.RESULT: 3}


async def test_a_slow_rank_that_answers_is_waited_for(open_hub: Opener, sent: Counter[Kind]) -> None:
    """It is pinged for longer than makes a rank mute, it answers, and its vote counts."""
    group = await open_hub(3, consensus_timeout_s=0.06)
    waiting = [group.start(rank, 1, 7) for rank in (0, 1)]
    while sent[Kind.PONG] < 20:
        await turns()
    group.ranks[2].cast(ticket_of(1), (6,))
    assert [list(await task) for task in waiting] == [[6], [6]]


async def test_a_mute_rank_costs_misses_until_it_answers(open_hub: Opener) -> None:
    """What waits for it settles at zeros on the others; when it hears again it reads these and is in again."""
    group = await open_hub(3, consensus_timeout_s=0.1)
    mute = group.ranks[2]
    assert isinstance(mute, HubRanks)
    stop_reading(mute)
    for number in range(3):
        waiting = [group.start(rank, number, 7) for rank in (0, 1)]
        assert [list(await task) for task in waiting] == [[0], [0]]
    read_again(mute)
    for number in range(3):
        assert list(await group.start(2, number, 7)) == [0]
    assert await group.agree(9, (5,), (6,), (7,)) == [(5,)] * 3


async def test_a_mute_rank_is_lost_in_the_end(open_hub: Opener) -> None:
    """All others raise, and the error says who, and for how long."""
    group = await open_hub(3, consensus_timeout_s=0.06, group_timeout_s=0.3)
    mute = group.ranks[1]
    assert isinstance(mute, HubRanks)
    stop_reading(mute)
    assert list(await group.start(0, 1, 7)) == [0]
    lost: list[asyncio.Future[ConsensusError]] = []
    for rank in (0, 2):
        lost.append(asyncio.get_running_loop().create_future())
        group.ranks[rank].when_lost(lost[-1].set_result)
    for future in lost:
        assert str(await future) == "rank 1 answered nothing for 0.3 s"
    read_again(mute)


async def test_a_rank_0_that_hears_nothing_is_lost(open_hub: Opener) -> None:
    """Who waits gives it up; when it hears again it finds them gone, and tells the one who did not wait."""
    group = await open_hub(3, consensus_timeout_s=0.06, group_timeout_s=0.3)
    hub = group.ranks[0]
    assert isinstance(hub, HubRanks)
    stop_reading(hub)
    with pytest.raises(ConsensusError, match="rank 0, which counts the votes, answered nothing for 0.3 s"):
        await group.start(1, 1, 7)
    idle: asyncio.Future[ConsensusError] = asyncio.get_running_loop().create_future()
    group.ranks[2].when_lost(idle.set_result)
    assert not idle.done()
    read_again(hub)
    assert str(await idle) == "rank 1 exited, or its connection broke"
    with pytest.raises(ConsensusError, match="rank 1 exited"):
        await group.start(0, 2, 7)


async def test_who_does_not_read_is_cut_off(open_hub: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results pile up for it to a limit only, on rank 0; beyond it the rank is lost."""
    monkeypatch.setattr(_connection, "MAX_UNREAD_NBYTES", 50_000)
    group = await open_hub(2)
    mute = group.ranks[1]
    assert isinstance(mute, HubRanks)
    stop_reading(mute)
    (link,) = connections_of(group)[:1]
    largest = number = 0
    lost: list[ConsensusError] = []
    group.ranks[0].when_lost(lost.append)
    while not lost:
        for _ in range(500):
            group.ranks[0].cast(ticket_of(number), (0,) * 8)
            number += 1
            assert link._transport is not None
            largest = max(largest, link._transport.get_write_buffer_size())
        await asyncio.sleep(0)
    assert str(lost[0]) == "rank 1 does not read what it is sent"
    assert largest <= 50_000 + 82
    read_again(mute)


async def test_a_message_that_is_none_ends_the_group(open_hub: Opener) -> None:
    """A rank that says what no rank says runs other code: the group is over."""
    for rubbish in (b"\x63" + bytes(17), encode(Frame(Kind.VOTE, ticket_of(1), (-1,))), b"\x01" * 18):
        group = await open_hub(2)
        waiting = group.start(0, 1, 7)
        await turns()
        assert isinstance(group.ranks[1], HubRanks)
        group.ranks[1]._connections[0].write(rubbish)
        with pytest.raises(ConsensusError, match="rank 1 broke the protocol of the votes"):
            await waiting


async def test_bytes_may_come_in_any_pieces() -> None:
    """Frames are the same, in the same order, byte by byte and all at once."""
    frames = [Frame(Kind.VOTE, ticket_of(number), tuple(range(number % 9))) for number in range(20)]
    data = b"".join(map(encode, frames))
    for step in (1, 7, len(data)):
        heard: list[Frame] = []
        connection = Connection(asyncio.get_running_loop(), lambda connection: None)
        connection.begin(hear(heard.append), lambda cause: None)
        for start in range(0, len(data), step):
            connection.data_received(data[start : start + step])
        assert heard == frames


async def test_small_messages_go_out_at_once(open_hub: Opener) -> None:
    """Nagle's algorithm is off on both ends of every connection."""
    group = await open_hub(3)
    links = connections_of(group)
    assert len(links) == 4
    for link in links:
        assert link._transport is not None
        assert link._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_leaving_does_not_wait_for_who_hears_nothing(open_hub: Opener) -> None:
    """It ends by itself, as often as it is called, at the same time and later, and leaves no connection open."""
    group = await open_hub(3, consensus_timeout_s=0.05)
    mute = group.ranks[2]
    assert isinstance(mute, HubRanks)
    stop_reading(mute)
    await asyncio.gather(group.ranks[0].aclose(), group.ranks[0].aclose())  # type: ignore[attr-defined]
    await group.ranks[0].aclose()  # type: ignore[attr-defined]
    assert isinstance(group.ranks[0], HubRanks)
    assert all(link.closed.done() for link in group.ranks[0]._connections)
    read_again(mute)


async def test_leaving_can_be_cancelled(open_hub: Opener) -> None:
    """The connections end all the same, and others take it for gone or left, never for there."""
    for num_turns in range(6):
        group: Group = await open_hub(2, consensus_timeout_s=0.05)
        waiting = group.start(1, 1, 7)
        await turns(3)
        leaving = asyncio.get_running_loop().create_task(group.ranks[0].aclose())  # type: ignore[attr-defined]
        await turns(num_turns)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        if num_turns:  # before the first step nothing was done
            (ended,) = await asyncio.gather(waiting, return_exceptions=True)
            assert isinstance(ended, ConsensusError) or list(ended) == [0]


async def test_the_loop_turns_while_a_rank_is_late(open_hub: Opener) -> None:
    """Waiting blocks nothing: the late vote comes from the same loop, after it has turned a thousand times."""
    group = await open_hub(2)
    waiting = [group.start(0, number, 5) for number in range(3)]
    for _ in range(1000):
        await asyncio.sleep(0)
    waiting[1].cancel()
    assert not waiting[0].done()
    for number in range(3):
        group.ranks[1].cast(ticket_of(number), (4,))
    assert list(await waiting[0]) == [4]
    assert list(await waiting[2]) == [4]
    assert list(await group.start(0, 1, 5)) == [4]
