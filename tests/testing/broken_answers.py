"""Broken stores: what is wrong are their answers, their buffers, their keys or what they tell of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hicache_async.stores import MemoryStore
from hicache_async.types import ObjectStat, Stop, StopToken
from tests.testing.caught_by import caught_by
from tests.testing.shelf_store import ShelfStore

# Answers


class _Answers(MemoryStore):
    """Answers a miss with something else than 0."""

    answer: ClassVar[Any]

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        return await super().read(keys, into, stop) or (type(self).answer if keys else 0)

    async def count_prefix(self, keys: Sequence[str]) -> int:
        return await super().count_prefix(keys) or (type(self).answer if keys else 0)


def _answering(answer: Any) -> type:
    name = f"Answers{type(answer).__name__.title()}{answer if type(answer) is int else ''}"
    return caught_by("contract.a_missing_key_is_a_count_of_0")(type(name, (_Answers,), {"answer": answer}))


for _answer in (None, b"", -1, False, 0.0, np.int64(0), "", 10**30):
    _answering(_answer)


@caught_by("contract.a_missing_key_is_a_count_of_0")
class RaisesForAMiss(MemoryStore):
    async def count_prefix(self, keys: Sequence[str]) -> int:
        count = await super().count_prefix(keys)
        if count < len(keys):
            raise KeyError(keys[count])
        return count


@caught_by("contract.nothing_asked_is_nothing_done")
class NeedsAKey(MemoryStore):
    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        assert keys[0] is not None
        return await super().write(keys, pages)


@caught_by("contract.what_was_written_is_read", "races.many_calls_at_once")
class AnswersNumpy(MemoryStore):
    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        return np.int64(await super().write(keys, pages))  # type: ignore[return-value]


# Buffers


@caught_by("contract.pages_are_copied_before_write_returns")
class KeepsThePage(MemoryStore):
    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        count = await super().write(keys, pages)
        for key, page in zip(keys, pages, strict=True):
            self._objects[key] = page  # type: ignore[assignment]
        return count


@caught_by("contract.read_only_pages_are_taken")
class NeedsWritablePages(MemoryStore):
    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        if any(page.readonly for page in pages):
            raise TypeError("cannot modify read-only memory")
        return await super().write(keys, pages)


@caught_by("contract.what_was_read_is_its_readers_own")
class KeepsTheReadersBuffer(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        count = await super().read(keys, into, stop)
        for key, buffer in zip(keys[:count], into, strict=False):
            self._objects[key] = buffer  # type: ignore[assignment]
        return count


@caught_by("contract.reads_fill_their_buffers_and_nothing_else")
class WritesBesideItsBuffers(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        count = await super().read(keys, into, stop)
        if count:
            row: Any = into[0].obj
            row[0] = 0
        return count


@caught_by("contract.what_was_written_is_read")
class LeavesTheLastByte(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        last = [buffer[-1] for buffer in into]
        count = await super().read(keys, into, stop)
        for buffer, byte in zip(into, last, strict=True):
            buffer[-1] = byte
        return count


@caught_by("contract.another_length_is_a_miss")
class FillsWhatItHas(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        fitted = []
        for key, buffer in zip(keys, into, strict=True):
            nbytes = len(self._objects.get(key, b""))
            fitted.append(buffer[:nbytes] if nbytes else buffer)
        return await super().read(keys, fitted, stop)


@caught_by("contract.another_length_is_a_miss")
class RemovesWhatDoesNotFit(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        for key, buffer in zip(keys, into, strict=True):
            if key in self._objects and len(self._objects[key]) != buffer.nbytes:
                await self.delete([key])
        return await super().read(keys, into, stop)


@caught_by("contract.lengths_may_differ_in_one_call")
class OneSizeOnly(MemoryStore):
    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        same = [page for page in pages if page.nbytes == pages[0].nbytes]
        return await super().write(keys[: len(same)], same)


@caught_by("contract.a_present_key_is_not_rewritten", "visibility.instances_see_each_other")
class Rewrites(ShelfStore):
    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        await self.delete(keys)
        return await super().write(keys, pages)


@caught_by("contract.a_key_may_be_there_twice_in_one_call")
class CountsAKeyOnce(MemoryStore):
    async def count_prefix(self, keys: Sequence[str]) -> int:
        return await super().count_prefix(list(dict.fromkeys(keys)))


@caught_by("contract.counted_is_readable")
class SortsItsKeys(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        return await super().read(sorted(keys), into, stop)


# Contiguity


@caught_by("contiguity.a_hole_ends_the_count", "contiguity.a_batch_may_be_there_in_part")
class CountsBehindHoles(MemoryStore):
    async def count_prefix(self, keys: Sequence[str]) -> int:
        return sum([await super(CountsBehindHoles, self).count_prefix([key]) for key in keys])


@caught_by("contiguity.a_hole_ends_the_read")
class ReadsBehindHoles(MemoryStore):
    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        read = super().read
        return sum([await read([key], [buffer], stop) for key, buffer in zip(keys, into, strict=True)])


@caught_by("contiguity.a_batch_may_be_read_in_part", "restart.everything_is_found_again")
class ReadsFromTheBeginning(ShelfStore):
    """What is counted is counted from the first object that was written."""

    _first: ClassVar[dict[Path, str]] = {}

    async def count_prefix(self, keys: Sequence[str]) -> int:
        count = await super().count_prefix(keys)
        first = self._first.setdefault(self.directory, keys[0]) if count else None
        return count if first in (None, keys[0]) else 0


@caught_by("contiguity.a_thousand_keys_in_one_call")
class TakesFewKeys(MemoryStore):
    async def count_prefix(self, keys: Sequence[str]) -> int:
        return await super().count_prefix(keys[:128])


# Keys


@caught_by("keys.similar_keys_are_different_keys", "keys.deleting_means_the_same_key")
class IgnoresCase(ShelfStore):
    def name(self, key: str) -> str:
        return super().name(key.lower())


@caught_by("keys.similar_keys_are_different_keys")
class CutsLongKeys(ShelfStore):
    def name(self, key: str) -> str:
        return super().name(key[:255])


@caught_by("keys.similar_keys_are_different_keys")
class ReplacesOddLetters(ShelfStore):
    def name(self, key: str) -> str:
        return super().name(key.encode("utf-8", "replace").decode())


@caught_by("keys.any_string_is_a_key")
class UsesTheKeyAsAPath(ShelfStore):
    def name(self, key: str) -> str:
        return key


@caught_by("keys.deleting_means_the_same_key")
class StripsWhatItDeletes(ShelfStore):
    async def delete(self, keys: Sequence[str]) -> int:
        return await super().delete([key.strip() for key in keys])


@caught_by("keys.stat_means_the_same_key")
class StripsWhatItLooksFor(ShelfStore):
    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        return await super().stat([key.strip() for key in keys])


@caught_by("keys.listing_means_the_same_key")
class ListsOtherKeys(ShelfStore):
    async def list_keys(self) -> Sequence[str]:
        return [key.replace("\\", "/") + "/" for key in await super().list_keys()]


# Catalog


@caught_by("catalog.the_list_is_what_is_there")
class ListsTwice(ShelfStore):
    async def list_keys(self) -> Sequence[str]:
        return [*await super().list_keys()] * 2


@caught_by("catalog.the_list_is_what_is_there", "restart.a_reopened_store_lists_what_it_has")
class ListsALittle(ShelfStore):
    async def list_keys(self) -> Sequence[str]:
        return (await super().list_keys())[:8]


@caught_by("catalog.stat_tells_what_is_there")
class CountsItsHeader(ShelfStore):
    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        return [
            found and ObjectStat(found.nbytes + 64, found.modified_s) for found in await super().stat(keys)
        ]


@caught_by("catalog.stat_tells_what_is_there", "catalog.all_verbs_agree")
class StatsEachKeyOnce(ShelfStore):
    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        return [found for found in await super().stat(keys) if found is not None]


@caught_by("catalog.stat_tells_when_an_object_was_used", "capacity.what_was_written_again_stays")
class DoesNotTouch(ShelfStore):
    def touch(self, key: str) -> None:
        pass


@caught_by("catalog.delete_counts_what_it_deleted")
class DeletesByTheNumber(ShelfStore):
    async def delete(self, keys: Sequence[str]) -> int:
        await super().delete(keys)
        return len(keys)


@caught_by("catalog.all_verbs_agree")
class DeletesNothing(MemoryStore):
    async def delete(self, keys: Sequence[str]) -> int:
        return sum(key in self._objects for key in dict.fromkeys(keys))


@caught_by("catalog.namespaces_are_those_of_the_keys")
class ForgetsANamespace(ShelfStore):
    async def list_namespaces(self) -> Sequence[str]:
        return (await super().list_namespaces())[:1]


@caught_by("catalog.a_sweep_leaves_what_can_be_used")
class SweepsAll(ShelfStore):
    async def sweep(self) -> Mapping[str, int]:
        return {"objects": await self.delete(await self.list_keys())}


@caught_by("catalog.the_codec_has_a_name")
class CodecOfTheDay(MemoryStore):
    @property
    def codec(self) -> str:
        return f"zstd-{id(self)}"


@caught_by("catalog.stats_are_counts")
class ShareOfMisses(MemoryStore):
    stats: ClassVar[Mapping[str, Any]] = {"misses": 0.5}


@caught_by("catalog.a_working_store_refuses_nothing")
class RefusesAll(MemoryStore):
    def refusal(self) -> Stop | None:
        return Stop.BREAKER_OPEN

    def why_refused(self) -> str:
        return "it does not feel like it"
