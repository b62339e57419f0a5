"""Whole caches on wrapped stores: the right bytes after a restart, and nothing exchanged between codecs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
import pytest_asyncio
import torch

from hicache_async.stores.tiered import TieredStore
from hicache_async.types import Tier
from tests.flows.rig import NUM_LAYERS, PAGE_TOKENS, Opener, Rig
from tests.stores.wrappers import KEY_ENV, filled, key_in_environment

pytestmark = pytest.mark.asyncio
__all__ = ["key_in_environment"]

PROMPT = "abc"
NUM_TOKENS = len(PROMPT) * PAGE_TOKENS
OTHER_KEY_ENV = "HICACHE_OTHER_TEST_KEY"
URLS = {
    "raw": "file://{root}/kv",
    "guard": "guard+file://{root}/kv?guard_timeout_s=3",
    "zstd": "zstd+file://{root}/kv",
    "aesgcm": f"aesgcm+file://{{root}}/kv?aesgcm_key_env={KEY_ENV}",
    "other key": f"aesgcm+file://{{root}}/kv?aesgcm_key_env={OTHER_KEY_ENV}",
    "aesgcm of zstd": f"guard+aesgcm+zstd+file://{{root}}/kv?aesgcm_key_env={KEY_ENV}",
    "zstd of aesgcm": f"zstd+aesgcm+file://{{root}}/kv?aesgcm_key_env={KEY_ENV}",
    "tiered": f"tiered:?fast={quote('file://', safe='')}{{root}}/fast&slow={quote('zstd+file://', safe='')}{{root}}/kv",
    "fp8": "fp8+file://{root}/kv",
}
EXACT = [name for name in URLS if name != "fp8"]


@pytest_asyncio.fixture
async def open_cache(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Opener]:
    """Open caches, and audit every one at the end."""
    monkeypatch.setenv(OTHER_KEY_ENV, os.urandom(32).hex())
    opener = Opener()
    yield opener
    await opener.finish()


async def opened(open_cache: Opener, name: str, root: Path) -> Rig:
    """Open a cache on one of the URLs."""
    return await open_cache(store=URLS[name].format(root=root))


async def served(rig: Rig) -> int:
    """Serve the prompt, whose bytes are checked, and store it; returns the tokens that came from the store."""
    books = (await rig.serve(PROMPT)).books
    await rig.cache.admin.flush()
    return books.store


@pytest.mark.parametrize("name", EXACT)
async def test_the_right_bytes_come_back_after_a_restart(
    open_cache: Opener, name: str, tmp_path: Path
) -> None:
    """Through every wrapper that keeps bytes as they are, each page is what was computed."""
    first = await opened(open_cache, name, tmp_path)
    assert await served(first) == 0
    await first.cache.close()
    second = await opened(open_cache, name, tmp_path)
    assert await served(second) == NUM_TOKENS
    second.check_local(PROMPT)


async def test_the_fast_tier_serves_what_the_slow_one_has_lost(open_cache: Opener, tmp_path: Path) -> None:
    """A cache whose slow directory is gone finds its pages in the fast one."""
    first = await opened(open_cache, "tiered", tmp_path)
    await served(first)
    assert isinstance(first.ctx.store, TieredStore)
    await filled(first.ctx.store)
    await first.cache.close()
    (tmp_path / "kv").rename(tmp_path / "gone")
    second = await opened(open_cache, "tiered", tmp_path)
    assert await served(second) == NUM_TOKENS
    second.check_local(PROMPT)


async def test_fp8_comes_back_within_its_bound(open_cache: Opener, tmp_path: Path) -> None:
    """Every element of each plane, as another process loads it."""
    first = await opened(open_cache, "fp8", tmp_path)
    with first.lease(PROMPT) as lease:
        await lease.load()
        await lease.allocate(lease.num_tokens)
        pages = [int(page) for page in lease.pages[: len(PROMPT)]]
        generator = torch.Generator().manual_seed(7)
        for layer in range(NUM_LAYERS):
            for plane in first.kv.planes(layer):
                elements = torch.randn(len(pages), plane.shape[1] // 4, generator=generator)
                plane[pages] = elements.view(torch.uint8)
        before = elements_of(first, pages)
        lease.commit(lease.num_tokens)
    await first.cache.admin.flush()
    await first.cache.close()
    second = await opened(open_cache, "fp8", tmp_path)
    with second.lease(PROMPT) as lease:
        await lease.prefetch()
        loading = await lease.load()
        await loading.finished()
        assert loading.tokens == NUM_TOKENS
        after = elements_of(second, [int(page) for page in lease.pages[: len(PROMPT)]])
    scale = before.abs().max() / 448
    assert not torch.equal(before, after)
    assert ((after - before).abs() <= before.abs() / 16 + scale / 1024 + before.abs() * 2**-22).all()


def elements_of(rig: Rig, pages: list[int]) -> torch.Tensor:
    """Return a copy of the elements of some device pages."""
    planes = [plane for layer in range(NUM_LAYERS) for plane in rig.kv.planes(layer)]
    return torch.cat([plane[pages].view(torch.float32) for plane in planes], 1)


async def test_caches_with_other_codecs_share_a_directory_and_nothing_else(
    open_cache: Opener, tmp_path: Path
) -> None:
    """None finds what another has stored, each finds its own afterwards, and clearing one leaves the others'."""
    names = ["raw", "zstd", "aesgcm", "other key", "aesgcm of zstd", "zstd of aesgcm"]
    for name in names:
        rig = await opened(open_cache, name, tmp_path)
        assert await served(rig) == 0, name
        await rig.cache.close()
    for name in names:
        rig = await opened(open_cache, name, tmp_path)
        assert await served(rig) == NUM_TOKENS, name
        rig.check_local(PROMPT)
        assert sum(count for reason, count in rig.counters.items() if "corrupt" in reason) == 0
        await rig.cache.close()
    for number, name in enumerate(names):
        rig = await opened(open_cache, name, tmp_path)
        await rig.cache.admin.clear(Tier.STORE)
        await rig.cache.close()
        for other in names[number + 1 :]:
            rig = await opened(open_cache, other, tmp_path)
            assert await served(rig) == NUM_TOKENS, (name, other)
            await rig.cache.close()
