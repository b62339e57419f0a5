"""A read-only FileStore leaves no trace, whatever it finds."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_async.errors import StoreUnavailable
from hicache_async.stores import FileStore
from tests.stores.pages import files_below, read, write
from tests.stores.programs import finish, start

NAMESPACED = "0f_ukv1-0123456789abcdef_model"


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of everything below a directory."""
    paths = [root, *root.rglob("*")]
    return {
        str(path): (path.lstat().st_ino, path.lstat().st_size, path.lstat().st_mtime_ns) for path in paths
    }


async def fill(root: Path) -> None:
    """Leave three objects, one of them damaged, and the file of a dead writer."""
    store = FileStore(root)
    assert await write(store, "a", "damaged", NAMESPACED) == 3
    await store.aclose()
    (path,) = (path for path in files_below(root, "objects") if path.name == "damaged.kv")
    os.truncate(path, 5000)
    for path in files_below(root, "objects"):
        os.utime(path, (1, 1))
    Path(root, "v2", "temp", "none.none.1.1.0123abcd.0").touch()
    os.utime(Path(root, "v2", "temp", "none.none.1.1.0123abcd.0"), (1, 1))


async def use(root: Path) -> None:
    """Do everything with a read-only store, and find what is there."""
    store = FileStore(root, read_only=True, existence_ttl_s=0)
    for _ in range(2):
        assert await store.count_prefix(["a", NAMESPACED, "absent"]) == 2
        assert await read(store, "a", NAMESPACED, "damaged") == 2
        assert sorted(await store.list_keys()) == sorted(["a", "damaged", NAMESPACED])
        assert await store.list_namespaces() == ["ukv1-0123456789abcdef"]
        assert [each is None for each in await store.stat(["a", "absent"])] == [False, True]
    for call in (
        write(store, "a"),
        write(store, "new"),
        store.delete(["a"]),
        store.delete([]),
        store.sweep(),
    ):
        with pytest.raises(StoreUnavailable, match="read-only; open it without read_only"):
            await call
    assert store.stats == {"short": 2}
    await store.aclose()


@pytest.mark.asyncio
async def test_reading_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """Nothing is made, touched, removed or swept, and what would is refused; whatever is there is found."""
    await fill(tmp_path)
    before = snapshot(tmp_path)
    await use(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.asyncio
async def test_an_absent_directory_stays_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is nothing there is still nothing, in the private directory too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for root in (tmp_path / "kv", None):
        store = FileStore(root, read_only=True)
        assert await store.count_prefix(["a", NAMESPACED]) == 0
        assert await store.count_prefix([NAMESPACED]) == 0
        assert await read(store, "a") == 0
        if root is not None:
            assert await store.list_keys() == await store.list_namespaces() == []
        assert await store.stat(["a"]) == [None]
        await store.aclose()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that the test makes read-only."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def freeze(disk: Path) -> None:
    """Let nobody write to a file system any more."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


@pytest.mark.asyncio
async def test_a_read_only_file_system_is_read(frozen_disk: Path) -> None:
    """On a file system that is mounted read-only everything that reads works, with and without read_only."""
    await fill(frozen_disk)
    freeze(frozen_disk)
    await use(frozen_disk)
    store = FileStore(frozen_disk)
    assert await read(store, "a", "damaged") == 1
    assert await write(store, "a") == 1
    with pytest.raises(StoreUnavailable, match="Read-only file system"):
        await write(store, "new")
    await store.aclose()


READER = """
async def main():
    os.setgid(number)
    os.setuid(number)
    store = FileStore(root, read_only=True)
    assert await store.count_prefix(["a"]) == 1
    assert await read(store, "a", "damaged") == 1
    assert store.stats == {"short": 1}, store.stats
    await store.aclose()

asyncio.run(main())
"""


@pytest.mark.asyncio
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other users")
async def test_another_users_directory_is_read(shared: Path) -> None:
    """A user who may only read the directory reads it."""
    await fill(shared)
    for path in shared.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    before = snapshot(shared)
    finish(start(READER, shared, 60001))
    assert snapshot(shared) == before
