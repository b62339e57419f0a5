"""FileStore: one file per object, many pages per thread job, verified on read."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Self

from .._log import logger
from .._threads import DaemonThreads, check_process
from ..errors import ConfigError, StoreUnavailable, WrongLoopError
from ..types import Stop, StopToken
from ._buffers import check_buffers
from ._directory import ObjectDirectory
from ._existence import ExistenceCache
from ._lane import Call, Kind, Lanes
from ._object import Fault
from ._url import url_options, url_path

_STOPS = {Fault.MISSING: Stop.VANISHED, Fault.UNREADABLE: Stop.STORE_FAULT}
"""What a prefetch is told of a miss; any other fault is a damaged object."""

_MAX_DEFAULT_LANES = 4  # hot files saturate memory before that; a slow medium may want more


class FileStore:
    """Keep objects as files of a directory, which several processes may share.

    An object is published by rename, complete or not at all, and verified when read: a missing, short,
    long, foreign, swapped or damaged one is a miss, removed where it is damaged. Nothing is synced to
    the medium: after a crash of the machine damaged objects are found as such. Opening does no I/O;
    a directory that cannot be used makes reads misses and writes fail.

    Args:
        root: the directory, made when first written; None: one for this user under the system's
            temporary directory, with mode 0700.
        existence_ttl_s: how long a key seen is believed to exist; -1: for ever; 0: not at all.
        num_lanes: read and write jobs at once; None: the number of cores, at most 4.
        threads: where jobs run, ``num_lanes + 1`` workers or more; None: own daemon threads.
        monotonic: the clock of the existence cache.

    Attributes:
        stats: how many reads ended at a miss, by what was wrong ("missing", "checksum", ...).

    Ownership: whoever opens it closes it; ``threads`` stays the caller's.
    Raises: ConfigError: an option that cannot work.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        existence_ttl_s: float = 5.0,
        num_lanes: int | None = None,
        threads: Executor | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if root is not None and not os.fspath(root):
            raise ConfigError("root is empty; give a directory, or None for a private one")
        if num_lanes is not None and (not isinstance(num_lanes, int) or num_lanes < 1):
            raise ConfigError(
                f"num_lanes is {num_lanes!r}; give an integer >= 1, or None for the number of cores"
            )
        self.stats: Counter[str] = Counter()
        self._existence = ExistenceCache(existence_ttl_s, monotonic)
        self._directory = _private_directory() if root is None else ObjectDirectory(os.path.abspath(root))
        self._num_lanes = num_lanes or min(os.cpu_count() or 1, _MAX_DEFAULT_LANES)
        self._own_threads = threads is None
        self._threads: Executor = (
            DaemonThreads(self._num_lanes + 1, "hicache-store") if threads is None else threads
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._opened: Lanes | None = None
        self._closed = False
        self._logged_errnos: set[int | None] = set()

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        """Open ``file:///absolute/path?existence_ttl_s=2&num_lanes=4``, or ``file:`` for the private one."""
        path = url_path(url)
        if path and not path.startswith("/"):
            raise ConfigError(
                f"store URL {url!r} has the relative path {path!r}; write file:///absolute/path"
            )
        parsers = {"existence_ttl_s": float, "num_lanes": int, "threads": None, "monotonic": None}
        return cls(path or None, **url_options(url, options, parsers))  # type: ignore[arg-type]

    @property
    def root(self) -> str:
        """The directory, absolute."""
        return self._directory.root

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys exist, consecutive from ``keys[0]``: from memory, else in one hop.

        Raises: StoreUnavailable: the store was closed. Cancellation: ends the wait.
        """
        lanes = self._lanes()
        keys = tuple(keys)
        known = self._existence.count_prefix(keys)
        unknown = keys[known:]
        if not unknown:
            return known

        def look(item: int) -> str | None:
            return None if self._directory.has(unknown[item]) else Fault.MISSING

        call = Call(Kind.LOOKUP, len(unknown), look, StopToken())
        await lanes.run(call)
        self._raise_if_failed(call)
        self._existence.add(unknown[: call.count])
        return known + call.count

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Fill buffers with verified objects, in order, and return how many, consecutive from 0.

        Args:
            into: one contiguous, writable row of bytes per key; the whole of it is filled. Beyond the
                count its content is undefined.
            stop: read between pages; busy while a thread may touch a buffer.

        Raises: StoreUnavailable: the store was closed. A fault of the disk is a miss.
        Ownership: the buffers are the store's until this returns, or, where it was cancelled or the
            store closed, until ``stop`` is quiet.
        Cancellation: ends the coroutine at once and stops the read after the page in hand.
        """
        lanes = self._lanes()
        keys, into = tuple(keys), tuple(into)
        check_buffers(keys, into, writable=True)
        if not keys:
            return 0
        directory = self._directory
        call = Call(
            Kind.READ, len(keys), lambda item: directory.read(keys[item], into[item]), stop, into[0].nbytes
        )
        await lanes.run(call)
        self._raise_if_failed(call)
        self._existence.add(keys[: call.count])
        if call.fault is not None:
            self.stats[call.fault] += 1
            stop.reason = _STOPS.get(Fault(call.fault), Stop.CORRUPT)
            self._existence.discard(keys[call.count : call.count + 1])
        return call.count

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Publish pages, in order, and return how many are stored, consecutive from 0.

        Raises: StoreUnavailable: closed, or not even the first page could be written.
        Ownership: the pages are read until this returns.
        Cancellation: ends the coroutine at once. The write stops after the page in hand, which is
            published or leaves nothing; until then, at most 2 pages, that page is still being read.
            Whoever needs to know when does not cancel.
        """
        lanes = self._lanes()
        keys, pages = tuple(keys), tuple(pages)
        check_buffers(keys, pages, writable=False)
        if not keys:
            return 0
        directory = self._directory
        call = Call(
            Kind.WRITE,
            len(keys),
            lambda item: directory.write(keys[item], pages[item]),
            StopToken(),
            pages[0].nbytes,
        )
        await lanes.run(call)
        self._existence.add(keys[: call.count])
        if isinstance(call.error, OSError):
            self._log_unwritable(call.error)
            if call.count == 0:
                raise StoreUnavailable(f"{self.root} cannot be written: {call.error}") from call.error
        else:
            self._raise_if_failed(call)
        return call.count

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete the keys that exist; returns how many did, up to the first that cannot be deleted."""
        lanes = self._lanes()
        keys = tuple(keys)
        self._existence.discard(keys)
        deleted: list[str] = []

        def delete(item: int) -> None:
            if self._directory.delete(keys[item]):
                deleted.append(keys[item])

        call = Call(Kind.WRITE, len(keys), delete, StopToken())
        if keys:
            await lanes.run(call)
        if isinstance(call.error, OSError):
            raise StoreUnavailable(f"{self.root} cannot be written: {call.error}") from call.error
        self._raise_if_failed(call)
        return len(deleted)

    async def list_keys(self) -> Sequence[str]:
        """Return the keys of all objects, in no particular order."""
        found: list[str] = []
        call = Call(Kind.WRITE, 1, lambda _: found.extend(self._directory.list_keys()), StopToken())
        await self._lanes().run(call)
        self._raise_if_failed(call)
        return found

    async def aclose(self) -> None:
        """Refuse new calls, stop the running ones and let the threads go; never waits for one.

        In a forked child, of a store that was in use, there is nothing to stop.
        """
        self._closed = True
        if self._opened is not None and self._pid == os.getpid():
            self._opened.close()
        if self._own_threads:
            self._threads.shutdown(wait=False)

    def _lanes(self) -> Lanes:
        if self._closed:
            raise StoreUnavailable(f"the store at {self.root} was closed; open another one")
        loop = asyncio.get_running_loop()
        if self._opened is None:
            self._loop, self._opened = loop, Lanes(loop, self._threads, self._num_lanes)
            self._pid = os.getpid()
            return self._opened
        # The parent's names for files under construction are the parent's to use.
        check_process(self._pid, f"the store at {self.root}", "open one of its own")
        if loop is not self._loop:
            raise WrongLoopError(
                f"the store at {self.root} is used on a second event loop; open one for each"
            )
        return self._opened

    def _raise_if_failed(self, call: Call) -> None:
        if call.error is not None:
            raise call.error

    def _log_unwritable(self, error: OSError) -> None:
        """Log once for each kind of failure: a full disk would fill the log too."""
        if error.errno not in self._logged_errnos:
            self._logged_errnos.add(error.errno)
            logger.info("store.unwritable", root=self.root, error=str(error))


def _private_directory() -> ObjectDirectory:
    root = os.path.join(tempfile.gettempdir(), f"hicache-{os.geteuid()}")
    logger.info("store.private_directory", root=root)
    return ObjectDirectory(root, private=True)
