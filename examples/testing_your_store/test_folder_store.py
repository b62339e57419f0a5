"""The whole exam of the store: some seventy tests, each of one property."""

from __future__ import annotations

from pathlib import Path

from folder_store import FolderStore

from hicache_async.testing import Damage, StoreSuite, damage_file


class TestFolderStore(StoreSuite):
    """What the exam has to know: how to open the store, what it can do, and how to get at its bytes."""

    persists = shared = True

    async def open(self, directory: Path) -> FolderStore:
        return FolderStore(directory)

    def damage(self, directory: Path, key: str, how: Damage, other: str) -> bool:
        store = FolderStore(directory)
        return damage_file(store.path(key), how, store.path(other))
