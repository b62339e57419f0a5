"""Runtime: the few things that a CudaDevice asks of streams, events and pinned memory.

One seam, so that what the device decides can be proven where there is no GPU, by a runtime that is stricter than one.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..types import Pages
from ._waiting import Event

Stream = Any
"""What an engine queues its work on: torch.cuda.Stream."""


class Runtime(Protocol):
    """Streams, events and pinned memory of one device. Any thread; nothing here waits unless it says so."""

    def check_device(self, device: torch.device) -> None:
        """Raise ConfigError unless tensors on ``device`` can be copied here."""
        ...

    def new_stream(self) -> Stream:
        """Return a stream; one that was returned before, or is somebody's, where these are taken in turn from a few."""
        ...

    def default_stream(self) -> Stream:
        """Return the stream on which an engine works that names none."""
        ...

    def key(self, stream: Stream) -> Hashable:
        """Return what ``stream`` is known by.

        Raises: ConfigError: it is no stream.
        """
        ...

    def record(self, stream: Stream) -> Event:
        """Record a fresh event on ``stream``. An event that is recorded twice says nothing of its first time."""
        ...

    def order(self, stream: Stream, event: Event) -> None:
        """Let ``stream`` go on only when ``event``, which has been recorded, has completed."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue on ``stream`` what this thread copies inside."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of contiguous bytes; one side is pinned host memory, within one registration."""
        ...

    def device_pages(self, pages: Pages) -> torch.Tensor:
        """Queue a copy of page ids to the device; returns int64, usable by what is queued behind it."""
        ...

    def copy_pages(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_pages: torch.Tensor,
        target_pages: torch.Tensor,
    ) -> None:
        """Queue a kernel that copies pages of one plane; see :func:`kernels.copy_pages`."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Wait in the calling thread until what is queued on ``stream`` is over."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory and map it into the device. Blocks: run it in a worker thread.

        Raises: RuntimeError: the system refuses.
        """
        ...

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`. Blocks. Raises: RuntimeError: the device is lost."""
        ...

    def check_kernels(self) -> None:
        """Import what :meth:`copy_pages` needs. Blocks. Raises: ConfigError: it is not installed."""
        ...
