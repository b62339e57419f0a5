"""ObjectDirectory: the objects of one directory. Blocking, for threads; any number of them at once."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from ..._log import logger
from ...types import ObjectStat
from .._names import NO_NAMESPACE, SUFFIX, key_of_name, place_of
from .._temp import TempFiles
from .object import DAMAGES, READ_FLAGS, Fault, decode_head, payload_offset, read_verified
from .options import FileOptions
from .quota import Quota
from .recency import TouchLimit
from .writer import Draft, ObjectWriter

TOUCH_PERIOD_S = 60.0
"""How exact the time of last use is that eviction goes by."""

_BLOCK = 4096
_MAX_LISTED_HEAD = 1 << 16  # bytes; no key in use comes near
_NAMESPACE = re.compile(r"ukv[0-9]+-[0-9a-f]{16}")
_OWN_DIRECTORY = re.compile(r"(_|ukv[0-9]+-[0-9a-f]{16}|[0-9a-f]{2})(\.[0-9a-f]{8})?")  # with one being made


class ObjectDirectory:
    """Read, write and find objects below ``root``; the first thread to come makes it ready.

    Under ``root`` there are ``v2/objects/{namespace}/xx/name.kv``, ``v2/temp`` and ``v2/quota``: another
    version of the format is another directory, so that two versions never take each other's objects for
    damaged.

    Args:
        root: an absolute path; may be absent, unwritable or no directory, which is found out at use.
        private: whether ``root`` lies where other users can write, and must be this user's alone.
        on_evicted: told, in any thread, the keys that went to make room.
    """

    def __init__(
        self,
        root: str,
        options: FileOptions,
        *,
        private: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
        on_evicted: Callable[[Sequence[str]], None] = lambda keys: None,
    ) -> None:
        self.root = root
        self._options = options
        self._private = private
        self._monotonic = monotonic
        self._on_evicted = on_evicted
        self._objects = f"{root}/v2/objects"
        self._temps = TempFiles(f"{root}/v2/temp")
        self._touches = TouchLimit(TOUCH_PERIOD_S, monotonic)
        self._ready_lock, self._writer_lock = threading.Lock(), threading.Lock()
        self._is_ready = self._closed = False
        self._writer: ObjectWriter | None = None

    # -- making ready

    def _ready(self) -> None:
        """Look at the directory once.

        Raises: OSError: a private directory that another user can reach; looked at again next time.
        """
        if not self._is_ready:
            with self._ready_lock:
                if not self._is_ready:
                    if self._private:
                        _claim_private(self.root, self._options.read_only)
                    if not self._options.read_only:
                        self._sweep_temps()
                    self._is_ready = True

    def _writing(self) -> ObjectWriter:
        """Return what writes here, made by the first thread that needs it."""
        self._ready()
        writer = self._writer
        if writer is None or (writer.quota is None and self._is_booked):
            with self._writer_lock:
                writer = self._writer
                if writer is None:
                    writer = ObjectWriter(self.root, self._objects, self._options, self._temps, None)
                    self._writer = writer
                if writer.quota is None and self._is_booked:
                    writer.quota = self._open_quota()
                    if self._closed:
                        writer.quota.close()
        return writer

    @property
    def _is_booked(self) -> bool:
        # Without limits of our own we keep the books for those who have some, from the moment they come.
        return self._options.limited or os.path.exists(f"{self.root}/v2/quota")

    @property
    def has_books(self) -> bool:
        """Whether :meth:`close` has to let go of something."""
        return self._writer is not None and self._writer.quota is not None

    def trim(self) -> int:
        """Evict what is beyond the limits; returns the bytes evicted.

        Raises: OSError.
        """
        if not self._options.limited or (quota := self._writing().quota) is None:
            return 0
        try:
            return quota.trim()
        except FileNotFoundError:  # there is no directory yet
            return 0

    def _open_quota(self) -> Quota:
        options = self._options
        return Quota(
            f"{self.root}/v2",
            max_bytes=options.max_bytes,
            min_free_bytes=options.min_free_bytes,
            low_water=options.low_water,
            mode=options.mode,
            on_evicted=self._on_evicted,
            monotonic=self._monotonic,
        )

    def close(self) -> None:
        """Let go of the books; threads that are still at work may come to an OSError."""
        self._closed = True
        if self._writer is not None and self._writer.quota is not None:
            self._writer.quota.close()

    def _sweep_temps(self) -> int:
        num_files = self._temps.sweep()
        if num_files:
            logger.info("store.temp_swept", root=self.root, num_files=num_files)
        return num_files

    # -- objects

    def has(self, key: str) -> bool:
        """Return whether a readable object is there; its content is verified when it is read."""
        path = f"{self._objects}/{place_of(key).path}"
        try:
            self._ready()
            found = os.lstat(path)
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size >= _BLOCK and _is_readable(path, found)

    def read(self, key: str, into: memoryview) -> Fault | None:
        """Fill ``into``; returns None, or why its content is not to be used. A damaged object is removed."""
        place = place_of(key)
        path = f"{self._objects}/{place.path}"
        try:
            self._ready()
            fd = os.open(path, READ_FLAGS)
        except FileNotFoundError:
            return Fault.MISSING
        except OSError:
            return Fault.UNREADABLE
        try:
            fault = read_verified(fd, place.namespace, place.key, into)
            if not self._options.read_only:
                if fault is None:
                    self._touch(key, fd)
                elif fault in DAMAGES:
                    self._remove_damaged(path, fd)
            return fault
        except IsADirectoryError:
            return Fault.NOT_A_FILE
        except OSError:
            return Fault.UNREADABLE
        finally:
            os.close(fd)

    def _touch(self, key: str, fd: int) -> None:
        if self._touches.due(key):
            with contextlib.suppress(OSError):  # another user's
                os.utime(fd)

    def _remove_damaged(self, path: str, fd: int) -> None:
        with contextlib.suppress(OSError):
            self._writing().remove(path, os.fstat(fd))

    def stat(self, key: str) -> ObjectStat | None:
        """Return size and time of an object; None: there is none."""
        place = place_of(key)
        try:
            self._ready()
            found = os.lstat(f"{self._objects}/{place.path}")
        except OSError:
            return None
        nbytes = found.st_size - payload_offset(place.key)
        return ObjectStat(nbytes, found.st_mtime) if stat.S_ISREG(found.st_mode) and nbytes >= 0 else None

    def write(self, key: str, payload: memoryview, spared: Container[str] = ()) -> Fault | None:
        """Publish ``payload``, or touch the object that is there.

        Args:
            spared: paths of objects that do not make room for it.
        Returns: Fault.FULL: the limits leave no room. Raises: OSError.
        """
        drafted = self.draft(key, payload, spared)
        if not isinstance(drafted, Draft):
            return drafted
        self.publish([drafted])
        return None

    def draft(self, key: str, payload: memoryview, spared: Container[str] = ()) -> Draft | Fault | None:
        """Write ``payload`` for :meth:`publish`, or touch the object that is there: None.

        Returns: Fault.FULL: the limits leave no room. Raises: OSError.
        """
        return self._writing().draft(place_of(key), payload, spared)

    def paths(self, keys: Sequence[str]) -> Container[str]:
        """Return the paths of the objects of ``keys``, worked out when they are asked for."""
        return _Paths(self._objects, keys)

    def publish(self, drafts: Sequence[Draft]) -> None:
        """Let readers see what was drafted, as durable as it was asked for.

        Raises: OSError: nothing is left of what was not published.
        """
        self._writing().publish(drafts)

    def delete(self, key: str) -> bool:
        """Remove an object; returns whether there was one.

        Raises: OSError.
        """
        return self._writing().delete(f"{self._objects}/{place_of(key).path}")

    # -- all of them

    def list_keys(self) -> list[str]:
        """Return the key of every object; what cannot be listed is left out."""
        self._ready()
        keys: list[str] = []
        for namespace in names_in(self._objects):
            for shard in names_in(f"{self._objects}/{namespace}"):
                keys += self._keys_in(f"{namespace}/{shard}")
        return keys

    def _keys_in(self, shard: str) -> Iterator[str]:
        for name in names_in(f"{self._objects}/{shard}"):
            if not name.endswith(SUFFIX):
                continue
            key = key_of_name(name)
            if key is None:
                key = _key_in_head(f"{self._objects}/{shard}/{name}")
            if key is not None and place_of(key).path == f"{shard}/{name}":
                yield key

    def shards_of(self, namespace: str) -> list[str]:
        """Return the directories of the objects of a namespace."""
        self._ready()
        directory = f"{self._objects}/{namespace or NO_NAMESPACE}"
        return [f"{directory}/{name}" for name in names_in(directory)]

    def list_namespaces(self) -> list[str]:
        """Return the digests of the namespaces that have objects, in order of name."""
        self._ready()
        namespaces = filter(_NAMESPACE.fullmatch, names_in(self._objects))
        return sorted(each for each in namespaces if any(map(_has_objects, self.shards_of(each))))

    def sweep(self) -> Mapping[str, int]:
        """Remove files of dead writers, objects beyond the limits and empty directories; returns how many."""
        self._ready()
        counts = {
            "temp_files": self._sweep_temps(),
            "evicted_bytes": self.trim(),
            "empty_directories": 0,
        }
        for namespace in filter(_OWN_DIRECTORY.fullmatch, names_in(self._objects)):
            directory = f"{self._objects}/{namespace}"
            shards = filter(_OWN_DIRECTORY.fullmatch, names_in(directory))
            counts["empty_directories"] += sum(_remove_empty(f"{directory}/{shard}") for shard in shards)
            counts["empty_directories"] += _remove_empty(directory)
        return counts


class _Paths:
    """Paths of the objects of some keys; most writes never need them."""

    def __init__(self, objects: str, keys: Sequence[str]) -> None:
        self._objects = objects
        self._keys = keys
        self._paths: frozenset[str] | None = None

    def __contains__(self, path: object) -> bool:
        if self._paths is None:
            self._paths = frozenset(f"{self._objects}/{place_of(key).path}" for key in self._keys)
        return path in self._paths


class Batch:
    """Objects of one call that are published many at a time, item by item drafted."""

    def __init__(
        self, directory: ObjectDirectory, keys: Sequence[str], payloads: Sequence[memoryview]
    ) -> None:
        self._directory = directory
        self._keys = keys
        self._payloads = payloads
        self._own = directory.paths(keys)
        self._drafts: dict[int, Draft] = {}

    def draft(self, item: int) -> Fault | None:
        """Write an item for :meth:`publish`."""
        drafted = self._directory.draft(self._keys[item], self._payloads[item], self._own)
        if not isinstance(drafted, Draft):
            return drafted
        self._drafts[item] = drafted
        return None

    def publish(self, items: range) -> None:
        """Let readers see ``items``, which were drafted."""
        self._directory.publish([self._drafts.pop(item) for item in items if item in self._drafts])


def names_in(path: str) -> list[str]:
    """Return what is in a directory; nothing where it cannot be listed."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def _is_readable(path: str, found: os.stat_result) -> bool:
    # Mostly the mode tells, and nobody else has to be asked.
    is_own = found.st_uid == os.geteuid()
    mask = stat.S_IRUSR if is_own else stat.S_IROTH
    return bool(found.st_mode & mask) or os.access(path, os.R_OK)


def _has_objects(shard: str) -> bool:
    return any(name.endswith(SUFFIX) for name in names_in(shard))


def _remove_empty(path: str) -> bool:
    """Remove a directory that is empty; who is about to use it makes it again."""
    try:
        os.rmdir(path)
    except OSError:
        return False
    return True


def _key_in_head(path: str) -> str | None:
    """Return the key that a file says it holds: a long key is in no file name."""
    try:
        fd = os.open(path, READ_FLAGS)
    except OSError:
        return None
    try:
        header = decode_head(os.read(fd, _MAX_LISTED_HEAD))
        return None if header is None else header.key.decode("utf-8", "surrogatepass")
    except (OSError, UnicodeError):
        return None
    finally:
        os.close(fd)


def _claim_private(root: str, read_only: bool) -> None:
    """Make ``root`` with mode 0700, or check that it is a directory of this user that no other can enter."""
    if not read_only:
        with contextlib.suppress(FileExistsError):
            os.mkdir(root, 0o700)
    found = os.lstat(root)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{root} must be a directory of user {os.geteuid()} with mode 0700;"
            f" it belongs to {found.st_uid} and has mode {stat.filemode(found.st_mode)}"
        )
