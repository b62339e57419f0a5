"""An engine that works in steps, with golden pages for a model: begin_step, step, a forward in a thread.

In its forward a request reads all of its pages so far, as attention would, and writes the next one. A
test can hold the forward in its middle. Whatever is read and is not the page's own is noted.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from hicache_async import Books, Fence, HiCache, HostFence, Loading, PrefixLease, StepBatch
from hicache_async.testing.golden import check_page, fill_page
from tests.toy_engine import NUM_LAYERS, PAGE_SIZE, page_hashes

LIMIT_S = 30


class HangUp(Enum):
    """What is done with the pages of a request whose client has gone."""

    AT_STEP_BOUNDARY = auto()
    """The engine's loop releases them when no forward runs."""
    BEHIND_THE_FENCE = auto()
    """The request's task releases them behind the fence of the running forward."""
    AT_ONCE = auto()
    """The request's task releases them: wrong."""


@dataclass(eq=False)
class _Request:
    lease: PrefixLease
    loading: Loading
    tokens: list[int]
    computed: int
    """Tokens whose pages are written."""
    answered: asyncio.Future[Books]
    hashes: list[bytes] = field(init=False)
    pages: list[int] = field(default_factory=list)
    pages_after: Fence | None = None

    def __post_init__(self) -> None:
        self.hashes = page_hashes(self.tokens)

    @property
    def next_stop(self) -> int:
        """Where the next chunk ends: a page, or what is left."""
        return min(self.computed + PAGE_SIZE, len(self.tokens))

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.answered.done()


class StepEngine:
    """Serves prompts over one cache. Use it with :func:`running`.

    Attributes:
        gate: cleared, it holds the next forward between its reads and its writes.
        in_forward: set while a forward stands at the gate or has passed it.
        foreign: what was read and was somebody else's.
        computed_tokens: how many tokens were computed.
    """

    def __init__(self, cache: HiCache, hang_up: HangUp = HangUp.AT_STEP_BOUNDARY) -> None:
        self.cache = cache
        self.hang_up = hang_up
        self.gate = threading.Event()
        self.gate.set()
        self.in_forward = threading.Event()
        self.foreign: list[str] = []
        self.computed_tokens = 0
        self._admitted: list[_Request] = []
        self._running: list[_Request] = []
        self._fence: HostFence | None = None
        self._wake = asyncio.Event()
        self._arrivals: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self, name: str, tokens: list[int]) -> Books:
        """Be the task of one request; its cancellation is a client that hangs up."""
        with self.cache.match_prefix(name, tokens) as lease:
            await lease.prefetch()
            loading = await lease.load()
            answered: asyncio.Future[Books] = asyncio.get_running_loop().create_future()
            request = _Request(lease.keep(), loading, tokens, loading.tokens, answered)
            self._admitted.append(request)
        self._arrivals.put_nowait(name)
        self._wake.set()
        try:
            return await answered
        except asyncio.CancelledError:
            self._wake.set()
            if self.hang_up is HangUp.AT_ONCE:
                lease.release()
            elif self.hang_up is HangUp.BEHIND_THE_FENCE:
                lease.release(after=self._fence)
            raise

    async def held(self) -> None:
        """Hold the next forward in its middle, and return when it stands there."""
        self.gate.clear()
        self.in_forward.clear()
        assert await asyncio.to_thread(self.in_forward.wait, LIMIT_S)

    async def admitted(self, name: str) -> None:
        """Return when a request has loaded what it could and waits for the next step."""
        while await self._arrivals.get() != name:
            pass

    async def run(self) -> None:
        """Be the engine's loop."""
        while True:
            finished = self._finish()
            grant = await self.cache.begin_step(len(self._admitted) + len(self._running))
            assert {request.lease for request in self._admitted if not request.is_gone} >= set(grant.loaded)
            self._running += self._admitted
            self._admitted.clear()
            result = self.cache.step(
                StepBatch(
                    commit=[
                        (each.lease, each.computed) for each in [*self._running, *finished] if each.pages
                    ],
                    release=[each.lease for each in finished],
                    allocate=[(each.lease, each.next_stop) for each in self._running],
                )
            )
            for request, allocation in zip(self._running, result.allocations, strict=True):
                request.pages = [] if allocation is None else request.lease.pages.tolist()
                request.pages_after = None if allocation is None else allocation.after
            batch = [request for request in self._running if request.pages]
            if batch:
                await self._step(batch)
            elif self._running:  # pages come back when the last fence has been observed
                first = self._running[0]
                await first.lease.allocate(first.next_stop)
            else:
                self._wake.clear()
                await self._wake.wait()

    def _finish(self) -> list[_Request]:
        """Take those out of the batch that are answered, or whose client has gone."""
        for request in self._running:
            if request.computed == len(request.tokens) and not request.answered.done():
                request.answered.set_result(request.lease.books)
        finished = [request for request in self._running if request.is_gone]
        self._running = [request for request in self._running if not request.is_gone]
        if self.hang_up is HangUp.AT_STEP_BOUNDARY:
            return finished
        # Those that were cancelled have released themselves, and what they computed is lost.
        return [request for request in finished if not request.answered.cancelled()]

    async def _step(self, batch: Sequence[_Request]) -> None:
        self._fence = self.cache.host_fence()
        await asyncio.to_thread(self._forward, batch, self._fence)
        for request in batch:
            self.computed_tokens += request.next_stop - request.computed
            request.computed = request.next_stop

    def _forward(self, batch: Sequence[_Request], fence: HostFence) -> None:
        kv = self.cache._ctx.kv
        for request in batch:
            for layer in range(NUM_LAYERS):
                request.loading.block(layer)
            if request.pages_after is not None:
                request.pages_after.block()
        self.in_forward.set()
        assert self.gate.wait(LIMIT_S)
        for request in batch:
            start = request.computed // PAGE_SIZE
            with self._noting_foreign_bytes():
                for page, page_hash in zip(request.pages[:start], request.hashes, strict=False):
                    check_page(kv, page, page_hash)
            if start < len(request.hashes):
                fill_page(kv, request.pages[start], request.hashes[start])
        fence.set()

    @contextlib.contextmanager
    def _noting_foreign_bytes(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.foreign.append(str(error))


@contextlib.asynccontextmanager
async def running(cache: HiCache, hang_up: HangUp = HangUp.AT_STEP_BOUNDARY) -> AsyncIterator[StepEngine]:
    """Run an engine over ``cache`` until the block is left, with no request in it any more."""
    engine = StepEngine(cache, hang_up)
    loop = asyncio.create_task(engine.run())
    yield engine
    assert not loop.done(), loop.exception()
    loop.cancel()
    await asyncio.wait([loop])
    for request in engine._running + engine._admitted:
        request.lease.release()
