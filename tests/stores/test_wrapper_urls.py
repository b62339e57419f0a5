"""Wrappers are prefixes of a URL, tiers two URLs in one, and each option reaches what it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest

from hicache_async.core.manifest import MANIFEST_NBYTES
from hicache_async.errors import ConfigError
from hicache_async.stores import FileStore, GuardedStore, MemoryStore, NullStore, open_store
from hicache_async.stores.codec import CodecStore, Fp8
from hicache_async.stores.registry import Registry, accepted_options
from hicache_async.stores.tiered import TieredStore
from tests.stores.wrappers import KEY_ENV, key_in_environment

__all__ = ["key_in_environment"]


class Kept(MemoryStore):
    """A store of somebody else that remembers how it was opened."""

    opened: list[dict[str, object]] = []  # noqa: RUF012 - cleared by each test that looks at it

    def __init__(self, *, slot_bytes: int = 0, dtype: str = "", size: int = 0) -> None:
        super().__init__()

    @classmethod
    def from_url(cls, url: str, **options: object) -> Kept:
        cls.opened.append({"url": url, **options})
        return cls()


@pytest.fixture
def kept() -> Registry:
    """Return a table with this store in it."""
    Kept.opened.clear()
    return Registry({"kept": f"{__name__}:Kept", "memory": "hicache_async.stores.memory:MemoryStore"})


def tiered(fast: str, slow: str, rest: str = "") -> str:
    """Return the URL of two tiers."""
    return f"tiered:?fast={quote(fast, safe='')}&slow={quote(slow, safe='')}{rest}"


def inside(store: object, *kinds: type) -> Any:
    """Return the innermost store, checking what is around it, outermost first."""
    for kind in kinds[:-1]:
        assert isinstance(store, kind)
        store = cast("GuardedStore", store).inner
    assert isinstance(store, kinds[-1])
    return store


def test_prefixes_compose(tmp_path: Path) -> None:
    """Each option that begins with a wrapper's name is its own, all others are the store's."""
    url = (
        f"guard+aesgcm+zstd+file://{tmp_path}/p+q?zstd_level=7&aesgcm_key_env={KEY_ENV}&guard_timeout_s=2"
        "&num_lanes=3&zstd_scratch_bytes=8MiB&aesgcm_num_threads=2"
    )
    store = open_store(url)
    file = inside(store, GuardedStore, CodecStore, CodecStore, FileStore)
    assert (file.root, file._num_lanes) == (f"{tmp_path}/p+q", 3)
    assert isinstance(store, GuardedStore) and store._timeout_s == 2.0
    aesgcm = cast("CodecStore", store.inner)
    zstd = cast("CodecStore", aesgcm.inner)
    assert (aesgcm._codec.family, repr(zstd._codec)) == ("aesgcm", "Zstd(level=7)")
    assert zstd._scratch.max_bytes == 8 << 20
    other = open_store(
        f"fp8+guard+zstd+aesgcm+memory:?aesgcm_key_env={KEY_ENV}&fp8_dtype=float16&fp8_block=64"
    )
    inside(other, CodecStore, GuardedStore, CodecStore, CodecStore, MemoryStore)


def test_a_plus_elsewhere_is_no_prefix(kept: Registry) -> None:
    """Schemes and paths may have one."""
    kept.register("a+kept", f"{__name__}:Kept")
    kept.open("a+kept://guard+x?y=zstd%2B1")
    kept.open("guard+a+kept:?z=1+2&guard_timeout_s=1")
    assert [each["url"] for each in Kept.opened] == ["a+kept://guard+x?y=zstd%2B1", "a+kept:?z=1+2"]


def test_tiers_have_urls_of_their_own(tmp_path: Path) -> None:
    """With options of their own, wrappers within, and around both."""
    slow = f"guard+zstd+file://{tmp_path}?zstd_level=9&num_lanes=2&guard_timeout_s=3"
    store = open_store(f"zstd+{tiered('memory:?max_bytes=1000', slow, '&fast_timeout_s=0.5&zstd_level=1')}")
    both = inside(store, CodecStore, TieredStore)
    assert (inside(both.fast, GuardedStore, MemoryStore)._max_bytes, both.fast._timeout_s) == (1000, 0.5)
    assert inside(both.slow, GuardedStore, CodecStore, FileStore)._num_lanes == 2
    assert (both.slow._timeout_s, store._codec._level) == (3.0, 1)  # type: ignore[attr-defined]
    sized = open_store(tiered("memory:", "null:", "&fill_bytes=1MiB&fast_lookup_timeout_s=0.1"))
    assert isinstance(sized, TieredStore) and isinstance(sized.slow.inner, NullStore)
    within = open_store(tiered(tiered("memory:", "memory:"), "memory:"))
    assert isinstance(within, TieredStore) and isinstance(within.fast.inner, TieredStore)


def test_options_of_the_call_reach_who_takes_them(kept: Registry) -> None:
    """Through any wrapper, into each tier that takes them, unless its URL says otherwise."""
    store = kept.open("guard+zstd+kept:?size=1", guard_timeout_s=9, zstd_level=2, slot_bytes=5000)
    assert isinstance(store, GuardedStore) and store._timeout_s == 9
    assert Kept.opened == [{"url": "kept:?size=1", "slot_bytes": 5048}]
    Kept.opened.clear()
    kept.open(tiered("memory:", "kept:?a=1", "&fill_bytes=1"), slot_bytes=7, dtype="float16")
    kept.open(tiered("kept:?slot_bytes=3", "kept:"), slot_bytes=7)
    assert Kept.opened == [
        {"url": "kept:?a=1", "slot_bytes": 7, "dtype": "float16"},
        {"url": "kept:?slot_bytes=3"},
        {"url": "kept:", "slot_bytes": 7},
    ]


def test_a_codec_takes_the_dtype_that_is_offered(kept: Registry) -> None:
    """Unless its own option is given, and leaves it to the store inside only if that takes it too."""
    for url, given, expected in [
        ("fp8+memory:", {"dtype": "float16"}, "float16"),
        ("fp8+memory:?fp8_dtype=float32", {"dtype": "float16"}, "float32"),
        ("fp8+memory:?fp8_dtype=float32", {"fp8_dtype": "float16"}, "float16"),
    ]:
        store = kept.open(url, **given)
        assert isinstance(store, CodecStore) and isinstance(store._codec, Fp8)
        assert store._codec._dtype == expected
    kept.open("fp8+kept:", dtype="float16")
    assert Kept.opened[-1]["dtype"] == "float16"


@pytest.mark.parametrize(
    ("prefix", "page", "slot"),
    [
        ("", 8192, 8192),
        ("guard+", 8192, 8192),
        ("zstd+", 8192, 8192 + 48),
        ("aesgcm+", 8192, 8192 + 56),
        ("aesgcm+zstd+", 8192, 8192 + 56 + 48),
        ("fp8+", 65536, 32768 + 4 * 256 + 48),
        ("fp8+", 4096, MANIFEST_NBYTES),
    ],
)
def test_slots_are_as_large_as_frames(kept: Registry, prefix: str, page: int, slot: int) -> None:
    """A store of slots under a codec is told the size of what it will get, a manifest at least."""
    key = {"aesgcm_key_env": KEY_ENV} if "aesgcm" in prefix else {}
    dtype = {"dtype": "bfloat16"} if "fp8" in prefix else {}
    kept.open(f"{prefix}kept:", slot_bytes=page, **key, **dtype)
    assert Kept.opened[-1]["slot_bytes"] == slot


def test_what_a_url_leaves_open() -> None:
    """The options that whatever is behind it takes, less those that it gives itself."""
    assert accepted_options("null:") == frozenset()
    assert {"existence_ttl_s", "max_bytes"} <= accepted_options("file:///x?num_lanes=2")
    assert "num_lanes" not in accepted_options("file:///x?num_lanes=2")
    assert "slot_bytes" in accepted_options("shm:x") and "slot_bytes" in accepted_options("mmap:///x")
    assert "slot_bytes" not in accepted_options("guard+shm:x?slot_bytes=1MiB")
    assert {"guard_timeout_s", "existence_ttl_s"} <= accepted_options("guard+file:///x")
    assert {"dtype", "fp8_dtype", "existence_ttl_s"} <= accepted_options("fp8+guard+file:///x")
    assert not {"dtype", "fp8_dtype"} & accepted_options("fp8+file:///x?fp8_dtype=float16")
    assert "dtype" not in accepted_options("zstd+file:///x")
    fast, slow = "shm:x?slot_bytes=1MiB", "fp8+file:///x?existence_ttl_s=0"
    assert {"dtype", "max_bytes", "fill_bytes"} <= accepted_options(tiered(fast, slow))
    assert not {"slot_bytes", "existence_ttl_s", "fast", "slow"} & accepted_options(tiered(fast, slow))
    assert "existence_ttl_s" in accepted_options(tiered("file:///y", slow))


def test_what_a_class_takes_by_keyword_only_is_an_option(kept: Registry) -> None:
    """Of stores of others too; beside these stands what a store is opened on."""
    assert kept.accepted_options("kept:") == {"slot_bytes", "dtype", "size"}
    with pytest.raises(ConfigError, match="no store opens 'nowhere:'"):
        kept.accepted_options("guard+nowhere:")


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("zstd+memory:?zstd_speed=1", "'zstd_speed' is not an option .*zstd_level"),
        ("zstd+memory:?zstd_level=high", "zstd_level is 'high' .*give an integer"),
        ("zstd+memory:?zstd_level=99", "level is 99"),
        ("zstd+memory:?level=3", "'level' is not an option of store 'memory:"),
        ("zstd+null:", "codec zstd needs a store that can tell the sizes of its objects; a NullStore lacks"),
        ("fp8+memory:", "dtype is None; give one of: bfloat16"),
        ("fp8+memory:?fp8_dtype=int4", "dtype is 'int4'; give one of: bfloat16"),
        ("aesgcm+memory:?aesgcm_key_env=HICACHE_NO_SUCH_KEY", "'HICACHE_NO_SUCH_KEY' holds no key"),
        ("aesgcm+memory:?aesgcm_threads=1", "'aesgcm_threads' cannot stand in the store URL"),
        ("zstd+nowhere:", "no store opens 'nowhere:'"),
        ("tiered:", r"has no fast; write tiered:\?fast=memory"),
        ("tiered:?fast=memory%3A", "has no slow"),
        ("tiered:?fast=memory%3A&slow=nowhere%3A", "no store opens 'nowhere:'"),
        ("tiered:?fast=memory%3A&slow=memory%3A&speed=1", "'speed' is not an option of store 'tiered:"),
        ("tiered:?fast=memory%3A&slow=memory%3A&fill_bytes=all", "fill_bytes is 'all'"),
    ],
)
def test_a_bad_url_says_what_would_be_right(url: str, complaint: str) -> None:
    """Which option, of which wrapper or store, is wrong."""
    with pytest.raises(ConfigError, match=complaint):
        open_store(url)


def test_an_option_that_nothing_takes_is_refused() -> None:
    """Also when it comes with the call."""
    opened: Callable[..., object] = open_store
    with pytest.raises(ConfigError, match="'speed' is not an option"):
        opened(tiered("memory:", "memory:"), speed=1)
