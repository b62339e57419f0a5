"""Codecs: how a page becomes the frame that is stored, and back. Blocking; for threads.

A frame begins with a head that says which codec made it, and how many bytes the page had. What was made by
another codec, or under another key of the store, is found as such and never decoded.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

MAGIC = b"HiCodec1"
_HEAD = struct.Struct("<8s8sQ")
HEAD_NBYTES = _HEAD.size
"""Bytes of the head that all frames have: magic, tag of the codec, bytes of the page (uint64 little endian)."""


class Fault(enum.StrEnum):
    """Why a frame could not be decoded."""

    FOREIGN = "foreign"
    """Not a frame, or one of another codec: not ours to remove."""
    LENGTH = "length"
    """A page of another length."""
    DAMAGED = "damaged"
    """Not what was written under this key: changed, cut, or moved here from another key."""


Encode: TypeAlias = Callable[[bytes, memoryview], memoryview]
"""Return the frame of a page that is stored under a key."""

Decode: TypeAlias = "Callable[[bytes, memoryview, memoryview], Fault | None]"
"""Fill a buffer, the last argument, with the page of a key and a frame; returns None, or what is wrong."""


class Codec(Protocol):
    """One way to encode, with its parameters.

    Attributes:
        family: "zstd", as the prefix of a URL and of counts.
        name: what must match for two stores to understand each other; a part of the namespace.
    """

    family: str
    name: str

    def frame_nbytes(self, nbytes: int) -> int | None:
        """Return the size of the frame of a page of ``nbytes``; None: it depends on the page.

        Raises: ConfigError: no page of this size can be encoded.
        """
        ...

    def max_frame_nbytes(self, nbytes: int) -> int:
        """Return the size that no frame of a page of ``nbytes`` exceeds."""
        ...

    def page_nbytes(self, frame_nbytes: int) -> int | None:
        """Return the size of the page in a frame of this size, of a codec whose frames have fixed sizes.

        Returns: None where no frame has this size.
        """
        ...

    def encoder(self) -> Encode:
        """Return what encodes the pages of one batch, in one thread."""
        ...

    def decoder(self) -> Decode:
        """Return what decodes the pages of one batch, in one thread."""
        ...


class Head(NamedTuple):
    """What a frame says about itself."""

    tag: bytes
    nbytes: int

    def pack(self) -> bytes:
        """Return the first bytes of the frame."""
        return _HEAD.pack(MAGIC, self.tag, self.nbytes)

    @classmethod
    def of(cls, frame: memoryview) -> Head | None:
        """Return the head of ``frame``; None: it is none."""
        if frame.nbytes < HEAD_NBYTES:
            return None
        magic, tag, nbytes = _HEAD.unpack_from(frame)
        return cls(tag, nbytes) if magic == MAGIC else None

    def fault_in(self, frame: memoryview, into: memoryview) -> Fault | None:
        """Return what is wrong with ``frame`` for a buffer whose frames have this head; None: nothing yet."""
        found = Head.of(frame)
        if found is None or found.tag != self.tag:
            return Fault.FOREIGN
        return None if found.nbytes == into.nbytes else Fault.LENGTH


def tag_of(name: str) -> bytes:
    """Return the 8 bytes that stand for a codec's name in its frames."""
    return hashlib.sha256(name.encode()).digest()[:8]
