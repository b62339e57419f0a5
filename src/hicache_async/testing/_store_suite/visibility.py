"""An object is seen when it is complete, and not before."""

from __future__ import annotations

import asyncio

from .checks import check
from .exam import CheckedStore, Exam
from .pages import expect, page_keys


@check("keeps")
async def an_object_is_seen_whole_or_not_at_all(exam: Exam) -> None:
    """Who asks while a write runs finds an object that is right to its last byte, or none; then all of them."""
    for number in range(exam.candidate.rounds):
        await _watch_a_write(exam, exam.store, page_keys(4, f"round {number}"))


@check("keeps", "shared")
async def another_instance_sees_it_whole_or_not_at_all(exam: Exam) -> None:
    """The same, asked of another instance in the same directory."""
    other = await exam.open()
    for number in range(exam.candidate.rounds):
        await _watch_a_write(exam, other, page_keys(4, f"round {number}"))


async def _watch_a_write(exam: Exam, reader: CheckedStore, keys: list[str]) -> None:
    nbytes = exam.candidate.large
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(exam.store.write_all(keys, nbytes))
        for key in keys:
            group.create_task(_read_until_done(reader, key, nbytes, writing))
    await reader.read_all(keys, nbytes)
    expect(await reader.count(keys) == len(keys), "count_prefix does not count what was written meanwhile")


async def _read_until_done(store: CheckedStore, key: str, nbytes: int, writing: asyncio.Task[None]) -> None:
    while not writing.done():
        await store.read([key], nbytes)  # checks every byte of what it counts
        await asyncio.sleep(0)


@check("keeps", "shared")
async def instances_see_each_other(exam: Exam) -> None:
    """What one instance has stored another reads at once, and writes no second time."""
    other, keys = await exam.open(), page_keys(6)
    expect(await other.read(keys) == 0, "another instance finds what nobody wrote")
    await exam.store.write_all(keys[:4])
    await other.read_all(keys[:4])
    expect(await other.write(keys, version=1) == 6, "another instance does not count a key that is present")
    await exam.store.read_all(keys[:4])
    expect(await exam.store.read(keys[4:], version=1) == 2, "what another instance stored is not found")


@check("keeps", "shared", "delete")
async def instances_see_what_another_deleted(exam: Exam) -> None:
    """What one instance has deleted another does not serve any more, and can write again."""
    other, keys = await exam.open(), page_keys(3)
    await exam.store.write_all(keys)
    await other.read_all(keys)
    expect(await exam.store.delete(keys) == 3, "delete does not count what it deleted")
    expect(await other.read(keys) == 0, "another instance reads what was deleted")
    expect(await other.count(keys) == 0, "another instance counts what it could not read just now")
    await other.write_all(keys)
    await exam.store.read_all(keys)
