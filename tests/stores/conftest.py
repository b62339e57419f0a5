"""The store that most tests of FileStore use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from hicache_async.stores import FileStore


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileStore]:
    """A FileStore with two lanes in a directory that does not exist yet."""
    store = FileStore(tmp_path / "kv", num_lanes=2)
    yield store
    await store.aclose()
