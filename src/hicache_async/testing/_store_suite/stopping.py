"""The stop token: looked at between pages, its jobs balanced, its buffers let go."""

from __future__ import annotations

import asyncio

from .checks import check
from .exam import Exam
from .pages import Arena, WatchedStop, expect, page_keys

_NUM_PAGES = 16
_PAGES_IN_HAND = 2
"""As many may still be filled when a read is stopped: one is in hand, and one more was begun."""


@check("keeps")
async def a_stopped_read_reads_nothing_more(exam: Exam) -> None:
    """A token that is stopped beforehand ends the read at once, or after the pages in hand."""
    keys = page_keys(_NUM_PAGES)
    await exam.store.write_all(keys)
    stop = WatchedStop()
    stop.stop()
    count = await exam.store.read(keys, stop=stop)
    expect(count <= _PAGES_IN_HAND, f"read filled {count} pages, although it was stopped before it began")


@check("keeps")
async def a_read_looks_between_its_pages(exam: Exam) -> None:
    """A token that is stopped at its k-th look ends the read by then, for each k; what was counted is right."""
    keys = page_keys(_NUM_PAGES)
    await exam.store.write_all(keys)
    for look in range(1, _NUM_PAGES - _PAGES_IN_HAND):
        stop = WatchedStop(at_look=look)
        count = await exam.store.read(keys, stop=stop)
        expect(
            count <= look + _PAGES_IN_HAND,
            f"read filled {count} pages, although it was stopped at look {look}, and it has looked {stop.looks} times",
        )
    await exam.store.read_all(keys)


@check("keeps")
async def a_read_is_stopped_from_outside(exam: Exam) -> None:
    """Stopped in the middle by its caller, a read ends, and what it counted is right."""
    nbytes = exam.candidate.large
    keys = page_keys(min(_NUM_PAGES, exam.candidate.batch_nbytes // nbytes))
    await exam.store.write_all(keys, nbytes)
    for turns in range(8):
        stop = WatchedStop()
        reading = asyncio.create_task(exam.store.read(keys, nbytes, stop=stop))
        for _ in range(turns):
            await asyncio.sleep(0)
        stop.stop()
        await reading


@check()
async def jobs_are_over_when_a_read_is(exam: Exam) -> None:
    """A read that returns has ended as many jobs as it has started, however it went."""
    keys = page_keys(4)
    await exam.store.write(keys[:2])
    for asked in (keys, keys[:2], keys[2:], []):
        await exam.store.read(asked)  # looks at the token
        await exam.store.read(asked, exam.candidate.small + exam.candidate.step)


@check("keeps")
async def quiet_buffers_are_left_alone(exam: Exam) -> None:
    """Once a read has returned, in full, short or stopped, nothing of it touches a buffer."""
    store, keys = exam.store, page_keys(_NUM_PAGES)
    await store.write_all(keys[:-1])
    for look in (0, 1, 3, 7):
        stop, arena = WatchedStop(at_look=look), Arena([exam.candidate.small] * _NUM_PAGES)
        await store.inner.read(keys, arena.buffers, stop)
        stop.check_over()
        spoiled = arena.spoil()
        await store.read(keys)  # as long as the one before, so whatever is left of that has its chance
        await asyncio.sleep(0)
        expect(arena.content() == spoiled, "read has returned, and its buffers were written afterwards")
