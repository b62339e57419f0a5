"""GuardedStore: a deadline, retries and a circuit breaker around any store."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np

from .._log import logger
from ..abc import Clock, Store, SupportsDelete, SupportsListing, SupportsRefusal, TimerHandle
from ..errors import ConfigError, HiCacheError, StoreError, StoreUnavailable
from ..types import Stop, StopToken
from ._attempt import Attempts, Deadline
from ._breaker import Admission, Breaker, BreakerState

COUNTS = (
    "retries", "failures", "deadline_misses", "refusals", "breaker_opened", "breaker_closed", "failed_probes",
)  # fmt: skip
"""What a guard counts; breaker_opened less breaker_closed is 1 while its breaker is not closed, else 0."""

MAX_SECONDS = 1e9
"""Longer than any loop can wait for."""


class GuardedStore:
    """Keep a store that fails, hangs or answers nonsense from costing each request its time.

    An operation (one call of this store, its retries included) has a deadline. What it raises, a count
    that cannot be true and a missed deadline are failures; a miss or a short answer is none, unless a read
    came back short with ``stop.reason`` STORE_FAULT. An operation that its caller cancelled, or stopped and
    that ended, is neither success nor failure. After ``max_failures`` in a row the breaker opens: nothing
    reaches the store for ``cooldown_s``, then one operation does, and no other until that one has ended.
    There is no probing by itself: the next operation that somebody wants is the probe, without retries.

    ==============  =====================  ==================================  ========================
    operation       deadline               at the deadline                     refused
    ==============  =====================  ==================================  ========================
    count_prefix    ``lookup_timeout_s``   cancelled, StoreUnavailable         StoreUnavailable
    read            ``timeout_s``          told to stop, StoreUnavailable      0, ``stop.reason``
    write, delete   ``timeout_s``          counted, and waited for             StoreUnavailable
    list_keys       none                                                       StoreUnavailable
    ==============  =====================  ==================================  ========================

    It can delete and list its keys exactly where ``inner`` can.

    Args:
        inner: the store to guard.
        timeout_s: for a read, write or delete; less than ``store_timeout_s`` of the cache.
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
        stats: counts by name, see :data:`COUNTS`.

    Ownership: closing the guard closes ``inner``. A read that missed its deadline, or was cancelled, may
        still fill its buffers: they are free when ``stop`` is not busy any more.
    Cancellation: of a write or delete reaches ``inner``, as if there were no guard; else see the table.
    Raises: ConfigError: an option that cannot work.
    """

    def __new__(cls, inner: Store, **options: Any) -> GuardedStore:
        """Make the kind of guard that can do what ``inner`` can: isinstance() is how others ask."""
        can = (isinstance(inner, SupportsDelete), isinstance(inner, SupportsListing))
        return super().__new__(_KINDS[can] if cls is GuardedStore else cls)

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
        self.stats: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._timeout_s = _checked_seconds("timeout_s", timeout_s)
        self._lookup_timeout_s = _checked_seconds("lookup_timeout_s", lookup_timeout_s)
        self._max_attempts = _checked_number("max_attempts", max_attempts)
        self._backoff_s = _checked_seconds("backoff_s", backoff_s, zero_too=True)
        cooldown_s = _checked_seconds("cooldown_s", cooldown_s)
        max_cooldown_s = _checked_seconds("max_cooldown_s", max_cooldown_s)
        if max_cooldown_s < cooldown_s:
            raise ConfigError(
                f"max_cooldown_s is {max_cooldown_s!r}, less than cooldown_s, {cooldown_s!r}; give as much or more"
            )
        self._clock = clock or _RunningLoopClock()
        self._draw = draw or Random().random
        self._refuser = inner if isinstance(inner, SupportsRefusal) else None
        self._attempts = Attempts()
        self._breaker = Breaker(
            max_failures=_checked_number("max_failures", max_failures),
            cooldown_s=cooldown_s,
            max_cooldown_s=max_cooldown_s,
            monotonic=self._clock.monotonic,
            on_change=self._breaker_changed,
        )

    def __repr__(self) -> str:
        return f"<GuardedStore {self.inner!r} breaker {self.breaker}>"

    @property
    def breaker(self) -> BreakerState:
        """Whether the breaker is closed, open or half-open."""
        return self._breaker.state

    def refusal(self) -> Stop | None:
        """Return BREAKER_OPEN while an operation would be refused, None when it would be tried. Costs nothing."""
        if self._breaker.refuses:
            return Stop.BREAKER_OPEN
        return None if self._refuser is None else self._refuser.refusal()

    def why_refused(self) -> str:
        """Say since when and why the breaker is not closed, and when it is tried again."""
        breaker = self._breaker
        if not breaker.refuses and self._refuser is not None:
            return self._refuser.why_refused()
        if breaker.state is BreakerState.CLOSED:
            return "its breaker is closed"
        again = f"tried again in {breaker.retry_in_s:.1f} s" if breaker.probe is None else "being tried now"
        return f"its breaker is open since {breaker.open_for_s:.1f} s ({breaker.fault}); it is {again}"

    # Lookups and reads: their caller may go at the deadline

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys exist, consecutive from ``keys[0]``.

        Raises: StoreUnavailable: refused, or the deadline has passed. Else what ``inner`` raised.
        """
        stop = StopToken()

        async def attempt(deadline: Deadline) -> object:
            return await self._attempts.run(
                lambda: self.inner.count_prefix(keys), deadline, stop, is_lookup=True
            )

        return await self._operate("count_prefix", attempt, len(keys), self._lookup_timeout_s, stop)

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Fill buffers whole, in order, and return how many, consecutive from 0.

        Refused it fills none, returns 0 and sets ``stop.reason``, so that a request can tell it from a fault.

        Raises: StoreUnavailable: the deadline has passed; see Ownership of the class. Else what ``inner`` raised.
        """
        if self._breaker.refuses:
            self.stats["refusals"] += 1
            stop.reason = Stop.BREAKER_OPEN
            return 0

        async def attempt(deadline: Deadline) -> object:
            stop.reason = None  # of the attempt before
            return await self._attempts.run(
                lambda: self.inner.read(keys, into, stop), deadline, stop, is_lookup=False
            )

        return await self._operate("read", attempt, len(keys), self._timeout_s, stop)

    # Changes: nobody may go before the store has let go of the pages

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Store pages in order and return how many, consecutive from 0.

        Raises: StoreUnavailable: refused. Else what ``inner`` raised.
        Ownership: as without a guard, the pages are read until this returns, however long that takes.
        """

        async def attempt(deadline: Deadline) -> object:
            return await self.inner.write(keys, pages)

        return await self._operate("write", attempt, len(keys), self._timeout_s, StopToken())

    async def aclose(self) -> None:
        """Close the inner store; never waits for a hung operation."""
        await self.inner.aclose()

    # What all have in common

    async def _operate(
        self,
        verb: str,
        attempt: Callable[[Deadline], Awaitable[object]],
        limit: int,
        timeout_s: float,
        stop: StopToken,
    ) -> int:
        """Try until an attempt goes well or no more may follow, and tell the breaker; returns the count."""
        admission = self._admit(verb)
        attempts_left = 1 if admission.is_probe else self._max_attempts
        longest_pause_s = self._backoff_s
        deadline = Deadline(
            self._clock, timeout_s, partial(self._miss_deadline, verb, timeout_s, admission, stop)
        )
        try:
            while True:
                attempts_left -= 1
                pause_s = self._draw() * longest_pause_s
                try:
                    count = _checked_answer(await attempt(deadline), limit)
                except Exception as error:
                    may_retry = attempts_left > 0 and pause_s < deadline.left_s and _is_fault(error)
                    if not may_retry or not await self._may_follow(pause_s, admission, deadline, stop):
                        if _is_fault(error) and not stop.stopped:
                            self._fail(admission, f"{verb}: {error!r}")
                        raise
                else:
                    self._judge(verb, admission, count, limit, stop)
                    return count
                longest_pause_s *= 2
                self.stats["retries"] += 1
        finally:
            deadline.cancel()
            admission.withdraw()

    def _admit(self, verb: str) -> Admission:
        admission = self._breaker.admit(verb)
        if admission is None:
            raise self._refused(verb)
        return admission

    def _refused(self, verb: str) -> StoreUnavailable:
        self.stats["refusals"] += 1
        return StoreUnavailable(f"{verb} was refused: {self.why_refused()}")

    @staticmethod
    async def _may_follow(pause_s: float, admission: Admission, deadline: Deadline, stop: StopToken) -> bool:
        # Pauses between two attempts, unless by then nobody wants the second, or may not make it.
        def is_wanted() -> bool:
            return admission.counts and not stop.stopped and not stop.busy

        if not is_wanted():
            return False
        was_tracked, stop.tracked = stop.tracked, True  # nothing runs: torn away here, it has ended
        await deadline.pause(pause_s)
        stop.tracked = was_tracked
        return is_wanted()

    def _judge(self, verb: str, admission: Admission, count: int, limit: int, stop: StopToken) -> None:
        if stop.stopped:
            return
        if count < limit and stop.reason is Stop.STORE_FAULT:
            self._fail(admission, f"{verb} came back short, by a fault of the store")
        else:
            admission.succeed()

    def _miss_deadline(self, verb: str, timeout_s: float, admission: Admission, stop: StopToken) -> None:
        stop.stop()
        self.stats["deadline_misses"] += 1
        self.stats["failures"] += admission.miss(f"{verb}: no answer in {timeout_s:g} s")

    def _fail(self, admission: Admission, fault: str) -> None:
        self.stats["failures"] += admission.fail(fault)

    def _breaker_changed(self, before: BreakerState, after: BreakerState) -> None:
        breaker, store = self._breaker, type(self.inner).__name__
        self.stats["breaker_opened"] += before is BreakerState.CLOSED
        self.stats["breaker_closed"] += after is BreakerState.CLOSED
        self.stats["failed_probes"] += (before, after) == (BreakerState.HALF_OPEN, BreakerState.OPEN)
        if after is BreakerState.HALF_OPEN:
            logger.debug("store.breaker_half_open", store=store)
        elif after is BreakerState.CLOSED:
            logger.info("store.breaker_closed", store=store)
        else:
            logger.warning(
                "store.breaker_opened",
                store=store,
                fault=breaker.fault,
                open_for_s=breaker.open_for_s,
                retry_in_s=breaker.retry_in_s,
                hint="requests go on without the store",
            )


class GuardedDeletingStore(GuardedStore):
    """A guard of a store that can delete."""

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete the keys that exist; returns how many did.

        Raises: StoreUnavailable: refused. Else what ``inner`` raised.
        """

        store = self.inner
        assert isinstance(store, SupportsDelete)

        async def attempt(deadline: Deadline) -> object:
            return await store.delete(keys)

        return await self._operate("delete", attempt, len(keys), self._timeout_s, StopToken())


class GuardedListingStore(GuardedStore):
    """A guard of a store that can list its keys."""

    async def list_keys(self) -> Sequence[str]:
        """Return the keys of all objects, in no particular order.

        A long list takes long: it has no deadline, and tells the breaker nothing.

        Raises: StoreUnavailable: refused. Else what ``inner`` raised.
        """
        store = self.inner
        assert isinstance(store, SupportsListing)
        if self._breaker.refuses:
            raise self._refused("list_keys")
        return await store.list_keys()


class GuardedClearableStore(GuardedDeletingStore, GuardedListingStore):
    """A guard of a store that can do both, and so be cleared."""


_KINDS = {
    (False, False): GuardedStore,
    (True, False): GuardedDeletingStore,
    (False, True): GuardedListingStore,
    (True, True): GuardedClearableStore,
}
"""By whether the inner store can delete, and list."""


class _RunningLoopClock:
    """The clock of whatever loop runs."""

    def monotonic(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback)


def _checked_answer(answer: object, limit: int) -> int:
    is_count = isinstance(answer, (int, np.integer)) and not isinstance(answer, bool)
    if not is_count or not 0 <= answer <= limit:  # type: ignore[operator]
        raise StoreUnavailable(f"answered {answer!r}, expected 0 .. {limit}")
    return int(answer)  # type: ignore[call-overload, no-any-return]


def _is_fault(error: Exception) -> bool:
    # What the library raises on purpose otherwise is a mistake of the caller, the same at every try.
    return isinstance(error, StoreError) or not isinstance(error, HiCacheError)


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
