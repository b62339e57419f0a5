"""Prompts that leave the device piece by piece: stored in the end, harmed by no neighbour, and worth what they were."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest

from hicache_async.core import hashing
from hicache_async.core.tokens import token_bytes
from hicache_async.stores.memory import MemoryStore
from tests.flows.rig import PAGE_TOKENS, Opener, tokens, turns

pytestmark = pytest.mark.asyncio


async def test_what_went_page_by_page_is_stored(open_cache: Opener) -> None:
    """Under write_back a prompt that left the device page by page reaches the store."""
    rig = await open_cache(
        store=MemoryStore(), device_pages=4, host_pages=4, write_policy="write_back", write_back_low_water=0.0
    )
    await rig.put_in_store("xyz")
    lease = rig.lease("xyz")
    await lease.prefetch()  # keeps the host full for the first step
    await rig.serve("abc", prefetch=False)
    with rig.lease("wvutq") as other:
        await other.load(total_tokens=0)
        for pages in range(2, 5):
            other.allocate_nowait(pages * PAGE_TOKENS)
            await rig.cache.admin.flush()
            if pages == 2:
                lease.release()
        assert rig.where("abc") == "hhh"
        assert await rig.check_stored("abc") == 3


async def test_a_failed_copy_takes_nothing_along_that_was_there(open_cache: Opener) -> None:
    """The consequence: host pages that were good are doubted when the copy of others fails."""
    rig = await open_cache(device_pages=4, host_pages=4, write_policy="write_back", write_back_low_water=0.0)
    await rig.serve("abc")
    tree = rig.ctx.tree
    head = tree.cut(tree.match(b"", token_bytes(tokens("abc")), 2), 2)
    rig.cache._movers.offloads.offload_path(head, min_hits=0)
    await rig.cache.admin.flush()
    assert rig.where("abc") == "bbd"
    rig.virtual.auto = False
    with rig.lease("wxyz") as other:
        await other.load(total_tokens=0)
        other.allocate_nowait(16)
        rig.virtual.pending[0].fail(OSError("the bus is on fire"))
        await turns()
        assert rig.where("abc") == "hh"


async def test_tokens_added_before_load_are_worth_what_the_prompt_is(open_cache: Opener) -> None:
    """What extend adds before load is part of the prompt, in its priority, too."""
    rig = await open_cache()
    with rig.cache.match_prefix("r", tokens("ab")[:-1], priority=5, output_priority=1) as lease:
        lease.extend(tokens("abcd")[8:])
        await rig.run(lease, prefetch=False)
    (root,) = rig.ctx.tree.roots.values()
    assert [(node.num_pages, node.priority) for node in root.subtree() if node is not root] == [(4, 5)]


async def test_a_cached_prompt_of_whole_pages_is_not_hashed_again(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last page, which a match leaves out, is cached, too."""
    rig = await open_cache()
    await rig.serve("abcd")
    calls: list[int] = []
    counted = SimpleNamespace(sha256=lambda data: calls.append(1) or hashlib.sha256(data))
    monkeypatch.setattr(hashing, "hashlib", counted)
    with rig.lease(tokens("abcd")[:-1]) as lease:
        await lease.load()
    assert not calls
