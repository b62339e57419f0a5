"""Situations of a cache as a whole and of its requests, for the step-cancel exam."""

from __future__ import annotations

import asyncio

from ..cache import HiCache
from ._exam_engine import PAGE_TOKENS, ExamEngine
from ._situation import PROMPT, STORED, Situation, Subject, about_to_commit, on_host

# A cache as a whole


async def _open(engine: ExamEngine) -> Situation:
    opened: list[HiCache] = []
    device = engine.another_device()
    opening = HiCache.open(engine.config, kv=engine.kv, device=device, store=engine.store, clock=engine.clock)

    async def work() -> None:
        opened.append(await opening.__aenter__())

    async def close() -> None:
        for cache in opened:
            await cache.close()

    return Situation(work=work, clean_up=close)


async def _close(engine: ExamEngine) -> Situation:
    lease = await about_to_commit(engine)

    async def work() -> None:
        lease.commit(lease.num_tokens)
        lease.release()
        await engine.cache.close()

    return Situation(work=work, leases=[lease], closes=True)


async def _close_second(engine: ExamEngine) -> Situation:
    lease = await about_to_commit(engine)
    lease.commit(lease.num_tokens)
    lease.release()
    first = asyncio.get_running_loop().create_task(engine.cache.close())

    async def work() -> None:
        await asyncio.sleep(0)
        await engine.cache.close()

    return Situation(work=work, clean_up=lambda: first, closes=True)


async def _begin_step(engine: ExamEngine) -> Situation:
    lease = await on_host(engine, STORED)
    engine.hold_device()
    await lease.load()

    async def give_back() -> None:
        await engine.cache.begin_step(0)

    return Situation(work=lambda: engine.cache.begin_step(2), leases=[lease], clean_up=give_back)


async def _next_event(engine: ExamEngine) -> Situation:
    lease, reader = await about_to_commit(engine), engine.cache.events()
    return Situation(work=reader.__anext__, end=lambda: lease.commit(lease.num_tokens), leases=[lease])


async def _close_reader(engine: ExamEngine) -> Situation:
    reader = engine.cache.events(snapshot=True)
    await engine.serve(PROMPT)
    return Situation(work=reader.aclose)


# A request


async def _request(engine: ExamEngine) -> Situation:
    await engine.put(STORED)
    return Situation(work=lambda: engine.serve(PROMPT))


async def _prefetch(engine: ExamEngine) -> Situation:
    await engine.put(STORED)
    lease = engine.lease(PROMPT)
    return Situation(work=lease.prefetch, leases=[lease])


async def _prefetch_shared(engine: ExamEngine) -> Situation:
    await engine.put(STORED)
    other, lease = engine.lease(PROMPT), engine.lease(STORED + "x")
    other.start_prefetch()
    return Situation(work=lease.prefetch, leases=[other, lease])


async def _prefetch_in_queue(engine: ExamEngine) -> Situation:
    await engine.put("uvwx")
    await engine.put(STORED)
    other, lease = engine.lease("uvwxy"), engine.lease(PROMPT)
    other.start_prefetch()
    return Situation(work=lease.prefetch, leases=[other, lease])


async def _settled(engine: ExamEngine) -> Situation:
    await engine.put(STORED)
    lease = engine.lease(PROMPT)
    prefetch = lease.start_prefetch()
    return Situation(work=prefetch.settled, leases=[lease])


async def _load_behind_prefetch(engine: ExamEngine) -> Situation:
    await engine.put(STORED)
    lease = engine.lease(PROMPT)
    lease.start_prefetch()
    return Situation(work=lease.load, leases=[lease])


async def _load(engine: ExamEngine) -> Situation:
    lease = await on_host(engine, STORED)
    return Situation(work=lease.load, leases=[lease])


async def _load_behind_slot(engine: ExamEngine) -> Situation:
    first, lease = await on_host(engine, "uv"), await on_host(engine, STORED)
    engine.hold_device()
    await first.load()
    return Situation(work=lease.load, leases=[first, lease])


async def _load_behind_announcement(engine: ExamEngine) -> Situation:
    owner, lease = engine.lease(PROMPT), engine.lease(PROMPT)
    await owner.load()
    return Situation(work=lease.load, end=owner.release, leases=[owner, lease])


async def _load_into_full(engine: ExamEngine) -> Situation:
    lease = await on_host(engine, STORED)
    engine.hold_device()
    for letters in ("ABCD", "EFGH", "IJK"):
        await engine.serve(letters)
    return Situation(work=lease.load, leases=[lease])


async def _finished(engine: ExamEngine) -> Situation:
    lease = await on_host(engine, STORED)
    engine.hold_device()
    loading = await lease.load()
    return Situation(work=loading.finished, leases=[lease])


async def _ready(engine: ExamEngine) -> Situation:
    lease = await on_host(engine, STORED)
    engine.hold_device()
    loading = await lease.load()
    return Situation(work=lambda: loading.ready(engine.kv.num_layers - 1), leases=[lease])


async def _finished_behind_forward(engine: ExamEngine) -> Situation:
    lease, fence = await about_to_commit(engine), engine.cache.host_fence()
    lease.commit(lease.num_tokens, after=fence)
    follower = engine.lease(PROMPT)
    loading = await follower.load()
    return Situation(work=loading.finished, end=fence.set, leases=[follower, lease])


async def _allocate(engine: ExamEngine) -> Situation:
    holder, lease = engine.lease("ABCDEFGHIJ"), engine.lease(PROMPT)
    for each in (holder, lease):
        await each.load(total_tokens=0)
    holder.allocate_nowait(10 * PAGE_TOKENS)
    lease.allocate_nowait(PAGE_TOKENS)
    return Situation(
        work=lambda: lease.allocate(lease.num_tokens), end=holder.release, leases=[holder, lease]
    )


SUBJECTS = (
    Subject("HiCache.open", "beside another cache", _open, asks_store=True),
    Subject("HiCache.close", "with pages on their way to host and store", _close, asks_store=True),
    Subject("HiCache.close", "while another task closes it", _close_second, asks_store=True),
    Subject("HiCache.begin_step", "with a load to tell of", _begin_step),
    Subject("EventReader.__anext__", "with nothing to tell", _next_event),
    Subject("EventReader.aclose", "with events to drop", _close_reader),
    Subject("PrefixLease", "a whole request", _request, asks_store=True),
    Subject("PrefixLease.prefetch", "of pages in the store", _prefetch, asks_store=True),
    Subject("PrefixLease.prefetch", "that shares a read", _prefetch_shared, asks_store=True),
    Subject("PrefixLease.prefetch", "behind another's slot", _prefetch_in_queue, asks_store=True),
    Subject("Prefetch.settled", "of pages in the store", _settled, asks_store=True),
    Subject("PrefixLease.load", "behind its own prefetch", _load_behind_prefetch, asks_store=True),
    Subject("PrefixLease.load", "of host pages", _load),
    Subject("PrefixLease.load", "behind another load's slot", _load_behind_slot),
    Subject("PrefixLease.load", "behind an announcement", _load_behind_announcement),
    Subject("PrefixLease.load", "into a device that is full", _load_into_full),
    Subject("Loading.finished", "of host pages", _finished),
    Subject("Loading.ready", "of the last layer", _ready),
    Subject("Loading.finished", "of what a forward still writes", _finished_behind_forward),
    Subject("PrefixLease.allocate", "of pages that another request has", _allocate),
)
