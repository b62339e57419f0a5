"""An engine that is not async: it runs in the main thread, and the cache on a loop of its own beside it."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from hicache_async import CacheConfig, DeviceKV, HiCache, Loading, LoopRunner, PrefixLease, StepBatch

LAYERS, PAGES, PAGE_SIZE, HEADS, HEAD_DIM = 2, 64, 16, 2, 64
NEW_TOKENS = 3  # each request decodes so many
k, v = ([torch.zeros(PAGES, PAGE_SIZE, HEADS, HEAD_DIM) for _ in range(LAYERS)] for _ in "kv")


@dataclass(eq=False)
class Request:
    """One request, as the engine sees it."""

    id: str
    tokens: list[int]
    admission: Future[tuple[PrefixLease, Loading]] = field(init=False)
    lease: PrefixLease = field(init=False)
    loading: Loading = field(init=False)
    pages: list[int] = field(init=False)  # of all its tokens, in order
    computed: int = 0
    decoded: int = 0


def post_admission(runner: LoopRunner, request: Request) -> None:
    """Let the cache look for the prompt while the engine computes others."""

    async def admit(cache: HiCache) -> tuple[PrefixLease, Loading]:  # on the cache's loop
        with cache.match_prefix(request.id, request.tokens) as lease:
            await lease.prefetch()
            loading = await lease.load(total_tokens=len(request.tokens) + NEW_TOKENS)
            return lease.keep(), loading

    # If its client hangs up, `request.admission.cancel()` is all there is to do: what comes too late is undone.
    request.admission = runner.post(admit, undo=lambda admitted: admitted[0].release())


def begin(request: Request) -> None:
    """Take a request into the batch whose admission is through."""
    request.lease, request.loading = request.admission.result()
    request.pages = request.loading.pages.tolist()
    request.computed = request.loading.tokens


def forward(request: Request) -> None:
    """Compute all tokens that have no KV yet, and decode one more: here your model runs."""
    for layer in range(LAYERS):
        request.loading.block(layer)  # from any thread
        for page in request.pages[request.computed // PAGE_SIZE :]:
            k[layer][page], v[layer][page] = 1.0, 2.0
    request.computed = len(request.tokens)
    request.tokens.append(7)
    request.decoded += 1


def serve(runner: LoopRunner, requests: list[Request]) -> int:
    """Serve all requests, in a batch that changes from step to step; returns the number of steps."""
    for request in requests:
        post_admission(runner, request)
    waiting, running = list(requests), list[Request]()
    said = StepBatch()  # what the last step has brought
    num_steps = 0
    while waiting or running:
        for request in [request for request in waiting if request.admission.done()]:
            waiting.remove(request)
            running.append(request)
            begin(request)
        # One hop to the cache's loop for the whole batch: what was done, and room for what comes.
        said.allocate = [(request.lease, len(request.tokens)) for request in running]
        allocations = runner.step(said).allocations
        said = StepBatch()
        if not running:
            runner.wait()  # until an admission is through
            continue
        for request, allocation in zip(running, allocations, strict=True):
            assert allocation is not None, "no room: preempt a request"
            allocation.block()
            request.pages += allocation.pages.tolist()
            forward(request)
        said.commit = [(request.lease, request.computed) for request in running]
        said.extend = [(request.lease, [7]) for request in running]
        said.release = [request.lease for request in running if request.decoded == NEW_TOKENS]
        running = [request for request in running if request.decoded < NEW_TOKENS]
        num_steps += 1
    runner.step(said)
    return num_steps


async def num_leases(cache: HiCache) -> int:
    """Return how many leases were not released."""
    return cache.stats().leases


def main() -> None:
    """Serve five requests that begin alike."""
    config = CacheConfig(page_size=PAGE_SIZE, host_reserve_bytes=0)
    beginning = list(range(96))
    requests = [
        Request(f"request {number}", beginning + [1000 * number + i for i in range(20)])
        for number in range(1, 6)
    ]
    with LoopRunner(lambda: HiCache.open(config, kv=DeviceKV.from_layers(k, v))) as runner:
        num_steps = serve(runner, requests)
        print(f"{num_steps} steps, {runner.post(num_leases).result()} leases left")
    cached = sum(request.loading.tokens for request in requests)
    print(f"{cached} of {116 * len(requests)} prompt tokens were cached")


main()
