"""Coding: pages become frames, and frames pages, a batch at a time in threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextvars import copy_context
from typing import NamedTuple, TypeVar

from ..._fence import resolve
from ..._threads import DaemonThreads, post_to_loop
from ...core.manifest import is_manifest_key
from ...errors import StoreUnavailable
from ...types import StopToken
from . import Codec, Fault

T = TypeVar("T")

MAX_BATCH_PAGES = 256
MAX_BATCH_NBYTES = 16 << 20
"""Frames of one hop: a few milliseconds of work, beside which the hop is cheap."""

_MAX_DEFAULT_THREADS = 4


class Decoded(NamedTuple):
    """How many pages of a batch are good, and what is wrong with the next one."""

    num_pages: int
    fault: Fault | None


class Coding:
    """Encode and decode batches with one codec in a few threads.

    Args:
        num_threads: of its own; None: the number of cores, at most 4.
        threads: where it runs instead; stays the caller's.
    """

    def __init__(self, codec: Codec, num_threads: int | None, threads: Executor | None) -> None:
        self.codec = codec
        self._owns_threads = threads is None
        if threads is None:
            num_threads = num_threads or min(os.cpu_count() or 1, _MAX_DEFAULT_THREADS)
            threads = DaemonThreads(num_threads, "hicache-codec")
        self._threads = threads

    def close(self) -> None:
        """Let the threads go; what waits for one is turned away, what runs ends by itself."""
        if self._owns_threads:
            self._threads.shutdown(wait=False)

    async def encode(
        self, keys: Sequence[str], pages: Sequence[memoryview], stop: StopToken
    ) -> list[memoryview]:
        """Return the frames of ``pages``; fewer, if it was stopped.

        Cancellation: ends the wait at once and stops after the page in hand, which is still being read.
        """

        def work() -> list[memoryview]:
            encode = self.codec.encoder()
            frames: list[memoryview] = []
            for key, page in zip(keys, pages, strict=True):
                if stop.stopped:
                    break
                frames.append(page if is_manifest_key(key) else encode(_bytes_of(key), page))
            return frames

        return await self._in_thread(work, [stop])

    async def decode(
        self,
        keys: Sequence[str],
        frames: Sequence[memoryview],
        into: Sequence[memoryview],
        tokens: Sequence[StopToken],
    ) -> Decoded:
        """Fill buffers with the pages of ``frames``, in order, until one is bad or the first token says stop.

        Args:
            tokens: busy while a thread is at it.
        Cancellation: ends the wait at once and stops after the page in hand.
        """
        stop = tokens[0]

        def work() -> Decoded:
            decode = self.codec.decoder()
            for count, (key, frame, buffer) in enumerate(zip(keys, frames, into, strict=True)):
                if stop.stopped:
                    return Decoded(count, None)
                if is_manifest_key(key):
                    buffer[:] = frame
                elif (fault := decode(_bytes_of(key), frame, buffer)) is not None:
                    return Decoded(count, fault)
            return Decoded(len(keys), None)

        return await self._in_thread(work, tokens)

    async def _in_thread(self, work: Callable[[], T], tokens: Sequence[StopToken]) -> T:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            for token in tokens:
                token.job_ended()
            resolve(ended)

        try:
            job = self._threads.submit(copy_context().run, work)
        except RuntimeError as error:
            raise StoreUnavailable(f"the codec's threads did not take the job: {error}") from None
        for token in tokens:
            token.job_started()
        job.add_done_callback(lambda _: post_to_loop(loop.call_soon_threadsafe, end))
        try:
            await ended
        except asyncio.CancelledError:
            tokens[0].stop()
            job.cancel()  # does nothing to one that runs
            raise
        if job.cancelled():
            raise StoreUnavailable("the store was closed while the call ran")
        return job.result()


def batches(sizes: Sequence[int]) -> Iterator[range]:
    """Cut a row of items of so many bytes into batches of a bounded size, each of one item or more."""
    first, nbytes = 0, 0
    for item, size in enumerate(sizes):
        if item > first and (nbytes + size > MAX_BATCH_NBYTES or item - first >= MAX_BATCH_PAGES):
            yield range(first, item)
            first, nbytes = item, 0
        nbytes += size
    if first < len(sizes):
        yield range(first, len(sizes))


def _bytes_of(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")
