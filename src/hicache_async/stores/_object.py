"""One object in one file: a head that says what it is, then the payload. Blocking; for threads.

    offset 0     magic, 8 bytes
           8     number of bytes of the header, uint32 little endian
          12     offset of the payload, uint32 little endian
          16     header: a msgpack array (version, algorithm, key, payload bytes, checksum), then zeros
    4096 * n     payload, to the end of the file

The payload begins at a block: where pages are whole blocks the file takes no block more than behind a
small header, and the payload can be mapped or read directly.

The checksum finds damage, not forgery: who can write into the directory is trusted.
"""

from __future__ import annotations

import contextlib
import enum
import os
import stat
import struct
from collections.abc import Callable, Sequence

import msgspec
import xxhash

MAGIC = b"HiCacheA"
VERSION = 1
XXH3_128 = 1

_PREFIX = struct.Struct("<8sII")
_BLOCK = 4096
_MAX_FIELDS = 64  # bytes of a header beside its key: array 1, integers 3 * 9, two lengths 7, checksum 16

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # never waits for a FIFO's writer
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Fault(enum.StrEnum):
    """Why an object could not be read."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    NOT_A_FILE = "not_a_file"
    EMPTY = "empty"
    SHORT = "short"
    LONG = "long"
    FOREIGN = "foreign"
    WRONG_KEY = "wrong_key"
    CHECKSUM = "checksum"


_NOT_OURS_TO_REMOVE = frozenset({Fault.MISSING, Fault.UNREADABLE, Fault.NOT_A_FILE})


class Header(msgspec.Struct, array_like=True, frozen=True):
    """What an object says about itself."""

    version: int
    algorithm: int
    key: bytes
    nbytes: int
    checksum: bytes


def payload_offset(key: bytes) -> int:
    """Return where the payload of ``key`` begins."""
    return -(-(_PREFIX.size + _MAX_FIELDS + len(key)) // _BLOCK) * _BLOCK


def encode_head(key: bytes, payload: memoryview, offset: int) -> bytes:
    """Return what stands before ``payload``, which begins at ``offset``; without the zeros between.

    The same for the same content: a reader makes it again and compares.
    """
    fields = (VERSION, XXH3_128, key, payload.nbytes, xxhash.xxh3_128_digest(payload))  # those of Header
    body = msgspec.msgpack.encode(fields)
    return _PREFIX.pack(MAGIC, len(body), offset) + body


def decode_head(head: bytes | bytearray) -> Header | None:
    """Return the header that ``head`` begins with; None when it is not one of this version."""
    if len(head) < _PREFIX.size:
        return None
    magic, nbytes, _offset = _PREFIX.unpack_from(head)
    if magic != MAGIC:
        return None
    try:
        header = msgspec.msgpack.decode(memoryview(head)[_PREFIX.size :][:nbytes], type=Header)
    except msgspec.DecodeError:
        return None
    return header if (header.version, header.algorithm) == (VERSION, XXH3_128) else None


def read_object(path: str, key: bytes, into: memoryview) -> Fault | None:
    """Fill ``into`` with the payload of ``key``.

    Returns: None when the buffer holds the bytes that were written; else what is wrong, and the
        buffer's content is undefined. A damaged object is removed.
    """
    try:
        fd = os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        return Fault.MISSING
    except OSError:
        return Fault.UNREADABLE
    try:
        fault = _read_verified(fd, key, into)
        if fault is not None and fault not in _NOT_OURS_TO_REMOVE:
            _remove_if_same(fd, path)
        return fault
    except IsADirectoryError:
        return Fault.NOT_A_FILE
    except OSError:
        return Fault.UNREADABLE
    finally:
        os.close(fd)


def _read_verified(fd: int, key: bytes, into: memoryview) -> Fault | None:
    offset = payload_offset(key)
    head, beyond = bytearray(offset), bytearray(1)
    wanted = offset + into.nbytes
    total = os.preadv(fd, (head, into, beyond), 0)
    while 0 < total < wanted:
        moved = os.preadv(fd, _skip((head, into, beyond), total), total)
        if moved == 0:
            break
        total += moved
    # The head follows from key and payload, so one comparison verifies both.
    if total == wanted and head.startswith(encode_head(key, into, offset)):
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return Fault.NOT_A_FILE
    if total != wanted:
        return Fault.EMPTY if total == 0 else Fault.SHORT if total < wanted else Fault.LONG
    header = decode_head(head)
    if header is None:
        return Fault.FOREIGN
    return Fault.WRONG_KEY if header.key != key else Fault.CHECKSUM


def _remove_if_same(fd: int, path: str) -> None:
    """Unlink ``path`` unless another file, good perhaps, has taken its place since ``fd`` was opened."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            os.unlink(path)


def write_object(path: str, temp: str, key: bytes, payload: memoryview) -> None:
    """Publish ``payload`` at ``path``: complete or not at all. One that is there is only touched.

    Args:
        temp: a name on the same file system that nobody else uses; gone afterwards, whatever happens.
    Raises: OSError.
    """
    offset = payload_offset(key)
    if _touch(path, offset + payload.nbytes):
        return
    head = encode_head(key, payload, offset).ljust(offset, b"\0")
    try:
        fd = _with_directory(temp, lambda: os.open(temp, _WRITE_FLAGS, 0o666))
        try:
            written = 0
            while written < offset + payload.nbytes:
                written += os.writev(fd, _skip((head, payload), written))
        finally:
            os.close(fd)
        _with_directory(path, lambda: os.rename(temp, path))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise


def _touch(path: str, nbytes: int) -> bool:
    """Make a whole-looking object the most recently used one; returns False where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
        return False
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # another user's, or on a read-only file system: it is there all the same
    return True


def _with_directory(path: str, action: Callable[[], int | None]) -> int:
    try:
        return action() or 0
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return action() or 0


def _skip(buffers: Sequence[bytes | bytearray | memoryview], nbytes: int) -> list[memoryview]:
    """Return what is left of ``buffers`` after a system call that moved ``nbytes``."""
    views = []
    for buffer in buffers:
        view = memoryview(buffer)
        views.append(view[min(nbytes, view.nbytes) :])
        nbytes = max(0, nbytes - view.nbytes)
    return views
