"""A URL's scheme chooses the store, its query and the call give the options."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Self

import pytest

from hicache_async.errors import ConfigError
from hicache_async.stores import FileStore, MemoryStore, NullStore, open_store, register_store, registry
from hicache_async.stores.registry import Registry


class KeptStore(NullStore):
    """A store that remembers how it was opened."""

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        """Keep the arguments."""
        store = cls()
        store.opened_with = (url, options)  # type: ignore[attr-defined]
        return store


NOT_A_STORE = 1
KEPT = f"{__name__}:KeptStore"


def test_built_in_schemes(tmp_path: Path) -> None:
    """null, memory and file open without being registered."""
    assert type(open_store("null:")) is NullStore
    assert type(open_store("memory:")) is MemoryStore
    store = open_store(f"file://{tmp_path}/kv%20data")
    assert type(store) is FileStore
    assert store.root == f"{tmp_path}/kv data"


def test_a_registered_class_gets_url_and_options() -> None:
    """A registered class is imported when first opened and sees the whole URL and the options."""
    own = Registry({})
    own.register("kept", KEPT)
    own.register("kept", KEPT)
    store = own.open("kept://host/path?x=1", size=2)
    assert store.opened_with == ("kept://host/path?x=1", {"size": 2})  # type: ignore[attr-defined]


def test_register_store_serves_open_store() -> None:
    """What register_store declares, open_store opens."""
    register_store("kept-for-test", KEPT)
    assert type(open_store("kept-for-test:")).__name__ == "KeptStore"


def test_an_entry_point_opens_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's entry point of the group is found by scheme, behind what was registered."""
    points = EntryPoints([EntryPoint("plugged", KEPT, registry.ENTRY_POINT_GROUP)])
    monkeypatch.setattr(registry, "entry_points", lambda **query: points.select(**query))
    assert type(Registry({}).open("plugged:")).__name__ == "KeptStore"
    with pytest.raises(ConfigError, match="must be one of: mine, plugged"):
        Registry({"mine": KEPT}).open("other:")


@pytest.mark.parametrize("url", ["", "file", "nowhere:///x", "/data/kv"])
def test_an_unknown_scheme_names_the_known_ones(url: str) -> None:
    """A URL that nothing opens is refused with the schemes that would do."""
    with pytest.raises(
        ConfigError, match="its scheme must be one of: .*file,.*memory,.*mmap,.*null,.*shm,.*tiered"
    ):
        open_store(url)


@pytest.mark.parametrize("scheme", ["", "File", "1x", "a b", "a:"])
def test_a_bad_scheme_is_refused(scheme: str) -> None:
    """A scheme must be one that a URL can have, in lower case."""
    with pytest.raises(ConfigError, match="scheme is"):
        Registry({}).register(scheme, KEPT)


@pytest.mark.parametrize("target", ["", "module", "module:", ":Class", "mod ule:Class", "a:b:c"])
def test_a_bad_target_is_refused(target: str) -> None:
    """A target must read module:Class."""
    with pytest.raises(ConfigError, match="must be 'module:Class'"):
        Registry({}).register("x", target)


def test_a_taken_scheme_is_refused() -> None:
    """Two classes cannot have one scheme, a built-in one included."""
    with pytest.raises(ConfigError, match="'file' is taken by hicache_async"):
        register_store("file", KEPT)


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("no_such_module_here:Store", "cannot be imported"),
        ("hicache_async.stores:NoSuchStore", "has no NoSuchStore"),
        (f"{__name__}:NOT_A_STORE", "must be a class with a classmethod from_url"),
        ("pathlib:Path", "must be a class with a classmethod from_url"),
    ],
)
def test_a_target_that_is_no_store_is_refused(target: str, complaint: str) -> None:
    """Opening says what is wrong with the class that was registered."""
    with pytest.raises(ConfigError, match=complaint):
        Registry({"x": target}).open("x:")


def test_file_options_come_from_query_and_call(tmp_path: Path) -> None:
    """Options of the call win over those of the query; both reach the store."""
    store = open_store(f"file://{tmp_path}?existence_ttl_s=2&num_lanes=3", num_lanes=1)
    assert isinstance(store, FileStore)
    assert store._num_lanes == 1
    assert store._existence._half_ttl_s == 1.0


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("file:///x?exists_ttl=2", "'exists_ttl' is not an option.*existence_ttl_s, .*num_lanes"),
        ("file:///x?num_lanes=two", "num_lanes is 'two'.*give an integer"),
        ("file:///x?existence_ttl_s=", "existence_ttl_s is ''.*give a number"),
        ("file:///x?existence_ttl_s=-3", "existence_ttl_s is -3.0"),
        ("file:///x?num_lanes=0", "num_lanes is 0"),
        ("file:///x?threads=4", "'threads' cannot stand in the store URL"),
        ("file://data/kv", "names a host, 'data'; write file:///absolute/path"),
        ("file:data/kv", "relative path 'data/kv'"),
    ],
)
def test_a_bad_file_url_says_what_would_be_right(url: str, complaint: str) -> None:
    """Every mistake in a file URL is refused by name, value and remedy."""
    with pytest.raises(ConfigError, match=complaint):
        open_store(url)
