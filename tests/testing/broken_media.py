"""Broken stores: what is wrong are limits, restarts, bad bytes, the end, or the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hicache_async.errors import StoreUnavailable
from hicache_async.stores import MemoryStore
from hicache_async.types import StopToken
from tests.testing.caught_by import caught_by
from tests.testing.shelf_store import ShelfStore

_TASKS: set[asyncio.Future[Any]] = set()
"""Keeps tasks alive that nobody waits for."""


# Capacity


@caught_by("capacity.the_limit_holds_after_every_write", "capacity.the_limit_holds_with_writers_at_once")
class HasNoLimit(ShelfStore):
    def make_room(self, nbytes: int, own: Sequence[str]) -> bool:
        return True


@caught_by("capacity.the_limit_holds_after_every_write")
class RefusesWhenFull(ShelfStore):
    def make_room(self, nbytes: int, own: Sequence[str]) -> bool:
        held = sum(path.stat().st_size for path in self._files())
        return self.max_bytes is None or held + nbytes <= self.max_bytes


@caught_by("capacity.what_was_read_last_stays")
class FirstInFirstOut(MemoryStore):
    def _touch(self, key: str) -> None:
        pass


@caught_by("capacity.an_oversize_object_is_refused_and_harmless")
class EmptiesItselfForAGiant(ShelfStore):
    def make_room(self, nbytes: int, own: Sequence[str]) -> bool:
        if self.max_bytes is not None and nbytes > self.max_bytes:
            for path in self._files():
                path.unlink()
        return super().make_room(nbytes, own)


@caught_by("capacity.an_oversize_object_is_refused_and_harmless")
class KeepsAGiant(ShelfStore):
    def make_room(self, nbytes: int, own: Sequence[str]) -> bool:
        is_giant = self.max_bytes is not None and nbytes > self.max_bytes
        return is_giant or super().make_room(nbytes, own)


@caught_by("capacity.deleted_room_is_free_again")
class DeletedRoomIsLost(MemoryStore):
    async def delete(self, keys: Sequence[str]) -> int:
        nbytes = self._nbytes
        count = await super().delete(keys)
        self._nbytes = nbytes
        return count


@caught_by("capacity.a_reopened_store_keeps_its_limit")
class CountsWhatItWrote(ShelfStore):
    """The limit is for what this instance has written."""

    def __init__(self, directory: Path, max_bytes: int | None = None) -> None:
        super().__init__(directory, max_bytes)
        self._old = {path.name for path in directory.iterdir()}

    def _files(self) -> list[Path]:
        return [path for path in super()._files() if path.name not in self._old]

    async def list_keys(self) -> Sequence[str]:
        return [self._key_of(path) for path in super()._files()]


@caught_by("capacity.a_batch_beyond_the_limit_keeps_its_beginning")
class EvictsWhatItJustWrote(ShelfStore):
    def make_room(self, nbytes: int, own: Sequence[str]) -> bool:
        return super().make_room(nbytes, ())


# Restart, and damage


@caught_by("restart.everything_is_found_again", "restart.a_reopened_store_lists_what_it_has")
class ClearsOnOpening(ShelfStore):
    def __init__(self, directory: Path, max_bytes: int | None = None) -> None:
        super().__init__(directory, max_bytes)
        for path in directory.iterdir():
            path.unlink()


@caught_by("restart.deleted_stays_deleted")
class DeletesInMemoryOnly(ShelfStore):
    def __init__(self, directory: Path, max_bytes: int | None = None) -> None:
        super().__init__(directory, max_bytes)
        self._deleted: set[str] = set()

    async def delete(self, keys: Sequence[str]) -> int:
        count = sum(self.has(key) for key in dict.fromkeys(keys))
        self._deleted.update(keys)
        return count

    def has(self, key: str) -> bool:
        return key not in self._deleted and super().has(key)

    def load(self, key: str) -> bytes | None:
        return super().load(key) if self.has(key) else None

    async def publish(self, key: str, payload: bytes) -> None:
        self._deleted.discard(key)
        await super().publish(key, payload)


@caught_by("restart.a_write_that_was_cut_off_is_whole_or_absent")
class CommitsBeforeItWrites(ShelfStore):
    """The index, which survives, has keys whose objects do not."""

    def has(self, key: str) -> bool:
        return (self.directory / f"{self.name(key)}.index").exists()

    async def publish(self, key: str, payload: bytes) -> None:
        (self.directory / f"{self.name(key)}.index").touch()
        await asyncio.sleep(0)
        await super().publish(key, payload)


class Trusts(ShelfStore):
    """Serves a file as it is."""

    def load(self, key: str) -> bytes | None:
        path = self.directory / self.name(key)
        if not path.is_file():
            return None
        return path.read_bytes()[36 + len(key.encode("utf-8", "surrogatepass")) :]


@caught_by(
    "damage.flip_middle_is_a_miss",
    "damage.flip_last_is_a_miss",
    "damage.zeros_is_a_miss",
    "damage.swap_is_a_miss",
)
class VerifiesNothing(Trusts):
    pass


@caught_by("damage.cut_is_a_miss", "damage.empty_is_a_miss", "damage.extend_is_a_miss")
class MissesAndKeeps(ShelfStore):
    """A damaged object is a miss, and stays: it is counted, and never written again."""

    def load(self, key: str) -> bytes | None:
        path = self.directory / self.name(key)
        content = path.read_bytes() if path.is_file() else None
        payload = super().load(key)
        if payload is None and content is not None:
            path.write_bytes(content)
        return payload


@caught_by("damage.swap_is_a_miss")
class DoesNotAskWhoseItIs(ShelfStore):
    """The checksum is right, so the object must be."""

    def encode(self, key: str, payload: bytes) -> bytes:
        return super().encode("", payload)

    def load(self, key: str) -> bytes | None:
        path = self.directory / self.name(key)
        other = ShelfStore(self.directory)
        other.name = lambda _: path.name  # type: ignore[method-assign]
        return other.load("")


@caught_by("damage.directory_is_a_miss")
class TripsOverADirectory(ShelfStore):
    def load(self, key: str) -> bytes | None:
        path = self.directory / self.name(key)
        if path.is_dir():
            path.read_bytes()
        return super().load(key)


@caught_by("damage.flip_first_is_a_miss")
class RaisesForDamage(ShelfStore):
    def load(self, key: str) -> bytes | None:
        payload = super().load(key) if self.has(key) else b""
        if payload is None:
            raise ValueError("wrong checksum")
        return payload or None


# The end


@caught_by("closing.a_closed_store_is_unavailable", "cancellation.aclose_is_cancelled_at_every_await")
class AnswersWhenClosed(ShelfStore):
    async def aclose(self) -> None:
        pass


@caught_by("closing.a_closed_store_is_unavailable")
class RaisesWhenClosed(ShelfStore):
    def _check_open(self) -> None:
        if self.is_closed:
            raise ValueError("I/O operation on closed file")


@caught_by("closing.closing_again_does_nothing")
class ClosesOnce(ShelfStore):
    async def aclose(self) -> None:
        if self.is_closed:
            raise RuntimeError("it is closed already")
        self.is_closed = True


@caught_by("closing.closing_ends_what_is_under_way")
class EndsInItsOwnWay(ShelfStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        try:
            return await super().read(keys, into, stop)
        except StoreUnavailable:
            if keys and await asyncio.sleep(0, self.is_closed) and len(keys) > 8:
                raise OSError("the directory went away") from None
            raise


@caught_by("contract.what_was_written_is_read")
class LeavesADescriptor(ShelfStore):
    def load(self, key: str) -> bytes | None:
        if (self.directory / self.name(key)).is_file():
            os.open(self.directory / self.name(key), os.O_RDONLY)
        return super().load(key)


@caught_by("contract.what_was_written_is_read")
class LeavesATempFile(ShelfStore):
    async def publish(self, key: str, payload: bytes) -> None:
        await super().publish(key, payload)
        shutil.copy(self.directory / self.name(key), self.directory / f"{self.name(key)}.tmp")


@caught_by("contract.what_was_written_is_read")
class LeavesATask(MemoryStore):
    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        _TASKS.add(asyncio.ensure_future(asyncio.Event().wait()))
        return await super().write(keys, pages)


@caught_by("contract.what_was_written_is_read")
class TellsTheLoop(MemoryStore):
    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        return await super().write(keys, pages)


# The loop


@caught_by("loops.the_loop_runs_during_a_large_batch")
class BlocksTheLoop(MemoryStore):
    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        writing = super().write(keys, pages)
        with contextlib.suppress(StopIteration):
            while True:
                writing.send(None)
        return len(keys)


_ONE_QUEUE: dict[str, asyncio.Future[None]] = {}


@caught_by("loops.it_works_on_asyncio", "loops.it_works_on_debug_mode", "loops.it_works_on_uvloop")
class BelongsToTheFirstLoop(MemoryStore):
    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        loop = asyncio.get_running_loop()
        first = _ONE_QUEUE.setdefault("first", loop.create_future())
        if not first.done():
            loop.call_soon(lambda: first.done() or first.set_result(None))
        if first.get_loop() is not loop:
            await first.get_loop().create_future()
        return await super().write(keys, pages)


# What is declared


@caught_by("contract.what_is_declared_is_true")
class SaysItForgets(ShelfStore):
    """It is declared to be neither shared nor to persist."""
