"""Gpu: all that only a GPU can do for gpu_check, in torch.cuda calls; tests put a stand-in in its place."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import torch

from hicache_async.cuda import CudaDevice
from hicache_async.cuda.runtime import Runtime, Stream
from hicache_async.cuda.torch_runtime import TorchRuntime

MATRIX_SIDE = 8192
CALIBRATION_S = 0.05


class Gpu:
    """The first CUDA device that this process sees; ``CUDA_VISIBLE_DEVICES`` makes another one the first.

    Attributes:
        torch_device: where tensors are made.
        runtime: its streams, events and pinned memory.

    Raises:
        ConfigError: there is none.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)
        self.runtime: Runtime = TorchRuntime(self.torch_device)
        self._matrices: tuple[torch.Tensor, ...] | None = None
        self._cycles_per_s = 1e9
        stream = self.runtime.new_stream()
        for _ in range(2):  # the first one also loads the kernel and wakes the clocks
            start = self.mark(stream)
            self.stay_busy(stream, CALIBRATION_S)
            self._cycles_per_s *= CALIBRATION_S / self.seconds_between(start, self.mark(stream))

    def describe(self) -> dict[str, object]:
        """Return what the figures depend on."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        try:
            triton = metadata.version("triton")
        except metadata.PackageNotFoundError:
            triton = "none"
        return {
            "gpu": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton,
            "cores": os.cpu_count(),
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"),
        }

    def make_device(self, *, compute_stream: Stream | None = None, low_latency: bool = False) -> CudaDevice:
        """Make the device that is checked. Ownership: the caller closes it."""
        return CudaDevice(self.torch_device, compute_stream=compute_stream, low_latency=low_latency)

    # Memory

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return uint8 zeros on the GPU, which are there when this returns."""
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)
        torch.cuda.current_stream(self.torch_device).synchronize()
        return tensor

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return page-locked uint8 of torch's own, not initialised."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether CUDA knows where ``tensor`` begins as page-locked host memory."""
        return tensor.is_pinned()

    # Work

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue one copy of contiguous bytes."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def stay_busy(self, stream: Stream, seconds: float) -> None:
        """Queue a kernel of one thread that runs for about so long and touches nothing."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def matmul(self, stream: Stream) -> None:
        """Queue a product of two matrices that takes the whole GPU for a millisecond or more."""
        if self._matrices is None:
            ones = torch.ones(MATRIX_SIDE, MATRIX_SIDE, dtype=torch.float16, device=self.torch_device)
            self._matrices = ones, ones.clone(), ones.clone()
            self.synchronize()
        left, right, product = self._matrices
        with torch.cuda.stream(stream):
            torch.mm(left, right, out=product)

    def copy_pages_torch(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_pages: torch.Tensor,
        target_pages: torch.Tensor,
    ) -> None:
        """Copy pages by torch alone, on the current stream: what the kernel has to equal."""
        from hicache_async.cuda.kernels import copy_pages_torch

        copy_pages_torch(source, target, source_pages, target_pages)

    def launch(self) -> None:
        """Run the smallest of kernels. Raises RuntimeError: it failed, or CUDA still tells of an earlier call."""
        torch.arange(8, device=self.torch_device).add_(1)
        self.synchronize()

    # Time

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.torch_device)

    def wait(self, event: Any) -> None:
        """Wait in the calling thread for an event of the runtime, without holding the interpreter."""
        event.synchronize()

    def mark(self, stream: Stream) -> Any:
        """Record the time at which ``stream`` comes here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def seconds_between(self, first: Any, last: Any) -> float:
        """Wait for the ``last`` of two marks, and return how much later than the ``first`` it was reached."""
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000
