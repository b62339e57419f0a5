"""The table of a segment: what is in each slot. Shared by processes, and the only truth.

A slot has three things, each in a column of its own:

    word     uint64: number of the change that made it so * 4 + state; 0: free from the start
    stamp    uint64: when it was last written or used, nanoseconds since 1970
    record   512 bytes: checksum of the rest, seeded with the word; then checksum of the payload (xxh3-128),
             payload bytes, writer (boot, pid namespace, start, pid), key bytes, and the key

A key of more than 448 bytes lies behind the payload, and its record has the key's xxh3-128 instead: so all of a
key is checked before it is believed.

Whoever changes words and records holds the segment's lock; stamps are set by anybody. Nobody who reads
holds anything: a record is believed where its checksum is right for the word read before it. So a record that
is being changed, was torn by a death, or is older than its word after a crash of the machine, is none. The
count of changes is written last: who has seen it sees all that it counts.
"""

from __future__ import annotations

import contextlib
import enum
import os
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from .._temp import UNSEEN_MAX_AGE_S, Writer, is_alive
from .segment import CHANGES, HOLDER, RECORD_NBYTES, Segment

_FIELDS = struct.Struct("<16sQQQQII448s")
_CHECK = struct.Struct("<Q")
INLINE_KEY_NBYTES = 448
_KEY_CHECK_NBYTES = 16
_STATE_BITS = 2
_STATE_MASK = 3
_MAX_CHANGES = 1 << 60  # of a count that is not damaged


class State(enum.IntEnum):
    """What a slot is."""

    FREE = 0
    WRITING = 1
    READY = 2


def state_of(word: int) -> int:
    """Return the state in a word; damage can make it one that is none."""
    return word & _STATE_MASK


class Owner(NamedTuple):
    """Who writes a slot, as numbers."""

    boot: int
    pid_namespace: int
    start: int
    pid: int


class Entry(NamedTuple):
    """A record that is right for ``word``.

    Attributes:
        inline_key: the key, or what a long one is checked by; see the module.
    """

    word: int
    checksum: bytes
    nbytes: int
    owner: Owner
    key_nbytes: int
    inline_key: bytes


class Changes:
    """One change of the table, by whoever holds its lock: any number of slots, one number.

    Attributes:
        torn: whether the last holder of the lock died in it.
    """

    def __init__(self, table: SlotTable, torn: bool) -> None:
        self._table = table
        self.torn = torn
        self.number = table.num_changes + 1
        if torn or self.number > _MAX_CHANGES:  # its number was used, or the count is damaged
            self.outnumber_all()

    def outnumber_all(self) -> None:
        """Take a number above that of every word: a crash of the machine may have left an older count."""
        count = self._table.num_changes
        self.number = max(count if count < _MAX_CHANGES else 0, self._table.highest_number()) + 1

    def reserve(self, slot: int) -> int:
        """Give a slot to this process to write into; returns its word."""
        return self._set(slot, State.WRITING, b"", 0, b"")

    def publish(self, slot: int, key: bytes, nbytes: int, checksum: bytes) -> None:
        """Declare a slot ready."""
        self._set(slot, State.READY, key, nbytes, checksum)

    def free(self, slot: int) -> None:
        """Take a slot back."""
        self._table.words[slot] = self.number << _STATE_BITS | State.FREE

    def _set(self, slot: int, state: State, key: bytes, nbytes: int, checksum: bytes) -> int:
        table = self._table
        word = self.number << _STATE_BITS | state
        inline_key = key if len(key) <= INLINE_KEY_NBYTES else xxhash.xxh3_128_digest(key)
        fields = _FIELDS.pack(checksum, nbytes, *table.owner, len(key), inline_key)
        check = _CHECK.pack(xxhash.xxh3_64_intdigest(fields, word))
        table.set_record(slot, check + fields)
        table.words[slot] = word
        table.touch(slot)
        return word


class SlotTable:
    """The table of one segment, in this process.

    Attributes:
        words: of all slots; read without a lock.
        owner: this process.
    """

    def __init__(self, segment: Segment) -> None:
        geometry = segment.geometry
        self.num_slots = geometry.num_slots
        self._segment = segment
        self._header = segment.header
        whole = memoryview(segment.mapping)
        self.words = whole[geometry.words_at :][: 8 * self.num_slots].cast("Q")
        self._stamps = whole[geometry.stamps_at :][: 8 * self.num_slots].cast("Q")
        self._records = whole[geometry.records_at :][: RECORD_NBYTES * self.num_slots]
        self._word_array: NDArray[np.uint64] = np.frombuffer(self.words, np.uint64)
        self._stamp_array: NDArray[np.uint64] = np.frombuffer(self._stamps, np.uint64)
        self._writer = Writer.current()
        boot, pid_namespace = (xxhash.xxh3_64_intdigest(part.encode()) for part in self._writer[:2])
        self.owner = Owner(boot, pid_namespace, self._writer.start, self._writer.pid)

    # -- without the lock

    @property
    def num_changes(self) -> int:
        """How often the table has been changed."""
        return self._header[CHANGES]

    def entry(self, slot: int) -> Entry | None:
        """Return what is known of a slot; None: nothing, for its record does not belong to its word."""
        word = self.words[slot]
        start = slot * RECORD_NBYTES
        record = bytes(self._records[start : start + RECORD_NBYTES])
        if _CHECK.unpack_from(record)[0] != xxhash.xxh3_64_intdigest(record[_CHECK.size :], word):
            return None
        checksum, nbytes, boot, namespace, begun, pid, key_nbytes, key = _FIELDS.unpack_from(
            record, _CHECK.size
        )
        inline_nbytes = key_nbytes if key_nbytes <= INLINE_KEY_NBYTES else _KEY_CHECK_NBYTES
        owner = Owner(boot, namespace, begun, pid)
        return Entry(word, checksum, nbytes, owner, key_nbytes, key[:inline_nbytes])

    def key_of(self, slot: int, entry: Entry) -> str | None:
        """Return the key of a ready slot; None: it cannot be read, or is not the one that was written."""
        raw_key: bytes | bytearray = entry.inline_key
        if entry.key_nbytes > INLINE_KEY_NBYTES:
            raw_key = bytearray(entry.key_nbytes)
            try:
                self._segment.get(slot, memoryview(raw_key), entry.nbytes)
            except OSError:
                return None
            if xxhash.xxh3_128_digest(raw_key) != entry.inline_key:
                return None
        try:
            return raw_key.decode("utf-8", "surrogatepass")
        except UnicodeError:
            return None

    def changed_since(self, number: int) -> list[int]:
        """Return the slots that changed after change ``number``, in order."""
        highest = np.uint64(min(number, _MAX_CHANGES) << _STATE_BITS | _STATE_MASK)
        changed: list[int] = np.flatnonzero(self._word_array > highest).tolist()
        return changed

    def slots_in(self, state: State) -> list[int]:
        """Return the slots of one state, believed or not, in order."""
        slots: list[int] = np.flatnonzero((self._word_array & np.uint64(_STATE_MASK)) == state).tolist()
        return slots

    def touch(self, slot: int) -> None:
        """Make a slot the most recently used one."""
        self._stamps[slot] = time.time_ns()

    def stamp(self, slot: int) -> int:
        """Return when a slot was last written or used, in nanoseconds since 1970."""
        return self._stamps[slot]

    def least_recently_used(self, num_slots: int) -> list[tuple[int, int]]:
        """Return (stamp, slot) of at most ``num_slots`` ready slots, oldest first.

        A stamp of the future is damaged, or the clock was set back: it makes a slot the oldest.
        """
        ready = np.flatnonzero((self._word_array & np.uint64(_STATE_MASK)) == State.READY)
        stamps = self._stamp_array[ready]
        ages = np.where(stamps > np.uint64(time.time_ns()), np.uint64(0), stamps)
        if num_slots < len(ready):
            first = np.argpartition(ages, num_slots)[:num_slots]
            ready, stamps, ages = ready[first], stamps[first], ages[first]
        order = np.argsort(ages, kind="stable")
        return list(zip(stamps[order].tolist(), ready[order].tolist(), strict=True))

    def is_abandoned(self, slot: int, owner: Owner) -> bool:
        """Return whether the writer of a slot is dead, or cannot be seen from here and has been silent long."""
        if owner == self.owner:
            return False
        if owner.boot != self.owner.boot:
            return True
        if owner.pid_namespace != self.owner.pid_namespace:
            return time.time_ns() - self.stamp(slot) > UNSEEN_MAX_AGE_S * 1e9
        return not is_alive(self._writer._replace(pid=owner.pid, start=owner.start))

    # -- with the lock

    @contextlib.contextmanager
    def changing(self) -> Iterator[Changes]:
        """Hold the lock to change slots; what was changed counts when this ends, whatever ends it.

        Raises: StoreUnavailable: another process keeps the lock.
        """
        with self._segment.locked():
            changes = Changes(self, torn=self._header[HOLDER] != 0)
            self._header[HOLDER] = os.getpid()
            try:
                yield changes
            finally:
                self._header[CHANGES] = changes.number
                self._header[HOLDER] = 0

    def highest_number(self) -> int:
        """Return the number of the last change that a word tells of, whatever the count says."""
        numbers = self._word_array >> np.uint64(_STATE_BITS)
        return int(numbers[numbers <= np.uint64(_MAX_CHANGES)].max(initial=0))

    def set_record(self, slot: int, record: bytes) -> None:
        """Write a record, before the word that it belongs to."""
        self._records[slot * RECORD_NBYTES :][:RECORD_NBYTES] = record
