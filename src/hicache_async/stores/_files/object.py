"""One object in one file: a head that says what it is, then the payload. Blocking; for threads.

    offset 0     magic, 8 bytes
           8     number of bytes of the header, uint32 little endian
          12     offset of the payload, uint32 little endian
          16     header: a msgpack array (version, algorithm, namespace, key, payload bytes, checksum)
           …     zeros
    4096 * n     payload, to the end of the file

The payload begins at a block: where pages are whole blocks the file takes no block more than behind a
small header, and the payload can be mapped or read directly.

The checksum finds damage, not forgery: who can write into the directory is trusted.
"""

from __future__ import annotations

import enum
import os
import stat
import struct
from collections.abc import Sequence

import msgspec
import xxhash

MAGIC = b"HiCacheA"
VERSION = 2
XXH3_128 = 1

_PREFIX = struct.Struct("<8sII")
_BLOCK = 4096
_MAX_REST = _PREFIX.size + 96
"""Bytes of a head beside its key: array 1, integers 3 * 9, three lengths 9, digest 21, checksum 16."""

_ZEROS = memoryview(bytes(_BLOCK))
_encode = msgspec.msgpack.Encoder().encode

READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # never waits for a FIFO's writer


class Fault(enum.StrEnum):
    """Why an object could not be read; FULL: why one was not written."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    NOT_A_FILE = "not_a_file"
    EMPTY = "empty"
    SHORT = "short"
    LONG = "long"
    SIZE = "size"
    """The object is whole, and of another length than the buffer."""
    FOREIGN = "foreign"
    WRONG_KEY = "wrong_key"
    CHECKSUM = "checksum"
    FULL = "full"


DAMAGES = frozenset({Fault.EMPTY, Fault.SHORT, Fault.LONG, Fault.FOREIGN, Fault.WRONG_KEY, Fault.CHECKSUM})
"""Faults of a file that no reader will ever get an object from."""


class Header(msgspec.Struct, array_like=True, frozen=True):
    """What an object says about itself."""

    version: int
    algorithm: int
    namespace: str
    key: bytes
    nbytes: int
    checksum: bytes


def payload_offset(key: bytes) -> int:
    """Return where the payload of ``key`` begins."""
    return (len(key) + _MAX_REST + _BLOCK - 1) // _BLOCK * _BLOCK


def encode_head(namespace: str, key: bytes, payload: memoryview, offset: int) -> bytes:
    """Return the ``offset`` bytes that stand before ``payload``; the same for the same content."""
    return _head_start(namespace, key, payload, offset).ljust(offset, b"\0")


def _head_start(namespace: str, key: bytes, payload: memoryview, offset: int) -> bytes:
    checksum = xxhash.xxh3_128_digest(payload)
    body = _encode((VERSION, XXH3_128, namespace, key, payload.nbytes, checksum))  # as Header
    return _PREFIX.pack(MAGIC, len(body), offset) + body


def _is_head(head: bytearray, namespace: str, key: bytes, payload: memoryview) -> bool:
    """Return whether ``head`` is what :meth:`encode_head` returns, without making its zeros again."""
    offset = len(head)
    start = _head_start(namespace, key, payload, offset)
    zeros = _ZEROS if offset == _BLOCK else memoryview(bytes(offset))
    return head.startswith(start) and head.endswith(zeros[len(start) :])


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


def read_verified(fd: int, namespace: str, key: bytes, into: memoryview) -> Fault | None:
    """Fill ``into`` with the payload of ``key`` from an open file.

    Returns: None when the buffer holds the bytes that were written; else what is wrong, and the
        buffer's content is undefined.
    Raises: OSError: the file cannot be read.
    """
    offset = payload_offset(key)
    head, beyond = bytearray(offset), bytearray(1)
    wanted = offset + into.nbytes
    total = os.preadv(fd, (head, into, beyond), 0)
    while 0 < total < wanted:
        moved = os.preadv(fd, skip((head, into, beyond), total), total)
        if moved == 0:
            break
        total += moved
    # The head follows from key and payload, so one comparison verifies all that lies before and in it.
    if total == wanted and _is_head(head, namespace, key, into):
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return Fault.NOT_A_FILE
    header = decode_head(head)
    if total != wanted:
        if header is not None and header.key == key and offset + header.nbytes == os.fstat(fd).st_size:
            return Fault.SIZE
        return Fault.EMPTY if total == 0 else Fault.SHORT if total < wanted else Fault.LONG
    if header is None:
        return Fault.FOREIGN
    return Fault.WRONG_KEY if header.key != key else Fault.CHECKSUM


def skip(buffers: Sequence[bytes | bytearray | memoryview], nbytes: int) -> list[memoryview]:
    """Return what is left of ``buffers`` after a system call that moved ``nbytes``."""
    views = []
    for buffer in buffers:
        view = memoryview(buffer)
        views.append(view[min(nbytes, view.nbytes) :])
        nbytes = max(0, nbytes - view.nbytes)
    return views
