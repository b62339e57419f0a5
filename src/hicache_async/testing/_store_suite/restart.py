"""Restart: what was stored is found again, whole; what was not is not."""

from __future__ import annotations

import asyncio

from .checks import check
from .exam import Exam
from .pages import expect, page_keys


@check("keeps", "persists")
async def everything_is_found_again(exam: Exam) -> None:
    """A store that is opened again has every object of every size, and goes on from there."""
    for nbytes in exam.candidate.object_nbytes:
        await exam.store.write_all(page_keys(6, f"{nbytes}"), nbytes)
    for number in range(2):
        store = await exam.reopen()
        for nbytes in exam.candidate.object_nbytes:
            keys = page_keys(6, f"{nbytes}")
            expect(
                await store.count(keys) == 6, "count_prefix does not count what was stored before reopening"
            )
            await store.read_all(keys, nbytes)
            expect(await store.write(keys, nbytes, version=1) == 6, "after reopening keys are not present")
            await store.read_all(keys, nbytes)
        await store.write_all(page_keys(2, f"added {number}"))
    await (await exam.reopen()).read_all([*page_keys(2, "added 0"), *page_keys(2, "added 1")])


@check("keeps", "persists", "delete")
async def deleted_stays_deleted(exam: Exam) -> None:
    """What was deleted does not come back."""
    keys = page_keys(6)
    await exam.store.write_all(keys)
    await exam.store.delete(keys[2:4])
    store = await exam.reopen()
    expect(await store.count(keys) == 2, "count_prefix counts after reopening what was deleted before")
    expect(await store.read(keys) == 2, "what was deleted is read after reopening")
    await store.read_all(keys[4:])


@check("keeps", "persists")
async def a_write_that_was_cut_off_is_whole_or_absent(exam: Exam) -> None:
    """Of a write that ended with its process's loop each object is whole or absent after reopening."""
    nbytes = exam.candidate.large
    for turns in range(0, 12, 2):
        keys = page_keys(6, f"cut off after {turns}")
        writing = asyncio.create_task(exam.store.write_all(keys, nbytes))
        for _ in range(turns):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait((writing,))
        store = await exam.reopen()
        for key in keys:
            counted = await store.count([key])
            found = await store.read([key], nbytes)  # checks every byte
            # A thread that was in the middle of its page may publish it between the two.
            expect(counted <= found, "count_prefix counts a key that cannot be read")
        await store.write_all(keys, nbytes)
        await store.read_all(keys, nbytes)


@check("keeps", "persists", "list")
async def a_reopened_store_lists_what_it_has(exam: Exam) -> None:
    """The list after reopening is that from before, and nothing under construction is on it."""
    keys = page_keys(9)
    await exam.store.write_all(keys)
    store = await exam.reopen()
    expect(
        sorted(await store.list_keys()) == sorted(keys),
        "list_keys does not tell after reopening what was stored",
    )
