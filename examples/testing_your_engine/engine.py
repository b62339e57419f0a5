"""A tiny engine, as an example of what one tests with the fixtures of hicache_async.

Its model is a sum: the K of a token is its id, and the answer to a prompt is the sum of all K in the pages of
the request. A page that is not ready, or is another request's, or was freed, gives a wrong answer.
"""

from __future__ import annotations

import torch

from hicache_async import DeviceKV, HiCache, PrefixLease

NUM_PAGES, PAGE_TOKENS = 8, 4


class Engine:
    """Serve prompts, reusing what the cache has of them.

    Args:
        k: (NUM_PAGES, PAGE_TOKENS, 1, 1), int64; the tensor that the cache was opened over.
    """

    def __init__(self, cache: HiCache, k: torch.Tensor) -> None:
        self.cache = cache
        self.k = k
        self.num_computed = 0

    @staticmethod
    def new_kv() -> tuple[torch.Tensor, DeviceKV]:
        """Return the tensor of an engine, and what a cache has to know of it."""
        k = torch.zeros(NUM_PAGES, PAGE_TOKENS, 1, 1, dtype=torch.int64)
        return k, DeviceKV.from_layers([k])

    async def answer(self, request_id: str, tokens: list[int]) -> int:
        """Return the answer to a prompt. Cancellation: gives back whatever the request held."""
        with self.cache.match_prefix(request_id, tokens) as lease:
            await lease.prefetch()
            loading = await lease.load()
            allocation = await lease.allocate(len(tokens))
            await loading.finished()
            allocation.block()
            answer = self._forward(lease, tokens, loading.tokens)
            lease.commit(len(tokens))
            return answer

    def _forward(self, lease: PrefixLease, tokens: list[int], start: int) -> int:
        """Write the K of the tokens from ``start`` on, and read that of all."""
        pages = torch.from_numpy(lease.pages)
        slots = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()[: len(tokens)]
        k = self.k.view(-1)
        k[slots[start:]] = torch.tensor(tokens[start:])
        self.num_computed += len(tokens) - start
        return int(k[slots].sum())
