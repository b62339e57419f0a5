"""The breaker by itself: opens after failures in a row, lets one probe through, and believes no old news."""

from __future__ import annotations

import pytest

from hicache_async.stores._guard.breaker import Admission, Breaker, BreakerState
from hicache_async.testing.manual import ManualClock

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class Watched:
    """A breaker of three failures and four seconds, with its clock and its changes."""

    def __init__(self, max_failures: int = 3, cooldown_s: float = 4.0, max_cooldown_s: float = 10.0) -> None:
        self.clock = ManualClock(1000.0)
        self.changes: list[tuple[BreakerState, BreakerState]] = []
        self.breaker = Breaker(
            max_failures=max_failures,
            cooldown_s=cooldown_s,
            max_cooldown_s=max_cooldown_s,
            monotonic=self.clock.monotonic,
            on_change=lambda before, after: self.changes.append((before, after)),
        )

    def admit(self) -> Admission:
        admission = self.breaker.admit()
        assert admission is not None
        return admission

    def open(self) -> None:
        while self.breaker.state is not OPEN:
            self.admit().fail("gone")

    def probe(self) -> Admission:
        self.clock.advance(self.breaker.retry_in_s)
        return self.admit()


def test_failures_in_a_row_open_it() -> None:
    """Success in between starts the count anew; the last of a row opens."""
    watched = Watched()
    for _ in range(4):
        watched.admit().fail("gone")
        watched.admit().fail("gone")
        watched.admit().succeed()
    assert watched.breaker.state is CLOSED and not watched.breaker.refuses
    watched.open()
    assert watched.changes == [(CLOSED, OPEN)]
    assert watched.breaker.refuses and watched.breaker.admit() is None


def test_what_is_neither_changes_no_count() -> None:
    """A withdrawn operation neither adds to the failures nor ends their row."""
    watched = Watched()
    for _ in range(2):
        watched.admit().fail("gone")
        watched.admit().withdraw()
    assert watched.breaker.state is CLOSED
    watched.admit().fail("gone")
    assert watched.breaker.state is OPEN


def test_it_is_tried_again_after_its_cooldown() -> None:
    """Until then nothing is let through; then exactly one is, whose success closes it."""
    watched = Watched()
    watched.open()
    watched.clock.advance(3.9)
    assert watched.breaker.admit() is None
    assert watched.breaker.retry_in_s == pytest.approx(0.1)
    watched.clock.advance(0.1)
    assert not watched.breaker.refuses
    probe = watched.admit()
    assert probe.is_probe and watched.breaker.state is HALF_OPEN
    assert [watched.breaker.admit() for _ in range(3)] == [None] * 3
    assert watched.breaker.refuses
    probe.succeed()
    assert watched.breaker.state is CLOSED
    assert watched.changes == [(CLOSED, OPEN), (OPEN, HALF_OPEN), (HALF_OPEN, CLOSED)]
    assert (watched.breaker.open_for_s, watched.breaker.refuses) == (0.0, False)


def test_each_failed_probe_doubles_the_cooldown_up_to_its_limit() -> None:
    """4, 8, 10, 10 seconds; a success starts from 4 again."""
    watched = Watched()
    for _ in range(2):
        watched.open()
        waits = []
        for _ in range(4):
            waits.append(watched.breaker.retry_in_s)
            watched.probe().fail("still gone")
        assert waits == [4.0, 8.0, 10.0, 10.0]
        assert watched.breaker.open_for_s == sum(waits)
        watched.probe().succeed()


@pytest.mark.parametrize("way", ["withdraw", "twice"])
def test_a_withdrawn_probe_makes_room_for_the_next(way: str) -> None:
    """A probe that was cancelled leaves the breaker open, and the next operation is the probe, at once."""
    watched = Watched()
    watched.open()
    first = watched.probe()
    first.withdraw()
    if way == "twice":
        first.withdraw()
    assert watched.breaker.state is OPEN and not watched.breaker.refuses
    second = watched.admit()
    first.withdraw()
    first.succeed()
    assert second.is_probe and watched.breaker.state is HALF_OPEN
    second.succeed()
    assert watched.breaker.state is CLOSED


@pytest.mark.parametrize("outcome", ["succeed", "fail", "withdraw"])
@pytest.mark.parametrize("moment", ["open", "half_open", "reopened", "closed"])
def test_old_news_changes_nothing(moment: str, outcome: str) -> None:
    """An operation that began before the breaker opened or closed tells nothing about the store after that."""
    watched = Watched(max_failures=1)
    old = watched.admit()
    watched.open()
    assert not old.counts
    if moment != "open":
        probe = watched.probe()
        if moment == "reopened":
            probe.fail("gone")
        elif moment == "closed":
            probe.succeed()
    before = (watched.breaker.state, watched.breaker.retry_in_s, len(watched.changes))
    old.succeed() if outcome == "succeed" else old.fail("late") if outcome == "fail" else old.withdraw()
    assert (watched.breaker.state, watched.breaker.retry_in_s, len(watched.changes)) == before
    assert watched.breaker.fault == "gone"


def test_only_the_first_outcome_counts() -> None:
    """An operation that missed its deadline and then went well is one failure, and no success."""
    watched = Watched(max_failures=2)
    late = watched.admit()
    assert late.fail("too late")
    assert not late.fail("and raised")
    late.succeed()
    late.withdraw()
    assert watched.breaker.state is CLOSED
    watched.admit().fail("gone")
    assert watched.breaker.state is OPEN
