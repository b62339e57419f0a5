"""Ledger: what each process holds of a directory that several share, in one small file. Blocking.

    offset 0     magic, with the version, 8 bytes
           8     CRC-32 of all that follows, uint32 little endian
          12     number of members, uint16; whether the books are settled, uint8; a zero
          16     committed int64, added uint64, removed uint64
          40     for each member: reserved int64, leaving int64

Who reads or changes the books holds a kernel lock of byte 0 for those microseconds, on a file descriptor
opened for the purpose, so that a ledger that somebody removed is noticed. Each member keeps, for as long as
it lives, the lock of a byte of its own: the kernel lets go of it when the process dies, however it dies, and
shows it to other containers and to clients of one NFS server alike, where a process identity could only be
guessed at by its age. These are open file description locks, as two stores of one process are two members.
A child that was forked without running another program keeps its parent's membership alive while it lives,
which costs the others no more than what the parent had just reserved.

Whoever joins and finds no other member believes nothing that is written there, whatever a crash has left:
the books begin unsettled. A dead member's reservation may be a published object or none, so it is counted
as committed, which errs on the safe side, until the next look at the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import stat
import struct
import time
import weakref
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_MEMBERS = 1024

_LOCK_TIMEOUT_S = (
    10.0  # the lock is held for microseconds; a process stopped in them must not stop all others
)
_FIRST_PAUSE_S, _LAST_PAUSE_S = 50e-6, 2e-3

_MAGIC = b"HiCaQt\0\1"
_PREFIX = struct.Struct("<8sI")
_FIELDS = struct.Struct("<HBxqQQ")
_MEMBER = struct.Struct("<qq")
_HEAD_NBYTES = _PREFIX.size + _FIELDS.size
_MAX_NBYTES = _HEAD_NBYTES + MAX_MEMBERS * _MEMBER.size

_FLOCK = struct.Struct("hhqqi4x")  # struct flock, fcntl_locking(2): type, whence, start, length, pid
_BOOKS_BYTE = 0
_MEMBERS_BYTE = 1 << 32
_TO_THE_END = 0

_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclasses.dataclass(slots=True)
class Member:
    """One process's part, in bytes.

    Attributes:
        reserved: may appear on disk, or has, and is not in ``Books.committed`` yet.
        leaving: may disappear from the disk, or has, and is in ``Books.committed`` still.
    """

    reserved: int = 0
    leaving: int = 0


class Totals(NamedTuple):
    """What was ever added to ``Books.committed``, and taken from it, by members, in bytes."""

    added: int
    removed: int


@dataclasses.dataclass(slots=True)
class Books:
    """What all members hold, in bytes: never less than what is on disk.

    Attributes:
        settled: whether ``committed`` comes from a look at the disk.
        committed: of finished objects.
        added, removed: see :class:`Totals`.
    """

    settled: bool = False
    committed: int = 0
    added: int = 0
    removed: int = 0
    members: list[Member] = dataclasses.field(default_factory=list)

    @property
    def totals(self) -> Totals:
        """What was ever booked until now."""
        return Totals(self.added, self.removed)

    @property
    def reserved(self) -> int:
        """Reserved by all members."""
        return sum(member.reserved for member in self.members)

    @property
    def leaving(self) -> int:
        """Leaving by all members."""
        return sum(member.leaving for member in self.members)

    def add(self, nbytes: int) -> None:
        """Book finished objects."""
        self.committed += nbytes
        self.added += nbytes

    def remove(self, nbytes: int) -> None:
        """Book objects that are no longer there."""
        self.committed -= nbytes
        self.removed += nbytes

    def reconcile(self, surveyed: int, unfinished: int, before: Totals) -> None:
        """Move ``committed`` to where a survey of the disk, made while others went on, says it must be.

        Args:
            surveyed: bytes of all objects that the survey met.
            unfinished: bytes of all files under construction that it met.
            before: the totals when it began.
        """
        most = surveyed + unfinished + max(0, self.added - before.added) + self.leaving
        least = surveyed - max(0, self.removed - before.removed) - self.leaving - self.reserved
        self.committed = max(least, min(self.committed, most)) if self.settled else most
        self.settled = True

    def encode(self) -> bytes:
        """Return the content of the file."""
        fields = (len(self.members), self.settled, self.committed, self.added, self.removed)
        body = _FIELDS.pack(*fields) + b"".join(
            _MEMBER.pack(member.reserved, member.leaving) for member in self.members
        )
        return _PREFIX.pack(_MAGIC, zlib.crc32(body)) + body

    @classmethod
    def decode(cls, content: bytes) -> Books:
        """Return the books that a file holds; unsettled ones where it is torn or of another version."""
        if len(content) < _HEAD_NBYTES:
            return cls()
        magic, checksum = _PREFIX.unpack_from(content)
        num_members, settled, committed, added, removed = _FIELDS.unpack_from(content, _PREFIX.size)
        body = content[_PREFIX.size : _HEAD_NBYTES + num_members * _MEMBER.size]
        if magic != _MAGIC or zlib.crc32(body) != checksum:
            return cls()
        members = [Member(*pair) for pair in _MEMBER.iter_unpack(body[_FIELDS.size :])]
        return cls(bool(settled), committed, added, removed, members)


class Ledger:
    """The books of one directory, and this owner's membership. One thread at a time.

    Args:
        path: of the file, made when first needed with exactly ``mode``; its directory exists.
    """

    def __init__(self, path: str, mode: int) -> None:
        self._path = path
        self._mode = mode
        self._index = -1
        self._member_file: tuple[int, int] | None = None
        self._member_fd = -1
        self._closing: weakref.finalize[Any, Ledger] | None = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[tuple[Books, Member]]:
        """Hold the books, and this member's part of them; what is changed is written unless this raises.

        Raises: OSError: the file cannot be made, locked or written; TimeoutError: locked for too long.
        """
        fd = self._open_locked()
        joining = _identity(os.fstat(fd)) != self._member_file
        try:
            content = os.pread(fd, _MAX_NBYTES, 0)
            books = Books.decode(content)
            if joining:
                books = self._join(fd, books)
            while len(books.members) <= self._index:  # new, or the file was damaged under its members
                books.members.append(Member())
            yield books, books.members[self._index]
            changed = books.encode()
            if changed != content:
                os.pwrite(fd, changed, 0)
        except BaseException:
            if joining and fd == self._member_fd and self._closing is not None:
                self._closing.detach()  # what it found is not written down
                self._forget()
            raise
        finally:
            if fd == self._member_fd:
                _lock(fd, fcntl.F_UNLCK, _BOOKS_BYTE)
            else:
                _let_go(fd, os.getpid())

    @property
    def joined(self) -> bool:
        """Whether this is a member."""
        return self._member_fd >= 0

    def bury(self, books: Books) -> None:
        """Count what dead members had reserved as committed."""
        for index, member in enumerate(books.members):
            if (member.reserved or member.leaving) and index != self._index:
                self._bury_if_dead(books, index)

    def leave(self) -> None:
        """Give the membership up, as death does. The books should say by then that nothing is reserved."""
        if self._closing is not None:
            self._closing()
            self._forget()

    def _open_locked(self) -> int:
        while True:
            fd = self._open()
            try:
                self._wait_for_lock(fd)
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", self._path)
                if status.st_nlink:
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # removed in between: those who come now use another file

    def _open(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return os.open(self._path, _OPEN_FLAGS)
        try:
            fd = os.open(self._path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, self._mode)
        except FileExistsError:
            return os.open(self._path, _OPEN_FLAGS)
        try:
            os.fchmod(fd, self._mode)  # whatever the umask
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _wait_for_lock(self, fd: int) -> None:
        waited_s, pause_s = 0.0, _FIRST_PAUSE_S
        while not _lock(fd, fcntl.F_WRLCK, _BOOKS_BYTE):
            if waited_s > _LOCK_TIMEOUT_S:
                text = f"locked for more than {_LOCK_TIMEOUT_S:.0f} s by a process that hangs"
                raise TimeoutError(errno.ETIMEDOUT, text, self._path)
            time.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _join(self, fd: int, books: Books) -> Books:
        self.leave()
        for index in range(MAX_MEMBERS):
            if _lock(fd, fcntl.F_WRLCK, _MEMBERS_BYTE + index):
                break
        else:
            raise OSError(errno.EUSERS, f"{MAX_MEMBERS} stores have it open", self._path)
        self._index, self._member_fd, self._member_file = index, fd, _identity(os.fstat(fd))
        self._closing = weakref.finalize(self, _let_go, fd, os.getpid())
        if not _is_locked(fd, _MEMBERS_BYTE, MAX_MEMBERS):
            return Books()  # alone: whatever is written there
        for other in range(len(books.members)):
            self._bury_if_dead(books, other)  # this index too: its last owner is dead
        return books

    def _bury_if_dead(self, books: Books, index: int) -> None:
        member = books.members[index]
        if not _is_locked(self._member_fd, _MEMBERS_BYTE + index):  # one's own locks do not count
            books.add(member.reserved)
            member.reserved = member.leaving = 0

    def _forget(self) -> None:
        self._index, self._member_fd, self._member_file, self._closing = -1, -1, None, None


def _let_go(fd: int, pid: int) -> None:
    """Close a file and release its locks, which closing does not where a child was forked meanwhile."""
    if os.getpid() == pid:  # in that child they are still the parent's
        _lock(fd, fcntl.F_UNLCK, 0, _TO_THE_END)
    os.close(fd)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _lock(fd: int, kind: int, first: int, length: int = 1) -> bool:
    """Lock or unlock bytes; returns whether nobody else holds a lock of them."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, first, length, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, fcntl_locking(2)
        return False
    return True


def _is_locked(fd: int, first: int, length: int = 1) -> bool:
    """Return whether anybody but ``fd`` holds a lock of one of the bytes."""
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, length, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
