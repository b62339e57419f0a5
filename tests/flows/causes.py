"""One scenario for each reason at which a prefetch of a process alone can end; the tests do the prefetching."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from hicache_async import Stop
from hicache_async.abc import Store
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HangingStore, HeldStore, StoreWrapper
from hicache_async.types import StopToken
from tests.flows.rig import Opener, Rig, driven, prefetched
from tests.flows.stores import ShortReadStore

PROMPT = "abcd"
"""What is to be prefetched in each scenario."""
NOT_ALONE = {Stop.PEER_SHORTER, Stop.BREAKER_OPEN}
"""Reasons that take other ranks, or a store with a breaker."""


class BelievingStore(MemoryStore):
    """Believe that everything exists, and list what does."""

    async def count_prefix(self, keys: Sequence[str]) -> int:
        return len(keys)


class StoppingStore(StoreWrapper):
    """Stop the prefetches of ``rig`` when they ask."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.rig: Rig | None = None

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        if verb == "count_prefix" and self.rig is not None:
            for prefetch in list(self.rig.ctx.prefetches):
                prefetch.stop()
        return await call()


Scenario = Callable[[Opener], AbstractAsyncContextManager[Rig]]


@asynccontextmanager
async def complete(open_cache: Opener) -> AsyncIterator[Rig]:
    rig = await open_cache(store=MemoryStore())
    await rig.put_in_store(PROMPT)
    yield rig


@asynccontextmanager
async def nothing_missing(open_cache: Opener) -> AsyncIterator[Rig]:
    rig = await open_cache(store=MemoryStore())
    await rig.serve(PROMPT, prefetch=False)
    yield rig


@asynccontextmanager
async def not_stored(open_cache: Opener) -> AsyncIterator[Rig]:
    rig = await open_cache(store=MemoryStore())
    await rig.put_in_store(PROMPT, [1, 2, 3])
    yield rig


@asynccontextmanager
async def below_threshold(open_cache: Opener) -> AsyncIterator[Rig]:
    rig = await open_cache(store=MemoryStore(), prefetch_threshold_tokens=9)
    await rig.put_in_store(PROMPT, [0, 1])
    yield rig


@asynccontextmanager
async def rate_limited(open_cache: Opener) -> AsyncIterator[Rig]:
    rig = await open_cache(store=MemoryStore(), host_pages=12, prefetch_capacity_fraction=0.5)
    await rig.put_in_store(PROMPT)
    await rig.put_in_store("wxyz")
    with rig.lease("wxyz") as lease:
        await lease.prefetch()
        yield rig


@asynccontextmanager
async def no_host_room(open_cache: Opener) -> AsyncIterator[Rig]:
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store, host_pages=6)
    await rig.put_in_store(PROMPT)
    await rig.serve("wxyz", prefetch=False)
    await store.arrived()  # a write holds four of the six host pages
    yield rig
    store.open()


@asynccontextmanager
async def deadline(open_cache: Opener) -> AsyncIterator[Rig]:
    store = HangingStore(MemoryStore(), "count_prefix")
    yield await open_cache(store=store)
    store.release()


@asynccontextmanager
async def stopped(open_cache: Opener) -> AsyncIterator[Rig]:
    store = StoppingStore(MemoryStore())
    rig = store.rig = await open_cache(store=store)
    await rig.put_in_store(PROMPT)
    yield rig


@asynccontextmanager
async def vanished(open_cache: Opener) -> AsyncIterator[Rig]:
    rig = await open_cache(store=BelievingStore())
    await rig.put_in_store(PROMPT, [0])
    yield rig


@asynccontextmanager
async def corrupt(open_cache: Opener) -> AsyncIterator[Rig]:
    rig = await open_cache(store=ShortReadStore(MemoryStore(), 1, Stop.CORRUPT))
    await rig.put_in_store(PROMPT)
    yield rig


@asynccontextmanager
async def store_fault(open_cache: Opener) -> AsyncIterator[Rig]:
    rig = await open_cache(
        store=FlakyStore(MemoryStore(), "count_prefix", error=OSError("no such host"), at=None)
    )
    await rig.put_in_store(PROMPT)
    yield rig


@asynccontextmanager
async def anchor_not_backed(open_cache: Opener) -> AsyncIterator[Rig]:
    rig = await open_cache(store=MemoryStore(), host_pages=4, write_policy="write_through_selective")
    await rig.put_in_store(PROMPT)
    await rig.put_in_store("wxyz")
    await rig.serve(PROMPT[:2], prefetch=False)
    with rig.lease("wxyz") as lease:
        await lease.prefetch()
        yield rig


@asynccontextmanager
async def detached(open_cache: Opener) -> AsyncIterator[Rig]:
    yield await open_cache()


SCENARIOS: dict[Stop, Scenario] = {
    Stop.COMPLETE: complete,
    Stop.NOTHING_MISSING: nothing_missing,
    Stop.NOT_STORED: not_stored,
    Stop.BELOW_THRESHOLD: below_threshold,
    Stop.RATE_LIMITED: rate_limited,
    Stop.NO_HOST_ROOM: no_host_room,
    Stop.DEADLINE: deadline,
    Stop.STOPPED: stopped,
    Stop.VANISHED: vanished,
    Stop.CORRUPT: corrupt,
    Stop.STORE_FAULT: store_fault,
    Stop.ANCHOR_NOT_BACKED: anchor_not_backed,
    Stop.DETACHED: detached,
}


async def prefetch_now(rig: Rig) -> tuple[int, int, Stop]:
    """Prefetch the prompt of the scenarios, moving time on while nothing else happens."""
    return await driven(prefetched(rig, PROMPT), rig.clock, 0.5)
