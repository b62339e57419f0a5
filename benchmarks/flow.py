"""How long the flows of a whole cache take, beside raw system calls that move the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from itertools import cycle
from pathlib import Path

from hicache_async import HiCache
from hicache_async.stores import FileStore

from . import geometry
from .harness import Benchmark, Record, measure, timed, timed_async
from .prompts import config, device_kv, prefetch, store_prompts
from .raw_files import RawFiles, buffers


async def prefetch_records(quick: bool) -> AsyncIterator[Record]:
    """Bring a prompt of 8,192 tokens from files in the page cache to the host.

    Two prompts take turns in a host that has room for one, so each finds nothing of its own there and
    pushes the other out. All of it is in the time: reading the token ids, hashing, matching, looking the
    keys up, making room, reading, verifying and attaching.
    """
    prompts = [geometry.prompt(number) for number in range(2)]
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
        kv = device_kv()
        await store_prompts(Path(name) / "store", kv, prompts)
        raw = RawFiles(Path(name) / "raw")
        into = buffers(geometry.PROMPT_PAGES, geometry.PAGE_NBYTES)
        raw.write(into)
        store = FileStore(Path(name) / "store", existence_ttl_s=0)
        turns = cycle(prompts)
        async with HiCache.open(config(), kv=kv, store=store) as cache:
            yield await measure(
                "flow.prefetch",
                {
                    "tokens": geometry.PROMPT_TOKENS,
                    "pages": geometry.PROMPT_PAGES,
                    "page_nbytes": geometry.PAGE_NBYTES,
                },
                timed_async(lambda: prefetch(cache, next(turns))),
                timed(lambda: raw.read(into)),
                floor_name="open, readv, close",
                unit="ms",
                rounds=3 if quick else 31,
            )
        await store.aclose()


BENCHMARKS = [Benchmark("flow.prefetch", prefetch_records)]
