"""A small LLM engine that shares its K/V pages with a HiCache.

One event loop serves many requests. Each request comes in its own task, where its cached prefix is
fetched and its pages are allocated; then the engine's loop owns it, until it is answered or its client
has gone. The model runs in a thread, one step at a time. Between two steps, and only there, the loop
takes requests in, commits pages and gives them back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

import torch
from llama import ContextKV, Llama, LlamaConfig
from torch import Tensor

from hicache_async import Books, DeviceKV, Fence, HiCache, HostFence, Loading, PrefixLease


class PagedKV:
    """The K/V of all sequences: per layer two tensors (num_pages, page_size, kv_heads, head_dim), float32."""

    def __init__(self, config: LlamaConfig, num_pages: int, page_size: int) -> None:
        shape = (num_pages, page_size, config.num_key_value_heads, config.head_dim)
        self.page_size = page_size
        self.k = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self.v = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        # Attention reads a context in one piece. It is gathered here, layer after layer: fresh memory
        # for each would be paid for in page faults.
        self._gathered = torch.zeros(shape), torch.zeros(shape)

    def device_kv(self) -> DeviceKV:
        """Return the same tensors as the cache wants to see them."""
        return DeviceKV.from_layers(self.k, self.v)

    def context(self, pages: Tensor, start: int, stop: int, ready: Callable[[int], None]) -> ContextKV:
        """Return what the model calls in each layer, to compute positions [start, stop) of a sequence.

        Args:
            pages: page ids of the sequence, int64, in logical order.
            start: the first position to write.
            stop: behind the last one; also the length of the context.
            ready: returns when a layer's older K/V can be read.
        """
        positions = torch.arange(start, stop)
        page, slot = pages[positions // self.page_size], positions % self.page_size
        read = pages[: -(-stop // self.page_size)]

        def update(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            ready(layer)
            self.k[layer][page, slot] = k
            self.v[layer][page, slot] = v
            whole = (
                torch.index_select(pool[layer], 0, read, out=gathered[: len(read)])
                for pool, gathered in zip((self.k, self.v), self._gathered, strict=True)
            )
            k, v = (each.flatten(0, 1)[:stop] for each in whole)
            return k, v

        return update


@dataclass(frozen=True)
class Answer:
    """What the model said, how long its first token took, and where the prompt's K/V came from."""

    tokens: list[int]
    ttft_s: float
    books: Books


@dataclass(eq=False)
class _Request:
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    lease: PrefixLease
    loading: Loading
    pages: Tensor
    pages_after: Fence | None
    submitted_at: float
    answered: asyncio.Future[Answer]
    computed: int
    """K/V of positions [0, computed) is in the pages."""
    ttft_s: float = field(default=0.0, init=False)


class PagedEngine:
    """Continuous batching over one model and one cache; use it as an async context manager.

    Args:
        model: the model; ``kv`` has its shape.
        kv: the pages, of which ``cache`` keeps the books.
        cache: an open cache over ``kv.device_kv()``.
        stop_token: ends an answer, of which it is no part.
        reuse: False computes every prompt from its first token, in otherwise the same steps.
        on_computed: called after each step with the number of tokens it has computed.
    """

    # The chunk grid is the page: a chunk starts at a multiple of it and never goes over the next one.
    # What a cache returns is always whole pages, so a prompt that found a prefix goes on with the very
    # chunks (and so the very bits) of one that found nothing. Chunks of 256 tokens would be computed a
    # fifth faster here, but a prefix could then end within a chunk.
    def __init__(
        self,
        model: Llama,
        kv: PagedKV,
        cache: HiCache,
        *,
        stop_token: int | None = None,
        reuse: bool = True,
        on_computed: Callable[[int], object] = lambda num_tokens: None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.cache = cache
        self.stop_token = stop_token
        self.reuse = reuse
        self.on_computed = on_computed
        # One thread of its own: each thread that runs a model brings its own team of OpenMP threads.
        self._thread = ThreadPoolExecutor(1, "forward")
        self._admission = asyncio.Lock()
        self._admitted: list[_Request] = []
        self._running: list[_Request] = []
        self._wake = asyncio.Event()
        self._closing = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.create_task(self._run(), name="engine")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closing = True
        self._wake.set()
        await asyncio.wait([self._loop])  # unlike awaiting the task, this never cancels it
        self._thread.shutdown(wait=False)
        if not self._loop.cancelled():
            self._loop.result()

    async def generate(self, request_id: str, prompt: Sequence[int], *, max_tokens: int = 24) -> Answer:
        """Answer ``prompt`` greedily, with at most ``max_tokens`` tokens.

        Cancellation: the client hangs up. A running request leaves the batch at the next step.
        """
        if not prompt or max(prompt) >= self.model.config.vocab_size:
            raise ValueError(f"a prompt is one token or more, each below {self.model.config.vocab_size}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be 1 or more")
        submitted_at = time.perf_counter()
        total_tokens = len(prompt) + max_tokens
        # Another salt is another world: without reuse nobody's pages are found.
        salt = b"" if self.reuse else request_id.encode()
        with self.cache.match_prefix(request_id, prompt, salt=salt) as lease:
            await lease.prefetch()
            # It gets all pages it will ever need, so a request in the batch never has to be thrown out.
            # One request at a time: of two that hold half of their pages each, neither would ever run.
            async with self._admission:
                loading = await lease.load(total_tokens)
                allocation = await lease.allocate(total_tokens)
            if self._closing:
                raise RuntimeError(f"request {request_id} came when the engine was closing")
            request = _Request(
                tokens=list(prompt),
                prompt_tokens=len(prompt),
                max_tokens=total_tokens,
                lease=lease.keep(),  # from here on the engine's loop releases it
                loading=loading,
                pages=torch.as_tensor(lease.pages),
                pages_after=allocation.after,
                submitted_at=submitted_at,
                answered=asyncio.get_running_loop().create_future(),
                computed=loading.tokens,
            )
            self._admitted.append(request)
        self._wake.set()
        return await request.answered

    async def _run(self) -> None:
        fence: HostFence | None = None
        try:
            while not self._closing:
                self._take_in()
                if not self._running:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                fence = self.cache.host_fence()
                batch = list(self._running)
                work = asyncio.get_running_loop().run_in_executor(self._thread, self._step, batch, fence)
                await asyncio.wait([work])  # a cancel ends this wait, never the step, which sets its fence
                for request, token in zip(batch, work.result(), strict=True):
                    self._advance(request, token)
        except Exception as error:  # whatever it was, nobody waits for ever for an answer
            for request in self._running:
                if not request.answered.done():
                    request.answered.set_exception(error)
            raise
        finally:
            self._closing = True
            # If this was cancelled, the thread may be in mid-step. Its pages come back when it has ended.
            for request in self._running + self._admitted:
                request.lease.release(after=fence)
                request.answered.cancel()

    def _take_in(self) -> None:
        """At a step boundary: let go of requests whose client has gone, take in those that are ready."""
        self._running += self._admitted
        self._admitted.clear()
        for request in [each for each in self._running if each.answered.done()]:
            self._retire(request)

    def _step(self, batch: Sequence[_Request], fence: HostFence) -> list[int]:
        """In the thread: compute one chunk or one token of each request; returns the tokens that follow.

        One request after the other: what a request computes must not depend on who shares its batch.
        """
        try:
            tokens = [self._forward(request) for request in batch]
        except BaseException as error:
            fence.fail(error)
            raise
        fence.set()
        return tokens

    def _forward(self, request: _Request) -> int:
        start, stop = request.computed, self._end_of_chunk(request)
        if request.pages_after is not None:
            request.pages_after.block()
        # Each layer waits for its own part of the load, so the first layers compute while others still come.
        context = self.kv.context(request.pages, start, stop, request.loading.block)
        logits = self.model.forward(torch.tensor(request.tokens[start:stop]), start, context)
        return int(logits.argmax())

    def _end_of_chunk(self, request: _Request) -> int:
        if request.computed >= request.prompt_tokens:
            return request.computed + 1
        next_page = (request.computed // self.kv.page_size + 1) * self.kv.page_size
        return min(next_page, request.prompt_tokens)

    def _advance(self, request: _Request, token: int) -> None:
        """At a step boundary: commit what was computed, and go on with ``token`` if it is a new one."""
        stop = self._end_of_chunk(request)
        self.on_computed(stop - request.computed)
        request.computed = stop
        if self.reuse and stop <= request.prompt_tokens:
            # Prompts only. The K/V of an answer was computed token by token; as part of the next prompt it
            # is computed in chunks and differs in the last bit. An engine that does not mind commits it all.
            request.lease.commit(stop)
        if stop < len(request.tokens):
            return
        if stop == request.prompt_tokens:
            request.ttft_s = time.perf_counter() - request.submitted_at
        if token != self.stop_token:
            request.tokens.append(token)
            request.lease.extend([token])
        if token == self.stop_token or len(request.tokens) == request.max_tokens:
            answer = Answer(request.tokens[request.prompt_tokens :], request.ttft_s, request.lease.books)
            if not request.answered.done():
                request.answered.set_result(answer)
            self._retire(request)

    def _retire(self, request: _Request) -> None:
        self._running.remove(request)
        request.lease.release()
