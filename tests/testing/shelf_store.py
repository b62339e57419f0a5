"""A plain store that passes the whole exam: a file for each object, everything done on the loop, page by page."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from hicache_async.core.keys import namespace_of
from hicache_async.errors import StoreUnavailable
from hicache_async.testing import Damage, damage_file
from hicache_async.types import ObjectStat, StopToken

_SHA_NBYTES = 32


class ShelfStore:
    """Keep objects as files of a directory: a checksum of all the rest, the key's length, the key, the payload.

    Args:
        max_bytes: of payload and all; the least recently used go first. None: no limit.
    """

    def __init__(self, directory: Path, max_bytes: int | None = None) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.stats: Counter[str] = Counter(misses=0)
        self.is_closed = False
        self._numbers = itertools.count()
        self._sweep()

    # The five methods that a broken store overrides

    def name(self, key: str) -> str:
        """Return the file name of an object."""
        return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

    def load(self, key: str) -> bytes | None:
        """Return the payload of an object; None: there is none, or it is damaged, and removed then."""
        path = self.directory / self.name(key)
        try:
            content = path.read_bytes()
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            return None
        raw = key.encode("utf-8", "surrogatepass")
        head = len(raw).to_bytes(4) + raw
        if content[:_SHA_NBYTES] != hashlib.sha256(content[_SHA_NBYTES:]).digest() or not content[
            _SHA_NBYTES:
        ].startswith(head):
            path.unlink(missing_ok=True)
            return None
        return content[_SHA_NBYTES + len(head) :]

    async def publish(self, key: str, payload: bytes) -> None:
        """Make an object visible, whole."""
        temp = self.directory / f"{os.getpid()}-{id(self)}-{next(self._numbers)}.tmp"
        temp.write_bytes(self.encode(key, payload))
        temp.rename(self.directory / self.name(key))

    def encode(self, key: str, payload: bytes) -> bytes:
        """Return the content of the file."""
        raw = key.encode("utf-8", "surrogatepass")
        body = len(raw).to_bytes(4) + raw + payload
        return hashlib.sha256(body).digest() + body

    def touch(self, key: str) -> None:
        """Make an object the most recently used one."""
        with contextlib.suppress(OSError):
            os.utime(self.directory / self.name(key))

    # What a store does

    async def count_prefix(self, keys: Sequence[str]) -> int:
        self._check_open()
        return sum(1 for _ in itertools.takewhile(self.has, keys))

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        self._check_open()
        for count, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            await asyncio.sleep(0)
            self._check_open()
            if stop.stopped:
                return count
            payload = self.load(key)
            if payload is None or len(payload) != buffer.nbytes:
                self.stats["misses"] += 1
                return count
            buffer[:] = payload
            self.touch(key)
        return len(keys)

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        self._check_open()
        for count, (key, page) in enumerate(zip(keys, pages, strict=True)):
            await asyncio.sleep(0)
            self._check_open()
            if self.has(key):
                self.touch(key)
            elif self.make_room(page.nbytes + 4096 + len(key) * 4, keys):
                await self.publish(key, bytes(page))
            else:
                return count
        return len(keys)

    async def delete(self, keys: Sequence[str]) -> int:
        self._check_open()
        return sum([self._unlink(key) for key in keys])

    async def list_keys(self) -> Sequence[str]:
        self._check_open()
        return [self._key_of(path) for path in self._files()]

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        self._check_open()
        return [self._stat(key) for key in keys]

    async def list_namespaces(self) -> Sequence[str]:
        return sorted({namespace_of(key) for key in await self.list_keys()} - {""})

    async def sweep(self) -> Mapping[str, int]:
        self._check_open()
        return {"temp_files": self._sweep()}

    async def aclose(self) -> None:
        self.is_closed = True

    def has(self, key: str) -> bool:
        return (self.directory / self.name(key)).is_file()

    def make_room(self, nbytes: int, own: Sequence[str]) -> bool:
        """Delete what was used longest ago until there is room; never what this very call writes."""
        if self.max_bytes is None:
            return True
        if nbytes > self.max_bytes:
            return False
        spared = {self.name(key) for key in own}
        files = sorted(self._files(), key=lambda path: path.stat().st_mtime_ns)
        held = sum(path.stat().st_size for path in files)
        for path in files:
            if held + nbytes <= self.max_bytes:
                break
            if path.name not in spared:
                held -= path.stat().st_size
                path.unlink()
        return held + nbytes <= self.max_bytes

    def _sweep(self) -> int:
        """Remove what dead processes had under construction."""
        dead = [
            path for path in self.directory.glob("*-*-*.tmp") if not _is_alive(path.name.partition("-")[0])
        ]
        for path in dead:
            path.unlink(missing_ok=True)
        return len(dead)

    def _check_open(self) -> None:
        if self.is_closed:
            raise StoreUnavailable("the shelf was closed")

    def _files(self) -> list[Path]:
        return [path for path in self.directory.iterdir() if path.is_file() and path.suffix != ".tmp"]

    def _key_of(self, path: Path) -> str:
        content = path.read_bytes()[_SHA_NBYTES:]
        return content[4 : 4 + int.from_bytes(content[:4])].decode("utf-8", "surrogatepass")

    def _stat(self, key: str) -> ObjectStat | None:
        if not self.has(key):
            return None
        found = (self.directory / self.name(key)).stat()
        head = _SHA_NBYTES + 4 + len(key.encode("utf-8", "surrogatepass"))
        return ObjectStat(found.st_size - head, found.st_mtime)

    def _unlink(self, key: str) -> bool:
        try:
            (self.directory / self.name(key)).unlink()
        except OSError:
            return False
        return True


def _is_alive(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


def damage_shelf(directory: Path, key: str, how: Damage, other: str) -> bool:
    """Damage the file of an object."""
    shelf = ShelfStore(directory)
    return damage_file(directory / shelf.name(key), how, directory / shelf.name(other))
