"""Clear: nothing of before is served again, nothing that somebody uses is taken away, and nobody else's is touched."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import pytest

from hicache_async import (
    ClosedError,
    ConfigError,
    PrefetchPolicy,
    State,
    Stop,
    StopToken,
    StoreUnavailable,
    Tier,
)
from hicache_async.core.clear import namespace_pattern
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HangingStore, HeldStore, StoreWrapper
from tests.flows.rig import Opener, Rig, driven, on_host, tokens, turns
from tests.flows.stores import RecordingStore, page_keys
from tests.flows.test_cancellation import CANCELS, MAX_TURNS, Cancel, check_all_given_back
from tests.flows.test_close import Logs, events
from tests.flows.test_storm import ForwardError, MoodyStore, Storm

pytestmark = pytest.mark.asyncio

TIERS = [None, Tier.DEVICE, Tier.HOST, Tier.STORE]


class CanClear(StoreWrapper):
    """Pass on to the store inside what it takes to be cleared, and note the order of what is done.

    Attributes:
        log: the verbs of calls that have ended.
        broken: a verb that raises.
        answers: what a verb answers instead of the truth.
    """

    def __init__(self, inner: StoreWrapper | MemoryStore) -> None:
        super().__init__(inner)
        self.log: list[str] = []
        self.broken = ""
        self.answers: dict[str, object] = {}
        self.deleting = asyncio.Event()
        self.may_delete = asyncio.Event()
        self.may_delete.set()

    @property
    def _objects(self) -> MemoryStore:
        inner = self.inner
        while isinstance(inner, StoreWrapper):
            inner = inner.inner
        assert isinstance(inner, MemoryStore)
        return inner

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        count = await call()
        self.log.append(verb)
        return count

    async def list_namespaces(self) -> Sequence[str]:
        return ()  # so that a list of keys is one for a clear

    async def list_keys(self) -> Sequence[str]:
        self.log.append("list_keys")
        if self.broken == "list_keys":
            raise OSError("no list today")
        return cast("Sequence[str]", self.answers.get("list_keys", await self._objects.list_keys()))

    async def delete(self, keys: Sequence[str]) -> int:
        self.deleting.set()
        await self.may_delete.wait()
        self.log.append("delete")
        if self.broken == "delete":
            raise OSError("read-only today")
        return cast("int", self.answers.get("delete", await self._objects.delete(keys)))


async def keys_of(rig: Rig) -> list[str]:
    """Return the names of all pages, and of what is nobody's, behind a rig's store."""
    store = rig.store
    while isinstance(store, StoreWrapper):
        store = store.inner
    assert isinstance(store, MemoryStore)
    return await page_keys(store)


async def filled(open_cache: Opener, store: object = None, **options: object) -> Rig:
    """Return a cache that has ``abcd`` in all tiers."""
    rig = await open_cache(store=store or MemoryStore(), **options)  # type: ignore[arg-type]
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    assert (rig.where("abcd"), await rig.check_stored("abcd")) == ("bbbb", 4)
    return rig


# At rest


@pytest.mark.parametrize(
    ("tier", "where", "stored"),
    [(None, "", 0), (Tier.DEVICE, "hhhh", 4), (Tier.HOST, "dddd", 4), (Tier.STORE, "bbbb", 0)],
)
async def test_each_tier_alone_and_all_together(
    open_cache: Opener, logs: Logs, tier: Tier | None, where: str, stored: int
) -> None:
    """The tier that is cleared is empty and its pages are free, the others are as before; a second time is fine."""
    rig = await filled(open_cache)
    for _ in range(2):
        await rig.cache.admin.clear(tier)
        rig.cache.audit()
        assert (rig.where("abcd"), await rig.check_stored("abcd")) == (where, stored)
    stats = rig.cache.stats()
    assert stats.device.in_tree == (4 if set(where) & set("bd") else 0)
    assert stats.host.in_tree == (4 if set(where) & set("bh") else 0)
    assert stats.dropped_tokens.get("cleared", 0) == (16 if tier is None else 0)
    lines = events(logs, "cache.cleared")
    assert [(line["tier"], line["objects"]) for line in lines] == [
        (tier or "all", 4 if tier in (None, Tier.STORE) else 0),
        (tier or "all", 0),
    ]
    assert (await rig.serve("abcd")).tokens == (0 if tier is None else 16)
    await rig.cache.admin.flush()
    assert (rig.where("abcd"), await rig.check_stored("abcd")) == ("bbbb", 4)


async def test_a_cleared_host_is_written_from_the_device_again(open_cache: Opener) -> None:
    """After HOST was cleared a commit through what the device has brings it back to the host."""
    rig = await filled(open_cache)
    await rig.cache.admin.clear(Tier.HOST)
    await rig.serve("abcdef")
    await rig.cache.admin.flush()
    assert rig.where("abcdef") == "bbbbbb"
    assert await rig.check_stored("abcdef") == 6


async def test_a_cleared_store_is_written_at_the_next_hit(open_cache: Opener) -> None:
    """What is still on the host is stored again when a request loads or commits it, and not before."""
    rig = await filled(open_cache)
    await rig.serve("wxyz")
    await rig.cache.admin.flush()
    await rig.cache.admin.clear(Tier.STORE)
    await rig.cache.admin.flush()
    assert await keys_of(rig) == []
    with rig.lease("abcd") as lease:
        await lease.load()
    await rig.cache.admin.flush()
    assert await rig.check_stored("abcd") == 4
    assert len(await keys_of(rig)) == 4


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
async def test_what_had_no_other_tier_goes(open_cache: Opener, tier: Tier) -> None:
    """Under write_back device-only pages go with what hangs below them on the host, host-only pages go alone."""
    rig = await open_cache(device_pages=8, host_pages=32, write_policy="write_back", write_back_low_water=0.0)
    for letters in ("abc", "wxy", "mno"):
        await rig.serve(letters)
    assert rig.where("abc") == "dhh"
    await rig.cache.admin.flush(Tier.HOST)
    await rig.cache.admin.clear(tier)
    rig.cache.audit()
    assert rig.where("abc") == ("" if tier is Tier.DEVICE else "d")
    stats = rig.cache.stats()
    assert (stats.device if tier is Tier.DEVICE else stats.host).in_tree == 0
    for letters in ("abc", "wxy", "mno"):
        await rig.serve(letters)
        rig.check_local(letters)


@pytest.mark.parametrize("tier", [None, Tier.DEVICE, Tier.HOST])
async def test_what_an_operator_has_pinned_is_cleared_too(open_cache: Opener, tier: Tier | None) -> None:
    """A pinned prefix is no exception: it goes at once where it has no other tier, and its pin with it."""
    rig = await open_cache(write_policy="write_back", write_back_low_water=0.0)
    for letters in ("abc", "wxy"):
        await rig.serve(letters)
    assert rig.cache.admin.pin(tokens("abc"), ttl_s=60) == 12
    await rig.cache.admin.flush(Tier.HOST)
    assert (rig.where("abc"), rig.where("wxy")) == ("bbb", "ddd")
    await rig.cache.admin.clear(tier)
    rig.cache.audit()
    kept = {None: ("", ""), Tier.DEVICE: ("hhh", ""), Tier.HOST: ("ddd", "ddd")}[tier]
    assert (rig.where("abc"), rig.where("wxy")) == kept
    assert len(rig.cache._movers.pins) == 0
    rig.clock.advance(61)
    rig.cache.audit()


async def test_every_namespace_of_prompts_is_cleared(open_cache: Opener) -> None:
    """Prompts with a salt or an adapter go, too."""
    rig = await open_cache()
    for salt, adapter in ((b"", None), (b"tenant", None), (b"", "lora")):
        with rig.cache.match_prefix("r", tokens("abcd"), salt=salt, adapter=adapter) as lease:
            await lease.load()
            lease.allocate_nowait(17).block()
            lease.commit(17)
    assert len(rig.ctx.tree.roots) == 3
    await rig.cache.admin.flush()
    await rig.cache.admin.clear()
    assert not rig.ctx.tree.roots
    assert (rig.cache.stats().device.free, rig.cache.stats().host.free) == (16, 32)


async def test_a_tier_that_is_none(open_cache: Opener) -> None:
    """A wrong tier is refused with the ones there are; without a store there is nothing of it to clear."""
    rig = await open_cache()
    with pytest.raises(ConfigError, match="tier is 'disk'; choose one of device, host, store, or None"):
        await rig.cache.admin.clear("disk")  # type: ignore[arg-type]
    await rig.serve("ab")
    await rig.cache.admin.flush()
    await rig.cache.admin.clear(Tier.STORE)
    assert rig.where("ab") == "bb"
    await rig.cache.admin.clear("host")  # type: ignore[arg-type] # the word is as good as the member
    assert rig.where("ab") == "dd"
    await rig.cache.admin.clear()
    assert rig.where("ab") == ""


# Whose objects


async def test_names_of_a_namespace() -> None:
    """All ranks of a cache share the first part of their names with it, and no other model does."""
    ours = namespace_pattern("ukv1-0123456789abcdef")
    page = "0f" * 32
    mine = [
        "_ukv1-0123456789abcdef_model_1_2",
        "_ukv1-0123456789abcdef_L0-4",
        "_ukv1-0123456789abcdef_L4-9_H3_T0-16",
        "_ukv1-0123456789abcdef_m_0_2.mamba",
    ]
    foreign = ["", "_ukv1-0123456789abcdee_model_0_2", "_ukv1-0123456789abcdef0_x", "_ukv1-0123456789abcdef"]
    assert [bool(ours.match(page + suffix)) for suffix in mine] == [True] * 4
    assert [bool(ours.match(page + suffix)) for suffix in foreign] == [False] * 4
    assert not ours.match("manifest_ukv1-0123456789abcdef")
    assert not ours.match("readme_ukv1-0123456789abcdef_model_0_2")
    assert not ours.match("z" * 64 + "_ukv1-0123456789abcdef_model_0_2")


async def test_only_objects_of_this_cache_are_deleted(open_cache: Opener) -> None:
    """Those of its other ranks go, those of another model, of other options and of strangers stay."""
    store = MemoryStore()
    rigs = [
        await open_cache(store=store, **options)
        for options in (
            {"tp_size": 2, "tp_rank": 0},
            {"tp_size": 2, "tp_rank": 1},
            {"model_id": "other"},
            {"fingerprint": "other"},
        )
    ]
    for rig in rigs:
        await rig.serve("abcd")
        await rig.cache.admin.flush()
    await store.write(["notes"], [memoryview(b"not a page")])
    await rigs[0].cache.admin.clear()
    assert [await rig.check_stored("abcd") for rig in rigs] == [0, 0, 4, 4]
    assert await store.count_prefix(["notes"]) == 1


@pytest.mark.parametrize("batch", [1, 3, 100])
async def test_objects_go_in_batches(open_cache: Opener, batch: int) -> None:
    """However many there are, and whatever lies between them, all of this cache's are deleted and no other."""
    store = MemoryStore()
    rig = await open_cache(store=store, store_batch_pages=batch)
    foreign = [f"stranger {number}" for number in range(7)]
    await store.write(foreign[:4], [memoryview(b"x")] * 4)
    await rig.put_in_store("abcdefg")
    await store.write(foreign[4:], [memoryview(b"x")] * 3)
    await rig.put_in_store("uvw")
    await rig.cache.admin.clear(Tier.STORE)
    assert await keys_of(rig) == foreign


@pytest.mark.parametrize("tier", [None, Tier.STORE])
async def test_a_store_that_cannot_be_cleared_is_refused(open_cache: Opener, tier: Tier | None) -> None:
    """The error names what the store lacks, and nothing has changed."""
    rig = await filled(open_cache, RecordingStore(MemoryStore()))
    with pytest.raises(ConfigError, match="a RecordingStore cannot be cleared, it lacks SupportsListing"):
        await rig.cache.admin.clear(tier)
    assert (rig.where("abcd"), await rig.check_stored("abcd")) == ("bbbb", 4)
    assert rig.ctx.store is rig.store
    await rig.cache.admin.clear(Tier.HOST)


# With work in flight


async def test_a_lease_that_runs_across_a_clear_commits_nothing(open_cache: Opener) -> None:
    """Its pages stay right until it releases them, and nothing of it is ever served; the next request is computed."""
    rig = await filled(open_cache, device_pages=32)
    running, fresh = rig.lease("abcdef"), rig.lease("uvwx")
    for lease in (running, fresh):
        await rig.forward(lease, await lease.load())
    running.commit(20)
    await rig.cache.admin.clear()
    rig.cache.audit()
    assert (rig.where("abcdef"), rig.where("uvwx"), await rig.check_stored("abcd")) == ("", "", 0)
    for lease in (running, fresh):
        rig.check(lease, lease.num_tokens)
        assert lease.commit(lease.num_tokens) == lease.num_tokens // 4 * 4
        rig.cache.audit()
    assert (rig.where("abcdef"), rig.where("uvwx")) == ("", "")
    assert (await rig.serve("abcd")).tokens == 0
    running.extend([1, 2, 3, 4])
    (await running.allocate(running.num_tokens)).block()
    running.commit(running.num_tokens)
    rig.check(running, 24)
    running.release()
    rig.cache.audit()
    fresh.release(offload=True)
    assert rig.where("uvwx") == ""
    await rig.cache.admin.flush()
    await check_all_given_back(rig)
    assert not rig.ctx.tree.detached
    assert await rig.check_stored("abcd") == 4 == len(await keys_of(rig))


@pytest.mark.parametrize("tier", TIERS)
async def test_a_forward_that_runs_across_a_clear(open_cache: Opener, tier: Tier | None) -> None:
    """Pages that a forward writes are nobody else's before its fence, whether it was committed before or after."""
    rig = await open_cache(store=MemoryStore())
    before, after = rig.cache.host_fence(), rig.cache.host_fence()
    leases = [rig.lease(letters) for letters in ("abcd", "wxyz")]
    for lease in leases:
        await rig.forward(lease, await lease.load())
    leases[0].commit(17, after=before)
    await rig.cache.admin.clear(tier)
    rig.cache.audit()
    leases[1].commit(17, after=after)
    rig.cache.audit()
    leases[0].release(after=before)
    leases[1].release(after=after)
    rig.cache.audit()
    await turns()
    assert rig.cache.stats().device.free == 16 - 10
    for fence in (before, after):
        fence.set()
    await turns()
    rig.cache.audit()
    assert not rig.ctx.tree.detached
    kept = {None: "", Tier.DEVICE: "", Tier.HOST: "bbbb", Tier.STORE: "bbbb"}[tier]
    assert rig.where("abcd") == kept
    assert rig.where("wxyz") == ("" if tier is None else "bbbb")
    for letters in ("abcd", "wxyz"):
        await rig.serve(letters)
    await rig.cache.admin.flush()
    await check_all_given_back(rig)


async def test_what_was_being_fetched_is_dropped(open_cache: Opener) -> None:
    """A read that ends after the clear, and all that it had brought before, is served to nobody."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=CanClear(store), store_batch_pages=2)
    await rig.put_in_store("abcdef")
    with rig.lease("abcdef") as lease:
        prefetch = lease.start_prefetch(PrefetchPolicy.wait_complete())
        await store.arrived()
        store.let_in("read")
        await turns()
        assert rig.where("abcdef") == "hh"
        clearing = asyncio.create_task(rig.cache.admin.clear())
        await turns()
        rig.cache.audit()
        assert rig.where("abcdef") == ""
        await clearing  # a read is not waited for
        store.open()
        await turns()
        rig.clock.advance(0.05)
        assert (await prefetch.settled()).stop is Stop.DETACHED
        assert (await rig.run(lease, prefetch=False)).tokens == 0
    await rig.cache.admin.flush()
    await check_all_given_back(rig)
    assert await rig.check_stored("abcdef") == 6


async def test_nothing_is_written_behind_the_deletion(open_cache: Opener) -> None:
    """A write in flight is waited for before anything is listed, and what waited behind it is dropped."""
    inner = HeldStore(MemoryStore(), {"write"})
    store = CanClear(inner)
    rig = await open_cache(store=store)
    for letters in ("ab", "cd", "ef"):
        await rig.serve(letters, prefetch=False)
    await inner.arrived()
    clearing = asyncio.create_task(rig.cache.admin.clear())
    await turns()
    assert not store.log and not clearing.done()
    inner.open()
    await clearing
    assert store.log == ["write", "list_keys", "delete"]
    assert await keys_of(rig) == []
    assert rig.counters["backups_dropped"] == 2
    await rig.cache.admin.flush()
    assert await keys_of(rig) == []
    await check_all_given_back(rig)


async def test_a_store_is_nobodys_while_it_is_cleared(open_cache: Opener) -> None:
    """Prefetches end as detached, and commits meanwhile are written when the store is there again."""
    store = CanClear(MemoryStore())
    rig = await filled(open_cache, store)
    store.may_delete.clear()
    clearing = asyncio.create_task(rig.cache.admin.clear())
    await store.deleting.wait()
    store.log.clear()
    served = await rig.serve("abcd")
    assert served.result is not None
    assert (served.tokens, served.result.stop) == (0, Stop.DETACHED)
    await rig.cache.admin.flush()
    assert not store.log
    store.may_delete.set()
    await clearing
    assert await keys_of(rig) == []
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    assert await rig.check_stored("abcd") == 4


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
async def test_what_a_request_holds_is_cut_off_and_freed_at_its_release(
    open_cache: Opener, tier: Tier
) -> None:
    """With a prefix pinned in the tier no match finds it or what hangs below, and the last release frees it."""
    rig = await open_cache(store=MemoryStore())
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        await lease.prefetch()
        if tier is Tier.DEVICE:
            await lease.load()
        assert (await rig.serve("wxyz")).tokens == 0
        await rig.cache.admin.flush()
        await rig.cache.admin.clear(tier)
        rig.cache.audit()
        assert rig.where("abcd") == ""
        assert rig.where("wxyz") == ("hhhh" if tier is Tier.DEVICE else "dddd")
        if tier is Tier.DEVICE:
            rig.check(lease, 16)
        assert rig.ctx.tree.detached
    assert not rig.ctx.tree.detached
    rig.cache.audit()


async def test_who_waits_for_pages_gets_what_a_clear_frees(open_cache: Opener) -> None:
    """Pages that could not be evicted come free with the clear, and the request at the head of the queue has them."""
    rig = await open_cache(device_pages=8, write_policy="write_through_selective")
    await rig.serve("abc")
    assert rig.where("abc") == "ddd"
    node = rig.ctx.tree.roots[b""].only_child
    assert node is not None
    kept = rig.ctx.anchor(node)
    with rig.lease("mnop") as holder, rig.lease("xy") as waiter:
        await holder.load(total_tokens=16)
        await waiter.load(total_tokens=0)
        allocating = asyncio.create_task(waiter.allocate(12))
        await turns()
        assert not allocating.done()
        await rig.cache.admin.clear()
        assert len((await allocating).pages) == 3
        rig.cache.audit()
    rig.ctx.unpin(kept)
    await check_all_given_back(rig)


async def test_a_load_that_waits_while_its_host_pages_are_cleared(open_cache: Opener) -> None:
    """It loads what is left, and the request computes the rest."""
    rig = await on_host(open_cache, "abcd", device_pages=8)
    with rig.lease("wxyz") as holder:
        await rig.forward(holder, await holder.load())
        holder.commit(16)
    assert rig.virtual.pending
    with rig.lease("abcd") as lease:
        loading = asyncio.create_task(lease.load())
        await turns()
        assert not loading.done()
        await rig.cache.admin.clear(Tier.HOST)
        rig.cache.audit()
        rig.virtual.auto = True
        rig.virtual.advance_all()
        loaded = await loading
        assert loaded.tokens == 0
        await rig.forward(lease, loaded)
        lease.commit(17)
    await check_all_given_back(rig)


# What can go wrong


async def test_a_write_that_hangs_leaves_the_store_unused(open_cache: Opener, logs: Logs) -> None:
    """The clear says that it is incomplete and deletes nothing; when the write has ended, another one succeeds."""
    inner = HangingStore(MemoryStore(), "write")
    store = CanClear(inner)
    rig = await open_cache(store=store)
    await rig.put_in_store("xy")
    await rig.serve("ab", prefetch=False)
    await inner.hung()
    for num_lines in (1, 2):
        with pytest.raises(StoreUnavailable, match="store.write has not ended in 5.0 s; nothing was deleted"):
            await driven(rig.cache.admin.clear(), rig.clock)
        lines = events(logs, "clear.incomplete")
        assert [line["log_level"] for line in lines] == ["warning"] * num_lines
    assert (rig.ctx.store, rig.where("ab"), store.log) == (None, "", [])
    assert (await rig.serve("xy")).tokens == 0
    with pytest.raises(ConfigError, match="was cleared in part only; clear.. it again or detach_store"):
        await rig.cache.admin.attach_store(store)
    rig.cache.audit()
    inner.release()
    await rig.cache.admin.clear()
    assert rig.ctx.store is store
    assert await keys_of(rig) == []
    await rig.serve("ab")
    await rig.cache.admin.flush()
    assert await rig.check_stored("ab") == 2
    await check_all_given_back(rig)


async def test_a_late_write_of_a_store_that_came_back_is_waited_for(open_cache: Opener) -> None:
    """What hangs since before the store was detached and attached again could still land behind the deletion."""
    inner = HangingStore(MemoryStore(), "write")
    store = CanClear(inner)
    rig = await open_cache(store=store)
    await rig.serve("ab", prefetch=False)
    await inner.hung()
    await driven(rig.cache.admin.detach_store(force=True), rig.clock)
    await rig.cache.admin.attach_store(other := MemoryStore())
    await rig.cache.admin.clear()
    assert await other.list_keys() == ()  # the other store is not kept waiting for it
    await rig.cache.admin.detach_store()
    await rig.cache.admin.attach_store(store)
    with pytest.raises(StoreUnavailable):
        await driven(rig.cache.admin.clear(), rig.clock)
    inner.release()
    await turns()
    await rig.cache.admin.clear()
    assert await keys_of(rig) == []


@pytest.mark.parametrize(
    ("broken", "answers", "why"),
    [
        ("list_keys", {}, "list_keys failed: .*no list today"),
        ("delete", {}, "delete failed: .*read-only today"),
        ("", {"list_keys": None}, "list_keys failed: None"),
        ("", {"delete": -1}, "delete failed: answered -1, expected 0 .. 4"),
    ],
)
async def test_a_store_that_fails_is_not_cleared(
    open_cache: Opener, logs: Logs, broken: str, answers: dict[str, object], why: str
) -> None:
    """Whatever goes wrong is said, nothing of the store is served, and a later clear ends it."""
    store = CanClear(MemoryStore())
    rig = await filled(open_cache, store)
    store.broken, store.answers = broken, answers
    with pytest.raises(StoreUnavailable, match=why):
        await rig.cache.admin.clear()
    assert len(events(logs, "clear.incomplete")) == 1
    assert not events(logs, "cache.cleared")
    assert (await rig.serve("abcd")).tokens == 0
    store.broken, store.answers = "", {}
    await rig.cache.admin.clear(Tier.STORE)
    assert await keys_of(rig) == []
    assert len(events(logs, "cache.cleared")) == 1
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    assert await rig.check_stored("abcd") == 4


async def test_a_forced_detach_ends_a_clear(open_cache: Opener) -> None:
    """A clear that hangs in the store hears that its store was detached; another store can be attached."""
    store = CanClear(MemoryStore())
    rig = await filled(open_cache, store)
    store.may_delete.clear()
    clearing = asyncio.create_task(rig.cache.admin.clear())
    await store.deleting.wait()
    detaching = asyncio.create_task(rig.cache.admin.detach_store(force=True))
    with pytest.raises(StoreUnavailable, match="the CanClear was detached while it was cleared"):
        await clearing
    await driven(detaching, rig.clock)
    await rig.cache.admin.attach_store(new := MemoryStore())
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    assert await rig.check_stored("abcd", new) == 4
    store.may_delete.set()
    await check_all_given_back(rig)


async def test_changes_follow_one_another(open_cache: Opener) -> None:
    """Clears, an attach and a graceful detach at the same time each find the cache as the one before has left it."""
    store = CanClear(MemoryStore())
    rig = await filled(open_cache, store)
    store.may_delete.clear()
    clears = [asyncio.create_task(rig.cache.admin.clear()) for _ in range(2)]
    await store.deleting.wait()
    attaching = asyncio.create_task(rig.cache.admin.attach_store(store))
    detaching = asyncio.create_task(rig.cache.admin.detach_store())
    await turns()
    assert not any(task.done() for task in (*clears, attaching, detaching))
    store.may_delete.set()
    await asyncio.gather(*clears, attaching, detaching)
    assert store.log.count("list_keys") == 2
    assert rig.ctx.store is None


@pytest.mark.parametrize("cancel", CANCELS)
async def test_a_clear_cancelled_at_each_await(open_cache: Opener, logs: Logs, cancel: Cancel) -> None:
    """Afterwards all is as before, or the store is unused and nothing old is served; the next clear ends it."""
    outcomes = set()
    for num_turns in range(MAX_TURNS):
        rig = await filled(open_cache, store_batch_pages=1)
        rig.lease("abcd")
        was_running = await cancel(rig.cache.admin.clear, num_turns)
        rig.cache.audit()
        is_untouched = rig.where("abcd") == "bbbb"
        outcomes.add((is_untouched, rig.ctx.store is None))
        if not is_untouched:
            assert (await rig.serve("abcd")).tokens == 0
        await rig.cache.admin.clear()
        assert rig.ctx.store is rig.store
        assert await keys_of(rig) == []
        await rig.serve("abcd")
        await rig.cache.admin.flush()
        assert await rig.check_stored("abcd") == 4
        for lease in list(rig.cache._leases):
            lease.release()
        await check_all_given_back(rig)
        if not was_running:
            break
    assert {(False, True), (False, False)} <= outcomes <= {(True, False), (False, True), (False, False)}


async def test_close_ends_a_clear(open_cache: Opener) -> None:
    """A clear that hangs in the store hears that the cache was closed; afterwards there is nothing to clear."""
    store = CanClear(MemoryStore())
    rig = await filled(open_cache, store, close_timeout_s=0.05)
    store.may_delete.clear()
    clearing = asyncio.create_task(rig.cache.admin.clear())
    await store.deleting.wait()
    await rig.cache.close()
    with pytest.raises(ClosedError, match="the cache is closed"):
        await clearing
    with pytest.raises(ClosedError, match="the cache is closed"):
        await rig.cache.admin.clear()
    store.may_delete.set()


async def test_a_failed_cache_clears_its_store_only(open_cache: Opener) -> None:
    """A tree in doubt is not touched, and nobody matches it; the objects go."""
    rig = await filled(open_cache)
    rig.ctx.fail(RuntimeError("a bug"))
    for tier in (Tier.DEVICE, Tier.HOST, None):
        await rig.cache.admin.clear(tier)
    assert await keys_of(rig) == []
    assert rig.cache.stats().device.in_tree == 4


# By chance


class Operator:
    """Somebody who attaches, detaches, clears and flushes at any moment."""

    def __init__(self, storm: Storm, stores: list[CanClear]) -> None:
        self.admin, self.rng, self.stores = storm.rig.cache.admin, storm.rng, stores

    async def act(self) -> None:
        """Do one thing; that it is refused, or that the store fails it, is no mistake of the cache."""
        admin, rng = self.admin, self.rng
        things: list[Callable[[], Awaitable[None]]] = [
            lambda: admin.clear(rng.choice(TIERS)),
            lambda: admin.attach_store(rng.choice(self.stores)),
            lambda: admin.detach_store(force=rng.random() < 0.7),
            lambda: admin.flush(rng.choice([Tier.HOST, Tier.STORE])),
        ]
        with contextlib.suppress(ConfigError, StoreUnavailable):
            await rng.choice(things)()


async def storm_with_an_operator(open_cache: Opener, seed: int, num_requests: int) -> None:
    """Let requests and changes come and go, and see that everything is in its place afterwards."""
    rng = random.Random(seed)
    moody = [MoodyStore(MemoryStore(), rng, 0.15) for _ in range(2)]
    stores = [CanClear(store) for store in moody]
    rig = await open_cache(
        store=stores[0],
        device_pages=rng.choice([12, 24]),
        host_pages=rng.choice([8, 20]),
        write_policy=rng.choice(["write_through", "write_through_selective", "write_back"]),
        store_batch_pages=rng.choice([1, 2, 128]),
        max_loads_in_flight=rng.choice([1, 3]),
    )
    rig.virtual.auto = False
    storm = Storm(rig, rng)
    operator = Operator(storm, stores)
    tasks: list[asyncio.Task[None]] = []
    for _ in range(num_requests):
        letters = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 8)))
        tasks.append(asyncio.create_task(storm.request(letters)))
        if rng.random() < 0.5:
            tasks.append(asyncio.create_task(operator.act()))
        for _ in range(rng.randrange(6)):
            await turns(rng.randrange(4))
            rig.virtual.advance()
            rig.clock.advance(rng.choice([0, 0, 0.1, 2]))
            rig.cache.audit()
        if rng.random() < 0.2:
            rng.choice(tasks).cancel()
    for moody_store in moody:
        moody_store.calm_down()
    for _ in range(400):
        rig.virtual.advance_all()
        rig.clock.advance(1)
        await turns(10)
    assert all(task.done() for task in [*tasks, *storm.forwards]), "something waits that nothing will end"
    for outcome in await asyncio.gather(*tasks, *storm.forwards, return_exceptions=True):
        if outcome is not None and not isinstance(outcome, asyncio.CancelledError | ForwardError):
            raise outcome
    assert rig.cache.state is State.OPEN, rig.ctx.failure
    rig.virtual.auto = True
    await rig.cache.admin.flush()
    await check_all_given_back(rig)
    assert not rig.ctx.tree.detached
    for letters in ("abab", "bbab", "aaaa"):
        rig.check_local(letters)
        for store in stores:
            await rig.check_stored(letters, store)
    await rig.cache.admin.clear()
    stats = rig.cache.stats()
    assert (stats.device.free, stats.host.free) == (stats.device.capacity, stats.host.capacity)


@pytest.mark.parametrize("seed", range(12))
async def test_a_storm_with_an_operator(open_cache: Opener, seed: int) -> None:
    """Whatever is changed under whatever load, every byte that is served is right and every page comes back."""
    await storm_with_an_operator(open_cache, seed, 25)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(1000, 1300))
async def test_many_storms_with_an_operator(open_cache: Opener, seed: int) -> None:
    """The same, for longer and three hundred times."""
    await storm_with_an_operator(open_cache, seed, 60)
