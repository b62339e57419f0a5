"""Every store of the library passes the store exam."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache_async.abc import Store
from hicache_async.stores import (
    AesGcm,
    CodecStore,
    FileStore,
    Fp8,
    GuardedStore,
    MemoryStore,
    NullStore,
    TieredStore,
    Zstd,
)
from hicache_async.stores._slots.store import SlotStore
from hicache_async.stores.mmap import MmapStore
from hicache_async.stores.shm import ShmStore
from hicache_async.testing import Damage, StoreSuite, damage_file
from hicache_async.testing._store_suite.candidate import damaged_bytes
from hicache_async.testing._store_suite.pages import page_of

KEY_ENV = "HICACHE_TEST_KEY"


class TestNull(StoreSuite):
    """No store."""

    keeps = False

    async def open(self, directory: Path) -> Store:
        return NullStore()


@pytest.mark.every_loop
class TestMemory(StoreSuite):
    """A dict of this process."""

    async def open(self, directory: Path) -> Store:
        return MemoryStore()

    async def open_bounded(self, directory: Path, max_bytes: int) -> Store:
        return MemoryStore(max_bytes)


class TestFile(StoreSuite):
    """A file for each object."""

    persists = shared = processes = True

    async def open(self, directory: Path) -> Store:
        return FileStore(directory)

    async def open_bounded(self, directory: Path, max_bytes: int) -> Store:
        return FileStore(directory, max_bytes=max_bytes)

    def damage(self, directory: Path, key: str, how: Damage, other: str) -> bool:
        path, other_path = (next(directory.rglob(f"{name}.kv")) for name in (key, other))
        return damage_file(path, how, other_path)


@pytest.mark.stress
@pytest.mark.every_loop
class TestFileAgainAndAgain(TestFile):
    """The long form."""

    rounds = 20
    patience_s = 120.0


class TestGuard(TestFile):
    """A guard around it."""

    processes = False  # it asks no more of them than what is in it

    async def open(self, directory: Path) -> Store:
        return GuardedStore(FileStore(directory))

    async def open_bounded(self, directory: Path, max_bytes: int) -> Store:
        return GuardedStore(FileStore(directory, max_bytes=max_bytes))


class Slotted(StoreSuite):
    """What the stores of fixed slots have in common."""

    persists = shared = processes = True
    object_nbytes: Sequence[int] = (4096, 16384)
    batch_nbytes = 16 << 20

    def damage(self, directory: Path, key: str, how: Damage, other: str) -> bool:
        if how in (Damage.CUT, Damage.EXTEND, Damage.EMPTY, Damage.DIRECTORY):
            return False  # an object is no file of its own
        path = directory / "hicache-kv"
        content = bytearray(path.read_bytes())
        mine, theirs = (payload_in(content, name, self.object_nbytes) for name in (key, other))
        if how is Damage.SWAP:
            content[mine], content[theirs] = content[theirs], content[mine]
        else:
            content[mine] = damaged_bytes(bytes(content[mine]), how)
        with path.open("r+b") as file:
            file.write(content)
        return True


def payload_in(content: bytearray, key: str, sizes: Sequence[int]) -> slice:
    """Return where the page of ``key`` is in the file of a segment."""
    for nbytes in sizes:
        at = content.find(page_of(key, nbytes))
        if at >= 0:
            return slice(at, at + nbytes)
    raise LookupError(f"no page of {key} is there")


class TestMmap(Slotted):
    """Slots of one file."""

    async def open(self, directory: Path) -> Store:
        return slots_of(MmapStore, directory, 32 << 20)

    async def open_bounded(self, directory: Path, max_bytes: int) -> Store:
        return slots_of(MmapStore, directory, max_bytes)


class TestShm(Slotted):
    """Slots of a segment of shared memory."""

    async def open(self, directory: Path) -> Store:
        return slots_of(ShmStore, directory, 32 << 20)

    async def open_bounded(self, directory: Path, max_bytes: int) -> Store:
        return slots_of(ShmStore, directory, max_bytes)


def slots_of(kind: type[SlotStore], directory: Path, max_bytes: int) -> SlotStore:
    """Open the segment of a directory."""
    if kind is ShmStore:
        return ShmStore("kv", directory=directory, max_bytes=max_bytes, slot_bytes=16384)
    return MmapStore(directory / "hicache-kv", max_bytes=max_bytes, slot_bytes=16384)


class TestTiered(StoreSuite):
    """A file store before a file store."""

    persists = shared = processes = True

    async def open(self, directory: Path) -> Store:
        return TieredStore(FileStore(directory / "fast"), FileStore(directory / "slow"))


class TestTieredMemory(StoreSuite):
    """Memory before memory."""

    async def open(self, directory: Path) -> Store:
        return TieredStore(MemoryStore(1 << 20), MemoryStore())


class TestZstd(TestFile):
    """Compressed."""

    async def open(self, directory: Path) -> Store:
        return CodecStore(FileStore(directory), Zstd())

    async def open_bounded(self, directory: Path, max_bytes: int) -> Store:
        return CodecStore(FileStore(directory, max_bytes=max_bytes), Zstd())


class TestFp8(TestFile):
    """Quantised."""

    lossy = True
    processes = False  # each would load torch

    async def open(self, directory: Path) -> Store:
        return CodecStore(FileStore(directory), Fp8("bfloat16"))

    open_bounded = StoreSuite.open_bounded  # the limit of the files is none in bytes of pages


class TestAesGcm(TestFile):
    """Encrypted."""

    @pytest.fixture(autouse=True)
    def key_in_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give it a key, and the processes that it starts."""
        monkeypatch.setenv(KEY_ENV, os.urandom(32).hex())

    async def open(self, directory: Path) -> Store:
        return CodecStore(FileStore(directory), AesGcm(KEY_ENV))

    async def open_bounded(self, directory: Path, max_bytes: int) -> Store:
        return CodecStore(FileStore(directory, max_bytes=max_bytes), AesGcm(KEY_ENV))
