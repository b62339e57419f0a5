"""A small store of one's own, as an example of what one examines with hicache_async.testing.StoreSuite.

Each object is a file, named by the hash of its key; it begins with a checksum of key and page. All of it is done on
the event loop, page by page, which suits small pages on a fast disk: a store that blocks for longer needs a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from hicache_async import StopToken, StoreUnavailable

CHECKSUM_NBYTES = 32


class FolderStore:
    """Keep objects as files of one folder, found again after a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._is_closed = False

    def path(self, key: str) -> Path:
        """Return the file of an object. Any key will do: none leads out of the folder, no two have one name."""
        return self._folder / hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys exist, consecutive from the first."""
        self._check_open()
        return sum(1 for _ in itertools.takewhile(lambda key: self.path(key).is_file(), keys))

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Fill whole pages, consecutive from the first, and return how many; a damaged one is removed."""
        for count, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            await asyncio.sleep(0)  # others have their turn
            self._check_open()
            page = self._load(key)
            if stop.stopped or page is None or len(page) != buffer.nbytes:
                return count
            buffer[:] = page
        return len(keys)

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Store pages, consecutive from the first, and return how many; each is seen whole or not at all."""
        for key, page in zip(keys, pages, strict=True):
            await asyncio.sleep(0)
            self._check_open()
            if not self.path(key).is_file():
                self._publish(key, page)
        return len(keys)

    async def aclose(self) -> None:
        """Answer nothing any more."""
        self._is_closed = True

    def _load(self, key: str) -> bytes | None:
        path = self.path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        page = content[CHECKSUM_NBYTES:]
        if content[:CHECKSUM_NBYTES] == _checksum(key, page):
            return page
        path.unlink(missing_ok=True)
        return None

    def _publish(self, key: str, page: memoryview) -> None:
        temp = self._folder / f"{os.getpid()}-{id(self)}-{next(self._numbers)}.tmp"
        try:
            temp.write_bytes(_checksum(key, page) + page)
            temp.rename(self.path(key))
        except OSError as error:
            temp.unlink(missing_ok=True)
            raise StoreUnavailable(f"{self._folder} cannot be written: {error}") from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"the store in {self._folder} was closed")


def _checksum(key: str, page: bytes | memoryview) -> bytes:
    checksum = hashlib.sha256(key.encode("utf-8", "surrogatepass") + b"\0")
    checksum.update(page)
    return checksum.digest()
