"""Metrics: what the cache has done, as plain counts. Series exist from the start, at 0."""

from __future__ import annotations

from collections import Counter

from .types import Books, Stop

UNFULFILLED_NAME = "hicache_async_storage_prefetch_unfulfilled_tokens_total"
"""Exported with a label ``reason``; see :func:`unfulfilled_series`."""


class Metrics:
    """Counts since the cache was opened.

    Attributes:
        unfulfilled: tokens that a prefetch asked for and did not bring, by reason. Of the tokens
            asked for, those brought and these add up.
        device, host, store, computed: prompt tokens served by each tier, or computed.
        counters: everything else, by name.
    """

    __slots__ = ("computed", "counters", "device", "host", "store", "unfulfilled")

    def __init__(self) -> None:
        self.unfulfilled: dict[Stop, int] = dict.fromkeys(Stop, 0)
        self.device = self.host = self.store = self.computed = 0
        self.counters: Counter[str] = Counter()

    def book(self, books: Books) -> None:
        """Add the books of one lease."""
        self.device += books.device
        self.host += books.host
        self.store += books.store
        self.computed += books.computed

    def unfulfilled_series(self) -> dict[str, int]:
        """Return the unfulfilled tokens by exported label; no_host_room is exported as host_capacity."""
        return {
            "host_capacity" if stop is Stop.NO_HOST_ROOM else stop.value: tokens
            for stop, tokens in self.unfulfilled.items()
            if stop is not Stop.COMPLETE
        }
