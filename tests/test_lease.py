"""PrefixLease: one request from its match to its release."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_async import (
    Books,
    CapacityError,
    ClosedError,
    ConfigError,
    HiCache,
    LeaseError,
    PrefetchPolicy,
    PrefixLease,
    State,
    Stop,
    TokenKey,
)
from hicache_async.core import hashing
from hicache_async.stores import MemoryStore
from hicache_async.testing.faults import HeldStore
from hicache_async.testing.golden import fill_page
from hicache_async.testing.virtual_device import VirtualDevice
from tests.toy_engine import (
    NUM_LAYERS,
    check,
    compute,
    fill,
    make_config,
    make_kv,
    open_cache,
    page_hashes,
    prompt,
    push_out,
    serve,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


async def loaded(cache: HiCache, number: int, num_tokens: int, total_tokens: int = 0) -> PrefixLease:
    """Return a lease on a cold prompt, with room for ``total_tokens``."""
    lease = cache.match_prefix(f"request {number}", prompt(number, num_tokens))
    await lease.load(total_tokens)
    return lease


# Its life


async def test_with_releases_however_it_is_left() -> None:
    """Leaving the block gives everything back, after an exception too."""
    async with open_cache() as cache:
        with pytest.raises(KeyError), cache.match_prefix("r", prompt(1)) as lease:
            await lease.load(40)
            lease.allocate_nowait(20)
            raise KeyError("the engine's own")
        assert (cache.stats().device.free, cache.stats().leases) == (16, 0)


async def test_a_kept_lease_outlives_its_block() -> None:
    """After ``keep`` the block releases nothing; ``release`` does, once, and again does nothing."""
    async with open_cache() as cache:
        with cache.match_prefix("r", prompt(1)) as lease:
            await lease.load()
            assert lease.keep() is lease
        assert cache.stats().device.leased == 7
        for _ in range(2):
            lease.release()
            assert cache.stats().device.free == 16


async def test_release_offloads_what_a_preempted_request_has_committed() -> None:
    """``offload=True`` copies committed pages to the host whatever the policy, and no other release does."""
    async with open_cache(write_policy="write_back") as cache:
        for offload, num_pages in ((False, 0), (True, 6)):
            lease = cache.match_prefix("r", prompt(1))
            await compute(cache, lease, prompt(1), page_hashes(prompt(1)))
            lease.release(offload=offload)
            await cache.admin.flush()
            assert cache.stats().host.in_tree == num_pages


async def test_release_after_close_does_nothing() -> None:
    """A request task that outlives its cache can still leave its block; everything else says closed."""
    cache = await HiCache.open(make_config(), kv=make_kv()).__aenter__()
    lease = await loaded(cache, 1, 8, 16)
    other = cache.match_prefix("other", prompt(2))
    with pytest.warns(ResourceWarning):
        await cache.close()
    for act in (
        lambda: lease.allocate_nowait(8),
        lambda: lease.extend([1]),
        lambda: lease.commit(4),
        lambda: lease.discard(4),
        lambda: other.start_prefetch(),
    ):
        with pytest.raises(ClosedError, match=r"the cache is closed; open a new one"):
            act()
    for call in (other.load(), other.prefetch(), lease.allocate(8)):
        with pytest.raises(ClosedError):
            await call
    lease.release()
    other.release(offload=True)


async def test_a_load_that_waits_for_its_prefetch_hears_of_the_close() -> None:
    """Closing ends a prefetch; the load behind it raises instead of going on in a closed cache."""
    store = HeldStore(MemoryStore(), {"count_prefix"})
    cache = await HiCache.open(make_config(), kv=make_kv(), store=store).__aenter__()
    lease = cache.match_prefix("r", prompt(1))
    lease.start_prefetch()
    loading = asyncio.create_task(lease.load())
    await store.arrived()
    with pytest.warns(ResourceWarning):
        await cache.close()
    with pytest.raises(ClosedError):
        await loading


# Prefetch and load


async def test_one_prefetch_and_one_load() -> None:
    """A second prefetch, a second load and a prefetch after load raise and say to take a new lease."""
    async with open_cache(store=MemoryStore()) as cache:
        with cache.match_prefix("r", prompt(1)) as lease:
            await lease.prefetch()
            for _ in range(2):
                with pytest.raises(LeaseError, match="one prefetch a lease.*take a new lease"):
                    await lease.prefetch()
                with pytest.raises(LeaseError, match="'r' of 25 tokens.*one prefetch a lease"):
                    lease.start_prefetch()
            await lease.load()
            with pytest.raises(LeaseError, match="'r'.*one load a lease; take a new lease"):
                await lease.load()
            with pytest.raises(LeaseError, match="before load"):
                lease.start_prefetch()
            cache.audit()
            lease.allocate_nowait(25)


async def test_load_joins_the_prefetch_that_was_started() -> None:
    """``load`` after ``start_prefetch`` waits for it and finds what it brought."""
    store = HeldStore(MemoryStore(), set())
    async with open_cache(store=store) as cache:
        await serve(cache, "first", prompt(1))
        await push_out(cache, 8, 20)
        store.hold("read")
        with cache.match_prefix("r", prompt(1)) as lease:
            prefetch = lease.start_prefetch(PrefetchPolicy.best_effort())
            loading = asyncio.create_task(lease.load())
            await store.arrived()
            assert not loading.done()
            store.open("read")
            assert (await loading).tokens == 24
            assert (await prefetch.settled()).stop is Stop.COMPLETE
            assert lease.books.store == 24
        await push_out(cache, 8, 40)


async def test_books_before_and_after_load() -> None:
    """Until load all of the prompt is to be computed; from then on the books are final."""
    async with open_cache() as cache:
        await serve(cache, "first", prompt(1))
        with cache.match_prefix("r", prompt(1, 27)) as lease:
            assert lease.books == Books(prompt=27, device=0, host=0, store=0, computed=27)
            loading = await lease.load(40)
            books = lease.books
            assert books == Books(prompt=27, device=24, host=0, store=0, computed=3)
            assert (loading.tokens, loading.reserved_tokens) == (24, 16)
            lease.extend([1, 2, 3])
            assert lease.books == books


async def test_a_loading_is_usable_layer_by_layer() -> None:
    """Each layer can be used, from any thread, once it has been copied, and not before."""
    device = VirtualDevice()
    cache = await HiCache.open(make_config(), kv=make_kv(), device=device).__aenter__()
    device.auto = True
    await serve(cache, "first", prompt(1))
    await cache.admin.flush()
    for number in (2, 3, 4):
        await serve(cache, "other", prompt(number))
    await cache.admin.flush()
    device.auto = False
    lease = cache.match_prefix("r", prompt(1))
    loading = await lease.load()
    assert (loading.tokens, loading.done) == (24, False)
    used: list[int] = []

    def forward() -> None:
        for layer in range(NUM_LAYERS):
            loading.block(layer)
            used.append(layer)

    for layer in range(NUM_LAYERS):
        waiting = asyncio.ensure_future(loading.ready(layer))
        await asyncio.sleep(0)
        assert not waiting.done()
        device.advance(layer)
        await waiting
    await asyncio.to_thread(forward)
    await loading.finished()
    assert (used, loading.done) == ([0, 1], True)
    check(cache, loading.pages, page_hashes(prompt(1)))
    lease.release()
    device.auto = True
    cache.audit()
    await cache.close()


# Announcements


async def test_equal_cold_prompts_compute_once() -> None:
    """Of two equal cold prompts the second waits for the first, sees its commits, and loads its pages."""
    tokens, hashes = prompt(1), page_hashes(prompt(1))
    async with open_cache() as cache:
        one, two = cache.match_prefix("one", tokens), cache.match_prefix("two", tokens)
        assert two.pending_tokens == 0
        await one.load()
        assert (one.pending_tokens, two.pending_tokens) == (0, 24)
        loading = asyncio.create_task(two.load())
        one.allocate_nowait(25)
        for end in range(1, 7):
            await asyncio.sleep(0)
            assert not loading.done()
            fill(cache, one.pages[end - 1 : end], hashes[end - 1 : end])
            assert one.commit(end * 4) == end * 4
            assert two.pending_tokens == 24 - end * 4
        assert (await loading).tokens == 24
        assert two.books == Books(prompt=25, device=24, host=0, store=0, computed=1)
        check(cache, two.pages, hashes)
        one.release()
        two.release()


async def test_one_waiter_takes_over_at_release() -> None:
    """When the announcer leaves half-way one of those who wait goes on, and the others wait for it."""
    tokens, hashes = prompt(1), page_hashes(prompt(1))
    async with open_cache(32) as cache:
        first, *others = (cache.match_prefix(str(i), tokens) for i in range(4))
        await first.load()
        first.allocate_nowait(25)
        fill(cache, first.pages[:3], hashes[:3])
        first.commit(12)
        waiting = [asyncio.create_task(lease.load()) for lease in others]
        await asyncio.sleep(0)
        first.release()
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(pending)) == (1, 2)
        heir = others[waiting.index(done.pop())]
        assert heir.device_tokens == 12
        heir.allocate_nowait(25)
        fill(cache, heir.pages[3:6], hashes[3:])
        heir.commit(25)
        assert [(await each).tokens for each in pending] == [24, 24]
        assert sorted(lease.books.computed for lease in others) == [1, 1, 13]
        for lease in others:
            lease.release()


async def test_a_waiter_may_decline_to_wait() -> None:
    """``wait_pending=False`` loads what is there now."""
    async with open_cache() as cache:
        one, two = cache.match_prefix("one", prompt(1)), cache.match_prefix("two", prompt(1))
        await one.load()
        assert (await two.load(wait_pending=False)).tokens == 0
        one.release()
        two.release()


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    """A waiter that goes away is no heir: the next in line takes over."""
    async with open_cache(32) as cache:
        first, gone, heir = (cache.match_prefix(name, prompt(1)) for name in "fgh")
        await first.load()
        waiting = [asyncio.create_task(lease.load()) for lease in (gone, heir)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        gone.release()
        cache.audit()
        first.release()
        assert (await waiting[1]).tokens == 0
        heir.release()


# Pages


async def test_reserved_room_cannot_be_taken_away() -> None:
    """Within ``tokens + reserved_tokens`` allocate_nowait succeeds, whatever others have asked for since."""
    async with open_cache(16) as cache:
        lease = cache.match_prefix("r", prompt(1, 9))
        loading = await lease.load(40)
        assert (loading.tokens, loading.reserved_tokens) == (0, 40)
        greedy = await loaded(cache, 2, 9, 1000)
        assert cache.stats().device.free == 0
        assert len(lease.allocate_nowait(40).pages) == 10
        with pytest.raises(CapacityError, match="11 more device pages|1 more device page"):
            lease.allocate_nowait(44)
        assert len(lease.pages) == 10
        greedy.release()
        assert len(lease.allocate_nowait(44).pages) == 1
        lease.release()


async def test_an_allocation_names_new_pages_only() -> None:
    """Asking again returns nothing, and a half-full page is not handed out twice."""
    async with open_cache() as cache:
        lease = await loaded(cache, 1, 9)
        pages = [lease.allocate_nowait(total).pages.tolist() for total in (6, 6, 3, 7, 8, 9, 17)]
        assert [len(each) for each in pages] == [2, 0, 0, 0, 0, 1, 2]
        assert [page for each in pages for page in each] == lease.pages.tolist()
        lease.release()


async def test_who_waits_for_pages_is_served_in_turn() -> None:
    """Freed pages go to the one who waits longest, also when the next one would need fewer."""
    async with open_cache(8) as cache:
        holders = [await loaded(cache, i, 4) for i in range(4)]
        for holder in holders:
            holder.allocate_nowait(8)
        big, small = await loaded(cache, 10, 4), await loaded(cache, 11, 4)
        waiting = [asyncio.create_task(big.allocate(28)), asyncio.create_task(small.allocate(4))]
        for number, holder in enumerate(holders):
            await asyncio.sleep(0)
            assert [each.done() for each in waiting] == [False, False], number
            holder.release()
        assert [len((await each).pages) for each in waiting] == [7, 1]
        big.release()
        small.release()


async def test_an_allocation_that_can_never_be_had_is_refused() -> None:
    """More than the pool has, or what only waiting requests could give, raises and says what to do."""
    async with open_cache(8) as cache:
        one, two = await loaded(cache, 1, 4), await loaded(cache, 2, 4)
        with pytest.raises(CapacityError, match="9 more device pages .* of 8 can be had: preempt a request"):
            await one.allocate(36)
        one.allocate_nowait(16)
        two.allocate_nowait(16)
        first = asyncio.create_task(one.allocate(20))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="every request .* waits for more; this one, for 5 pages"):
            await two.allocate(20)
        two.release()  # it was preempted
        assert len((await first).pages) == 1
        one.release()


async def test_a_cancelled_allocation_passes_its_turn_on() -> None:
    """What was granted to a cancelled waiter stays with its lease; the next one is served."""
    async with open_cache(8) as cache:
        holder = await loaded(cache, 1, 4)
        holder.allocate_nowait(24)
        gone, next_one = await loaded(cache, 2, 4), await loaded(cache, 3, 4)
        waiting = [asyncio.create_task(gone.allocate(16)), asyncio.create_task(next_one.allocate(8))]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        cache.audit()
        holder.release()
        assert len((await waiting[1]).pages) == 2
        assert len(gone.allocate_nowait(8).pages) == 2
        gone.release()
        next_one.release()


# Commit, extend, discard


async def test_a_commit_is_absolute_and_rounded_down() -> None:
    """Commit counts from token 0, rounds down to pages, may be repeated and never goes back."""
    async with open_cache() as cache:
        lease = await loaded(cache, 1, 11)
        lease.allocate_nowait(11)
        fill(cache, lease.pages[:2], page_hashes(prompt(1, 11)))
        assert [lease.commit(tokens) for tokens in (3, 4, 7, 4, 0, 8, 11)] == [0, 4, 4, 4, 4, 8, 8]
        lease.release()
        assert cache.stats().device.in_tree == 2


async def test_decoded_tokens_become_a_prefix() -> None:
    """Tokens that were extended and committed are found by the next turn."""
    async with open_cache() as cache:
        tokens = [*prompt(1, 6), 7, 8, 9]
        with cache.match_prefix("turn 1", tokens[:6]) as lease:
            await lease.load(9)
            lease.allocate_nowait(9)
            for token in tokens[6:]:
                lease.extend([token])
            assert (lease.num_tokens, len(lease.key)) == (9, 9)
            fill(cache, lease.pages[:2], page_hashes(tokens))
            lease.commit(9)
        assert (await serve(cache, "turn 2", tokens)).device == 8


async def test_rejected_tokens_leave_no_trace() -> None:
    """Discarded tokens give their pages back, and what is extended instead has hashes of its own."""
    async with open_cache() as cache:
        tokens = [*prompt(1, 6), *range(50, 61)]
        key = TokenKey(tokens[:6])
        with cache.match_prefix("r", key) as lease:
            await lease.load(6)
            lease.extend([90, 91, 92, 93, 94, 95, 96])
            lease.allocate_nowait(17)
            assert lease._holding.hashes(3)[:2] != page_hashes(tokens)[:2]
            lease.discard(6)
            assert (lease.num_tokens, len(lease.pages)) == (6, 2)
            assert cache.stats().device.leased == 2
            lease.extend(tokens[6:])
            lease.allocate_nowait(17)
            fill(cache, lease.pages[:4], page_hashes(tokens))
            assert lease.commit(17) == 16
            lease.discard(16)
            lease.discard(100)
            with pytest.raises(LeaseError, match="discard from token 15: 16 tokens are committed"):
                lease.discard(15)
        assert (await serve(cache, "again", tokens)).device == 16


async def test_a_duplicate_stays_private_until_release() -> None:
    """Who computed what another has committed keeps its own pages for as long as it runs."""
    tokens, hashes = prompt(1, 9), page_hashes(prompt(1, 9))
    async with open_cache() as cache:
        one, two = cache.match_prefix("one", tokens), cache.match_prefix("two", tokens)
        for lease in (one, two):
            await lease.load(wait_pending=False)
            lease.allocate_nowait(9)
            fill(cache, lease.pages[:2], hashes)
        mine = two.pages.tolist()
        assert (one.commit(9), two.commit(9)) == (8, 8)
        assert two.pages.tolist() == mine
        assert (cache.stats().device.in_tree, cache.stats().device.leased) == (2, 4)
        one.release()
        two.release()
        assert cache.stats().device.free == 14


# What it costs and what it is worth


async def test_a_cached_prompt_given_as_a_list_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold prompt costs one hash a page in all; the same list again costs none, a longer one its end."""
    calls = 0

    def counted(data: bytes) -> object:
        nonlocal calls
        calls += 1
        return hashlib.sha256(data)

    async with open_cache() as cache:
        for num_tokens, num_new in ((25, 6), (25, 0), (33, 2), (33, 0)):
            tokens, hashes = prompt(1, num_tokens), page_hashes(prompt(1, num_tokens))
            with monkeypatch.context() as patch:
                patch.setattr(hashing, "hashlib", SimpleNamespace(sha256=counted))
                with cache.match_prefix("r", tokens) as lease:
                    await lease.prefetch()
                    await compute(cache, lease, tokens, hashes)
            assert calls == num_new
            calls = 0


def worths(cache: HiCache) -> list[tuple[int, int]]:
    """Return length and priority of the nodes of the one cached prompt, from the root on."""
    (root,) = cache._ctx.tree.roots.values()
    return [(node.num_pages, node.priority) for node in root.subtree() if node is not root]


async def decode(cache: HiCache, num_output_tokens: int, **priorities: Any) -> None:
    """Serve one prompt of two pages and commit it with its output in one go."""
    tokens = prompt(1, 9 + num_output_tokens)
    with cache.match_prefix("r", tokens[:9], **priorities) as lease:
        await lease.load(len(tokens))
        lease.extend(tokens[9:])
        lease.allocate_nowait(len(tokens))
        num_cached = lease.device_tokens // 4
        fill(cache, lease.pages[num_cached : len(tokens) // 4], page_hashes(tokens)[num_cached:])
        lease.commit(len(tokens))


@pytest.mark.parametrize(
    ("priorities", "expected"),
    [
        ({}, [(4, 0)]),
        ({"priority": 5}, [(4, 5)]),
        ({"priority": 5, "output_priority": 5}, [(4, 5)]),
        ({"priority": 5, "output_priority": 1}, [(2, 5), (2, 1)]),
        ({"priority": 5, "output_priority": 0}, [(2, 5), (2, 0)]),
        ({"output_priority": 3}, [(2, 0), (2, 3)]),
    ],
)
async def test_prompt_and_output_are_worth_what_the_request_says(
    priorities: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    """Output is worth as much as the prompt unless told; where it is not the two are cut at the last whole page."""
    async with open_cache() as cache:
        await decode(cache, 8, **priorities)
        assert worths(cache) == expected
        pages = [priority for num_pages, priority in expected for _ in range(num_pages)]
        for more, highest in ((-1, pages), (9, [9] * 4)):
            await decode(cache, 8, priority=more)
            assert [each for num_pages, each in worths(cache) for _ in range(num_pages)] == highest


def device_tokens(cache: HiCache, number: int) -> int:
    """Return how much of a prompt is on the device."""
    with cache.match_prefix("look", prompt(number, 17)) as lease:
        return lease.device_tokens


async def test_output_of_low_priority_goes_before_what_is_older() -> None:
    """Under eviction by priority the output of a request leaves first, and its prompt last."""
    async with open_cache(
        8, device_eviction_policy="priority", write_policy="write_through_selective"
    ) as cache:
        await serve(cache, "old", prompt(2, 9))
        await decode(cache, 8, priority=5, output_priority=-1)
        assert (device_tokens(cache, 1), device_tokens(cache, 2)) == (16, 8)
        with cache.match_prefix("new", prompt(3, 9)) as lease:
            await lease.load(0)
            for total, expected in ((12, (12, 8)), (16, (8, 8)), (24, (8, 0)), (32, (0, 0))):
                lease.allocate_nowait(total)
                assert (device_tokens(cache, 1), device_tokens(cache, 2)) == expected


# Fences of a forward in a thread


async def test_pages_released_behind_a_fence_wait_for_it() -> None:
    """Pages released behind a forward that still runs are nobody's until it has ended."""
    async with open_cache(4) as cache:
        lease, waiter = await loaded(cache, 1, 4), await loaded(cache, 2, 4)
        lease.allocate_nowait(16)
        fence = cache.host_fence()
        lease.release(after=fence)
        waiting = asyncio.create_task(waiter.allocate(16))
        await asyncio.sleep(0)
        assert (cache.stats().device.in_hops, cache.stats().device.free) == (4, 0)
        cache.audit()
        thread = threading.Thread(target=fence.set)
        thread.start()
        assert len((await waiting).pages) == 4
        thread.join()
        waiter.release()


async def test_a_commit_behind_a_fence_is_used_behind_it() -> None:
    """What is committed before its forward has ended is found at once, and copied only afterwards."""
    tokens, hashes = prompt(1, 9), page_hashes(prompt(1, 9))
    async with open_cache() as cache:
        lease = cache.match_prefix("one", tokens)
        await lease.load()
        lease.allocate_nowait(9)
        fence = cache.host_fence()
        assert lease.commit(9, after=fence) == 8
        with cache.match_prefix("two", tokens) as two:
            loading = await two.load()
            assert (loading.tokens, loading.done) == (8, False)
            fill(cache, lease.pages[:2], hashes)
            fence.set()
            await loading.finished()
            check(cache, loading.pages, hashes)
        lease.release()
        await cache.admin.flush()
        assert cache.stats().host.in_tree == 2
        await push_out(cache, 3, 10)
        assert (await serve(cache, "three", tokens)).host == 8


@pytest.mark.parametrize("fails_before", [True, False])
async def test_a_failed_forward_leaves_no_prefix(fails_before: bool) -> None:
    """What a failed forward should have written is never found, however late it fails."""
    tokens = prompt(1, 9)
    async with open_cache() as cache:
        with cache.match_prefix("one", tokens) as lease:
            await lease.load()
            lease.allocate_nowait(9)
            fence = cache.host_fence()
            if fails_before:
                fence.fail(RuntimeError("the kernel died"))
            assert lease.commit(9, after=fence) == (0 if fails_before else 8)
            fence.fail(RuntimeError("the kernel died"))
            await cache.admin.flush()
        assert cache.stats().device.free == 16
        assert (await serve(cache, "two", tokens)).computed == 9


async def test_a_page_is_never_read_before_it_was_allocated_to_its_reader() -> None:
    """A request's pages are its own: what another one writes never shows in them."""
    async with open_cache(8) as cache:
        one, two = await loaded(cache, 1, 8, 8), await loaded(cache, 2, 8, 8)
        one.allocate_nowait(16)
        two.allocate_nowait(16)
        assert not set(one.pages.tolist()) & set(two.pages.tolist())
        for lease, number in ((one, 1), (two, 2)):
            for page in lease.pages.tolist():
                fill_page(cache._ctx.kv, page, bytes([number]) * 32)
        check(cache, one.pages, [b"\1" * 32] * 4)
        one.release()
        two.release()


async def test_discard_comes_after_load() -> None:
    """Before load, also while a prefetch runs, there is nothing to discard: refused, and nothing is lost."""
    async with open_cache(store=MemoryStore()) as cache:
        with cache.match_prefix("request", list(range(33))) as lease:
            lease.start_prefetch()
            with pytest.raises(LeaseError, match="call load"):
                lease.discard(0)
            assert lease.num_tokens == 33
            await lease.load()
        assert cache.state is State.OPEN


async def test_tokens_added_before_load_are_part_of_the_prompt() -> None:
    """What extend adds before load is matched and booked like the rest: the books close and are not negative."""
    async with open_cache() as cache:
        await serve(cache, "warm", list(range(25)))
        with cache.match_prefix("request", list(range(5))) as lease:
            lease.extend(list(range(5, 25)))
            loading = await lease.load()
            books = lease.books
        assert books.prompt == 25 and books.computed == 25 - loading.tokens >= 0
        assert books.device + books.host + books.store + books.computed == books.prompt


@pytest.mark.parametrize("policy", ["best_effort", 3, object()])
async def test_a_policy_is_a_policy(policy: object) -> None:
    """Prefetch refuses what is no policy, naming it, and the lease can still be used."""
    async with open_cache(store=MemoryStore()) as cache:
        lease = cache.match_prefix("request", list(range(33)))
        with pytest.raises(ConfigError, match="policy is"):
            await lease.prefetch(policy)  # type: ignore[arg-type]
        await lease.prefetch()
        for call in (lambda: lease.commit(0, after="no"), lambda: lease.release(after=3)):  # type: ignore[arg-type]
            with pytest.raises((ConfigError, LeaseError)):
                call()
        lease.release()
