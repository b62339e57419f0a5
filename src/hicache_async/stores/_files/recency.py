"""TouchLimit: which objects to mark as used now, so that eviction keeps what is read."""

from __future__ import annotations

import math
from collections.abc import Callable

_MAX_KEYS = 1 << 16


class TouchLimit:
    """Let each key through once a period. Any thread.

    The mark is the file's time of modification, which all processes see, and setting it writes to the disk
    in the end: exact to a minute is exact enough for objects that live for hours. What is lost when two
    threads race is one mark too many.

    Args:
        period_s: seconds between two marks of one object.
        monotonic: seconds since some fixed point.
    """

    def __init__(self, period_s: float, monotonic: Callable[[], float]) -> None:
        self._period_s = period_s
        self._monotonic = monotonic
        self._seen: set[str] = set()
        self._end_s = -math.inf

    def due(self, key: str) -> bool:
        """Return whether ``key`` is to be marked, which it is then taken to be."""
        now = self._monotonic()
        if now >= self._end_s or len(self._seen) >= _MAX_KEYS:
            self._seen, self._end_s = set(), now + self._period_s
        if key in self._seen:
            return False
        self._seen.add(key)
        return True
