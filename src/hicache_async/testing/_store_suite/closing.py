"""The end of a store: nothing is answered after it, nothing waits for it, nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from ...abc import Store, SupportsDelete, SupportsListing, SupportsNamespaces, SupportsStat, SupportsSweep
from ...errors import StoreUnavailable
from .checks import check
from .exam import Exam
from .pages import Arena, WatchedStop, expect, page_keys, quiet


@check()
async def closing_again_does_nothing(exam: Exam) -> None:
    """A store can be closed twice, unused or used, and by two at once."""
    for is_used in (False, True):
        store = (await exam.open() if exam.candidate.shared else exam.store).inner
        if is_used:
            await store.write(page_keys(1), [memoryview(exam.page(page_keys(1)[0]))])
        await asyncio.gather(store.aclose(), store.aclose())
        await store.aclose()
        if not exam.candidate.shared:
            await exam.reopen()


@check("keeps")
async def a_closed_store_is_unavailable(exam: Exam) -> None:
    """Every verb of a closed store raises StoreUnavailable, whether it was used before or not."""
    for is_used in (True, False):
        if is_used:
            await exam.store.write_all(page_keys(2))
        store = exam.store.inner
        await store.aclose()
        for verb, call in _calls(store, exam).items():
            try:
                answer = await call()
            except StoreUnavailable:
                continue
            except Exception as error:
                raise AssertionError(
                    f"a closed store's {verb} raises {error!r}; raise StoreUnavailable"
                ) from error
            raise AssertionError(f"a closed store's {verb} answers {answer!r}; raise StoreUnavailable")
        await exam.reopen()


def _calls(store: Store, exam: Exam) -> dict[str, Callable[[], Awaitable[object]]]:
    keys, arena = page_keys(2), Arena([exam.candidate.small] * 2)
    pages = [memoryview(exam.page(key)) for key in keys]
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "count_prefix": lambda: store.count_prefix(keys),
        "read": lambda: store.read(keys, arena.buffers, WatchedStop()),
        "write": lambda: store.write(keys, pages),
    }
    if isinstance(store, SupportsDelete):
        calls["delete"] = lambda: cast("SupportsDelete", store).delete(keys)
    if isinstance(store, SupportsListing):
        calls["list_keys"] = lambda: cast("SupportsListing", store).list_keys()
    if isinstance(store, SupportsStat):
        calls["stat"] = lambda: cast("SupportsStat", store).stat(keys)
    if isinstance(store, SupportsNamespaces):
        calls["list_namespaces"] = lambda: cast("SupportsNamespaces", store).list_namespaces()
    if isinstance(store, SupportsSweep):
        calls["sweep"] = lambda: cast("SupportsSweep", store).sweep()
    return calls


@check("keeps")
async def closing_ends_what_is_under_way(exam: Exam) -> None:
    """Calls that run when a store is closed end, with a count or StoreUnavailable; buffers are let go."""
    nbytes = exam.candidate.large
    num_keys = min(16, exam.candidate.batch_nbytes // nbytes)
    for turns in (0, 1, 2, 5):
        there, new = page_keys(num_keys, f"there {turns}"), page_keys(num_keys, f"new {turns}")
        await exam.store.write_all(there, nbytes)
        stop, arena = WatchedStop(), Arena([nbytes] * num_keys)
        pages = [memoryview(exam.page(key, nbytes)) for key in new]
        store = exam.store.inner
        calls = [store.read(there, arena.buffers, stop), store.write(new, pages), store.count_prefix(there)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        for _ in range(turns):
            await asyncio.sleep(0)
        await store.aclose()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            expect(
                type(answer) is int or isinstance(answer, StoreUnavailable),
                f"a call under way ended with {answer!r}",
            )
        await quiet(stop)
        arena.check_guards()
        await exam.reopen()
