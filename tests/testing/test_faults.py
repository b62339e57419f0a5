"""Each faulty store does its one thing, and is a plain store otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from hicache_async.abc import Store
from hicache_async.stores import MemoryStore
from hicache_async.testing.faults import (
    VERBS,
    FlakyStore,
    HangingStore,
    HeldStore,
    LyingStore,
    StoreWrapper,
)
from hicache_async.types import StopToken

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

PLAIN: dict[str, Callable[[Store], StoreWrapper]] = {
    "wrapper": StoreWrapper,
    "held, open": lambda inner: HeldStore(inner, ()),
    "flaky, later": lambda inner: FlakyStore(inner, "read", error=OSError(), at={99}),
    "lying about nothing": lambda inner: LyingStore(inner, {}),
    "hanging, later": lambda inner: HangingStore(inner, "read", after_calls=99),
}


async def use(store: Store, verb: str, stop: StopToken | None = None) -> int:
    """Make one call of ``verb`` for the key "a"."""
    if verb == "count_prefix":
        return await store.count_prefix(["a"])
    if verb == "read":
        return await store.read(["a"], [memoryview(bytearray(1))], stop or StopToken())
    return await store.write(["a"], [memoryview(b"1")])


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
async def test_without_its_fault_it_is_the_inner_store(make: Callable[[Store], StoreWrapper]) -> None:
    """A wrapper passes buffers, counts and close through, and counts calls."""
    inner = MemoryStore()
    store = make(inner)
    into = bytearray(1)
    assert await store.write(["a", "b"], [memoryview(b"1"), memoryview(b"2")]) == 2
    assert await store.count_prefix(["a", "b", "c"]) == 2
    assert await store.read(["b"], [memoryview(into)], StopToken()) == 1
    assert into == b"2"
    assert store.calls == {"write": 1, "count_prefix": 1, "read": 1}
    await store.aclose()
    assert not inner._objects


@pytest.mark.parametrize("verb", VERBS)
async def test_a_held_call_waits_at_the_door(verb: str) -> None:
    """A held call has not reached the inner store; let in, it goes on, and later ones wait again."""
    inner = StoreWrapper(MemoryStore())
    store = HeldStore(inner)
    calls = [asyncio.create_task(use(store, verb)) for _ in range(2)]
    await store.arrived(2, verb)
    assert (store.waiting, inner.calls[verb]) == ((verb, verb), 0)
    store.let_in(verb)
    await calls[0]
    assert (store.waiting, inner.calls[verb]) == ((verb,), 1)
    store.open()
    await calls[1]
    await use(store, verb)
    assert (store.waiting, inner.calls[verb]) == ((), 3)
    store.hold(verb)
    again = asyncio.create_task(use(store, verb))
    await store.arrived()
    store.let_in(verb)
    store.let_in(verb)
    await again


async def test_a_cancelled_call_leaves_the_door() -> None:
    """A held call that is cancelled never happens, and its token, busy till then, is quiet."""
    inner = StoreWrapper(MemoryStore())
    store, stop = HeldStore(inner), StopToken()
    call = asyncio.create_task(use(store, "read", stop))
    await store.arrived()
    assert stop.busy
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (store.waiting, inner.calls["read"], stop.busy) == ((), 0, False)


async def test_flaky_calls_raise_by_number() -> None:
    """The k-th calls of the verb raise, the others and other verbs do not."""
    store = FlakyStore(MemoryStore(), "write", error=OSError("gone"), at={1, 3})
    outcomes = [
        isinstance(outcome, OSError)
        for outcome in [
            (await asyncio.gather(use(store, "write"), return_exceptions=True))[0] for _ in range(4)
        ]
    ]
    assert outcomes == [True, False, True, False]
    assert await use(store, "read") == 1
    always = FlakyStore(MemoryStore(), "read", error=OSError("gone"), at=None)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            await use(always, "read")


@pytest.mark.parametrize("answer", [-1, 10**6, None, 1.5])
@pytest.mark.parametrize("verb", VERBS)
async def test_a_liar_does_the_work_and_returns_nonsense(verb: str, answer: object) -> None:
    """Only the answer is wrong; other verbs answer truly."""
    inner = StoreWrapper(MemoryStore())
    await use(inner, "write")
    store = LyingStore(inner, {verb: answer})
    assert [await use(store, each) for each in VERBS] == [answer if each == verb else 1 for each in VERBS]
    assert inner.calls[verb] >= 1


async def test_a_lie_may_follow_from_the_truth() -> None:
    """A function makes the answer from the true count."""
    store = LyingStore(MemoryStore(), {"write": lambda count: count + 1})
    assert await use(store, "write") == 2


async def test_a_hanging_call_goes_on_when_released() -> None:
    """It waits for release(), then does its work; later calls do not hang."""
    store, stop = HangingStore(MemoryStore(), "read", after_calls=1), StopToken()
    await use(store, "write")
    assert await use(store, "read") == 1
    call = asyncio.create_task(use(store, "read", stop))
    await store.hung()
    assert stop.busy
    store.release()
    assert await call == 1
    assert not stop.busy
    assert await use(store, "read") == 1


async def test_a_hanging_call_keeps_its_buffers_when_cancelled() -> None:
    """Cancel ends the coroutine; the token stays busy until release, as with a hung thread."""
    store, stop = HangingStore(MemoryStore(), "read"), StopToken()
    call = asyncio.create_task(use(store, "read", stop))
    await store.hung()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert stop.busy
    assert store.num_hanging == 1
    quiet = asyncio.Event()
    stop.when_quiet(quiet.set)
    store.release()
    await quiet.wait()


async def test_faults_stack() -> None:
    """A flaky store around a held one raises without waiting, and waits when it does not raise."""
    store = FlakyStore(HeldStore(MemoryStore(), ("read",)), "read", error=OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        await use(store, "read")
    held = store.inner
    assert isinstance(held, HeldStore)
    call = asyncio.create_task(use(store, "read"))
    await held.arrived(1, "read")
    held.open("read")
    assert await call == 0
