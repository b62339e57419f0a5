"""A guarded store fails fast: deadlines, retries and a breaker, and the same bytes as without a guard."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from hicache_async.abc import (
    Store,
    SupportsDelete,
    SupportsListing,
    SupportsNamespaces,
    SupportsRefusal,
    SupportsStat,
    SupportsStats,
    SupportsSweep,
)
from hicache_async.errors import ConfigError, StoreUnavailable, WrongLoopError
from hicache_async.stores import GuardedStore, MemoryStore, NullStore
from hicache_async.testing.faults import FlakyStore, HangingStore, HeldStore, LyingStore, StoreWrapper
from hicache_async.testing.manual import ManualClock
from hicache_async.types import ObjectStat, Stop, StopToken
from tests.stores.pages import read, until, write
from tests.stores.wrappers import Telling, Whole

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

OPTIONS: dict[str, Any] = {
    "timeout_s": 2.0, "lookup_timeout_s": 1.0, "max_attempts": 1, "backoff_s": 0.5, "max_failures": 3,
    "cooldown_s": 4.0, "draw": lambda: 1.0,
}  # fmt: skip
VERBS = ("count_prefix", "read", "write", "delete")


def guarded(inner: Store, **options: object) -> tuple[GuardedStore, ManualClock]:
    """Return a guard and the clock that it goes by."""
    clock = ManualClock()
    return GuardedStore(inner, **{**OPTIONS, "clock": clock, **options}), clock


async def use(store: Store, verb: str, stop: StopToken | None = None) -> int:
    """Call ``verb`` for one key."""
    if verb == "count_prefix":
        return await store.count_prefix(["a"])
    if verb == "write":
        return await write(store, "a")
    if verb == "delete":
        assert isinstance(store, SupportsDelete)
        return await store.delete(["a"])
    return await store.read(["a"], [memoryview(bytearray(1000))], stop or StopToken())


async def fails(store: Store, verb: str) -> Exception:
    """Return what a call raises."""
    with pytest.raises(Exception) as caught:
        await use(store, verb)
    return caught.value


class Deleting(StoreWrapper):
    """Delete, and whatever its fault does to the other verbs."""

    async def delete(self, keys: Sequence[str]) -> int:
        self.calls["delete"] += 1
        assert isinstance(self.inner, SupportsDelete)
        return await self.around("delete", lambda: self.inner.delete(keys), StopToken())  # type: ignore[attr-defined]


class FlakyDeleting(Deleting, FlakyStore):
    """Raise at some calls of one verb, of delete too."""


class HangingDeleting(Deleting, HangingStore):
    """Hang in one verb, in delete too."""


async def opened(
    inner: Store | None = None, **options: object
) -> tuple[GuardedStore, ManualClock, StoreWrapper]:
    """Return a guard whose breaker three failed lookups have opened; the store behind it is well again."""
    counted = StoreWrapper(inner or MemoryStore())
    flaky = FlakyDeleting(counted, "count_prefix", error=OSError("gone"), at={1, 2, 3})
    store, clock = guarded(flaky, **options)
    for _ in range(3):
        assert isinstance(await fails(store, "count_prefix"), OSError)
    assert store.breaker == "open"
    return store, clock, flaky


# What a guard does not change


async def test_a_good_store_is_as_without_a_guard() -> None:
    """Every answer is passed on, a miss and a short answer are no failures, and no timer is left."""
    store, clock = guarded(MemoryStore(max_bytes=2000), max_failures=1)
    assert await write(store, "a", "b", "c") == 2
    assert await store.count_prefix(["a", "b", "c"]) == 2
    assert await store.count_prefix(["c"]) == 0
    assert await read(store, "a", "b") == 2
    assert await read(store, "c") == 0
    assert (store.breaker, store.refusal()) == ("closed", None)
    assert not +store.stats
    assert clock.pending == 0
    await store.aclose()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.inner.count_prefix(["a"])


async def test_a_guard_can_do_what_its_store_can() -> None:
    """It deletes and lists where the store inside does, and only there."""
    memory = MemoryStore()
    await write(memory, "a", "b")
    whole, _ = guarded(memory)
    assert isinstance(whole, SupportsDelete) and isinstance(whole, SupportsListing)
    assert sorted(await whole.list_keys()) == ["a", "b"]
    assert await whole.delete(["a", "z"]) == 1
    assert await memory.count_prefix(["b"]) == 1
    bare, _ = guarded(NullStore())
    assert not isinstance(bare, SupportsDelete) and not isinstance(bare, SupportsListing)
    half, _ = guarded(Deleting(memory))
    assert isinstance(half, SupportsDelete) and not isinstance(half, SupportsListing)
    for store in (whole, bare, half):
        assert isinstance(store, GuardedStore)
        assert isinstance(store, SupportsRefusal) and isinstance(store, SupportsStats)


async def test_a_numpy_integer_is_a_count() -> None:
    """What counts as an answer without a guard does so with one."""
    store, _ = guarded(LyingStore(MemoryStore(), {"count_prefix": np.int64(1)}))
    assert await store.count_prefix(["a"]) == 1


# Failures, and retries


@pytest.mark.parametrize("verb", VERBS)
async def test_failures_in_a_row_open_the_breaker(verb: str) -> None:
    """After three failed operations nothing reaches the store; each is told what happened."""
    flaky = FlakyDeleting(MemoryStore(), verb, error=OSError("gone"), at=None)
    store, _ = guarded(flaky)
    for _ in range(3):
        assert isinstance(await fails(store, verb), OSError)
    assert (store.breaker, store.refusal()) == ("open", Stop.BREAKER_OPEN)
    before = dict(flaky.calls)
    for _ in range(20):
        for each in ("count_prefix", "write", "delete"):
            assert isinstance(await fails(store, each), StoreUnavailable)
        stop = StopToken()
        assert await use(store, "read", stop) == 0
        assert (stop.reason, stop.stopped, stop.tracked) == (Stop.BREAKER_OPEN, False, False)
    assert dict(flaky.calls) == before
    assert store.stats["refusals"] == 80
    assert (store.stats["failures"], store.stats["breaker_opened"]) == (3, 1)


async def test_all_operations_count_together() -> None:
    """A success of any of them ends the row of failures of all."""
    flaky = FlakyStore(MemoryStore(), "read", error=OSError("gone"), at=None)
    store, _ = guarded(flaky)
    for _ in range(4):
        await fails(store, "read")
        await fails(store, "read")
        await use(store, "write")
    assert store.breaker == "closed"


@pytest.mark.parametrize("answer", [-1, 2, None, 1.5, True, "1", float("nan")])
@pytest.mark.parametrize("verb", ["count_prefix", "read", "write"])
async def test_an_answer_that_cannot_be_true_is_a_failure(verb: str, answer: object) -> None:
    """It is not passed on as a count, and opens the breaker."""
    store, _ = guarded(LyingStore(MemoryStore(), {verb: answer}), max_failures=1)
    assert isinstance(await fails(store, verb), StoreUnavailable)
    assert store.breaker == "open"


async def test_a_read_that_the_store_blames_on_itself_is_a_failure() -> None:
    """A short read with the reason STORE_FAULT counts; one that found an object damaged or gone does not."""

    class Blaming(StoreWrapper):
        reason: Stop | None = None

        async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
            stop.reason = self.reason
            return 0

    inner = Blaming(MemoryStore())
    store, _ = guarded(inner, max_attempts=3)
    for inner.reason, state in [
        (Stop.CORRUPT, "closed"),
        (Stop.VANISHED, "closed"),
        (Stop.STORE_FAULT, "open"),
    ]:
        for _ in range(3):
            assert await use(store, "read") == 0
        assert store.breaker == state
    assert store.stats["retries"] == 0


@pytest.mark.parametrize("verb", VERBS)
async def test_what_fails_once_is_tried_again(verb: str) -> None:
    """After a pause the operation is repeated, and its success is the only outcome."""
    flaky = FlakyDeleting(MemoryStore(), verb, error=OSError("once"), at={1, 2})
    store, clock = guarded(flaky, max_attempts=3, max_failures=1, backoff_s=0.25)
    call = asyncio.create_task(use(store, verb))
    for number, pause_s in enumerate((0.25, 0.5), start=1):
        await until(lambda: clock.pending == 2)
        assert flaky.calls[verb] == number
        clock.advance(pause_s - 0.01)
        await asyncio.sleep(0)
        assert flaky.calls[verb] == number
        clock.advance(0.01)
        await until(lambda: flaky.calls[verb] > number)  # noqa: B023 - used before the next turn
    assert await call == {"count_prefix": 0, "read": 0, "write": 1, "delete": 0}[verb]
    assert (store.breaker, store.stats["retries"], store.stats["failures"]) == ("closed", 2, 0)
    assert clock.pending == 0


async def test_pauses_are_drawn() -> None:
    """Each is a share of what doubles from try to try, so that many clients do not come back at once."""
    draws = iter([0.5, 0.25, 0.0, 1.0])
    flaky = FlakyStore(MemoryStore(), "read", error=OSError("gone"), at=None)
    store, clock = guarded(flaky, max_attempts=4, backoff_s=0.4, draw=lambda: next(draws))
    call = asyncio.create_task(fails(store, "read"))
    for pause_s in (0.2, 0.2):
        await until(lambda: clock.pending == 2)
        clock.advance(pause_s)
        await until(lambda: clock.pending < 2)
    assert isinstance(await call, OSError)
    assert flaky.calls["read"] == 4
    assert (store.stats["retries"], store.stats["failures"]) == (3, 1)


async def test_no_retry_begins_after_the_deadline() -> None:
    """A pause that would end at the deadline or later is not waited for: the error comes at once."""
    flaky = FlakyStore(MemoryStore(), "read", error=OSError("gone"), at=None)
    store, clock = guarded(flaky, max_attempts=9, backoff_s=1.0)  # pauses of 1, 2, 4 .. s within 2 s
    call = asyncio.create_task(fails(store, "read"))
    await until(lambda: clock.pending == 2)
    clock.advance(1.0)
    assert isinstance(await call, OSError)
    assert (flaky.calls["read"], clock.monotonic(), clock.pending) == (2, 1.0, 0)


@pytest.mark.parametrize("error", [ConfigError("one buffer for each key"), WrongLoopError("another loop")])
async def test_a_mistake_of_the_caller_is_no_failure(error: Exception) -> None:
    """What the caller did wrong is raised at once, is not tried again and says nothing of the store."""
    flaky = FlakyStore(MemoryStore(), "read", error=error, at=None)
    store, clock = guarded(flaky, max_attempts=3, max_failures=1)
    assert await fails(store, "read") is error
    assert (flaky.calls["read"], store.breaker, store.stats["failures"]) == (1, "closed", 0)
    assert clock.pending == 0


async def test_retries_end_when_the_breaker_opens() -> None:
    """An operation that pauses while others open the breaker does not come back to the store."""
    flaky = FlakyStore(MemoryStore(), "read", error=OSError("gone"), at=None)
    store, clock = guarded(flaky, max_attempts=2, max_failures=1)
    first = asyncio.create_task(fails(store, "read"))
    await until(lambda: clock.pending == 2)
    open_now(store)
    clock.advance(0.5)
    assert isinstance(await first, OSError)
    assert flaky.calls["read"] == 1


def open_now(store: GuardedStore) -> None:
    """Open a breaker that one failure opens."""
    admission = store._operations.breaker.admit()
    assert admission is not None and admission.fail("somebody else's")


# Deadlines


@pytest.mark.parametrize(("verb", "timeout_s"), [("count_prefix", 1.0), ("read", 2.0)])
async def test_a_caller_goes_at_the_deadline(verb: str, timeout_s: float) -> None:
    """A lookup or read that hangs raises at its deadline, without a retry, and that is a failure."""
    hanging = HangingStore(MemoryStore(), verb)
    store, clock = guarded(hanging, max_attempts=3)
    for number in range(1, 4):
        call = asyncio.create_task(fails(store, verb))
        await hanging.hung(number)
        clock.advance(timeout_s - 0.01)
        await asyncio.sleep(0)
        assert not call.done()
        clock.advance(0.01)
        assert isinstance(await call, StoreUnavailable)
    assert store.breaker == "open"
    assert (store.stats["deadline_misses"], store.stats["failures"], hanging.calls[verb]) == (3, 3, 3)
    assert clock.pending == 0
    hanging.release()
    await until(lambda: not store._operations.attempts.num_left)
    assert store.breaker == "open"


@pytest.mark.parametrize("verb", ["write", "delete"])
@pytest.mark.parametrize("ends_well", [True, False])
async def test_a_change_is_waited_for_beyond_its_deadline(verb: str, ends_well: bool) -> None:
    """A write reads its pages until it ends, so its caller waits; the breaker hears at the deadline."""
    inner = MemoryStore()
    hanging = HangingDeleting(inner, verb)
    store, clock = guarded(hanging, max_attempts=3, max_failures=1)
    call = asyncio.ensure_future(use(store, verb) if ends_well else fails(store, verb))
    await hanging.hung()
    clock.advance(2.0)
    assert (store.breaker, store.stats["deadline_misses"]) == ("open", 1)
    await asyncio.sleep(0)
    assert not call.done()
    if not ends_well:
        await inner.aclose()
    hanging.release()
    result = await call
    assert result == (verb == "write") if ends_well else isinstance(result, StoreUnavailable)
    assert (store.breaker, hanging.calls[verb], store.stats["failures"]) == ("open", 1, 1)


async def test_a_listing_takes_as_long_as_it_takes() -> None:
    """list_keys has no deadline and tells the breaker nothing, but is refused like all others."""

    class SlowList(MemoryStore):
        async def list_keys(self) -> Sequence[str]:
            await going.wait()
            return ["a"]

    going = asyncio.Event()
    store, clock = guarded(SlowList(), max_failures=1)
    assert isinstance(store, SupportsListing)
    call = asyncio.ensure_future(store.list_keys())
    await asyncio.sleep(0)
    clock.advance(1e6)
    going.set()
    assert await call == ["a"]
    assert store.breaker == "closed"
    open_now(store)
    with pytest.raises(StoreUnavailable, match="list_keys was refused: its breaker is open since"):
        await store.list_keys()


async def test_what_has_no_deadline_is_refused_all_the_same() -> None:
    """Namespaces and a sweep take as long as they take, tell the breaker nothing, and are refused like others."""
    store, clock = guarded(Whole(MemoryStore()), max_failures=1)
    assert isinstance(store, SupportsNamespaces) and isinstance(store, SupportsSweep)
    assert await store.list_namespaces() == ["ukv1-0123456789abcdef"]
    assert await store.sweep() == {"temp_files": 3}
    assert clock.pending == 0
    open_now(store)
    for verb, call in (("list_namespaces", store.list_namespaces), ("sweep", store.sweep)):
        with pytest.raises(StoreUnavailable, match=f"{verb} was refused: its breaker is open since"):
            await call()
    assert store.stats["refusals"] == 2


@pytest.mark.parametrize("answer", [None, 1, [], ["a"], [None, None], "x"])
async def test_an_answer_about_sizes_that_cannot_be_true_is_a_failure(answer: object) -> None:
    """There is one ObjectStat or None for each key."""

    class Lying(Telling):
        async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
            return answer  # type: ignore[return-value]

    store, _ = guarded(Lying(MemoryStore()), max_failures=1)
    assert isinstance(store, SupportsStat)
    with pytest.raises(StoreUnavailable, match="expected what is known of 1 objects"):
        await store.stat(["a"])
    assert store.breaker == "open"


async def test_a_question_for_sizes_ends_at_its_deadline() -> None:
    """It is cancelled in the store, a failure, and asked again at most as often as other operations."""
    asked: list[asyncio.Future[None]] = []

    class Hanging(Telling):
        async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
            asked.append(asyncio.get_running_loop().create_future())
            await asked[-1]
            return []

    store, clock = guarded(Hanging(MemoryStore()), max_failures=1)
    assert isinstance(store, SupportsStat)
    call = asyncio.ensure_future(store.stat(["a"]))
    await until(lambda: bool(asked))
    clock.advance(2.0)
    with pytest.raises(StoreUnavailable, match="no answer in 2 s"):
        await call
    await until(asked[0].cancelled)
    assert (store.breaker, len(asked), clock.pending) == ("open", 1, 0)


# The breaker opens and closes


@pytest.mark.parametrize("verb", ["count_prefix", "read", "write"])
async def test_one_probe_closes_it(verb: str) -> None:
    """After the cool-down one operation goes through and all others are refused; its success lets them in."""
    held = HeldStore(MemoryStore(), ())
    store, clock, counted = await opened(held)
    clock.advance(3.9)
    assert store.refusal() is Stop.BREAKER_OPEN
    clock.advance(0.1)
    assert (store.refusal(), store.breaker) == (None, "open")
    held.hold(verb)
    probe = asyncio.ensure_future(use(store, verb))
    await held.arrived()
    assert (store.breaker, store.refusal()) == ("half_open", Stop.BREAKER_OPEN)
    before = sum(counted.calls.values())
    for each in ("count_prefix", "write", "delete"):
        assert isinstance(await fails(store, each), StoreUnavailable)
    assert await use(store, "read") == 0
    assert sum(counted.calls.values()) == before
    held.open()
    await probe
    assert (store.breaker, store.refusal()) == ("closed", None)
    assert await use(store, "write") == await use(store, "read") == 1


async def test_a_failed_probe_is_not_repeated_and_doubles_the_wait() -> None:
    """The probe is tried once; its failure keeps the store away for twice as long."""
    flaky = FlakyStore(MemoryStore(), "read", error=OSError("gone"), at=None)
    store, clock = guarded(flaky, max_failures=1, max_attempts=3, backoff_s=0.0)
    await fails(store, "read")
    assert flaky.calls["read"] == 3
    clock.advance(4.0)
    assert isinstance(await fails(store, "read"), OSError)
    assert flaky.calls["read"] == 4
    clock.advance(7.9)
    assert store.refusal() is Stop.BREAKER_OPEN
    clock.advance(0.1)
    assert store.refusal() is None
    assert store.stats["failed_probes"] == 1


@pytest.mark.parametrize("verb", ["count_prefix", "read", "write"])
async def test_a_probe_that_hangs_ends_at_its_deadline(verb: str) -> None:
    """A hanging probe fails at the deadline, so the breaker cannot stay half-open for ever."""
    hanging = HangingStore(MemoryStore(), verb)
    store, clock, _ = await opened(hanging)
    clock.advance(4.0)
    probe = asyncio.ensure_future(asyncio.gather(use(store, verb), return_exceptions=True))
    await hanging.hung()
    assert store.breaker == "half_open"
    clock.advance(2.0)
    assert store.breaker == "open"
    clock.advance(8.0)
    assert store.refusal() is None
    hanging.release()
    await probe
    assert (store.breaker, store.refusal()) == ("open", None)


async def test_why_it_refuses() -> None:
    """It says what failed last, since when the breaker is open, and when it is tried again."""
    store, clock, _ = await opened()
    clock.advance(1.5)
    why = "its breaker is open since 1.5 s (count_prefix: OSError('gone')); it is tried again in 2.5 s"
    assert store.why_refused() == why
    assert str(await fails(store, "write")) == f"write was refused: {why}"
    clock.advance(3)
    assert store.why_refused().endswith("it is tried again in 0.0 s")
    held = HeldStore(MemoryStore(), ["read"])
    store, clock, _ = await opened(held)
    clock.advance(4)
    probe = asyncio.ensure_future(use(store, "read"))
    await held.arrived()
    assert store.why_refused().endswith("it is being tried now")
    held.open()
    await probe
    assert store.why_refused() == "its breaker is closed"


async def test_one_line_for_each_change() -> None:
    """Opening, a failed probe and closing are logged once each, however many requests come meanwhile."""
    flaky = FlakyStore(MemoryStore(), "count_prefix", error=OSError("gone"), at=range(1, 5))
    with capture_logs() as logs:
        store, clock = guarded(flaky)
        for _ in range(50):
            await fails(store, "count_prefix")
        clock.advance(4)
        for _ in range(50):
            await fails(store, "count_prefix")
        clock.advance(8)
        for _ in range(50):
            assert await store.count_prefix(["a"]) == 0
    lines = [(entry["event"], entry["log_level"]) for entry in logs]
    assert lines == [
        ("store.breaker_opened", "warning"), ("store.breaker_half_open", "debug"),
        ("store.breaker_opened", "warning"), ("store.breaker_half_open", "debug"),
        ("store.breaker_closed", "info"),
    ]  # fmt: skip
    assert logs[0]["fault"] == "count_prefix: OSError('gone')"
    assert (logs[0]["retry_in_s"], logs[2]["retry_in_s"], logs[2]["open_for_s"]) == (4, 8, 4)
    assert store.stats["breaker_opened"] == store.stats["breaker_closed"] == 1


# Options


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, True, "1", None, 10**400])
@pytest.mark.parametrize(
    "name", ["timeout_s", "lookup_timeout_s", "backoff_s", "cooldown_s", "max_cooldown_s", "max_attempts",
             "max_failures"],
)  # fmt: skip
async def test_an_option_that_cannot_work_is_refused(name: str, value: object) -> None:
    """The error names the option and its value."""
    if value == 10**400 and name in ("max_attempts", "max_failures"):
        value = 1.5
    with pytest.raises(ConfigError, match=f"{name} is "):
        GuardedStore(MemoryStore(), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["timeout_s", "lookup_timeout_s", "cooldown_s", "max_attempts", "max_failures"]
)
async def test_zero_is_refused_where_it_cannot_work(name: str) -> None:
    """No time, no tries and no failures make no guard."""
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        GuardedStore(MemoryStore(), **{name: 0})  # type: ignore[arg-type]


async def test_a_limit_below_what_it_limits_is_refused() -> None:
    """The longest cool-down is at least the first one."""
    with pytest.raises(ConfigError, match="max_cooldown_s is 3"):
        GuardedStore(MemoryStore(), cooldown_s=4, max_cooldown_s=3)


async def test_the_running_loop_is_the_default_clock() -> None:
    """Without a clock of its own a guard goes by the loop's timers."""
    hanging = HangingStore(MemoryStore(), "count_prefix")
    store = GuardedStore(hanging, lookup_timeout_s=0.01, max_failures=1)
    assert isinstance(await fails(store, "count_prefix"), StoreUnavailable)
    assert store.breaker == "open"
    hanging.release()
