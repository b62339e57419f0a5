"""FakeGpu: what gpu_check asks of a GPU, on a FakeCuda."""

from __future__ import annotations

import threading
import time

import torch

from hicache_async.cuda import CudaDevice
from hicache_async.memory.layout import alike
from tests.cuda.fake_cuda import FakeCuda, FakeEvent, FakeStream, Work

SHORT_S = 0.01
"""What is to run for less is over at once."""


class PinningCuda(FakeCuda):
    """A FakeCuda that pins nothing twice.

    Attributes:
        leaves_errors: a refusal is told again to the next kernel.
        stale: what the next kernel is told of.
    """

    leaves_errors = False

    def __init__(self) -> None:
        super().__init__()
        self.stale = ""

    def register(self, address: int, nbytes: int) -> None:
        if any(at < address + nbytes and address < at + size for at, size in self.registered.items()):
            self.stale = "already mapped" if self.leaves_errors else ""
            raise RuntimeError("the memory is already mapped (CUDA error 712)")
        super().register(address, nbytes)


class FakeGpu:
    """What ``benchmarks._gpu.Gpu`` does, on a FakeCuda.

    A kernel that stays busy ends after its time, or when all streams are waited for, whichever comes first: with
    times beyond those of any test nothing depends on the clock.

    Args:
        device_class: of the devices that it makes.
    """

    def __init__(self, cuda: PinningCuda | None = None, device_class: type[CudaDevice] = CudaDevice) -> None:
        self.torch_device = torch.device("cpu")
        self.runtime = self.cuda = cuda or PinningCuda()
        self._device_class = device_class
        self._kernels: dict[FakeEvent, threading.Timer | None] = {}

    def describe(self) -> dict[str, object]:
        return {"gpu": "a stand-in"}

    def make_device(
        self, *, compute_stream: FakeStream | None = None, low_latency: bool = False
    ) -> CudaDevice:
        return self._device_class(runtime=self.cuda, compute_stream=compute_stream, low_latency=low_latency)

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.cuda._is_pinned(tensor)

    def copy(self, stream: FakeStream, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        self.cuda._queue(stream, Work(lambda: target.copy_(source), touches=(target, source)))

    def stay_busy(self, stream: FakeStream, seconds: float) -> None:
        if seconds < SHORT_S:
            return self.matmul(stream)
        over = FakeEvent(self.cuda)
        over.stream = stream

        def start() -> None:
            if not over.has_completed:
                self._kernels[over] = timer = threading.Timer(seconds, self._end, [over])
                timer.daemon = True
                timer.start()

        self._kernels[over] = None
        self.cuda._queue(stream, Work(start))
        self.cuda._queue(stream, Work(lambda: None, event=over))

    def matmul(self, stream: FakeStream) -> None:
        self.cuda._queue(stream, Work(lambda: None))

    def copy_pages_torch(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_pages: torch.Tensor,
        target_pages: torch.Tensor,
    ) -> None:
        taken, given = alike(source.numpy(), target.numpy())
        given[target_pages.numpy()] = taken[source_pages.numpy()]

    def launch(self) -> None:
        if self.cuda.stale:
            raise RuntimeError(self.cuda.stale)

    def synchronize(self) -> None:
        for event in list(self._kernels):
            self._end(event)
        with self.cuda._changed:
            self.cuda._changed.wait_for(lambda: not any(stream.works for stream in self.cuda.streams))

    def wait(self, event: FakeEvent) -> None:
        with self.cuda._changed:
            self.cuda._changed.wait_for(lambda: event.has_completed)

    def mark(self, stream: FakeStream) -> list[float]:
        times: list[float] = []
        self.cuda._queue(stream, Work(lambda: times.append(time.perf_counter())))
        return times

    def seconds_between(self, first: list[float], last: list[float]) -> float:
        with self.cuda._changed:
            self.cuda._changed.wait_for(lambda: last)
        return max(1e-9, last[0] - first[0])

    def _end(self, event: FakeEvent) -> None:
        with self.cuda._changed:
            event.has_completed = True
            if (timer := self._kernels.pop(event, None)) is not None:
                timer.cancel()
            self.cuda._changed.notify_all()
