"""Any str is a key, and every verb means the same object by it."""

from __future__ import annotations

from .checks import check
from .exam import CheckedStore, Exam
from .pages import expect, page_keys

ODD_KEYS = (
    "", " ", ".", "..", "/", "//", "../../outside", "/tmp/outside", "a/b", "a\\b", "a:b", "-a", "~a", "$a", "a*?",
    "con", "a.kv", "a.tmp", "%41", "%2e%2e", "\0", "a\0b", "a\nb", "\t", "'\"; DROP TABLE pages", "é", "ключ", "鍵",
    "🗝", "\ud800", "k" * 200, "k" * 255, "k" * 256, "k" * 5000,
)  # fmt: skip

SIMILAR_KEYS = (
    ("a", "A"), ("a", "a "), ("a", " a"), ("a", "a\0"), ("a", "a\n"), ("a", "a."), ("a/b", "a-b"), ("a/b", "a_b"),
    ("a/b", "a//b"), ("a/b", "a/./b"), ("a%2fb", "a%2Fb"), ("a/b", "a%2fb"), ("\u00e9", "e\u0301"),
    ("\ud800", "\ufffd"), ("\ud800", "?"), ("k" * 300, "k" * 301), ("k" * 300 + "a", "k" * 300 + "b"),
    ("1", "01"), ("1", "1.0"), ("ss", "\u00df"),
)  # fmt: skip
"""Pairs that some medium, or some library on the way to it, may take for one key."""


@check("keeps")
async def any_string_is_a_key(exam: Exam) -> None:
    """Odd keys, all there at once, come back each as its own page; none leads out of the store's directory."""
    store, keys = exam.store, list(ODD_KEYS)
    await store.write_all(keys)
    expect(await store.count(keys) == len(keys), "count_prefix does not count an odd key")
    await store.read_all(keys)
    for key in keys:
        expect(await store.read([key]) == 1, f"key {key[:40]!a} is not found by itself")
    beside = sorted(path.name for path in exam.directory.parent.iterdir() if path != exam.directory)
    expect(not beside, f"odd keys made {beside} beside the store's directory")


@check("keeps")
async def similar_keys_are_different_keys(exam: Exam) -> None:
    """Keys that differ in case, in a blank, in an accent or far behind are two."""
    store = exam.store
    for number, pair in enumerate(SIMILAR_KEYS):
        first, second = (f"{number}-{key}" for key in pair)
        await store.write_all([first])
        expect(
            await store.count([second]) == 0, f"{first[:40]!a} was written, and {second[:40]!a} is counted"
        )
        expect(await store.read([second]) == 0, f"{first[:40]!a} was written, and {second[:40]!a} is read")
        await store.write_all([second])
        await store.read_all([first, second])


@check("keeps", "delete")
async def deleting_means_the_same_key(exam: Exam) -> None:
    """Deleting a key deletes no similar one, and an odd key is deleted as any other."""
    store = exam.store
    for number, pair in enumerate(SIMILAR_KEYS):
        first, second = (f"{number}-{key}" for key in pair)
        await store.write_all([first])
        expect(await store.delete([second]) == 0, f"{first[:40]!a} is deleted by deleting {second[:40]!a}")
        expect(await store.read([first]) == 1, f"{first[:40]!a} is gone by deleting {second[:40]!a}")
    for key in ODD_KEYS:
        await store.write_all([key])
        expect(await store.delete([key]) == 1, f"key {key[:40]!a} was written, and delete does not find it")
        expect(await store.read([key]) == 0, f"key {key[:40]!a} was deleted, and is read")


@check("keeps", "list")
async def listing_means_the_same_key(exam: Exam) -> None:
    """Odd keys are listed as they were given; one whose medium cannot tell may be left out, and none is made up."""
    keys = [*ODD_KEYS, *page_keys(2)]
    await exam.store.write_all(keys)
    listed = set(await exam.store.list_keys())
    made_up = {key[:40] for key in listed - set(keys)}
    expect(not made_up, f"list_keys tells keys that nobody wrote: {made_up!a}")
    expect(listed >= set(page_keys(2)), "list_keys leaves out plain keys")


@check("keeps", "stat")
async def stat_means_the_same_key(exam: Exam) -> None:
    """Stat knows the odd keys that were written, and no similar ones."""
    store = exam.store
    for key in ODD_KEYS:
        await _check_stat_of(store, key, is_there=False)
        await store.write_all([key])
        await _check_stat_of(store, key, is_there=True)
    for number, pair in enumerate(SIMILAR_KEYS):
        first, second = (f"{number}-{key}" for key in pair)
        await store.write_all([first])
        await _check_stat_of(store, second, is_there=False)


async def _check_stat_of(store: CheckedStore, key: str, *, is_there: bool) -> None:
    found = (await store.stat([key]))[0]
    expect(
        (found is not None) is is_there,
        f"key {key[:40]!a} is {'' if is_there else 'not '}there; stat says {found}",
    )
