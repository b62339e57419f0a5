"""Survey: one look at all objects of a directory, and the removal of the oldest. Blocking, for threads.

Only what the names and the layout of objects produce is an object: a regular file at
``objects/{namespace or "_"}/xx/name.kv`` whose name belongs there. Everything else is foreign: not counted
and not touched. A survey takes a few microseconds and some 300 bytes per object, and sorts one shard at a
time, as one long sort would stop every other thread of the interpreter.
"""

from __future__ import annotations

import dataclasses
import heapq
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from ...core.keys import namespace_of
from ...core.manifest import is_manifest_key
from .._names import NO_NAMESPACE, SHARDS, SUFFIX, key_of_name, place_of

_BLOCK = 4096
_SHARD_NAMES = frozenset(SHARDS)
_HASHED = re.compile(rf"~[0-9a-f]{{64}}{re.escape(SUFFIX)}")


def size_on_disk(nbytes: int) -> int:
    """Return what a file of ``nbytes`` counts: whole blocks of 4096 bytes."""
    return -(-nbytes // _BLOCK) * _BLOCK


class Found(NamedTuple):
    """An object as a survey saw it, ordered by age; ``nbytes`` as it counts."""

    mtime_ns: int
    nbytes: int
    path: str


@dataclasses.dataclass(slots=True)
class Survey:
    """What was on disk, object by object, while the survey was made.

    Attributes:
        num_objects, nbytes: of all objects, as they count.
        temp_nbytes: of files under construction, whoever's, as they count.
        error: why something could not be looked at; None: nothing was left out.
    """

    num_objects: int = 0
    nbytes: int = 0
    temp_nbytes: int = 0
    error: OSError | None = None
    _shelves: list[list[Found]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, objects: str, temp: str) -> Survey:
        """Look at the directory of objects and at that of files under construction."""
        survey = cls()
        for _, nbytes, _ in survey._files(temp, lambda name: True):  # first, as they turn into objects
            survey.temp_nbytes += nbytes
        for namespace in survey._directories(objects):
            if namespace != NO_NAMESPACE and namespace_of(f"_{namespace}") != namespace:
                continue
            for shard in _SHARD_NAMES.intersection(survey._directories(f"{objects}/{namespace}")):
                survey._look(objects, namespace, shard)
        return survey

    def oldest_first(self) -> Iterator[Found]:
        """Yield the objects that may be evicted: all but manifests, which tell what a namespace is."""
        return heapq.merge(*self._shelves)

    def _look(self, objects: str, namespace: str, shard: str) -> None:
        shelf = []
        for found in self._files(f"{objects}/{namespace}/{shard}", partial(is_object, namespace, shard)):
            self.num_objects += 1
            self.nbytes += found.nbytes
            if not is_manifest_key(found.path.rpartition("/")[2].removesuffix(SUFFIX)):
                shelf.append(found)
        shelf.sort()
        self._shelves.append(shelf)

    def _directories(self, path: str) -> list[str]:
        try:
            with os.scandir(path) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            self._note(error)
            return []

    def _files(self, path: str, wanted: Callable[[str], bool]) -> Iterator[Found]:
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if wanted(entry.name) and (found := self._status(entry)) is not None:
                        yield found
        except OSError as error:
            self._note(error)

    def _status(self, entry: os.DirEntry[str]) -> Found | None:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError as error:
            self._note(error)
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return Found(status.st_mtime_ns, size_on_disk(status.st_size), entry.path)

    def _note(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # gone meanwhile, or not there yet
            self.error = self.error or error


def key_of(path: str) -> str | None:
    """Return the key of the object at ``path``; None where its name does not tell."""
    return key_of_name(path.rpartition("/")[2])


def is_object(namespace: str, shard: str, name: str) -> bool:
    """Return whether some key's object is ``{namespace}/{shard}/{name}``, as far as its name tells."""
    key = key_of_name(name)
    if key is None:
        return _HASHED.fullmatch(name) is not None
    return place_of(key).path == f"{namespace}/{shard}/{name}"


@dataclasses.dataclass(slots=True)
class Evicted:
    """What became of some objects that were to go."""

    nbytes: int = 0
    paths: list[str] = dataclasses.field(default_factory=list)
    errors: list[OSError] = dataclasses.field(default_factory=list)


def evict(victims: Iterable[Found]) -> Evicted:
    """Remove objects, except those that were touched since they were surveyed or cannot be removed."""
    evicted = Evicted()
    for mtime_ns, nbytes, path in victims:
        try:
            if os.lstat(path).st_mtime_ns != mtime_ns:
                continue
            os.unlink(path)
        except FileNotFoundError:
            continue  # somebody else's eviction, and on their books
        except OSError as error:
            evicted.errors.append(error)
            continue
        evicted.nbytes += nbytes
        evicted.paths.append(path)
    return evicted
