"""What a prefetch costs while thousands are in flight: time of the loop, memory, and how late the loop gets."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

import torch

from hicache_async import (
    CacheConfig,
    DeviceKV,
    HiCache,
    Prefetch,
    PrefetchPolicy,
    PrefixLease,
    Stop,
    StopToken,
    TokenKey,
)
from hicache_async.core import hashing, keys, tokens

from .harness import Benchmark, Record, Sample, measure

COUNTS = (100, 1_000, 10_000)
PAGE_SIZE = 64
PROMPT_PAGES = 3
PAGE_NBYTES = PAGE_SIZE * 2 * 4
"""Bytes of one page: tokens, K and V, one float32; what is copied is not the question here."""

CALL_S = 0.002
"""What a call of the store takes, to the next tick of its clock."""

ARRIVALS_PER_TURN = 8
"""How many requests begin, or go, in one turn of the loop."""

TICK_S = 0.001
IDLE_S = 1.0

CALLS_AT_ONCE = CacheConfig().max_prefetches_in_flight
"""How many calls of the store run at once where nothing but calls is timed."""

LONG = PrefetchPolicy.timeout(base_s=1000.0, cap_s=1000.0)
"""A deadline is set for each prefetch and never comes."""


class TickingStore:
    """Say that it has everything, and read nothing: each call waits for the next tick and does no more.

    No call returns before :meth:`open`.
    """

    def __init__(self) -> None:
        self._gate = asyncio.Event()
        self._tick: asyncio.Future[None] | None = None

    def open(self) -> None:
        """Let calls return."""
        self._gate.set()

    async def count_prefix(self, keys: Sequence[str]) -> int:
        await self._next_tick()
        return len(keys)

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        stop.job_started()
        try:
            await self._next_tick()
        finally:
            stop.job_ended()
        return len(keys)

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        return len(keys)

    async def aclose(self) -> None:
        self.open()

    async def _next_tick(self) -> None:
        if not self._gate.is_set():
            await self._gate.wait()
        if self._tick is None:
            loop = asyncio.get_running_loop()
            self._tick = loop.create_future()
            loop.call_later(CALL_S, self._end_tick)
        await self._tick

    def _end_tick(self) -> None:
        tick, self._tick = self._tick, None
        if tick is not None:
            tick.set_result(None)


class Requests:
    """So many requests at once, each with a prompt of its own, on one cache."""

    def __init__(self, count: int) -> None:
        length = PROMPT_PAGES * PAGE_SIZE + 1
        self.keys = [TokenKey(range(number * length, (number + 1) * length)) for number in range(count)]
        self.names = [f"request {number}" for number in range(count)]
        self.store = TickingStore()
        self._leases: list[PrefixLease | None] = [None] * count
        self._prefetches: list[Prefetch | None] = [None] * count

    def open_cache(self) -> AbstractAsyncContextManager[HiCache]:
        """Open a cache that has room for all of them on the host."""
        planes = [torch.zeros((1, PAGE_SIZE, 1, 1)) for _ in range(2)]
        config = CacheConfig(
            page_size=PAGE_SIZE,
            host_bytes=len(self.keys) * PROMPT_PAGES * PAGE_NBYTES,
            host_reserve_bytes=0,
            allow_small_host=True,
            prefetch_threshold_tokens=0,
            prefetch_capacity_fraction=1.0,
        )
        return HiCache.open(config, kv=DeviceKV.from_layers(planes[:1], planes[1:]), store=self.store)

    async def start(self, cache: HiCache) -> None:
        """Match each prompt and start its prefetch; no call of the store has returned when this does."""
        for number, (name, key) in enumerate(zip(self.names, self.keys, strict=True)):
            lease = cache.match_prefix(name, key)
            self._leases[number], self._prefetches[number] = lease, lease.start_prefetch(LONG)
            if number % ARRIVALS_PER_TURN == 0:
                await asyncio.sleep(0)

    async def finish(self) -> None:
        """Let the store go on, wait for every prefetch, and release every lease."""
        self.store.open()
        for number, (lease, prefetch) in enumerate(zip(self._leases, self._prefetches, strict=True)):
            assert lease is not None and prefetch is not None
            result = await prefetch.settled()
            assert result.stop is Stop.COMPLETE and result.fetched_tokens == PROMPT_PAGES * PAGE_SIZE, result
            lease.release()
            self._leases[number] = self._prefetches[number] = None
            if number % ARRIVALS_PER_TURN == 0:
                await asyncio.sleep(0)


def cpu_of_requests(count: int) -> Sample:
    """Return a sample that gives the seconds of the loop's thread for each of ``count`` requests."""

    async def sample() -> float:
        requests = Requests(count)
        async with requests.open_cache() as cache:
            _settle_memory()
            start = time.thread_time()
            await requests.start(cache)
            await requests.finish()
            return (time.thread_time() - start) / count

    return sample


def cpu_of_calls(count: int) -> Sample:
    """Return a sample that gives the same for what cannot be saved: a task for each call of the store."""

    async def sample() -> float:
        store, stop = TickingStore(), StopToken()
        store.open()
        _settle_memory()
        start = time.thread_time()
        for first in range(0, count, CALLS_AT_ONCE):
            group = range(first, min(first + CALLS_AT_ONCE, count))
            await asyncio.wait([asyncio.create_task(store.count_prefix(())) for _ in group])
            await asyncio.wait([asyncio.create_task(store.read((), (), stop)) for _ in group])
        return (time.thread_time() - start) / count

    return sample


async def heap_nbytes(count: int) -> float:
    """Return the bytes allocated for each of ``count`` requests while all of them are in flight.

    Tokens and keys are made before anything is counted; page hashes and the names of objects are left out
    by where they are made.
    """
    requests = Requests(count)
    async with requests.open_cache() as cache:
        _settle_memory()
        tracemalloc.start()
        try:
            await requests.start(cache)
            gc.collect()
            snapshot = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        await requests.finish()
    left_out = [
        tracemalloc.Filter(False, str(module.__file__)) for module in (hashing, keys, tokens, tracemalloc)
    ]
    counted = snapshot.filter_traces(left_out)
    return sum(statistic.size for statistic in counted.statistics("filename")) / count


async def lag_ms(count: int) -> float:
    """Return how much later than on an idle loop a timer of a millisecond fires at the worst."""
    requests = Requests(count)
    async with requests.open_cache() as cache:
        _settle_memory()
        idle, busy = Ticker(), Ticker()
        with idle:
            await asyncio.sleep(IDLE_S)
        with busy:
            await requests.start(cache)
            await requests.finish()
    return max(0.0, busy.worst_s - idle.worst_s) * 1e3


class Ticker:
    """Measures on the running loop, within ``with``, how late a timer is at the worst."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def __enter__(self) -> None:
        self._wait()

    def __exit__(self, *exc: object) -> None:
        assert self._timer is not None
        self._timer.cancel()

    def _wait(self) -> None:
        self._due_s = self._loop.time() + TICK_S
        self._timer = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        self.worst_s = max(self.worst_s, self._loop.time() - self._due_s)
        self._wait()


def _settle_memory() -> None:
    # As a server does once it has started: what is there now is not looked through again and again.
    gc.collect()
    gc.freeze()


async def prefetch_records(quick: bool) -> AsyncIterator[Record]:
    """Prefetch so many prompts at once, each from its match to its release."""
    for count in COUNTS[:2] if quick else COUNTS:
        record = await measure(
            "inflight.prefetch",
            {"count": count, "pages": PROMPT_PAGES},
            cpu_of_requests(count),
            cpu_of_calls(count),
            floor_name="a task for each store call",
            unit="us",
            rounds=1 if quick else 5,
        )
        fields = {
            "loop_cpu_us": record.value, "heap_bytes": await heap_nbytes(count), "lag_ms": await lag_ms(count)
        }  # fmt: skip
        gc.unfreeze()
        yield dataclasses.replace(record, fields=fields)


BENCHMARKS = [Benchmark("inflight.prefetch", prefetch_records)]
