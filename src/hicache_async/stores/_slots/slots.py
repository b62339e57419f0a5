"""Slots: objects in the slots of a segment, least recently used out first. Blocking, for threads.

    a write   under the lock: slots for the pages that are new, marked as this process's
              without it:     payloads are copied, checksums computed
              under the lock: ready
    a read    without the lock: the record, the payload, then its checksum

A slot that is replaced while it is read fails its checksum: a miss, never wrong bytes. A writer that dies
leaves slots that are marked as a dead process's, which whoever needs room takes.
"""

from __future__ import annotations

import contextlib
import enum
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import xxhash

from ...errors import StoreUnavailable
from ...types import ObjectStat
from .._names import key_bytes
from .index import SlotIndex
from .segment import Segment
from .table import INLINE_KEY_NBYTES, Changes, Entry, SlotTable, State, state_of

_MIN_VICTIMS = 256
"""The oldest slots are looked for so many at once: to find one takes as long."""

Page = tuple[str, memoryview]


class SlotFault(enum.StrEnum):
    """Why an object could not be read, or ("too_large", "no_room", "taken") written."""

    MISSING = "missing"
    REPLACED = "replaced"
    SIZE = "size"
    ENTRY = "entry"
    CHECKSUM = "checksum"
    UNREADABLE = "unreadable"
    TOO_LARGE = "too_large"
    NO_ROOM = "no_room"
    TAKEN = "taken"
    STOPPED = "stopped"


class Draft(NamedTuple):
    """A page and the slot that it is written into; ``slot`` -1: its key is present."""

    key: str
    page: memoryview
    slot: int
    word: int


class Place(NamedTuple):
    """Where a key is; ``entry`` None: the record does not belong to the word."""

    slot: int
    word: int
    entry: Entry | None


class Written(NamedTuple):
    """How many pages of a batch are stored, consecutive from 0, and why no more."""

    num_pages: int
    fault: SlotFault | None


class Slots:
    """The objects of one segment, for any number of threads.

    Args:
        counts: slots taken from objects ("evicted"), from dead writers ("abandoned"), and for damage ("damaged").

    Attributes:
        index: which keys there are, as far as this process has looked.

    Raises: StoreUnavailable: another process keeps the segment locked.
    """

    def __init__(self, segment: Segment, counts: Counter[str]) -> None:
        self._segment = segment
        self._table = SlotTable(segment)
        self.index = SlotIndex(self._table)
        self._counts = counts  # changed under the lock
        self._unpublished: deque[Draft] = deque()
        self._victims: deque[tuple[int, int]] = deque()  # used under the lock
        self.sweep()

    @property
    def slot_nbytes(self) -> int:
        """What the largest object takes."""
        return self._segment.geometry.slot_nbytes

    def check(self) -> None:
        """Look whether the table is there, before it is touched.

        Raises: StoreUnavailable: the file was cut.
        """
        self._segment.check()

    # -- reading

    def read(self, key: str, into: memoryview) -> SlotFault | None:
        """Fill ``into`` with the payload of ``key``; returns None, or why its content is not to be used."""
        place = self._find(key)
        if place is None:
            return SlotFault.MISSING
        slot, word, entry = place
        if entry is None:
            return self._judge(slot, word, SlotFault.ENTRY)
        if entry.nbytes != into.nbytes:
            return SlotFault.SIZE
        self._table.touch(slot)
        try:
            self._segment.get(slot, into)
        except OSError:
            return SlotFault.UNREADABLE
        if xxhash.xxh3_128_digest(into) != entry.checksum:
            return self._judge(slot, word, SlotFault.CHECKSUM)
        return None

    def stat(self, key: str) -> ObjectStat | None:
        """Return the payload bytes of ``key`` and when it was last used; None: it is not there."""
        place = self._find(key)
        if place is None or place.entry is None:
            return None
        return ObjectStat(place.entry.nbytes, self._table.stamp(place.slot) / 1e9)

    def keys(self) -> list[str]:
        """Return all keys."""
        self.index.refresh()
        return list(self.index.slots)

    def _find(self, key: str) -> Place | None:
        """Return where ``key`` is ready, after a look at what has changed if it is not where it was."""
        for refreshed in (False, True):
            exact = refreshed or self.index.current
            slot = self.index.slots.get(key)
            if slot is not None:
                word = self._table.words[slot]
                entry = self._table.entry(slot)
                if entry is None and exact:
                    return Place(slot, word, None)
                if (
                    entry is not None
                    and state_of(word) == State.READY
                    and self._table.key_of(slot, entry) == key
                ):
                    return Place(slot, word, entry)
            if exact:
                break
            self.index.refresh()
        return None

    def _judge(self, slot: int, word: int, fault: SlotFault) -> SlotFault:
        """Say what became of a slot that was not whole: replaced meanwhile, else it is damaged, and freed."""
        with contextlib.suppress(StoreUnavailable), self._changing() as changes:
            if self._table.words[slot] == word:
                self._free(changes, slot)
                self._counts["damaged"] += 1
                return fault
        return SlotFault.REPLACED

    # -- writing

    def write(self, pages: Sequence[Page], own: Collection[str], stopped: Callable[[], bool]) -> Written:
        """Store pages in order, as far as it goes.

        Args:
            own: keys that no room is made from.
            stopped: looked at between pages.
        Raises: OSError: the medium failed, at the first page.
        """
        drafts, fault = self._present(pages), None
        if len(drafts) < len(pages):
            drafts, fault = self._reserve(pages, own)
        checksums: list[bytes] = []
        error = None
        try:
            for draft in drafts:
                if stopped():
                    fault = SlotFault.STOPPED
                    break
                checksums.append(self._copy(draft))
        except OSError as failure:
            fault, error = SlotFault.UNREADABLE, failure
        finally:
            num_stored = self._publish(drafts, checksums)
        if error is not None and num_stored == 0:
            raise error
        return Written(num_stored, SlotFault.TAKEN if num_stored < len(checksums) else fault)

    def _present(self, pages: Sequence[Page]) -> list[Draft]:
        """Touch the pages that are present, up to the first that is not, without the lock."""
        drafts = []
        for key, page in pages:
            slot = self._whole(key, page.nbytes)
            if slot is None:
                break
            self._table.touch(slot)
            drafts.append(Draft(key, page, -1, 0))
        return drafts

    def _whole(self, key: str, nbytes: int) -> int | None:
        """Return the slot of ``key`` where its object has ``nbytes``."""
        place = self._find(key)
        if place is None or place.entry is None or place.entry.nbytes != nbytes:
            return None
        return place.slot

    def _reserve(self, pages: Sequence[Page], own: Collection[str]) -> tuple[list[Draft], SlotFault | None]:
        drafts: list[Draft] = []
        with self._changing() as changes:
            if len(self.index.free) < len(pages):
                self._reclaim(changes)
            for key, page in pages:
                slot = self._whole(key, page.nbytes)
                if slot is not None:
                    self._table.touch(slot)
                    drafts.append(Draft(key, page, -1, 0))
                    continue
                if not self._fits(key, page):
                    return drafts, SlotFault.TOO_LARGE
                room = self._take(changes, own)
                if room is None:
                    return drafts, SlotFault.NO_ROOM
                drafts.append(Draft(key, page, room, changes.reserve(room)))
                self.index.note([room])
        return drafts, None

    def _fits(self, key: str, page: memoryview) -> bool:
        raw_key = key_bytes(key)
        long_nbytes = len(raw_key) if len(raw_key) > INLINE_KEY_NBYTES else 0
        return page.nbytes + long_nbytes <= self.slot_nbytes

    def _copy(self, draft: Draft) -> bytes:
        if draft.slot < 0:
            return b""
        checksum = xxhash.xxh3_128_digest(draft.page)
        self._segment.put(draft.slot, draft.page)
        raw_key = key_bytes(draft.key)
        if len(raw_key) > INLINE_KEY_NBYTES:
            self._segment.put(draft.slot, memoryview(raw_key), draft.page.nbytes)
        return checksum

    def _publish(self, drafts: Sequence[Draft], checksums: Sequence[bytes]) -> int:
        """Make the copied ones ready and give the other slots back; returns how many are stored."""
        num_stored = len(checksums)
        if all(draft.slot < 0 for draft in drafts):
            return num_stored
        try:
            with self._changing() as changes:
                for number, draft in enumerate(drafts):
                    if draft.slot < 0:
                        continue
                    if self._table.words[draft.slot] != draft.word:  # taken: we were thought dead
                        num_stored = min(num_stored, number)
                    elif number >= len(checksums):
                        self._free(changes, draft.slot)
                    else:
                        self._publish_one(changes, draft, checksums[number])
        except StoreUnavailable:
            self._unpublished.extend(drafts)
            raise
        return num_stored

    def _publish_one(self, changes: Changes, draft: Draft, checksum: bytes) -> None:
        present = self._whole(draft.key, draft.page.nbytes)
        if present is not None:
            self._table.touch(present)  # another writer was faster
            self._free(changes, draft.slot)
            return
        other = self.index.slots.get(draft.key)
        changes.publish(draft.slot, key_bytes(draft.key), draft.page.nbytes, checksum)
        self.index.note([draft.slot])
        if other is not None:
            self._free(changes, other)

    # -- making room, under the lock

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Changes]:
        """Hold the lock, with an index that is exact; a table that somebody died over is looked through."""
        with self._table.changing() as changes:
            if changes.torn:
                self.index.rebuild()
                self._reclaim(changes)
            else:
                self.index.refresh()
            yield changes
        self.index.note((), changes.number)

    def _free(self, changes: Changes, slot: int) -> None:
        changes.free(slot)
        self.index.note([slot])

    def _take(self, changes: Changes, own: Collection[str]) -> int | None:
        if not self.index.free and not self._evict(changes, own):
            return None
        return self.index.free.pop()

    def _reclaim(self, changes: Changes) -> None:
        """Free the slots of dead writers, those we could not get the lock for, and damaged ones."""
        while self._unpublished:
            draft = self._unpublished.pop()
            if draft.slot >= 0 and self._table.words[draft.slot] == draft.word:
                self._free(changes, draft.slot)
        for slot in tuple(self.index.damaged):
            self._free(changes, slot)
            self._counts["damaged"] += 1
        alive = {self._table.owner}
        for slot in tuple(self.index.writing):
            entry = self._table.entry(slot)
            if entry is not None and entry.owner in alive:
                continue
            if entry is None or self._table.is_abandoned(slot, entry.owner):
                self._free(changes, slot)
                self._counts["abandoned"] += 1
            else:
                alive.add(entry.owner)

    def _evict(self, changes: Changes, own: Collection[str]) -> bool:
        """Free the page's slot least recently used; returns False where there is none but ``own`` and manifests.

        Of the oldest slots found before, one whose stamp has not changed is still the oldest: stamps only rise.
        """
        spared: list[tuple[int, int]] = []
        num_slots = _MIN_VICTIMS + len(own) + len(self.index.manifests)
        for looked in (False, True):
            if looked:
                self._victims.extend(self._table.least_recently_used(num_slots))
                spared.clear()
            while self._victims:
                stamp, slot = self._victims.popleft()
                key = self.index.key_in(slot)
                if key is None or slot in self.index.manifests or self._table.stamp(slot) != stamp:
                    continue
                if key in own:
                    spared.append((stamp, slot))
                    continue
                self._victims.extendleft(reversed(spared))
                self._free(changes, slot)
                self._counts["evicted"] += 1
                return True
        return False

    # -- the rest

    def delete(self, keys: Sequence[str]) -> int:
        """Delete the keys that exist; returns how many did."""
        with self._changing() as changes:
            found = [self.index.slots[key] for key in dict.fromkeys(keys) if key in self.index.slots]
            for slot in found:
                self._free(changes, slot)
        return len(found)

    def sweep(self) -> dict[str, int]:
        """Look through the whole table and free what nobody can use; returns how many slots, by why."""
        with self._changing() as changes:
            before = self._counts.copy()
            changes.outnumber_all()
            self.index.rebuild()
            self._reclaim(changes)
            return {name: self._counts[name] - before[name] for name in ("abandoned", "damaged")}
