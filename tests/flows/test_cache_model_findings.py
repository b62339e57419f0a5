"""What the model of a whole cache has found, each as small as it can be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from hicache_async import StoreUnavailable, Tier
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.manual import ManualThreads
from tests.flows.rig import Opener, driven, turns
from tests.flows.stores import RecordingStore

pytestmark = pytest.mark.asyncio

FOREIGN_KEYS = ["0" * 64 + f"_ukv1-0123456789abcdef_other_{rank}_4" for rank in range(4)]
"""Objects of another cache, on as many ranks."""


class WipedStore(MemoryStore):
    """Remember which keys were deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []

    async def delete(self, keys: Sequence[str]) -> int:
        self.deleted += keys
        return await super().delete(keys)


@pytest.mark.parametrize("num_turns", range(12))
async def test_a_detached_store_is_cleared_no_further(open_cache: Opener, num_turns: int) -> None:
    """Whenever a store is detached while it is cleared, the clear fails and deletes nothing more."""
    store = WipedStore()
    await store.write(FOREIGN_KEYS, [memoryview(b"not ours")] * 4)
    rig = await open_cache(store=store, store_batch_pages=1)
    await rig.put_in_store("ab")  # behind those of others
    clearing = asyncio.create_task(rig.cache.admin.clear(Tier.STORE))
    await turns(num_turns)
    await rig.cache.admin.detach_store(force=True)
    num_deleted = len(store.deleted)
    if not clearing.done():
        with pytest.raises(StoreUnavailable, match="detached"):
            await driven(clearing, rig.clock)
    assert len(store.deleted) == num_deleted


async def test_a_write_that_is_not_ready_when_its_store_goes_never_reaches_it(open_cache: Opener) -> None:
    """Pages that are still being gathered when the store is detached are not written to it afterwards."""
    threads = ManualThreads()
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store, threads=threads, host_layout="layer_first")
    await rig.serve("ab", prefetch=False)
    await turns()
    assert threads.pending == 1
    await driven(rig.cache.admin.detach_store(force=True), rig.clock)
    threads.run_all()
    await turns()
    rig.cache.audit()
    assert store.keys["write"] == []


async def test_an_idle_cache_comes_to_rest(open_cache: Opener) -> None:
    """Under write_back no copy ahead pushes out another one over and over while a request keeps host pages."""
    rig = await open_cache(
        device_pages=12,
        host_pages=8,
        write_policy="write_back",
        write_back_low_water=0.5,
        store=MemoryStore(),
    )
    await rig.put_in_store("uvwxyz")
    with rig.lease("uvwxyz") as lease:
        await lease.prefetch()
        for letters in ("mn", "op", "qr", "st", "kl"):
            await rig.serve(letters, prefetch=False)
        await turns(500)
        num_copied = rig.counters["offloaded_pages"]
        await turns(500)
        assert rig.counters["offloaded_pages"] == num_copied
