"""The store of the model: every call of it is held, answered, failed or lied about when the machine says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from hicache_async.core.manifest import is_manifest_key
from hicache_async.errors import StoreUnavailable
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import StoreWrapper
from hicache_async.types import Stop, StopToken

VERBS = ("count_prefix", "read", "write", "list_keys", "delete")

FAULTS = ("raise", "unavailable", "cancelled", "nonsense", "negative", "short", "corrupt", "late", "lost")
"""What may go wrong with a call:

an error of the system, of the store, or of a task of its own; something that is no count, or no possible one; less
than there is, and less for a reason; a read that does not stop when told; a write, or a look, that claims all and
does nothing.
"""

FOREIGN_KEY = "0" * 64 + "_ukv1-0123456789abcdef_other_0_1"
"""An object of another cache, which nobody here may touch."""

Call = Callable[[StopToken], Awaitable[object]]


@dataclass(slots=True, eq=False)
class Held:
    """A call at the door: it goes on when it hears how."""

    verb: str
    answer: asyncio.Future[str]


class ModelStore(StoreWrapper):
    """A store in memory whose calls the machine decides about, one by one.

    Attributes:
        held: verbs whose calls wait at the door.
        door: the calls that wait, oldest first.
        faults: by verb, what goes wrong with the next call.
        oldest_weights: weights that objects may be of, at least.
        is_unclean: it was cleared in part only, so nobody may use it before it is cleared again.
        num_late: calls that went on when the store was detached.
        num_running: calls that have not ended.
        num_faults: calls that went wrong.
        checked: objects whose bytes were compared already.
        violations: what should never have happened; an exception here would pass for a fault of the store.
        is_lossy: it may lack what a cache believes to be in it.
        is_away: it was detached, and that is over.
        may_enter: how many calls may still come although it is being detached or cleared; None: any number.
    """

    def __init__(self, weights: int, on_read: Callable[[Iterable[bytes]], None]) -> None:
        super().__init__(MemoryStore())
        self._on_read = on_read
        self.held: set[str] = set()
        self.door: list[Held] = []
        self.faults: dict[str, str] = {}
        self.oldest_weights = weights
        self.is_unclean = False
        self.is_away = False
        self.may_enter: int | None = 0
        self.is_lossy = False
        self.num_late = 0
        self.num_running = 0
        self.num_faults = 0
        self.checked: dict[str, bytes] = {}
        self.violations: list[str] = []

    @property
    def objects(self) -> dict[str, bytes]:
        """What is stored, manifests aside."""
        objects = cast("MemoryStore", self.inner)._objects
        return {key: data for key, data in objects.items() if not is_manifest_key(key)}

    def put(self, key: str, data: bytes) -> None:
        """Store an object, as if somebody else had."""
        cast("MemoryStore", self.inner)._objects[key] = data

    def remove(self, key: str) -> None:
        """Let an object go, as if somebody else had deleted it."""
        cast("MemoryStore", self.inner)._remove(key)

    def answer(self, which: int, how: str = "") -> None:
        """Let a call at the door go on, well or with a fault."""
        waiting = [held for held in self.door if not held.answer.done()]
        if waiting:
            waiting[which % len(waiting)].answer.set_result(how)
            self.num_late += self.is_away

    def open(self) -> None:
        """Hold nothing and do everything right from now on."""
        self.held.clear()
        self.faults.clear()
        for _ in range(len(self.door)):
            self.answer(0)

    async def count_prefix(self, keys: Sequence[str]) -> int:
        count = self._decided("count_prefix", len(keys), lambda stop: self.inner.count_prefix(keys))
        return cast("int", await count)

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        if keys and all(map(is_manifest_key, keys)):
            return await self.inner.read(keys, into, stop)
        count = self._decided("read", len(keys), lambda own_stop: self._read(keys, into, own_stop), stop)
        return cast("int", await count)

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        if keys and all(map(is_manifest_key, keys)):
            return await self.inner.write(keys, pages)
        count = self._decided("write", len(keys), lambda stop: self.inner.write(keys, pages))
        return cast("int", await count)

    async def list_keys(self) -> Sequence[str]:
        return cast("Sequence[str]", await self._decided("list_keys", 0, lambda stop: self._list()))

    async def delete(self, keys: Sequence[str]) -> int:
        inner = cast("MemoryStore", self.inner)
        return cast("int", await self._decided("delete", len(keys), lambda stop: inner.delete(keys)))

    async def aclose(self) -> None:
        self.violations.append("a store was closed by a cache that does not own it")

    async def _decided(self, verb: str, limit: int, call: Call, stop: StopToken | None = None) -> object:
        self.calls[verb] += 1
        if self.is_away:
            self.violations.append(f"{verb} reached a store that was detached")
        if self.may_enter is not None and verb in ("count_prefix", "read", "write"):
            self.may_enter -= 1
            if self.may_enter < 0:
                self.violations.append(f"{verb} reached a store that was taken away")
        self.num_running += 1
        stop = stop or StopToken()
        try:
            how = self.faults.pop(verb, "")
            if not how and verb in self.held:
                how = await self._wait_at_door(verb, stop)
            return await self._answered(verb, limit, call, stop, how)
        finally:
            self.num_running -= 1

    async def _wait_at_door(self, verb: str, stop: StopToken) -> str:
        held = Held(verb, asyncio.get_running_loop().create_future())
        self.door.append(held)
        stop.job_started()
        try:
            return await held.answer
        finally:
            self.door.remove(held)
            stop.job_ended()

    async def _answered(self, verb: str, limit: int, call: Call, stop: StopToken, how: str) -> object:
        self.num_faults += bool(how)
        match how:
            case "raise":
                raise OSError(f"no {verb} today")
            case "unavailable":  # it was done, and the answer was lost
                await call(stop)
                raise StoreUnavailable(f"{verb}: not connected")
            case "cancelled":
                raise asyncio.CancelledError(f"a task behind {verb} was cancelled")
            case "nonsense":
                return None
            case "negative":
                return -1
            case "lost" if verb in ("write", "count_prefix"):
                self.is_lossy = True
                return limit
            case "late" if verb == "read":
                return await call(StopToken())
        count = await call(stop)
        if how in ("short", "corrupt") and verb in ("count_prefix", "read", "write"):
            stop.reason = Stop.CORRUPT if how == "corrupt" else None
            return max(0, cast("int", count) - 1)
        return count

    async def _read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        count = await self.inner.read(keys, into, stop)
        self._on_read(bytes.fromhex(key[:64]) for key in keys[:count])
        return count

    async def _list(self) -> Sequence[str]:
        return list(self.objects)
