"""SlotStore: what shm and mmap have in common; the loop's side of ``slots``."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import takewhile
from typing import TypeVar

from ..._log import logger
from ..._threads import DaemonThreads, check_process
from ...core.keys import namespace_of
from ...errors import ConfigError, StoreUnavailable, WrongLoopError
from ...types import ObjectStat, Stop, StopToken
from .._buffers import check_buffers
from .._lane import Call, Kind, Lanes
from .segment import BLOCK, Wanted, check_segment, open_segment, whole_blocks
from .slots import Page, SlotFault, Slots, Written

T = TypeVar("T")

_STOPS = {
    SlotFault.MISSING: Stop.VANISHED,
    SlotFault.REPLACED: Stop.VANISHED,
    SlotFault.UNREADABLE: Stop.STORE_FAULT,
}
"""What a prefetch is told of a miss; any other fault is an object that cannot be used."""

_MAX_DEFAULT_LANES = 4  # copies saturate memory before that
_BATCH_PAGES, _BATCH_NBYTES = 64, 4 << 20
"""Pages that take the lock together, twice: well below a millisecond of it for some of copying."""


class SlotStore:
    """Keep objects in the fixed slots of one file, which several processes of one machine may share.

    An object is visible when complete, and verified when read: one that was damaged, or replaced while it
    was read, is a miss. When all slots are taken those least recently used are, never one of the call that
    needs room and never a manifest, of which there is one for each namespace; where that leaves none, the write
    ends early. An object larger than a slot is not stored; of
    a key beyond 448 bytes its bytes count too. A process may be killed at any moment: the others go on, and
    its half-written slots are used again.

    The space is reserved, in a thread, when a call first needs it; opening only looks at what is there.

    Args:
        wanted: the segment.
        num_lanes: read and write jobs at once; None: the number of cores, at most 4.
        threads: where jobs run, ``num_lanes + 2`` workers or more; None: own daemon threads.

    Ownership: whoever opens it closes it; ``threads`` stays the caller's.
    Raises: ConfigError: an option that cannot work, or a segment that exists and is not as wanted.
    """

    def __init__(self, wanted: Wanted, num_lanes: int | None, threads: Executor | None) -> None:
        if num_lanes is not None and (not isinstance(num_lanes, int) or num_lanes < 1):
            raise ConfigError(
                f"num_lanes is {num_lanes!r}; give an integer >= 1, or None for the number of cores"
            )
        check_segment(wanted)
        self._wanted = wanted
        self._num_lanes = num_lanes or min(os.cpu_count() or 1, _MAX_DEFAULT_LANES)
        self._own_threads = threads is None
        self._threads: Executor = (
            DaemonThreads(self._num_lanes + 2, "hicache-store") if threads is None else threads
        )
        self._counts: Counter[str] = Counter()
        self._freed: Counter[str] = Counter()
        self._opening = threading.Lock()
        self._slots: Slots | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._opened: Lanes | None = None
        self._closed = False
        self._logged_errnos: set[int | None] = set()

    @property
    def path(self) -> str:
        """The file of the segment."""
        return self._wanted.path

    @property
    def stats(self) -> Mapping[str, int]:
        """Reads and writes that ended early, by why ("missing", "replaced", "checksum", "no_room", ...), and
        slots taken from objects ("evicted"), from dead writers ("abandoned") and for damage ("damaged")."""
        return self._counts + self._freed

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys exist, consecutive from ``keys[0]``.

        Without a hop, in a dict, while nobody else has changed the segment; else in one, which finds what
        has changed.

        Raises: StoreUnavailable: closed, or the segment cannot be had. Cancellation: ends the wait.
        """
        lanes = self._lanes()
        keys = tuple(keys)
        slots = self._slots
        if slots is not None:
            slots.check()
        if keys and (slots is None or not slots.index.current):
            slots = await self._in_thread(lanes, Kind.LOOKUP, _refreshed)
        return 0 if slots is None else sum(1 for _ in takewhile(slots.index.slots.__contains__, keys))

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Fill buffers with verified objects, in order, and return how many, consecutive from 0.

        Args:
            into: one contiguous, writable row of bytes per key; the whole of it is filled. Beyond the
                count its content is undefined.
            stop: read between pages; busy while a thread may touch a buffer.

        Raises: StoreUnavailable: closed, or the segment cannot be had.
        Ownership: the buffers are the store's until this returns, or, where it was cancelled or the
            store closed, until ``stop`` is quiet.
        Cancellation: ends the coroutine at once and stops the read after the page in hand.
        """
        lanes = self._lanes()
        keys, into = tuple(keys), tuple(into)
        check_buffers(keys, into, writable=True)
        if not keys:
            return 0

        def read(item: int) -> SlotFault | None:
            return self._ready().read(keys[item], into[item])

        call = Call(Kind.READ, len(keys), read, stop, into[0].nbytes)
        await self._run(lanes, call)
        if call.fault is not None:
            self._counts[call.fault] += 1
            stop.reason = _STOPS.get(SlotFault(call.fault), Stop.CORRUPT)
        return call.count

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Publish pages, in order, and return how many are stored, consecutive from 0.

        Raises: StoreUnavailable: closed, the segment cannot be had, or not even the first page could be
            written.
        Ownership: the pages are read until this returns.
        Cancellation: ends the coroutine at once. The write stops after the page in hand; until then, at
            most 2 pages, that page is still being read. Whoever needs to know when does not cancel.
        """
        lanes = self._lanes()
        keys, pages = tuple(keys), tuple(pages)
        check_buffers(keys, pages, writable=False)
        batches = list(_batches(keys, pages))
        own = frozenset(keys)
        stop = StopToken()
        written: dict[int, Written] = {}

        def write(item: int) -> SlotFault | None:
            written[item] = self._ready().write(batches[item], own, lambda: stop.stopped)
            return written[item].fault

        call = Call(Kind.WRITE, len(batches), write, stop, _BATCH_NBYTES)
        if batches:
            await lanes.run(call)
        if not (isinstance(call.error, OSError) and call.count > 0):
            self._raise_if_failed(call)
        if call.fault is not None and call.fault != SlotFault.STOPPED:
            self._count_refusal(SlotFault(call.fault))
        whole = sum(len(batch) for batch in batches[: call.count])
        return whole + (written[call.count].num_pages if call.count in written else 0)

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete the keys that exist; returns how many did."""
        keys = tuple(keys)
        lanes = self._lanes()
        return await self._in_thread(lanes, Kind.WRITE, lambda slots: slots.delete(keys)) if keys else 0

    async def list_keys(self) -> Sequence[str]:
        """Return the keys of all objects, in no particular order."""
        return await self._in_thread(self._lanes(), Kind.WALK, Slots.keys)

    async def list_namespaces(self) -> Sequence[str]:
        """Return the digests of the namespaces of its objects, in order of name."""
        return await self._in_thread(
            self._lanes(), Kind.WALK, lambda slots: sorted({*map(namespace_of, slots.keys())} - {""})
        )

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        """Return for each key what is known of its object, without reading the object; None: there is none."""
        keys = tuple(keys)
        return await self._in_thread(
            self._lanes(), Kind.WALK, lambda slots: [slots.stat(key) for key in keys]
        )

    async def sweep(self) -> Mapping[str, int]:
        """Look through the whole table and free the slots of dead writers ("abandoned") and damaged ones."""
        return await self._in_thread(self._lanes(), Kind.WALK, Slots.sweep)

    async def aclose(self) -> None:
        """Refuse new calls, stop the running ones and let the threads go; never waits for one.

        The segment stays mapped while a thread is in it. What it holds stays: see the class. In a forked
        child, of a store that was in use, there is nothing to stop.
        """
        self._closed = True
        if self._opened is not None and self._pid == os.getpid():
            self._opened.close()
        if self._own_threads:
            self._threads.shutdown(wait=False)
        self._slots = None

    def _lanes(self) -> Lanes:
        if self._closed:
            raise StoreUnavailable(f"the store at {self.path} was closed; open another one")
        loop = asyncio.get_running_loop()
        if self._opened is None:
            self._loop, self._opened = loop, Lanes(loop, self._threads, self._num_lanes)
            self._pid = os.getpid()
            return self._opened
        # The parent's slots under construction are the parent's.
        check_process(self._pid, f"the store at {self.path}", "open one of its own")
        if loop is not self._loop:
            raise WrongLoopError(
                f"the store at {self.path} is used on a second event loop; open one for each"
            )
        return self._opened

    def _ready(self) -> Slots:
        """Return the slots, after opening the segment and a look that it was not cut; in a thread."""
        slots = self._slots
        if slots is None:
            with self._opening:
                if self._closed:
                    raise StoreUnavailable(f"the store at {self.path} was closed; open another one")
                slots = self._slots
                if slots is None:
                    slots = Slots(open_segment(self._wanted), self._freed)
                    if not self._closed:
                        self._slots = slots
        slots.check()
        return slots

    async def _in_thread(self, lanes: Lanes, kind: Kind, act: Callable[[Slots], T]) -> T:
        results: list[T] = []
        call = Call(kind, 1, lambda _: results.append(act(self._ready())), StopToken())
        await self._run(lanes, call)
        return results.pop()  # a job outlives its call: it must not keep the segment

    async def _run(self, lanes: Lanes, call: Call) -> None:
        await lanes.run(call)
        self._raise_if_failed(call)

    def _count_refusal(self, fault: SlotFault) -> None:
        slots = self._slots
        if fault is SlotFault.TOO_LARGE and not self._counts[fault] and slots is not None:
            reason = f"an object is larger than a slot, {slots.slot_nbytes} bytes; give more slot_bytes"
            logger.info("store.unwritable", root=self.path, error=reason)
        self._counts[fault] += 1

    def _raise_if_failed(self, call: Call) -> None:
        """Raise what the first bad item raised: what the system refuses as StoreUnavailable, logged once."""
        error = call.error
        if isinstance(error, OSError) and error.errno not in self._logged_errnos:
            self._logged_errnos.add(error.errno)
            logger.info("store.unwritable", root=self.path, error=str(error))
        if isinstance(error, OSError):
            raise StoreUnavailable(f"{self.path} cannot be used: {error}") from error
        if error is not None:
            raise error


def _refreshed(slots: Slots) -> Slots:
    slots.index.refresh()
    return slots


def _batches(keys: Sequence[str], pages: Sequence[memoryview]) -> Iterator[list[Page]]:
    batch: list[Page] = []
    nbytes = 0
    for page in zip(keys, pages, strict=True):
        if batch and (len(batch) == _BATCH_PAGES or nbytes + page[1].nbytes > _BATCH_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(page)
        nbytes += page[1].nbytes
    if batch:
        yield batch


def checked_nbytes(name: str, value: int | None) -> int | None:
    """Return an option in bytes, or None for one that is not given.

    Raises: ConfigError: it is no integer above 0.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name} is {value!r}; give a number of bytes >= 1, or None to take what is there")
    return value


def wanted_segment(
    path: str, max_bytes: int | None, slot_bytes: int | None, mode: int, *, map_slots: bool, remedy: str
) -> Wanted:
    """Return the segment that these options ask for; slots are whole blocks of 4096 bytes.

    Raises: ConfigError: an option that cannot work.
    """
    max_nbytes, slot_nbytes = checked_nbytes("max_bytes", max_bytes), checked_nbytes("slot_bytes", slot_bytes)
    if mode & ~0o666 or mode & 0o600 != 0o600:
        raise ConfigError(
            f"mode is {mode:#o}; give 0o600, 0o660 or 0o666: who reads a segment writes to it too"
        )
    return Wanted(
        path, max_nbytes, slot_nbytes and max(BLOCK, whole_blocks(slot_nbytes)), mode, map_slots, remedy
    )
