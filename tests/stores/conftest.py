"""The store that most tests of FileStore use."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from hicache_async.stores import FileStore


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileStore]:
    """A FileStore with two lanes in a directory that does not exist yet."""
    store = FileStore(tmp_path / "kv", num_lanes=2)
    yield store
    await store.aclose()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user can reach, as pytest's own are not."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)
