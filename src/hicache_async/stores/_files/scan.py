"""NamespaceScan: tells an index which objects of one namespace there are, in slices, behind everything else."""

from __future__ import annotations

import asyncio
from functools import partial

from ...types import StopToken
from .._lane import Call, Kind, Lanes
from .._names import key_of_name
from .directory import ObjectDirectory, names_in
from .existence import ExistenceIndex

SLICE_NAMES = 512
"""Names of one slice, about a millisecond: so long the interpreter may be busy with what nobody waits for."""


class NamespaceScan:
    """List the directories of a namespace, one small thread job after the other.

    Each slice is started by the end of the one before it, so that whatever else waits for the loop or for
    the threads comes in between. It ends where the index is full, or the lanes are closed.
    """

    def __init__(
        self, lanes: Lanes, index: ExistenceIndex, directory: ObjectDirectory, namespace: str
    ) -> None:
        self._lanes = lanes
        self._index = index
        self._directory = directory
        self._namespace = namespace
        self._shards: list[str] | None = None  # those not looked into yet, once they are known
        self._names: list[str] = []
        self._found: list[str] = []
        self._asked = 0

    def go_on(self) -> None:
        """Start the next slice, if there is one."""
        done = self._shards == [] and not self._names
        if done or self._lanes.closed or not self._index.has_room(SLICE_NAMES):
            return
        if not self._names:
            self._asked = self._index.ask()
        call = Call(Kind.WALK, 1, self._look, StopToken())
        call.settled.add_done_callback(partial(self._slice_ended, call))
        self._lanes.submit(call)

    def _look(self, _item: int) -> None:
        """Find the keys of one slice, in a thread. A name that does not tell its key is left to lookups."""
        if self._shards is None:
            self._shards = self._directory.shards_of(self._namespace)
        while self._shards and not self._names:
            self._names = names_in(self._shards.pop())
        names, self._names = self._names[:SLICE_NAMES], self._names[SLICE_NAMES:]
        self._found = [key for key in map(key_of_name, names) if key is not None]

    def _slice_ended(self, call: Call, settled: asyncio.Future[None]) -> None:
        if settled.cancelled() or settled.exception() is not None or call.count == 0:
            return
        self._index.confirm(self._found, self._asked)
        self.go_on()
