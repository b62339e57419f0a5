"""One read serves all who want the same pages: joining, leaving, taking over, and what each of them is credited."""

from __future__ import annotations

import asyncio

import pytest

from hicache_async import PrefetchPolicy, Stop
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HangingStore, HeldStore
from tests.flows.rig import Opener, Rig, driven, page_hashes, turns
from tests.flows.stores import PageByPageStore, RecordingStore

pytestmark = pytest.mark.asyncio

BEST_EFFORT = PrefetchPolicy.best_effort()


async def prefetch_and_load(rig: Rig, letters: str) -> tuple[int, int, int]:
    """Serve one request; returns tokens fetched for it, and credited to host and store."""
    with rig.lease(letters) as lease:
        served = await rig.run(lease)
        assert served.result is not None
        return served.result.fetched_tokens, served.books.host, served.books.store


async def test_equal_requests_read_each_page_once(open_cache: Opener) -> None:
    """Ten equal prefetches started together read every page once, and all are credited to the store."""
    store = HeldStore(recording := RecordingStore(MemoryStore()), {"read"})
    rig = await open_cache(store=store)
    await rig.put_in_store("abcdef")
    tasks = [asyncio.create_task(prefetch_and_load(rig, "abcdef")) for _ in range(10)]
    await store.arrived()
    await turns()
    store.open()
    assert await asyncio.gather(*tasks) == [(24, 0, 24)] * 10
    assert recording.num_read == 6
    assert rig.counters["fetched_pages"] == rig.counters["loaded_pages"] == 6
    assert rig.ctx.prefetch_pages == 0


async def test_prompts_that_part_share_what_they_have_in_common(open_cache: Opener) -> None:
    """A longer prompt joins the read of a shorter one and then goes on alone."""
    store = HeldStore(recording := RecordingStore(MemoryStore()), {"read"})
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    await rig.put_in_store("abxy")
    tasks = [asyncio.create_task(prefetch_and_load(rig, letters)) for letters in ("ab", "abcd", "abxy")]
    await store.arrived()
    await turns()
    assert len(store.waiting) == 1
    store.open()
    assert await asyncio.gather(*tasks) == [(8, 0, 8), (16, 0, 16), (16, 0, 16)]
    assert recording.num_read == 6
    rig.check_local("abcd")
    rig.check_local("abxy")


async def test_one_who_leaves_does_not_hurt_the_rest(open_cache: Opener) -> None:
    """Cancelling one of several waiters stops neither the read nor the others."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    leases = [rig.lease("abcd") for _ in range(3)]
    waiting = [asyncio.create_task(lease.prefetch(BEST_EFFORT)) for lease in leases]
    await store.arrived()
    await turns()
    waiting[0].cancel()
    await turns()
    assert waiting[0].cancelled()
    store.open()
    results = await asyncio.gather(*waiting[1:])
    assert [result.fetched_tokens for result in results] == [16, 16]
    assert rig.ctx.prefetch_pages == 4
    for lease in leases:
        lease.release()
    assert rig.ctx.prefetch_pages == 0


async def test_each_has_a_deadline_of_its_own(open_cache: Opener) -> None:
    """A joiner's deadline ends its own wait only."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store, store_timeout_s=1e6)
    await rig.put_in_store("abcd")
    patient, hasty = rig.lease("abcd"), rig.lease("abcd")
    first = patient.start_prefetch(PrefetchPolicy.timeout(base_s=7, cap_s=7))
    await store.arrived()
    second = hasty.start_prefetch(PrefetchPolicy.timeout(base_s=1, per_ki_token_s=0))
    await turns()
    rig.clock.advance(1)
    assert (await second.settled()).stop is Stop.DEADLINE
    store.open()
    assert (await first.settled()).stop is Stop.COMPLETE
    patient.release()
    hasty.release()


async def test_the_last_one_out_stops_the_read(open_cache: Opener) -> None:
    """When nobody is interested any more the read ends after the page in hand."""
    store = PageByPageStore(MemoryStore())
    rig = await open_cache(store=store)
    await rig.put_in_store("abcdef")
    leases = [rig.lease("abcdef") for _ in range(3)]
    prefetches = [lease.start_prefetch(BEST_EFFORT) for lease in leases]
    store.let_read(1)
    await turns()
    for prefetch in prefetches[:2]:
        prefetch.stop()
    store.let_read(1)
    await turns()
    assert store.touched == 2
    prefetches[2].stop()
    store.let_read(10)
    await turns()
    assert store.touched == 3
    assert [(await prefetch.settled()).fetched_tokens for prefetch in prefetches] == [0, 0, 12]
    assert rig.where("abcdef") == "hhh"
    for lease in leases:
        lease.release()


async def test_a_newcomer_after_a_stop_starts_afresh(open_cache: Opener) -> None:
    """Who comes while a stopped read hangs does not wait for it; the late pages are given back."""
    store = HangingStore(MemoryStore(), "read")
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        prefetch = lease.start_prefetch(BEST_EFFORT)
        await turns()
        prefetch.stop()
        await turns()
        assert store.num_hanging == 1
        with rig.lease("abcd") as newcomer:
            second = newcomer.start_prefetch(BEST_EFFORT)
            await turns()
            assert store.num_hanging == 2
            rig.cache.audit()
            store.release()
            assert (await second.settled()).fetched_tokens == 16
            await turns()
            rig.check_local("abcd")
            assert rig.cache.stats().host.in_hops == 0
            assert rig.cache.stats().host.in_tree == 4


async def test_a_joiner_takes_over_when_the_reader_stops(open_cache: Opener) -> None:
    """A stop by the one who started the read leaves it running for who joined it."""
    store = HeldStore(recording := RecordingStore(MemoryStore()), {"read"})
    rig = await open_cache(store=store, store_batch_pages=2)
    await rig.put_in_store("abcdef")
    with rig.lease("abcdef") as lease, rig.lease("abcdef") as joiner:
        first = lease.start_prefetch(BEST_EFFORT)
        await store.arrived()
        second = joiner.start_prefetch(BEST_EFFORT)
        await turns()
        store.let_in("read")
        await store.arrived()
        assert first.stop() == 8
        await turns()
        store.open()
        assert (await first.settled()).fetched_tokens == 8
        assert (await second.settled()).fetched_tokens == 24
        assert recording.num_read == 6
        assert first.stop() == 8
        assert (await lease.load()).tokens == 24
        assert (lease.books.store, lease.books.host) == (8, 16)


async def test_a_hung_read_ends_for_all(open_cache: Opener) -> None:
    """No answer in store_timeout_s is a miss for everybody who waited for that read."""
    store = HangingStore(MemoryStore(), "read")
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    leases = [rig.lease("abcd") for _ in range(4)]
    waiting = asyncio.gather(*(lease.prefetch(PrefetchPolicy.wait_complete()) for lease in leases))
    results = await driven(waiting, rig.clock)
    assert {(result.hit_tokens, result.fetched_tokens, result.stop) for result in results} == {
        (16, 0, Stop.STORE_FAULT)
    }
    for lease in leases:
        lease.release()
    rig.cache.audit()
    store.release()
    await turns()
    assert rig.ctx.prefetch_pages == 0


async def test_pages_that_came_meanwhile_are_not_brought_twice(open_cache: Opener) -> None:
    """What another request computed and offloaded during a read stays; the fetched duplicates are freed."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        waiting = asyncio.create_task(lease.prefetch(BEST_EFFORT))
        await store.arrived()
        await rig.serve("abxy", prefetch=False)
        assert rig.where("abxy") == "bbbb"
        store.open()
        assert (await waiting).fetched_tokens == 16
        assert rig.where("abcd") == "bbhh"
        assert rig.cache.stats().host.in_tree == 6
        rig.check_local("abcd")


async def test_three_share_one_goes_all_go_and_a_fourth_comes(open_cache: Opener) -> None:
    """The first to go hurts nobody, the last stops the read after the page in hand, and the next starts afresh."""
    store = PageByPageStore(MemoryStore())
    rig = await open_cache(store=store)
    await rig.put_in_store("abcdef")
    leases = [rig.lease("abcdef") for _ in range(4)]
    tasks = [asyncio.create_task(lease.prefetch(BEST_EFFORT)) for lease in leases[:3]]
    await turns()
    assert store.calls["read"] == 1
    tasks[0].cancel()
    store.let_read(1)
    await turns()
    assert store.touched == 1 and not tasks[1].done()
    for task in tasks[1:]:
        task.cancel()
    await turns()
    assert all(task.cancelled() for task in tasks)
    assert not rig.ctx.fetches
    fourth = asyncio.create_task(leases[3].prefetch(BEST_EFFORT))
    await turns()
    assert store.calls["read"] == 2
    store.let_read(100)
    assert (await fourth).fetched_tokens == 24
    assert store.touched <= 1 + 1 + 6  # before the stop, the page in hand, and the fourth's own
    rig.check_local("abcdef")
    for lease in leases:
        lease.release()
    await turns()
    rig.cache.audit()


async def test_who_comes_between_two_batches_joins_the_rest(open_cache: Opener) -> None:
    """A request whose prompt is local up to where a running read has come joins that read."""
    store = HeldStore(recording := RecordingStore(MemoryStore()), {"read"})
    rig = await open_cache(store=store, store_batch_pages=2)
    await rig.put_in_store("abcdef")
    with rig.lease("abcdef") as lease:
        first = lease.start_prefetch(BEST_EFFORT)
        await store.arrived()
        store.let_in("read")
        await turns()
        assert rig.where("abcdef") == "hh"
        with rig.lease("abcdef") as newcomer:
            second = newcomer.start_prefetch(BEST_EFFORT)
            await turns()
            assert len(store.waiting) == 1
            store.open()
            assert (await second.settled()).fetched_tokens == 16
            assert (await first.settled()).fetched_tokens == 24
            assert recording.num_read == 6
            assert rig.counters["fetches_joined"] == 1


async def test_who_has_all_that_it_wants_does_not_wait_for_the_rest(open_cache: Opener) -> None:
    """A joiner with a shorter prompt ends when its pages are there, and the read goes on for the other."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store, store_batch_pages=2)
    await rig.put_in_store("abcdef")
    with rig.lease("abcdef") as lease, rig.lease("ab") as short:
        first = lease.start_prefetch(BEST_EFFORT)
        await store.arrived()
        second = short.start_prefetch(BEST_EFFORT)
        await turns()
        store.let_in("read")
        assert (await second.settled()).fetched_tokens == 8
        store.open()
        assert (await first.settled()).fetched_tokens == 24


async def test_who_started_a_read_may_have_enough_before_the_others(open_cache: Opener) -> None:
    """When the one who started goes with what it wanted, those who joined get the rest."""
    store = HeldStore(recording := RecordingStore(MemoryStore()), {"read"})
    rig = await open_cache(store=store, store_batch_pages=2)
    await rig.put_in_store("abcd")
    with rig.lease("ab") as short, rig.lease("abcd") as lease:
        first = short.start_prefetch(BEST_EFFORT)
        await store.arrived()
        second = lease.start_prefetch(BEST_EFFORT)
        await turns()
        store.open()
        assert (await first.settled()).stop is (await second.settled()).stop is Stop.COMPLETE
        assert recording.num_read == 4
        assert rig.where("abcd") == "hhhh"


async def test_only_what_is_in_its_own_prompt_counts(open_cache: Opener) -> None:
    """A joiner whose prompt goes on differently is credited, and keeps, the part in common and no more."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    await rig.put_in_store("abxy")
    with rig.lease("abcd") as lease, rig.lease("abxy") as other:
        first = lease.start_prefetch(BEST_EFFORT)
        await store.arrived()
        second = other.start_prefetch(BEST_EFFORT)
        await turns()
        inner = store.inner
        assert isinstance(inner, MemoryStore)
        await inner.delete(rig.ctx.keys.keys(page_hashes("abxy")[2:]))
        store.open()
        assert (await first.settled()).fetched_tokens == 16
        result = await second.settled()
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == (16, 8, Stop.VANISHED)
        rig.cache.audit()
        assert other._holding.host_end_page == 2
        served = await rig.run(other, prefetch=False)
        assert (served.books.store, served.books.host) == (8, 0)
    rig.cache.audit()


async def test_however_many_reads_one_joins_it_comes_to_an_end(open_cache: Opener) -> None:
    """A prompt that parts from each of many others one page later joins their reads, and reads each page once."""
    letters = "abcdefgh"
    store = HeldStore(recording := RecordingStore(MemoryStore()), {"read"})
    rig = await open_cache(store=store, host_pages=64)
    await rig.put_in_store(letters)
    prompts = [letters[:count] + "x" for count in range(1, len(letters))]
    for prompt in prompts:
        await rig.put_in_store(prompt)
    leases = [rig.lease(prompt) for prompt in (*prompts, letters)]
    waiting = asyncio.gather(*(lease.prefetch(BEST_EFFORT) for lease in leases))
    while not waiting.done():
        await turns(20)
        store.let_in("read")
    assert {result.stop for result in await waiting} == {Stop.COMPLETE}
    assert recording.num_read == len({key for keys in recording.keys["read"] for key in keys})
    assert recording.num_read == 2 * len(letters) - 1
    for lease in leases:
        lease.release()
    rig.check_local(letters)
