"""KV events: what a match finds from now on and what no more, read as an async iterator.

The prefix tree calls :class:`KVEvents` in the middle of a change; that only puts an event into the buffers of
the readers, and does nothing while there are none. Nobody ever waits for a reader: one that falls too far
behind loses its buffer and finds a :class:`Gap` in its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from .core.node import Node
from .core.tokens import TOKEN_NBYTES
from .types import Tier

MAX_PENDING_PAGES = 1 << 16
"""Pages of events that may wait for one reader by default: 4 M tokens and at most 35 MB at 64 tokens a page."""

MIN_NAMES = 1 << 10
"""Names of roots that are remembered before any of them is looked at again."""

Name: TypeAlias = tuple[bytes, str | None]
"""Salt and adapter, which a root of the tree stands for."""

NO_NAME: Name = (b"", None)
"""Those of plain prompts."""

_Held: TypeAlias = tuple[bool, bool, tuple[bytes, ...], bytes | None, bytes]
"""Of one node: whether it is on the device, and on the host; its hashes, the one before them, its tokens."""


class KVEvent:
    """One change of what a match finds: a :class:`Stored`, :class:`Removed`, :class:`Cleared` or :class:`Gap`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Stored(KVEvent):
    """Pages that follow one another in a prompt are found in ``tier`` now.

    Attributes:
        tier: DEVICE or HOST; pages of one prompt come and go in both independently.
        hashes: the hash of each page, 32 bytes; it covers all tokens up to the page's end, salt and adapter.
        parent_hash: the hash of the page before the first; None at the start of a prompt.
        token_bytes: the token ids of the pages, little-endian uint32.
        salt, adapter: those of the prompts that share the pages.
    """

    tier: Tier
    hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_bytes: bytes
    salt: bytes
    adapter: str | None

    @property
    def page_size(self) -> int:
        """Tokens of one page."""
        return len(self.token_bytes) // TOKEN_NBYTES // len(self.hashes)

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        """The token ids of the pages, uint32 [num_pages * page_size], read-only; decoded when asked for."""
        return np.frombuffer(self.token_bytes, dtype="<u4")


@dataclass(frozen=True, slots=True)
class Removed(KVEvent):
    """Pages are not found in ``tier`` any more.

    Attributes:
        tier: DEVICE or HOST.
        hashes: the hash of each page.
    """

    tier: Tier
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared(KVEvent):
    """No page of the prompts with this salt and adapter is found any more, in no tier."""

    salt: bytes
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Gap(KVEvent):
    """The reader does not know what is held: forget all. With ``snapshot`` what is held now follows.

    Attributes:
        num_missed: events that the reader did not get, because it was too slow or had not begun to read.
    """

    num_missed: int


class EventReader(AsyncIterator[KVEvent]):
    """Reads the events of one cache in the order of the changes: ``async for event in cache.events()``.

    It belongs on the cache's loop, and ends when the cache is closed or has failed: from then on nothing is
    found there.

    Ownership: the cache does not keep a reader alive; one that is dropped, or closed with :meth:`aclose`,
    costs nothing any more.
    Cancellation: of a wait for the next event ends the wait; no event is lost.
    """

    __slots__ = (
        "__weakref__", "_check", "_held", "_is_over", "_leave", "_max_pending_pages", "_missed", "_news",
        "_pending", "_pending_pages", "_snapshot",
    )  # fmt: skip

    def __init__(
        self,
        snapshot: Callable[[], Iterator[Stored]] | None,
        max_pending_pages: int,
        check: Callable[[], None],
        leave: Callable[[EventReader], None],
    ) -> None:
        self._snapshot = snapshot
        self._max_pending_pages = max_pending_pages
        self._check = check
        self._leave = leave
        self._missed = None if snapshot is None else 0
        self._held: Iterator[Stored] = iter(())
        self._pending: deque[KVEvent] = deque()
        self._pending_pages = 0
        self._news = asyncio.Event()
        self._is_over = False

    def __repr__(self) -> str:
        behind = "" if self._missed is None else f", {self._missed} missed"
        return f"<EventReader {len(self._pending)} events of {self._pending_pages} pages pending{behind}>"

    async def __anext__(self) -> KVEvent:
        while (event := self.next_nowait()) is None:
            if self._is_over:
                raise StopAsyncIteration
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                del self  # the traceback of a cancelled task must not keep the reader that it left
                raise
        return event

    def next_nowait(self) -> KVEvent | None:
        """Return the next event, or None while there is none."""
        self._check()
        held = next(self._held, None)
        if held is not None:
            return held
        if self._missed is not None and not self._is_over:
            gap, self._missed = Gap(self._missed), None
            if self._snapshot is not None:
                self._held = self._snapshot()
            return gap
        if not self._pending:
            return None
        event = self._pending.popleft()
        self._pending_pages -= _num_pages(event)
        return event

    def resync(self) -> None:
        """Begin again with a :class:`Gap`; events that wait are missed."""
        self._check()
        self._fall_behind(0)

    async def aclose(self) -> None:
        """End the iteration, drop what waits and take no more. May be called again."""
        self._check()
        self._leave(self)
        self._fall_behind(0)
        self._end()

    def _tell(self, event: KVEvent) -> None:
        num_pages = _num_pages(event)
        if self._missed is not None or self._pending_pages + num_pages > self._max_pending_pages:
            self._fall_behind(1)
            return
        self._pending.append(event)
        self._pending_pages += num_pages
        self._news.set()

    def _fall_behind(self, num_missed: int) -> None:
        self._missed = (self._missed or 0) + len(self._pending) + num_missed
        self._pending.clear()
        self._pending_pages = 0
        self._held = iter(())
        self._news.set()

    def _end(self) -> None:
        self._is_over = True
        self._news.set()


class KVEvents:
    """Tells the readers of one cache what changes in its prefix tree, as the tree's observer.

    Events name the salt and the adapter of a prompt, of which the tree knows a digest only: the names are
    remembered for as long as the tree has a root for them, or a lease may make one.
    """

    def __init__(self) -> None:
        self._readers: WeakSet[EventReader] = WeakSet()
        self._names: dict[bytes, Name] = {}
        self._max_names = MIN_NAMES
        self._is_over = False

    @property
    def num_readers(self) -> int:
        """How many readers are told."""
        return len(self._readers)

    def read(
        self,
        roots: Mapping[bytes, Node],
        *,
        snapshot: bool,
        max_pending_pages: int,
        check: Callable[[], None],
    ) -> EventReader:
        """Return a new reader.

        Args:
            roots: the tree's, by seed; looked at whenever the reader has to learn what is held.
            snapshot: whether it begins, and after a gap goes on, with what is held.
            max_pending_pages: how many pages of events may wait for it.
            check: raises on another loop than the cache's.
        """
        held = partial(self._held, roots) if snapshot else None
        reader = EventReader(held, max_pending_pages, check, self._readers.discard)
        if self._is_over:
            reader._end()
        else:
            self._readers.add(reader)
        return reader

    def end(self) -> None:
        """End all readers, now and later: nothing will be found any more."""
        self._is_over = True
        for reader in self._readers:
            reader._end()
        self._readers.clear()

    def remember(
        self, seed: bytes, salt: bytes, adapter: str | None, in_use: Callable[[], Iterable[bytes]]
    ) -> None:
        """Remember whose prompts begin with ``seed``.

        Args:
            in_use: says which seeds are still needed; asked when the names have doubled.
        """
        if not seed or seed in self._names:
            return
        if len(self._names) >= self._max_names:
            self._names = {seed: self._names[seed] for seed in self._names.keys() & set(in_use())}
            self._max_names = max(MIN_NAMES, 2 * len(self._names))
        self._names[seed] = (salt, adapter)

    # What the tree says

    def stored(self, tier: Tier, node: Node) -> None:
        """Hear that ``node`` has got its pages of ``tier``."""
        if self._readers:
            root = node
            while root.parent is not None:
                root = root.parent
            name = self._names.get(root.segment, NO_NAME)
            self._tell(Stored(tier, node.hashes, _hash_before(node), node.segment, *name))

    def removed(self, tier: Tier, node: Node) -> None:
        """Hear that a match no longer finds the pages of ``tier`` of ``node``."""
        if self._readers:
            self._tell(Removed(tier, node.hashes))

    def cleared(self, seed: bytes) -> None:
        """Hear that all prompts of one root have gone."""
        if self._readers:
            self._tell(Cleared(*self._names.get(seed, NO_NAME)))

    def _tell(self, event: KVEvent) -> None:
        for reader in self._readers:
            reader._tell(event)

    def _held(self, roots: Mapping[bytes, Node]) -> Iterator[Stored]:
        # One state of the tree, so collected at once: 100,000 nodes take 50 ms.
        held = [
            (self._names.get(seed, NO_NAME), [_held_of(node) for node in root.subtree() if node.parent])
            for seed, root in roots.items()
        ]
        return _stored(held)


def _held_of(node: Node) -> _Held:
    on_device, on_host = node.device.pages is not None, node.host.pages is not None
    return on_device, on_host, node.hashes, _hash_before(node), node.segment


def _stored(held: Sequence[tuple[Name, Sequence[_Held]]]) -> Iterator[Stored]:
    # Tier by tier, so that a prompt's nodes follow one another.
    for name, nodes in held:
        for on_device, _, hashes, parent_hash, token_bytes in nodes:
            if on_device:
                yield Stored(Tier.DEVICE, hashes, parent_hash, token_bytes, *name)
    for name, nodes in held:
        for _, on_host, hashes, parent_hash, token_bytes in nodes:
            if on_host:
                yield Stored(Tier.HOST, hashes, parent_hash, token_bytes, *name)


def _hash_before(node: Node) -> bytes | None:
    parent = node.parent
    return parent.hashes[-1] if parent is not None and parent.hashes else None


def _num_pages(event: KVEvent) -> int:
    return len(event.hashes) if isinstance(event, (Stored, Removed)) else 1
