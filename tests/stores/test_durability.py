"""What is synced, and in which order: so much of a write survives a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hicache_async.errors import StoreUnavailable
from hicache_async.stores import FileStore
from hicache_async.stores._files.options import Durability
from tests.stores.pages import files_below, read, write

KEYS = [f"key{number}" for number in range(60)]


class Disk:
    """Note what is written, synced and named, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        for name in ("fdatasync", "fsync"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))
        rename = os.rename

        def noted_rename(source: str, target: str) -> None:
            if target.endswith(".kv"):
                self.calls.append(("name", target))
            rename(source, target)

        monkeypatch.setattr(os, "rename", noted_rename)

    def _noting(self, name: str, call: object) -> object:
        def noted(fd: int) -> None:
            self.calls.append((name, os.readlink(f"/proc/self/fd/{fd}")))
            call(fd)  # type: ignore[operator]

        return noted

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.calls]

    def paths(self, kind: str) -> list[str]:
        return [path for each, path in self.calls if each == kind]


async def store_with_directories(root: Path, durability: Durability) -> FileStore:
    """Return a store whose directories are there."""
    store = FileStore(root, durability=durability, num_lanes=1)
    assert await write(store, *KEYS) == len(KEYS)
    assert await store.delete(KEYS) == len(KEYS)
    return store


@pytest.mark.asyncio
async def test_without_durability_nothing_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is synced unless it was asked for."""
    disk = Disk(monkeypatch)
    store = FileStore(tmp_path)
    await write(store, *KEYS)
    assert set(disk.kinds) == {"name"}
    await store.aclose()


@pytest.mark.asyncio
async def test_each_object_is_durable_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "each" the data is synced, then named, then the directory synced, object by object."""
    store = await store_with_directories(tmp_path, "each")
    disk = Disk(monkeypatch)
    assert await write(store, *KEYS) == len(KEYS)
    assert disk.kinds == ["fdatasync", "name", "fsync"] * len(KEYS)
    assert [os.path.dirname(path) for path in disk.paths("name")] == disk.paths("fsync")
    await store.aclose()


@pytest.mark.asyncio
async def test_a_batch_is_synced_then_named_then_its_directories_synced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "batch" no name is given before all data is on the medium, and no directory is synced twice."""
    store = await store_with_directories(tmp_path, "batch")
    disk = Disk(monkeypatch)
    assert await write(store, *KEYS) == len(KEYS)
    directories = {os.path.dirname(path) for path in disk.paths("name")}
    num = len(KEYS)
    assert disk.kinds == ["fdatasync"] * num + ["name"] * num + ["fsync"] * len(directories)
    assert len(directories) < num
    assert set(disk.paths("fsync")) == directories
    await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("durability", ["batch", "each"])
async def test_directories_that_are_made_are_durable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    """The directory in which another was made is synced, up to the root's own."""
    disk = Disk(monkeypatch)
    store = FileStore(tmp_path / "kv", durability=durability)
    await write(store, "a")
    made = [path for path in (tmp_path / "kv").rglob("*") if path.is_dir()]
    assert {str(path.parent) for path in [tmp_path / "kv", *made]} <= set(disk.paths("fsync"))
    await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("durability", ["batch", "each"])
async def test_what_cannot_be_synced_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    """Where the medium fails the write counts no object that it has not taken, and leaves no file behind."""
    store = await store_with_directories(tmp_path, durability)
    fdatasync, calls = os.fdatasync, iter(range(100))

    def failing(fd: int) -> None:
        if next(calls) == 7:
            raise OSError(5, "Input/output error")
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", failing)
    if durability == "each":
        assert await write(store, *KEYS) == 7
    else:
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            await write(store, *KEYS)
    assert files_below(tmp_path, "temp") == []
    assert len(files_below(tmp_path, "objects")) == (7 if durability == "each" else 0)
    assert await write(store, *KEYS) == len(KEYS)
    assert await read(store, *KEYS) == len(KEYS)
    await store.aclose()


@pytest.mark.asyncio
async def test_a_batch_ends_before_the_page_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one page cannot be written those before it are published, durable and counted."""
    store = await store_with_directories(tmp_path, "batch")
    writev, calls = os.writev, iter(range(100))

    def failing(fd: int, buffers: list[memoryview]) -> int:
        if next(calls) == 7:
            raise OSError(28, "No space left on device")
        return writev(fd, buffers)

    monkeypatch.setattr(os, "writev", failing)
    disk = Disk(monkeypatch)
    assert await write(store, *KEYS) == 7
    assert disk.kinds.count("fdatasync") == disk.kinds.count("name") == 7
    assert files_below(tmp_path, "temp") == []
    assert await read(store, *KEYS) == 7
    await store.aclose()


@pytest.mark.asyncio
async def test_a_large_batch_holds_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many objects are published at once, their files are not open at once."""
    store = FileStore(tmp_path, durability="batch", num_lanes=1)
    fdatasync, open_files = os.fdatasync, set()

    def counted(fd: int) -> None:
        open_files.add(len(os.listdir("/proc/self/fd")))
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", counted)
    keys = [f"key{number}" for number in range(200)]
    assert await write(store, *keys, nbytes=1) == 200
    assert len(open_files) == 1
    await store.aclose()
