"""FencedPages: a page leaves when its own fences have passed, and whoever takes it earlier gets just those."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from hicache_async._fence import AllFences
from hicache_async.abc import Fence
from hicache_async.core.fenced import FencedPages
from hicache_async.types import Pages
from tests.core.streams import StreamFence, Streams
from tests.core.world import LONG, QUICK, OpenFence


def ids(*pages: int) -> Pages:
    """Return page ids as the books take them."""
    return np.array(pages, dtype=np.int64)


def take(fenced: FencedPages, num_pages: int) -> tuple[list[int], list[Fence]]:
    """Take out the pages that come first, with their fences."""
    pages, after = fenced.oldest(num_pages)
    fenced.drop_oldest(num_pages)
    return pages.tolist(), after


# Leaving


def test_a_page_waits_for_its_own_fences_only() -> None:
    """Pages leave when what they wait for has passed, although pages freed before them stay."""
    fenced, streams = FencedPages(), Streams()
    fenced.add(ids(0, 1), streams.fence("compute", 7))
    fenced.add(ids(2), streams.fence("copy", 1))
    fenced.add(ids(3), AllFences([streams.fence("copy", 0), streams.fence("compute", 7)]))
    fenced.add(ids(4), streams.fence("copy", 0))
    assert fenced.drain().tolist() == []
    streams.ended["copy"] = 2
    assert fenced.drain().tolist() == [2, 4]
    assert fenced.num_pages == 3
    streams.ended["compute"] = 8
    assert fenced.drain().tolist() == [0, 1, 3]
    assert fenced.num_pages == 0


def test_pages_leave_in_the_order_of_their_freeing() -> None:
    """Whichever fence passed first, among pages that leave together the one freed first comes first."""
    fenced, streams = FencedPages(), Streams()
    for page, (stream, sequence) in enumerate([("a", 1), ("b", 0), ("a", 0), ("c", 5), ("b", 3)]):
        fenced.add(ids(9 - page), streams.fence(stream, sequence))
    streams.ended.update(b=4, a=2)
    assert fenced.drain().tolist() == [9, 8, 7, 5]
    assert fenced.drain().tolist() == []


def test_a_fence_that_has_passed_already_keeps_nobody() -> None:
    """Pages that are added as their last fence passes leave at once; nothing else has to pass for them."""
    fenced, streams = FencedPages(), Streams()
    fenced.add(ids(0), streams.fence("long", 0))
    streams.ended["copy"] = 1
    fenced.add(ids(1), streams.fence("copy", 0))
    assert fenced.drain().tolist() == [1]


def test_a_failure_out_of_turn_does_not_let_the_lower_ones_pass() -> None:
    """A fence that failed before its turn is behind those below it all the same, also for a taker."""
    fenced, streams = FencedPages(), Streams()
    running, queued = streams.fence("copy", 3), streams.fence("copy", 5)
    fenced.add(ids(0, 1), AllFences([running, queued]))
    fenced.add(ids(2), running)
    queued.fail()
    assert fenced.drain().tolist() == []
    assert take(fenced, 1) == ([0], [running])
    streams.ended["copy"] = 4
    assert fenced.drain().tolist() == [1, 2]


def test_a_lower_fence_may_come_after_a_higher_one() -> None:
    """Pages freed behind an earlier place of a stream leave before those that wait for a later one."""
    fenced, streams = FencedPages(), Streams()
    late, early = streams.fence("copy", 5), streams.fence("copy", 3)
    fenced.add(ids(0), late)
    fenced.add(ids(1), early)
    streams.ended["copy"] = 4
    assert fenced.drain().tolist() == [1]
    assert take(fenced, 1) == ([0], [late])


def test_any_integer_is_a_place() -> None:
    """Sequences below zero, and far above, are in order as others are."""
    fenced, streams = FencedPages(), Streams()
    streams.ended["s"] = -8
    low, high = streams.fence("s", -7), streams.fence("s", 2**62)
    fenced.add(ids(0), low)
    fenced.add(ids(1), high)
    assert fenced.drain().tolist() == []
    assert take(fenced, 1) == ([0], [low])
    assert take(fenced, 1) == ([1], [high])


# Taking


def test_a_taker_gets_one_fence_a_stream() -> None:
    """Of each stream comes the last fence that the taken pages wait for, and of others none."""
    fenced, streams = FencedPages(), Streams()
    copies = [streams.fence("copy", sequence) for sequence in range(4)]
    compute, foreign = streams.fence("compute", 9), OpenFence()
    fenced.add(ids(0, 1), copies[1])
    fenced.add(ids(2), AllFences([copies[2], foreign]))
    fenced.add(ids(3), copies[0])
    fenced.add(ids(4), AllFences([copies[3], compute]))
    assert fenced.oldest(2)[1] == [copies[1]]
    assert take(fenced, 4) == ([0, 1, 2, 3], [copies[2], foreign])
    assert take(fenced, 1) == ([4], [copies[3], compute])
    assert fenced.num_pages == 0


def test_a_taker_gets_no_fence_that_has_passed() -> None:
    """A page that still waits for one stream brings no fence of another that it waited for."""
    fenced, streams = FencedPages(), Streams()
    compute = streams.fence("compute", 0)
    fenced.add(ids(0), AllFences([streams.fence("copy", 0), compute]))
    fenced.add(ids(1), streams.fence("copy", 1))
    streams.ended["copy"] = 1
    assert fenced.drain().tolist() == []
    assert take(fenced, 1) == ([0], [compute])


def test_looking_takes_nothing() -> None:
    """What a taker would get can be asked for as often as one likes, and is the asker's own."""
    fenced, streams = FencedPages(), Streams()
    fence = streams.fence("copy", 0)
    fenced.add(ids(0, 1), fence)
    for _ in range(3):
        pages, after = fenced.oldest(2)
        assert (pages.tolist(), after) == ([0, 1], [fence])
        pages[:] = 7
    assert take(fenced, 2) == ([0, 1], [fence])


# Cost


def test_few_questions_are_asked() -> None:
    """A drain asks one open fence a stream, however many there are, and each passed one once."""
    fenced, streams = FencedPages(), Streams()
    for sequence in range(100):
        both = AllFences([streams.fence("copy", sequence), streams.fence("compute", sequence)])
        fenced.add(ids(2 * sequence, 2 * sequence + 1), both)
    assert not streams.asked, "adding asks nothing"
    fenced.drain()
    assert streams.asked == {"copy": 1, "compute": 1}
    streams.asked.clear()
    streams.ended.update(copy=50, compute=10)
    assert len(fenced.drain()) == 20
    assert streams.asked == {"copy": 51, "compute": 11}
    streams.asked.clear()
    streams.ended["compute"] = 100
    assert len(fenced.drain()) == 80
    assert streams.asked == {"copy": 1, "compute": 90}, "no fence of it is left to ask"


@pytest.mark.parametrize("taken", [False, True], ids=["passed", "taken"])
def test_streams_and_fences_are_forgotten(taken: bool) -> None:
    """A new stream and a new foreign fence at each step leave nothing behind, beside a page that stays."""
    fenced, streams = FencedPages(), Streams()
    if not taken:  # what is taken is what came first
        fenced.add(ids(10_000), streams.fence("long", 0))
    made: list[weakref.ref[Fence]] = []
    for step in range(300):
        ordered, foreign = streams.fence(f"step {step}", step), OpenFence()
        made += [weakref.ref(ordered), weakref.ref(foreign)]
        fenced.add(ids(step, step + 1_000), AllFences([ordered, foreign]))
        if taken:
            take(fenced, 2)
        else:
            streams.ended[f"step {step}"], foreign.is_passed = step + 1, True
            assert fenced.drain().tolist() == [step, step + 1_000]
        del ordered, foreign
        assert not [fence for fence in made if fence() is not None]
    assert len(fenced._streams) == fenced.num_pages == (0 if taken else 1)
    assert len(fenced._pages) < 20


def test_one_fence_is_kept_of_each_place() -> None:
    """A device may make a new fence each time it is asked for the same place; the first is enough."""
    fenced, streams = FencedPages(), Streams()
    first = streams.fence("compute", 0)
    fenced.add(ids(0), first)
    again = [streams.fence("compute", 0) for _ in range(3)]
    made = [weakref.ref(fence) for fence in again]
    for page, fence in enumerate(again, 1):
        fenced.add(ids(page), fence)
    del again, fence
    assert [ref() for ref in made] == [None] * 3
    assert take(fenced, 4) == ([0, 1, 2, 3], [first])


def test_the_order_has_room_for_what_is_in_it() -> None:
    """Pages that come and go by the thousand, some always here, take room for those only."""
    fenced, streams = FencedPages(), Streams()
    for sequence in range(2_000):
        fenced.add(ids(*range(3 * sequence, 3 * sequence + 3)), streams.fence("copy", sequence))
        if sequence >= 5:
            assert take(fenced, 3)[0] == [3 * sequence - 15, 3 * sequence - 14, 3 * sequence - 13]
    assert fenced.num_pages == 15
    assert len(fenced._pages) <= 2 * 18


# A model

STREAM = st.sampled_from("abc")
SEQUENCE = st.integers(0, 12)


class FencedMachine(RuleBasedStateMachine):
    """Drive FencedPages against a dict from each page to all its fences."""

    @initialize()
    def open(self) -> None:
        self.fenced, self.streams = FencedPages(), Streams()
        self.outside = set(range(24))
        self.waiting: dict[int, list[StreamFence | OpenFence]] = {}  # freed longest ago first
        self.any_failed_early = False

    def some_fences(self, data: st.DataObject) -> list[StreamFence | OpenFence]:
        made = [
            self.streams.fence(*place)
            for place in data.draw(st.lists(st.tuples(STREAM, SEQUENCE), min_size=1, max_size=4))
        ]
        known = [fence for fences in self.waiting.values() for fence in fences]
        again = data.draw(st.lists(st.sampled_from(known), max_size=2)) if known else []
        foreign = [OpenFence() for _ in range(data.draw(st.integers(0, 1)))]
        return [*made, *again, *foreign]

    @rule(data=st.data(), num_pages=st.integers(0, 6))
    def free(self, data: st.DataObject, num_pages: int) -> None:
        pages = data.draw(st.permutations(sorted(self.outside)))[:num_pages]
        fences = self.some_fences(data)
        self.fenced.add(ids(*pages), fences[0] if len(fences) == 1 else AllFences(fences))
        self.outside.difference_update(pages)
        self.waiting.update((page, fences) for page in pages)

    @rule(stream=STREAM, num_fences=st.integers(1, 5))
    def go_on(self, stream: str, num_fences: int) -> None:
        self.streams.ended[stream] += num_fences

    def of_kind(self, kind: type) -> list[StreamFence | OpenFence]:
        return [fence for fences in self.waiting.values() for fence in fences if isinstance(fence, kind)]

    @precondition(lambda self: self.of_kind(OpenFence))
    @rule(data=st.data())
    def pass_foreign(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.of_kind(OpenFence))).is_passed = True

    @rule()
    def drain(self) -> None:
        settled = [page for page in self.waiting if not self.open_fences([page])]
        left = self.fenced.drain().tolist()
        assert left == [page for page in settled if page in left]
        assert left == settled or self.any_failed_early
        self.leave(left)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), drained=st.booleans())
    def take(self, data: st.DataObject, drained: bool) -> None:
        if drained:
            self.drain()
        num_pages = data.draw(st.integers(0, len(self.waiting)))
        if not num_pages:
            return
        expected = list(self.waiting)[:num_pages]
        pages, after = take(self.fenced, num_pages)
        assert pages == expected
        self.check_after(expected, after)
        self.leave(pages)

    def check_after(self, pages: list[int], after: list[Fence]) -> None:
        needed = self.open_fences(pages)
        behind = {place_of(fence)[0]: fence for fence in after}
        assert len(behind) == len(after), "one fence a stream"
        for fence in needed:
            stream, sequence = place_of(fence)
            assert place_of(behind[stream])[1] >= sequence
        named = {place_of(fence)[0] for page in pages for fence in self.waiting[page]}
        assert set(behind) <= named, "a stream that no page waits for"
        assert not [fence for fence in after if is_passed(fence)]
        if not self.any_failed_early:
            last = {place_of(fence) for fence in needed}
            assert {place_of(fence) for fence in after} == {
                (stream, max(sequence for name, sequence in last if name == stream)) for stream, _ in last
            }

    def open_fences(self, pages: list[int]) -> list[StreamFence | OpenFence]:
        return [fence for page in pages for fence in self.waiting[page] if not is_passed(fence)]

    def leave(self, pages: list[int]) -> None:
        for page in pages:
            del self.waiting[page]
        self.outside.update(pages)

    @invariant()
    def agrees(self) -> None:
        assert self.fenced.num_pages == len(self.waiting)
        if self.waiting:
            assert self.fenced.oldest(len(self.waiting))[0].tolist() == list(self.waiting)
        known = {place_of(fence)[0] for fences in self.waiting.values() for fence in fences}
        assert set(self.fenced._streams) <= known


class FailingMachine(FencedMachine):
    """As its base, and fences fail before their turn."""

    @precondition(lambda self: self.of_kind(StreamFence))
    @rule(data=st.data())
    def fail_early(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.of_kind(StreamFence))).fail()
        self.any_failed_early = True


def place_of(fence: Fence) -> tuple[object, int]:
    return (fence.stream, fence.sequence) if isinstance(fence, StreamFence) else (fence, 0)


def is_passed(fence: Fence) -> bool:
    return not fence.is_open if isinstance(fence, StreamFence) else fence.passed()


machines = pytest.mark.parametrize("machine", [FencedMachine, FailingMachine], ids=["in turn", "failing"])


@machines
def test_it_agrees_with_a_dict(machine: type[FencedMachine]) -> None:
    """Under any series of frees, takes and fences that pass no page leaves or is taken without its fences."""
    run_machine(machine, settings=QUICK)


@pytest.mark.stress
@pytest.mark.timeout(600)
@machines
def test_it_agrees_with_a_dict_for_long(machine: type[FencedMachine]) -> None:
    """As above, many times."""
    run_machine(machine, settings=LONG)
