"""GuardedStore: a deadline, retries and a circuit breaker around any store."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, cast

from ..abc import (
    Clock,
    Store,
    SupportsDelete,
    SupportsListing,
    SupportsNamespaces,
    SupportsRefusal,
    SupportsStat,
    SupportsSweep,
    TimerHandle,
)
from ..errors import ConfigError
from ..types import ObjectStat, Stop, StopToken
from ._guard.attempt import Deadline
from ._guard.breaker import BreakerState
from ._guard.operations import COUNTS, Operations, Retries
from ._wrapping import (
    FORWARDS,
    Mixins,
    Wrapping,
    able,
    checked_count,
    checked_stats,
    kind_of,
    stats_of,
    without,
)

__all__ = ["COUNTS", "MAX_SECONDS", "GuardedStore"]

MAX_SECONDS = 1e9
"""Longer than any loop can wait for."""


class _Guard(Wrapping):
    """What the parts of a guard share."""

    _operations: Operations
    _timeout_s: float

    def _unless_refused(self, verb: str) -> None:
        if self._operations.breaker.refuses:
            raise self._operations.refused(verb)


class GuardedStore(_Guard):
    """Keep a store that fails, hangs or answers nonsense from costing each request its time.

    An operation (one call of this store, its retries included) has a deadline. What it raises, a count
    that cannot be true and a missed deadline are failures; a miss or a short answer is none, unless a read
    came back short with ``stop.reason`` STORE_FAULT. An operation that its caller cancelled, or stopped and
    that ended, is neither success nor failure. After ``max_failures`` in a row the breaker opens: nothing
    reaches the store for ``cooldown_s``, then one operation does, and no other until that one has ended.
    There is no probing by itself: the next operation that somebody wants is the probe, without retries.

    ================  =====================  ==================================  ========================
    operation         deadline               at the deadline                     refused
    ================  =====================  ==================================  ========================
    count_prefix      ``lookup_timeout_s``   cancelled, StoreUnavailable         StoreUnavailable
    stat              ``timeout_s``          cancelled, StoreUnavailable         StoreUnavailable
    read              ``timeout_s``          told to stop, StoreUnavailable      0, ``stop.reason``
    write, delete     ``timeout_s``          counted, and waited for             StoreUnavailable
    list_keys,        none                                                       StoreUnavailable
    list_namespaces,
    sweep
    ================  =====================  ==================================  ========================

    It can do beside the four methods exactly what ``inner`` can. What has no deadline takes as long as the
    store is large, and tells the breaker nothing.

    Args:
        inner: the store to guard.
        timeout_s: for a read, write, delete or stat; less than ``store_timeout_s`` of the cache.
        lookup_timeout_s: for a count_prefix; less than ``prefetch_timeout_base_s`` of the cache, since a
            question that the prefetch has given up tells nothing.
        max_attempts: tries of one operation; 1: no retries. After the k-th comes a pause of 0 .. 2**(k-1)
            times ``backoff_s``, drawn evenly ("full jitter": M. Brooker, Exponential Backoff And Jitter, 2015).
            There is no retry that would begin after the deadline, nor while threads of the last one run.
        max_failures: failed operations in a row that open the breaker.
        cooldown_s: how long it stays open; twice as long after each probe that fails, up to ``max_cooldown_s``.
        clock: where deadlines come from; None: the running loop.
        draw: returns a number of 0 .. 1 for each pause.

    Attributes:
        inner: the store inside.
        stats: what ``inner`` counts, and :data:`COUNTS` of its own.

    Ownership: closing the guard closes ``inner``. A read that missed its deadline, or was cancelled, may
        still fill its buffers: they are free when ``stop`` is not busy any more.
    Cancellation: of a write or delete reaches ``inner``, as if there were no guard; else see the table.
    Raises: ConfigError: an option that cannot work.
    """

    def __new__(cls, inner: Store, **options: Any) -> GuardedStore:
        """Make the kind of guard that can do what ``inner`` can: isinstance() is how others ask."""
        return object.__new__(kind_of(cls, _MIXINS, able(inner)))

    def __init__(
        self,
        inner: Store,
        *,
        timeout_s: float = 4.0,
        lookup_timeout_s: float = 0.5,
        max_attempts: int = 3,
        backoff_s: float = 0.02,
        max_failures: int = 5,
        cooldown_s: float = 5.0,
        max_cooldown_s: float = 60.0,
        clock: Clock | None = None,
        draw: Callable[[], float] | None = None,
    ) -> None:
        self.inner = inner
        self._timeout_s = _checked_seconds("timeout_s", timeout_s)
        self._lookup_timeout_s = _checked_seconds("lookup_timeout_s", lookup_timeout_s)
        retries = Retries(
            _checked_number("max_attempts", max_attempts),
            _checked_seconds("backoff_s", backoff_s, zero_too=True),
            draw or Random().random,
        )
        cooldown_s = _checked_seconds("cooldown_s", cooldown_s)
        max_cooldown_s = _checked_seconds("max_cooldown_s", max_cooldown_s)
        if max_cooldown_s < cooldown_s:
            raise ConfigError(
                f"max_cooldown_s is {max_cooldown_s!r}, less than cooldown_s, {cooldown_s!r}; give as much or more"
            )
        breaker = (_checked_number("max_failures", max_failures), cooldown_s, max_cooldown_s)
        self._refuser = inner if isinstance(inner, SupportsRefusal) else None
        self._operations = Operations(clock or RunningLoopClock(), retries, breaker, type(inner).__name__)

    def __repr__(self) -> str:
        return f"<GuardedStore {self.inner!r} breaker {self.breaker}>"

    @property
    def stats(self) -> Counter[str]:
        """What ``inner`` counts and what the guard does, by name; a count that both have is their sum."""
        counts = Counter(stats_of(self.inner))
        counts.update(self._operations.counts)
        return counts

    @property
    def breaker(self) -> BreakerState:
        """Whether the breaker is closed, open or half-open."""
        return self._operations.breaker.state

    def refusal(self) -> Stop | None:
        """Return BREAKER_OPEN while an operation would be refused, None when it would be tried. Costs nothing."""
        if self._operations.breaker.refuses:
            return Stop.BREAKER_OPEN
        return None if self._refuser is None else self._refuser.refusal()

    def why_refused(self) -> str:
        """Say since when and why the breaker is not closed, and when it is tried again."""
        if not self._operations.breaker.refuses and self._refuser is not None:
            return self._refuser.why_refused()
        return self._operations.why_not_closed()

    # Lookups and reads: their caller may go at the deadline

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys exist, consecutive from ``keys[0]``.

        Raises: StoreUnavailable: refused, or the deadline has passed. Else what ``inner`` raised.
        """
        stop = StopToken()

        async def attempt(deadline: Deadline) -> object:
            return await self._operations.attempts.run(
                lambda: self.inner.count_prefix(keys), deadline, stop, is_lookup=True
            )

        checked = partial(checked_count, limit=len(keys))
        return await self._operations.run("count_prefix", attempt, checked, self._lookup_timeout_s, stop)

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Fill buffers whole, in order, and return how many, consecutive from 0.

        Refused it fills none, returns 0 and sets ``stop.reason``, so that a request can tell it from a fault.

        Raises: StoreUnavailable: the deadline has passed; see Ownership of the class. Else what ``inner`` raised.
        """
        if self._operations.breaker.refuses:
            self._operations.counts["refusals"] += 1
            stop.reason = Stop.BREAKER_OPEN
            return 0

        async def attempt(deadline: Deadline) -> object:
            stop.reason = None  # of the attempt before
            return await self._operations.attempts.run(
                lambda: self.inner.read(keys, into, stop), deadline, stop, is_lookup=False
            )

        checked = partial(checked_count, limit=len(keys))
        return await self._operations.run("read", attempt, checked, self._timeout_s, stop, whole=len(keys))

    # Changes: nobody may go before the store has let go of the pages

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Store pages in order and return how many, consecutive from 0.

        Raises: StoreUnavailable: refused. Else what ``inner`` raised.
        Ownership: as without a guard, the pages are read until this returns, however long that takes.
        """

        async def attempt(deadline: Deadline) -> object:
            return await self.inner.write(keys, pages)

        checked = partial(checked_count, limit=len(keys))
        return await self._operations.run("write", attempt, checked, self._timeout_s, StopToken())

    async def aclose(self) -> None:
        """Close the inner store; never waits for a hung operation."""
        await self.inner.aclose()


class _Deletes(_Guard):
    """Delete, as a write."""

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete the keys that exist; returns how many did.

        Raises: StoreUnavailable: refused. Else what ``inner`` raised.
        """

        async def attempt(deadline: Deadline) -> object:
            return await cast("SupportsDelete", self.inner).delete(keys)

        checked = partial(checked_count, limit=len(keys))
        return await self._operations.run("delete", attempt, checked, self._timeout_s, StopToken())


class _Stats(_Guard):
    """Ask for sizes, as a lookup."""

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        """Return for each key what is known of its object; None: there is none, or it cannot be one.

        Raises: StoreUnavailable: refused, or the deadline has passed. Else what ``inner`` raised.
        """
        store, stop = cast("SupportsStat", self.inner), StopToken()

        async def attempt(deadline: Deadline) -> object:
            return await self._operations.attempts.run(
                lambda: store.stat(keys), deadline, stop, is_lookup=True
            )

        checked = partial(checked_stats, num_keys=len(keys))
        return await self._operations.run("stat", attempt, checked, self._timeout_s, stop)


class _Lists(_Guard):
    """List, without a deadline."""

    async def list_keys(self) -> Sequence[str]:
        """Return the keys of all objects, in no particular order.

        Raises: StoreUnavailable: refused. Else what ``inner`` raised.
        """
        self._unless_refused("list_keys")
        return await cast("SupportsListing", self.inner).list_keys()


class _ListsNamespaces(_Guard):
    """List namespaces, without a deadline."""

    async def list_namespaces(self) -> Sequence[str]:
        """Return the namespace digests of its objects, in order of name.

        Raises: StoreUnavailable: refused. Else what ``inner`` raised.
        """
        self._unless_refused("list_namespaces")
        return await cast("SupportsNamespaces", self.inner).list_namespaces()


class _Sweeps(_Guard):
    """Sweep, without a deadline."""

    async def sweep(self) -> Mapping[str, int]:
        """Remove what dead writers left behind and trim to the store's limits; returns counts by name.

        Raises: StoreUnavailable: refused. Else what ``inner`` raised.
        """
        self._unless_refused("sweep")
        return await cast("SupportsSweep", self.inner).sweep()


_MIXINS: Mixins = {
    **without(FORWARDS, [SupportsRefusal]),
    SupportsDelete: _Deletes,
    SupportsStat: _Stats,
    SupportsListing: _Lists,
    SupportsNamespaces: _ListsNamespaces,
    SupportsSweep: _Sweeps,
}


class RunningLoopClock:
    """The clock of whatever loop runs."""

    def monotonic(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback)


def _checked_seconds(name: str, value: float, *, zero_too: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_SECONDS or (value == 0 and not zero_too):
        at_least = ">=" if zero_too else ">"
        raise ConfigError(f"{name} is {value!r}; give seconds {at_least} 0, at most {MAX_SECONDS:g}")
    return float(value)


def _checked_number(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; give an integer >= 1")
    return value
