"""Frames with a checksum, for codecs that have none of their own.

    offset 0     head: magic, tag, bytes of the page
          24     form, uint32: what the body is, in the codec's own numbers
          28     bytes of the key, uint32
          32     XXH3-128 of the 32 bytes before, the key and the body
          48     body

The checksum finds damage, and an object that lies under another key; it does not find forgery.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from . import HEAD_NBYTES, Fault, Head

_REST = struct.Struct("<II")
_CHECKSUM_AT = HEAD_NBYTES + _REST.size
BODY_AT = _CHECKSUM_AT + 16
"""Where the body begins."""


def new_frame(body_nbytes: int) -> memoryview:
    """Return room for a frame, its content undefined; the body is ``frame[BODY_AT:]``."""
    return np.empty(BODY_AT + body_nbytes, np.uint8).data


def seal(frame: memoryview, head: Head, form: int, key: bytes) -> memoryview:
    """Write what stands before the body of ``frame`` and return the frame."""
    frame[:_CHECKSUM_AT] = head.pack() + _REST.pack(form, len(key))
    frame[_CHECKSUM_AT:BODY_AT] = _checksum(frame, key)
    return frame


def open_frame(frame: memoryview, head: Head, key: bytes, into: memoryview) -> int | Fault:
    """Return the form of a frame whose body is what was written; else what is wrong."""
    if (fault := head.fault_in(frame, into)) is not None:
        return fault
    if frame.nbytes < BODY_AT or frame[_CHECKSUM_AT:BODY_AT] != _checksum(frame, key):
        return Fault.DAMAGED
    form, _ = _REST.unpack_from(frame, HEAD_NBYTES)
    return int(form)


def _checksum(frame: memoryview, key: bytes) -> bytes:
    state = xxhash.xxh3_128(frame[:_CHECKSUM_AT])
    state.update(key)
    state.update(frame[BODY_AT:])
    return state.digest()
