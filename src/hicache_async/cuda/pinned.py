"""PinnedMemory: page-locked host memory, registered in chunks and released before the memory goes."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._log import logger
from ..errors import ConfigError
from ..memory.buffer import touched_buffer
from .runtime import Runtime

CHUNK_NBYTES = 1 << 30
"""Bytes of one registration: the driver is locked while one runs, and a cancel waits for its end."""


_abandoned: list[NDArray[np.uint8]] = []
"""What nobody may free any more. The one thing here that outlives its owner, because a device may."""


class PinnedMemory:
    """The pinned buffers of one device.

    Args:
        chunk_nbytes: a multiple of the system's page size.

    **Ownership**: a buffer is the caller's. It is unpinned when it is dropped, by :meth:`release`, or before the
        interpreter exits, whichever comes first: what a process leaves pinned can keep the kernel for long.
    """

    def __init__(self, runtime: Runtime, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self._runtime = runtime
        self._chunk_nbytes = chunk_nbytes
        # A buffer may be collected, and so unpinned, in whatever this thread does, with the lock held as well.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._pinned: dict[int, _Chunk] = {}
        self._releases: list[weakref.finalize[Any, NDArray[np.uint8]]] = []

    @property
    def nbytes(self) -> int:
        """How much is pinned now."""
        return sum(chunk.nbytes for chunk in self._pinned.copy().values())

    @property
    def cuts(self) -> list[int]:
        """The addresses at which one registration of a buffer follows another, ascending: no copy may lie across."""
        return sorted(address for address, chunk in self._pinned.copy().items() if not chunk.is_first)

    def allocate(self, nbytes: int, cancelled: threading.Event) -> NDArray[np.uint8]:
        """Allocate, touch and pin ``nbytes``. Blocks: run it in a worker thread.

        Args:
            cancelled: set it to end early; what is returned then is neither touched nor pinned whole.
        Raises:
            ConfigError: the system does not let so much be pinned; nothing of it stays pinned.
        """
        memory = touched_buffer(nbytes, cancelled)
        start, done = memory.ctypes.data, list[int]()
        for at in range(0, nbytes, self._chunk_nbytes):
            if cancelled.is_set():
                break
            try:
                self._runtime.register(start + at, size := min(self._chunk_nbytes, nbytes - at))
            except RuntimeError as refused:
                self._unpin(done)
                raise ConfigError(_refusal(nbytes, at, refused)) from refused
            self._pinned[start + at] = _Chunk(size, is_first=at == 0)
            done.append(start + at)
        with self._lock:
            self._releases = [release for release in self._releases if release.alive]
            self._releases.append(weakref.finalize(memory, self._unpin, done))
        return memory

    def release(self) -> None:
        """Unpin everything, which no copy may be using any more; the memory stays. Blocks."""
        for release in self._taken():
            release()

    def abandon(self) -> None:
        """Keep memory, pinned, until the process ends: a copy may be using it for ever, and to unpin waits for that."""
        kept = (release.detach() for release in self._taken())
        _abandoned.extend(parts[0] for parts in kept if parts is not None)

    def _taken(self) -> list[weakref.finalize[Any, NDArray[np.uint8]]]:
        with self._lock:
            releases, self._releases = self._releases, []
        return releases

    def _unpin(self, addresses: Sequence[int]) -> None:
        if os.getpid() != self._pid:  # a forked child has the memory, and not the device
            return
        for address in addresses:
            try:
                self._runtime.unregister(address)
            except RuntimeError as refused:  # the device is lost; there is nothing left to be done
                logger.warning("device.unpin_failed", fault=repr(refused))
            del self._pinned[address]


class _Chunk(NamedTuple):
    nbytes: int
    is_first: bool


def _refusal(nbytes: int, num_pinned: int, refused: RuntimeError) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    return (
        f"{nbytes} bytes of host memory were to be pinned, and after {num_pinned} the system refused: {refused}; "
        f"the limit of locked memory (ulimit -l) is {limit}; raise it, or lower host_bytes or host_ratio"
    )
