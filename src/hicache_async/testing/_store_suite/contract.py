"""The contract: what each verb does with keys that are there, and with keys that are not."""

from __future__ import annotations

from ...errors import HiCacheError
from .checks import check
from .exam import CheckedStore, Exam, checked_count
from .pages import Arena, WatchedStop, expect, page_keys


@check()
async def nothing_asked_is_nothing_done(exam: Exam) -> None:
    """No keys are 0 keys."""
    store = exam.store
    expect(
        await store.count([]) + await store.read([]) + await store.write([]) == 0, "of no keys there is one"
    )


@check()
async def a_missing_key_is_a_count_of_0(exam: Exam) -> None:
    """What is not there is answered by 0, an int, and never by an exception."""
    for num_keys in (1, 5):
        keys = page_keys(num_keys, "missing")
        expect(await exam.store.count(keys) == 0, "count_prefix counts what was never written")
        expect(await exam.store.read(keys) == 0, "read finds what was never written")


@check()
async def what_is_declared_is_true(exam: Exam) -> None:
    """A store that keeps, persists or shares more than it says would be examined too little."""
    keys = page_keys(2)
    stored = await exam.store.write(keys)
    facts = exam.candidate
    if not facts.keeps:
        expect(stored == 0 and await exam.store.read(keys) == 0, "it keeps what is written: say keeps = True")
        return
    if not facts.shared:
        expect(not await _found_by_another(exam, keys), "two instances see each other: say shared = True")
    if not (facts.persists or facts.shared):
        store = await exam.reopen()
        expect(await store.read(keys) == 0, "what was stored is found after reopening: say persists = True")


async def _found_by_another(exam: Exam, keys: list[str]) -> bool:
    try:
        other = await exam.open()
        return await other.read(keys) > 0
    except (HiCacheError, OSError):
        return False  # as is its right: there is to be one instance only


@check("keeps")
async def what_was_written_is_read(exam: Exam) -> None:
    """One object and many of each size come back as they were written, with plain ints for counts."""
    store = exam.store
    for nbytes in exam.candidate.object_nbytes:
        for num_keys in (1, 2, 9):
            keys = page_keys(num_keys, f"{nbytes} {num_keys}")
            await store.write_all(keys, nbytes)
            expect(await store.count(keys) == num_keys, "count_prefix counts less than was stored")
            await store.read_all(keys, nbytes)


@check("keeps")
async def a_key_may_be_there_twice_in_one_call(exam: Exam) -> None:
    """Each place of a key counts, and each of its buffers is filled."""
    first, second = page_keys(2)
    keys = [first, first, second, first]
    await exam.store.write_all(keys)
    expect(await exam.store.count(keys) == 4, "count_prefix does not count a key that is there twice")
    await exam.store.read_all(keys)


@check("keeps")
async def pages_are_copied_before_write_returns(exam: Exam) -> None:
    """What happens to a page's buffer afterwards does not reach the store."""
    keys = page_keys(4)
    pages = [bytearray(exam.page(key)) for key in keys]
    await exam.store.inner.write(keys, [memoryview(page) for page in pages])
    for page in pages:
        page[:] = bytes([0xEE]) * len(page)
    await exam.store.read_all(keys)


@check("keeps")
async def read_only_pages_are_taken(exam: Exam) -> None:
    """A page to be written may be one that nobody can write to."""
    keys = page_keys(3)
    pages = [memoryview(exam.page(key)) for key in keys]
    expect(
        checked_count("write", await exam.store.inner.write(keys, pages), 3) == 3,
        "write takes no read-only pages",
    )
    await exam.store.read_all(keys)


@check("keeps")
async def what_was_read_is_its_readers_own(exam: Exam) -> None:
    """Buffers stay as they were filled, whatever becomes of the object; and whatever is done to them stays theirs."""
    store, keys = exam.store, page_keys(4)
    await store.write_all(keys)
    kept, scribbled = Arena([exam.candidate.small] * 4), Arena([exam.candidate.small] * 4)
    await store.inner.read(keys, kept.buffers, WatchedStop())
    await store.inner.read(keys, scribbled.buffers, WatchedStop())
    scribbled.spoil()
    await store.read_all(keys)
    await store.write_all(page_keys(8, "later"))
    for key, buffer in zip(keys, kept.buffers, strict=True):
        store.check_page(buffer, key)


@check("keeps")
async def reads_fill_their_buffers_and_nothing_else(exam: Exam) -> None:
    """Counted buffers are filled to the last byte; what lies beside any buffer is not touched, also by a short read."""
    store, keys = exam.store, page_keys(6)
    await store.write_all([*keys[:4], *keys[5:]])
    small, step = exam.candidate.small, exam.candidate.step
    for size in (small, small - step, small + step):
        await store.read(keys, size)  # looks at the guards, whatever the count
    expect(await store.read(keys) == 4, "a read does not end before the missing key")


@check("keeps")
async def another_length_is_a_miss(exam: Exam) -> None:
    """An object that does not fill its buffer exactly is not there for it, stays, and costs no neighbour."""
    store, keys = exam.store, page_keys(3)
    nbytes, step = exam.candidate.small, exam.candidate.step
    await store.write_all(keys)
    for other in (nbytes - step, nbytes + step, nbytes // 2, nbytes * 2, step):
        expect(
            await store.read(keys, other) == 0,
            f"of an object of {nbytes} bytes read fills a buffer of {other}",
        )
        sizes = [nbytes, other, nbytes]
        arena = Arena(sizes)
        count = await store.inner.read(keys, arena.buffers, WatchedStop())
        expect(count == 1, f"read counts {count} buffers of {sizes} bytes, and should count 1")
        store.check_page(arena.buffers[0], keys[0])
        arena.check_guards()


@check("keeps", "two sizes")
async def lengths_may_differ_in_one_call(exam: Exam) -> None:
    """Objects of several sizes are written and read by one call."""
    store, small, large = exam.store, exam.candidate.small, exam.candidate.large
    keys, sizes = page_keys(5), [small, large, small, large, small]
    pages = [memoryview(exam.page(key, nbytes)) for key, nbytes in zip(keys, sizes, strict=True)]
    expect(
        await store.inner.write(keys, pages) == 5, "write stops at an object of another size than the first"
    )
    arena = Arena(sizes)
    expect(
        await store.inner.read(keys, arena.buffers, WatchedStop()) == 5,
        "read stops at an object of another size",
    )
    arena.check_guards()
    for key, buffer in zip(keys, arena.buffers, strict=True):
        store.check_page(buffer, key)


@check("keeps")
async def a_present_key_is_not_rewritten(exam: Exam) -> None:
    """Writing a key again counts as stored and keeps the first bytes: under one key there is one content."""
    store, keys = exam.store, page_keys(3)
    await store.write_all(keys[:2])
    expect(await store.write(keys, version=1) == 3, "write does not count a key that is present")
    await store.read_all(keys[:2])
    expect(await store.read(keys[2:], version=1) == 1, "what was new beside present keys is not stored")


@check("keeps")
async def counted_is_readable(exam: Exam) -> None:
    """As many as count_prefix says can be read, asked in any order."""
    store, keys = exam.store, page_keys(8)
    await store.write_all(keys)
    for order in (keys[::-1], keys[::2] + keys[1::2], keys[3:5]):
        await _check_agreed(store, order)


async def _check_agreed(store: CheckedStore, keys: list[str]) -> None:
    counted = await store.count(keys)
    expect(counted == len(keys), f"count_prefix says {counted} of {len(keys)} keys, all of which were stored")
    await store.read_all(keys)
