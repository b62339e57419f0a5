"""Counts are consecutive from the first key: what lies behind a hole is not there."""

from __future__ import annotations

from .checks import check
from .exam import Exam
from .pages import expect, page_keys

_MANY = 1000


@check("keeps")
async def a_hole_ends_the_count(exam: Exam) -> None:
    """Wherever a key is missing, count_prefix says how many there are before it."""
    keys = page_keys(8)
    for hole in range(len(keys) + 1):
        there = [_with_hole(key, hole) for key in keys]
        await exam.store.write_all([key for at, key in enumerate(there) if at != hole])
        count = await exam.store.count(there)
        expect(count == hole, f"key {hole} of 8 is missing, and count_prefix says {count}")


@check("keeps")
async def a_hole_ends_the_read(exam: Exam) -> None:
    """Wherever a key is missing, read fills the buffers before it and counts no others."""
    keys = page_keys(8)
    for hole in range(len(keys) + 1):
        there = [_with_hole(key, hole) for key in keys]
        await exam.store.write_all([key for at, key in enumerate(there) if at != hole])
        count = await exam.store.read(there)
        expect(count == hole, f"key {hole} of 8 is missing, and read counts {count}")


def _with_hole(key: str, hole: int) -> str:
    return f"{hole}{key[1:]}"


@check("keeps")
async def a_batch_may_be_there_in_part(exam: Exam) -> None:
    """What is missing of a batch is added by writing all of it, and what is there stays."""
    store, keys = exam.store, page_keys(9)
    await store.write_all(keys[::3])
    expect(await store.count(keys) == 1, "count_prefix does not end at the first missing key")
    await store.write_all(keys)
    expect(await store.count(keys) == 9, "a batch that was there in part is not counted whole")
    await store.read_all(keys)


@check("keeps")
async def a_batch_may_be_read_in_part(exam: Exam) -> None:
    """Any run of keys of a batch can be asked for by itself."""
    store, keys = exam.store, page_keys(12)
    await store.write_all(keys)
    for first, end in ((0, 1), (3, 7), (11, 12), (5, 12)):
        expect(
            await store.count(keys[first:end]) == end - first,
            "count_prefix does not count from its first key",
        )
        await store.read_all(keys[first:end])


@check("keeps")
async def a_thousand_keys_in_one_call(exam: Exam) -> None:
    """One call takes a thousand keys; a hole among them is found where it is."""
    nbytes = exam.candidate.small
    num_keys = min(_MANY, exam.candidate.batch_nbytes // nbytes)
    store, keys = exam.store, page_keys(num_keys)
    hole = num_keys * 130 // 1000
    await store.write_all(keys[:hole])
    await store.write_all(keys[hole + 1 :])
    expect(await store.count(keys[:hole]) == hole, "count_prefix counts less than all of a long list")
    expect(
        await store.count(keys) == hole,
        f"key {hole} of {num_keys} is missing, and count_prefix is wrong of it",
    )
    expect(await store.read(keys) == hole, f"key {hole} of {num_keys} is missing, and read is wrong of it")
    await store.write_all(keys)
    expect(await store.count(keys) == num_keys, "count_prefix counts less than all of a long list")
    await store.read_all(keys)
