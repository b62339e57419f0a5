"""Streams: work waits for the streams that touch its pages, and for no other; whichever ends first is first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from hicache_async import CapacityError, PrefixLease, Tier
from hicache_async._fence import OrderedFence, parts
from hicache_async.abc import Fence
from hicache_async.testing.virtual_device import NotReadyError, VirtualCopy
from tests.flows.rig import NUM_LAYERS, PAGE_TOKENS, Opener, Rig, make_kv, on_host, turns

pytestmark = pytest.mark.asyncio

Place = tuple[object, int]


def place(fence: Fence) -> Place:
    """Return the stream of a fence, and where on it it stands."""
    assert isinstance(fence, OrderedFence)
    return fence.stream, fence.sequence


def places(fences: Sequence[Fence | None]) -> list[Place]:
    """Return what several fences wait for, each combined one taken apart, in no order."""
    return sorted((place(part) for fence in fences for part in parts(fence)), key=repr)


def queued(rig: Rig, stream: str) -> Fence:
    """Queue a kernel on a stream, and return the fence behind it."""
    rig.virtual.begin_compute(stream)
    return rig.cache.fence(stream)


async def private(rig: Rig, num_pages: int) -> PrefixLease:
    """Return a request that holds so many pages of its own, and no others."""
    lease = rig.lease("#" * num_pages)
    await lease.load(total_tokens=0)
    lease.allocate_nowait(num_pages * PAGE_TOKENS)
    return lease


async def computed(rig: Rig, letters: str) -> PrefixLease:
    """Return a request that has computed its prompt and committed nothing."""
    lease = rig.lease(letters)
    await lease.load(total_tokens=len(letters) * PAGE_TOKENS)
    lease.allocate_nowait(len(letters) * PAGE_TOKENS)
    rig.compute(lease)
    return lease


def only_copy(rig: Rig) -> VirtualCopy:
    """Return the one copy that is under way."""
    (copy,) = rig.virtual.pending
    return copy


def device_bytes(rig: Rig, pages: Sequence[int]) -> list[bytes]:
    """Return what some device pages hold in each plane."""
    planes = [plane for layer in range(NUM_LAYERS) for plane in rig.kv.planes(layer)]
    return [plane.numpy()[np.array(pages)].tobytes() for plane in planes]


# A long kernel


async def test_a_long_kernel_delays_no_load_into_other_pages(open_cache: Opener) -> None:
    """While a kernel runs that never ends, and pages were released behind it, loads go into others and end."""
    rig = await on_host(open_cache, "abc", "xyz")
    lease = await private(rig, 4)
    pages = set(lease.pages.tolist())
    kernel = queued(rig, "side")
    lease.release(after=kernel)
    for letters in ("abc", "xyz"):
        with rig.lease(letters) as request:
            loading = await request.load()
            assert only_copy(rig).after == ()
            assert not set(loading.pages.tolist()) & pages
            assert rig.virtual.advance_all() == NUM_LAYERS
            await loading.finished()
            rig.check(request, 12)
    assert not kernel.passed()
    rig.cache.audit()


async def test_a_load_into_the_pages_of_a_kernel_waits_for_it(open_cache: Opener) -> None:
    """With no other pages left its copy stays behind exactly that kernel, and touches nothing before it has ended."""
    rig = await on_host(open_cache, "abc", device_pages=4)
    lease = await private(rig, 4)
    pages = lease.pages.tolist()
    queued(rig, "other")
    kernel = queued(rig, "side")
    lease.release(after=kernel)
    before = device_bytes(rig, pages)
    with rig.lease("abc") as request:
        loading = await request.load()
        assert places(only_copy(rig).after) == places([kernel])
        assert rig.virtual.advance_all() == 0
        assert device_bytes(rig, pages) == before
        rig.virtual.end_compute("other")
        assert rig.virtual.advance_all() == 0
        rig.virtual.end_compute("side")
        assert rig.virtual.advance_all() == NUM_LAYERS
        await loading.finished()
        rig.check(request, 12)


async def test_a_load_into_both_kinds_of_pages_waits_for_one_kernel(open_cache: Opener) -> None:
    """Of pages behind one stream and pages that are free it takes what it must, and waits for that stream alone."""
    rig = await on_host(open_cache, "abc", device_pages=6)
    lease, other = await private(rig, 2), await private(rig, 2)
    kernel, unrelated = queued(rig, "side"), queued(rig, "unrelated")
    lease.release(after=kernel)
    with rig.lease("abc") as request:
        loading = await request.load(total_tokens=12)
        assert places(only_copy(rig).after) == places([kernel])
        other.release(after=unrelated)
        rig.virtual.end_compute("side")
        assert rig.virtual.advance_all() == NUM_LAYERS
        await loading.finished()
        rig.check(request, 12)
    assert not unrelated.passed()


async def test_pages_of_a_stream_that_has_ended_are_free_before_those_of_one_that_runs(
    open_cache: Opener,
) -> None:
    """Though they were released later: a load takes them, and waits for nothing."""
    rig = await on_host(open_cache, "ab", device_pages=4)
    first, second = await private(rig, 2), await private(rig, 2)
    pages = set(second.pages.tolist())
    kernel, short = queued(rig, "side"), queued(rig, "short")
    first.release(after=kernel)
    second.release(after=short)
    rig.virtual.end_compute("short")
    with rig.lease("ab") as request:
        loading = await request.load(total_tokens=8)
        assert only_copy(rig).after == ()
        assert set(loading.pages.tolist()) == pages
        assert rig.virtual.advance_all() == NUM_LAYERS
        rig.check(request, 8)
    assert not kernel.passed()


async def test_an_engine_without_free_pages_waits_for_each_stream_once(open_cache: Opener) -> None:
    """Pages released behind many kernels come with the last one of each stream, and may be written when all ended."""
    rig = await open_cache(device_pages=9)
    leases = [await private(rig, 3) for _ in range(3)]
    fences = [queued(rig, stream) for stream in ("a", "b", "a")]
    for lease, fence in zip(leases, fences, strict=True):
        lease.release(after=fence)
    rig.cache.audit()
    other = rig.lease("x" * 9)
    await other.load(total_tokens=0)
    allocation = other.allocate_nowait(36)
    assert places([allocation.after]) == places(fences[1:])
    for stream in ("a", "b", "a"):
        with pytest.raises(NotReadyError):
            allocation.block()
        assert rig.virtual.end_compute(stream)
    allocation.block()
    other.release()


async def test_pages_are_granted_with_the_streams_that_they_wait_for(open_cache: Opener) -> None:
    """Half of the pages behind one stream, half behind another: who takes half waits for one stream only."""
    rig = await open_cache(device_pages=6)
    leases = [await private(rig, 3) for _ in range(2)]
    held = [set(lease.pages.tolist()) for lease in leases]
    fences = [queued(rig, stream) for stream in ("a", "b")]
    for lease, fence in zip(leases, fences, strict=True):
        lease.release(after=fence)
    others = [rig.lease("xyz"), rig.lease("uvw")]
    for lease in others:
        await lease.load(total_tokens=0)
        allocation = lease.allocate_nowait(12)
        (behind,) = places([allocation.after])
        assert set(allocation.pages.tolist()) == held[places(fences).index(behind)]
    for lease in others:
        lease.release()


# What is computed on a stream


async def test_an_offload_waits_for_the_stream_that_computes_its_pages(open_cache: Opener) -> None:
    """Not for another one that runs, nor for the engine's own; and it is not even queued before its bytes are there."""
    rig = await open_cache()
    lease = await computed(rig, "abc")
    queued(rig, "b")
    rig.virtual.begin_compute()
    lease.commit(12, after=queued(rig, "a"))
    for stream in ("b", None):
        rig.virtual.end_compute(stream)
        await turns()
        assert (rig.where("abc"), rig.virtual.num_submitted) == ("ddd", 0)
    rig.virtual.end_compute("a")
    await turns()
    await rig.cache.admin.flush(Tier.HOST)
    assert rig.where("abc") == "bbb"
    rig.check_local("abc")
    lease.release()


async def test_without_a_word_a_commit_is_behind_the_engines_own_stream(open_cache: Opener) -> None:
    """The one that its tensors name, where they name one; a kernel on another stream is not waited for."""
    for compute in (None, "compute"):
        rig = await open_cache(kv=make_kv(16, compute_stream=compute))
        lease = await computed(rig, "abc")
        queued(rig, "side")
        rig.virtual.begin_compute(compute)
        assert places([rig.cache.fence()]) == places([rig.cache.fence(compute)])
        lease.commit(12)
        await turns()
        assert rig.where("abc") == "ddd"
        rig.virtual.end_compute(compute)
        await turns()
        await rig.cache.admin.flush(Tier.HOST)
        assert rig.where("abc") == "bbb"
        rig.check_local("abc")
        lease.release()


async def test_a_long_kernel_delays_no_load_that_makes_room(open_cache: Opener) -> None:
    """Copies of one direction run in order: none that waits for a kernel is queued before those that make room."""
    rig = await on_host(open_cache, "abc", device_pages=8, write_policy="write_back")
    rig.virtual.auto = True
    for letters in ("uv", "w"):
        await rig.serve(letters)
    busy = await computed(rig, "xyz")
    busy.commit(12, after=queued(rig, "long"))
    busy.release(after=rig.cache.fence("long"), offload=True)
    with rig.lease("abc") as request:
        loading = await request.load(total_tokens=16)
        await turns()
        assert loading.tokens == 12 and loading.done
        rig.check(request, 12)
    assert rig.where("xyz") == "ddd"
    rig.virtual.end_compute("long")
    await turns()
    await rig.cache.admin.flush(Tier.HOST)
    assert rig.where("xyz") == "bbb", "a preempted request goes to the host when its forward is over"
    rig.check_local("xyz")


async def test_a_load_waits_only_for_what_its_own_targets_need(open_cache: Opener) -> None:
    """Not for the pages behind a kernel that it only reserves; and these alone are behind it when all come back."""
    rig = await on_host(open_cache, "ab", device_pages=6)
    holder = await private(rig, 3)
    kernel = queued(rig, "side")
    holder.release(after=kernel)
    with rig.lease("ab") as request:
        loading = await request.load(total_tokens=20)
        assert (loading.tokens, loading.reserved_tokens) == (8, 12)
        assert only_copy(rig).after == ()
        assert rig.virtual.advance_all() == NUM_LAYERS
        assert request.allocate_nowait(12).after is None
    assert rig.cache.stats().device.fenced == 3
    grant = await rig.cache.begin_step(4)
    assert grant.num_pages == 4
    await rig.cache.begin_step(0)
    assert rig.cache.stats().device.fenced == 3


@pytest.mark.parametrize("first", ["a", "b"])
async def test_prefixes_are_there_in_the_order_in_which_their_streams_end(
    open_cache: Opener, first: str
) -> None:
    """Two requests are committed behind two streams: whichever ends first can be used first."""
    rig = await open_cache(write_policy="write_through_selective")
    rig.virtual.auto = False
    prompts = {"a": "abc", "b": "xyz"}
    leases = {stream: await computed(rig, letters) for stream, letters in prompts.items()}
    for stream, lease in leases.items():
        lease.commit(12, after=queued(rig, stream))
    hits = {stream: rig.lease(letters) for stream, letters in prompts.items()}
    loadings = {stream: await hit.load() for stream, hit in hits.items()}
    second = "b" if first == "a" else "a"
    rig.virtual.end_compute(first)
    await turns()
    assert (loadings[first].done, loadings[second].done) == (True, False)
    loadings[first].block(0)
    with pytest.raises(NotReadyError):
        loadings[second].block(0)
    rig.check(hits[first], 12)
    rig.virtual.end_compute(second)
    await loadings[second].finished()
    rig.check(hits[second], 12)
    for lease in (*leases.values(), *hits.values()):
        lease.release()


async def test_a_request_on_two_streams_waits_for_both(open_cache: Opener) -> None:
    """A prefix whose halves were committed behind different streams is there when both have ended."""
    rig = await open_cache(write_policy="write_through_selective")
    rig.virtual.auto = False
    lease = await computed(rig, "abcd")
    lease.commit(8, after=queued(rig, "a"))
    lease.commit(16, after=queued(rig, "b"))
    with rig.lease("abcd") as hit:
        loading = await hit.load()
        assert loading.tokens == 16
        rig.virtual.end_compute("b")
        await turns()
        with pytest.raises(NotReadyError):
            loading.block(0)
        rig.virtual.end_compute("a")
        loading.block(0)
        await loading.finished()
        rig.check(hit, 16)
    lease.release()


# What is in use stays


async def test_what_a_kernel_reads_is_not_evicted_before_its_end_was_seen(open_cache: Opener) -> None:
    """A prefix that was released behind a kernel keeps its pages until the cache has seen the kernel's end."""
    rig = await open_cache(device_pages=4)
    await rig.serve("abc")
    await rig.cache.admin.flush()
    reader = rig.lease("abc")
    await reader.load(total_tokens=12)
    queued(rig, "unrelated")
    reader.release(after=queued(rig, "side"))
    with rig.lease("wxyz") as other:
        await other.load(total_tokens=0)
        other.allocate_nowait(4)
        with pytest.raises(CapacityError):
            other.allocate_nowait(8)
        rig.virtual.end_compute("side")
        with pytest.raises(CapacityError):
            other.allocate_nowait(8)
        assert rig.where("abc") == "bbb"
        await turns()
        assert other.allocate_nowait(16).after is None
    assert rig.where("abc") == "hhh"


async def test_the_source_of_an_offload_is_not_evicted_before_its_end_was_seen(open_cache: Opener) -> None:
    """The copy being over is not enough: the cache has to have observed its fence."""
    rig = await open_cache(device_pages=4)
    rig.virtual.auto = False
    lease = await computed(rig, "abc")
    lease.commit(12)
    lease.release()
    with rig.lease("wxyz") as other:
        await other.load(total_tokens=0)
        other.allocate_nowait(4)
        for move in (lambda: 0, rig.virtual.advance_all):
            move()
            with pytest.raises(CapacityError):
                other.allocate_nowait(8)
        assert rig.where("abc") == "bbb"
        await turns()
        other.allocate_nowait(16)
    rig.check_local("abc")


async def test_the_source_of_a_load_is_not_evicted_before_its_end_was_seen(open_cache: Opener) -> None:
    """Behind a kernel or not, the host pages that a load reads stay until its fence was observed."""
    rig = await on_host(open_cache, "abcd", device_pages=4, host_pages=4)
    holder = await private(rig, 4)
    holder.release(after=queued(rig, "side"))
    lease = rig.lease("abcd")
    loading = await lease.load(total_tokens=16)
    lease.release()
    for go_on in (lambda: 0, lambda: rig.virtual.end_compute("side"), rig.virtual.advance_all):
        go_on()
        assert rig.ctx.room.plan_room(Tier.HOST, 4).num_pages == 0
    assert loading.done
    assert rig.where("abcd") == "bbbb"
    await turns()
    assert rig.ctx.room.plan_room(Tier.HOST, 4).num_pages == 4
    assert rig.where("abcd") == "dddd"
    rig.check_local("abcd")


@pytest.mark.parametrize("ends", ["a", "b"])
async def test_who_waits_for_pages_gets_those_of_whichever_stream_ends(open_cache: Opener, ends: str) -> None:
    """Of two prefixes in use by two streams, the one whose stream ends makes room, whichever it is."""
    rig = await open_cache(device_pages=4)
    leases = {stream: await computed(rig, letters) for stream, letters in (("a", "ab"), ("b", "xy"))}
    for lease in leases.values():
        lease.commit(8)
    await rig.cache.admin.flush(Tier.HOST)
    for stream, lease in leases.items():
        lease.release(after=queued(rig, stream))
    with rig.lease("wv") as other:
        await other.load(total_tokens=0)
        waiting = asyncio.create_task(other.allocate(8))
        await turns()
        assert not waiting.done()
        rig.virtual.end_compute(ends)
        assert len((await waiting).pages) == 2
        assert (rig.where("ab"), rig.where("xy")) == (("hh", "bb") if ends == "a" else ("bb", "hh"))
    rig.virtual.let_go()


async def test_a_failed_eviction_fails_nobody_but_what_it_was_to_keep(open_cache: Opener) -> None:
    """Whoever gets the pages is ordered behind the copy and hears nothing of it: it has no use for those bytes."""
    rig = await on_host(
        open_cache, "abc", device_pages=8, write_policy="write_back", write_back_low_water=0.0
    )
    rig.virtual.auto = True
    for letters in ("uvw", "xyz"):
        await rig.serve(letters)
    rig.virtual.auto = False
    rig.virtual.fail_next(OSError("the bus is on fire"))
    with rig.lease("abc") as request:
        loading = await request.load(total_tokens=20)
        rig.virtual.auto = True
        rig.virtual.advance_all()
        await loading.finished()
        rig.check(request, 12)
        request.allocate_nowait(20).block()
        await turns()
    assert rig.counters["failed_copies"] == 1


async def test_a_device_that_cannot_wait_gives_no_page_away(open_cache: Opener) -> None:
    """Its wait raises while the copy goes on: the pages stay where they are until the fence has passed."""
    rig = await on_host(open_cache, "abc")

    async def wait(fence: Fence) -> None:
        raise RuntimeError("not on this loop")

    rig.virtual.wait = wait  # type: ignore[method-assign]
    with rig.lease("abc") as request:
        loading = await request.load()
        await turns()
        assert rig.cache.stats().hops == 1 and not loading.done
    assert rig.cache.stats().device.free == rig.kv.num_pages - 3
    rig.virtual.advance_all()
    async with asyncio.timeout(10):
        while rig.cache.stats().hops:  # noqa: ASYNC110 - a hop that ends tells nobody here
            await asyncio.sleep(0.001)
    assert rig.counters["failed_copies"] == 1
    assert rig.cache.stats().device.free == rig.kv.num_pages
