"""Load: layer by layer, shared, within the room there is, and safe against eviction, release and failure."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hicache_async import CapacityError, CpuDevice, LeaseError, PrefixLease
from hicache_async._threads import DaemonThreads
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.golden import check_page, golden_plane
from hicache_async.testing.manual import ManualThreads
from hicache_async.testing.virtual_device import NotReadyError
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, on_host, page_hashes, turns

pytestmark = pytest.mark.asyncio


def holds_layer(rig: Rig, page: int, page_hash: bytes, layer: int) -> bool:
    """Return whether one layer of a device page holds its golden bytes."""
    return all(
        np.array_equal(plane[page].numpy(), golden_plane(page_hash, layer, number, plane.shape[1]))
        for number, plane in enumerate(rig.kv.planes(layer))
    )


async def test_a_load_is_usable_layer_by_layer(open_cache: Opener) -> None:
    """load() returns when the copy is queued; each layer can be used as soon as it is there, and not before."""
    rig = await on_host(open_cache, "abc")
    with rig.lease("abc") as lease:
        loading = await lease.load()
        assert (loading.tokens, loading.loaded_tokens, loading.reserved_tokens) == (12, 12, 1)
        assert not loading.done
        with pytest.raises(NotReadyError):
            loading.block(0)
        second = asyncio.create_task(loading.ready(1))
        rig.virtual.advance(0)
        loading.block(0)
        await loading.ready(0)
        hashes = page_hashes("abc")
        assert all(
            holds_layer(rig, int(page), page_hash, 0)
            for page, page_hash in zip(loading.pages, hashes, strict=True)
        )
        assert not holds_layer(rig, int(loading.pages[0]), hashes[0], 1)
        with pytest.raises(NotReadyError):
            loading.block(1)
        await turns()
        assert not second.done()
        rig.virtual.advance()
        await second
        await loading.finished()
        assert loading.done
        rig.check(lease, 12)
        assert lease.books.host == 12


async def test_a_second_load_joins_the_first(open_cache: Opener) -> None:
    """A prefix that is on its way is not copied again, and the second request waits for the same layers."""
    rig = await on_host(open_cache, "abcd")
    with rig.lease("abcd") as first, rig.lease("abxy") as second:
        one = await first.load()
        two = await second.load()
        assert rig.virtual.num_submitted == 1
        assert (two.tokens, two.loaded_tokens) == (8, 0)
        assert one.pages[:2].tolist() == two.pages.tolist()
        with pytest.raises(NotReadyError):
            two.block(0)
        rig.virtual.advance(0)
        two.block(0)
        assert not two.done
        rig.virtual.advance()
        await two.finished()
        rig.check(second, 8)
        assert (second.books.device, second.books.host) == (8, 0)


async def test_a_longer_prefix_waits_for_both_copies(open_cache: Opener) -> None:
    """A load that covers a running one and brings more is done when both are."""
    rig = await on_host(open_cache, "abcd")
    with rig.lease("ab") as first, rig.lease("abcd") as second:
        await first.load()
        loading = await second.load()
        assert (loading.tokens, loading.loaded_tokens) == (16, 8)
        rig.virtual.advance(1)
        rig.virtual.advance(0)
        loading.block(0)
        with pytest.raises(NotReadyError):
            loading.block(1)
        assert not loading.done
        rig.virtual.advance_all()
        await loading.finished()
        rig.check(second, 16)


async def test_without_room_the_longest_prefix_is_loaded(open_cache: Opener) -> None:
    """load() never raises for room: it places what it can, counts the rest, and says what room is left."""
    rig = await on_host(open_cache, "abcdef", device_pages=8)
    rig.virtual.auto = True
    with rig.lease("wxyz") as holder, rig.lease("abcdef") as lease:
        await rig.run(holder, prefetch=False)
        loading = await lease.load()
        assert (loading.tokens, loading.reserved_tokens) == (12, 0)
        await loading.finished()
        rig.check(lease, 12)
        assert rig.counters["load_tokens_without_device_room"] == 12
        assert (lease.books.host, lease.books.computed) == (12, 13)
        with pytest.raises(CapacityError):
            lease.allocate_nowait(13)
        holder.release()
        await rig.cache.admin.flush()
        lease.allocate_nowait(25)
        rig.compute(lease, start=12)
        assert lease.commit(25) == 24
    assert rig.where("abcdef") == "bbbbbb"
    rig.check_local("abcdef")


async def test_without_any_room_nothing_is_loaded(open_cache: Opener) -> None:
    """A full device makes a prefix of no tokens, not an error."""
    rig = await on_host(open_cache, "abc", device_pages=5)
    rig.virtual.auto = True
    with rig.lease("wxyz") as holder, rig.lease("abc") as lease:
        await rig.run(holder, prefetch=False)
        loading = await lease.load()
        assert (loading.tokens, loading.reserved_tokens, loading.pages.tolist()) == (0, 0, [])
        await loading.finished()


@pytest.mark.parametrize(("total", "reserved"), [(None, 1), (40, 28), (1000, 52), (0, 0), (5, 0)])
async def test_room_is_reserved_with_the_load(open_cache: Opener, total: int | None, reserved: int) -> None:
    """reserved_tokens is what total_tokens asks for beyond the prefix, as far as there is room, and cannot be lost."""
    rig = await on_host(open_cache, "abc")
    rig.virtual.auto = True
    with rig.lease("abc") as lease:
        loading = await lease.load(total_tokens=total)
        assert (loading.tokens, loading.reserved_tokens) == (12, reserved)
        with rig.lease("ABCDEFGHIJKLMNOPQR") as greedy:
            await greedy.load()
            lease.allocate_nowait(loading.tokens + loading.reserved_tokens)
        rig.cache.audit()


async def test_a_load_smaller_than_its_threshold_is_recomputed(open_cache: Opener) -> None:
    """Fewer host tokens than load_threshold_tokens are left where they are."""
    rig = await on_host(open_cache, "abc", load_threshold_tokens=13)
    with rig.lease("abc") as lease:
        loading = await lease.load()
        assert (loading.tokens, loading.reserved_tokens) == (0, 13)
        assert rig.virtual.num_submitted == 0


async def test_loads_in_flight_are_bounded(open_cache: Opener) -> None:
    """A load beyond max_loads_in_flight waits for a slot; the highest priority is served first, then the oldest."""
    rig = await on_host(open_cache, "ab", "cd", "ef", "gh", "ij", max_loads_in_flight=2)
    order: list[str] = []

    async def load(letters: str, priority: int) -> None:
        with rig.lease(letters) as lease:
            loading = await lease.load(priority=priority)
            order.append(letters)
            await loading.finished()
            rig.check(lease, 8)

    urgency = {"ab": 0, "cd": 0, "ef": 0, "gh": 0, "ij": 1}
    tasks = [asyncio.create_task(load(letters, priority)) for letters, priority in urgency.items()]
    await turns()
    assert order == ["ab", "cd"]
    for expected in ("ij", "ef", "gh"):
        assert len(rig.virtual.pending) == 2
        rig.virtual.advance(1)
        await turns()
        assert order[-1] == expected
    rig.virtual.advance_all()
    await asyncio.gather(*tasks)
    with rig.lease("abxy") as lease:  # every slot came back
        assert (await lease.load()).tokens == 8


async def test_a_load_without_a_copy_takes_no_slot(open_cache: Opener) -> None:
    """A device hit and a cold prompt do not wait behind running loads."""
    rig = await on_host(open_cache, "ab", max_loads_in_flight=1)
    with rig.lease("ab") as lease, rig.lease("ab") as hit, rig.lease("wx") as cold:
        await lease.load()
        assert (await hit.load()).tokens == 8
        assert (await cold.load()).tokens == 0


async def test_what_another_load_brought_meanwhile_gives_the_slot_back(open_cache: Opener) -> None:
    """Who waited for a slot and then finds its prefix on the device leaves the slot to the next."""
    rig = await on_host(open_cache, "ab", "cd", max_loads_in_flight=1)
    with rig.lease("ab") as first, rig.lease("ab") as second, rig.lease("cd") as third:
        await first.load()
        tasks = [asyncio.create_task(lease.load()) for lease in (third, second)]
        await turns()
        rig.virtual.advance(1)
        await turns()
        rig.virtual.advance(1)
        assert [loading.tokens for loading in await asyncio.gather(*tasks)] == [8, 8]
    with rig.lease("wx") as lease:
        await rig.put_in_store("wx")
        await lease.prefetch()
        assert (await lease.load()).tokens == 8


async def test_one_load_a_lease(open_cache: Opener) -> None:
    """A second load, or anything that needs pages before load, is the caller's mistake."""
    rig = await open_cache()
    with rig.lease("ab") as lease:
        for call in (lambda: lease.allocate_nowait(4), lambda: lease.commit(4)):
            with pytest.raises(LeaseError):
                call()
        await lease.load()
        with pytest.raises(LeaseError, match="one load a lease"):
            await lease.load()


async def test_released_while_it_waits(open_cache: Opener) -> None:
    """A lease that is released while its load waits for a slot loads nothing and leaves nothing."""
    rig = await on_host(open_cache, "ab", "cd", max_loads_in_flight=1)
    with rig.lease("ab") as first:
        await first.load()
        waiting_lease = rig.lease("cd")
        waiting = asyncio.create_task(waiting_lease.load())
        await turns()
        waiting_lease.release()
        rig.virtual.advance_all()
        with pytest.raises(LeaseError, match="released"):
            await waiting
        rig.cache.audit()
    with rig.lease("cd") as lease:
        assert (await lease.load()).tokens == 8


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
async def test_on_the_cpu_device(open_cache: Opener, layout: str) -> None:
    """With copies in real threads every byte arrives, from every tier."""
    threads = DaemonThreads(2)
    rig = await open_cache(
        device=CpuDevice(threads), store=MemoryStore(), device_pages=16, host_layout=layout
    )
    await asyncio.gather(*(rig.serve(letters) for letters in ("abc", "abxy", "wxyz")))
    await rig.cache.admin.flush()
    await rig.push_out(16)
    for letters in ("abc", "abxy", "wxyz"):
        assert (await rig.serve(letters)).books.computed == 1
        await rig.cache.admin.flush()
        await rig.check_everywhere(letters)
    assert rig.counters["fetched_pages"] == rig.counters["loaded_pages"] == 9
    await rig.device.aclose()
    threads.shutdown()


async def test_a_thread_is_late(open_cache: Opener) -> None:
    """Until a copy's thread has run, its layers are open and its pages held; afterwards all is there."""
    threads = ManualThreads()
    opening = asyncio.create_task(open_cache(device=CpuDevice(threads), threads=threads))
    await turns()
    threads.run_all()
    rig = await opening
    with rig.lease("abc") as lease:
        await rig.run(lease, prefetch=False)
    rig.cache.audit()
    assert threads.pending == 1
    assert not rig.ctx.tree.roots[b""].only_child.host.is_ready()  # type: ignore[union-attr]
    threads.run_all()
    await rig.cache.admin.flush()
    rig.check_local("abc")
    await rig.device.aclose()


def first_pages(lease: PrefixLease, num_pages: int) -> list[int]:
    """Return the ids of a request's first pages."""
    return lease.pages[:num_pages].tolist()


async def test_computed_over_host_pages_are_adopted(open_cache: Opener) -> None:
    """What a request computes although the host has it becomes the device's copy of it."""
    rig = await on_host(open_cache, "abc", load_threshold_tokens=100)
    with rig.lease("abc") as lease:
        await rig.run(lease, prefetch=False)
        mine = first_pages(lease, 3)
    assert rig.where("abc") == "bbb"
    with rig.lease("abc") as lease:
        loading = await lease.load()
        assert loading.pages.tolist() == mine
        for page, page_hash in zip(mine, page_hashes("abc"), strict=True):
            check_page(rig.kv, page, page_hash)
    assert rig.cache.stats().host.in_tree == 3
    assert loading.tokens == PAGE_TOKENS * 3
