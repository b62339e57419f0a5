"""Caches, loops and threads in every combination: it works, or one clear error says which loop it belongs to."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hicache_async import (
    Books,
    HiCache,
    LeaseError,
    LoopRunner,
    PrefixLease,
    StepBatch,
    TokenKey,
    WrongLoopError,
)
from hicache_async.stores import FileStore
from tests.runner.tools import WAIT_S, nothing, num_leases, open_toy, take_lease
from tests.toy_engine import make_config, make_kv, prompt, serve

NAMES_ITS_LOOP = (
    "this cache belongs to <.*Loop .* and was used from another event loop, <.*Loop .*; call it on"
)


def test_all_parts_made_outside_a_loop(tmp_path: Path) -> None:
    """Nothing that a cache is opened with, nor the opening itself, has to be made on a loop."""
    store = FileStore(tmp_path, num_lanes=1)
    opening = HiCache.open(make_config(), kv=make_kv(), store=store)
    key = TokenKey(prompt(1))

    async def main() -> int:
        async with opening as cache:
            assert (await serve(cache, "r", prompt(1))).computed == 25
            with cache.match_prefix("again", key) as lease:
                device_tokens = lease.device_tokens
        await store.aclose()
        return device_tokens

    assert asyncio.run(main()) == 24


def test_a_cache_that_outlives_its_loop() -> None:
    """Left open when its loop ended, a cache is refused on the next one, and so are its leases and its end."""
    kept: list[tuple[HiCache, PrefixLease]] = []

    async def forget() -> None:
        cache = await HiCache.open(make_config(), kv=make_kv()).__aenter__()
        kept.append((cache, cache.match_prefix("r", prompt(1))))

    async def use(act: Callable[[], object]) -> None:
        result = act()
        if isinstance(result, Awaitable):
            await result

    asyncio.run(forget())
    ((cache, lease),) = kept
    for act in (cache.stats, lease.release, lease.load, cache.begin_step, cache.admin.flush, cache.close):
        with pytest.raises(WrongLoopError, match=NAMES_ITS_LOOP):
            asyncio.run(use(act))


def test_two_loops_of_one_thread() -> None:
    """A fixture's loop that lives longer than those of its tests: only what runs on it may use its cache."""
    with asyncio.Runner() as session, asyncio.Runner() as function:
        opening = HiCache.open(make_config(), kv=make_kv())
        cache = session.run(opening.__aenter__())
        with pytest.raises(WrongLoopError, match=NAMES_ITS_LOOP):
            function.run(serve(cache, "r", prompt(1)))
        assert session.run(serve(cache, "r", prompt(1))).computed == 25
        session.run(opening.__aexit__(None, None, None))


def test_runners_side_by_side_and_one_after_another(uvloop: bool) -> None:
    """Each runner has a loop and a cache of its own; a lease of another's is refused."""
    for _ in range(2):
        with LoopRunner(open_toy, uvloop=uvloop) as one, LoopRunner(open_toy, uvloop=uvloop) as other:
            lease = one.post(take_lease).result(WAIT_S)
            with pytest.raises(LeaseError, match="no live lease of this cache"):
                other.step(StepBatch(commit=[(lease, 0)]))
            one.step(StepBatch(release=[lease]))
            assert (num_leases(one), num_leases(other)) == (0, 0)


def test_a_runners_cache_is_used_through_the_runner(runner: LoopRunner) -> None:
    """From any other thread or loop its lease refuses, and says which loop is meant."""
    lease = runner.post(take_lease).result(WAIT_S)
    with pytest.raises(WrongLoopError, match="was used from a thread without its loop running") as refusal:
        lease.release()
    assert re.escape(repr(runner._loop).split(" ")[0]) in re.escape(str(refusal.value))

    async def load() -> None:
        await lease.load()

    with pytest.raises(WrongLoopError, match=NAMES_ITS_LOOP):
        asyncio.run(load())
    runner.step(StepBatch(release=[lease]))


def test_a_runner_beside_a_loop(runner: LoopRunner) -> None:
    """Code on another loop awaits what it posts without blocking that loop; its cancel reaches the post."""

    async def main() -> Books:
        books = await asyncio.wrap_future(runner.post(lambda cache: serve(cache, "r", prompt(1))))
        endless = asyncio.wrap_future(runner.post(lambda cache: asyncio.Event().wait()))
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        await asyncio.wrap_future(runner.post(nothing))
        return books

    assert asyncio.run(main()).computed == 25
