"""ExistenceCache believes in presence for a while, within bounds."""

from __future__ import annotations

import math

import pytest

from hicache_async.errors import ConfigError
from hicache_async.stores._existence import ExistenceCache
from hicache_async.testing.manual import ManualClock


def test_only_added_keys_are_believed() -> None:
    """The count ends at the first key that was never seen, whatever comes behind it."""
    cache = ExistenceCache(5.0, ManualClock().monotonic)
    assert cache.count_prefix(["a"]) == 0
    cache.add(["a", "b", "d"])
    assert cache.count_prefix(["a", "b", "c", "d"]) == 2
    assert cache.count_prefix([]) == 0


def test_a_belief_ends_with_its_ttl() -> None:
    """A key is believed for less than ttl_s after it was added."""
    clock = ManualClock()
    cache = ExistenceCache(5.0, clock.monotonic)
    cache.add(["a"])
    clock.advance(4.99)
    cache.add(["b"])
    clock.advance(0.01)
    assert cache.count_prefix(["a"]) == 0
    assert cache.count_prefix(["b"]) == 1


def test_a_hit_renews() -> None:
    """A key that is asked for stays believed; one that is not is forgotten meanwhile."""
    clock = ManualClock()
    cache = ExistenceCache(5.0, clock.monotonic)
    cache.add(["used", "idle"])
    for _ in range(4):
        clock.advance(4)
        assert cache.count_prefix(["used"]) == 1
    assert cache.count_prefix(["idle"]) == 0


def test_adding_again_renews() -> None:
    """A key seen again starts its time again."""
    clock = ManualClock()
    cache = ExistenceCache(5.0, clock.monotonic)
    cache.add(["a"])
    clock.advance(4)
    cache.add(["a"])
    clock.advance(4)
    assert cache.count_prefix(["a"]) == 1


def test_a_miss_drops() -> None:
    """A discarded key is not believed, and discarding one that is unknown does nothing."""
    cache = ExistenceCache(-1, ManualClock().monotonic)
    cache.add(["a", "b"])
    cache.discard(["a", "unknown"])
    assert cache.count_prefix(["a"]) == 0
    assert cache.count_prefix(["b"]) == 1


def test_minus_one_never_expires() -> None:
    """With ttl_s -1 a key is believed for ever."""
    clock = ManualClock()
    cache = ExistenceCache(-1, clock.monotonic)
    cache.add(["a"])
    clock.advance(1e9)
    assert cache.count_prefix(["a"]) == 1


def test_zero_remembers_nothing() -> None:
    """With ttl_s 0 nothing is believed and nothing kept."""
    cache = ExistenceCache(0, ManualClock().monotonic)
    cache.add(["a"])
    assert cache.count_prefix(["a"]) == 0
    assert len(cache) == 0


@pytest.mark.parametrize("ttl_s", [5.0, -1])
def test_size_is_bounded(ttl_s: float) -> None:
    """Beyond max_keys the key least recently added or hit is forgotten."""
    cache = ExistenceCache(ttl_s, ManualClock().monotonic, max_keys=3)
    cache.add(["a", "b", "c"])
    assert cache.count_prefix(["a"]) == 1
    cache.add(["d"])
    assert len(cache) == 3
    assert [cache.count_prefix([key]) for key in "abcd"] == [1, 0, 1, 1]
    cache.add(map(str, range(100)))
    assert len(cache) == 3


@pytest.mark.parametrize("ttl_s", [-2, -0.5, math.nan, math.inf, "5", None, True])
def test_a_ttl_that_cannot_work_is_refused(ttl_s: float) -> None:
    """A time that is not seconds >= 0 or -1 is refused by name."""
    with pytest.raises(ConfigError, match="existence_ttl_s is"):
        ExistenceCache(ttl_s, ManualClock().monotonic)
