"""Breaker: whether a store that failed too often in a row may be called again, and by whom.

=========  ======================================  =======================================
state      what happens                            state then
=========  ======================================  =======================================
closed     too many failures in a row              open
open       cool-down over, one operation comes     half-open; that one is the probe
half-open  the probe succeeds                      closed
half-open  the probe fails                         open, for twice as long
half-open  the probe is cancelled or stopped       open; the next operation is the probe
=========  ======================================  =======================================
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable


class BreakerState(enum.StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing, until the cool-down is over."""
    HALF_OPEN = "half_open"
    """Nothing but the one operation that is under way."""


class Admission:
    """One operation that was let through. What is said of it first counts: success, failure or neither."""

    __slots__ = ("_breaker", "_epoch", "_num_successes", "_verb")

    def __init__(self, breaker: Breaker, epoch: int, verb: str) -> None:
        self._breaker = breaker
        self._epoch: int | None = epoch
        self._verb = verb
        self._num_successes = breaker.num_successes[verb]

    @property
    def counts(self) -> bool:
        """Whether its outcome still matters: none is told yet, and the breaker has not opened or closed since."""
        return self._epoch == self._breaker.epoch

    @property
    def is_probe(self) -> bool:
        """Whether the breaker is half-open and waits for this one."""
        return self._breaker.probe is self

    def succeed(self) -> None:
        """Tell that the store did its work."""
        self._breaker.num_successes[self._verb] += 1
        if self._settle():
            self._breaker.note_success()

    def fail(self, fault: str) -> bool:
        """Tell that it did not, or not in time; returns whether that counts."""
        counts = self._settle()
        if counts:
            self._breaker.note_failure(fault)
        return counts

    def miss(self, fault: str) -> bool:
        """Tell that it did not end in time; returns whether that counts.

        It does not where another of its verb has succeeded since it was let through: then the store works,
        and this one has waited its turn.
        """
        if self._breaker.num_successes[self._verb] > self._num_successes:
            self.withdraw()
            return False
        return self.fail(fault)

    def withdraw(self) -> None:
        """Tell that nothing is known: the operation was cancelled or stopped. Does nothing after an outcome."""
        if self.is_probe:
            self._breaker.probe = None
        self._settle()

    def _settle(self) -> bool:
        counts, self._epoch = self.counts, None
        return counts


class Breaker:
    """Count failures in a row, and refuse for a while when there were too many.

    An operation that began before the breaker opened or closed tells nothing about the store after that.

    Args:
        max_failures: so many in a row open it.
        cooldown_s: how long it then refuses; doubled by each probe that fails, up to ``max_cooldown_s``.
        monotonic: seconds since some fixed point.
        on_change: called with the states before and after each change, but not when a probe is withdrawn.

    Attributes:
        epoch: how often it has opened or closed.
        num_successes: operations that succeeded, by verb.
        probe: the operation under way while half-open.
        fault: what the last failure was.
    """

    def __init__(
        self,
        *,
        max_failures: int,
        cooldown_s: float,
        max_cooldown_s: float,
        monotonic: Callable[[], float],
        on_change: Callable[[BreakerState, BreakerState], None],
    ) -> None:
        self._max_failures = max_failures
        self._first_cooldown_s = self._cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._monotonic = monotonic
        self._on_change = on_change
        self._num_failures = 0
        self._opened_s: float | None = None
        self._retry_s = 0.0
        self.epoch = 0
        self.num_successes: Counter[str] = Counter()
        self.probe: Admission | None = None
        self.fault = ""

    @property
    def state(self) -> BreakerState:
        """Closed, open or half-open; an open one that is to be tried again is still open."""
        if self._opened_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self.probe is None else BreakerState.HALF_OPEN

    @property
    def refuses(self) -> bool:
        """Whether :meth:`admit` would let nothing through now."""
        return self._opened_s is not None and (self.probe is not None or self.retry_in_s > 0)

    @property
    def open_for_s(self) -> float:
        """Seconds since it was closed last; 0: it is closed."""
        return 0.0 if self._opened_s is None else self._monotonic() - self._opened_s

    @property
    def retry_in_s(self) -> float:
        """Seconds until it lets a probe through."""
        return max(0.0, self._retry_s - self._monotonic())

    def admit(self, verb: str = "") -> Admission | None:
        """Let one operation through; None: refused."""
        if self.refuses:
            return None
        admission = Admission(self, self.epoch, verb)
        if self._opened_s is not None:
            self.probe = admission
            self._on_change(BreakerState.OPEN, BreakerState.HALF_OPEN)
        return admission

    def note_success(self) -> None:
        """Start counting anew; closes a half-open breaker."""
        self._num_failures = 0
        if self._opened_s is not None:
            self._cooldown_s = self._first_cooldown_s
            self._turn(None)

    def note_failure(self, fault: str) -> None:
        """Count one more in a row; opens when there are too many, and a half-open breaker at once."""
        self.fault = fault
        self._num_failures += 1
        if self._opened_s is None and self._num_failures < self._max_failures:
            return
        now_s = self._monotonic()
        self._retry_s = now_s + self._cooldown_s
        self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s)
        self._turn(now_s if self._opened_s is None else self._opened_s)

    def _turn(self, opened_s: float | None) -> None:
        before = BreakerState.CLOSED if self._opened_s is None else BreakerState.HALF_OPEN
        self._opened_s, self.probe = opened_s, None
        self.epoch += 1
        self._on_change(before, self.state)
