"""FakeCuda: streams, events and pinned memory without a GPU, and stricter than one.

One thread stands for the GPU. It works on all streams in turns of its own choosing, spoils what it is about to write as
soon as it may, writes it later, and reads the source only then. What CUDA answers with silence and wrong bytes is
an error here: to wait for an event that was never recorded, to record one twice, to copy memory that is not pinned
or lies across two registrations, to unpin what a copy still uses.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from hicache_async.cuda import CudaDevice
from hicache_async.errors import ConfigError
from hicache_async.memory.layout import alike
from hicache_async.types import Pages

SPOILED = 0xDB


class FakeStream:
    """A queue of work; ``is_held``: it does not go on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.works: deque[Work] = deque()
        self.is_held = False

    def __repr__(self) -> str:
        return f"<FakeStream {self.name}, {len(self.works)} queued>"


class FakeEvent:
    """An event; it has a stream once it is recorded."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.stream: FakeStream | None = None
        self.has_completed = False
        self.num_queries = 0

    def query(self) -> bool:
        self.num_queries += 1
        if self._cuda.is_lost:
            raise RuntimeError("an illegal memory access was encountered")
        if self.stream is None:
            raise self._cuda.fault("an event was asked that was never recorded")
        return self.has_completed


class Work:
    """Something queued on a stream: ready when ``event`` has completed, begun, then done."""

    def __init__(
        self,
        done: Callable[[], object],
        begin: Callable[[], object] | None = None,
        event: FakeEvent | None = None,
        touches: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self.done = done
        self.begin = begin
        self.event = event
        self.touches = touches


class FakeCuda:
    """A runtime for CudaDevice; see above.

    Args:
        is_engine_here: the engine's work is done in the calling threads, so they wait where its stream would.

    Attributes:
        default: what ``default_stream`` returns.
        faults: what was used wrongly; empty in the end.
        num_copies, num_kernels: queued so far; ``pieces``: bytes of each copy.
        fail_at: the copy or kernel with this number is refused.
        refuse_beyond: so many pinned bytes are granted.
        is_lost: the device answers every question with an error, and works no more.
        registering_threads: names of the threads that pinned.
    """

    def __init__(self, seed: int = 1, *, is_engine_here: bool = False) -> None:
        self._is_engine_here = is_engine_here
        self.default = FakeStream("default")
        self.streams = [self.default]
        self.faults: list[str] = []
        self.num_copies = self.num_kernels = 0
        self.pieces: list[int] = []
        self.fail_at: int | None = None
        self.refuse_beyond: int | None = None
        self.is_lost = False
        self.has_kernels = True
        self.device_type = "cpu"
        self.registering_threads: set[str] = set()
        self.registered: dict[int, int] = {}
        self._is_over = False
        self._random = random.Random(seed)
        self._current = threading.local()
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="fake-gpu", daemon=True).start()

    def __repr__(self) -> str:
        return "<FakeCuda>"

    def fault(self, what: str) -> AssertionError:
        """Remember what was wrong, and return it to be raised."""
        self.faults.append(what)
        return AssertionError(what)

    # What a test does

    def end(self) -> None:
        """Stop the GPU when its work is done; raises AssertionError where it was used wrongly."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        assert not self.faults, self.faults

    def hold(self, stream: FakeStream, *, held: bool = True) -> None:
        """Let a stream stand still, or go on."""
        with self._changed:
            stream.is_held = held
            self._changed.notify_all()

    def new_user_stream(self, name: str) -> FakeStream:
        """Return a stream of the engine."""
        self.streams.append(stream := FakeStream(name))
        return stream

    def queue_write(self, stream: FakeStream, tensor: torch.Tensor, value: int) -> None:
        """Queue a kernel of the engine that fills ``tensor``."""
        self._queue(stream, Work(lambda: tensor.fill_(value), touches=(tensor,)))

    def queue_read(self, stream: FakeStream, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Queue a kernel of the engine that reads ``tensor``; what it saw is in the list when it has run."""
        seen: list[torch.Tensor] = []
        self._queue(stream, Work(lambda: seen.append(tensor.clone()), touches=(tensor,)))
        return seen

    # Runtime

    def check_device(self, device: torch.device) -> None:
        if device.type != self.device_type:
            raise ConfigError(f"kv is on {device}; the fake device is {self.device_type}")

    def new_stream(self) -> FakeStream:
        return self.new_user_stream(f"copy {len(self.streams)}")

    def default_stream(self) -> FakeStream:
        return self.default

    def key(self, stream: object) -> Hashable:
        if not isinstance(stream, FakeStream):
            raise ConfigError(f"stream is a {type(stream).__name__}; give a FakeStream")
        return id(stream)

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent(self)
        event.stream = stream

        def complete() -> None:
            event.has_completed = True

        self._queue(stream, Work(complete))
        return event

    def order(self, stream: FakeStream, event: FakeEvent) -> None:
        if event.stream is None:
            raise self.fault("a stream was ordered behind an event that was never recorded")
        if self._is_engine_here and stream is self.default:
            with self._changed:
                self._changed.wait_for(lambda: event.has_completed)
            return
        self._queue(stream, Work(lambda: None, event=event))

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = getattr(self._current, "stream", self.default)
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._refuse_if_told()
        self.num_copies += 1
        self.pieces.append(target.numel())
        if not (target.is_contiguous() and source.is_contiguous() and target.shape == source.shape):
            raise self.fault(
                f"a copy of {source.shape} {source.stride()} to {target.shape} {target.stride()}"
            )
        if self._is_pinned(target) == self._is_pinned(source):
            raise self.fault("a copy needs one side pinned, within one registration")
        work = Work(lambda: target.copy_(source), lambda: target.fill_(SPOILED), touches=(source, target))
        self._queue(self._current.stream, work)

    def device_pages(self, pages: Pages) -> torch.Tensor:
        return torch.from_numpy(pages.copy())

    def copy_pages(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_pages: torch.Tensor,
        target_pages: torch.Tensor,
    ) -> None:
        self._refuse_if_told()
        self.num_kernels += 1
        taken, given = alike(source.numpy(), target.numpy())

        def spoil() -> None:
            given[target_pages.numpy()] = SPOILED

        def move() -> None:
            given[target_pages.numpy()] = taken[source_pages.numpy()]

        self._queue(self._current.stream, Work(move, spoil, touches=(source, target)))

    def synchronize(self, stream: FakeStream) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not stream.works or self.is_lost)
        if self.is_lost:
            raise RuntimeError("an illegal memory access was encountered")

    def register(self, address: int, nbytes: int) -> None:
        self.registering_threads.add(threading.current_thread().name)
        if self.refuse_beyond is not None and sum(self.registered.values()) + nbytes > self.refuse_beyond:
            raise RuntimeError("out of memory (CUDA error 2)")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        nbytes = self.registered.pop(address)
        if self.is_lost:
            raise RuntimeError("an illegal memory access was encountered")
        with self._changed:
            for stream in self.streams:
                for tensor in (tensor for work in stream.works for tensor in work.touches):
                    if address <= tensor.data_ptr() < address + nbytes:
                        self.fault(f"{stream!r} still works on memory that is being unpinned")

    def check_kernels(self) -> None:
        if not self.has_kernels:
            raise ConfigError("io_mode kernel needs Triton")

    # Inside

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        return any(
            at <= start and start + tensor.numel() <= at + size for at, size in self.registered.items()
        )

    def _refuse_if_told(self) -> None:
        if self.fail_at is not None and self.num_copies + self.num_kernels >= self.fail_at:
            raise RuntimeError("an injected failure")

    def _queue(self, stream: FakeStream, work: Work) -> None:
        with self._changed:
            stream.works.append(work)
            self._changed.notify_all()

    def _ready(self) -> list[FakeStream]:
        return [
            stream
            for stream in self.streams
            if stream.works
            and not stream.is_held
            and ((event := stream.works[0].event) is None or event.has_completed)
        ]

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or (self._ready() and not self.is_lost))
                if not self._ready() or self.is_lost:
                    return
                stream = self._random.choice(self._ready())
                work = stream.works[0]
                if work.begin is not None:
                    work.begin()
                    work.begin = None
                    continue
                work.done()
                stream.works.popleft()
                self._changed.notify_all()


class FakeCudaDevice(CudaDevice):
    """A CudaDevice that takes its GPU with it."""

    def __init__(self, seed: int = 1, *, low_latency: bool = False, is_engine_here: bool = False) -> None:
        self.cuda = FakeCuda(seed, is_engine_here=is_engine_here)
        super().__init__(runtime=self.cuda, low_latency=low_latency)

    async def aclose(self) -> None:
        """Close, and fail where CUDA was used wrongly."""
        await super().aclose()
        self.cuda.end()
