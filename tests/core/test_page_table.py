"""PageTable: each page of the reserve keeps its own fences, wherever it goes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache_async._fence import parts
from hicache_async.core.page_table import PageTable
from hicache_async.core.pool import FreeList, Grant, Owner, PagePool
from tests.core.streams import StreamFence, Streams

NUM_PAGES = 64
Needs = dict[int, StreamFence | None]


def grants(data: st.DataObject, pool: PagePool, fence: StreamFence, needs: Needs) -> Grant:
    """Draw a grant of pages of the pool: the first ones plain, the others behind ``fence``."""
    num_pages = data.draw(st.integers(0, 6))
    pages = pool.take(num_pages, Owner.LEASE, fenced=True).pages
    num_plain = data.draw(st.integers(0, num_pages))
    after = [] if num_plain == num_pages else [fence]
    for index, page in enumerate(pages.tolist()):
        needs[page] = after[0] if index >= num_plain else None
    return Grant(pages, after, num_plain)


@given(st.data())
def test_pages_keep_their_own_fences(data: st.DataObject) -> None:
    """Taken, placed or given back, a page is behind what it was granted behind; what was granted plain stays so."""
    pool = PagePool("device", FreeList(NUM_PAGES), NUM_PAGES)
    table, streams = PageTable(pool), Streams()
    needs: Needs = {}
    held: list[int] = []
    for number in range(data.draw(st.integers(1, 6))):
        grant = grants(data, pool, streams.fence("s", number), needs)
        table.reserve(grant)
        held += grant.pages.tolist()
        match data.draw(st.sampled_from(["take", "place", "free", "nothing"])):
            case "take":
                count = data.draw(st.integers(0, len(held)))
                looked, taken = table.first_reserved(count), table.take_reserved(count)
                assert looked.pages.tolist() == taken.pages.tolist() == held[:count]
                assert list(looked.after) == list(taken.after)
                needed = {needs[page] for page in held[:count]} - {None}
                assert set(taken.after) == needed
                assert all(needs[page] is None for page in held[: taken.num_plain])
                assert taken.num_plain == next((i for i in range(count) if needs[held[i]]), count)
                del held[:count]
            case "place":
                count = data.draw(st.integers(0, len(held)))
                assert table.place(len(table.pages) + count).tolist() == held[:count]
                needed = {needs[page] for page in held[:count]} - {None}
                found = set(parts(table.open_fence()))
                assert found == ({max(needed, key=lambda fence: fence.sequence)} if needed else set())
                table.fences = ()
                del held[:count]
            case "free":
                keep = data.draw(st.integers(0, len(held)))
                num_fenced = sum(needs[page] is not None for page in held[keep:])
                before = pool.num_fenced
                table.free_reserved(keep)
                assert pool.num_fenced - before == num_fenced
                del held[keep:]
        assert table.reserved.tolist() == held
    table.free_reserved()
    plain = pool.take(pool.available(fenced=False), Owner.LEASE, fenced=False).pages
    assert all(needs.get(page) is None for page in plain.tolist())


def test_a_grant_that_was_not_used_goes_back_as_it_came() -> None:
    """Its plain pages are plain, the others wait for what they waited for."""
    pool, streams = PagePool("device", FreeList(4), 4), Streams()
    pool.free(pool.take(2, Owner.LEASE, fenced=True).pages, Owner.LEASE, after=streams.fence("s", 0))
    grant = pool.take(4, Owner.LEASE, fenced=True)
    assert (grant.num_plain, len(grant.after)) == (2, 1)
    pool.give_back(grant, Owner.LEASE)
    assert (pool.available(fenced=False), pool.num_fenced) == (2, 2)
    again = pool.take(4, Owner.LEASE, fenced=True)
    assert np.array_equal(np.sort(again.pages), np.arange(4)) and list(again.after) == list(grant.after)
