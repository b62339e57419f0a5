"""HiCache: matching, steps, books, snapshots, audits, isolation, opening and closing."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import warnings
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from hicache_async import (
    Books,
    ClosedError,
    ConfigError,
    DeviceKV,
    HiCache,
    InvariantError,
    LeaseError,
    State,
    StepBatch,
    Tier,
    TokenKey,
)
from hicache_async.core.pool import Owner
from hicache_async.flows.charge import Charge
from hicache_async.stores import MemoryStore
from hicache_async.testing.faults import HeldStore
from tests.toy_engine import (
    PAGE_SIZE,
    Leftovers,
    compute,
    make_config,
    make_kv,
    open_cache,
    page_hashes,
    prompt,
    push_out,
    serve,
)

# Matching


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("num_tokens", "hint", "whole_hint"),
    [(1, 0, 0), (4, 0, 4), (5, 4, 4), (7, 4, 4), (8, 4, 8), (9, 8, 8), (24, 20, 24), (30, 24, 24)],
)
async def test_a_match_leaves_something_to_compute(num_tokens: int, hint: int, whole_hint: int) -> None:
    """A match covers all tokens but the last, rounded down to pages; ``whole`` covers that one too."""
    tokens = prompt(1, 30)
    async with open_cache() as cache:
        await serve(cache, "first", tokens[:27])
        for whole, expected in ((False, hint), (True, whole_hint)):
            with cache.match_prefix("again", tokens[:num_tokens], whole=whole) as lease:
                assert (lease.device_tokens, lease.local_tokens) == (expected, expected)
                assert (await lease.load()).tokens == expected


@pytest.mark.asyncio
async def test_hints_tell_device_from_host() -> None:
    """``device_tokens`` counts what is on the device, ``local_tokens`` the host too; a match pins nothing."""
    tokens = prompt(1)
    async with open_cache() as cache:
        await serve(cache, "first", tokens)
        early = cache.match_prefix("early", tokens)
        assert (early.device_tokens, early.local_tokens) == (24, 24)
        await push_out(cache, 3, 10)
        with cache.match_prefix("late", tokens) as late:
            assert (late.device_tokens, late.local_tokens) == (0, 24)
        assert (await early.load()).tokens == 24
        assert early.books == Books(prompt=25, device=0, host=24, store=0, computed=1)
        early.release()


@pytest.mark.asyncio
async def test_salt_and_adapter_isolate() -> None:
    """Equal tokens share pages exactly where salt and adapter are equal."""
    worlds: list[tuple[bytes, str | None]] = [
        (b"", None), (b"", ""), (b"", "a"), (b"a", None), (b"a", ""), (b"a", "a"), (b"aa", None), (b"", "aa"),
    ]  # fmt: skip
    tokens = prompt(1, 9)
    async with open_cache(64) as cache:
        for salt, adapter in worlds:
            cold = await serve(cache, "cold", tokens, salt=salt, adapter=adapter)
            assert cold.computed == 9, f"{(salt, adapter)} found somebody else's pages"
        for salt, adapter in worlds:
            assert (await serve(cache, "warm", tokens, salt=salt, adapter=adapter)).device == 8


@pytest.mark.asyncio
async def test_a_key_kept_over_turns_hashes_each_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TokenKey remembers its hashes from turn to turn, decoded tokens included."""
    hashed: list[bytes] = []

    def sha256(data: bytes) -> object:
        hashed.append(data)
        return real_sha256(data)

    real_sha256 = hashlib.sha256
    key = TokenKey(prompt(1, 10))
    async with open_cache() as cache:
        monkeypatch.setattr(hashlib, "sha256", sha256)
        for turn in range(3):
            with cache.match_prefix(f"turn {turn}", key) as lease:
                await lease.load(len(key) + 8)
                lease.extend([7, 8, 9, turn])
                assert lease.key is key
                lease.allocate_nowait(len(key))
                lease.commit(len(key))
            assert lease.books.device == (0, 12, 20)[turn]
            key.extend([100 + turn] * 4)
        monkeypatch.undo()
    assert len(key) == 10 + 3 * 8
    page_chains = [data for data in hashed if len(data) in (PAGE_SIZE * 4, PAGE_SIZE * 4 + 32)]
    assert len(page_chains) == len(set(page_chains)) == (10 + 2 * 8 + 4) // PAGE_SIZE


@pytest.mark.asyncio
async def test_parallel_samples_fork_a_key() -> None:
    """Two leases over one key that decode different tokens each keep their own."""
    key = TokenKey(prompt(1, 9))
    async with open_cache() as cache:
        leases = [cache.match_prefix(name, key) for name in "ab"]
        for token, lease in enumerate(leases):
            await lease.load(16, wait_pending=False)
            lease.extend([token] * 7)
            lease.allocate_nowait(16)
            assert lease.commit(16) == 16
        assert [lease.key.data[36:] for lease in leases] == [TokenKey([token] * 7).data for token in (0, 1)]
        for lease in leases:
            lease.release()
        for token in (0, 1):
            with cache.match_prefix("again", [*prompt(1, 9), *[token] * 8]) as lease:
                assert lease.device_tokens == 16


# Steps


@pytest.mark.asyncio
async def test_a_step_is_done_in_order() -> None:
    """Commit, extend, discard, release, allocate: each finds what the ones before it have done."""
    async with open_cache(4) as cache:
        running, finished = (cache.match_prefix(name, prompt(i, 8)) for i, name in enumerate("rf"))
        await running.load()
        await finished.load()
        running.allocate_nowait(8)
        finished.allocate_nowait(8)
        assert cache.stats().device.free == 0
        result = cache.step(
            StepBatch(
                commit=[(running, 8)],  # after extend the last token would have no page
                extend=[(running, [1, 2, 3, 4, 5]), (finished, [1])],
                discard=[(running, 12)],  # of what extend added
                release=[finished],  # gives the pages that allocate takes
                allocate=[(running, 12), (running, 12)],
            )
        )
        assert running.num_tokens == 12
        assert [len(allocation.pages) for allocation in result.allocations if allocation] == [1, 0]
        assert running.commit(12) == 12
        running.release()


@pytest.mark.asyncio
async def test_no_room_is_an_answer_and_the_others_get_theirs() -> None:
    """An allocation without room is None, in its place; none that can be had is lost to it."""
    async with open_cache(6) as cache:
        big, small, other = (cache.match_prefix(name, prompt(i, 8)) for i, name in enumerate("bso"))
        for lease in (big, small, other):
            await lease.load(0)
        grant = await cache.begin_step(6)
        assert (grant.num_pages, grant.loaded) == (6, (big, small, other))
        result = cache.step(StepBatch(allocate=[(small, 8), (big, 28), (other, 16)]))
        assert result.allocations[1] is None
        assert [len(allocation.pages) for allocation in result.allocations if allocation] == [2, 4]
        cache.audit()
        result = cache.step(StepBatch(allocate=[(small, 12)]))
        assert result.allocations == [None]
        for lease in (big, small, other):
            lease.release()


@pytest.mark.asyncio
async def test_a_bad_entry_is_refused_before_anything_is_done() -> None:
    """A batch with a mistake in any of its lists raises, and has done nothing of the rest."""
    async with open_cache() as cache:
        good, cold, gone = (cache.match_prefix(name, prompt(i, 8)) for i, name in enumerate("gcx"))
        await good.load()
        good.allocate_nowait(8)
        gone.release()
        mistakes = [
            (LeaseError, StepBatch(commit=[(good, 8), (good, 9)])),
            (LeaseError, StepBatch(commit=[(good, 8), (gone, 0)])),
            (ConfigError, StepBatch(commit=[(good, 8), (good, -1)])),
            (ConfigError, StepBatch(commit=[(good, 8)], extend=[(good, [1]), (good, [2, -1])])),
            (LeaseError, StepBatch(extend=[(good, [1]), (gone, [1])])),
            (LeaseError, StepBatch(commit=[(good, 8)], discard=[(good, 7)])),
            (ConfigError, StepBatch(commit=[(good, 8)], discard=[(good, 1.5)])),  # type: ignore[list-item]
            (LeaseError, StepBatch(release=[good], allocate=[(good, 8)])),
            (LeaseError, StepBatch(commit=[(good, 8)], allocate=[(cold, 8)])),
            (ConfigError, StepBatch(commit=[(good, 8)], allocate=[(good, -1)])),
        ]
        before = cache.stats()
        for error, batch in mistakes:
            with pytest.raises(error):
                cache.step(batch)
            assert (good.num_tokens, cache.stats()) == (8, before)
            cache.audit()
        cache.step(StepBatch(commit=[(good, 8)], extend=[(good, [1])], release=[good, gone]))
        cold.release()


@pytest.mark.asyncio
async def test_unused_pages_of_a_grant_return_at_the_next_step() -> None:
    """Pages that no allocation used are leased to the step, and free again at the next one."""
    async with open_cache(8) as cache:
        lease = cache.match_prefix("r", prompt(1, 8))
        await lease.load(0)
        assert (await cache.begin_step(5)).num_pages == 5
        assert cache.stats().device.leased == 5
        cache.audit()
        cache.step(StepBatch(allocate=[(lease, 8)]))
        assert (await cache.begin_step(100)).num_pages == 6  # never more than can be had
        assert (await cache.begin_step()).num_pages == 0
        assert cache.stats().device.free == 6
        lease.release()


@pytest.mark.asyncio
async def test_returned_pages_of_a_grant_go_to_who_waits() -> None:
    """A request that waits for pages gets those that the last step did not use."""
    async with open_cache(4) as cache:
        lease, other = cache.match_prefix("r", prompt(1, 16)), cache.match_prefix("o", prompt(2, 4))
        await lease.load(0)
        await other.load()
        other.allocate_nowait(4)
        await cache.begin_step(2)
        waiting = asyncio.create_task(lease.allocate(12))
        await asyncio.sleep(0)
        assert not waiting.done()
        await cache.begin_step()
        assert len((await waiting).pages) == 3
        lease.release()
        other.release()


@pytest.mark.asyncio
async def test_a_wait_for_pages_of_a_grant_is_no_dead_end() -> None:
    """While only the step holds pages, who waits for them is not told to be preempted."""
    async with open_cache(4) as cache:
        lease = cache.match_prefix("r", prompt(1, 16))
        await lease.load(0)
        await cache.begin_step(4)
        waiting = asyncio.create_task(lease.allocate(16))
        await asyncio.sleep(0)
        assert not waiting.done()
        await cache.begin_step()
        assert len((await waiting).pages) == 4
        lease.release()


@pytest.mark.asyncio
async def test_a_load_is_reported_once() -> None:
    """``loaded`` names each lease whose load has returned, once, in that order, unless it was released."""
    async with open_cache(64) as cache:
        leases = [cache.match_prefix(str(i), prompt(i, 8)) for i in range(4)]
        assert (await cache.begin_step()).loaded == ()
        for lease in (leases[2], leases[0], leases[1]):
            await lease.load()
        leases[0].release()
        assert (await cache.begin_step()).loaded == (leases[2], leases[1])
        await leases[3].load()
        assert (await cache.begin_step()).loaded == (leases[3],)
        assert (await cache.begin_step()).loaded == ()
        for lease in leases:
            lease.release()


# Books and snapshots


async def _in_every_tier(cache: HiCache) -> list[Books]:
    """Serve one prompt cold, from the device, the host, the store, and from a mixture."""
    tokens = prompt(1)
    books = [await serve(cache, "cold", tokens), await serve(cache, "device", tokens)]
    await push_out(cache, 3, 10)
    books.append(await serve(cache, "host", tokens))
    await push_out(cache, 8, 20)
    books.append(await serve(cache, "store", tokens))
    await push_out(cache, 8, 40)
    await serve(cache, "first part", tokens[:13])
    books.append(await serve(cache, "mixed", tokens))
    books.append(await serve(cache, "shorter", tokens[:10]))
    books.append(await serve(cache, "longer", [*tokens, *prompt(5, 11)]))
    return books


@pytest.mark.asyncio
async def test_books_add_up_in_every_scenario() -> None:
    """Each prompt token is booked to the one place it came from."""
    async with open_cache(16, store=MemoryStore()) as cache:
        before = cache.stats()
        books = await _in_every_tier(cache)
        after = cache.stats()
    assert [(each.device, each.host, each.store, each.computed) for each in books] == [
        (0, 0, 0, 25),
        (24, 0, 0, 1),
        (0, 24, 0, 1),
        (0, 0, 24, 1),
        (12, 0, 12, 1),
        (8, 0, 0, 2),
        (24, 0, 0, 12),
    ]
    for each in books:
        assert each.device + each.host + each.store + each.computed == each.prompt
    served = after.device_tokens + after.host_tokens + after.store_tokens + after.computed_tokens
    assert served == sum(each.prompt for each in books) + 12 + 1 + 2 * 19 * 25
    assert (before.device_tokens, before.computed_tokens) == (0, 0)


@pytest.mark.asyncio
async def test_what_others_have_loaded_meanwhile_is_booked_to_the_store() -> None:
    """What a request fetched is the store's, whoever loads it; what the host has behind it is the host's."""
    tokens = prompt(1)
    store = MemoryStore()
    async with open_cache(store=store) as cache:
        await serve(cache, "first", tokens[:13])
    async with open_cache(store=store) as cache:
        lease = cache.match_prefix("slow", tokens)
        assert (await lease.prefetch()).fetched_tokens == 12
        await serve(cache, "whole", tokens)
        await push_out(cache, 3, 10)
        await serve(cache, "quick", tokens[:13])  # loads what "slow" has fetched
        assert (await lease.load()).loaded_tokens == 12
        assert lease.books == Books(prompt=25, device=0, host=12, store=12, computed=1)
        lease.release()


@pytest.mark.asyncio
async def test_a_snapshot_is_frozen_and_sums_up() -> None:
    """``stats()`` does not change with the cache, and each tier's pages add up to its capacity."""
    async with open_cache(16, store=MemoryStore(), host_ratio=3.0) as cache:
        await serve(cache, "first", prompt(1))
        await cache.admin.flush()
        lease = cache.match_prefix("second", prompt(2))
        await lease.load()
        stats = cache.stats()
        kept = dataclasses.asdict(stats)
        for tier in (stats.device, stats.host):
            assert tier.free + tier.leased + tier.in_hops + tier.in_tree == tier.capacity
        assert (stats.device.in_tree, stats.host.in_tree) == (6, 6)
        assert (stats.device.leased, stats.leases, stats.hops) == (7, 1, 0)
        assert stats.stage_room_tokens == (48 - 16) * PAGE_SIZE
        assert (stats.state, stats.nodes) == (State.OPEN, 1)
        lease.release()
        await push_out(cache, 6, 10)
        assert dataclasses.asdict(stats) == kept != dataclasses.asdict(cache.stats())
        with pytest.raises(dataclasses.FrozenInstanceError):
            stats.leases = 0  # type: ignore[misc]
        assert cache.stats().device.evicted_pages > 0


# Audits


def _free_twice(cache: HiCache) -> None:
    cache._ctx.device_pool._free_list.give_back(cache._ctx.device_pool.owned_by(Owner.TREE)[:1])


def _lose_a_page(cache: HiCache) -> None:
    cache._ctx.host_pool._free_list.take(1)


def _leak_a_pin(cache: HiCache) -> None:
    cache._ctx.tree.pin(Tier.DEVICE, next(iter(cache._ctx.tree.root(b"").children.values())))  # type: ignore[union-attr]


def _drop_a_pin(cache: HiCache) -> None:
    lease = next(iter(cache._leases.values()))
    assert lease.device_end is not None
    cache._ctx.tree.unpin(Tier.DEVICE, lease.device_end)


def _steal_from_a_node(cache: HiCache) -> None:
    node = next(iter(cache._ctx.tree.root(b"").children.values()))  # type: ignore[union-attr]
    assert node.device.pages is not None
    cache._ctx.device_pool.move(node.device.pages[:1], Owner.TREE, Owner.HOP)


def _swap_into_a_node(cache: HiCache) -> None:
    node = next(iter(cache._ctx.tree.root(b"").children.values()))  # type: ignore[union-attr]
    assert node.host.pages is not None
    node.host.pages[0] = node.host.pages[1]


def _forget_a_lease(cache: HiCache) -> None:
    cache._leases.clear()


def _forget_step_pages(cache: HiCache) -> None:
    cache._movers.device_room.step.take_reserved(1)


def _miscount_children(cache: HiCache) -> None:
    cache._ctx.tree.root(b"").device.children += 1


def _misfile_a_child(cache: HiCache) -> None:
    children = cache._ctx.tree.root(b"").children
    assert children is not None
    children[b"elsewhere"] = children.pop(next(iter(children)))


def _hide_from_eviction(cache: HiCache) -> None:
    for node in list(cache._ctx.tree.queues[Tier.HOST]._entries):
        cache._ctx.tree.queues[Tier.HOST].discard(node)


def _put_a_host_page_under_a_hole(cache: HiCache) -> None:
    node = next(iter(cache._ctx.tree.root(b"").children.values()))  # type: ignore[union-attr]
    upper = cache._ctx.tree.split(node, 2)
    pages, upper.host.pages = upper.host.pages, None
    assert pages is not None
    cache._ctx.tree.root(b"").host.children -= 1
    cache._ctx.host_pool.free(pages, Owner.TREE)


def _book_to_nobody(cache: HiCache) -> None:
    cache._ctx.prefetch_pages += 1


def _leave_a_charge(cache: HiCache) -> None:
    charge = Charge(cache._ctx)
    charge.book(cache._ctx.host_pool.owned_by(Owner.FREE)[:0])
    charge.is_reading = False


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (_free_twice, "do not add up"),
        (_lose_a_page, "host: .* do not add up"),
        (_leak_a_pin, "pins on device do not match"),
        (_drop_a_pin, "pins on device do not match"),
        (_steal_from_a_node, "booked to"),
        (_swap_into_a_node, "host: 6 pages are booked to tree"),
        (_forget_a_lease, "booked to lease, 2 found"),
        (_forget_step_pages, "booked to lease"),
        (_miscount_children, "counts 2 children on device, has 1"),
        (_misfile_a_child, "is misfiled below"),
        (_hide_from_eviction, "may lose host and nobody would ever ask"),
        (_put_a_host_page_under_a_hole, "is on the host, .* above it is not"),
        (_book_to_nobody, "1 host pages are booked to prefetches, 0 are charged"),
        (_leave_a_charge, "charged to a prefetch that is over"),
    ],
)
async def test_an_audit_finds_each_kind_of_tampering(tamper: Callable[[HiCache], None], message: str) -> None:
    """The books of a busy cache balance, and do no more once one of them was changed behind its back."""
    cache_opening = open_cache(host_ratio=3.0)
    cache = await cache_opening.__aenter__()
    await serve(cache, "first", prompt(1))
    await cache.admin.flush()
    lease = cache.match_prefix("second", prompt(1, 27))
    await lease.load(32)
    await cache.begin_step(2)
    cache.audit()
    tamper(cache)
    with pytest.raises(InvariantError, match=message):
        cache.audit()
    with warnings.catch_warnings(action="ignore"):  # of the lease
        await cache.close()


# Opening and closing


@pytest_asyncio.fixture
async def cache() -> AsyncIterator[HiCache]:
    async with open_cache() as cache:
        yield cache


@pytest.mark.asyncio
async def test_a_cache_lives_in_an_async_fixture(cache: HiCache) -> None:
    """A cache opened by one task serves a second one and is closed by a third."""
    assert (await serve(cache, "r", prompt(1))).computed == 25


@pytest.mark.asyncio
async def test_opened_and_closed_by_different_tasks() -> None:
    """No cancel scope or task group binds a cache to the task that opened it."""
    leftovers = Leftovers()
    opening = open_cache()
    cache = await asyncio.create_task(opening.__aenter__())
    await asyncio.create_task(serve(cache, "r", prompt(1)))
    await asyncio.create_task(opening.__aexit__(None, None, None))
    assert cache.state is State.CLOSED
    leftovers.check()


@pytest.mark.asyncio
async def test_two_caches_in_one_loop_know_nothing_of_each_other() -> None:
    """Each of two caches over tensors of its own computes what the other has."""
    async with open_cache() as one, open_cache() as two:
        for cache in (one, two):
            assert (await serve(cache, "r", prompt(1))).computed == 25
        assert (one.stats().leases, one.stats().computed_tokens) == (0, 25)


def test_two_runs_in_succession() -> None:
    """Nothing of one ``asyncio.run`` is left for the next, not even with a store of its own loop."""

    async def main() -> Books:
        async with open_cache(store="memory:") as cache:
            return await serve(cache, "r", prompt(1))

    assert [asyncio.run(main()).computed for _ in range(2)] == [25, 25]


@pytest.mark.asyncio
async def test_close_may_be_called_again() -> None:
    """Who calls close second, at once or later, returns when the first has closed."""
    leftovers = Leftovers()
    async with open_cache() as cache:
        await serve(cache, "r", prompt(1))
    await asyncio.gather(cache.close(), cache.close())
    assert cache.state is State.CLOSED
    leftovers.check()


@pytest.mark.asyncio
async def test_a_cancelled_close_abandons_at_once() -> None:
    """Cancelled while it waits for a hung store, close lets go of everything and is cancelled."""
    leftovers = Leftovers()
    store = HeldStore(MemoryStore(), {"write"})
    cache = await HiCache.open(make_config(), kv=make_kv(), store=store).__aenter__()
    await serve(cache, "r", prompt(1))
    await store.arrived()
    closing = asyncio.create_task(cache.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    assert cache.state is State.CLOSED
    await cache.close()
    leftovers.check()


@pytest.mark.asyncio
async def test_a_lease_that_was_not_released_is_named() -> None:
    """Closing warns of each lease still held, and closes all the same, even if warnings are errors."""
    leftovers = Leftovers()
    cache = await HiCache.open(make_config(), kv=make_kv()).__aenter__()
    lease = cache.match_prefix("forgotten", prompt(1))
    await lease.load()
    with pytest.raises(ResourceWarning, match="'forgotten' of 25 tokens.* was not released"):
        await cache.close()
    assert cache.state is State.CLOSED
    lease.release()
    leftovers.check()


class HalfAPage:
    """A store URL's class that cannot be opened."""

    @classmethod
    def from_url(cls, url: str, **options: object) -> HalfAPage:
        raise ConfigError(f"half is {url!r}; give a whole one")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 8}, "page_size is 8 in the config and 4 in kv"),
        ({"host_layout": "head_grouped", "head_group": 3}, "head_group is 3; it must divide"),
        ({"key_scheme": "unified", "token_group": 3}, "token_group is 3; it must divide"),
        ({"host_bytes": 100}, "host_bytes is 100, less than one page"),
        ({"host_bytes": 1 << 60}, "host_bytes is .* lower host_bytes"),
        ({"host_ratio": 1.0}, "host_ratio is 1.0, a host pool of 16 pages"),
        ({"store": "nowhere:"}, "no store opens 'nowhere:'"),
    ],
)
async def test_a_cache_that_cannot_open_leaves_nothing_behind(
    options: dict[str, object], message: str
) -> None:
    """ConfigError at open says what is wrong, and no task or thread of the attempt lives on."""
    leftovers = Leftovers()
    with pytest.raises(ConfigError, match=message):
        async with open_cache(**options):  # type: ignore[arg-type]
            pass
    leftovers.check()


@pytest.mark.asyncio
async def test_a_cancelled_open_leaves_nothing_behind() -> None:
    """Cancelled while its host pages are made, open ends at once and its thread soon after."""
    leftovers = Leftovers()
    opening = asyncio.create_task(HiCache.open(make_config(host_ratio=2000.0), kv=make_kv()).__aenter__())
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    leftovers.check()


@pytest.mark.asyncio
async def test_a_failed_cache_serves_without_reuse() -> None:
    """After a bug nothing is matched or kept, and requests still get their pages and give them back."""
    async with open_cache(16, store=MemoryStore()) as cache:
        await serve(cache, "before", prompt(1))
        await cache.admin.flush()
        running = cache.match_prefix("running", prompt(2))
        await running.load()
        cache._ctx.fail(RuntimeError("a bug"))
        assert cache.state is State.FAILED
        with cache.match_prefix("after", prompt(1)) as lease:
            assert (lease.local_tokens, lease.pending_tokens) == (0, 0)
            assert (await lease.prefetch()).fetched_tokens == 0
            assert (await lease.load()).tokens == 0
            running.allocate_nowait(25)
            assert running.commit(25) == 0
            running.release()
            assert len(lease.allocate_nowait(25).pages) == 7
            assert lease.commit(25) == 0
        assert cache.stats().device.free == 16  # what was cached has come back, too: nobody held any of it


@pytest.mark.asyncio
async def test_whoever_waits_for_pages_still_gets_them_after_a_failure() -> None:
    """A wait for pages that a failure interrupts ends with all the pages it was for."""
    async with open_cache(4) as cache:
        holder, waiter = cache.match_prefix("h", prompt(1, 12)), cache.match_prefix("w", prompt(2, 12))
        await holder.load()
        await waiter.load(0)
        holder.allocate_nowait(12)
        waiting = asyncio.create_task(waiter.allocate(12))
        await asyncio.sleep(0)
        cache._ctx.fail(RuntimeError("a bug"))
        await asyncio.sleep(0)
        assert not waiting.done()
        holder.release()
        assert len((await waiting).pages) == 3
        waiter.release()


@pytest.mark.asyncio
async def test_a_prompt_may_be_committed_while_another_is_loaded() -> None:
    """Requests of one conversation that overlap keep their own bytes."""
    kv: DeviceKV = make_kv(32)
    async with open_cache(kv=kv) as cache:
        tokens = prompt(1)
        with cache.match_prefix("a", tokens) as one, cache.match_prefix("b", tokens) as two:
            second = asyncio.create_task(compute(cache, two, tokens, page_hashes(tokens)))
            await compute(cache, one, tokens, page_hashes(tokens))
            await second
            assert (one.books.computed, two.books.device) == (25, 24)


@pytest.mark.asyncio
async def test_an_opening_is_entered_once() -> None:
    """What HiCache.open returned opens one cache; entering it again, inside or later, is refused."""
    opening = HiCache.open(make_config(), kv=make_kv())
    async with opening as cache:
        with pytest.raises(ClosedError, match="entered before"):
            await opening.__aenter__()
        assert cache.state is State.OPEN
    with pytest.raises(ClosedError, match="entered before"):
        await opening.__aenter__()
