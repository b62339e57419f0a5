"""Tasks that meet: on one key, on many, some writing, some reading, some deleting."""

from __future__ import annotations

import asyncio
import random

from .checks import check
from .exam import CheckedStore, Exam
from .pages import expect, page_keys


async def _instances(exam: Exam) -> list[CheckedStore]:
    return [exam.store, await exam.open()] if exam.candidate.shared else [exam.store]


@check("keeps")
async def writers_of_one_key(exam: Exam) -> None:
    """However many write one key at once, each is told that it is stored, and it is, once and right."""
    stores = await _instances(exam)
    for number in range(4 * exam.candidate.rounds):
        key = page_keys(1, f"round {number}")
        async with asyncio.TaskGroup() as group:
            for writer in range(8):
                group.create_task(stores[writer % len(stores)].write_all(key, exam.candidate.large))
        for store in stores:
            await store.read_all(key, exam.candidate.large)


@check("keeps")
async def writers_of_overlapping_batches(exam: Exam) -> None:
    """Batches that share keys, in different orders, are all stored."""
    stores = await _instances(exam)
    for number in range(2 * exam.candidate.rounds):
        keys = page_keys(24, f"round {number}")
        batches = [keys[:16], keys[8:], keys[::-1], keys[::2], [*keys[12:], *keys[:12]]]
        async with asyncio.TaskGroup() as group:
            for writer, batch in enumerate(batches):
                group.create_task(stores[writer % len(stores)].write_all(batch))
        for store in stores:
            await store.read_all(keys)


@check("keeps")
async def readers_meet_writers(exam: Exam) -> None:
    """While batches are written readers see prefixes of them, each page right; in the end all of it."""
    stores = await _instances(exam)
    for number in range(2 * exam.candidate.rounds):
        keys = page_keys(32, f"round {number}")
        async with asyncio.TaskGroup() as group:
            writers = [
                group.create_task(stores[at % len(stores)].write_all(keys[first : first + 8]))
                for at, first in enumerate(range(0, 32, 8))
            ]
            for store in stores:
                group.create_task(_read_until_done(store, keys, writers))
        for store in stores:
            expect(await store.count(keys) == 32, "count_prefix does not count what was written meanwhile")


async def _read_until_done(store: CheckedStore, keys: list[str], writers: list[asyncio.Task[None]]) -> None:
    while not all(writer.done() for writer in writers):
        await store.read(keys)  # checks every byte of what it counts
        await store.count(keys)
        await asyncio.sleep(0)


@check("keeps", "delete")
async def deletes_meet_reads_and_writes(exam: Exam) -> None:
    """What is deleted while it is read or written is whole or gone; afterwards it can be written again."""
    stores = await _instances(exam)
    keys = page_keys(12)
    for _ in range(4 * exam.candidate.rounds):
        async with asyncio.TaskGroup() as group:
            for at, store in enumerate(stores * 2):
                group.create_task(store.write(keys))
                group.create_task(store.read(keys))
                group.create_task(store.delete(keys[at::3]))
                group.create_task(store.read(keys[::-1]))
    for store in stores:
        await store.read(keys)  # where a lookup was remembered it is put right
        await store.write_all(keys)
        await store.read_all(keys)


@check("keeps")
async def many_calls_at_once(exam: Exam) -> None:
    """Hundreds of calls under way at once are all answered, and rightly."""
    stores, keys = await _instances(exam), page_keys(64)
    await exam.store.write_all(keys[:32])
    rng = random.Random(64)
    async with asyncio.TaskGroup() as group:
        for number in range(300):
            store, first = stores[number % len(stores)], rng.randrange(60)
            some = keys[first : first + 4]
            group.create_task((store.read, store.count, store.write_all)[number % 3](some))
    for store in stores:
        await store.write_all(keys)
        await store.read_all(keys)
