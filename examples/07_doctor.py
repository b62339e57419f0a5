"""An upgrade that would lose every hit of a full store: the doctor says so before, and what to set."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tempfile
from pathlib import Path

import torch

from hicache_async import CacheConfig, DeviceKV, HiCache, PrefetchPolicy
from hicache_async.cli import main as hicache

PROMPT = list(range(200))
OLD = {"model_id": "llama", "fingerprint": "rev-7", "page_size": 16, "prefetch_threshold_tokens": 0}
NEW = OLD | {"fingerprint": "", "page_size": 8}
SHAPE = {"num_layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}


async def serve(options: dict[str, object], url: str) -> int:
    """Serve one prompt in a process of its own, as it were; returns how many tokens came from the store."""
    config = CacheConfig.from_mapping({**options, "host_reserve_bytes": 0, "write_policy": "write_through"})
    k, v = ([torch.zeros(32, config.page_size, 2, 8) for _ in range(2)] for _ in "kv")
    async with HiCache.open(config, kv=DeviceKV.from_layers(k, v), store=url) as cache:
        with cache.match_prefix("request", PROMPT) as lease:
            await lease.prefetch(PrefetchPolicy.wait_complete())
            await lease.load()
            lease.allocate_nowait(len(PROMPT)).block()
            lease.commit(len(PROMPT))
        await cache.admin.flush()
        return lease.books.store


def doctor(options: dict[str, object], url: str, path: Path) -> dict[str, object]:
    """Examine a config; returns what to set, by the name of the option."""
    path.write_text(json.dumps({**options, "kv": SHAPE}))
    assert hicache(["doctor", url, "--config", str(path)]) == 1, "1: nothing is shared"
    document = io.StringIO()
    with contextlib.redirect_stdout(document):
        hicache(["doctor", url, "--config", str(path), "--format", "json"])
    (namespace,) = json.loads(document.getvalue())["namespaces"]
    return {each["field"]: each["theirs"] for each in namespace["differences"]}


def main(directory: Path) -> None:
    """Fill a store, and examine the config of the next version before it loses all of that."""
    url = f"file://{directory}/kv"
    asyncio.run(serve(OLD, url))
    settings = doctor(NEW, url, directory / "config.json")
    print(f"\nto set: {settings}")
    found = asyncio.run(serve(NEW | settings, url))
    print(f"with what the doctor said: {found} of {len(PROMPT)} tokens from the store")
    assert found == 192


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
