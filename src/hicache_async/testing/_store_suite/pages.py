"""Pages that tell whose they are, buffers with guards between them, and a stop token that watches its user."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Sequence

import numpy as np

from ...types import StopToken

_GUARD_NBYTES = 64
_UNFILLED = 0xA5
_PLUS, _MINUS = 0x3F80, 0xBF80
"""1.0 and -1.0 as bfloat16; as float16, and in pairs as float32, they are of one magnitude, too, or nearly."""

NAMESPACES = ("ukv1-0123456789abcdef", "ukv1-fedcba9876543210")


def expect(is_true: bool, otherwise: str) -> None:
    """Raise AssertionError, which says what is wrong, unless ``is_true``."""
    __tracebackhide__ = True
    if not is_true:
        raise AssertionError(otherwise)


def page_keys(num_keys: int, series: str = "a", *, namespace: str = NAMESPACES[0]) -> list[str]:
    """Return keys as a cache makes them; another series is other pages."""
    return [
        f"{hashlib.sha256(f'{series} {number}'.encode()).hexdigest()}_{namespace}_exam_0_1"
        for number in range(num_keys)
    ]


def page_of(key: str, nbytes: int, *, version: int = 0, lossy: bool = False) -> bytes:
    """Return bytes that only this key and version has."""
    seed = hashlib.sha256(f"{version} {key!a}".encode()).digest()
    random = np.random.Generator(np.random.PCG64(int.from_bytes(seed)))
    if not lossy:
        return random.bytes(nbytes)
    signs = random.integers(0, 2, -(-nbytes // 2))
    return np.where(signs == 1, _PLUS, _MINUS).astype("<u2").tobytes()[:nbytes]


def describe_difference(found: bytes, key: str, others: Collection[str], *, lossy: bool = False) -> str:
    """Say what ``found`` is, which is not the page of ``key``."""
    wanted = page_of(key, len(found), lossy=lossy)
    if found == bytes(len(found)):
        return "holds zeros"
    if found == bytes([_UNFILLED]) * len(found):
        return "was not filled"
    for other in others:
        if found == page_of(other, len(found), lossy=lossy):
            return f"holds the page of key {other[:80]!a}"
    first = int(np.argmax(np.frombuffer(found, np.uint8) != np.frombuffer(wanted, np.uint8)))
    return f"is wrong from byte {first} of {len(found)} on"


class Arena:
    """Buffers in one row of bytes, with guards between them that nobody may touch."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._row = bytearray([_UNFILLED]) * (sum(sizes) + _GUARD_NBYTES * (len(sizes) + 1))
        self._guards: list[memoryview] = []
        self.buffers: list[memoryview] = []
        row, at = memoryview(self._row), 0
        for nbytes in sizes:
            self._guards.append(row[at : at + _GUARD_NBYTES])
            at += _GUARD_NBYTES
            self.buffers.append(row[at : at + nbytes])
            at += nbytes
        self._guards.append(row[at:])

    def check_guards(self) -> None:
        """Raise AssertionError when a byte beside a buffer was written."""
        untouched = bytes([_UNFILLED]) * _GUARD_NBYTES
        for number, guard in enumerate(self._guards):
            expect(guard == untouched, f"read wrote outside of its buffers: beside buffer {number}")

    def spoil(self) -> bytes:
        """Overwrite everything, as the next owner of the buffers would; returns what is there now."""
        self._row[:] = bytes([0x5A]) * len(self._row)
        return bytes(self._row)

    def content(self) -> bytes:
        """Return what is there now."""
        return bytes(self._row)


class WatchedStop(StopToken):
    """A stop token that counts how often it is looked at, and may be stopped by that.

    Args:
        at_look: the number of the look, from 1, from which on it is stopped; 0: never.

    Attributes:
        looks: how often it was looked at.
        is_unbalanced: whether a job ended that had not started.
    """

    def __init__(self, at_look: int = 0) -> None:
        super().__init__()
        self.looks = 0
        self.is_unbalanced = False
        self._at_look = at_look

    @property
    def stopped(self) -> bool:
        """Whether the work should end."""
        self.looks += 1
        if self._at_look and self.looks >= self._at_look:
            self._is_stopped = True
        return self._is_stopped

    @stopped.setter
    def stopped(self, stopped: bool) -> None:
        self._is_stopped = stopped

    def job_ended(self) -> None:
        """Count one job as over."""
        self.is_unbalanced |= not self.busy
        super().job_ended()

    def check_over(self) -> None:
        """Raise AssertionError when the read, which has returned, has not ended all the jobs that it started."""
        expect(not self.is_unbalanced, "stop.job_ended() was called more often than stop.job_started()")
        expect(not self.busy, "read has returned, and stop is still busy: a job was started and not ended")


async def quiet(stop: WatchedStop) -> None:
    """Return when no job of ``stop`` runs. Raises: AssertionError: more jobs ended than had started."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(over.set)

    stop.when_quiet(wake)
    if stop.busy:
        await over.wait()
    stop.check_over()
