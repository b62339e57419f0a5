"""A load is safe: its source and its targets are nobody's prey, and a failed copy is trusted by nobody."""

from __future__ import annotations

import asyncio

import pytest

from hicache_async import CapacityError
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.virtual_device import NotReadyError
from tests.flows.rig import Opener, on_host, tokens, turns

pytestmark = pytest.mark.asyncio


async def test_a_source_is_not_evicted_while_it_is_read(open_cache: Opener) -> None:
    """Whatever else wants host pages, a load's source stays until its copy is over."""
    rig = await on_host(open_cache, "ab", host_pages=4)
    with rig.lease("ab") as lease:
        loading = await lease.load()
        await rig.put_in_store("wxyz")
        with rig.lease("wxyz") as other:
            assert (await other.prefetch()).fetched_tokens == 8
        assert rig.where("ab") == "bb"
        rig.virtual.advance_all()
        await loading.finished()
        rig.check(lease, 8)
        with rig.lease("wxyz") as other:
            assert (await other.prefetch()).fetched_tokens == 8
        assert rig.where("ab") == "dd"


async def test_a_target_is_not_reused_while_it_is_written(open_cache: Opener) -> None:
    """Though its lease was released, nobody gets a load's target pages before the copy is over."""
    rig = await on_host(open_cache, "ab", device_pages=4)
    lease = rig.lease("ab")
    loading = await lease.load()
    targets = loading.pages.tolist()
    lease.release()
    with rig.lease("wxyz") as other:
        await other.load()
        with pytest.raises(CapacityError):
            other.allocate_nowait(16)
        allocation = other.allocate_nowait(8)
        assert not set(allocation.pages.tolist()) & set(targets)
        rig.cache.audit()
        rig.virtual.advance_all()
        await turns()
        other.allocate_nowait(16)


async def test_who_waits_for_pages_gets_those_of_a_finished_load(open_cache: Opener) -> None:
    """A released load's pages go to the waiter when the copy is over."""
    rig = await on_host(open_cache, "ab", device_pages=4)
    lease = rig.lease("ab")
    await lease.load()
    lease.release()
    with rig.lease("wxyz") as other:
        await other.load()
        waiting = asyncio.create_task(other.allocate(16))
        await turns()
        assert not waiting.done()
        rig.virtual.advance_all()
        assert len((await waiting).pages) == 4


async def test_a_failed_copy_is_a_miss_for_the_next(open_cache: Opener) -> None:
    """A failed copy makes block() raise for all who depend on it, and what it covered is no longer matched."""
    rig = await on_host(open_cache, "abcd")
    with rig.lease("abcd") as first, rig.lease("ab") as second:
        one, two = await first.load(), await second.load()
        rig.virtual.advance(0)
        rig.virtual.pending[0].fail(OSError("the bus is on fire"))
        one.block(0)
        for loading in (one, two):
            with pytest.raises(OSError, match="on fire"):
                loading.block(1)
            with pytest.raises(OSError, match="on fire"):
                await loading.finished()
        await turns()
        assert rig.where("abcd") == ""
        assert rig.counters["failed_copies"] == 1
        rig.cache.audit()
        rig.virtual.auto = True
        assert (await rig.serve("abcd")).books.store == 16
        rig.cache.audit()
    assert rig.cache.stats().device.in_tree == 4
    rig.check_local("abcd")


async def test_a_request_on_a_failed_prefix_keeps_its_pages_private(open_cache: Opener) -> None:
    """What is committed on top of a failed copy is not published, and goes at release."""
    rig = await on_host(open_cache, "ab")
    with rig.lease("abcd") as lease:
        await lease.load()
        lease.allocate_nowait(17)
        rig.virtual.pending[0].fail(OSError("no"))
        await turns()
        assert lease.commit(16) == 16
        assert rig.where("abcd") == ""
        rig.cache.audit()
    assert rig.cache.stats().device.free == 16


async def test_a_load_behind_an_offload_reads_what_it_wrote(open_cache: Opener) -> None:
    """A prefix that is evicted from the device while it is still being copied out comes back whole."""
    rig = await open_cache(device_pages=4, write_policy="write_back")
    await rig.serve("abc")
    rig.virtual.auto = False
    with rig.lease("wxyz") as other:
        await other.load()
        allocation = other.allocate_nowait(16)
        assert rig.where("abc") == "hhh"
        assert allocation.after is not None
        with pytest.raises(NotReadyError):
            allocation.after.block()
    lease = rig.lease("abc")
    loading = await lease.load()
    assert loading.tokens == 12
    assert rig.virtual.advance_all() == 4
    await loading.finished()
    rig.check(lease, 12)
    lease.release()


async def test_targets_behind_two_evictions(open_cache: Opener) -> None:
    """A load into pages of two evictions waits for both copies out of them."""
    rig = await open_cache(device_pages=4, write_policy="write_back", store=MemoryStore())
    await rig.put_in_store("ijkl")
    with rig.lease("ijkl") as lease:
        await lease.prefetch()
    for letters in ("ab", "cd"):
        await rig.serve(tokens(letters)[:-1])
    rig.virtual.auto = False
    with rig.lease("w") as small:
        await small.load(total_tokens=8)
        assert (rig.where("ab"), rig.where("cd")) == ("hh", "dd")
    with rig.lease("ijkl") as lease:
        loading = await lease.load(total_tokens=16)
        assert loading.tokens == 16
        rig.cache.audit()
        rig.virtual.advance_all()
        await loading.finished()
        rig.check(lease, 16)
    rig.check_local("ab")
    rig.check_local("cd")
