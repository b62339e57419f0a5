"""What the tests of the runner share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

from hicache_async import HiCache, LoopRunner, PrefixLease
from tests.toy_engine import open_cache, prompt

WAIT_S = 30.0
"""How long a test waits for what must come."""


def open_toy() -> AbstractAsyncContextManager[HiCache]:
    """Open a toy's cache, which is audited before it closes."""
    return open_cache()


class Flag(threading.Event):
    """An event that must come."""

    def await_set(self) -> None:
        """Wait until it is set, in a thread."""
        assert self.wait(WAIT_S), "what must come did not"


@contextmanager
def held_loop(runner: LoopRunner) -> Iterator[None]:
    """Keep the runner's loop busy, so that what is asked of it meanwhile waits."""
    entered, go = Flag(), Flag()

    async def hold(cache: HiCache) -> None:
        entered.set()
        go.await_set()

    holding = runner.post(hold)
    entered.await_set()
    try:
        yield
    finally:
        go.set()
    holding.result(WAIT_S)


async def nothing(cache: HiCache) -> None:
    """Do nothing."""


async def take_lease(cache: HiCache) -> PrefixLease:
    """Match a prompt and load it, as an engine's admission does."""
    lease = cache.match_prefix("request", prompt(1))
    await lease.load()
    return lease


def num_leases(runner: LoopRunner) -> int:
    """Return how many leases the cache knows."""

    async def count(cache: HiCache) -> int:
        return cache.stats().leases

    return runner.post(count).result(WAIT_S)
