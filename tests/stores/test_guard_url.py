"""``guard+`` before a URL puts a guard around its store, with options that begin with guard_."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_async.abc import SupportsDelete, SupportsListing
from hicache_async.errors import ConfigError, StoreUnavailable
from hicache_async.stores import FileStore, GuardedStore, MemoryStore, open_store
from hicache_async.testing.manual import ManualClock
from tests.stores.pages import read, write


def test_a_guard_opens_the_store_inside(tmp_path: Path) -> None:
    """Path and options of the store inside are its own, and the guard can do what it can."""
    store = open_store(f"guard+file://{tmp_path}/kv%20data?existence_ttl_s=2&guard_timeout_s=3&num_lanes=1")
    assert isinstance(store, GuardedStore) and isinstance(store.inner, FileStore)
    assert store.inner.root == f"{tmp_path}/kv data"
    assert store.inner._existence._half_ttl_s == 1.0
    assert store._timeout_s == 3
    assert isinstance(store, SupportsDelete) and isinstance(store, SupportsListing)
    private = open_store("guard+file:")
    assert isinstance(private, GuardedStore) and isinstance(private.inner, FileStore)


@pytest.mark.asyncio
async def test_options_come_from_query_and_call() -> None:
    """The call's options win, and those that are no text can be given there only."""
    clock = ManualClock()
    store = open_store(
        "guard+memory:?guard_max_failures=9&guard_cooldown_s=7&max_bytes=2000",
        guard_max_failures=1, guard_clock=clock, guard_max_attempts=1,
    )  # fmt: skip
    assert isinstance(store, GuardedStore) and isinstance(store.inner, MemoryStore)
    assert await write(store, "a", "b", "c") == 2
    assert await read(store, "a") == 1
    await store.inner.aclose()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.count_prefix(["a"])
    with pytest.raises(StoreUnavailable, match="tried again in 7.0 s"):
        await store.count_prefix(["a"])
    clock.advance(7.0)
    assert store.refusal() is None


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        (
            "guard+memory:?guard_speed=1",
            "'guard_speed' is not an option .*guard_backoff_s, .*guard_timeout_s",
        ),
        ("guard+memory:?guard_timeout_s=soon", "guard_timeout_s is 'soon' .*give a number"),
        ("guard+memory:?guard_max_attempts=1.5", "guard_max_attempts is '1.5' .*give an integer"),
        ("guard+memory:?guard_timeout_s=nan", "timeout_s is nan"),
        ("guard+memory:?guard_clock=now", "'guard_clock' cannot stand in the store URL"),
        ("guard+memory:?timeout_s=1", "'timeout_s' is not an option of store 'memory:"),
        ("guard+nowhere:", "no store opens 'nowhere:'"),
        ("guard+file:here", "relative path"),
        ("guard+", "no store opens ''"),
    ],
)
def test_a_bad_url_says_what_would_be_right(url: str, complaint: str) -> None:
    """Which option, of the guard or of the store inside, is wrong."""
    with pytest.raises(ConfigError, match=complaint):
        open_store(url)
