"""Situations of an operator, and of a store, a device and a group by themselves, for the step-cancel exam."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from ..abc import SupportsDelete, SupportsListing
from ..errors import StoreUnavailable
from ..lease import PrefixLease
from ..ranks.solo import SoloRanks
from ..types import StopToken, Tier
from ._exam_engine import ExamEngine, prompt
from ._pauses import Work
from ._situation import PROMPT, STORED, Situation, Subject, about_to_commit, on_host

LATE_S = 0.002
"""How long buffers that should be quiet are watched."""


class WatchedRead:
    """A read by itself, whose buffers are compared, once it says that it is quiet, with what they are later."""

    def __init__(self, engine: ExamEngine, keys: Sequence[str]) -> None:
        self._store, self._keys = engine.plain, keys
        self._buffers = [bytearray(engine.kv.page_nbytes) for _ in keys]
        self._stop = StopToken()

    async def run(self) -> None:
        """Read."""
        await self._store.read(self._keys, [memoryview(each) for each in self._buffers], self._stop)

    async def check(self) -> None:
        """Wait until the read is quiet, and for a while: nothing may change any more.

        Raises: AssertionError: something did.
        """
        self._stop.stop()
        quiet = asyncio.get_running_loop().create_future()
        if self._stop.busy:
            self._stop.when_quiet(lambda: quiet.set_result(None))
            await asyncio.wait((quiet,))
        before = [bytes(each) for each in self._buffers]
        await asyncio.sleep(LATE_S)
        if before != [bytes(each) for each in self._buffers]:
            raise AssertionError("read() wrote into a buffer after it had said that it was quiet")


# The operator


async def _explain(engine: ExamEngine) -> Situation:
    await engine.put(PROMPT)
    lease = engine.lease("abx")
    await lease.prefetch()
    return Situation(work=lambda: engine.cache.admin.explain(prompt(PROMPT)), leases=[lease])


def _commit_and(lease: PrefixLease, work: Work) -> Work:
    async def both() -> object:
        lease.commit(lease.num_tokens)
        return await work()

    return both


async def _flush(engine: ExamEngine) -> Situation:
    lease = await about_to_commit(engine)
    return Situation(work=_commit_and(lease, engine.cache.admin.flush), leases=[lease])


async def _clear(engine: ExamEngine) -> Situation:
    await engine.put("uv")
    lease = await about_to_commit(engine)
    store, clear = engine.store, engine.cache.admin.clear
    clearable = isinstance(store, SupportsDelete) and isinstance(store, SupportsListing)
    work = _commit_and(lease, clear if clearable else partial(clear, Tier.HOST))
    return Situation(work=work, leases=[lease], raises=(StoreUnavailable,))


async def _clear_device(engine: ExamEngine) -> Situation:
    lease = await on_host(engine, STORED)
    engine.hold_device()
    await lease.load()
    return Situation(work=lambda: engine.cache.admin.clear(Tier.DEVICE), leases=[lease])


async def _detach(engine: ExamEngine) -> Situation:
    lease = await about_to_commit(engine)
    return Situation(work=_commit_and(lease, engine.cache.admin.detach_store), leases=[lease])


async def _detach_by_force(engine: ExamEngine) -> Situation:
    await engine.put(STORED)
    lease = engine.lease(PROMPT)
    lease.start_prefetch()
    return Situation(work=lambda: engine.cache.admin.detach_store(force=True), leases=[lease])


async def _attach(engine: ExamEngine) -> Situation:
    admin = engine.cache.admin
    await engine.serve(PROMPT)
    await admin.detach_store()
    await admin._change.acquire()
    return Situation(work=lambda: admin.attach_store(engine.store), end=admin._change.release)


# A store and a device by themselves


async def _count(engine: ExamEngine) -> Situation:
    keys = await engine.put(PROMPT)
    return Situation(work=lambda: engine.plain.count_prefix(keys))


async def _write(engine: ExamEngine) -> Situation:
    return Situation(work=lambda: engine.put(PROMPT))


async def _read(engine: ExamEngine) -> Situation:
    keys = await engine.put(PROMPT)
    reading = WatchedRead(engine, keys)
    return Situation(work=reading.run, clean_up=reading.check)


async def _delete(engine: ExamEngine) -> Situation:
    keys = await engine.put(PROMPT)
    store = engine.plain
    work = partial(store.delete, keys) if isinstance(store, SupportsDelete) else _nothing
    return Situation(work=work)


async def _list(engine: ExamEngine) -> Situation:
    await engine.put(PROMPT)
    store = engine.plain
    return Situation(work=store.list_keys if isinstance(store, SupportsListing) else _nothing)


async def _close_store(engine: ExamEngine) -> Situation:
    keys = await engine.put(PROMPT)
    reading = WatchedRead(engine, keys)
    task = asyncio.get_running_loop().create_task(reading.run())

    async def check() -> None:
        await asyncio.wait((task,))
        task.exception()  # that it was closed, if it has come to that
        await reading.check()

    return Situation(work=engine.plain.aclose, clean_up=check, closes_store=True)


async def _nothing() -> None:
    """Stand for what a store does not support."""


async def _host_buffer(engine: ExamEngine) -> Situation:
    return Situation(work=lambda: engine.device.host_buffer(1 << 20))


async def _wait(engine: ExamEngine) -> Situation:
    lease = await on_host(engine, STORED)
    engine.hold_device()
    loading = await lease.load()
    fence = loading._fences[0][-1]
    return Situation(work=lambda: engine.device.wait(fence), leases=[lease])


async def _close_device(engine: ExamEngine) -> Situation:
    device = engine.another_device()
    return Situation(work=device.aclose)


async def _agree(engine: ExamEngine) -> Situation:
    return Situation(work=lambda: engine.ctx.ranks.agree(b"exam".ljust(16), (1,)))


async def _close_ranks(engine: ExamEngine) -> Situation:
    make_ranks = engine.parts.make_ranks or SoloRanks
    return Situation(work=make_ranks().aclose)


SUBJECTS = (
    Subject("Admin.explain", "of pages on host and in the store", _explain, asks_store=True),
    Subject("Admin.flush", "of pages on their way to host and store", _flush, asks_store=True),
    Subject("Admin.clear", "of all tiers, with a write under way", _clear, asks_store=True),
    Subject("Admin.clear", "of the device, with a load under way", _clear_device),
    Subject("Admin.detach_store", "gracefully, with a write under way", _detach, asks_store=True),
    Subject("Admin.detach_store", "by force, with a read under way", _detach_by_force, asks_store=True),
    Subject("Admin.attach_store", "behind another change", _attach),
    Subject("Store.count_prefix", "by itself", _count),
    Subject("Store.write", "by itself", _write),
    Subject("Store.read", "by itself, into buffers that are watched afterwards", _read),
    Subject("Store.delete", "by itself", _delete),
    Subject("Store.list_keys", "by itself", _list),
    Subject("Store.aclose", "with a read under way", _close_store),
    Subject("Device.host_buffer", "by itself", _host_buffer),
    Subject("Device.wait", "for a copy", _wait),
    Subject("Device.aclose", "by itself", _close_device),
    Subject("Ranks.agree", "by itself", _agree),
    Subject("Ranks.aclose", "by itself", _close_ranks),
)
