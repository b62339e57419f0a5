"""TorchRuntime: streams, events and pinned memory through torch.cuda."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..errors import ConfigError
from ..types import Pages
from .runtime import Stream

_PORTABLE_AND_MAPPED = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped: known to every context, and readable by kernels."""


class TorchRuntime:
    """What :class:`Runtime` says, on one CUDA device.

    Args:
        device: as ``cuda`` or ``cuda:1``.

    Raises:
        ConfigError: there is no such device.
    """

    def __init__(self, device: str | torch.device) -> None:
        wanted = torch.device(device)
        if wanted.type != "cuda":
            raise ConfigError(
                f"device is {wanted}; a CudaDevice copies for tensors on cuda, others need their own"
            )
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device is {wanted}, and torch {torch.__version__} finds no CUDA device; check nvidia-smi and that "
                "this torch was built for CUDA, or use CpuDevice with tensors in host memory"
            )
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device is {wanted}, and there are {torch.cuda.device_count()} CUDA devices")
        self.device = torch.device("cuda", index)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.device}>"

    def check_device(self, device: torch.device) -> None:
        """Raise ConfigError unless ``device`` is this one."""
        if device != self.device:
            raise ConfigError(
                f"kv is on {device} and the device is for {self.device}; make CudaDevice(kv.device)"
            )

    def new_stream(self) -> torch.cuda.Stream:
        """Return a stream of high priority: it seldom works, and short; and torch takes it from a pool of few."""
        return torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    def default_stream(self) -> torch.cuda.Stream:
        """Return the device's default stream."""
        return torch.cuda.default_stream(self.device)

    def key(self, stream: Stream) -> Hashable:
        """Return the handle of ``stream`` and its device."""
        if not isinstance(stream, torch.cuda.Stream):
            raise ConfigError(f"stream is a {type(stream).__name__}; give a torch.cuda.Stream")
        return stream.device_index, stream.cuda_stream

    def record(self, stream: Stream) -> RecordedEvent:
        """Record a fresh event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return RecordedEvent(event)

    def order(self, stream: Stream, event: Any) -> None:
        """Let ``stream`` wait for ``event``."""
        stream.wait_event(event.event)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Make ``stream`` and its device current."""
        return torch.cuda.stream(stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue one cudaMemcpyAsync."""
        target.copy_(source, non_blocking=True)

    def device_pages(self, pages: Pages) -> torch.Tensor:
        """Copy page ids through pinned memory of torch's own cache, which keeps it until the copy is over."""
        return torch.from_numpy(pages).pin_memory().to(self.device, non_blocking=True)

    def copy_pages(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_pages: torch.Tensor,
        target_pages: torch.Tensor,
    ) -> None:
        """Launch the page kernel on the current stream."""
        from .kernels import copy_pages

        copy_pages(source, target, source_pages, target_pages)

    def synchronize(self, stream: Stream) -> None:
        """Wait for ``stream``."""
        stream.synchronize()

    def register(self, address: int, nbytes: int) -> None:
        """Call cudaHostRegister."""
        with torch.cuda.device(self.device):
            self._check(_cudart().cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED))

    def unregister(self, address: int) -> None:
        """Call cudaHostUnregister."""
        with torch.cuda.device(self.device):
            self._check(_cudart().cudaHostUnregister(address))

    def check_kernels(self) -> None:
        """Import Triton and the kernels."""
        from . import kernels  # noqa: F401 - an import that fails says what to install

    def _check(self, code: Any) -> None:
        if int(code):
            # CUDA remembers a refused call, and the next launch, somebody else's, would report it as its own.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            raise RuntimeError(f"{_cudart().cudaGetErrorString(code)} (CUDA error {int(code)})")


class RecordedEvent:
    """An event that is recorded.

    While a thread captures a graph in the global mode CUDA refuses to say of any event whether it has completed.
    That is no answer, and least of all that the device is lost.
    """

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        """Return whether it has completed, as far as CUDA says. Raises: RuntimeError: the device is lost."""
        try:
            return bool(self.event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as refused:
            if "captur" in str(refused).lower():
                return False
            raise

    def synchronize(self) -> None:
        """Wait for it in the calling thread."""
        self.event.synchronize()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
