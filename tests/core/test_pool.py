"""PagePool: every page has one owner, and every change of owner is checked."""

from __future__ import annotations

import asyncio
import re
import sys
import tracemalloc
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from hicache_async._fence import AllFences, EngineFence
from hicache_async.abc import Fence
from hicache_async.core import pool as pool_module
from hicache_async.core.audit import check_capacity
from hicache_async.core.pool import FEW_PAGES, NO_PAGES, FreeList, Owner, PagePool
from hicache_async.errors import CapacityError, InvariantError
from hicache_async.types import Pages
from tests.core.streams import StreamFence, Streams
from tests.core.world import LONG, QUICK, OpenFence, start_core


def ids(*pages: int) -> Pages:
    """Return page ids as the books take them."""
    return np.array(pages, dtype=np.int64)


def make_pool(num_pages: int = 8, on_freed: Callable[[], None] = lambda: None) -> PagePool:
    return PagePool("device", FreeList(num_pages), num_pages, on_freed)


def snapshot(pool: PagePool) -> tuple[object, ...]:
    """Return all that a pool says of itself."""
    owned = [pool.owned_by(owner).tolist() for owner in Owner]
    return (*owned, pool.num_free, pool.num_fenced, pool.available(fenced=False), pool.available(fenced=True))


class StubLoop:
    """A loop that keeps what it is asked to call until the test calls it."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.calls.append(callback)

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()

    def engine_fence(self) -> EngineFence:
        return EngineFence(cast(asyncio.AbstractEventLoop, self))


class EnginePool:
    """A free list of the engine's own, which can be told what to hand out."""

    def __init__(self, num_pages: int) -> None:
        self.capacity = num_pages
        self.free = list(range(num_pages))
        self.next: list[int] = []

    def take(self, num_pages: int) -> Pages:
        taken = (self.next + self.free[len(self.next) :])[:num_pages]
        self.free = [page for page in self.free if page not in taken]
        return ids(*taken)

    def give_back(self, pages: Pages) -> None:
        self.free += pages.tolist()

    def num_free(self) -> int:
        return len(self.free)


# FreeList


def test_free_list_gives_ascending_runs_and_the_last_back_first() -> None:
    """Pages come in ascending order; those that came back last go out first."""
    free = FreeList(6)
    assert free.take(4).tolist() == [0, 1, 2, 3]
    free.give_back(ids(2, 3))
    assert free.take(3).tolist() == [2, 3, 4]
    assert free.num_free() == 1


def test_free_list_leaves_reserved_pages_out() -> None:
    """A reserved page counts for nothing and is never handed out."""
    free = FreeList(6, reserved_pages=[0, 4])
    assert free.capacity == 4
    assert free.take(4).tolist() == [1, 2, 3, 5]


def test_free_list_takes_all_or_nothing() -> None:
    """More pages than are free is a CapacityError that says both numbers and takes none."""
    free = FreeList(3)
    with pytest.raises(CapacityError, match="4 pages asked for, 3 free"):
        free.take(4)
    assert free.num_free() == 3


# Refusals

each_way = pytest.mark.parametrize("few_pages", [0, FEW_PAGES], ids=["as an array", "one by one"])
"""Pages are checked and booked one by one where they are few, and as an array where they are many."""


@pytest.mark.parametrize(
    ("pages", "named"),
    [
        (ids(4), "4 is free"),
        (ids(0, 4, 5), "4 is free, 5 is free"),
        (ids(2), "2 is tree"),
        (ids(0, 1, 0), "twice in one call: [0]"),
        (ids(-8), "no pages [-8]"),  # as an index it would be page 0, the giver's own
        (ids(0, 8), "no pages [8]"),
    ],
)
@pytest.mark.parametrize("verb", ["free", "move"])
@each_way
def test_a_page_that_is_not_the_givers_is_refused(
    few_pages: int, verb: str, pages: Pages, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing or moving what the giver does not own raises, names the pages and changes nothing."""
    monkeypatch.setattr(pool_module, "FEW_PAGES", few_pages)
    pool = make_pool()
    pool.take(2, Owner.LEASE, fenced=True)
    pool.take(2, Owner.TREE, fenced=True)
    before = snapshot(pool)
    with pytest.raises(InvariantError, match=re.escape(named)):
        if verb == "free":
            pool.free(pages, Owner.LEASE)
        else:
            pool.move(pages, Owner.LEASE, Owner.TREE)
    assert snapshot(pool) == before
    pool.free(ids(0, 1), Owner.LEASE)
    assert pool.num_free == 6


def test_a_second_free_is_refused_and_hurts_nobody() -> None:
    """A page freed twice raises at the second call; the next owner keeps it."""
    pool = make_pool(2)
    pages = pool.take(1, Owner.LEASE, fenced=True).pages
    pool.free(pages, Owner.LEASE)
    with pytest.raises(InvariantError, match="device pages freed as lease's are not: 0 is free"):
        pool.free(pages, Owner.LEASE)
    assert pool.take(2, Owner.HOP, fenced=True).pages.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("handed_out", "named"), [([0], "0 is lease"), ([4, 4], "twice in one call: [4]"), ([9], "no pages [9]")]
)
def test_a_free_list_that_hands_out_a_used_page_is_caught(handed_out: list[int], named: str) -> None:
    """A page that the engine's free list gives out twice raises; list and book are as before."""
    engine = EnginePool(6)
    pool = PagePool("device", engine, 6)
    pool.take(1, Owner.LEASE, fenced=True)
    fences = [OpenFence(), OpenFence()]
    for fence in fences:
        pool.free(pool.take(1, Owner.LEASE, fenced=True).pages, Owner.LEASE, after=fence)
    pool.take(1, Owner.TREE, fenced=True)
    engine.next = handed_out
    before = snapshot(pool)
    with pytest.raises(InvariantError, match=re.escape(named)):
        pool.take(4, Owner.HOP, fenced=True)
    engine.next, engine.free = [], [4, 5]
    assert snapshot(pool) == before
    grant = pool.take(4, Owner.HOP, fenced=True)
    assert grant.pages.tolist() == [4, 5, 1, 2] and grant.after == fences


def test_a_free_list_that_hands_out_too_little_is_caught() -> None:
    """Fewer pages than were asked for raise with both numbers, and the free list has them back."""
    engine = EnginePool(6)
    pool = PagePool("device", engine, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "num_free", lambda: 8)
        with pytest.raises(InvariantError, match="8 device pages asked for, 6 given out"):
            pool.take(8, Owner.HOP, fenced=True)
    assert pool.num_free == 6 and len(pool.owned_by(Owner.FREE)) == 6


def test_a_free_list_may_hand_out_a_part_of_itself() -> None:
    """What the engine's free list writes into its array afterwards does not change who has which page."""
    engine = EnginePool(4)
    handed_out = ids(0, 1)
    engine.take = lambda num_pages: handed_out  # type: ignore[method-assign]
    pages = PagePool("device", engine, 4).take(2, Owner.LEASE, fenced=True).pages
    handed_out[:] = 3
    assert pages.tolist() == [0, 1]


def test_more_than_there_is_takes_nothing() -> None:
    """Asking for too many raises with the numbers; nothing is taken."""
    pool = make_pool(3)
    pool.take(1, Owner.LEASE, fenced=True)
    with pytest.raises(CapacityError, match="3 device pages asked for, 2 free of 3"):
        pool.take(3, Owner.LEASE, fenced=True)
    assert pool.num_free == 2


def test_a_negative_number_of_pages_is_refused() -> None:
    """Asking for fewer than no pages raises; the free list is not touched."""
    pool = make_pool(3)
    with pytest.raises(InvariantError, match="-1 device pages asked for"):
        pool.take(-1, Owner.LEASE, fenced=True)
    assert pool.take(3, Owner.LEASE, fenced=True).pages.tolist() == [0, 1, 2]


def test_no_pages_are_taken_moved_and_freed_without_ado() -> None:
    """Zero pages are a legal number for every verb."""
    pool = make_pool(2)
    assert len(pool.take(0, Owner.LEASE, fenced=True).pages) == 0
    pool.move(NO_PAGES, Owner.LEASE, Owner.TREE)
    pool.free(NO_PAGES, Owner.LEASE, after=OpenFence())
    assert pool.num_free == 2 and pool.num_fenced == 0


CHECKS_WITHOUT_ASSERT = """
assert False, "assertions are on"
import numpy as np
from hicache_async.core.pool import FreeList, Owner, PagePool
from hicache_async.errors import InvariantError
class Twice(FreeList):
    def take(self, num_pages):
        return np.zeros(num_pages, dtype=np.int64)
    def give_back(self, pages):
        pass
pool, twice = PagePool("device", FreeList(4), 4), PagePool("engine", Twice(4), 4)
pages = pool.take(2, Owner.LEASE, fenced=True).pages
twice.take(1, Owner.LEASE, fenced=True)
for wrong in (
    lambda: twice.take(1, Owner.LEASE, fenced=True),
    lambda: pool.free(pages, Owner.TREE),
    lambda: pool.move(pages, Owner.TREE, Owner.HOP),
    lambda: pool.free(np.array([1, 1]), Owner.LEASE),
    lambda: pool.free(np.array([0, 1] * 100), Owner.LEASE),
):
    try:
        wrong()
    except InvariantError as error:
        print(error)
print(pool.num_free, pool.owned_by(Owner.LEASE))
"""


def test_refusals_do_not_depend_on_assert() -> None:
    """With assertions switched off a double take, free or move raises all the same."""
    child = start_core(CHECKS_WITHOUT_ASSERT, "-O")
    assert child.communicate()[0].splitlines() == [
        "engine pages taken as free's are not: 0 is lease",
        "device pages freed as tree's are not: 0 is lease, 1 is lease",
        "device pages moved as tree's are not: 0 is lease, 1 is lease",
        "device pages freed twice in one call: [1]",
        "device pages freed twice in one call: [0, 1]",
        "2 [0 1]",
    ]
    assert child.returncode == 0


# Fences


def test_fenced_pages_go_last_in_order_and_with_their_fences() -> None:
    """A user of the device gets settled pages first, then fenced ones, oldest first, with every fence."""
    pool = make_pool(6)
    pages = pool.take(5, Owner.LEASE, fenced=True).pages
    first, second = OpenFence(), OpenFence()
    pool.free(pages[3:], Owner.LEASE, after=first)
    pool.free(pages[:2], Owner.LEASE, after=second)
    assert (pool.num_free, pool.num_fenced) == (5, 4)
    grant = pool.take(4, Owner.LEASE, fenced=True)
    assert grant.pages.tolist() == [5, 3, 4, 0]
    assert grant.after == [first, second]
    rest = pool.take(1, Owner.LEASE, fenced=True)
    assert (rest.pages.tolist(), rest.after) == ([1], [second])


def test_a_fenced_run_is_used_up_before_the_next() -> None:
    """What is left of a run that was taken in part goes out before runs that were freed after it."""
    pool = make_pool(4)
    pages = pool.take(4, Owner.LEASE, fenced=True).pages
    first, second = OpenFence(), OpenFence()
    pool.free(pages[:3], Owner.LEASE, after=first)
    pool.free(pages[3:], Owner.LEASE, after=second)
    grants = [pool.take(count, Owner.LEASE, fenced=True) for count in (1, 1, 2)]
    assert [grant.pages.tolist() for grant in grants] == [[0], [1], [2, 3]]
    assert [grant.after for grant in grants] == [[first], [first], [first, second]]


def test_an_unrelated_long_fence_keeps_nobody() -> None:
    """Pages whose own fence has passed are granted plainly, although a fence before theirs never passes."""
    pool, streams = make_pool(6), Streams()
    pages = pool.take(6, Owner.LEASE, fenced=True).pages
    forward = streams.fence("compute", 7)
    pool.free(pages[:3], Owner.LEASE, after=forward)
    pool.free(pages[3:], Owner.LEASE, after=streams.fence("copy", 1))
    streams.ended["copy"] = 2
    grant = pool.take(3, Owner.LEASE, fenced=True)
    assert (grant.pages.tolist(), grant.after) == ([3, 4, 5], [])
    pool.free(grant.pages, Owner.LEASE)
    assert (pool.num_free, pool.num_fenced, pool.available(fenced=False)) == (6, 3, 3)
    assert pool.take(3, Owner.HOP, fenced=False).pages.tolist() == [3, 4, 5]
    grant = pool.take(3, Owner.LEASE, fenced=True)
    assert (grant.pages.tolist(), grant.after) == ([0, 1, 2], [forward])


def test_of_one_stream_the_last_fence_comes_along() -> None:
    """A taker of pages freed behind several fences of one stream gets the last of those that its pages need."""
    pool, streams = make_pool(3), Streams()
    pages = pool.take(3, Owner.LEASE, fenced=True).pages
    copies = [streams.fence("copy", sequence) for sequence in (5, 4, 6)]
    for page, fence in zip(pages, copies, strict=True):
        pool.free(ids(page), Owner.LEASE, after=fence)
    assert pool.take(2, Owner.LEASE, fenced=True).after == copies[:1]
    assert pool.take(1, Owner.LEASE, fenced=True).after == copies[2:]


def test_a_fence_comes_along_only_when_it_is_needed() -> None:
    """Who is served from settled pages alone waits for nothing."""
    pool = make_pool(4)
    pool.free(pool.take(2, Owner.LEASE, fenced=True).pages, Owner.LEASE, after=OpenFence())
    assert pool.take(2, Owner.LEASE, fenced=True).after == []


def test_fenced_pages_are_not_for_host_readers() -> None:
    """Who does not order behind fences sees fenced pages only when the fence has passed."""
    pool = make_pool(4)
    pages = pool.take(4, Owner.LEASE, fenced=True).pages
    fence = OpenFence()
    pool.free(pages, Owner.LEASE, after=fence)
    assert (pool.available(fenced=True), pool.available(fenced=False)) == (4, 0)
    with pytest.raises(CapacityError, match="1 device pages asked for, 0 free of 4"):
        pool.take(1, Owner.HOP, fenced=False)
    fence.is_passed = True
    assert pool.available(fenced=False) == 4
    assert pool.take(4, Owner.HOP, fenced=False).after == []


def test_a_passed_fence_is_no_fence() -> None:
    """Pages freed behind a fence that has passed are settled at once; one that passes later is dropped."""
    pool = make_pool(2)
    pages = pool.take(2, Owner.LEASE, fenced=True).pages
    passed, later = OpenFence(), OpenFence()
    passed.is_passed = True
    pool.free(pages[:1], Owner.LEASE, after=passed)
    pool.free(pages[1:], Owner.LEASE, after=later)
    assert pool.num_fenced == 1
    later.is_passed = True
    assert pool.num_fenced == 0
    assert pool.take(2, Owner.LEASE, fenced=True).after == []


def test_the_giver_may_reuse_its_array() -> None:
    """What the giver writes into its array after a free does not change which pages are free."""
    pool, loop = make_pool(4), StubLoop()
    pages = pool.take(4, Owner.LEASE, fenced=True).pages
    fence, engine_fence = OpenFence(), loop.engine_fence()
    pool.free(pages[:2], Owner.LEASE, after=fence)
    pool.free(pages[2:], Owner.LEASE, after=engine_fence)
    pages[:] = 0
    engine_fence.set()
    loop.run()
    assert pool.take(4, Owner.LEASE, fenced=True).pages.tolist() == [2, 3, 0, 1]


def test_pages_behind_an_engine_fence_are_not_free_until_it_is_set() -> None:
    """The engine may be the one who waits: such pages are nobody's to take, even with the fence."""
    freed: list[int] = []
    pool, loop = make_pool(4, lambda: freed.append(1)), StubLoop()
    fence = loop.engine_fence()
    pool.free(pool.take(3, Owner.LEASE, fenced=True).pages, Owner.LEASE, after=fence)
    assert (pool.num_free, pool.available(fenced=True)) == (1, 1)
    assert pool.owned_by(Owner.HOP).tolist() == [0, 1, 2]
    assert [pages.tolist() for pages in pool.settling()] == [[0, 1, 2]]
    check_capacity(pool)
    fence.set()
    assert pool.num_free == 1, "pages change hands on the loop only"
    loop.run()
    assert (pool.num_free, freed, pool.settling()) == (4, [1], [])
    with pytest.raises(InvariantError):
        pool.free(ids(0), Owner.HOP)


def test_a_failed_engine_fence_frees_too() -> None:
    """A forward that failed writes no more: its pages come back."""
    pool, loop = make_pool(2), StubLoop()
    fence = loop.engine_fence()
    pool.free(pool.take(2, Owner.LEASE, fenced=True).pages, Owner.LEASE, after=fence)
    fence.fail(RuntimeError("the forward failed"))
    loop.run()
    assert pool.num_free == 2


def test_an_engine_fence_among_others_is_waited_for_first() -> None:
    """Behind several fences pages are not free until the engine's are set, then fenced by the rest."""
    pool, loop = make_pool(2), StubLoop()
    device, one, two = OpenFence(), loop.engine_fence(), loop.engine_fence()
    pages = pool.take(2, Owner.LEASE, fenced=True).pages
    pool.free(pages, Owner.LEASE, after=AllFences([device, one, two]))
    for fence in (one, two):
        assert pool.num_free == 0
        fence.set()
        loop.run()
    assert (pool.available(fenced=False), pool.available(fenced=True)) == (0, 2)
    assert pool.take(2, Owner.LEASE, fenced=True).after == [device]


# Cost

OPEN_FENCE = OpenFence()


def one_round(pool: PagePool, num_pages: int) -> None:
    """Use every verb on ``num_pages`` pages, and refuse one of each."""
    pages = pool.take(num_pages, Owner.LEASE, fenced=True).pages
    pool.move(pages, Owner.LEASE, Owner.TREE)
    for verb in (lambda: pool.free(pages, Owner.LEASE), lambda: pool.move(pages, Owner.HOP, Owner.TREE)):
        with pytest.raises(InvariantError):
            verb()
    pool.free(pages, Owner.TREE, after=OPEN_FENCE)
    pool.free(pool.take(num_pages, Owner.LEASE, fenced=True).pages, Owner.LEASE)


class Watched(np.ndarray):
    """An array that refuses every NumPy operation on all of it at once."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object) -> object:
        return self.__array_function__(getattr(ufunc, method), (), inputs, kwargs)

    def __array_function__(self, func: object, types: object, args: object, kwargs: object) -> object:
        arrays = [np.asarray(arg) for arg in cast(tuple[object, ...], args)]
        assert all(len(array) < 1_000 for array in arrays if array.ndim), f"{func} of a whole pool"
        return cast(Callable[..., object], func)(*arrays, **cast(dict[str, object], kwargs))


def calls_and_peak(pool_pages: int, num_pages: int) -> tuple[int, int]:
    """Return how many functions a round calls, C and Python, and how many bytes it needs at most."""
    pool, num_calls = make_pool(pool_pages), 0

    def count(frame: object, event: str, function: object) -> None:
        nonlocal num_calls
        num_calls += "return" not in event

    one_round(pool, num_pages)
    sys.setprofile(count)
    try:
        one_round(pool, num_pages)
    finally:
        sys.setprofile(None)
    tracemalloc.start()
    try:
        one_round(pool, num_pages)
        return num_calls, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("num_pages", [1, 4, 2 * FEW_PAGES])
def test_the_size_of_a_pool_costs_nothing(num_pages: int) -> None:
    """Taking, moving and freeing some pages calls as much and needs no more memory in a far larger pool."""
    small_calls, small_peak = calls_and_peak(1_000, num_pages)
    large_calls, large_peak = calls_and_peak(100_000, num_pages)
    assert large_calls == small_calls
    assert large_peak < small_peak + 1_000


@pytest.mark.parametrize("num_pages", [1, 4, 2 * FEW_PAGES])
def test_no_operation_sees_the_whole_book(num_pages: int) -> None:
    """No verb hands NumPy more than the pages it was given: not the book of owners, not the free list."""
    free_list = FreeList(1_000)
    pool = PagePool("device", free_list, 1_000)
    pool._owners, free_list._ids = pool._owners.view(Watched), free_list._ids.view(Watched)
    with pytest.raises(AssertionError, match="of a whole pool"):
        pool.owned_by(Owner.TREE)
    one_round(pool, num_pages)


# A model


def place_of(fence: Fence) -> tuple[str, int]:
    """Return a fence's stream, a foreign one's being its own, and its place there."""
    return (fence.stream, fence.sequence) if isinstance(fence, StreamFence) else (str(id(fence)), 0)


OWNER = st.sampled_from([Owner.LEASE, Owner.HOP, Owner.TREE])


class PoolMachine(RuleBasedStateMachine):
    """Drive a pool against a dict of owners and a list of fenced runs, each with all its fences."""

    @initialize(num_pages=st.integers(1, 24))
    def open(self, num_pages: int) -> None:
        self.pool = make_pool(num_pages, self.count_freed)
        self.loop = StubLoop()
        self.owners = dict.fromkeys(range(num_pages), Owner.FREE)
        self.streams = Streams()
        self.fenced: list[tuple[list[StreamFence | OpenFence], list[int]]] = []
        self.settling: list[tuple[EngineFence, list[int]]] = []
        self.freed = self.freed_expected = 0

    def count_freed(self) -> None:
        self.freed += 1

    def owned(self, owner: Owner) -> list[int]:
        waiting = {page for _, pages in self.settling for page in pages}
        return [page for page, held_by in self.owners.items() if held_by is owner and page not in waiting]

    def settled_pages(self) -> list[int]:
        behind = {page for _, pages in self.fenced for page in pages}
        return [page for page in self.owned(Owner.FREE) if page not in behind]

    def drain(self) -> None:
        self.fenced = [run for run in self.fenced if not all(fence.passed() for fence in run[0])]

    @rule(num_pages=st.integers(0, 8), owner=OWNER, fenced=st.booleans())
    def take(self, num_pages: int, owner: Owner, fenced: bool) -> None:
        self.drain()
        settled = self.settled_pages()
        if num_pages > (len(self.owned(Owner.FREE)) if fenced else len(settled)):
            with pytest.raises(CapacityError):
                self.pool.take(num_pages, owner, fenced=fenced)
            return
        grant = self.pool.take(num_pages, owner, fenced=fenced)
        plain = min(num_pages, len(settled))
        assert set(grant.pages[:plain].tolist()) <= set(settled)
        behind: list[int] = []
        last: dict[object, StreamFence | OpenFence] = {}
        while plain + len(behind) < num_pages:
            fences, pages = self.fenced.pop(0)
            wanted = num_pages - plain - len(behind)
            if pages[wanted:]:
                self.fenced.insert(0, (fences, pages[wanted:]))
            behind += pages[:wanted]
            for fence in fences:
                if isinstance(fence, OpenFence):
                    last[fence] = fence
                elif (known := last.get(fence.stream)) is None or place_of(known) < place_of(fence):
                    last[fence.stream] = fence
        assert grant.pages[plain:].tolist() == behind
        assert sorted(map(place_of, grant.after)) == sorted(
            place_of(fence) for fence in last.values() if not fence.passed()
        )
        assert len(set(grant.pages.tolist())) == num_pages
        self.owners.update(dict.fromkeys(grant.pages.tolist(), owner))

    def some(self, data: st.DataObject, owner: Owner) -> list[int]:
        owned = self.owned(owner)
        return data.draw(st.lists(st.sampled_from(owned), unique=True)) if owned else []

    @rule(data=st.data(), giver=OWNER, taker=OWNER)
    def move(self, data: st.DataObject, giver: Owner, taker: Owner) -> None:
        pages = self.some(data, giver)
        self.pool.move(ids(*pages), giver, taker)
        self.owners.update(dict.fromkeys(pages, taker))

    def some_fences(self, data: st.DataObject) -> list[StreamFence | OpenFence]:
        places = st.tuples(st.sampled_from("ab"), st.integers(0, 9))
        ordered = data.draw(st.lists(places, max_size=2))
        foreign = data.draw(st.integers(0 if ordered else 1, 1))
        return [*(self.streams.fence(*place) for place in ordered), *(OpenFence() for _ in range(foreign))]

    @rule(data=st.data(), source=OWNER, how=st.sampled_from(["now", "device", "engine"]))
    def free(self, data: st.DataObject, source: Owner, how: str) -> None:
        pages = self.some(data, source)
        fence: Fence | None = None
        if how == "device":
            fences = self.some_fences(data)
            fence = AllFences(fences)
            if pages:
                self.fenced.append((fences, pages))
        elif how == "engine":
            fence = self.loop.engine_fence()
            if pages:
                self.settling.append((fence, pages))
        self.pool.free(ids(*pages), source, after=fence)
        self.owners.update(dict.fromkeys(pages, Owner.HOP if how == "engine" else Owner.FREE))

    @rule(data=st.data(), source=OWNER)
    def give_what_is_not_yours(self, data: st.DataObject, source: Owner) -> None:
        others = [page for page, owner in self.owners.items() if owner is not source]
        if not others:
            return
        pages = data.draw(st.permutations([*self.some(data, source), data.draw(st.sampled_from(others))]))
        with pytest.raises(InvariantError):
            self.pool.free(ids(*pages), source)
        with pytest.raises(InvariantError):
            self.pool.move(ids(*pages), source, Owner.LEASE)

    @rule(data=st.data(), stream=st.sampled_from("ab"))
    def pass_fences(self, data: st.DataObject, stream: str) -> None:
        self.streams.ended[stream] += 1
        foreign = [fence for fences, _ in self.fenced for fence in fences if isinstance(fence, OpenFence)]
        if foreign:
            data.draw(st.sampled_from(foreign)).is_passed = True

    @precondition(lambda self: self.settling)
    @rule(data=st.data())
    def set_engine_fence(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.settling))
        entry[0].set()
        self.loop.run()
        self.settling.remove(entry)
        self.owners.update(dict.fromkeys(entry[1], Owner.FREE))
        self.freed_expected += 1

    @invariant()
    def agrees(self) -> None:
        check_capacity(self.pool)
        for owner in Owner:
            held = [page for page, held_by in self.owners.items() if held_by is owner]
            assert self.pool.owned_by(owner).tolist() == held
        free = self.owned(Owner.FREE)
        assert self.pool.num_free == len(free)
        self.drain()
        assert self.pool.num_fenced == sum(len(pages) for _, pages in self.fenced)
        assert self.pool.available(fenced=True) == len(free)
        assert self.pool.available(fenced=False) == len(self.settled_pages())
        assert sorted(p for pages in self.pool.settling() for p in pages.tolist()) == sorted(
            page for _, pages in self.settling for page in pages
        )
        assert self.freed == self.freed_expected


@each_way
def test_pool_agrees_with_a_dict(few_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any series of takes, moves, frees and fences the book says what a plain dict says."""
    monkeypatch.setattr(pool_module, "FEW_PAGES", few_pages)
    run_machine(PoolMachine, settings=QUICK)


@pytest.mark.stress
@pytest.mark.timeout(600)
@each_way
def test_pool_agrees_with_a_dict_for_long(few_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, many times."""
    monkeypatch.setattr(pool_module, "FEW_PAGES", few_pages)
    run_machine(PoolMachine, settings=LONG)
