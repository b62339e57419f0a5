"""FileStore: one file per object, many pages per thread job, verified on read."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Self, TypeVar

from .._log import logger
from .._threads import DaemonThreads, check_process, post_to_loop
from ..core.keys import namespace_of
from ..errors import ConfigError, StoreUnavailable, WrongLoopError
from ..types import ObjectStat, Stop, StopToken
from ._buffers import check_buffers
from ._files.directory import Batch, ObjectDirectory
from ._files.existence import ExistenceIndex
from ._files.object import Fault
from ._files.options import URL_OPTIONS, Durability, FileOptions, gid_of
from ._files.scan import NamespaceScan
from ._lane import Call, Kind, Lanes
from ._url import url_options, url_path

T = TypeVar("T")

_STOPS = {Fault.MISSING: Stop.VANISHED, Fault.UNREADABLE: Stop.STORE_FAULT}
"""What a prefetch is told of a miss; any other fault is a damaged object."""

_MAX_DEFAULT_LANES = 4  # hot files saturate memory before that; a slow medium may want more

_MAX_SCANS = 4
"""Namespaces that are listed for the index: an engine uses one, with its draft model two."""


class FileStore:
    """Keep objects as files of a directory, which several processes may share.

    An object is published by rename, complete or not at all, and verified when read: a missing, short,
    long, foreign, swapped or damaged one is a miss, removed where it is damaged. Opening does no I/O;
    a directory that cannot be used makes reads misses and writes fail.

    Which objects exist is remembered for a while. The first lookup that has to ask the disk also has its
    namespace listed, in a thread of its own and behind everything else.

    Args:
        root: the directory, made when first written; None: one for this user under the system's
            temporary directory, with mode 0700.
        existence_ttl_s: how long a key seen is believed to exist without being asked for, at most; half
            of it at least; -1: for ever; 0: not at all.
        num_lanes: read and write jobs at once; None: the number of cores, at most 4.
        max_bytes: for all objects below ``root``, in whole blocks of 4096; those not used for longest make
            room. None: no limit. A write that finds no room ends there, and is no fault.
        min_free_bytes: what is left free on the file system; 0: no limit.
        low_water: to what share of a limit objects are evicted once it is reached.
        durability: what of a write survives a crash of the machine. "none": perhaps nothing, and what is
            damaged is found as such; "batch": all of it, as the data of many objects is synced, then
            they are named, then each directory is synced once; "each": the same, object by object.
        read_only: create, touch, delete and sweep nothing; writing and deleting raise.
        mode: of each object, whatever the umask; directories that are made get the matching one: 0700 with
            0o600, 0750 with 0o640, 2770 with 0o660, which processes of several users need to share limits.
        group: name or number of the group of everything that is made; None: as the system chooses.
        unnamed_temp: write files without a name and link them, so that a killed writer leaves nothing;
            where the file system cannot, one line is logged and files under construction have names.
        threads: where jobs run, ``num_lanes + 2`` workers or more; None: own daemon threads.
        monotonic: the clock of the existence index.

    Attributes:
        stats: how many reads ended at a miss, by what was wrong ("missing", "checksum", ...), and how many
            writes for want of room ("full").

    Ownership: whoever opens it closes it; ``threads`` stays the caller's.
    Raises: ConfigError: an option that cannot work.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        existence_ttl_s: float = 5.0,
        num_lanes: int | None = None,
        max_bytes: int | None = None,
        min_free_bytes: int = 0,
        low_water: float = 0.9,
        durability: Durability = "none",
        read_only: bool = False,
        mode: int = 0o600,
        group: str | int | None = None,
        unnamed_temp: bool = False,
        threads: Executor | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if root is not None and not os.fspath(root):
            raise ConfigError("root is empty; give a directory, or None for a private one")
        if root is None and mode != 0o600:
            raise ConfigError(
                f"mode is {mode!r} without a root; give one, as the private directory is not shared"
            )
        if num_lanes is not None and (not isinstance(num_lanes, int) or num_lanes < 1):
            raise ConfigError(
                f"num_lanes is {num_lanes!r}; give an integer >= 1, or None for the number of cores"
            )
        self._options = FileOptions(
            max_bytes=max_bytes,
            min_free_bytes=min_free_bytes,
            low_water=low_water,
            durability=durability,
            read_only=read_only,
            mode=mode,
            gid=gid_of(group),
            unnamed_temp=unnamed_temp,
        )
        self.stats: Counter[str] = Counter()
        self._existence = ExistenceIndex(existence_ttl_s, monotonic)
        self._directory = ObjectDirectory(
            _private_root() if root is None else os.path.abspath(root),
            self._options,
            private=root is None,
            monotonic=monotonic,
            on_evicted=self._post_evicted,
        )
        self._num_lanes = num_lanes or min(os.cpu_count() or 1, _MAX_DEFAULT_LANES)
        self._own_threads = threads is None
        self._threads: Executor = (
            DaemonThreads(self._num_lanes + 2, "hicache-store") if threads is None else threads
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._opened: Lanes | None = None
        self._closed = False
        self._scanned: set[str] = set()
        self._logged: set[object] = set()

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        """Open ``file:///absolute/path?num_lanes=4&max_bytes=200GiB&mode=660``, or ``file:`` for the private one."""
        path = url_path(url)
        if path and not path.startswith("/"):
            raise ConfigError(
                f"store URL {url!r} has the relative path {path!r}; write file:///absolute/path"
            )
        return cls(path or None, **url_options(url, options, URL_OPTIONS))  # type: ignore[arg-type]

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
        self._scan(lanes, namespace_of(unknown[0]))

        def look(item: int) -> str | None:
            return None if self._directory.has(unknown[item]) else Fault.MISSING

        asked = self._existence.ask()
        call = Call(Kind.LOOKUP, len(unknown), look, StopToken())
        await lanes.run(call)
        self._raise_if_failed(call)
        self._existence.confirm(unknown[: call.count], asked)
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
        asked = self._existence.ask()
        call = Call(
            Kind.READ, len(keys), lambda item: directory.read(keys[item], into[item]), stop, into[0].nbytes
        )
        await lanes.run(call)
        self._raise_if_failed(call)
        self._existence.confirm(keys[: call.count], asked)
        if call.fault is not None:
            self.stats[call.fault] += 1
            stop.reason = _STOPS.get(Fault(call.fault), Stop.CORRUPT)
            self._existence.discard(keys[call.count : call.count + 1])
        return call.count

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Publish pages, in order, and return how many are stored, consecutive from 0.

        A key that is present is touched, not rewritten. Where the limits leave no room the count ends: no
        page of a call is evicted for a later one.

        Raises: StoreUnavailable: closed, read-only, or not even the first page could be written.
        Ownership: the pages are read until this returns.
        Cancellation: ends the coroutine at once. The write stops after the page in hand, which is
            published or leaves nothing; until then, at most 2 pages, that page is still being read.
            Whoever needs to know when does not cancel.
        """
        lanes = self._lanes(to_write=True)
        keys, pages = tuple(keys), tuple(pages)
        check_buffers(keys, pages, writable=False)
        if not keys:
            return 0
        asked = self._existence.ask()
        call = self._write_call(keys, pages)
        await lanes.run(call)
        self._existence.confirm(keys[: call.count], asked)
        if call.fault is not None:
            self.stats[call.fault] += 1
            self._log_once("full", lambda: logger.info("store.full", root=self.root, nbytes=pages[0].nbytes))
        if isinstance(call.error, OSError):
            error = call.error
            self._log_once(
                error.errno, lambda: logger.info("store.unwritable", root=self.root, error=str(error))
            )
        if call.count == 0 or not isinstance(call.error, OSError):
            self._raise_if_failed(call, "written")
        return call.count

    def _write_call(self, keys: Sequence[str], pages: Sequence[memoryview]) -> Call:
        token, nbytes = StopToken(), pages[0].nbytes
        if self._options.durability == "batch":
            batch = Batch(self._directory, keys, pages)
            return Call(Kind.WRITE, len(keys), batch.draft, token, nbytes, batch.publish)
        write, own = self._directory.write, self._directory.paths(keys)  # no page makes room for a later one
        return Call(Kind.WRITE, len(keys), lambda item: write(keys[item], pages[item], own), token, nbytes)

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete the keys that exist; returns how many did, up to the first that cannot be deleted."""
        lanes = self._lanes(to_write=True)
        keys = tuple(keys)
        deleted: list[str] = []

        def delete(item: int) -> None:
            if self._directory.delete(keys[item]):
                deleted.append(keys[item])

        call = Call(Kind.WRITE, len(keys), delete, StopToken())
        self._existence.discard(keys)
        try:
            if keys:
                await lanes.run(call)
        finally:
            self._existence.discard(keys)  # whoever has looked meanwhile saw what is gone
        self._raise_if_failed(call, "written")
        return len(deleted)

    async def list_keys(self) -> Sequence[str]:
        """Return the keys of all objects, in no particular order."""
        return await self._walk(self._directory.list_keys)

    async def list_namespaces(self) -> Sequence[str]:
        """Return the digests of the namespaces that have objects here, in order of name."""
        return await self._walk(self._directory.list_namespaces)

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        """Return size and time of last use of each object, in one hop; None: there is none."""
        keys = tuple(keys)
        found: list[ObjectStat | None] = [None] * len(keys)

        def look(item: int) -> None:
            found[item] = self._directory.stat(keys[item])

        lanes = self._lanes()
        if keys:
            call = Call(Kind.LOOKUP, len(keys), look, StopToken())
            await lanes.run(call)
            self._raise_if_failed(call)
        self._existence.discard([key for key, stat in zip(keys, found, strict=True) if stat is None])
        return found

    async def sweep(self) -> Mapping[str, int]:
        """Remove what dead writers left, what is beyond the limits, and empty directories.

        Returns: ``temp_files``, ``evicted_bytes`` and ``empty_directories``, how many of each.
        Raises: StoreUnavailable: closed, read-only, or a disk that refuses.
        """
        self._lanes(to_write=True)
        return await self._walk(self._directory.sweep)

    async def aclose(self) -> None:
        """Refuse new calls, stop the running ones and let the threads go; never waits for one.

        In a forked child, of a store that was in use, there is nothing to stop.
        """
        self._closed = True
        if self._opened is not None and self._pid == os.getpid():
            self._opened.close()
            if self._directory.has_books:
                closer = DaemonThreads(1, "hicache-store-close")  # it may wait for the lock of the books
                closer.submit(self._directory.close)
                closer.shutdown(cancel_futures=False)
        if self._own_threads:
            self._threads.shutdown(wait=False)

    # -- within

    def _lanes(self, *, to_write: bool = False) -> Lanes:
        if self._closed:
            raise StoreUnavailable(f"the store at {self.root} was closed; open another one")
        if to_write and self._options.read_only:
            raise StoreUnavailable(
                f"the store at {self.root} is read-only; open it without read_only to write"
            )
        loop = asyncio.get_running_loop()
        if self._opened is None:
            self._loop, self._opened = loop, Lanes(loop, self._threads, self._num_lanes)
            self._pid = os.getpid()
            if self._options.limited:
                self._trim(self._opened)
            return self._opened
        # The parent's names for files under construction are the parent's to use.
        check_process(self._pid, f"the store at {self.root}", "open one of its own")
        if loop is not self._loop:
            raise WrongLoopError(
                f"the store at {self.root} is used on a second event loop; open one for each"
            )
        return self._opened

    def _trim(self, lanes: Lanes) -> None:
        """Bring what is there within the limits, which may be lower than the last time, behind everything else."""

        def trim(_item: int) -> None:
            self._directory.trim()

        call = Call(Kind.WALK, 1, trim, StopToken())  # where it fails the next write tells
        call.settled.add_done_callback(lambda settled: settled.cancelled() or settled.exception())
        lanes.submit(call)

    async def _walk(self, look: Callable[[], T]) -> T:
        found: list[T] = []
        call = Call(Kind.WALK, 1, lambda _: found.append(look()), StopToken())
        await self._lanes().run(call)
        self._raise_if_failed(call)
        return found[0]

    def _scan(self, lanes: Lanes, namespace: str) -> None:
        """Begin to list a namespace that was not asked for before; one that has no name would be anybody's."""
        if namespace and namespace not in self._scanned and len(self._scanned) < _MAX_SCANS:
            self._scanned.add(namespace)
            NamespaceScan(lanes, self._existence, self._directory, namespace).go_on()

    def _post_evicted(self, keys: Sequence[str]) -> None:
        """Forget what went to make room. Any thread."""
        if self._loop is not None:
            post_to_loop(self._loop.call_soon_threadsafe, self._existence.discard, keys)

    def _raise_if_failed(self, call: Call, verb: str = "read") -> None:
        if isinstance(call.error, OSError):
            raise StoreUnavailable(f"{self.root} cannot be {verb}: {call.error}") from call.error
        if call.error is not None:
            raise call.error

    def _log_once(self, kind: object, log: Callable[[], None]) -> None:
        """Log once for each kind of failure: a full disk would fill the log too."""
        if kind not in self._logged:
            self._logged.add(kind)
            log()


def _private_root() -> str:
    root = os.path.join(tempfile.gettempdir(), f"hicache-{os.geteuid()}")
    logger.info("store.private_directory", root=root)
    return root
