"""Two tiers are one store: everything that either holds, with the slow one's word for what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from hicache_async.abc import (
    Store,
    SupportsDelete,
    SupportsListing,
    SupportsNamespaces,
    SupportsStat,
    SupportsSweep,
)
from hicache_async.errors import ConfigError, StoreUnavailable
from hicache_async.stores import GuardedStore, MemoryStore, NullStore
from hicache_async.stores._tiers import fills as _fills
from hicache_async.stores.codec import AesGcm, CodecStore, Zstd
from hicache_async.stores.tiered import DEFAULT_FILL_BYTES, TieredStore
from hicache_async.testing.faults import FlakyStore, HangingStore, HeldStore, StoreWrapper
from hicache_async.testing.manual import ManualClock
from hicache_async.types import ObjectStat, Stop, StopToken
from tests.stores.pages import page_of, read, until, write
from tests.stores.wrappers import (
    KEY_ENV,
    Deleting,
    ReadCall,
    Sweeping,
    Telling,
    Whole,
    filled,
    key_in_environment,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]
__all__ = ["key_in_environment"]

KEYS = [f"page {number}" for number in range(12)]


async def tiers(in_fast: Sequence[str], in_slow: Sequence[str]) -> tuple[MemoryStore, MemoryStore]:
    """Return two stores with the pages of some keys each."""
    fast, slow = MemoryStore(), MemoryStore()
    await write(fast, *in_fast)
    await write(slow, *in_slow)
    return fast, slow


# Both together


async def test_what_is_written_goes_to_both() -> None:
    """The slow tier's count is the answer; the fast one gets as much, in the background."""
    fast, slow = MemoryStore(), MemoryStore(max_bytes=2000)
    store = TieredStore(fast, slow)
    assert await write(store, "a", "b", "c") == 2
    await filled(store)
    assert await fast.list_keys() == await slow.list_keys() == ("a", "b")
    assert store.stats["pages_filled"] == 2
    await store.aclose()


async def test_the_fast_tier_gets_what_was_written_and_not_what_the_buffer_holds_later() -> None:
    """Its copies are made before the write returns."""
    fast = HeldStore(MemoryStore(), ["write"])
    store = TieredStore(fast, MemoryStore())
    page = bytearray(page_of("a"))
    await store.write(["a"], [memoryview(page)])
    page[:] = bytes(1000)
    fast.open()
    await filled(store)
    assert await read(fast.inner, "a") == 1


async def test_what_only_the_slow_tier_has_is_brought_into_the_fast_one() -> None:
    """A read is answered from both, and the next one from the fast tier alone."""
    fast, slow = await tiers(["b"], ["a", "b", "c"])
    store = TieredStore(fast, counted := StoreWrapper(slow))
    assert await read(store, "a", "b", "c") == 3
    assert (store.stats["pages_from_fast"], store.stats["pages_from_slow"]) == (1, 2)
    await filled(store)
    assert await read(store, "a", "b", "c") == 3
    assert (counted.calls["read"], store.stats["pages_from_fast"]) == (1, 4)


async def test_a_promotion_is_a_copy() -> None:
    """What its caller does with the buffers afterwards does not reach the fast tier."""
    slow = (await tiers([], ["a"]))[1]
    fast = HeldStore(MemoryStore(), ["write"])
    store = TieredStore(fast, slow)
    call = ReadCall(store, ["a"], 1000)
    await call.over()  # the buffers are poisoned by now
    fast.open()
    await filled(store)
    assert await read(fast.inner, "a") == 1


@pytest.mark.parametrize(
    "pattern", ["ffffssssffss", "sfsfsfsfsfsf", "fsfsfsfsfsfs", "bbfsbbsfbbbb", "ffssff--ffff"]
)
@pytest.mark.parametrize("tells", [True, False], ids=["told by stat", "not told"])
async def test_keys_are_counted_and_read_over_both(pattern: str, tells: bool) -> None:
    """Wherever each lies (fast, slow, both, neither): up to the first that neither has, in few calls."""
    in_fast = [key for key, where in zip(KEYS, pattern, strict=True) if where in "fb"]
    in_slow = [key for key, where in zip(KEYS, pattern, strict=True) if where in "sb"]
    kind = Telling if tells else StoreWrapper
    fast, slow = (kind(memory) for memory in await tiers(in_fast, in_slow))
    store = TieredStore(fast, slow, fill_bytes=0)
    expected = (pattern + "-").index("-")
    assert await store.count_prefix(KEYS) == expected
    assert fast.calls["count_prefix"] + slow.calls["count_prefix"] <= (6 if tells else 16)
    assert await read(store, *KEYS) == expected
    assert fast.calls["read"] + slow.calls["read"] <= (4 if tells else 16)


async def test_the_number_of_calls_does_not_grow_with_the_batch() -> None:
    """1,000 keys that lie in turns take as many calls as 12, exactly where the fast tier can tell what it has."""
    keys = [f"page {number}" for number in range(1000)]
    fast, slow = (Telling(memory) for memory in await tiers(keys[::2], keys[1::2]))
    store = TieredStore(fast, slow, fill_bytes=0)
    assert await store.count_prefix(keys) == 1000
    assert (fast.calls["count_prefix"], slow.calls["count_prefix"], fast.calls["stat"]) == (3, 3, 1)
    assert await read(store, *keys) == 1000
    bare = TieredStore(StoreWrapper(fast.inner), StoreWrapper(slow.inner))
    assert await bare.count_prefix(keys) == 16


async def test_a_whole_hit_asks_one_tier_once() -> None:
    """Where the fast tier has it all the slow one hears nothing, and nothing is brought anywhere."""
    fast, slow = (Telling(memory) for memory in await tiers(KEYS, KEYS))
    store = TieredStore(fast, slow)
    assert await store.count_prefix(KEYS) == 12
    assert await read(store, *KEYS) == 12
    assert dict(fast.calls) == {"count_prefix": 1, "read": 1} and not slow.calls


async def test_a_damaged_object_in_the_fast_tier_is_read_from_the_slow_one() -> None:
    """The read is whole, without a reason, and costs none of its neighbours."""
    inner, slow = await tiers([], ["a", "b", "c"])
    fast = CodecStore(inner, AesGcm(KEY_ENV))
    await write(fast, "a", "b", "c")
    frame = inner._objects["b"]
    inner._objects["b"] = frame[:-1] + bytes([frame[-1] ^ 1])
    store = TieredStore(fast, slow)
    stop = StopToken()
    into = [memoryview(bytearray(1000)) for _ in "abc"]
    assert await store.read(["a", "b", "c"], into, stop) == 3
    assert [bytes(each) for each in into] == [page_of(key) for key in "abc"]
    assert (stop.reason, store.stats["fast_aesgcm_damaged"]) == (None, 1)
    await filled(store)
    assert await read(fast, "a", "b", "c") == 3
    await store.aclose()


async def test_a_short_read_says_why() -> None:
    """With the reason of the slow tier, which has the last word."""
    store = TieredStore(*(await tiers(["a"], ["b"])))
    stop = StopToken()
    assert await store.read(["a", "b", "c"], [memoryview(bytearray(1000)) for _ in "abc"], stop) == 2
    assert stop.reason is Stop.VANISHED


async def test_deleting_deletes_from_both_and_counts_each_key_once() -> None:
    """Also where only one tier has it, whether or not the slow one can tell what it has."""
    for slow_kind in (Deleting, Whole):
        fast, slow = await tiers(["a", "b"], ["b", "c"])
        store = TieredStore(fast, slow_kind(slow))
        assert isinstance(store, SupportsDelete)
        assert await store.delete(["a", "b", "c", "d", "a"]) == 3
        assert await fast.list_keys() == await slow.list_keys() == ()


@pytest.mark.parametrize("lets_go", [True, False])
async def test_what_is_deleted_does_not_come_back(lets_go: bool) -> None:
    """What was on its way into the fast tier is waited for a while, and deleted when it arrives later."""
    clock = ManualClock()
    memory = MemoryStore()
    fast = HeldStore(memory, ["write"])
    store = TieredStore(Deletable(fast), slow := MemoryStore(), clock=clock)
    await write(store, "a", "b")
    await fast.arrived(1, "write")
    assert isinstance(store, SupportsDelete)
    deletion = asyncio.ensure_future(store.delete(["a"]))
    await until(lambda: any(fill.unwanted for fill in store._fills._fills))
    assert clock.pending == 1
    if lets_go:
        fast.open()
    else:
        clock.advance(1.0)
    assert await deletion == 1
    assert await slow.list_keys() == ("b",)
    assert await store.count_prefix(["a"]) == 0
    fast.open()
    await filled(store)
    assert await memory.list_keys() == ("b",)
    await until(lambda: len(asyncio.all_tasks()) == 1)


class Answering(Telling, Deleting):
    """Answers reads and writes late: with what was there when they were asked."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        answer = await call()
        if verb != "count_prefix":
            self.asked.set()
            await self.answers.wait()
        return answer


@pytest.mark.parametrize("verb", ["read", "write"])
async def test_what_is_deleted_while_a_call_has_it_does_not_come_back(verb: str) -> None:
    """A read or write that began before the delete brings the rest into the fast tier, and nothing deleted."""
    fast, memory = await tiers([], ["a", "b"] if verb == "read" else [])
    slow = Answering(memory)
    store = TieredStore(fast, slow)
    call = asyncio.ensure_future(read(store, "a", "b") if verb == "read" else write(store, "a", "b"))
    await slow.asked.wait()
    assert isinstance(store, SupportsDelete)
    assert await store.delete(["a"]) == 1
    slow.answers.set()
    assert await call == 2
    await filled(store)
    assert await fast.list_keys() == ("b",)
    assert await store.count_prefix(["a"]) == 0
    assert store.stats["pages_filled"] == 1  # it was not even there for a while
    assert not store._fills._sources
    assert await write(store, "a") == 1  # the delete is over
    await filled(store)
    assert await read(fast, "a") == 1


async def test_what_is_read_while_it_is_being_deleted_does_not_come_back() -> None:
    """Nor does a read bring it back that began after the delete did, and found it in the slow tier."""

    class LateDelete(Answering):
        async def delete(self, keys: Sequence[str]) -> int:
            reading = asyncio.ensure_future(read(store, "a"))
            await self.asked.wait()
            count = await super().delete(keys)
            readings.append(reading)
            return count

    readings: list[asyncio.Future[int]] = []
    fast, memory = await tiers([], ["a"])
    store = TieredStore(fast, slow := LateDelete(memory))
    assert isinstance(store, SupportsDelete)
    assert await store.delete(["a"]) == 1
    slow.answers.set()
    assert await readings[0] == 1
    await filled(store)
    assert await fast.list_keys() == ()


async def test_what_is_deleted_while_it_is_copied_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delete between two turns of copying counts too."""
    monkeypatch.setattr(_fills, "_TURN_NBYTES", 1)
    fast = MemoryStore()
    store = TieredStore(fast, MemoryStore())
    keys = [f"page {number}" for number in range(200)]
    writing = asyncio.ensure_future(write(store, *keys))
    await until(lambda: store._fills._copies._left < DEFAULT_FILL_BYTES and not writing.done())
    assert isinstance(store, SupportsDelete)
    assert await store.delete([keys[0], keys[150]]) == 2
    assert not writing.done()
    assert await writing == 200
    await filled(store)
    assert set(await fast.list_keys()) == set(keys) - {keys[0], keys[150]}
    assert store.stats["pages_filled"] == 198
    await write(store, *keys)
    await filled(store)
    assert (
        store._fills._copies._left == DEFAULT_FILL_BYTES - 200 * 1000
    )  # memory of what was left out is kept


async def test_a_failed_fill_of_what_was_deleted_leaves_nothing() -> None:
    """What a write stored before it failed, after the delete had given up waiting, is deleted too."""

    class Failing(StoreWrapper):
        async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
            answer = await call()
            if verb == "write":
                raise OSError("gone")
            return answer

    clock = ManualClock()
    memory = MemoryStore()
    fast = HeldStore(Failing(memory), ["write"])
    store = TieredStore(DeletableFast(fast, memory), MemoryStore(), clock=clock)
    await write(store, "a", "b")
    await fast.arrived(1, "write")
    assert isinstance(store, SupportsDelete)
    deletion = asyncio.ensure_future(store.delete(["a"]))
    await until(lambda: any(fill.unwanted for fill in store._fills._fills))
    assert clock.pending == 1
    clock.advance(1.0)
    assert await deletion == 1
    fast.open()
    await filled(store)
    assert await memory.list_keys() == ("b",)
    assert store.stats["fill_failures"] == 1


class DeletableFast(StoreWrapper):
    """Delete in ``memory``, at once."""

    def __init__(self, inner: Store, memory: MemoryStore) -> None:
        super().__init__(inner)
        self._memory = memory

    async def delete(self, keys: Sequence[str]) -> int:
        return await self._memory.delete(keys)


class Deletable(Deleting):
    """Delete behind what holds."""

    async def delete(self, keys: Sequence[str]) -> int:
        assert isinstance(self.inner, HeldStore) and isinstance(self.inner.inner, SupportsDelete)
        return await self.inner.inner.delete(keys)


async def test_lists_sizes_namespaces_and_sweeps_are_of_both() -> None:
    """Each key once, and where both know a size the fast tier's answer."""
    digest = "ukv1-0123456789abcdef"
    fast, slow = await tiers(["a", f"b_{digest}_x"], [f"b_{digest}_x", "c"])
    store = TieredStore(fast, slow)
    assert isinstance(store, SupportsListing) and isinstance(store, SupportsStat)
    assert isinstance(store, SupportsNamespaces)
    assert sorted(await store.list_keys()) == ["a", f"b_{digest}_x", "c"]
    assert [stat and stat.nbytes for stat in await store.stat(["a", "z", "c"])] == [1000, None, 1000]
    assert await store.list_namespaces() == [digest]
    swept = TieredStore(Sweeping(fast), Sweeping(slow))
    assert isinstance(swept, SupportsSweep)
    assert await swept.sweep() == {"fast_temp_files": 3, "slow_temp_files": 3}
    half = TieredStore(fast, Sweeping(slow))
    assert isinstance(half, SupportsSweep) and await half.sweep() == {"slow_temp_files": 3}


async def test_the_codec_of_tiers() -> None:
    """The slow tier's, unless the fast one encodes otherwise: then no reader of one alone shares with it."""
    memory = MemoryStore()
    zstd, aes = CodecStore(memory, Zstd()), CodecStore(memory, AesGcm(KEY_ENV))
    assert TieredStore(memory, zstd).codec == "zstd"  # type: ignore[attr-defined]
    assert TieredStore(zstd, zstd).codec == "zstd"  # type: ignore[attr-defined]
    assert TieredStore(zstd, memory).codec == "zstd|raw"  # type: ignore[attr-defined]
    assert TieredStore(aes, zstd).codec == f"{aes.codec}|zstd"  # type: ignore[attr-defined]


async def test_an_option_that_cannot_work_is_refused() -> None:
    """By name and value."""
    with pytest.raises(ConfigError, match="fill_bytes is -1; give an integer >= 0"):
        TieredStore(NullStore(), NullStore(), fill_bytes=-1)
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        TieredStore(NullStore(), NullStore(), fast_timeout_s=0)


# One tier that fails


@pytest.mark.parametrize("verb", ["count_prefix", "read", "write"])
async def test_a_dead_fast_tier_costs_nothing_but_a_count(verb: str) -> None:
    """Whatever it raises, every answer is that of the slow tier, at the first call and later."""
    fast = FlakyStore(MemoryStore(), verb, error=OSError("gone"), at=None)
    store = TieredStore(fast, MemoryStore())
    for _ in range(3):
        assert await write(store, "a", "b") == 2
        await filled(store)
        assert await store.count_prefix(["a", "b", "c"]) == 2
        assert await read(store, "a", "b", "c") == 2
    assert store.stats["fill_failures" if verb == "write" else "fast_failures"] >= 1
    assert store.refusal() is None


async def test_a_full_fast_tier_is_still_read() -> None:
    """One that takes no page more serves those it has."""
    fast = FlakyStore(MemoryStore(), "write", error=OSError("full"), at={2, 3})
    store = TieredStore(fast, slow := StoreWrapper(MemoryStore()))
    for key in "abc":
        await write(store, key)
        await filled(store)
    assert await read(store, "a") == 1
    assert slow.calls["read"] == 0
    assert (store.stats["fill_failures"], store.stats["fast_breaker_opened"]) == (2, 0)
    small = TieredStore(MemoryStore(max_bytes=1000), MemoryStore())
    await write(small, "a", "b")
    await filled(small)
    assert (small.stats["pages_filled"], small.stats["pages_not_filled"]) == (1, 1)


async def test_a_fast_tier_that_hangs_in_a_lookup_costs_its_deadline_once() -> None:
    """The slow tier answers after it, and from then on at once."""
    clock = ManualClock()
    hanging = HangingStore(MemoryStore(), "count_prefix")
    store = TieredStore(hanging, MemoryStore(), clock=clock)
    await write(store, "a")
    call = asyncio.ensure_future(store.count_prefix(["a", "b"]))
    await hanging.hung()
    clock.advance(0.2)
    assert await call == 1
    assert await store.count_prefix(["a", "b"]) == 1
    assert hanging.calls["count_prefix"] == 1
    hanging.release()


async def test_a_fast_tier_that_hangs_in_a_read_costs_that_read() -> None:
    """Its buffers stay its own until it wakes up; every later read is served by the slow tier meanwhile."""
    clock = ManualClock()
    inner, slow = await tiers(["a", "b"], ["a", "b"])
    hanging = HangingStore(inner, "read")
    store = TieredStore(hanging, slow, clock=clock)
    call = ReadCall(store, ["a", "b"], 1000)
    await hanging.hung()
    clock.advance(1.0)
    assert call.hop.task is not None
    await asyncio.wait([call.hop.task])
    assert isinstance(call.hop.task.exception(), StoreUnavailable) and not call.given_back
    assert await read(store, "a", "b") == 2
    assert not call.given_back and hanging.calls["read"] == 1
    hanging.release()
    await call.over()


async def test_a_fast_tier_that_hangs_in_writes_holds_a_bounded_number_of_pages() -> None:
    """Writes and reads go on; what no longer fits is not filled, and the copies that hang are all there is."""
    hanging = HangingStore(MemoryStore(), "write")
    store = TieredStore(hanging, MemoryStore(), fill_bytes=3500)
    for number in range(10):
        assert await write(store, f"page {number}") == 1
    assert await read(store, "page 9") == 1
    await hanging.hung(3)
    assert (store._fills.num_pending, store.stats["pages_not_filled"]) == (3, 8)
    hanging.release()
    await filled(store)
    assert await write(store, "page 10", "page 11", "page 12", "page 13") == 4
    await filled(store)
    assert store.stats["pages_filled"] == 6  # as many fit again
    await store.aclose()


async def test_memory_of_copies_is_used_again() -> None:
    """Also for pages of another size, once the old ones are out of it, but never while a write may read it."""
    store = TieredStore(MemoryStore(), MemoryStore(), fill_bytes=3000)
    for nbytes in (1000, 1500, 3000, 1000):
        for number in range(3):
            await write(store, f"{nbytes} {number}", nbytes=nbytes)
            await filled(store)
    assert (store.stats["pages_filled"], store.stats["pages_not_filled"]) == (12, 0)
    broken = FlakyStore(MemoryStore(), "write", error=OSError("gone"), at=None)
    store = TieredStore(broken, MemoryStore(), fill_bytes=3000)
    for number in range(5):
        await write(store, f"page {number}")
        await filled(store)
    assert store.stats["fill_failures"] == 5


async def test_pages_on_their_way_are_not_sent_twice() -> None:
    """Reads of pages that are being filled promote nothing."""
    held = HeldStore(MemoryStore(), ["write"])
    store = TieredStore(held, MemoryStore())
    await write(store, "a")
    for _ in range(3):
        assert await read(store, "a") == 1
    held.open()
    await filled(store)
    assert held.calls["write"] == 1


@pytest.mark.parametrize("verb", ["count_prefix", "read"])
async def test_a_dead_slow_tier_still_serves_what_the_fast_one_has(verb: str) -> None:
    """As a shorter prefix; where the fast tier has nothing of it the fault is told."""
    inner, slow = await tiers(["a", "b"], ["a", "b", "c"])
    dead = FlakyStore(slow, verb, error=OSError("gone"), at=None)
    store = TieredStore(inner, GuardedStore(dead, max_attempts=1, max_failures=2))
    stop = StopToken()
    into = [memoryview(bytearray(1000)) for _ in "abc"]
    for _ in range(3):
        if verb == "count_prefix":
            assert await store.count_prefix(["a", "b", "c"]) == 2
        else:
            assert await store.read(["a", "b", "c"], into, stop) == 2
            assert stop.reason in (Stop.STORE_FAULT, Stop.BREAKER_OPEN)
    fresh = TieredStore(MemoryStore(), GuardedStore(dead, max_attempts=1))
    with pytest.raises(OSError, match="gone"):
        await (fresh.count_prefix(["a"]) if verb == "count_prefix" else read(fresh, "a"))


async def test_a_slow_tier_that_hangs_costs_its_deadline_and_then_nothing() -> None:
    """A lookup is answered by the fast tier after the deadline, and at once when its breaker is open."""
    clock = ManualClock()
    inner, slow = await tiers(["a"], ["a", "b"])
    hanging = HangingStore(slow, "count_prefix")
    store = TieredStore(inner, GuardedStore(hanging, max_failures=1, clock=clock), clock=clock)
    call = asyncio.ensure_future(store.count_prefix(["a", "b"]))
    await hanging.hung()
    clock.advance(0.5)
    assert await call == 1
    assert await store.count_prefix(["a", "b"]) == 1
    assert hanging.calls["count_prefix"] == 1
    assert await read(store, "a") == 1
    hanging.release()


async def test_a_write_that_the_slow_tier_does_not_take_is_a_fault() -> None:
    """It is raised, and the fast tier gets nothing that the slow one has not."""
    dead = FlakyStore(MemoryStore(), "write", error=OSError("gone"), at=None)
    store = TieredStore(fast := MemoryStore(), GuardedStore(dead, max_attempts=1))
    with pytest.raises(OSError, match="gone"):
        await write(store, "a")
    assert await fast.list_keys() == ()


async def test_it_refuses_when_both_do() -> None:
    """And says why of each."""
    dead = [FlakyStore(MemoryStore(), "count_prefix", error=OSError("gone"), at=None) for _ in range(2)]
    store = TieredStore(dead[0], GuardedStore(dead[1], max_attempts=1, max_failures=2))
    for expected in (None, Stop.BREAKER_OPEN):
        with pytest.raises(OSError, match="gone"):
            await store.count_prefix(["a"])
        assert store.refusal() is expected
    assert store.why_refused().startswith("of its fast tier its breaker is open since")
    assert "; of its slow tier its breaker is open since" in store.why_refused()


async def test_a_fault_of_either_when_asked_for_sizes() -> None:
    """What the fast tier knows is told without the slow one; what neither knows is a fault."""

    class Mute(Telling):
        async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
            raise OSError("gone")

    inner, slow = await tiers(["a"], ["a", "b"])
    no_fast = TieredStore(Mute(inner), slow)
    assert [stat is not None for stat in await no_fast.stat(["a", "b"])] == [True, True]  # type: ignore[attr-defined]
    assert await read(no_fast, "a", "b") == 2
    no_slow = TieredStore(inner, GuardedStore(Mute(slow), max_attempts=1))
    assert [stat is not None for stat in await no_slow.stat(["a", "b"])] == [True, False]  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="gone"):
        await no_slow.stat(["b"])  # type: ignore[attr-defined]


# Cancels


@pytest.mark.parametrize("held_tier", ["fast", "slow"])
@pytest.mark.parametrize("verb", ["count_prefix", "read", "write"])
async def test_a_cancelled_call_leaves_nothing_behind(held_tier: str, verb: str) -> None:
    """Held in either tier: buffers come back when it has passed, no task is left, and the next call works."""
    inner = await tiers(["a"], ["a", "b"])
    held = HeldStore(inner[held_tier == "slow"], [verb])
    store = TieredStore(held if held_tier == "fast" else inner[0], held if held_tier == "slow" else inner[1])
    if verb == "read":
        call = ReadCall(store, ["a", "b"], 1000)
        await held.arrived()
        await call.tear()
        assert not call.given_back
        held.open()
        await call.over()
    else:
        work = store.count_prefix(["a", "b"]) if verb == "count_prefix" else write(store, "c")
        task = asyncio.ensure_future(work)
        await held.arrived()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or (verb, held_tier) == ("write", "fast")
        held.open()
    await filled(store)
    assert await read(store, "a", "b") == 2
    await filled(store)
    await until(lambda: len(asyncio.all_tasks()) == 1)


async def test_closing_leaves_no_fill_behind() -> None:
    """What is on its way into the fast tier is cancelled, and nothing more is sent there."""
    hanging = HangingStore(MemoryStore(), "write")
    store = TieredStore(hanging, MemoryStore())
    await write(store, "a")
    await hanging.hung()
    await store.aclose()
    assert store._fills.num_pending == 0
    await until(lambda: len(asyncio.all_tasks()) == 1)
    with pytest.raises(StoreUnavailable):
        await write(store, "b")


async def test_both_are_closed_whatever_one_of_them_does() -> None:
    """A fast tier that cannot be closed does not keep the slow one open."""

    class Unclosable(StoreWrapper):
        async def aclose(self) -> None:
            raise OSError("busy")

    slow = MemoryStore()
    with pytest.raises(OSError, match="busy"):
        await TieredStore(Unclosable(MemoryStore()), slow).aclose()
    with pytest.raises(StoreUnavailable):
        await slow.count_prefix(["a"])
