"""What a store tells of its objects and of itself: lists, sizes, namespaces, counts, its codec, its refusal."""

from __future__ import annotations

import asyncio
import string
import time
from typing import cast

from ...abc import (
    SupportsCodec,
    SupportsListing,
    SupportsNamespaces,
    SupportsRefusal,
    SupportsStat,
    SupportsStats,
)
from ...types import Stop
from .checks import check
from .exam import CheckedStore, Exam, checked_counts
from .pages import NAMESPACES, expect, page_keys

AGE_S = 0.02
"""So far apart are two uses that a medium can tell apart: file systems keep time in ticks of up to 10 ms."""


@check("keeps", "list")
async def the_list_is_what_is_there(exam: Exam) -> None:
    """Every complete object is listed, once; nothing else is."""
    store, keys = exam.store, page_keys(20)
    expect(await store.list_keys() == [], "list_keys tells keys of an empty store")
    await store.write_all(keys)
    await store.write_all(keys[:5])
    listed = await store.list_keys()
    expect(
        set(listed) == set(keys),
        f"20 keys were written, and list_keys tells {len(listed)}, not all of them these",
    )


@check("keeps", "stat")
async def stat_tells_what_is_there(exam: Exam) -> None:
    """Stat answers key by key, None for what is missing, and else the bytes of the payload."""
    store = exam.store
    for nbytes in exam.candidate.object_nbytes:
        keys = page_keys(6, f"{nbytes}")
        await store.write_all(keys[::2], nbytes)
        answers = await store.stat([*keys, keys[0]])
        expect(
            [found is not None for found in answers] == [True, False] * 3 + [True],
            f"every second of 6 keys, and the first again, is there; stat says {answers}",
        )
        sizes = {found.nbytes for found in answers if found is not None}
        expect(sizes == {nbytes}, f"pages of {nbytes} bytes were written, and stat says {sizes}")
    expect(await store.stat([]) == [], "stat of no keys is something")


@check("keeps", "stat")
async def stat_tells_when_an_object_was_used(exam: Exam) -> None:
    """An object's time is that of its last use, by the clock on the wall, whether written or written again."""
    store, keys = exam.store, page_keys(2)
    before_s = time.time() - 1.0
    await store.write_all(keys)
    written = await store.stat(keys)
    await asyncio.sleep(AGE_S)
    await store.write_all(keys[:1])
    used = await store.stat(keys[:1])
    times_s = [0.0 if found is None else found.modified_s for found in (*written, *used)]
    expect(
        before_s <= min(times_s) and max(times_s) <= time.time() + 1.0,
        f"stat says {times_s}, now is {time.time()}",
    )
    expect(
        times_s[2] > times_s[0],
        "an object was written again, and stat tells the time when it was written first",
    )


@check("keeps", "delete")
async def delete_counts_what_it_deleted(exam: Exam) -> None:
    """Delete says how many of the keys were there, in any order and each once; the others stay."""
    store, keys = exam.store, page_keys(9)
    await store.write_all(keys)
    expect(await store.delete([]) == 0, "delete of no keys deletes something")
    expect(await store.delete(page_keys(3, "missing")) == 0, "delete counts keys that are not there")
    expect(
        await store.delete([keys[4], *page_keys(1, "missing"), keys[1], keys[4]]) == 2,
        "delete counts wrongly",
    )
    expect(await store.count(keys) == 1, "count_prefix counts a key that was deleted")
    expect(await store.read(keys) == 1, "read finds a key that was deleted")
    await store.read_all([*keys[:1], *keys[2:4], *keys[5:]])
    await store.write_all(keys)
    await store.read_all(keys)


@check("keeps", "namespaces")
async def namespaces_are_those_of_the_keys(exam: Exam) -> None:
    """Every namespace that has an object is told, in order; a key that is in none adds at most the empty name."""
    store = exam.store
    expect(await store.list_namespaces() == [], "list_namespaces tells some of an empty store")
    for number, namespace in enumerate(NAMESPACES[::-1]):
        await store.write_all([*page_keys(3, namespace=namespace), f"manifest_{namespace}"])
        told = await store.list_namespaces()
        expect(
            set(told) == set(NAMESPACES[::-1][: number + 1]),
            f"list_namespaces says {told}, after {namespace}",
        )
    await store.write_all(["in no namespace"])
    told = [name for name in await store.list_namespaces() if name]
    expect(told == sorted(NAMESPACES), f"list_namespaces says {told}, and a key in no namespace was added")


@check("keeps", "delete")
async def all_verbs_agree(exam: Exam) -> None:
    """After any writes and deletes every verb that the store has says the same of each key."""
    store, keys = exam.store, page_keys(12)
    await store.write_all(keys)
    await store.delete(keys[::3])
    there = [key for at, key in enumerate(keys) if at % 3]
    await _check_agreed(store, keys, there)
    await store.write_all(keys[:1])
    await _check_agreed(store, keys, [keys[0], *there])
    expect(await store.delete(keys) == len(there) + 1, "delete does not find what the other verbs do")
    await _check_agreed(store, keys, [])


async def _check_agreed(store: CheckedStore, keys: list[str], there: list[str]) -> None:
    said: dict[str, set[str]] = {
        "read": {key for key in keys if await store.read([key])},
        "count_prefix": {key for key in keys if await store.count([key])},
    }
    if isinstance(store.inner, SupportsListing):
        said["list_keys"] = set(await store.list_keys())
    if isinstance(store.inner, SupportsStat):
        answers = await store.stat(keys)
        said["stat"] = {key for key, found in zip(keys, answers, strict=True) if found is not None}
    for verb, told in said.items():
        expect(told == set(there), f"of {len(keys)} keys {len(there)} are there; {verb} says {len(told)}")
    if isinstance(store.inner, SupportsNamespaces):
        namespaces = await store.list_namespaces()
        expect(bool(there) <= (NAMESPACES[0] in namespaces), f"list_namespaces says {namespaces}")


@check("keeps", "sweep")
async def a_sweep_leaves_what_can_be_used(exam: Exam) -> None:
    """A sweep answers counts by name and removes no object that is whole."""
    keys = page_keys(6)
    await exam.store.sweep()
    await exam.store.write_all(keys)
    await exam.store.sweep()
    await exam.store.read_all(keys)
    expect(await exam.store.count(keys) == 6, "count_prefix does not count what a sweep left")


@check("codec")
async def the_codec_has_a_name(exam: Exam) -> None:
    """The codec is a word, the same for every instance: it is part of the namespace."""
    first = cast("SupportsCodec", exam.store.inner).codec
    expect(
        type(first) is str and first != "" and not set(first) & set(string.whitespace),
        f"codec is {first!r}; give a word",
    )
    second = cast("SupportsCodec", (await exam.reopen()).inner).codec
    expect(first == second, f"codec is {first!r}, and {second!r} when it is opened again")


@check("stats")
async def stats_are_counts(exam: Exam) -> None:
    """Stats are plain ints by name, which never fall."""
    store, keys = exam.store, page_keys(3)
    before = dict(checked_counts("stats", cast("SupportsStats", store.inner).stats))
    await store.write(keys)
    await store.read(keys)
    await store.read(page_keys(1, "missing"))
    after = checked_counts("stats", cast("SupportsStats", store.inner).stats)
    fallen = {name for name, count in before.items() if after.get(name, 0) < count}
    expect(not fallen, f"stats fell: {fallen}")


@check("refusal")
async def a_working_store_refuses_nothing(exam: Exam) -> None:
    """A store that has just been opened and works refuses nothing, and can say why it would."""
    store = cast("SupportsRefusal", exam.store.inner)
    await exam.store.write(page_keys(2))
    reason: object = store.refusal()
    expect(reason is None, f"refusal says {reason!r}, one of {list(Stop)} or not, and nothing is wrong")
    why: object = store.why_refused()
    expect(type(why) is str, f"why_refused says {why!r}; give a str")
