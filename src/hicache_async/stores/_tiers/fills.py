"""Fills: pages on their way into the fast tier, which nobody waits for.

They are copies. A page that another thread may still read cannot be given back to its owner, and a fast tier may
hang for ever; so without a copy it could hold up every write and read of the slow one. Measured on two cores,
per MiB: a copy into memory that is kept 0.09 ms, into fresh memory 0.7 ms, a write to a file system in memory
0.7 ms, to a disk 1.0 ms. So the memory of copies is kept, and used again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from ...abc import Store, SupportsDelete
from .._wrapping import checked_count

_TURN_NBYTES = 4 << 20  # copied in one turn of the loop, some 0.4 ms


class _Copies:
    """Memory for copies of pages, mostly all of one size."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._spare: dict[int, list[memoryview]] = {}

    def take(self, nbytes: int) -> memoryview | None:
        """Return ``nbytes``, content undefined; None: too much is in use."""
        if spare := self._spare.get(nbytes):
            return spare.pop()
        if nbytes > self._left:
            for size, others in self._spare.items():
                self._left += size * len(others)
            self._spare.clear()
        if nbytes > self._left:
            return None
        self._left -= nbytes
        return memoryview(bytearray(nbytes))

    def give_back(self, copies: Iterable[memoryview]) -> None:
        """Keep memory that nobody reads any more."""
        for copy in copies:
            self._spare.setdefault(copy.nbytes, []).append(copy)

    def forget(self, copies: Iterable[memoryview]) -> None:
        """Let go of memory that a thread may still read."""
        self._left += sum(copy.nbytes for copy in copies)


class _Fill:
    """One write to the fast tier."""

    __slots__ = ("keys", "pages", "task", "unwanted")

    def __init__(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        self.keys = keys
        self.pages = pages
        self.unwanted: set[str] = set()
        self.task: asyncio.Task[None] | None = None


class Source:
    """A read or write under way, whose pages may be copied when it has them.

    Attributes:
        deleted: those of its keys that were deleted since it began.
    """

    __slots__ = ("deleted", "keys")

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys
        self.deleted: set[str] = set()


class Fills:
    """Write copies of pages to ``fast`` in the background, as far as they fit into a bound.

    Args:
        max_bytes: copies held at once; what does not fit is not filled.
        refuses: whether ``fast`` is to be left alone now.
        counts: where "pages_filled", "pages_not_filled" and "fill_failures" are counted.
    """

    def __init__(
        self, fast: Store, max_bytes: int, refuses: Callable[[], bool], counts: Counter[str]
    ) -> None:
        self._fast = fast
        self._copies = _Copies(max_bytes)
        self._refuses = refuses
        self._counts = counts
        self._fills: set[_Fill] = set()
        self._sources: set[Source] = set()
        self._closed = False

    @property
    def num_pending(self) -> int:
        """How many writes have not ended."""
        return len(self._fills)

    @contextlib.contextmanager
    def source(self, keys: Sequence[str]) -> Iterator[Source]:
        """Enter before anything is asked of the slow tier, so that no delete of ``keys`` is missed."""
        source = Source(keys)
        self._sources.add(source)
        try:
            yield source
        finally:
            self._sources.discard(source)

    async def add(self, source: Source, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        """Copy pages, as many as fit, and start to write them; returns when they are copied.

        Those that were deleted since ``source`` was entered are left out.

        Cancellation: none of them is written.
        """
        pending = {key for fill in self._fills for key in fill.keys}
        wanted = [(key, page) for key, page in zip(keys, pages, strict=True) if key not in pending]
        copies: list[memoryview] = []
        started = False
        try:
            if not self._refuses():
                await self._copy([page for _, page in wanted], copies)
            self._counts["pages_not_filled"] += len(wanted) - len(copies)
            copied = list(zip((key for key, _ in wanted), copies, strict=False))
            # Looked at now, with no turn before they are written: they may have been deleted while we copied.
            self._copies.give_back(copy for key, copy in copied if key in source.deleted)
            copied = [(key, copy) for key, copy in copied if key not in source.deleted]
            copies = [copy for _, copy in copied]
            if copies and not self._closed:
                self._start(_Fill([key for key, _ in copied], copies))
                started = True
        finally:
            if not started:
                self._copies.give_back(copies)

    async def _copy(self, pages: Sequence[memoryview], copies: list[memoryview]) -> None:
        turn_nbytes = 0
        for page in pages:
            if turn_nbytes >= _TURN_NBYTES:
                turn_nbytes = 0
                await asyncio.sleep(0)
            if (copy := self._copies.take(page.nbytes)) is None:
                return
            copies.append(copy)
            copy[:] = page
            turn_nbytes += page.nbytes

    def _start(self, fill: _Fill) -> None:
        self._fills.add(fill)
        fill.task = asyncio.get_running_loop().create_task(self._run(fill), name="hicache:tier-fill")
        fill.task.add_done_callback(lambda _: self._fills.discard(fill))

    async def _run(self, fill: _Fill) -> None:
        for act in (self._write, self._delete_unwanted):
            try:
                await act(fill)
            except Exception:  # noqa: BLE001 - a task's top level: the fast tier is best effort, whatever it raises
                self._counts["fill_failures"] += 1

    async def _write(self, fill: _Fill) -> None:
        has_returned = False
        try:
            answer = await self._fast.write(fill.keys, fill.pages)
            has_returned = True
            count = checked_count(answer, len(fill.keys))
            self._counts["pages_filled"] += count
            self._counts["pages_not_filled"] += len(fill.keys) - count
        finally:
            if has_returned:
                self._copies.give_back(fill.pages)
            else:
                self._copies.forget(fill.pages)

    async def _delete_unwanted(self, fill: _Fill) -> None:
        if fill.unwanted:
            await cast("SupportsDelete", self._fast).delete(sorted(fill.unwanted))

    def revoke(self, keys: Iterable[str]) -> set[asyncio.Task[None]]:
        """Let nothing of ``keys`` that a call or a write under way has stay; returns the writes to wait for.

        Call it when the slow tier has deleted them: what begins later finds nothing there.
        """
        unwanted = frozenset(keys)
        for source in self._sources:
            source.deleted |= unwanted.intersection(source.keys)
        tasks: set[asyncio.Task[None]] = set()
        for fill in self._fills:
            if hit := unwanted.intersection(fill.keys):
                fill.unwanted |= hit
                assert fill.task is not None
                tasks.add(fill.task)
        return tasks

    async def aclose(self) -> None:
        """Cancel what is being written; never waits for what hangs."""
        self._closed = True
        tasks = [fill.task for fill in self._fills if fill.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=0)
