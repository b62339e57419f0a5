"""MemoryStore: objects in a dict of this process, least recently used out first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Self

from ..core.keys import namespace_of
from ..core.manifest import is_manifest_key
from ..errors import ConfigError, StoreUnavailable
from ..types import ObjectStat, Stop, StopToken
from ._buffers import check_buffers
from ._url import url_options

_TURN_NBYTES = 4 << 20  # copied in one turn of the loop, some 0.4 ms


class MemoryStore:
    """Keep copies of pages in memory, for tests and for one process.

    Everything is done on the loop, in turns of a few MiB; no thread ever holds a buffer.

    Args:
        max_bytes: payload bytes kept at most; None: no bound.
        time: seconds since 1970, for :meth:`stat`.
    """

    def __init__(self, max_bytes: int | None = None, *, time: Callable[[], float] = time.time) -> None:
        if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes < 0):
            raise ConfigError(f"max_bytes is {max_bytes!r}; give an integer >= 0, or None for no bound")
        self._max_bytes = max_bytes
        self._time = time
        self._objects: dict[str, bytes] = {}  # least recently used first
        self._used_s: dict[str, float] = {}
        self._nbytes = 0
        self._closed = False

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        """Open ``memory:`` or ``memory:?max_bytes=1000000``."""
        return cls(**url_options(url, options, {"max_bytes": int, "time": None}))  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Payload bytes kept."""
        return self._nbytes

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys exist, consecutive from ``keys[0]``."""
        self._check_open()
        return sum(1 for _ in takewhile(self._objects.__contains__, keys))

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Copy objects into buffers, in order, and return how many, consecutive from 0.

        An object of another length is a miss. Cancellation: between turns; no buffer is touched after it.
        """
        self._check_open()
        check_buffers(keys, into, writable=True)
        stop.job_started()
        try:
            turn = _Turn()
            for count, (key, buffer) in enumerate(zip(keys, into, strict=True)):
                await turn.spend(buffer.nbytes)
                payload = self._objects.get(key)
                if stop.stopped:
                    return count
                if payload is None or len(payload) != buffer.nbytes:
                    stop.reason = Stop.VANISHED
                    return count
                buffer[:] = payload
                self._touch(key)
            return len(keys)
        finally:
            stop.job_ended()

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Copy pages, in order, and return how many are stored, consecutive from 0.

        A key that is present is touched. A write evicts neither its own pages nor manifests: it ends where
        they no longer fit. Cancellation: between turns; what was stored stays.
        """
        self._check_open()
        check_buffers(keys, pages, writable=False)
        own = frozenset(keys)
        turn = _Turn()
        for count, (key, page) in enumerate(zip(keys, pages, strict=True)):
            await turn.spend(page.nbytes)
            if key in self._objects:
                self._touch(key)
                continue
            if not self._make_room(page.nbytes, own):
                return count
            self._objects[key] = bytes(page)
            self._used_s[key] = self._time()
            self._nbytes += page.nbytes
        return len(keys)

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete the keys that exist; returns how many did."""
        self._check_open()
        return sum(self._remove(key) for key in dict.fromkeys(keys) if key in self._objects)

    async def list_keys(self) -> Sequence[str]:
        """Return the keys of all objects, least recently used first."""
        self._check_open()
        return tuple(self._objects)

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        """Return for each key what is known of its object; None: there is none."""
        self._check_open()
        return [self._stat(key) for key in keys]

    async def list_namespaces(self) -> Sequence[str]:
        """Return the namespace digests of its objects, in order of name."""
        self._check_open()
        return sorted({namespace_of(key) for key in self._objects} - {""})

    async def aclose(self) -> None:
        """Forget everything; later calls raise StoreUnavailable."""
        self._closed = True
        self._objects.clear()
        self._used_s.clear()
        self._nbytes = 0

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store was closed; open another one")

    def _stat(self, key: str) -> ObjectStat | None:
        payload = self._objects.get(key)
        return None if payload is None else ObjectStat(len(payload), self._used_s.get(key, 0.0))

    def _touch(self, key: str) -> None:
        self._objects[key] = self._objects.pop(key)
        self._used_s[key] = self._time()

    def _remove(self, key: str) -> int:
        self._used_s.pop(key, None)
        self._nbytes -= len(self._objects.pop(key))
        return 1

    def _make_room(self, nbytes: int, own: frozenset[str]) -> bool:
        if self._max_bytes is None:
            return True
        if nbytes > self._max_bytes:
            return False
        while self._nbytes + nbytes > self._max_bytes:
            oldest = next((key for key in self._objects if not is_manifest_key(key)), None)
            if oldest is None or oldest in own:
                return False
            self._remove(oldest)
        return True


class _Turn:
    """Count copied bytes and let the loop run between turns."""

    def __init__(self) -> None:
        self._nbytes = 0

    async def spend(self, nbytes: int) -> None:
        if self._nbytes >= _TURN_NBYTES:
            self._nbytes = 0
            await asyncio.sleep(0)
        self._nbytes += nbytes
