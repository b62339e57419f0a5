"""A store may do whatever it likes: a fault is a shorter prefix, never a failed request, and is made up for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from hicache_async import Store
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HangingStore, LyingStore, StoreWrapper
from hicache_async.types import StopToken
from tests.flows.rig import Opener, Rig, driven, turns
from tests.flows.stores import FaultAt

pytestmark = pytest.mark.asyncio

VERBS = ("count_prefix", "read", "write")
NONSENSE: dict[str, object] = {
    "minus one": -1,
    "a million": 10**6,
    "none": None,
    "a fraction": 1.5,
    "a string": "2",
    "true": True,
    "a list": [1],
    "not a number": float("nan"),
    "beyond 64 bits": 2**70,
}


async def story(open_cache: Opener, store: Store, **options: object) -> Rig:
    """Serve prompts that meet every kind of store call, in two lives of one process; returns the second."""
    rig = await open_cache(store=store, store_batch_pages=2, device_pages=8, host_pages=12, **options)  # type: ignore[arg-type]
    for letters in ("abcd", "abxy"):
        await driven(rig.serve(letters), rig.clock)
        await driven(rig.cache.admin.flush(), rig.clock)
        rig.cache.audit()
    rig = await open_cache.restart(rig, store_batch_pages=2, device_pages=8, host_pages=12, **options)
    for letters in ("abcdef", "abxy"):
        await driven(rig.serve(letters), rig.clock)
        await driven(rig.cache.admin.flush(), rig.clock)
        rig.cache.audit()
        rig.check_local(letters)
    return rig


async def check_made_up(rig: Rig) -> None:
    """Serve everything once more with the fault gone: then the store has it all."""
    for letters in ("abcdef", "abxy"):
        await driven(rig.serve(letters), rig.clock)
        await driven(rig.cache.admin.flush(), rig.clock)
    assert await rig.check_stored("abcdef") == 6
    assert await rig.check_stored("abxy") == 4
    rig.cache.audit()
    assert rig.cache.stats().hops == 0
    assert rig.ctx.prefetch_pages == 0
    assert rig.counters.get("bugs", 0) == 0


async def calls_of_the_story(open_cache: Opener, verb: str) -> int:
    """Return how many calls of ``verb`` the story makes when all goes well."""
    store = StoreWrapper(MemoryStore())
    await check_made_up(await story(open_cache, store))
    return store.calls[verb]


@pytest.mark.parametrize("kind", ["raise", "short", "hang", -1, 10**6, None])
@pytest.mark.parametrize("verb", VERBS)
async def test_a_fault_at_every_call(open_cache: Opener, verb: str, kind: object) -> None:
    """Whichever call goes wrong, and however, all get the right bytes and the store is whole in the end."""
    num_calls = await calls_of_the_story(open_cache, verb)
    assert num_calls >= 3
    for at in range(1, num_calls + 1):
        store = FaultAt(MemoryStore(), verb, at, kind)
        rig = await story(open_cache, store, close_timeout_s=0.01)
        assert store.calls[verb] >= at
        store.release()
        await turns()
        await check_made_up(rig)


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("verb", VERBS)
async def test_a_store_that_always_answers_nonsense(open_cache: Opener, verb: str, answer: object) -> None:
    """No answer of any call is believed unless it can be true; nothing loops, hangs or breaks."""
    for batch_pages in (1, 128):
        store = LyingStore(MemoryStore(), {verb: answer})
        rig = await open_cache(store=store, store_batch_pages=batch_pages)
        await rig.put_in_store("abcd")
        served = await rig.serve("abcdef")
        assert served.books.store == (16 if verb == "write" else 0)
        await driven(rig.cache.admin.flush(), rig.clock)
        assert sum(store.calls.values()) < 20
        assert rig.counters["store_faults"] > 0
        assert rig.counters.get("bugs", 0) == 0
        rig.check_local("abcdef")
        rig.cache.audit()


async def test_an_answer_that_only_an_earlier_batch_could_give(open_cache: Opener) -> None:
    """A batch that claims more pages than it was asked for is a fault, even if the whole read had as many."""
    store = FaultAt(MemoryStore(), "read", 2, 3)
    rig = await open_cache(store=store, store_batch_pages=2)
    await rig.put_in_store("abcd")
    served = await rig.serve("abcd")
    assert served.books.store == 8
    assert served.result is not None
    assert served.result.stop == "store_fault"


class Odd:
    """A store of odd parts around a good one."""

    def __init__(self, verb: str, method: Callable[..., object] | None) -> None:
        self.inner = MemoryStore()
        for name in (*VERBS, "aclose"):
            if name != verb:
                setattr(self, name, getattr(self.inner, name))
            elif method is not None:
                setattr(self, name, method)


async def _cancelled(*args: object) -> int:
    raise asyncio.CancelledError


async def _stop_iteration(*args: object) -> int:
    raise StopAsyncIteration


async def _generator(*args: object):  # type: ignore[no-untyped-def]
    yield 1


def _raises(*args: object) -> int:
    raise ZeroDivisionError


def _failed_future(*args: object) -> asyncio.Future[int]:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_exception(OSError("gone"))
    return future


ODD_METHODS: dict[str, Callable[..., object] | None] = {
    "missing": None,
    "plain function": lambda *args: 1,
    "raises at once": _raises,
    "lets a cancel out": _cancelled,
    "stops iterating": _stop_iteration,
    "async generator": _generator,
    "returns None": lambda *args: None,
    "failed future": _failed_future,
}


@pytest.mark.parametrize("method", ODD_METHODS.values(), ids=ODD_METHODS)
@pytest.mark.parametrize("verb", VERBS)
async def test_methods_that_are_no_coroutines(
    open_cache: Opener, verb: str, method: Callable[..., object] | None
) -> None:
    """A store whose methods are not what they should be is a store that fails."""
    store = Odd(verb, method)
    rig = await open_cache(store=cast("Store", store))
    for letters in ("abcd", "abcd", "abxy"):
        await rig.serve(letters)
        await driven(rig.cache.admin.flush(), rig.clock)
        rig.check_local(letters)
        rig.cache.audit()
    assert rig.cache.stats().hops == 0
    await rig.cache.close()
    again = await open_cache(store=cast("Store", store))
    await again.serve("abcd")
    assert [life.counters.get("bugs", 0) for life in (rig, again)] == [0, 0]
    assert any(life.counters.get("store_faults", 0) for life in (rig, again))


async def test_a_store_that_answers_with_a_future(open_cache: Opener) -> None:
    """Anything that can be awaited will do."""

    def count_prefix(keys: Sequence[str]) -> asyncio.Future[int]:
        return asyncio.ensure_future(store.inner.count_prefix(keys))

    store = Odd("count_prefix", count_prefix)
    rig = await open_cache(store=cast("Store", store))
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    await rig.cache.close()
    rig = await open_cache(store=cast("Store", store))
    assert (await rig.serve("abcd")).books.store == 16


async def test_everything_goes_wrong_at_once(open_cache: Opener) -> None:
    """With every second call of each verb failing many requests are served right, and none fails."""
    store: Store = MemoryStore()
    for verb in VERBS:
        store = FlakyStore(store, verb, error=OSError("every second"), at=range(2, 1000, 2))
    rig = await open_cache(store=store, device_pages=48, host_pages=24, store_batch_pages=2)
    prompts = ("abcd", "abxy", "wxyz", "abcdef", "ijkl", "ijxy")
    for _ in range(3):
        await asyncio.gather(*(rig.serve(letters) for letters in prompts))
        await turns()  # some of what they commit is written
        rig.cache.audit()
        for letters in prompts:
            rig.check_local(letters)
    assert rig.counters["store_faults"] > 3
    assert rig.counters.get("bugs", 0) == 0


async def test_a_store_that_hangs_for_ever_serves_nobody_worse(open_cache: Opener) -> None:
    """With every call hanging requests go on without the store, and what it holds is bounded."""
    store: Store = MemoryStore()
    hanging = [store := HangingStore(store, verb) for verb in VERBS]
    rig = await open_cache(store=store, device_pages=8, host_pages=16, prefetch_capacity_fraction=0.5)
    for number in range(12):
        await driven(rig.serve(chr(ord("a") + number) + "xyz"), rig.clock)
        await driven(rig.cache.admin.flush(), rig.clock)
        rig.cache.audit()
    assert rig.cache.stats().hops <= 2
    assert rig.cache.stats().computed_tokens == 12 * 17
    for wrapper in hanging:
        wrapper.release()
    await turns()
    assert rig.cache.stats().hops == 0


async def test_a_read_whose_task_is_torn_away(open_cache: Opener) -> None:
    """If somebody cancels a store's coroutine while its thread still writes, the pages wait for the thread."""
    store = HangingStore(MemoryStore(), "read")
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    with rig.lease("abcd") as lease:
        prefetch = lease.start_prefetch()
        await turns()
        (hop,) = rig.ctx.hops.live
        assert hop.task is not None
        hop.task.cancel()
        await turns()
        assert rig.cache.stats().host.in_hops == 4
        rig.cache.audit()
        store.release()
        assert (await prefetch.settled()).fetched_tokens == 0
        assert rig.cache.stats().host.free == 32


async def test_a_page_that_the_store_garbled_is_the_stores_own_fault(open_cache: Opener) -> None:
    """The check of the bytes is the store's: the golden pages show what happens when it lies about them."""

    class Garbling(StoreWrapper):
        async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
            count = await self.inner.read(keys, into, stop)
            into[0][:1] = b"!"
            return count

    rig = await open_cache(store=Garbling(MemoryStore()))
    await rig.put_in_store("abcd")
    with pytest.raises(AssertionError, match="should hold page"):
        await rig.serve("abcd")
