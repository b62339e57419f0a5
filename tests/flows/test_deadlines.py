"""Deadlines: many moments behind one timer, told in time, a few in each turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from hicache_async.flows.deadlines import FEW, MAX_PER_TURN, Deadlines
from hicache_async.testing.manual import ManualClock

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


@dataclass(eq=False)
class Owner:
    """Write down that its time was up."""

    name: str
    log: list[str]
    error: Exception | None = None

    def time_is_up(self) -> None:
        self.log.append(self.name)
        if self.error is not None:
            raise self.error


def make_deadlines() -> tuple[Deadlines, ManualClock, list[str], list[BaseException]]:
    clock, bugs = ManualClock(), list[BaseException]()
    return Deadlines(asyncio.get_running_loop(), clock, bugs.append), clock, [], bugs


async def test_many_deadlines_have_one_timer() -> None:
    """Whatever the order in which they are set they fall due in time, behind one timer; then there is none."""
    deadlines, clock, log, _ = make_deadlines()
    for delay in (3, 1, 2, 5, 4):
        deadlines.add(delay, Owner(str(delay), log))
        assert clock.pending == 1
    clock.advance(2.5)
    assert (log, len(deadlines), clock.pending) == (["1", "2"], 3, 1)
    deadlines.add(0.25, Owner("early", log))
    clock.advance(10)
    assert log == ["1", "2", "early", "3", "4", "5"]
    assert (len(deadlines), clock.pending) == (0, 0)


async def test_a_cancelled_deadline_says_nothing() -> None:
    """Cancelled, twice as well, or after it fell due, nobody hears of it, and the last one takes the timer along."""
    deadlines, clock, log, _ = make_deadlines()
    first, second = (deadlines.add(1, Owner(name, log)) for name in "ab")
    deadlines.cancel(first)
    deadlines.cancel(first)
    deadlines.cancel(None)
    clock.advance(1)
    deadlines.cancel(second)
    assert (log, clock.pending) == (["b"], 0)
    deadlines.cancel(deadlines.add(1, Owner("c", log)))
    assert (len(deadlines), clock.pending) == (0, 0)


async def test_cancelled_deadlines_take_no_room() -> None:
    """Thousands set and cancelled, one of them staying, leave a few behind."""
    deadlines, clock, log, _ = make_deadlines()
    deadlines.add(9, Owner("stays", log))
    for _ in range(5000):
        deadlines.cancel(deadlines.add(1, Owner("goes", log)))
    assert len(deadlines._heap) <= 3 + FEW
    clock.advance(9)
    assert log == ["stays"]


async def test_an_owner_that_raises_hurts_nobody() -> None:
    """What an owner raises is reported, and the others hear of theirs in the same turn."""
    deadlines, clock, log, bugs = make_deadlines()
    error = ValueError("here")
    for name in "abc":
        deadlines.add(1, Owner(name, log, error if name == "b" else None))
    clock.advance(1)
    assert (log, bugs) == (["a", "b", "c"], [error])


async def test_a_few_fall_due_in_one_turn() -> None:
    """A thousand that fall due together are told a few in each turn of the loop."""
    deadlines, clock, log, _ = make_deadlines()
    for number in range(1000):
        deadlines.add(1, Owner(str(number), log))
    clock.advance(1)
    seen = [len(log)]
    while len(log) < 1000:
        await asyncio.sleep(0)
        seen.append(len(log))
    assert max(later - earlier for earlier, later in zip([0, *seen], seen, strict=False)) <= MAX_PER_TURN
    assert (len(deadlines), clock.pending) == (0, 0)


async def test_an_owner_may_set_and_cancel_others() -> None:
    """What an owner does to the deadlines when its own falls due counts at once."""
    deadlines, clock, log, _ = make_deadlines()
    later = deadlines.add(2, Owner("never", log))

    class Setting(Owner):
        def time_is_up(self) -> None:
            super().time_is_up()
            deadlines.cancel(later)
            deadlines.add(1, Owner("new", log))

    deadlines.add(1, Setting("first", log))
    clock.advance(5)
    assert (log, clock.pending) == (["first", "new"], 0)
