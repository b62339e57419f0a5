"""Frames: what ranks say to each other once they know each other, at most 82 bytes each.

A frame is a kind (1 byte), a ticket (16), a count (1) and that many signed integers of 8 bytes, big-endian.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Generator
from typing import NamedTuple

TICKET_NBYTES = 16
MAX_VALUES = 8
MAX_VALUE = (1 << 63) - 1
NO_TICKET = bytes(TICKET_NBYTES)
_HEADER = struct.Struct(f">B{TICKET_NBYTES}sB")


class Kind(enum.IntEnum):
    """What a frame is."""

    VOTE = 1
    RESULT = 2
    PING = 3
    PONG = 4
    LEAVE = 5
    START = 6
    """Every rank has come: the group exists."""
    INCOMPLETE = 7
    """The group will not exist; values: up to 8 ranks that did not come."""
    LOST = 8
    """The group is over; values: the rank, the Cause, milliseconds of silence."""
    PATIENT_VOTE = 9
    """As VOTE, for a ticket that waits for a mute rank."""


class Cause(enum.IntEnum):
    """Why a rank was lost."""

    EXITED = 1
    MUTE = 2
    NOT_READING = 3
    DISAGREES = 4


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    ticket: bytes = NO_TICKET
    values: tuple[int, ...] = ()


class BadFrame(Exception):
    """Bytes that are no frame: the other side runs other code."""


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    count = len(frame.values)
    return _HEADER.pack(frame.kind, frame.ticket, count) + struct.pack(f">{count}q", *frame.values)


def read_frame() -> Generator[int, bytes, Frame]:
    """Ask for as many bytes as a frame still needs, and return the frame.

    Raises: BadFrame: an unknown kind, too many values, or a negative one.
    """
    kind, ticket, count = _HEADER.unpack((yield _HEADER.size))
    if kind not in Kind.__members__.values() or count > MAX_VALUES:
        raise BadFrame(f"kind {kind} with {count} values")
    values = struct.unpack(f">{count}q", (yield 8 * count))
    if any(value < 0 for value in values):
        raise BadFrame(f"a negative value in {values}")
    return Frame(Kind(kind), ticket, values)


def hear(on_frame: Callable[[Frame], None]) -> Generator[int, bytes, None]:
    """Hand over every frame that comes, for ever.

    Raises: BadFrame: as :func:`read_frame`.
    """
    while True:
        on_frame((yield from read_frame()))


def loss_text(rank: int, cause: int, silent_ms: int) -> str:
    """Return in words which rank was lost, and why; the same words on every rank."""
    role = "rank 0, which counts the votes," if rank == 0 else f"rank {rank}"
    if cause == Cause.MUTE:
        return f"{role} answered nothing for {silent_ms / 1000:.1f} s"
    if cause == Cause.NOT_READING:
        return f"{role} does not read what it is sent"
    if cause == Cause.DISAGREES:
        return f"{role} broke the protocol of the votes: do all ranks run the same code and configuration?"
    return f"{role} exited, or its connection broke"
