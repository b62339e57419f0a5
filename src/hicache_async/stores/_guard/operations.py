"""Operations: calls of a store with a deadline, retries and a breaker, as a guard makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, TypeVar

from ..._log import logger
from ...abc import Clock
from ...errors import HiCacheError, StoreError, StoreUnavailable
from ...types import Stop, StopToken
from .attempt import Attempts, Deadline
from .breaker import Admission, Breaker, BreakerState

T = TypeVar("T")

COUNTS = (
    "retries", "failures", "deadline_misses", "refusals", "breaker_opened", "breaker_closed", "failed_probes",
)  # fmt: skip
"""What a guard counts; breaker_opened less breaker_closed is 1 while its breaker is not closed, else 0."""


class Retries(NamedTuple):
    """How often an operation is tried, and how long the pauses between two attempts may be."""

    max_attempts: int
    backoff_s: float
    draw: Callable[[], float]


class Operations:
    """Run the operations of one guard.

    Args:
        breaker: ``(max_failures, cooldown_s, max_cooldown_s)``.
        store_name: what the log calls the store.

    Attributes:
        attempts: the single tries, those that nobody waits for any more too.
        counts: by name, see :data:`COUNTS`.
    """

    def __init__(
        self, clock: Clock, retries: Retries, breaker: tuple[int, float, float], store_name: str
    ) -> None:
        self.attempts = Attempts()
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._clock = clock
        self._retries = retries
        self._store_name = store_name
        max_failures, cooldown_s, max_cooldown_s = breaker
        self.breaker = Breaker(
            max_failures=max_failures,
            cooldown_s=cooldown_s,
            max_cooldown_s=max_cooldown_s,
            monotonic=clock.monotonic,
            on_change=self._breaker_changed,
        )

    async def run(
        self,
        verb: str,
        attempt: Callable[[Deadline], Awaitable[object]],
        checked: Callable[[object], T],
        timeout_s: float,
        stop: StopToken,
        *,
        whole: object = None,
    ) -> T:
        """Try until an attempt goes well or no more may follow, and tell the breaker; returns the answer.

        Args:
            checked: returns an answer that can be true, and raises StoreUnavailable for any other.
            whole: the answer with which nothing is blamed on the store, whatever ``stop.reason`` says.
        Raises: StoreUnavailable: refused, or a deadline that was not waited for. Else what the attempt raised.
        """
        admission = self._admit(verb)
        attempts_left = 1 if admission.is_probe else self._retries.max_attempts
        longest_pause_s = self._retries.backoff_s
        deadline = Deadline(
            self._clock, timeout_s, partial(self._miss_deadline, verb, timeout_s, admission, stop)
        )
        try:
            while True:
                attempts_left -= 1
                pause_s = self._retries.draw() * longest_pause_s
                try:
                    answer = checked(await attempt(deadline))
                except Exception as error:
                    may_retry = attempts_left > 0 and pause_s < deadline.left_s and is_fault(error)
                    if not may_retry or not await self._may_follow(pause_s, admission, deadline, stop):
                        if is_fault(error) and not stop.stopped:
                            self._fail(admission, f"{verb}: {error!r}")
                        raise
                else:
                    self._judge(verb, admission, stop, is_whole=answer == whole)
                    return answer
                longest_pause_s *= 2
                self.counts["retries"] += 1
        finally:
            deadline.cancel()
            admission.withdraw()

    def why_not_closed(self) -> str:
        """Say since when and why the breaker is not closed, and when it is tried again."""
        breaker = self.breaker
        if breaker.state is BreakerState.CLOSED:
            return "its breaker is closed"
        again = f"tried again in {breaker.retry_in_s:.1f} s" if breaker.probe is None else "being tried now"
        return f"its breaker is open since {breaker.open_for_s:.1f} s ({breaker.fault}); it is {again}"

    def refused(self, verb: str) -> StoreUnavailable:
        """Count a refusal of the breaker and return what to raise."""
        self.counts["refusals"] += 1
        return StoreUnavailable(f"{verb} was refused: {self.why_not_closed()}")

    def _admit(self, verb: str) -> Admission:
        admission = self.breaker.admit(verb)
        if admission is None:
            raise self.refused(verb)
        return admission

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

    def _judge(self, verb: str, admission: Admission, stop: StopToken, *, is_whole: bool) -> None:
        if stop.stopped:
            return
        if stop.reason is Stop.STORE_FAULT and not is_whole:
            self._fail(admission, f"{verb} came back short, by a fault of the store")
        else:
            admission.succeed()

    def _miss_deadline(self, verb: str, timeout_s: float, admission: Admission, stop: StopToken) -> None:
        stop.stop()
        self.counts["deadline_misses"] += 1
        self.counts["failures"] += admission.miss(f"{verb}: no answer in {timeout_s:g} s")

    def _fail(self, admission: Admission, fault: str) -> None:
        self.counts["failures"] += admission.fail(fault)

    def _breaker_changed(self, before: BreakerState, after: BreakerState) -> None:
        breaker, store = self.breaker, self._store_name
        self.counts["breaker_opened"] += before is BreakerState.CLOSED
        self.counts["breaker_closed"] += after is BreakerState.CLOSED
        self.counts["failed_probes"] += (before, after) == (BreakerState.HALF_OPEN, BreakerState.OPEN)
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


def is_fault(error: Exception) -> bool:
    """Return whether ``error`` is a fault of the store, not a mistake of the caller, the same at every try."""
    # What the library raises on purpose, other than a StoreError, is such a mistake.
    return isinstance(error, StoreError) or not isinstance(error, HiCacheError)
