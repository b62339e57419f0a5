"""LoopClock: deadlines by the loop's own time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .abc import TimerHandle


@dataclass(frozen=True, slots=True)
class LoopClock:
    """The loop's own time."""

    loop: asyncio.AbstractEventLoop

    def monotonic(self) -> float:
        """Return the loop's time in seconds."""
        return self.loop.time()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` after ``delay_s``."""
        return self.loop.call_later(delay_s, callback)
