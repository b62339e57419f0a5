"""The limit: never exceeded, what was used last stays, and what does not fit does no harm."""

from __future__ import annotations

import asyncio

from ...abc import SupportsListing, SupportsStat
from ...errors import ConfigError, StoreError
from .catalog import AGE_S
from .checks import check
from .exam import CheckedStore, Exam
from .pages import expect, page_keys

_NUM_FITTING = 8


def _limit(exam: Exam) -> int:
    return _NUM_FITTING * exam.candidate.large


async def _held_nbytes(exam: Exam, store: CheckedStore, keys: list[str]) -> int:
    """Return how many bytes ``store`` keeps, by what it can tell; else ``keys`` are read, which are all there were."""
    listed = await store.list_keys() if isinstance(store.inner, SupportsListing) else None
    if listed is None:
        return sum([await store.read([key], exam.candidate.large) for key in keys]) * exam.candidate.large
    if isinstance(store.inner, SupportsStat):
        return sum(found.nbytes for found in await store.stat(listed) if found is not None)
    return len(listed) * exam.candidate.large


async def _check_limit(exam: Exam, store: CheckedStore, keys: list[str], limit: int, when: str) -> None:
    held = await _held_nbytes(exam, store, keys)
    expect(held <= limit, f"{when} it keeps {held} bytes, and max_bytes is {limit}")


@check("keeps", "bounded")
async def the_limit_holds_after_every_write(exam: Exam) -> None:
    """Written far beyond its limit, one by one and in batches, a store keeps no more than that, and the newest."""
    limit, store = _limit(exam), await exam.open_bounded(_limit(exam))
    keys = page_keys(3 * _NUM_FITTING)
    for end in (*range(1, 2 * _NUM_FITTING), 2 * _NUM_FITTING + 4, len(keys)):
        await store.write(keys[:end][-4:], exam.candidate.large)
        await _check_limit(exam, store, keys[:end], limit, f"after writing {end} objects")
        await store.read(keys[end - 1 : end], exam.candidate.large)
    newest = page_keys(2, "newest")
    await store.write_all(newest, exam.candidate.large)
    await store.read_all(newest, exam.candidate.large)


@check("keeps", "bounded")
async def the_limit_holds_with_writers_at_once(exam: Exam) -> None:
    """Several writers at once do not exceed the limit together, on one instance or, if shared, on two."""
    limit = _limit(exam)
    stores = [await exam.open_bounded(limit) for _ in range(2 if exam.candidate.shared else 1)]
    keys = page_keys(4 * _NUM_FITTING)
    async with asyncio.TaskGroup() as group:
        for at in range(8):
            group.create_task(stores[at % len(stores)].write(keys[at * 4 : at * 4 + 4], exam.candidate.large))
    for store in stores:
        await _check_limit(exam, store, keys, limit, "after 8 writers at once")


@check("keeps", "bounded")
async def a_batch_beyond_the_limit_keeps_its_beginning(exam: Exam) -> None:
    """Of a batch that does not fit, what is counted is there: the beginning, which is what can be matched."""
    limit, store = _limit(exam), await exam.open_bounded(_limit(exam))
    keys = page_keys(2 * _NUM_FITTING)
    count = await store.write(keys, exam.candidate.large)
    await _check_limit(exam, store, keys, limit, "after a batch of twice as much")
    await store.read_all(keys[:count], exam.candidate.large)


@check("keeps", "bounded")
async def what_was_read_last_stays(exam: Exam) -> None:
    """An object that was read lately outlives those that were not."""
    store, old = await _half_full(exam)
    await store.read_all(old[:1], exam.candidate.large)
    await _check_outlives(exam, store, old, "read")


@check("keeps", "bounded")
async def what_was_written_again_stays(exam: Exam) -> None:
    """An object that was written again lately, though nothing was rewritten, outlives those that were not."""
    store, old = await _half_full(exam)
    await store.write_all(old[:1], exam.candidate.large)
    await _check_outlives(exam, store, old, "written again")


async def _half_full(exam: Exam) -> tuple[CheckedStore, list[str]]:
    store, keys = await exam.open_bounded(_limit(exam)), page_keys(_NUM_FITTING - 2, "old")
    for key in keys:
        await store.write_all([key], exam.candidate.large)
        await asyncio.sleep(AGE_S)
    return store, keys


async def _check_outlives(exam: Exam, store: CheckedStore, old: list[str], use: str) -> None:
    large = exam.candidate.large
    await asyncio.sleep(AGE_S)
    for key in page_keys(3, "new"):
        await store.write_all([key], large)
        await asyncio.sleep(AGE_S)
    used = await store.read(old[:1], large)
    others = sum([await store.read([key], large) for key in old[1:]])
    expect(used == 1, f"what was {use} last is gone, and of what was used before {others} objects are there")


@check("keeps", "bounded")
async def an_oversize_object_is_refused_and_harmless(exam: Exam) -> None:
    """An object that can never fit is not stored, and pushes nothing out."""
    limit, store = _limit(exam), await exam.open_bounded(_limit(exam))
    large, keys = exam.candidate.large, page_keys(4)
    await store.write_all(keys, large)
    oversize = page_keys(1, "oversize")
    try:
        count = await store.write(oversize, limit + large)
    except StoreError:
        count = 0
    expect(count == 0, f"an object of {limit + large} bytes counts as stored, and max_bytes is {limit}")
    expect(await store.read(oversize, limit + large) == 0, "an object larger than max_bytes is kept")
    await store.read_all(keys, large)
    await store.write_all(page_keys(2, "after"), large)


@check("keeps", "bounded", "delete")
async def deleted_room_is_free_again(exam: Exam) -> None:
    """As much as was deleted can be written without pushing anything out, again and again."""
    store, large = await exam.open_bounded(_limit(exam)), exam.candidate.large
    kept, keys = page_keys(2, "kept"), page_keys(_NUM_FITTING // 2 - 1)
    await store.write_all(kept, large)
    for _ in range(4):
        await store.write_all(keys, large)
        expect(await store.delete(keys) == len(keys), "delete does not count what it deleted")
    await store.write_all(keys, large)
    await store.read_all([*kept, *keys], large)


@check("keeps", "bounded", "persists")
async def a_reopened_store_keeps_its_limit(exam: Exam) -> None:
    """What was stored before counts after reopening, too; a lowered limit holds once something is written."""
    limit, large = _limit(exam), exam.candidate.large
    keys = page_keys(3 * _NUM_FITTING)
    written = 0
    for max_bytes in (limit, limit, limit // 2):
        try:
            store = await exam.open_bounded(max_bytes)
        except ConfigError:
            expect(max_bytes < limit, "a store cannot be opened again with the limit that it had")
            return  # what it has reserved stays as large as it is
        for _ in range(_NUM_FITTING):
            await store.write(keys[written : written + 1], large)
            written += 1
            await _check_limit(exam, store, keys[:written], max_bytes, f"reopened, after {written} objects")
        await exam.close(store)
