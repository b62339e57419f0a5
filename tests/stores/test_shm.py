"""ShmStore by name and URL: where its segment lies, and how it is removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_async.errors import ConfigError
from hicache_async.stores.shm import ShmStore
from tests.stores.pages import read, write
from tests.stores.slot_programs import MAX_BYTES


@pytest.fixture
def name() -> Iterator[str]:
    """A segment of this test's own, in the machine's shared memory."""
    name = f"test-{os.getpid()}"
    yield name
    ShmStore.unlink(name)


@pytest.mark.asyncio
async def test_a_segment_outlives_its_stores_until_it_is_unlinked(name: str) -> None:
    """It lies in shared memory under a name that tells whose it is, and is there until it is removed."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("this machine has no /dev/shm")
    store = ShmStore.from_url(f"shm:{name}?max_bytes=1MiB&slot_bytes=8KiB&num_lanes=1")
    assert store.path == f"/dev/shm/hicache-{name}"
    assert await write(store, "a", "b") == 2
    await store.aclose()
    later = ShmStore(name)
    assert await read(later, "a", "b") == 2
    await later.aclose()
    assert ShmStore.unlink(name)
    assert not ShmStore.unlink(name)
    assert not os.path.exists(store.path)
    with pytest.raises(ConfigError, match="does not exist"):
        ShmStore(name)


def test_only_a_segment_is_unlinked(tmp_path: Path) -> None:
    """Something else of that name stays."""
    foreign = tmp_path / "hicache-kv"
    foreign.write_bytes(b"something of mine")
    with pytest.raises(ConfigError, match="is something else, not a segment; remove it yourself"):
        ShmStore.unlink("kv", directory=tmp_path)
    assert foreign.exists()


@pytest.mark.parametrize("name", ["", "/kv", "../kv", "a/b", ".hidden", "a b", "ä", "x" * 201])
def test_names_that_could_leave_the_directory(name: str, tmp_path: Path) -> None:
    """A name is letters, digits and a few signs; any other is refused, to open and to unlink."""
    with pytest.raises(ConfigError, match="it must match"):
        ShmStore(name, max_bytes=MAX_BYTES, slot_bytes=4096, directory=tmp_path)
    with pytest.raises(ConfigError, match="it must match"):
        ShmStore.unlink(name, directory=tmp_path)


@pytest.mark.asyncio
async def test_options_in_the_url(tmp_path: Path) -> None:
    """All but threads can be said in the URL, with units; those of the call win."""
    url = f"shm:kv?max_bytes=1MB&slot_bytes=4KiB&directory={tmp_path}&mode=660&num_lanes=3"
    store = ShmStore.from_url(url, slot_bytes=8192)
    await write(store, "a", nbytes=8192)
    found = os.stat(tmp_path / "hicache-kv")
    assert found.st_mode & 0o777 == 0o660
    assert 990_000 < found.st_size <= 1_000_000
    await store.aclose()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("shm:kv?max_bytes=lots", "max_bytes is 'lots'"),
        ("shm:kv?mode=999", "mode is '999'"),
        ("shm:kv?size=1", "'size' is not an option"),
        ("shm:kv?threads=1", "'threads' cannot stand in the store URL"),
        ("shm://host/kv", "names a host"),
        ("shm:?max_bytes=1MB", "name is ''"),
    ],
)
def test_urls_that_cannot_work(url: str, message: str) -> None:
    """A wrong URL says what is wrong with it."""
    with pytest.raises(ConfigError, match=message):
        ShmStore.from_url(url)
