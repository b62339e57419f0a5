"""What a request leaves behind when it has ended."""

from __future__ import annotations

import gc

import pytest

from hicache_async import PrefixLease, Stop
from hicache_async._hop import Hop
from hicache_async.core.holding import Holding
from hicache_async.flows.fetch import Fetch
from hicache_async.flows.look import Look
from hicache_async.flows.prefetch import Prefetch
from hicache_async.stores.memory import MemoryStore
from tests.flows.rig import Opener, prefetched, turns

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

OF_A_REQUEST = (Fetch, Holding, Hop, Look, Prefetch, PrefixLease)


async def test_a_prefetch_leaves_nothing_to_the_garbage_collector(open_cache: Opener) -> None:
    """What one request has made goes with its last reference: no cycles that a collection has to find."""
    rig = await open_cache(store=MemoryStore())
    await rig.put_in_store("abcd")
    gc.collect()
    gc.disable()
    try:
        before = {id(kept) for kept in gc.get_objects()}  # other tests may have left some
        assert await prefetched(rig, "abcd") == (16, 16, Stop.COMPLETE)
        await turns()
        kept = [each for each in gc.get_objects() if type(each) in OF_A_REQUEST and id(each) not in before]
        assert kept == []
    finally:
        gc.enable()
