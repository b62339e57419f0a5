"""What a store says of its own accord is checked before it is believed, and never ends a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import numpy as np
import pytest

from hicache_async import PrefetchPolicy, State, Stop
from hicache_async.stores.guard import GuardedStore
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HangingStore, HeldStore, StoreWrapper
from hicache_async.types import StopToken
from tests.flows.rig import PAGE_TOKENS, Opener, prefetched, turns

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


class NumpyStore(StoreWrapper):
    """Answer with numpy's integers."""

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        return cast("int", np.int64(await call()))


class TalkativeStore(StoreWrapper):
    """Read nothing, and give a reason."""

    reason: object = None

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        stop.reason = self.reason  # type: ignore[assignment]
        return 0


@pytest.mark.parametrize(
    ("layout", "io_mode"),
    [("page_first", "kernel"), ("layer_first", "kernel"), ("page_first_direct", "direct")],
)
async def test_counts_of_numpy_are_counts(open_cache: Opener, layout: str, io_mode: str) -> None:
    """In every layout what such a store vouches for is where it belongs."""
    rig = await open_cache(store=NumpyStore(MemoryStore()), host_layout=layout, io_mode=io_mode)
    await rig.put_in_store("abc")
    served = await rig.serve("abc")
    assert served.books.store == 3 * PAGE_TOKENS


@pytest.mark.parametrize(
    "reason", ["gone", 7, ["x"], OSError("x"), Stop.COMPLETE, Stop.PEER_SHORTER, Stop.DEADLINE]
)
async def test_a_reason_that_is_none_is_a_fault(open_cache: Opener, reason: object) -> None:
    """Of a store that gives it; the cache stays open and the next one is served."""
    store = TalkativeStore(MemoryStore())
    store.reason = reason
    rig = await open_cache(store=store)
    await rig.put_in_store("abc")
    assert await prefetched(rig, "abc") == (3 * PAGE_TOKENS, 0, Stop.STORE_FAULT)
    assert rig.cache.state is State.OPEN


@pytest.mark.parametrize("reason", [Stop.VANISHED, Stop.CORRUPT, Stop.STORE_FAULT, Stop.BREAKER_OPEN])
async def test_a_reason_is_passed_on(open_cache: Opener, reason: Stop) -> None:
    """The four that a store may give."""
    store = TalkativeStore(MemoryStore())
    store.reason = reason
    rig = await open_cache(store=store)
    await rig.put_in_store("abc")
    assert (await prefetched(rig, "abc"))[2] is reason


@pytest.mark.parametrize(("fraction", "stop"), [(1.0, Stop.RATE_LIMITED), (0.5, Stop.RATE_LIMITED)])
async def test_a_hit_that_is_refused_evicts_nothing(open_cache: Opener, fraction: float, stop: Stop) -> None:
    """What cannot be brought whole costs nothing of what is there."""
    rig = await open_cache(
        store=MemoryStore(), host_pages=8, prefetch_overflow="refuse", prefetch_capacity_fraction=fraction
    )
    for letters in ("ab", "cd"):
        await rig.put_in_store(letters)
        await prefetched(rig, letters)
    await rig.put_in_store("ABCDEFGHIJ")
    hit, fetched, ended = await prefetched(rig, "ABCDEFGHIJ")
    assert (hit, fetched, ended) == (10 * PAGE_TOKENS, 0, stop)
    assert (rig.where("ab"), rig.where("cd")) == ("hh", "hh")


async def test_a_hit_that_fits_evicts_what_it_must(open_cache: Opener) -> None:
    """To refuse is for what cannot be had."""
    rig = await open_cache(store=MemoryStore(), host_pages=4, prefetch_overflow="refuse")
    for letters in ("ab", "cd", "ABCD"):
        await rig.put_in_store(letters)
        assert (await prefetched(rig, letters))[2] is Stop.COMPLETE
    assert rig.where("ABCD") == "hhhh"


async def test_a_guards_deadline_answers_the_request(open_cache: Opener) -> None:
    """Its read hangs on and keeps its pages, and nobody waits for it."""
    inner = HangingStore(MemoryStore(), "read")
    rig = await open_cache(store=None)
    store = GuardedStore(inner, timeout_s=0.3, max_attempts=1, clock=rig.clock)
    await rig.cache.admin.attach_store(store)
    rig.store = inner
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        prefetch = lease.start_prefetch(PrefetchPolicy.wait_complete())
        await inner.hung()
        rig.clock.advance(0.31)
        await turns()
        result = await asyncio.wait_for(prefetch.settled(), 5)
        assert (result.fetched_tokens, result.stop) == (0, Stop.STORE_FAULT)
    rig.cache.audit()
    assert rig.cache.stats().host.in_hops == 4
    inner.release()
    await turns()
    assert rig.cache.stats().host.in_hops == 0


async def test_what_others_brought_in_the_queue_is_kept_until_load(open_cache: Opener) -> None:
    """It is not missing any more, and pinned as what was brought for this request would be."""
    store = HeldStore(MemoryStore(), ["read"])
    rig = await open_cache(store=store, max_prefetches_in_flight=1, host_pages=4)
    await rig.put_in_store("abcd")
    first, second = rig.lease("abcd"), rig.lease("abcd")
    prefetches = [lease.start_prefetch(PrefetchPolicy.wait_complete()) for lease in (first, second)]
    await store.arrived(verb="read")
    store.open()
    results = [await prefetch.settled() for prefetch in prefetches]
    assert {result.stop for result in results} <= {Stop.COMPLETE, Stop.NOTHING_MISSING}
    assert all(result.hit_tokens == result.fetched_tokens for result in results)
    first.release()
    await rig.put_in_store("xyz")
    await prefetched(rig, "xyz")
    assert rig.where("abcd") == "hhhh"
    assert (await second.load()).tokens == 4 * PAGE_TOKENS
    second.release()
