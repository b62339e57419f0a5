"""A file of fixed slots behind a table, shared by processes: its shape, making it, opening it, locking it.

    offset 0      what it is, once for all: magic, version, state, slot bytes, number of slots, checksum
         4096     two words that change: the count of changes, and who holds the lock
         8192     the table, in blocks of 4096: a word per slot, a stamp per slot, a record per slot
                  (see ``table``)
                  the slots, each of whole blocks

All of the space is reserved when the file is made, and never more is mapped than is there: a medium that is
too small is an error then, not a SIGBUS at a later access. Blocking; for threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import time
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from ...errors import ConfigError, StoreUnavailable

BLOCK = 4096
RECORD_NBYTES = 512
CHANGES, HOLDER = 0, 1
"""Index of the two words that change."""

LOCK_TIMEOUT_S = 10.0
"""A holder needs well below a millisecond; one that was stopped must not take the others with it."""
_MAKING_TIMEOUT_S = 120.0  # tmpfs clears what it reserves, some 3 GB/s
_LONGEST_NAP_S = 0.001
_CHUNK_NBYTES = 1 << 20

_MAGIC = b"HiCacheS"
_VERSION = 1
_MAKING, _MADE = 1, 2
_TITLE = struct.Struct("<8sIIQQ")
_CHECK = struct.Struct("<Q")
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def whole_blocks(nbytes: int) -> int:
    """Return ``nbytes``, rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class Geometry(NamedTuple):
    """How many slots of how many bytes; everything else about the file follows."""

    slot_nbytes: int
    num_slots: int

    @classmethod
    def fitting(cls, max_nbytes: int, slot_nbytes: int) -> Geometry:
        """Return as many slots as a file of ``max_nbytes`` holds.

        Raises: ConfigError: not even one.
        """
        overhead = 5 * BLOCK  # two at the front, and what each of three columns may round up by
        num_slots = (max_nbytes - overhead) // (slot_nbytes + RECORD_NBYTES + 16)
        if num_slots < 1:
            needed = overhead + slot_nbytes + RECORD_NBYTES + 16
            raise ConfigError(
                f"max_bytes is {max_nbytes}; one slot of {slot_nbytes} bytes and its table take {needed}"
            )
        return cls(slot_nbytes, num_slots)

    @property
    def words_at(self) -> int:
        """Offset of the words, uint64 each."""
        return 2 * BLOCK

    @property
    def stamps_at(self) -> int:
        """Offset of the stamps, uint64 each."""
        return self.words_at + whole_blocks(8 * self.num_slots)

    @property
    def records_at(self) -> int:
        """Offset of the records, ``RECORD_NBYTES`` each."""
        return self.stamps_at + whole_blocks(8 * self.num_slots)

    @property
    def slots_at(self) -> int:
        """Offset of the first slot."""
        return self.records_at + whole_blocks(RECORD_NBYTES * self.num_slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.slots_at + self.slot_nbytes * self.num_slots

    def __str__(self) -> str:
        return f"{self.num_slots} slots of {self.slot_nbytes} bytes"


class Wanted(NamedTuple):
    """What the caller asks of a segment.

    Attributes:
        max_nbytes, slot_nbytes: the shape; None: as it is where the segment exists.
        mode: permissions of one that is made.
        map_slots: whether payloads are copied through the mapping, which is fast and fit for memory, or by
            system calls, where a medium that fails is an error and not a SIGBUS.
        remedy: how a segment is removed, for messages.
    """

    path: str
    max_nbytes: int | None
    slot_nbytes: int | None
    mode: int
    map_slots: bool
    remedy: str

    def geometry(self) -> Geometry:
        """Return the shape of a segment that has to be made.

        Raises: ConfigError: it is not said, or holds not even one slot.
        """
        if self.max_nbytes is None or self.slot_nbytes is None:
            missing = "max_bytes" if self.max_nbytes is None else "slot_bytes"
            raise ConfigError(f"{self.path} does not exist, and to make it {missing} must be given")
        return Geometry.fitting(self.max_nbytes, self.slot_nbytes)

    def check(self, found: Geometry, nbytes: int) -> None:
        """Compare with a segment of ``nbytes`` that exists; larger slots than asked for will do.

        Raises: ConfigError: another shape, or a file that was cut.
        """
        slot_nbytes = max(self.slot_nbytes or 0, found.slot_nbytes)
        asked = found._replace(slot_nbytes=slot_nbytes)
        if self.max_nbytes is not None:
            asked = Geometry.fitting(self.max_nbytes, slot_nbytes)
        if asked != found:
            raise ConfigError(
                f"{self.path} has {found}, and {asked} are asked for;"
                f" leave out max_bytes and slot_bytes to take it as it is, or {self.remedy}"
            )
        if nbytes < found.nbytes:
            raise ConfigError(
                f"{self.path} was cut to {nbytes} bytes; {found} take {found.nbytes}: {self.remedy}"
            )


class Segment:
    """An open segment. It stays mapped and open as long as anything refers to it: a thread may be copying."""

    def __init__(self, fd: int, wanted: Wanted, geometry: Geometry) -> None:
        self.path = wanted.path
        self.geometry = geometry
        self._remedy = wanted.remedy
        self._slots_at, self._slot_nbytes = geometry.slots_at, geometry.slot_nbytes
        self._fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        if not wanted.map_slots:
            _read_through(fd, geometry.slots_at)
        self.mapping = mmap.mmap(fd, geometry.nbytes if wanted.map_slots else geometry.slots_at)
        self.header = memoryview(self.mapping)[BLOCK : 2 * BLOCK].cast("Q")
        self._bytes = np.frombuffer(self.mapping, np.uint8) if wanted.map_slots else None

    def check(self) -> None:
        """Look whether all that is mapped is there: beyond the end of a file that was cut there is a SIGBUS.

        Raises: StoreUnavailable: it is not.
        """
        nbytes = os.fstat(self._fd).st_size
        if nbytes < len(self.mapping):
            raise StoreUnavailable(
                f"{self.path} was cut to {nbytes} bytes and {len(self.mapping)} are needed: {self._remedy}"
            )

    def put(self, slot: int, payload: memoryview, at: int = 0) -> None:
        """Copy ``payload`` into ``slot``, from byte ``at`` on.

        Raises: OSError: the medium failed.
        """
        offset = self._slots_at + slot * self._slot_nbytes + at
        if self._bytes is not None:
            np.copyto(self._bytes[offset : offset + payload.nbytes], np.frombuffer(payload, np.uint8))
            return
        written = 0
        while written < payload.nbytes:
            written += os.pwrite(self._fd, payload[written:], offset + written)

    def get(self, slot: int, into: memoryview, at: int = 0) -> None:
        """Fill ``into`` from ``slot``, from byte ``at`` on.

        Raises: OSError: the medium failed, or the file was cut.
        """
        offset = self._slots_at + slot * self._slot_nbytes + at
        if self._bytes is not None:
            np.copyto(np.frombuffer(into, np.uint8), self._bytes[offset : offset + into.nbytes])
            return
        total = 0
        while total < into.nbytes:
            moved = os.preadv(self._fd, [into[total:]], offset + total)
            if moved == 0:
                raise OSError(f"{self.path} ends at {offset + total}, within a slot")
            total += moved

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the segment's lock, which the kernel lets go when this process dies.

        On a descriptor of its own: so threads exclude each other too, and a child forked earlier, which
        has all of them, keeps nothing locked.

        Raises: StoreUnavailable: another process kept it for ``LOCK_TIMEOUT_S``.
        """
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if not _flock(fd, LOCK_TIMEOUT_S):
                raise StoreUnavailable(
                    f"{self.path} has been locked for {LOCK_TIMEOUT_S} s by process {self.header[HOLDER]};"
                    " it is stopped, or hangs: let it go on, or end it"
                )
            yield
        finally:
            os.close(fd)


def _read_through(fd: int, nbytes: int) -> None:
    """Read the first bytes of a file: what the medium cannot give is an OSError here and a SIGBUS when mapped."""
    for offset in range(0, nbytes, _CHUNK_NBYTES):
        os.pread(fd, min(_CHUNK_NBYTES, nbytes - offset), offset)


def _flock(fd: int, timeout_s: float) -> bool:
    deadline_s, nap_s = time.monotonic() + timeout_s, 20e-6
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)


def check_segment(wanted: Wanted) -> None:
    """Look at what is there without making anything; what the system refuses is left to be found at use.

    Raises: ConfigError: a segment that exists and is not as wanted, something else of that name, or
        nothing and the shape is not said.
    """
    try:
        fd = os.open(wanted.path, _FLAGS)
    except FileNotFoundError:
        wanted.geometry()
        return
    except OSError:
        return
    try:
        found = _read_title(fd, wanted)
        if found is None:
            wanted.geometry()
        else:
            wanted.check(found, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def open_segment(wanted: Wanted) -> Segment:
    """Open a segment, and make it where there is none; among any number of processes one does.

    Raises: ConfigError: see :func:`check_segment`. StoreUnavailable: the medium is too small, with both
        figures, or somebody keeps it locked. OSError: the system refuses.
    """
    while True:
        fd = _open_or_create(wanted)
        try:
            if not _flock(fd, _MAKING_TIMEOUT_S):
                raise StoreUnavailable(f"{wanted.path} has been locked for {_MAKING_TIMEOUT_S} s")
            if not _is_at(fd, wanted.path):
                os.close(fd)  # removed while we waited
                continue
            geometry = _read_title(fd, wanted)
            if geometry is None:
                geometry = wanted.geometry()
                _make(fd, wanted, geometry)
            found = os.fstat(fd)
            wanted.check(geometry, found.st_size)
            if found.st_blocks * 512 < geometry.nbytes:  # copied with holes
                _reserve(fd, wanted.path, geometry.nbytes)
            fcntl.flock(fd, fcntl.LOCK_UN)
        except BaseException:
            os.close(fd)
            raise
        return Segment(fd, wanted, geometry)


def is_segment(path: str) -> bool:
    """Return whether a segment of any version, whole or not, is at ``path``.

    Raises: OSError.
    """
    fd = os.open(path, _FLAGS)
    try:
        return os.fstat(fd).st_size == 0 or os.pread(fd, len(_MAGIC), 0) == _MAGIC
    finally:
        os.close(fd)


def _open_or_create(wanted: Wanted) -> int:
    while True:
        with contextlib.suppress(FileNotFoundError):
            return os.open(wanted.path, _FLAGS)
        wanted.geometry()
        with contextlib.suppress(FileExistsError):
            fd = os.open(wanted.path, _FLAGS | os.O_CREAT | os.O_EXCL, wanted.mode)
            os.fchmod(fd, wanted.mode)  # whatever the umask
            return fd


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _read_title(fd: int, wanted: Wanted) -> Geometry | None:
    """Return the shape of the segment in ``fd``; None: it is not made yet, or its maker died.

    Raises: ConfigError: it is not a segment of this version, or another user's.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{wanted.path} is {stat.filemode(found.st_mode)}, not a file; give another name")
    if found.st_uid not in (0, os.geteuid()) and not wanted.mode & 0o077:
        raise ConfigError(
            f"{wanted.path} belongs to user {found.st_uid}, this is {os.geteuid()};"
            " to share a segment between users give mode=0o660 everywhere, or choose another name"
        )
    title = os.pread(fd, _TITLE.size + _CHECK.size, 0)
    if not title:
        return None
    if len(title) < _TITLE.size + _CHECK.size or not title.startswith(_MAGIC):
        raise ConfigError(f"{wanted.path} is something else, beginning with {title[:8]!r}: {wanted.remedy}")
    _, version, state, slot_nbytes, num_slots = _TITLE.unpack_from(title)
    if title[_TITLE.size :] != _check(title[: _TITLE.size]):
        raise ConfigError(f"{wanted.path} is damaged in its first bytes: {wanted.remedy}")
    if version != _VERSION:
        raise ConfigError(f"{wanted.path} has format {version}, this is format {_VERSION}: {wanted.remedy}")
    return Geometry(slot_nbytes, num_slots) if state == _MADE else None


def _make(fd: int, wanted: Wanted, geometry: Geometry) -> None:
    """Make a segment of an empty file, or of one whose maker died; nothing is left where that fails."""
    try:
        os.ftruncate(fd, 0)
        _write_title(fd, _MAKING, geometry)
        _reserve(fd, wanted.path, geometry.nbytes)
        _write_title(fd, _MADE, geometry)
    except BaseException:
        os.unlink(wanted.path)
        raise


def _write_title(fd: int, state: int, geometry: Geometry) -> None:
    title = _TITLE.pack(_MAGIC, _VERSION, state, geometry.slot_nbytes, geometry.num_slots)
    os.pwrite(fd, title + _check(title), 0)


def _check(title: bytes) -> bytes:
    return _CHECK.pack(xxhash.xxh3_64_intdigest(title))


def _reserve(fd: int, path: str, nbytes: int) -> None:
    here = os.fstatvfs(fd)
    free = here.f_bavail * here.f_frsize + os.fstat(fd).st_blocks * 512
    limited = here.f_blocks > 0  # a tmpfs may have no limit
    try:
        if nbytes <= free or not limited:  # tmpfs would clear all there is before it found out
            os.posix_fallocate(fd, 0, nbytes)
            return
        reason = "No space left"
    except OSError as error:
        reason = str(error)
    raise StoreUnavailable(
        f"{path} needs {nbytes} bytes and its file system has {free}: {reason}; lower max_bytes or make room"
    )
