"""What a check works with: an open store whose every answer is checked, and more of them in the same directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ...abc import (
    Store,
    SupportsDelete,
    SupportsListing,
    SupportsNamespaces,
    SupportsStat,
    SupportsSweep,
)
from ...types import ObjectStat
from .candidate import Candidate
from .pages import Arena, WatchedStop, describe_difference, expect, page_of


class Exam:
    """One check's stores, all of one candidate.

    Args:
        directory: where the store is; its parent is the exam's own.

    Attributes:
        store: open in ``directory`` without a limit; there is none before :meth:`start`.
    """

    def __init__(self, candidate: Candidate, directory: Path) -> None:
        self.candidate = candidate
        self.directory = directory
        self.store: CheckedStore
        self._open: list[CheckedStore] = []

    async def start(self) -> None:
        """Open the store."""
        self.store = await self.open()

    async def open(self) -> CheckedStore:
        """Open another instance in the same directory."""
        return self._added(await self.candidate.opened(self.directory))

    async def open_bounded(self, max_bytes: int) -> CheckedStore:
        """Open another instance, which keeps at most ``max_bytes``, in a directory that only such ones use."""
        directory = self.directory.with_name("bounded")
        directory.mkdir(exist_ok=True)
        return self._added(await self.candidate.opened_bounded(directory, max_bytes))

    async def reopen(self) -> CheckedStore:
        """Close the store and open it anew."""
        await self.close(self.store)
        self.store = await self.open()
        return self.store

    async def close(self, store: CheckedStore) -> None:
        """Close one instance."""
        self._open.remove(store)
        await store.inner.aclose()

    async def finish(self) -> None:
        """Close what is open."""
        while self._open:
            await self._open.pop().inner.aclose()
        if self.candidate.discard is not None:
            for directory in (self.directory, self.directory.with_name("bounded")):
                self.candidate.discard(directory)

    def page(self, key: str, nbytes: int | None = None, *, version: int = 0) -> bytes:
        """Return the page of ``key``; None: a small one."""
        lossy = self.candidate.lossy
        return page_of(key, self.candidate.small if nbytes is None else nbytes, version=version, lossy=lossy)

    def _added(self, store: Store) -> CheckedStore:
        checked = CheckedStore(store, self)
        self._open.append(checked)
        return checked


class CheckedStore:
    """A store whose every answer is checked: its type, its range, and each byte that it vouches for.

    Attributes:
        inner: the store itself.
    """

    def __init__(self, inner: Store, exam: Exam) -> None:
        self.inner = inner
        self._exam = exam

    async def count(self, keys: Sequence[str]) -> int:
        """Return what count_prefix answers."""
        return checked_count("count_prefix", await self.inner.count_prefix(keys), len(keys))

    async def write(self, keys: Sequence[str], nbytes: int | None = None, *, version: int = 0) -> int:
        """Write the page of each key; when this returns its buffers hold something else."""
        pages = [bytearray(self._exam.page(key, nbytes, version=version)) for key in keys]
        answer = await self.inner.write(keys, [memoryview(page) for page in pages])
        for page in pages:
            page[:] = bytes(len(page))
        return checked_count("write", answer, len(keys))

    async def write_all(self, keys: Sequence[str], nbytes: int | None = None) -> None:
        """Write the page of each key, and insist that all were stored."""
        count = await self.write(keys, nbytes)
        expect(count == len(keys), f"write stored {count} of {len(keys)} pages, and nothing is in its way")

    async def read(
        self,
        keys: Sequence[str],
        nbytes: int | None = None,
        *,
        version: int = 0,
        stop: WatchedStop | None = None,
    ) -> int:
        """Read the page of each key, check those that are counted, and return how many."""
        stop = WatchedStop() if stop is None else stop
        nbytes = self._exam.candidate.small if nbytes is None else nbytes
        arena = Arena([nbytes] * len(keys))
        answer = await self.inner.read(keys, arena.buffers, stop)
        count = checked_count("read", answer, len(keys))
        stop.check_over()
        arena.check_guards()
        for key, buffer in zip(keys[:count], arena.buffers, strict=False):
            self.check_page(buffer, key, keys, version=version)
        return count

    async def read_all(self, keys: Sequence[str], nbytes: int | None = None) -> None:
        """Read the page of each key, and insist that all are there."""
        count = await self.read(keys, nbytes)
        expect(count == len(keys), f"read found {count} of {len(keys)} pages, and all were stored")

    def check_page(
        self, found: memoryview, key: str, others: Collection[str] = (), *, version: int = 0
    ) -> None:
        """Raise AssertionError unless ``found`` is the page of ``key``."""
        if found != self._exam.page(key, found.nbytes, version=version):
            what = describe_difference(bytes(found), key, others, lossy=self._exam.candidate.lossy)
            raise AssertionError(f"read vouches for a page that {what}; its key is {key[:80]!a}")

    async def delete(self, keys: Sequence[str]) -> int:
        """Return what delete answers."""
        answer = await cast("SupportsDelete", self.inner).delete(keys)
        return checked_count("delete", answer, len(keys))

    async def list_keys(self) -> list[str]:
        """Return what list_keys answers."""
        answer = await cast("SupportsListing", self.inner).list_keys()
        keys = _checked_list("list_keys", answer, str)
        expect(len(set(keys)) == len(keys), "list_keys tells a key twice")
        return keys

    async def stat(self, keys: Sequence[str]) -> list[ObjectStat | None]:
        """Return what stat answers."""
        answer = await cast("SupportsStat", self.inner).stat(keys)
        stats = _checked_list("stat", answer, (ObjectStat, type(None)))
        expect(len(stats) == len(keys), f"stat was asked of {len(keys)} keys and answered {len(stats)} times")
        return stats

    async def list_namespaces(self) -> list[str]:
        """Return what list_namespaces answers."""
        answer = await cast("SupportsNamespaces", self.inner).list_namespaces()
        namespaces = _checked_list("list_namespaces", answer, str)
        expect(
            namespaces == sorted(set(namespaces)),
            f"list_namespaces says {namespaces}, not in order, once each",
        )
        return namespaces

    async def sweep(self) -> Mapping[str, int]:
        """Return what sweep answers."""
        return checked_counts("sweep", await cast("SupportsSweep", self.inner).sweep())


def checked_count(verb: str, answer: object, limit: int) -> int:
    """Return ``answer`` if it can be a count of ``limit`` things."""
    if type(answer) is not int or not 0 <= answer <= limit:
        raise AssertionError(
            f"{verb} answered {answer!r}, of type {type(answer).__name__}; give a plain int of 0 .. {limit}"
        )
    return answer


def checked_counts(name: str, answer: object) -> Mapping[str, int]:
    """Return ``answer`` if it is counts by name."""
    if not isinstance(answer, Mapping) or not all(isinstance(each, str) for each in answer):
        raise AssertionError(f"{name} is {answer!r}; give a mapping of str to int")
    for each, count in answer.items():
        expect(type(count) is int and count >= 0, f"{name} says {each}: {count!r}; give a plain int >= 0")
    return answer


def _checked_list(verb: str, answer: object, kind: type | tuple[type, ...]) -> list[Any]:
    if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes)):
        raise AssertionError(f"{verb} answered {answer!r}; give a sequence")
    strangers = [each for each in answer if not isinstance(each, kind)]
    expect(not strangers, f"{verb} answered with {strangers!r} in it; give {kind}")
    return list(answer)
