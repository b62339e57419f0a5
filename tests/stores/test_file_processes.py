"""FileStore among processes and on disks that fail: races, dead writers, full and forbidden directories."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from hicache_async.errors import StoreUnavailable
from hicache_async.stores import FileStore
from hicache_async.stores._files.quota import Quota
from tests.stores.pages import files_below, read, write
from tests.stores.programs import finish, start

RACE = """
async def main():
    store = FileStore(root, num_lanes=2, **options)
    print("ready", flush=True)
    sys.stdin.readline()
    for turn in range(number):
        keys = [f"{turn}-{page}" for page in range(4)]
        assert await asyncio.gather(write(store, *keys), write(store, *keys[1:])) == [4, 3]
        assert await read(store, *keys) == 4
    assert not store.stats, store.stats
    await store.aclose()

asyncio.run(main())
"""


def race(root: Path, rounds: int, **options: object) -> None:
    racers = [start(RACE, root, rounds, **options) for _ in range(2)]
    for racer in racers:
        assert racer.stdout
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        finish(racer)
    assert len(files_below(root, "objects")) == 4 * rounds
    assert files_below(root, "temp") == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"unnamed_temp": True},
        {"max_bytes": 1 << 30},
        {"max_bytes": 1 << 30, "unnamed_temp": True},
        {"durability": "batch"},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_two_processes_write_the_same_keys(tmp_path: Path, options: dict[str, Any]) -> None:
    """Racing on each key no write fails, each reads whole pages at once, and no other file is left."""
    race(tmp_path, 30, **options)
    if "max_bytes" in options:
        quota = Quota(f"{tmp_path}/v2", max_bytes=1 << 30)
        assert quota.usage().reserved == 0
        quota.trim()
        assert quota.usage().committed == 120 * 8192


@pytest.mark.stress
def test_two_processes_write_the_same_keys_for_long(tmp_path: Path) -> None:
    """Racing on each of many keys no write fails, each reads whole pages, and no other file is left."""
    race(tmp_path, 1000)


WRITER = """
import itertools

async def main():
    store = FileStore(root, num_lanes=2)
    for turn in itertools.count(number):
        await write(store, *(f"{turn}-{page}" for page in range(8)), nbytes=200_000)
        print(turn, flush=True)

asyncio.run(main())
"""


async def kill_and_reopen(root: Path, rounds: int) -> None:
    dice = random.Random(11)
    for number in range(rounds):
        with start(WRITER, root, 1000 * number) as writer:
            assert writer.stdout
            for _ in range(dice.randrange(1, 4)):
                assert writer.stdout.readline()
            for _ in range(dice.randrange(3000)):
                pass  # somewhere in the next write
            writer.kill()
            writer.communicate()
        num_torn = len(files_below(root, "temp"))
        with capture_logs() as logs:
            store = FileStore(root, existence_ttl_s=0)
            keys = await store.list_keys()
            for key in keys:
                assert await read(store, key, nbytes=200_000) == 1
        assert len(keys) >= 8
        assert not store.stats
        assert files_below(root, "temp") == []
        assert [line["event"] for line in logs] == ["store.temp_swept"] * (num_torn > 0)
        await store.aclose()


@pytest.mark.asyncio
async def test_a_killed_writer_leaves_whole_objects(tmp_path: Path) -> None:
    """After SIGKILL at any moment every object that is there is whole, and no file of the dead is left."""
    await kill_and_reopen(tmp_path, 4)


@pytest.mark.asyncio
@pytest.mark.stress
async def test_many_killed_writers_leave_whole_objects(tmp_path: Path) -> None:
    """After many SIGKILLs every object that is there is whole, and no file of the dead is left."""
    await kill_and_reopen(tmp_path, 40)


# -- another user's directory


READER = """
async def main():
    store = FileStore(root, existence_ttl_s=0)
    if os.geteuid() == 0:
        os.setuid(65534)
    with capture_logs() as logs:
        assert await read(store, "a", "b", "new") == 2
        assert await store.count_prefix(["a", "b", "sealed"]) == 2
        assert await read(store, "a", "sealed") == 1
        for _ in range(3):
            assert await write(store, "a", "b") == 2
            assert await write(store, "a", "new") == 1
            try:
                await write(store, *(f"new{page}" for page in range(100)))
            except StoreUnavailable as error:
                assert root in str(error) and "Permission denied" in str(error), error
            else:
                raise AssertionError("a forbidden directory was written")
        assert await read(store, "a", "b") == 2
    assert store.stats == {"missing": 1, "unreadable": 1}, store.stats
    assert [line["event"] for line in logs] == ["store.unwritable"], logs
    assert files_below(root, "temp") == []
    await store.aclose()

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_a_directory_of_another_user_is_read_and_not_written(shared: Path) -> None:
    """Without write permission reads and lookups go on, writes fail, one line is logged, nothing is left."""
    store = FileStore(shared, mode=0o644)
    await write(store, "a", "b", "sealed")
    (sealed,) = (path for path in files_below(shared, "objects") if path.name == "sealed.kv")
    sealed.chmod(0)
    directories = [shared, *(path for path in shared.rglob("*") if path.is_dir())]
    for directory in directories:
        directory.chmod(0o555)
    finish(start(READER, shared))
    for directory in directories:
        directory.chmod(0o755)
    await store.aclose()


# -- disks that refuse


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a full disk needs a small tmpfs, and mounting one is not permitted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.asyncio
async def test_a_full_disk_ends_a_write_and_nothing_else(small_disk: Path) -> None:
    """With no space left writes end early or raise, one line is logged, no torn file is left, reads go on."""
    store = FileStore(small_disk / "kv", num_lanes=2)
    keys = [f"key{number}" for number in range(20)]
    with capture_logs() as logs:
        count = await write(store, *keys, nbytes=65536)
        assert 0 < count < 8
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="No space left"):
                await write(store, "new", nbytes=65536)
    assert [line["event"] for line in logs] == ["store.unwritable"]
    assert files_below(store.root, "temp") == []
    assert await read(store, *keys, nbytes=65536) == count
    assert await write(store, *keys[:count], nbytes=65536) == count
    assert await store.delete(keys[:2]) == 2
    assert await write(store, "new", nbytes=65536) == 1
    assert await read(store, "new", nbytes=65536) == 1
    await store.aclose()


LIMITED = """
import resource

async def main():
    store = FileStore(root)
    assert await write(store, "small", nbytes=50_000) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with capture_logs() as logs:
        for _ in range(2):
            try:
                await write(store, "large", nbytes=200_000)
            except StoreUnavailable as error:
                assert "File too large" in str(error), error
            else:
                raise AssertionError("a file grew beyond its limit")
    assert [line["event"] for line in logs] == ["store.unwritable"], logs
    assert files_below(root, "temp") == []
    assert await store.count_prefix(["large"]) == 0
    assert await read(store, "small", nbytes=50_000) == 1
    await store.aclose()

asyncio.run(main())
"""


def test_a_file_that_cannot_grow_leaves_nothing(tmp_path: Path) -> None:
    """A write that fails half-way through a page publishes nothing and leaves no temporary file."""
    finish(start(LIMITED, tmp_path))


@pytest.mark.asyncio
async def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    """Where the root is a file, opening works, reads are misses and writes raise, logged once."""
    root = tmp_path / "file"
    root.write_bytes(b"not a directory")
    with capture_logs() as logs:
        store = FileStore(root)
        assert await store.count_prefix(["a"]) == 0
        assert await read(store, "a") == 0
        assert await store.list_keys() == []
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="cannot be written"):
                await write(store, "a", "b")
    assert [line["event"] for line in logs] == ["store.unwritable"]
    assert root.read_bytes() == b"not a directory"
    await store.aclose()


@pytest.mark.asyncio
async def test_a_directory_removed_under_the_store_is_made_again(store: FileStore) -> None:
    """After somebody removed everything reads are misses and the next write starts anew."""
    await write(store, "a", "b")
    shutil.rmtree(store.root)
    assert await read(store, "a") == 0
    assert await write(store, "a", "b") == 2
    assert await read(store, "a", "b") == 2


@pytest.mark.asyncio
async def test_a_write_counts_up_to_the_page_that_fails(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk error at one page leaves the pages before it counted and stored."""
    rename = os.rename

    def failing_rename(source: str, target: str) -> None:
        if "key3" in target:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing_rename)
    keys = [f"key{number}" for number in range(6)]
    assert await write(store, *keys) == 3
    assert await read(store, *keys) == 3
    assert files_below(store.root, "temp") == []
