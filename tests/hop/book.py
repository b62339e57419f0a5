"""What the tests of hops share: a page with its thread, and how everybody waits.

The page is a number in a list: a hop's ``on_settled`` is the only place that gives it back, and each
test looks whether the thread had written its last byte by then.
"""

from __future__ import annotations

import asyncio
import threading

from hicache_async._hop import Hop, HopRegistry

LIMIT_S = 20
"""Longest wait for something that has to happen; never reached by a test that passes."""
PAGE = 7


class Book:
    """A free list of one page, the bytes of that page, and a thread that fills them when let."""

    def __init__(self) -> None:
        self.free = [PAGE]
        self.bytes = bytearray(2)
        self.bytes_when_given_back: bytes | None = None
        self.writing = threading.Event()
        self.finish = threading.Event()
        self.given_back = asyncio.Event()

    def take(self) -> int:
        return self.free.pop()

    def fill(self) -> int:
        """Write the first byte, wait until the test lets go, write the last."""
        self.bytes[0] = 1
        self.writing.set()
        assert self.finish.wait(LIMIT_S)
        self.bytes[1] = 1
        return len(self.bytes)

    def give_back(self, hop: Hop[int]) -> None:
        self.bytes_when_given_back = bytes(self.bytes)
        self.free.append(PAGE)
        self.given_back.set()

    def check_still_owned(self, hop: Hop[int], hops: HopRegistry) -> None:
        assert self.free == []
        assert self.bytes == b"\x01\x00"
        assert not hop.settled.done()
        assert hop in hops.live

    def check_given_back(self, hop: Hop[int], hops: HopRegistry) -> None:
        assert self.free == [PAGE]
        assert self.bytes_when_given_back == b"\x01\x01"
        assert hop.settled.done()
        assert not hops.live


class Bugs(list[BaseException]):
    """What on_settled raised."""


async def settled(hop: Hop[int]) -> None:
    """Wait as every task of this library does."""
    await asyncio.wait([hop.settled])
