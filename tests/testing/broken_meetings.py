"""Broken stores: what is wrong is found when calls meet, are stopped or are cancelled."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hicache_async.errors import StoreUnavailable
from hicache_async.stores import MemoryStore
from hicache_async.types import StopToken
from tests.testing.caught_by import caught_by
from tests.testing.shelf_store import ShelfStore

# Visibility, and races


class WritesInPlace(ShelfStore):
    """An object is there when its first half is."""

    async def publish(self, key: str, payload: bytes) -> None:
        content = self.encode(key, payload)
        path = self.directory / self.name(key)
        path.write_bytes(content[: len(content) // 2])
        await asyncio.sleep(0.005)
        path.write_bytes(content)


@caught_by(
    "visibility.an_object_is_seen_whole_or_not_at_all",
    "visibility.another_instance_sees_it_whole_or_not_at_all",
    "processes.a_killed_process_leaves_nothing_half_done",
)
class WritesInPlaceAndTrusts(WritesInPlace):
    """And is served as it is, with zeros for what is missing."""

    def load(self, key: str) -> bytes | None:
        path = self.directory / self.name(key)
        content = path.read_bytes() if path.is_file() else None
        if content is None:
            return None
        head = 36 + len(key.encode("utf-8", "surrogatepass"))
        return content[head:].ljust(1 << 18 if len(content) > 5000 else 4096, b"\0")


@caught_by(
    "races.writers_of_one_key",
    "races.writers_of_overlapping_batches",
    "races.readers_meet_writers",
    "processes.processes_write_the_same_keys_at_once",
)
class OneWriterOnly(ShelfStore):
    """A lock in the directory keeps others out, and they raise."""

    async def publish(self, key: str, payload: bytes) -> None:
        lock = self.directory / "lock.tmp"
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
        await asyncio.sleep(0.001)
        await super().publish(key, payload)
        lock.unlink()


@caught_by("races.writers_of_one_key")
class OneTempName(ShelfStore):
    async def publish(self, key: str, payload: bytes) -> None:
        temp = self.directory / f"{self.name(key)}.tmp"
        temp.write_bytes(self.encode(key, payload))
        await asyncio.sleep(0)
        temp.rename(self.directory / self.name(key))


@caught_by("races.deletes_meet_reads_and_writes")
class IsSurprisedByADelete(ShelfStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        there = [self.has(key) for key in keys]
        count = await super().read(keys, into, stop)
        if count < len(keys) and there[count] and not stop.stopped and not self.has(keys[count]):
            raise FileNotFoundError(keys[count])
        return count


@caught_by("visibility.instances_see_each_other", "processes.processes_see_each_other")
class LooksOnceOnly(ShelfStore):
    """What is in the directory is found out when it is opened."""

    def __init__(self, directory: Path, max_bytes: int | None = None) -> None:
        super().__init__(directory, max_bytes)
        self._known = {path.name for path in directory.iterdir()}

    def has(self, key: str) -> bool:
        return self.name(key) in self._known

    def load(self, key: str) -> bytes | None:
        return super().load(key) if self.has(key) else None

    async def publish(self, key: str, payload: bytes) -> None:
        await super().publish(key, payload)
        self._known.add(self.name(key))


@caught_by("visibility.instances_see_what_another_deleted", "damage.cut_is_a_miss")
class RemembersForEver(ShelfStore):
    """What was once there is there."""

    def __init__(self, directory: Path, max_bytes: int | None = None) -> None:
        super().__init__(directory, max_bytes)
        self._known: set[str] = set()

    def has(self, key: str) -> bool:
        if super().has(key):
            self._known.add(key)
        return key in self._known

    def load(self, key: str) -> bytes | None:
        self.has(key)
        return super().load(key)


# The stop token


@caught_by("stopping.a_stopped_read_reads_nothing_more", "stopping.a_read_looks_between_its_pages")
class NeverLooks(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        return await super().read(keys, into, StopToken())


@caught_by("stopping.a_read_looks_between_its_pages")
class LooksBeforeItBegins(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        return 0 if stop.stopped else await super().read(keys, into, StopToken())


@caught_by("stopping.a_read_is_stopped_from_outside")
class CountsThePageInHand(ShelfStore):
    """Stopped in the middle of a page it counts that one, too."""

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        count = await super().read(keys, into, stop)
        return count + 1 if stop.stopped and count < len(keys) else count


@caught_by("stopping.jobs_are_over_when_a_read_is")
class EndsNoJobAfterAMiss(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        stop.job_started()
        count = await super().read(keys, into, stop)
        if count == len(keys):
            stop.job_ended()
        return count


@caught_by("stopping.jobs_are_over_when_a_read_is")
class EndsAJobTwice(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        count = await super().read(keys, into, stop)
        stop.job_ended()
        return count


@caught_by("stopping.quiet_buffers_are_left_alone")
class FillsBuffersLater(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        count = await super().read(keys, into, stop)
        if keys:
            asyncio.get_running_loop().call_soon(into[0].__setitem__, 0, into[0][0])
        return count


# Cancellation


@caught_by("cancellation.read_is_cancelled_at_every_await")
class SwallowsTheCancel(ShelfStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        try:
            return await super().read(keys, into, stop)
        except asyncio.CancelledError:
            return 0


@caught_by("cancellation.read_is_cancelled_at_every_await")
class TurnsTheCancelIntoAFault(ShelfStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        try:
            return await super().read(keys, into, stop)
        except asyncio.CancelledError:
            raise StoreUnavailable("somebody hung up") from None


@caught_by(
    "cancellation.write_is_cancelled_at_every_await", "cancellation.count_prefix_is_cancelled_at_every_await"
)
class KeepsItsLock(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self._lock = asyncio.Lock()

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        await self._lock.acquire()
        await asyncio.sleep(0)
        count = await super().write(keys, pages)
        self._lock.release()
        return count

    async def count_prefix(self, keys: Sequence[str]) -> int:
        await self._lock.acquire()
        await asyncio.sleep(0)
        count = await super().count_prefix(keys)
        self._lock.release()
        return count


@caught_by("cancellation.read_is_cancelled_at_every_await")
class ForgetsItsThread(MemoryStore):
    """A thread fills the buffers, whoever has been cancelled meanwhile, and the token does not say so."""

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        objects = [self._objects.get(key) for key in keys]
        return await asyncio.to_thread(_fill_slowly, objects, into, stop)


def _fill_slowly(objects: list[bytes | None], into: Sequence[memoryview], stop: StopToken) -> int:
    for count, (payload, buffer) in enumerate(zip(objects, into, strict=True)):
        if stop.stopped or payload is None or len(payload) != buffer.nbytes:
            return count
        threading.Event().wait(0.01)
        buffer[:] = payload
    return len(into)


_TASKS: set[asyncio.Future[Any]] = set()
"""Keeps tasks alive that nobody waits for."""


@caught_by("cancellation.delete_is_cancelled_at_every_await")
class LeavesATaskWhenCancelled(ShelfStore):
    async def delete(self, keys: Sequence[str]) -> int:
        try:
            await asyncio.sleep(0)
            return await super().delete(keys)
        except asyncio.CancelledError:
            _TASKS.add(asyncio.ensure_future(asyncio.Event().wait()))
            raise


def _swallowing(verb: str, result: Any) -> None:
    """Make a store whose ``verb`` answers its cancel with a result."""

    class Swallows(ShelfStore):
        pass

    async def call(self: ShelfStore, *arguments: Any) -> Any:
        try:
            await asyncio.sleep(0)
            return await getattr(ShelfStore, verb)(self, *arguments)
        except asyncio.CancelledError:
            return result

    setattr(Swallows, verb, call)
    Swallows.__name__ = f"SwallowsTheCancelOf_{verb}"
    caught_by(f"cancellation.{verb}_is_cancelled_at_every_await")(Swallows)


_swallowing("list_keys", [])
_swallowing("list_namespaces", [])
_swallowing("stat", [None] * 4)
_swallowing("sweep", {})
_swallowing("delete", 0)
