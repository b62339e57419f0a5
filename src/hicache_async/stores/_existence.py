"""ExistenceCache: which objects are believed to exist, for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from ..errors import ConfigError


class ExistenceCache:
    """Remember keys that were seen to exist. Only presence is remembered, never absence.

    A belief may be wrong, which costs a read that comes back shorter; that read drops it. So a hit
    renews a belief: a key in use stays known, one that nobody asks for is forgotten.

    Args:
        ttl_s: seconds a belief lasts without a hit; -1: for ever; 0: nothing is remembered.
        max_keys: the key least recently added or hit goes first.
        monotonic: seconds since some fixed point.
    """

    def __init__(self, ttl_s: float, monotonic: Callable[[], float], max_keys: int = 1 << 17) -> None:
        known_number = isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool)
        if not known_number or not (ttl_s == -1 or 0 <= ttl_s < math.inf):
            raise ConfigError(f"existence_ttl_s is {ttl_s!r}; give seconds >= 0, or -1 for ever")
        self._ttl_s = math.inf if ttl_s == -1 else ttl_s
        self._max_keys = max_keys
        self._monotonic = monotonic
        self._expiry: dict[str, float] = {}  # every change puts the key last: oldest belief first

    def __len__(self) -> int:
        return len(self._expiry)

    def add(self, keys: Iterable[str]) -> None:
        """Believe from now on that ``keys`` exist."""
        if self._ttl_s == 0:
            return
        expiry = self._monotonic() + self._ttl_s
        for key in keys:
            self._expiry.pop(key, None)
            self._expiry[key] = expiry
        while len(self._expiry) > self._max_keys:
            del self._expiry[next(iter(self._expiry))]

    def discard(self, keys: Iterable[str]) -> None:
        """Stop believing that ``keys`` exist."""
        for key in keys:
            self._expiry.pop(key, None)

    def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys are believed to exist, consecutive from ``keys[0]``, and renew them."""
        now = self._monotonic()
        count = 0
        for key in keys:
            if self._expiry.get(key, -math.inf) <= now:
                break
            count += 1
        self.add(keys[:count])
        return count
