"""Which key is in which slot: a view of the table that each process derives for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from ...core.manifest import is_manifest_key
from .table import Entry, SlotTable, State, state_of

_OVERLAP = 1
"""Changes that are looked at twice: on a machine that reorders stores the count may be seen before the last."""


class _Ready(NamedTuple):
    key: str
    word: int


class SlotIndex:
    """A dict from key to slot and a set of slots for each other state, brought up to date on demand.

    It may be behind the table: what it says is checked against the table by whoever acts on it.
    Whoever holds the table's lock and has refreshed knows it to be exact. Any thread.

    Attributes:
        slots: where each key is.
        manifests: the slots of those keys that are manifests'.
        free, writing: the slots of those states.
        damaged: slots whose record does not belong to their word, or whose key is elsewhere in a newer one.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._seen = -1
        self._ready: dict[int, _Ready] = {}
        self.slots: dict[str, int] = {}
        self.manifests: set[int] = set()
        self.free: set[int] = set()
        self.writing: set[int] = set()
        self.damaged: set[int] = set()

    @property
    def current(self) -> bool:
        """Whether nothing has changed since the last refresh. Never blocks."""
        return self._seen == self._table.num_changes

    def key_in(self, slot: int) -> str | None:
        """Return the key that is ready in ``slot``."""
        ready = self._ready.get(slot)
        return None if ready is None else ready.key

    def refresh(self) -> None:
        """Look at what has changed since the last time."""
        if self.current:
            return
        with self._lock:
            number = self._table.num_changes  # before the words: what changes now is found next time
            since = min(self._seen, number) - _OVERLAP
            self._look(self._table.changed_since(since) if since >= 0 else range(self._table.num_slots))
            self._seen = number

    def rebuild(self) -> None:
        """Look at every slot, whatever was seen before."""
        with self._lock:
            number = self._table.num_changes
            self._look(range(self._table.num_slots))
            self._seen = number

    def note(self, slots: Iterable[int], number: int | None = None) -> None:
        """Look at slots that this process has changed; they are all that changed up to ``number``."""
        with self._lock:
            self._look(slots)
            if number is not None:
                self._seen = number

    def _look(self, slots: Iterable[int]) -> None:
        for slot in slots:
            state = state_of(self._table.words[slot])
            entry = None if state == State.FREE else self._table.entry(slot)
            if entry is not None and state_of(entry.word) == State.READY:
                self._set_ready(slot, entry)
            elif entry is not None and state_of(entry.word) == State.WRITING:
                self._set(slot, self.writing)
            else:
                self._set(slot, self.free if state == State.FREE else self.damaged)

    def _set_ready(self, slot: int, entry: Entry) -> None:
        key = self._table.key_of(slot, entry)
        other = None if key is None else self.slots.get(key)
        # As it was when it was looked at: what it is by now may have nothing to do with this key.
        if key is None or (other is not None and self._ready[other].word > entry.word):
            self._set(slot, self.damaged)
            return
        if other != slot:  # else a lookup at this moment must find it
            self._set(slot, None)
            if other is not None:
                del self._ready[other]
                self.manifests.discard(other)
                self.damaged.add(other)
            self.slots[key] = slot
        self._ready[slot] = _Ready(key, entry.word)
        if is_manifest_key(key):
            self.manifests.add(slot)

    def _set(self, slot: int, kind: set[int] | None) -> None:
        for slots in (self.free, self.writing, self.damaged):
            if slots is kind:
                slots.add(slot)
            else:
                slots.discard(slot)
        self.manifests.discard(slot)
        ready = self._ready.pop(slot, None)
        if ready is not None:
            del self.slots[ready.key]
