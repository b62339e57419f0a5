"""Ballot: each ticket is decided once, and as the rules say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_async.errors import ConsensusError
from hicache_async.ranks.ballot import Ballot, RecentResults, Timeouts
from tests.ranks.ballots import Oracle

TIMEOUTS = Timeouts(consensus_timeout_s=3.0, ticket_timeout_s=7.0, group_timeout_s=10.0)
"""A period is one second, so that all times are exact."""

VOTES = st.tuples(st.integers(0, 3), st.integers(0, 3))
EVENTS = st.one_of(
    st.tuples(st.just("vote"), st.integers(0, 3), st.integers(0, 5), VOTES),
    st.tuples(st.just("vote"), st.integers(0, 3), st.integers(0, 5), VOTES),
    st.tuples(st.just("hear"), st.integers(1, 3)),
    st.tuples(st.just("tick"), st.integers(1, 5)),
    st.tuples(st.just("leave"), st.integers(1, 3)),
)


def ticket_of(number: int) -> bytes:
    """Return the ticket of a number."""
    return number.to_bytes(16, "big")


PATIENT = (ticket_of(4), ticket_of(5))


@settings(max_examples=400, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.integers(1, 4))
def test_it_decides_as_the_oracle_does(events: list[tuple[object, ...]], size: int) -> None:
    """After any votes, silences, goodbyes and times both have settled, pinged and lost the same, in the same order."""
    ballot, oracle, now_s, gone = Ballot(size, TIMEOUTS), Oracle(size, TIMEOUTS), 0.0, set[int]()
    for name, *arguments in events:
        if name == "tick":
            for _ in range(int(str(arguments[0]))):
                now_s += TIMEOUTS.period_s
                turn = ballot.tick(now_s)
                settled, pings, lost = oracle.tick(now_s)
                assert sorted(turn.settled) == sorted(settled)
                assert (set(turn.pings), {rank for rank, _ in turn.lost}) == (pings, lost)
                assert [seconds for rank, seconds in turn.lost] == [
                    oracle.silent_s(rank, now_s) for rank, _ in turn.lost
                ]
            continue
        rank = int(str(arguments[0])) % size
        if rank in gone:
            continue
        if name == "vote":
            ticket, vote = ticket_of(int(str(arguments[1]))), arguments[2]
            assert isinstance(vote, tuple)
            ballot.hear(rank)
            oracle.hear(rank)
            patient = ticket in PATIENT
            settled = ballot.vote(rank, ticket, vote, now_s, patient=patient)
            assert settled == oracle.vote(rank, ticket, vote, now_s, patient=patient)
        elif name == "hear" and rank:
            ballot.hear(rank)
            oracle.hear(rank)
        elif rank:
            gone.add(rank)
            assert ballot.leave(rank) == oracle.leave(rank, now_s)
        assert ballot.num_open == len(oracle.open())
        assert all(ballot.result(ticket) == oracle.results.get(ticket) for ticket in oracle.votes)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(2, 5))
def test_a_result_is_never_above_a_vote_and_never_changes(data: st.DataObject, size: int) -> None:
    """Whatever the order and the silences, a result above zeros is the minimum of a vote of every rank."""
    ballot = Ballot(size, TIMEOUTS)
    results: dict[bytes, tuple[int, ...]] = {}
    votes = {
        (rank, ticket_of(number)): (data.draw(st.integers(0, 9)), data.draw(st.integers(1, 9)))
        for rank in range(size)
        for number in range(3)
    }
    now_s = 0.0
    for rank, ticket in data.draw(st.permutations(list(votes))):
        settled = ballot.vote(rank, ticket, votes[rank, ticket], now_s)
        for _ in range(data.draw(st.integers(0, 2))):
            now_s += 1.0
            settled += ballot.tick(now_s).settled
        for decided, result in settled:
            assert decided not in results
            results[decided] = result
    for ticket, result in results.items():
        if any(result):
            each = [votes[rank, ticket] for rank in range(size)]
            assert result == tuple(map(min, zip(*each, strict=True)))


def test_settles_when_all_have_voted() -> None:
    """The result is the minimum, number by number."""
    ballot = Ballot(3, TIMEOUTS)
    assert ballot.vote(2, ticket_of(1), (5, 9), 0.0) == []
    assert ballot.vote(0, ticket_of(1), (7, 2), 0.0) == []
    assert ballot.vote(1, ticket_of(1), (6, 4), 0.0) == [(ticket_of(1), (5, 2))]
    assert not ballot.is_waiting


def test_zeros_settle_at_once_and_one_zero_does_not() -> None:
    """Only a vote that is zero throughout leaves nothing to wait for."""
    ballot = Ballot(3, TIMEOUTS)
    assert ballot.vote(2, ticket_of(1), (0, 9), 0.0) == []
    assert ballot.vote(1, ticket_of(1), (0, 0), 0.0) == [(ticket_of(1), (0, 0))]
    assert ballot.vote(0, ticket_of(1), (8, 8), 0.0) == []
    assert ballot.result(ticket_of(1)) == (0, 0)


def test_the_first_vote_of_a_rank_counts() -> None:
    """A second vote changes nothing, up or down, zeros included."""
    ballot = Ballot(2, TIMEOUTS)
    ballot.vote(1, ticket_of(1), (5,), 0.0)
    assert ballot.vote(1, ticket_of(1), (0,), 0.0) == []
    assert ballot.vote(1, ticket_of(1), (3,), 0.0) == []
    assert ballot.vote(0, ticket_of(1), (9,), 0.0) == [(ticket_of(1), (5,))]


def test_a_mute_rank_costs_each_ticket_a_miss_until_it_speaks() -> None:
    """From three unanswered pings on its missing votes count as zeros at once; one message ends that."""
    ballot = Ballot(2, TIMEOUTS)
    ballot.vote(0, ticket_of(1), (5,), 0.0)
    assert [ballot.tick(now_s).settled for now_s in (1.0, 2.0, 3.0)] == [[], [], []]
    assert ballot.tick(4.0).settled == [(ticket_of(1), (0,))]
    assert ballot.vote(0, ticket_of(2), (5,), 4.0) == [(ticket_of(2), (0,))]
    ballot.hear(1)
    assert ballot.vote(0, ticket_of(3), (5,), 4.0) == []
    assert ballot.vote(1, ticket_of(3), (4,), 4.0) == [(ticket_of(3), (4,))]


def test_a_rank_that_answers_is_waited_for_until_the_ticket_is_too_old() -> None:
    """Pings that are answered keep a slow rank in, up to the ticket's own limit."""
    ballot = Ballot(2, TIMEOUTS)
    ballot.vote(0, ticket_of(1), (5,), 0.0)
    for now_s in range(1, 7):
        turn = ballot.tick(float(now_s))
        assert (turn.settled, turn.pings, turn.lost) == ([], [1], [])
        ballot.hear(1)
    assert ballot.tick(7.0).settled == [(ticket_of(1), (0,))]


def test_only_ranks_that_are_waited_for_are_pinged() -> None:
    """Who has voted on all that is open is left in peace, and so is rank 0, which pings."""
    ballot = Ballot(4, TIMEOUTS)
    assert ballot.tick(0.5).pings == []
    ballot.vote(1, ticket_of(1), (5,), 0.5)
    ballot.vote(2, ticket_of(1), (5,), 0.5)
    assert ballot.tick(1.5).pings == [3]


def test_a_mute_rank_is_lost_after_the_group_timeout() -> None:
    """It is lost once, though by then nothing is open any more; until then the time is kept."""
    ballot = Ballot(2, TIMEOUTS)
    ballot.vote(0, ticket_of(1), (5,), 0.0)
    turns = [ballot.tick(float(now_s)) for now_s in range(1, 11)]
    assert [turn.lost for turn in turns] == [[]] * 10
    assert not ballot.num_open
    assert ballot.is_waiting
    assert ballot.tick(11.0).lost == [(1, 10.0)]


def test_a_hub_that_slept_takes_nobody_for_mute() -> None:
    """A time through which nothing was counted is one ping, however long it was."""
    ballot = Ballot(2, TIMEOUTS)
    ballot.vote(0, ticket_of(1), (5,), 0.0)
    ballot.tick(1.0)
    turn = ballot.tick(6.0)
    assert (turn.settled, turn.lost) == ([], [])


def test_a_rank_that_leaves_votes_zeros_from_then_on() -> None:
    """What it had voted before counts as it was."""
    ballot = Ballot(3, TIMEOUTS)
    ballot.vote(2, ticket_of(1), (5,), 0.0)
    ballot.vote(0, ticket_of(2), (5,), 0.0)
    assert ballot.leave(2) == [(ticket_of(2), (0,))]
    ballot.vote(0, ticket_of(1), (7,), 0.0)
    assert ballot.vote(1, ticket_of(1), (6,), 0.0) == [(ticket_of(1), (5,))]
    assert ballot.vote(1, ticket_of(3), (6,), 0.0) == [(ticket_of(3), (0,))]


def test_another_number_of_values_is_refused() -> None:
    """The error says who voted on how many, and the ticket is as it was."""
    ballot = Ballot(2, TIMEOUTS)
    ballot.vote(0, ticket_of(1), (5, 5), 0.0)
    with pytest.raises(ConsensusError, match="rank 1 voted on 1 numbers, others on 2"):
        ballot.vote(1, ticket_of(1), (5,), 0.0)
    assert ballot.vote(1, ticket_of(1), (5, 4), 0.0) == [(ticket_of(1), (5, 4))]


def test_open_tickets_are_bounded() -> None:
    """One too many settles the oldest at zeros, so a rank that votes alone for ever takes no more room."""
    ballot = Ballot(2, TIMEOUTS, max_open=3)
    assert [ballot.vote(1, ticket_of(number), (5,), 0.0) for number in range(3)] == [[], [], []]
    assert ballot.vote(1, ticket_of(3), (5,), 0.0) == [(ticket_of(0), (0,))]
    assert ballot.num_open == 3


def test_results_are_bounded_and_the_oldest_is_forgotten() -> None:
    """As many as were asked for are remembered, the latest."""
    results = RecentResults(3)
    for number in range(5):
        results.add(ticket_of(number), (number,))
    assert len(results) == 3
    assert [results.get(ticket_of(number)) for number in range(5)] == [None, None, (2,), (3,), (4,)]


def test_a_vote_after_all_is_forgotten_settles_at_zeros_again() -> None:
    """Whoever votes later than anybody remembers waits for the ticket's limit and no longer."""
    ballot = Ballot(2, TIMEOUTS, max_results=1)
    ballot.vote(0, ticket_of(1), (0,), 0.0)
    ballot.vote(0, ticket_of(2), (0,), 0.0)
    assert ballot.vote(1, ticket_of(1), (5,), 0.0) == []
    assert ballot.tick(7.0).settled == [(ticket_of(1), (0,))]
