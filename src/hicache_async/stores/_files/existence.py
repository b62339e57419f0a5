"""ExistenceIndex: which objects are believed to exist, for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from ...errors import ConfigError

_MAX_DROPS = 1 << 13
"""Drops remembered for questions under way; one that has seen more of them is not believed."""


class ExistenceIndex:
    """Remember keys that were seen to exist. Only presence is remembered, never absence.

    A belief may be wrong, which costs a read that comes back shorter; that read drops it. So a hit
    renews a belief: a key in use stays known, one that nobody asks for is forgotten.

    There are two generations of keys. New and renewed ones join the young; every half ``ttl_s``, or when
    the young are many, the old are forgotten and the young become the old. So a key costs a place in a set
    and no time of its own, and a prompt that was asked for lately is compared at the speed of C.

    An answer from the disk may be out of date when it arrives: whoever asks takes the moment from
    :meth:`ask` first, and what was dropped since is not believed.

    Args:
        ttl_s: seconds a belief lasts without a hit at most, and half of them at least; -1: for ever;
            0: nothing is remembered.
        max_keys: how many are remembered; beyond it those go that were not asked for lately.
        monotonic: seconds since some fixed point.
    """

    def __init__(self, ttl_s: float, monotonic: Callable[[], float], max_keys: int = 1 << 18) -> None:
        known_number = isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool)
        if not known_number or not (ttl_s == -1 or 0 <= ttl_s < math.inf):
            raise ConfigError(f"existence_ttl_s is {ttl_s!r}; give seconds >= 0, or -1 for ever")
        self._half_ttl_s = math.inf if ttl_s == -1 else ttl_s / 2
        self._max_young = max(1, max_keys // 2)
        self._monotonic = monotonic
        self._young: set[str] = set()
        self._old: set[str] = set()
        self._young_since = -math.inf
        self._num_drops = 0
        self._drops: dict[str, int] = {}  # the last ones, in order, each with its number
        self._first_drop = 0  # from this number on all are remembered

    def __len__(self) -> int:
        return len(self._young | self._old)

    def has_room(self, num_keys: int) -> bool:
        """Return whether so many can be added without others being forgotten; never at ``ttl_s`` 0."""
        return self._half_ttl_s > 0 and len(self._young) + num_keys <= self._max_young

    def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys are believed to exist, consecutive from ``keys[0]``, and renew them."""
        self._age()
        if self._young.issuperset(keys):
            return len(keys)
        count = 0
        for key in keys:
            if key not in self._young and key not in self._old:
                break
            count += 1
        self._add(keys[:count])
        return count

    def ask(self) -> int:
        """Return the moment at which the disk is asked, for :meth:`confirm`."""
        return self._num_drops

    def confirm(self, keys: Collection[str], asked: int) -> None:
        """Believe that ``keys`` exist, which the disk was asked for at the moment ``asked``."""
        if asked < self._first_drop:
            return
        if asked < self._num_drops:
            keys = [key for key in keys if self._drops.get(key, -1) < asked]
        self._age()
        self._add(keys)

    def discard(self, keys: Iterable[str]) -> None:
        """Stop believing that ``keys`` exist."""
        for key in keys:
            self._young.discard(key)
            self._old.discard(key)
            self._drops.pop(key, None)
            self._drops[key] = self._num_drops
            self._num_drops += 1
        for key in tuple(islice(self._drops, max(0, len(self._drops) - _MAX_DROPS))):
            self._first_drop = self._drops.pop(key) + 1

    def _add(self, keys: Collection[str]) -> None:
        if self._half_ttl_s == 0:
            return
        for start in range(0, len(keys), self._max_young):
            if len(self._young) + len(keys) - start > self._max_young:
                self._young, self._old = set(), self._young
            self._young.update(islice(keys, start, start + self._max_young))

    def _age(self) -> None:
        """Let generations go that are past their time: what is young has been added since then."""
        now = self._monotonic()
        age = now - self._young_since
        if age < self._half_ttl_s:
            return
        if age < 2 * self._half_ttl_s and self._young:
            self._young, self._old = set(), self._young
            self._young_since += self._half_ttl_s
        else:
            self._young, self._old = set(), set()
            self._young_since = now
