"""Admission: who gets one of a bounded number of slots, and when."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from hicache_async.flows.admission import FEW, MAX_PER_TURN, Admission
from tests.flows.rig import turns

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


@dataclass(eq=False)
class Guest:
    """Who wants a slot, writes down that it got it, and keeps it."""

    name: str
    log: list[str]
    priority: int = 0
    is_large: bool = False
    has_begun: bool = False
    waits: bool = field(default=True)

    def admitted(self) -> None:
        self.waits = False
        self.log.append(self.name)


def make(num_slots: int) -> tuple[Admission, list[str]]:
    return Admission(asyncio.get_running_loop(), num_slots), []


def leave(admission: Admission, guest: Guest) -> None:
    """Let one that waits go."""
    guest.waits = False
    admission.left(guest)


async def test_nobody_is_admitted_in_the_call_that_lets_it_in() -> None:
    """Whoever enters, or gives a slot back, runs on before anybody is admitted."""
    admission, log = make(1)
    admission.enter(Guest("a", log))
    assert log == []
    await turns(2)
    admission.enter(Guest("b", log))
    admission.give_back(is_large=False)
    assert log == ["a"]
    await turns(2)
    assert log == ["a", "b"]


async def test_no_more_than_the_slots() -> None:
    """However many wait, so many hold a slot, and each one given back goes to the next."""
    admission, log = make(3)
    for number in range(100):
        admission.enter(Guest(str(number), log))
    await turns()
    assert (log, len(admission)) == (["0", "1", "2"], 97)
    for number in range(3, 100):
        admission.give_back(is_large=False)
        await turns(2)
        assert log[3:] == [str(each) for each in range(3, number + 1)]


async def test_by_priority_then_begun_then_arrival() -> None:
    """Higher priority first; among equals those who go on with what they began; then who came first."""
    admission, log = make(1)
    ranks = [
        ("a", 0, False),
        ("b", 1, False),
        ("c", 0, True),
        ("d", -1, True),
        ("e", 1, False),
        ("f", 1, True),
    ]
    for name, priority, has_begun in ranks:
        admission.enter(Guest(name, log, priority, has_begun=has_begun))
    for _ in ranks:
        await turns(2)
        admission.give_back(is_large=False)
    assert "".join(log) == "fbecad"


@pytest.mark.parametrize(("num_slots", "num_large"), [(1, 1), (2, 1), (4, 3), (5, 3), (64, 48)])
async def test_large_ones_leave_a_quarter_to_small_ones(num_slots: int, num_large: int) -> None:
    """Large ones hold three quarters of the slots at most; a small one behind any number of them is next."""
    admission, log = make(num_slots)
    for _ in range(2 * num_slots):
        admission.enter(Guest("L", log, priority=9, is_large=True))
    await turns()
    assert log == ["L"] * num_large
    for _ in range(num_slots):
        admission.enter(Guest("s", log))
    await turns()
    assert log[num_large:] == ["s"] * (num_slots - num_large)
    admission.give_back(is_large=True)
    await turns()
    assert log.count("L") == num_large + 1


async def test_small_and_large_ones_of_one_rank_take_turns() -> None:
    """Neither starves: where both wait every second slot is a large one's, and rank counts before turns."""
    admission, log = make(4)
    for number in range(6):
        admission.enter(Guest("s", log))
        admission.enter(Guest("L", log, is_large=True))
        if number == 3:
            admission.enter(Guest("H", log, priority=1, is_large=True))
    for _ in range(13):
        await turns(3)
        admission.give_back(is_large=log[-1] != "s")
    assert log[0] == "H"
    assert "".join(log[1:9]) in ("sL" * 4, "Ls" * 4)


async def test_a_few_are_admitted_in_one_turn() -> None:
    """A thousand free slots and as many who wait never make one long turn of the loop."""
    admission, log = make(1000)
    for number in range(1000):
        admission.enter(Guest(str(number), log))
    seen = [0]
    while len(log) < 1000:
        await asyncio.sleep(0)
        seen.append(len(log))
    assert max(later - earlier for earlier, later in pairwise(seen)) == MAX_PER_TURN


async def test_who_has_left_is_passed_over() -> None:
    """One that waits no more is never admitted, wherever it stood, and the next one is."""
    admission, log = make(1)
    guests = [Guest(name, log) for name in "abcde"]
    for guest in guests:
        admission.enter(guest)
    for guest in (guests[0], guests[2]):
        leave(admission, guest)
    assert len(admission) == 3
    for _ in guests:
        await turns(2)
        admission.give_back(is_large=False)
    assert log == ["b", "d", "e"]


@pytest.mark.parametrize("num_priorities", [1, 50])
async def test_those_who_have_left_take_no_room(num_priorities: int) -> None:
    """While no slot comes free, thousands who come and go leave no more behind than wait, and a few."""
    admission, log = make(1)
    admission.enter(Guest("holds it", log))
    await turns(2)
    stays = Guest("stays", log)
    admission.enter(stays)
    for number in range(5000):
        guest = Guest("goes", log, number % num_priorities)
        admission.enter(guest)
        leave(admission, guest)
    standing = [guest for queue in admission._small._queues.values() for guest in queue]
    assert len(standing) <= 2 + FEW and stays in standing
    admission.give_back(is_large=False)
    await turns(2)
    assert log == ["holds it", "stays"]
