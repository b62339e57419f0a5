"""ExistenceIndex believes in presence for a while, within bounds, and never what was dropped meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from hicache_async.errors import ConfigError
from hicache_async.stores._files.existence import _MAX_DROPS, ExistenceIndex
from hicache_async.testing.manual import ManualClock


def add(cache: ExistenceIndex, keys: Iterable[str]) -> None:
    """Believe what the disk was asked for just now."""
    cache.confirm(list(keys), cache.ask())


def test_only_added_keys_are_believed() -> None:
    """The count ends at the first key that was never seen, whatever comes behind it."""
    cache = ExistenceIndex(5.0, ManualClock().monotonic)
    assert cache.count_prefix(["a"]) == 0
    add(cache, ["a", "b", "d"])
    assert cache.count_prefix(["a", "b", "c", "d"]) == 2
    assert cache.count_prefix([]) == 0


@pytest.mark.parametrize("added_s", [0.0, 1.0, 2.49, 2.5, 4.9])
def test_a_belief_lasts_half_its_ttl_and_not_longer_than_all_of_it(added_s: float) -> None:
    """A key is believed for ttl_s / 2 after it was added, whenever that was, and never after ttl_s."""

    def believed_after(age_s: float) -> bool:
        clock = ManualClock()
        cache = ExistenceIndex(5.0, clock.monotonic)
        add(cache, ["first"])
        clock.advance(added_s)
        add(cache, ["a"])
        clock.advance(age_s)
        return cache.count_prefix(["a"]) == 1

    assert believed_after(2.5)
    assert not believed_after(5.0)


@pytest.mark.parametrize("asked_s", [0.1, 2.6, 4.9])
def test_looking_for_others_makes_no_belief_last(asked_s: float) -> None:
    """Whenever another key is asked for in between, a key is forgotten at the end of its ttl_s."""
    clock = ManualClock()
    cache = ExistenceIndex(5.0, clock.monotonic)
    add(cache, ["a"])
    clock.advance(asked_s)
    assert cache.count_prefix(["other"]) == 0
    clock.advance(5.0 - asked_s)
    assert cache.count_prefix(["a"]) == 0


def test_a_hit_renews() -> None:
    """A key that is asked for stays believed; one that is not is forgotten meanwhile."""
    clock = ManualClock()
    cache = ExistenceIndex(5.0, clock.monotonic)
    add(cache, ["used", "idle"])
    for _ in range(10):
        clock.advance(2)
        assert cache.count_prefix(["used"]) == 1
    assert cache.count_prefix(["idle"]) == 0


def test_adding_again_renews() -> None:
    """A key seen again starts its time again."""
    clock = ManualClock()
    cache = ExistenceIndex(5.0, clock.monotonic)
    for _ in range(10):
        add(cache, ["a"])
        clock.advance(2.5)
    assert cache.count_prefix(["a"]) == 1


def test_a_miss_drops() -> None:
    """A discarded key is not believed, and discarding one that is unknown does nothing."""
    cache = ExistenceIndex(-1, ManualClock().monotonic)
    add(cache, ["a", "b"])
    cache.discard(["a", "unknown"])
    assert cache.count_prefix(["a"]) == 0
    assert cache.count_prefix(["b"]) == 1


def test_minus_one_never_expires() -> None:
    """With ttl_s -1 a key is believed for ever."""
    clock = ManualClock()
    cache = ExistenceIndex(-1, clock.monotonic)
    add(cache, ["a"])
    clock.advance(1e9)
    assert cache.count_prefix(["a"]) == 1


def test_zero_remembers_nothing() -> None:
    """With ttl_s 0 nothing is believed and nothing kept."""
    cache = ExistenceIndex(0, ManualClock().monotonic)
    add(cache, ["a"])
    assert cache.count_prefix(["a"]) == 0
    assert len(cache) == 0


@pytest.mark.parametrize("ttl_s", [5.0, -1])
def test_size_is_bounded(ttl_s: float) -> None:
    """Beyond max_keys those go that were not asked for lately."""
    cache = ExistenceIndex(ttl_s, ManualClock().monotonic, max_keys=8)
    add(cache, "abcd")
    add(cache, "ef")
    assert cache.count_prefix("ab") == 2
    add(cache, "ghi")
    assert [cache.count_prefix([key]) for key in "abcdefghi"] == [1, 1, 0, 0, 0, 0, 1, 1, 1]
    add(cache, map(str, range(100)))
    assert len(cache) <= 8
    assert cache.count_prefix(["99"]) == 1


def test_room_is_for_what_pushes_nothing_out() -> None:
    """There is room while nothing known would have to go, and none where nothing is remembered."""
    cache = ExistenceIndex(-1, ManualClock().monotonic, max_keys=8)
    assert cache.has_room(4)
    assert not cache.has_room(5)
    add(cache, "abc")
    assert cache.has_room(1)
    assert not cache.has_room(2)
    assert not ExistenceIndex(0, ManualClock().monotonic).has_room(1)


def test_what_was_dropped_since_the_disk_was_asked_is_not_believed() -> None:
    """An answer counts for the keys that nobody dropped after the question; a later question is not concerned."""
    cache = ExistenceIndex(-1, ManualClock().monotonic)
    cache.discard(["a"])
    asked = cache.ask()
    cache.discard(["b"])
    cache.confirm(["a", "b", "c"], asked)
    assert [cache.count_prefix([key]) for key in "abc"] == [1, 0, 1]
    cache.confirm(["b"], cache.ask())
    assert cache.count_prefix(["b"]) == 1


def test_an_answer_older_than_the_drops_remembered_is_not_believed() -> None:
    """Drops are remembered within bounds: an answer that may have missed one teaches nothing."""
    cache = ExistenceIndex(-1, ManualClock().monotonic)
    asked = cache.ask()
    cache.discard(["gone"])
    cache.discard(str(number) for number in range(_MAX_DROPS))
    cache.confirm(["gone", "kept"], asked)
    assert len(cache) == 0
    assert len(cache._drops) == _MAX_DROPS


def test_a_prompt_that_is_known_is_compared_without_a_loop() -> None:
    """Known keys are looked at by the set itself: asking again adds nothing and moves nothing."""
    cache = ExistenceIndex(-1, ManualClock().monotonic)
    keys = [f"key{number}" for number in range(512)]
    add(cache, keys)

    class Frozen(set[str]):
        def update(self, *keys: object) -> None:
            raise AssertionError("a hit wrote to the index")

        __contains__ = None  # type: ignore[assignment]

    cache._young = Frozen(cache._young)
    assert cache.count_prefix(keys) == 512


@pytest.mark.parametrize("ttl_s", [-2, -0.5, math.nan, math.inf, "5", None, True])
def test_a_ttl_that_cannot_work_is_refused(ttl_s: float) -> None:
    """A time that is not seconds >= 0 or -1 is refused by name."""
    with pytest.raises(ConfigError, match="existence_ttl_s is"):
        ExistenceIndex(ttl_s, ManualClock().monotonic)
