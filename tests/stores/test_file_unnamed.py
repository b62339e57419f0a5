"""Files without names: nothing of an unfinished object is ever in the directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from hicache_async.stores import FileStore
from tests.stores.pages import files_below, num_open_files, read, write


@pytest.mark.asyncio
@pytest.mark.parametrize("durability", ["none", "each"])
async def test_an_object_under_construction_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """While a page is written there is no file of it; then there is the object, and no descriptor is left."""
    store = FileStore(tmp_path, unnamed_temp=True, durability=durability)  # type: ignore[arg-type]
    await write(store, "first")
    num_files, seen = num_open_files(), []
    writev = os.writev

    def looking(fd: int, buffers: list[memoryview]) -> int:
        seen.append((files_below(tmp_path, "temp"), len(files_below(tmp_path, "objects"))))
        return writev(fd, buffers)

    monkeypatch.setattr(os, "writev", looking)
    assert await write(store, "a", "b") == 2
    assert seen == [([], 1), ([], 2)]
    assert await read(store, "a", "b", "first") == 3
    assert num_open_files() == num_files
    await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("max_bytes", [None, 1 << 20])
async def test_an_object_that_somebody_else_has_stored_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int | None
) -> None:
    """Where the name is taken when the object is done it is stored all the same, and counted once."""
    store, other = (FileStore(tmp_path, unnamed_temp=True, max_bytes=max_bytes) for _ in range(2))
    await write(store, "warm")
    await write(other, "warm")
    writev = os.writev

    def overtaken(fd: int, buffers: list[memoryview]) -> int:
        monkeypatch.setattr(os, "writev", writev)
        assert other._directory.write("a", buffers[1]) is None
        return writev(fd, buffers)

    monkeypatch.setattr(os, "writev", overtaken)
    assert await write(store, "a") == 1
    assert await read(store, "a") == 1
    assert len(files_below(tmp_path, "objects")) == 2
    quota = store._directory._writing().quota
    if quota is not None:
        quota.reserve(0)  # tells the ledger what was committed
        quota = other._directory._writing().quota
        assert quota is not None
        quota.reserve(0)
        assert quota.usage() == (2 * 8192, 0)
    await store.aclose()
    await other.aclose()


@pytest.mark.asyncio
async def test_a_file_system_that_cannot_is_written_with_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files cannot be unnamed one line says so, and everything is stored."""
    open_file = os.open

    def refusing(path: str, flags: int, mode: int = 0o777, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return open_file(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", refusing)
    with capture_logs() as logs:
        store = FileStore(tmp_path, unnamed_temp=True)
        for number in range(3):
            assert await write(store, f"a{number}", f"b{number}") == 2
    assert [line["event"] for line in logs] == ["store.unnamed_temp_refused"]
    assert await read(store, "a0", "b0", "a2") == 3
    assert files_below(tmp_path, "temp") == []
    await store.aclose()


@pytest.mark.asyncio
async def test_a_page_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that cannot be written or linked leaves no file and no descriptor."""
    store = FileStore(tmp_path, unnamed_temp=True)
    await write(store, "first")
    num_files = num_open_files()
    link, writev = os.link, os.writev

    def failing(*args: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("writev", "link"):
        monkeypatch.setattr(os, name, failing)
        assert await write(store, "first", "a") == 1
        monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(os, "link", link)
    assert num_open_files() == num_files
    assert len(files_below(tmp_path, "objects")) == 1
    await store.aclose()
