"""A store that fails, hangs or lies costs a shorter prefix and little time, and what it missed is made up for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from hicache_async import Books, PrefetchPolicy, PrefetchResult, Stop, Tier
from hicache_async.abc import Store
from hicache_async.errors import StoreUnavailable
from hicache_async.explanation import Explanation
from hicache_async.stores import GuardedStore
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HangingStore, HeldStore, StoreWrapper
from hicache_async.types import StopToken
from tests.flows.explaining import explained
from tests.flows.rig import Opener, Rig, driven, prefetched, turns
from tests.flows.stores import ShortReadStore, page_keys
from tests.flows.test_close import Logs, events

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

PROMPTS = [chr(ord("A") + number) + "z" for number in range(10)]
ERRORS = [
    ValueError("no such layout"), OSError("input/output error"), TimeoutError("too late"),
    RuntimeError("the client is closed"), StoreUnavailable("not now"),
]  # fmt: skip


# Without a guard: one failure is one failure


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_one_failed_write_stops_no_later_one(open_cache: Opener, logs: Logs, error: Exception) -> None:
    """Whatever a write raises, it is counted and named once, its pages stay usable, and all later ones are written."""
    rig = await open_cache(
        device_pages=32, host_pages=64, store=FlakyStore(MemoryStore(), "write", error=error, at={1})
    )
    await rig.serve("failed")
    await rig.cache.admin.flush()
    for letters in PROMPTS:
        await rig.serve(letters)
        await rig.cache.admin.flush()
    assert [await rig.check_stored(letters) for letters in PROMPTS] == [2] * len(PROMPTS)
    assert await rig.check_stored("failed") == 0
    assert (rig.counters["backup_pages_failed"], rig.counters["store_faults"]) == (6, 1)
    (line,) = events(logs, "backup.stopped")
    assert type(error).__name__ in line["fault"]
    stats = rig.cache.stats()
    assert (stats.hops, stats.host.in_hops) == (0, 0)
    rig.cache.audit()
    with rig.lease("failed") as lease:
        await lease.load()
    await rig.cache.admin.flush()
    assert await rig.check_stored("failed") == 6


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("verb", ["count_prefix", "read"])
async def test_one_failed_prefetch_stops_no_later_one(
    open_cache: Opener, verb: str, error: Exception
) -> None:
    """Whatever a lookup or a read raises, that request computes, and all later ones are served from the store."""
    rig = await open_cache(
        device_pages=32, host_pages=64, store=FlakyStore(MemoryStore(), verb, error=error, at={1})
    )
    for letters in PROMPTS:
        await rig.put_in_store(letters)
    first = await rig.serve(PROMPTS[0])
    assert first.result is not None and first.result.stop is Stop.STORE_FAULT
    assert first.books == Books(prompt=9, device=0, host=0, store=0, computed=9)
    for letters in PROMPTS[1:]:
        assert (await rig.serve(letters)).books.store == 8
    assert rig.counters["store_faults"] == 1
    rig.cache.audit()


class BreaksOff(StoreWrapper):
    """Read one page of each call well, and then raise, having spoilt the buffer of the next."""

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        self.calls["read"] += 1
        if self.calls["read"] > 1:
            into[0][:] = bytes(into[0].nbytes)
            raise OSError("the second page cannot be read")
        return await self.inner.read(keys[:1], into[:1], stop)


SECOND_PAGE_FAILS: dict[str, tuple[Callable[[Store], Store], int, Stop]] = {
    "damaged": (lambda inner: ShortReadStore(inner, 1, Stop.CORRUPT), 128, Stop.CORRUPT),
    "gone": (lambda inner: ShortReadStore(inner, 1, Stop.VANISHED), 128, Stop.VANISHED),
    "raises": (BreaksOff, 1, Stop.STORE_FAULT),
}


@pytest.mark.parametrize("way", SECOND_PAGE_FAILS)
async def test_a_promise_that_is_broken_is_known_before_anything_is_computed(
    open_cache: Opener, way: str
) -> None:
    """Of three pages promised the second fails: one is usable, the engine knows before it computes, nothing raises."""
    wrap, batch_pages, stop = SECOND_PAGE_FAILS[way]
    rig = await open_cache(store=wrap(MemoryStore()), store_batch_pages=batch_pages)
    await rig.put_in_store("abc")
    with rig.lease("abc") as lease:
        assert await lease.prefetch() == PrefetchResult(12, 4, stop)
        assert rig.where("abc") == "h"  # of the others nothing is believed
        loading = await lease.load()
        assert loading.tokens == 4
        await rig.forward(lease, loading)
        lease.commit(lease.num_tokens)
        assert lease.books == Books(prompt=13, device=0, host=0, store=4, computed=9)
    rig.check_local("abc")
    assert rig.unfulfilled() == {stop: 8}
    assert rig.counters.get("bugs", 0) == 0


# With a guard


async def guarded(
    open_cache: Opener, inner: Store, *, cache: dict[str, object] | None = None, **options: Any
) -> tuple[Rig, GuardedStore]:
    """Open a cache on a guarded store that goes by the same clock: 0.1 s, 3 failures, 4 s.

    What is put into or read from the store by the test goes past the guard.
    """
    rig = await open_cache(device_pages=64, host_pages=128, **(cache or {}))
    guard_options: dict[str, Any] = {
        "timeout_s": 0.1, "lookup_timeout_s": 0.1, "max_attempts": 1, "max_failures": 3, "cooldown_s": 4.0
    }  # fmt: skip
    guard = GuardedStore(inner, **{**guard_options, "clock": rig.clock, **options})
    await rig.cache.admin.attach_store(guard)
    rig.store = inner
    return rig, guard


async def opened(
    open_cache: Opener, inner: Store | None = None, verb: str = "count_prefix", **options: Any
) -> tuple[Rig, GuardedStore, StoreWrapper]:
    """Return a cache whose store failed three times and is well again, behind a breaker that is open."""
    flaky = FlakyStore(inner or MemoryStore(), verb, error=OSError("gone"), at={1, 2, 3})
    rig, guard = await guarded(open_cache, flaky, **options)
    for number in range(3):
        with rig.lease(f"{number}{number}") as lease:
            assert (await lease.prefetch()).stop is Stop.STORE_FAULT
    assert guard.breaker == "open"
    return rig, guard, flaky


def open_breaker(guard: GuardedStore) -> None:
    """Open a breaker as failures that went past the store would."""
    while (admission := guard._operations.breaker.admit()) is not None:
        admission.fail("gone")


class Costs:
    """What happens between two moments: tasks made, hops started, calls of the store."""

    def __init__(self, rig: Rig, store: StoreWrapper) -> None:
        self._rig, self._store = rig, store
        self._num_tasks = 0
        self._before: Counter[str] = Counter()

    def __enter__(self) -> Costs:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._make)
        self._before = self._counts()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.get_running_loop().set_task_factory(None)

    def _make(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        self._num_tasks += 1
        return asyncio.Task(work, loop=loop, **options)

    def _counts(self) -> Counter[str]:
        counters = self._rig.counters
        hops = {name: count for name, count in counters.items() if name.startswith("store_calls_")}
        return Counter(hops) + Counter({f"store {verb}": count for verb, count in self._store.calls.items()})

    @property
    def tasks(self) -> int:
        """Tasks made since."""
        return self._num_tasks

    @property
    def calls(self) -> dict[str, int]:
        """Hops started and calls made since."""
        return dict(self._counts() - self._before)


async def test_a_store_that_never_answers_costs_each_request_its_limit_and_then_nothing(
    open_cache: Opener, logs: Logs
) -> None:
    """Twenty requests all miss: three after their 0.1 s, the others at once; after the cool-down one finds it well."""
    hanging = HangingStore(MemoryStore(), "count_prefix")
    rig, guard = await guarded(open_cache, hanging)
    await rig.put_in_store("abcd")
    started_s = rig.clock.monotonic()
    for number in range(1, 4):
        serving = asyncio.ensure_future(prefetched(rig, "abcd"))
        await hanging.hung(number)
        rig.clock.advance(0.1)
        assert await serving == (0, 0, Stop.STORE_FAULT)
    for _ in range(17):
        assert await prefetched(rig, "abcd") == (0, 0, Stop.BREAKER_OPEN)
    assert rig.clock.monotonic() - started_s == pytest.approx(0.3)
    assert hanging.calls["count_prefix"] == 3
    assert rig.unfulfilled() == {Stop.STORE_FAULT: 3 * 16, Stop.BREAKER_OPEN: 17 * 16}
    assert len(events(logs, "store.breaker_opened")) == 1
    assert len(events(logs, "store.fault")) == 3
    hanging.release()
    rig.clock.advance(4.0)
    assert await prefetched(rig, "abcd") == (16, 16, Stop.COMPLETE)
    assert guard.breaker == "closed"
    assert (rig.counters["store_breaker_opened"], rig.counters["store_breaker_closed"]) == (1, 1)


async def test_an_open_breaker_costs_a_request_nothing(open_cache: Opener) -> None:
    """No task, no hop and no call of the store, for the prefetch, for the commit and for the backup of it."""
    rig, _, flaky = await opened(open_cache)
    with rig.lease("abcd") as lease:
        with Costs(rig, flaky) as costs:
            result = await lease.prefetch()
            assert result == PrefetchResult(0, 0, Stop.BREAKER_OPEN)
            await turns()
        assert (costs.tasks, costs.calls) == (0, {})
    with Costs(rig, flaky) as costs:
        for letters in PROMPTS:
            await rig.serve(letters)
        await turns()
    assert costs.calls == {}
    assert rig.cache._movers.backups._last_number == 0  # nothing was queued, so not even the mover was woken
    assert rig.counters["backups_skipped_store_refused"] >= len(PROMPTS)
    assert rig.cache.stats().hops == 0
    rig.cache.audit()


async def test_many_requests_at_once_make_one_probe(open_cache: Opener) -> None:
    """When the cool-down is over one call reaches the store, whoever else asks meanwhile; then all are served."""
    held = HeldStore(MemoryStore(), ["count_prefix"])
    rig, guard, _ = await opened(open_cache, held)
    for letters in PROMPTS:
        await rig.put_in_store(letters)
    rig.clock.advance(4.0)
    leases = [rig.lease(letters) for letters in PROMPTS]
    requests = [asyncio.ensure_future(lease.prefetch()) for lease in leases]
    await held.arrived()
    await turns()
    assert (len(held.waiting), guard.breaker) == (1, "half_open")
    assert sum(request.done() for request in requests) == len(PROMPTS) - 1
    held.open()
    results = await asyncio.gather(*requests)
    assert [result.stop for result in results].count(Stop.COMPLETE) == 1
    for lease in leases:
        lease.release()
    for letters in PROMPTS:
        assert await prefetched(rig, letters) in [(8, 8, Stop.COMPLETE), (0, 0, Stop.NOTHING_MISSING)]
    assert guard.stats["breaker_closed"] == 1


async def test_reads_that_hang_open_the_breaker_though_their_requests_have_gone(open_cache: Opener) -> None:
    """A request that gives up before the guard's deadline does not hide from it that the store hangs."""
    hanging = HangingStore(MemoryStore(), "read")
    rig, guard = await guarded(open_cache, hanging, timeout_s=3.0)
    policy = PrefetchPolicy.timeout(base_s=1.0, per_ki_token_s=0.0)
    for number, letters in enumerate(("ab", "cd", "ef"), start=1):
        await rig.put_in_store(letters)
        request = asyncio.ensure_future(prefetched(rig, letters, policy))
        await hanging.hung(number)
        rig.clock.advance(1.0)
        await turns()
        rig.clock.advance(0.1)
        assert (await request)[1:] == (0, Stop.DEADLINE)
    rig.clock.advance(3.0)
    assert guard.breaker == "open"
    assert await prefetched(rig, "xy", policy) == (0, 0, Stop.BREAKER_OPEN)
    assert rig.cache.stats().host.in_hops == 6
    rig.cache.audit()
    hanging.release()
    await turns()
    assert (rig.cache.stats().host.in_hops, rig.cache.stats().hops) == (0, 0)
    rig.clock.advance(4.0)
    assert await prefetched(rig, "ab") == (8, 8, Stop.COMPLETE)


async def test_a_breaker_that_opens_between_two_reads(open_cache: Opener, logs: Logs) -> None:
    """What has arrived is kept, the rest is booked as refused, and the refusal is no fault of the store."""
    held = HeldStore(MemoryStore(), ["read"])
    rig, guard = await guarded(open_cache, held, cache={"store_batch_pages": 1}, timeout_s=9.0)
    await rig.put_in_store("abc")
    request = asyncio.ensure_future(prefetched(rig, "abc"))
    await held.arrived()
    open_breaker(guard)
    held.open()
    assert await request == (12, 4, Stop.BREAKER_OPEN)
    assert rig.where("abc") == "h"
    assert (held.calls["read"], guard.stats["refusals"]) == (1, 1)
    assert rig.counters.get("store_faults", 0) == 0
    assert events(logs, "store.fault") == []


# What is not written while the breaker is open


async def by_a_hit(rig: Rig) -> None:
    with rig.lease("ab") as lease:
        await lease.load()
    await turns()


async def by_another_path(rig: Rig) -> None:
    await due(rig, "xy")
    await turns()


async def due(rig: Rig, letters: str) -> None:
    """Bring a prompt to where every write policy wants it stored: committed twice, and copied to the host."""
    for _ in range(2):
        await rig.serve(letters)
    with rig.lease(letters) as lease:
        await lease.load()
        lease.release(offload=True)


async def by_a_flush(rig: Rig) -> None:
    await rig.cache.admin.flush()


async def by_close(rig: Rig) -> None:
    await rig.cache.close()


@pytest.mark.parametrize("recover", [by_a_hit, by_another_path, by_a_flush, by_close])
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
async def test_what_was_skipped_is_made_up_for(
    open_cache: Opener, policy: str, recover: Callable[[Rig], Awaitable[None]]
) -> None:
    """A path that was not written while the breaker was open is written when it is closed again."""
    memory = MemoryStore()
    rig, guard, flaky = await opened(open_cache, memory, cache={"write_policy": policy})
    await due(rig, "ab")
    await rig.cache.admin.flush()
    assert flaky.calls["write"] == 0
    rig.clock.advance(4.0)
    await recover(rig)
    assert await rig.check_stored("ab", memory) == 2
    assert guard.breaker == "closed"


async def test_a_breaker_that_opens_in_the_middle_of_a_backlog(open_cache: Opener) -> None:
    """What is left of it is skipped, and made up for all the same."""
    flaky = FlakyStore(MemoryStore(), "write", error=OSError("gone"), at={3, 4, 5})
    rig = await open_cache(device_pages=64, host_pages=128)
    for letters in PROMPTS:
        await rig.serve(letters)
    guard = GuardedStore(flaky, max_attempts=1, max_failures=3, cooldown_s=4.0, clock=rig.clock)
    rig.store = flaky
    await rig.cache.admin.attach_store(guard)
    await turns(200)
    assert (flaky.calls["write"], guard.breaker) == (5, "open")
    await rig.cache.admin.flush()
    assert flaky.calls["write"] == 5
    rig.clock.advance(4.0)
    await rig.cache.admin.flush()
    assert [await rig.check_stored(letters) for letters in PROMPTS] == [2] * len(PROMPTS)


async def test_what_waits_when_the_breaker_opens(open_cache: Opener) -> None:
    """Requests that were queued before are skipped one by one, without a call, and made up for."""
    held = HeldStore(MemoryStore(), ["write"])
    flaky = FlakyStore(held, "write", error=OSError("gone"), at={2})
    rig, guard = await guarded(open_cache, flaky, max_failures=1)
    await rig.serve("ab", prefetch=False)
    await held.arrived()
    for letters in PROMPTS:
        await rig.serve(letters, prefetch=False)
    await turns()
    held.open()
    await rig.cache.admin.flush()
    assert (flaky.calls["write"], rig.counters["store_calls_write"], guard.breaker) == (2, 2, "open")
    assert rig.counters["backups_skipped_store_refused"] == len(PROMPTS) - 1
    rig.clock.advance(4.0)
    await rig.cache.admin.flush()
    assert [await rig.check_stored(letters) for letters in ["ab", *PROMPTS]] == [2] * (1 + len(PROMPTS))


async def test_a_cleared_store_is_not_filled_with_what_was_skipped_before(open_cache: Opener) -> None:
    """Who empties a store gets it back empty: what was skipped while its breaker was open is stored by use."""
    memory = MemoryStore()
    rig, guard = await guarded(open_cache, memory)
    open_breaker(guard)
    await rig.serve("ab")
    await rig.cache.admin.flush()
    assert rig.counters["backups_skipped_store_refused"] > 0
    rig.clock.advance(4.0)
    await rig.cache.admin.clear(Tier.STORE)
    await rig.serve("xy")
    await rig.cache.admin.flush()
    assert [await rig.check_stored(letters, memory) for letters in ("ab", "xy")] == [0, 2]
    await rig.serve("ab")
    await rig.cache.admin.flush()
    assert await rig.check_stored("ab", memory) == 2


async def test_a_probe_by_a_write_that_fails_loses_nothing(open_cache: Opener) -> None:
    """The write that probed is made up for like those that were skipped."""
    flaky = FlakyStore(MemoryStore(), "write", error=OSError("gone"), at={1, 2})
    rig, guard = await guarded(open_cache, flaky, max_failures=1)
    await rig.serve("ab", prefetch=False)
    await rig.cache.admin.flush()
    assert guard.breaker == "open"
    rig.clock.advance(4.0)
    await rig.cache.admin.flush()
    await rig.serve("ab", prefetch=False)
    await rig.cache.admin.flush()
    assert (flaky.calls["write"], guard.breaker) == (2, "open")
    rig.clock.advance(8.0)
    await rig.cache.admin.flush()
    assert await rig.check_stored("ab") == 2


async def test_a_write_that_hangs_keeps_its_pages_and_opens_the_breaker(open_cache: Opener) -> None:
    """The breaker hears at the deadline, the pages stay the write's until it ends, and nothing is lost."""
    hanging = HangingStore(MemoryStore(), "write")
    rig, guard = await guarded(open_cache, hanging, max_failures=1)
    await rig.serve("ab", prefetch=False)
    await hanging.hung()
    rig.clock.advance(0.1)
    assert guard.breaker == "open"
    await rig.serve("cd")
    await turns()
    assert hanging.calls["write"] == 1
    rig.cache.audit()
    assert rig.cache.stats().hops == 1
    hanging.release()
    rig.clock.advance(4.0)
    await driven(rig.cache.admin.flush(), rig.clock)
    assert [await rig.check_stored(letters) for letters in ("ab", "cd")] == [2, 2]
    assert guard.breaker == "closed"


async def test_close_with_an_open_breaker_waits_for_nothing(open_cache: Opener) -> None:
    """What cannot be written is left, as with a store that cannot be written."""
    rig, _, flaky = await opened(open_cache)
    await rig.serve("ab")
    before = dict(flaky.calls)
    await asyncio.wait_for(rig.cache.close(), 10)
    assert dict(flaky.calls) == before


# What an operator sees and does


async def test_explain_tells_of_an_open_breaker(open_cache: Opener) -> None:
    """It names the reason, since when and until when, and what failed last, and asks the store nothing."""
    rig, _, flaky = await opened(open_cache)
    await rig.put_in_store("abcd")
    rig.clock.advance(1.5)
    with Costs(rig, flaky) as costs:
        explanation: Explanation = await explained(rig, "abcd")
    assert costs.calls == {}
    found = (explanation.store_tokens, explanation.fetch_tokens, explanation.prefetch_stop)
    assert found == await prefetched(rig, "abcd") == (0, 0, Stop.BREAKER_OPEN)
    assert explanation.hints[0] == (
        "the store is not asked, its breaker is open since 1.5 s (count_prefix: OSError('gone')); "
        "it is tried again in 2.5 s: see to the store"
    )
    assert "breaker_open" in str(explanation)
    rig.clock.advance(2.5)
    explanation = await explained(rig, "abcd")
    assert (explanation.store_tokens, explanation.hints) == (16, ())


async def test_an_outage_is_one_line_whatever_the_traffic(open_cache: Opener, logs: Logs) -> None:
    """While it lasts nothing more is logged above debug, and the stats tell how much was refused."""
    rig, _, _ = await opened(open_cache)
    logs.clear()
    for letters in PROMPTS * 3:
        await rig.serve(letters)
        await rig.cache.admin.flush()
    assert [entry for entry in logs if entry["log_level"] != "debug"] == []
    assert rig.unfulfilled()[Stop.BREAKER_OPEN] > 0
    assert rig.counters["store_breaker_opened"] - rig.counters["store_breaker_closed"] == 1


async def test_a_store_with_an_open_breaker_comes_and_goes(open_cache: Opener) -> None:
    """Detach, graceful or not, and attach need nothing of it; a new store is written at once."""
    rig, guard, flaky = await opened(open_cache)
    await rig.serve("ab")
    before = dict(flaky.calls)
    for force in (False, True):
        await asyncio.wait_for(rig.cache.admin.detach_store(force=force), 10)
        assert await prefetched(rig, "xyz") == (0, 0, Stop.DETACHED)
        await rig.cache.admin.attach_store(guard)
        await rig.cache.admin.flush()
        assert await prefetched(rig, "xyz") == (0, 0, Stop.BREAKER_OPEN)
    assert dict(flaky.calls) == before
    await rig.cache.admin.detach_store()
    fresh = MemoryStore()
    await rig.cache.admin.attach_store(fresh)
    await rig.cache.admin.flush()
    assert await rig.check_stored("ab", fresh) == 2
    rig.cache.audit()


async def test_a_clear_needs_the_breaker_closed(open_cache: Opener) -> None:
    """While it is open the operator hears that nothing was deleted; afterwards all is."""
    memory = MemoryStore()
    rig, guard = await guarded(open_cache, memory)
    await rig.serve("ab")
    await rig.cache.admin.flush()
    open_breaker(guard)
    with pytest.raises(StoreUnavailable, match="its breaker is open"):
        await rig.cache.admin.clear(Tier.STORE)
    assert len(await page_keys(memory)) == 2
    rig.clock.advance(4.0)
    await rig.cache.admin.clear(Tier.STORE)
    assert await page_keys(memory) == []
    assert await rig.serve("ab") and guard.breaker == "closed"


# A store of others that refuses


class Refusing(StoreWrapper):
    """Answer whatever the test says when it is asked whether it may be asked; its stats are no counts."""

    stats = "good"

    def __init__(self, answer: object) -> None:
        super().__init__(MemoryStore())
        self.answer = answer

    def refusal(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def why_refused(self) -> str:
        if isinstance(self.answer, Exception):
            raise self.answer
        return "it is being moved"


@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        (None, Stop.COMPLETE),
        (Stop.BREAKER_OPEN, Stop.BREAKER_OPEN),
        (Stop.STORE_FAULT, Stop.STORE_FAULT),
        (RuntimeError("do not ask"), Stop.STORE_FAULT),
        ("yes", Stop.STORE_FAULT),
        (True, Stop.STORE_FAULT),
    ],
)
async def test_any_store_may_refuse(open_cache: Opener, answer: object, stop: Stop) -> None:
    """What it says is believed if it can be true; whatever it does, the request is served."""
    store = Refusing(answer)
    rig = await open_cache(store=store)
    await rig.put_in_store("ab")
    before = dict(store.calls)
    assert (await prefetched(rig, "ab"))[2] is stop
    explanation = await explained(rig, "ab")
    assert explanation.prefetch_stop is (Stop.NOTHING_MISSING if answer is None else stop)
    assert any("not asked" in hint for hint in explanation.hints) == (answer is not None)
    await rig.serve("ab")
    if answer is not None:
        assert dict(store.calls) == before
    store.answer = None
    await rig.serve("xy")
    await rig.cache.admin.flush()
    assert await rig.check_stored("xy") == 2
    assert rig.counters.get("bugs", 0) == 0
