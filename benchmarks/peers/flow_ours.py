"""Our side of the flows: a HiCache with a FileStore."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from itertools import cycle
from pathlib import Path

import structlog
import torch

from hicache_async import HiCache
from hicache_async.stores import FileStore

from ..geometry import prompt
from ..harness import timed_async
from ..prompts import config, device_kv, prefetch, store_prompts
from .samples import NUM_SAMPLES, NUM_WARMUPS, report


async def prefetch8192() -> list[float]:
    """Prefetch two prompts in turn; each finds nothing of its own in the host and every page in the store."""
    prompts = [prompt(number) for number in range(2)]
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as directory:
        kv = device_kv()
        await store_prompts(Path(directory), kv, prompts)
        store = FileStore(directory, existence_ttl_s=0)
        async with HiCache.open(config(), kv=kv, store=store) as cache:
            turns = cycle(prompts)
            sample = timed_async(lambda: prefetch(cache, next(turns)))
            seconds = [await sample() for _ in range(NUM_WARMUPS + NUM_SAMPLES)]
        await store.aclose()
    return seconds


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)
    report({"flow.prefetch8192": lambda: asyncio.run(prefetch8192())})
