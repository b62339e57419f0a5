"""The private directory: nobody else's, or not used."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from hicache_async.errors import StoreUnavailable
from hicache_async.stores import FileStore
from tests.stores.pages import read, write


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.asyncio
async def test_without_a_root_the_directory_is_private(temporary: Path) -> None:
    """FileStore() uses a directory of this user only, and says so once."""
    with capture_logs() as logs:
        store = FileStore()
        await write(store, "a")
        await read(store, "a")
    assert Path(store.root).parent == temporary
    assert stat.S_IMODE(os.stat(store.root).st_mode) == 0o700
    assert [(line["event"], line["root"]) for line in logs] == [("store.private_directory", store.root)]
    again = FileStore()
    assert await read(again, "a") == 1
    await store.aclose()
    await again.aclose()


def leave_open(root: Path) -> None:
    root.mkdir(mode=0o755)


def leave_link(root: Path) -> None:
    target = root.with_name("elsewhere")
    target.mkdir(mode=0o700)
    root.symlink_to(target)


def leave_file(root: Path) -> None:
    root.write_bytes(b"")
    root.chmod(0o600)


@pytest.mark.asyncio
@pytest.mark.parametrize("leave", [leave_open, leave_link, leave_file])
async def test_a_private_directory_that_others_made_is_not_used(
    temporary: Path, leave: Callable[[Path], None]
) -> None:
    """A directory that others can enter, a link or a file in its place is neither read nor written."""
    with capture_logs() as logs:
        store = FileStore()
        leave(Path(store.root))
        assert await store.count_prefix(["a"]) == 0
        assert await read(store, "a") == 0
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="must be a directory of user"):
                await write(store, "a")
    assert [line["event"] for line in logs] == ["store.private_directory", "store.unwritable"]
    assert store.stats == {"unreadable": 1}
    assert [path for path in temporary.rglob("*") if path.is_file() and path != Path(store.root)] == []
    await store.aclose()
