"""A wrapper can do what the store inside can, and is a store like others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_async.abc import (
    Store,
    SupportsCodec,
    SupportsDelete,
    SupportsListing,
    SupportsRefusal,
    SupportsStat,
    SupportsStats,
    SupportsSweep,
)
from hicache_async.errors import ConfigError, StoreUnavailable
from hicache_async.stores import FileStore, GuardedStore, MemoryStore, NullStore
from hicache_async.stores._wrapping import PartToken
from hicache_async.stores.codec import AesGcm, CodecStore, Zstd
from hicache_async.stores.tiered import TieredStore
from hicache_async.testing.faults import FlakyStore, HangingStore, LyingStore, StoreWrapper
from hicache_async.types import Stop, StopToken
from tests.stores.pages import page_of, read, until, write
from tests.stores.wrappers import (
    ALL,
    KEY_ENV,
    WRAPPERS,
    Deleting,
    Sweeping,
    Telling,
    Whole,
    abilities,
    key_in_environment,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]
__all__ = ["key_in_environment"]

EXACT = [name for name in WRAPPERS if name != "fp8"]
INNER: dict[str, Callable[[Path], Store]] = {"memory": lambda _: MemoryStore(), "file": FileStore}


# What it can do


@pytest.mark.parametrize("kind", [StoreWrapper, Deleting, Telling, Sweeping, Whole])
@pytest.mark.parametrize("name", ["guard", "aesgcm"])
async def test_a_wrapper_can_do_what_its_store_can(name: str, kind: type[StoreWrapper]) -> None:
    """Each capability is there exactly where the store inside has it; what a wrapper has by itself comes on top."""
    inner = kind(MemoryStore())
    own = {"guard": {SupportsRefusal}, "aesgcm": {SupportsCodec}}[name]
    store = WRAPPERS[name](inner)
    assert abilities(store) == abilities(inner) | own
    assert isinstance(store, SupportsStats)
    assert (abilities(Whole(MemoryStore())), abilities(StoreWrapper(MemoryStore()))) == (ALL, set())


async def test_what_is_forwarded_arrives() -> None:
    """Calls go through any number of wrappers, and answers come back."""
    store = CodecStore(GuardedStore(Whole(MemoryStore())), AesGcm(KEY_ENV))
    await write(store, "a", "b")
    assert isinstance(store, SupportsSweep) and await store.sweep() == {"temp_files": 3}
    assert isinstance(store, SupportsListing) and sorted(await store.list_keys()) == ["a", "b"]
    assert isinstance(store, SupportsDelete) and await store.delete(["a", "z"]) == 1
    assert isinstance(store, SupportsRefusal)
    assert (store.refusal(), store.why_refused()) == (Stop.BREAKER_OPEN, "it sweeps")
    assert store.codec.endswith("+plain") and store.codec.startswith("aesgcm-")
    assert isinstance(store, SupportsStat)
    stats = await store.stat(["b", "z"])
    assert stats[0] is not None and stats[0].nbytes == 1000 and stats[1] is None


async def test_stores_of_one_kind_have_one_class() -> None:
    """However many are made, a subclass keeps its own methods, and is still one of its base."""

    class Own(GuardedStore):
        async def delete(self, keys: object) -> int:
            return 7

    assert type(GuardedStore(MemoryStore())) is type(GuardedStore(MemoryStore()))
    own = Own(MemoryStore())
    assert await own.delete(["a"]) == 7
    assert isinstance(own, Own) and isinstance(own, SupportsListing)
    assert type(own).__name__ == "Own"


async def test_a_tiered_store_can_do_what_makes_sense() -> None:
    """Deleting, listing and sizes need both tiers, namespaces the slow one, sweeping and a codec either."""
    memory, whole, bare = MemoryStore(), Whole(MemoryStore()), StoreWrapper(MemoryStore())
    assert abilities(TieredStore(whole, whole)) == ALL
    assert abilities(TieredStore(bare, bare)) == {SupportsRefusal}
    assert abilities(TieredStore(whole, bare)) == {SupportsRefusal, SupportsSweep, SupportsCodec}
    assert abilities(TieredStore(bare, whole)) == ALL - {SupportsDelete, SupportsListing, SupportsStat}
    assert abilities(TieredStore(memory, memory)) == ALL - {SupportsSweep, SupportsCodec}


async def test_counts_of_the_store_inside_are_told() -> None:
    """A guard, a codec and tiers show what the store inside counts beside their own."""
    lossy = CodecStore(MemoryStore(), AesGcm(KEY_ENV))
    await write(lossy, "a")
    assert GuardedStore(lossy).stats["aesgcm_pages"] == 1
    assert CodecStore(lossy, Zstd()).stats["aesgcm_pages"] == 1
    tiered = TieredStore(MemoryStore(), lossy)
    assert tiered.stats["slow_aesgcm_pages"] == 1
    assert tiered.stats["fast_failures"] == 0


# The same exam for all of them


@pytest.mark.parametrize("inside", INNER)
@pytest.mark.parametrize("name", EXACT)
async def test_it_is_a_store(name: str, inside: str, tmp_path: Path) -> None:
    """What was written is counted and read, whole and in order, up to the first hole; another length is a miss."""
    store = WRAPPERS[name](INNER[inside](tmp_path / "kv"))
    assert await write(store, "a", "b", "d") == 3
    assert await store.count_prefix(["a", "b", "c", "d"]) == 2
    assert await read(store, "a", "b", "c", "d") == 2
    assert await read(store, "d", "a") == 2
    assert await read(store, "c") == 0
    assert await store.count_prefix([]) == await store.read([], [], StopToken()) == 0
    assert await store.write([], []) == 0
    assert await store.read(["a"], [memoryview(bytearray(999))], StopToken()) == 0
    await store.aclose()
    for verb in (store.count_prefix(["a"]), store.write(["a"], [memoryview(page_of("a"))])):
        with pytest.raises(StoreUnavailable):
            await verb


@pytest.mark.parametrize("name", EXACT)
async def test_many_pages_in_any_order(name: str) -> None:
    """More pages than one batch holds come back right, also when several calls read and write at once."""
    store = WRAPPERS[name](MemoryStore())
    keys = [f"page {number}" for number in range(600)]
    parts = [keys[start::3] for start in range(3)]
    assert await asyncio.gather(*(write(store, *part) for part in parts)) == [200, 200, 200]
    assert await asyncio.gather(*(read(store, *keys) for _ in range(3))) == [600, 600, 600]
    await store.aclose()


@pytest.mark.parametrize("name", WRAPPERS)
async def test_a_stopped_read_fills_nothing_more(name: str) -> None:
    """A token that is stopped before ends the read at 0, its buffers free at once."""
    store = WRAPPERS[name](MemoryStore())
    await store.write(["a"], [memoryview(bytes(1000))])
    stop = StopToken()
    stop.stop()
    buffer = bytearray(b"x" * 1000)
    assert await store.read(["a"], [memoryview(buffer)], stop) == 0
    assert buffer == b"x" * 1000 and not stop.busy
    await store.aclose()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("verb", ["count_prefix", "read", "write"])
async def test_a_fault_of_the_store_inside_is_a_fault(name: str, verb: str) -> None:
    """What it raises is raised, or makes a short answer, and the next call goes well."""
    store = WRAPPERS[name](Telling(FlakyStore(MemoryStore(), verb, error=OSError("gone"))))
    if name == "guard":
        store = GuardedStore(Telling(FlakyStore(MemoryStore(), verb, error=OSError("gone"))), max_attempts=1)
    if name == "tiered":
        inner = FlakyStore(MemoryStore(), verb, error=OSError("gone"))
        store = TieredStore(NullStore(), GuardedStore(inner, max_attempts=1))
    calls = {
        "count_prefix": lambda: store.count_prefix(["a"]),
        "read": lambda: read(store, "a"),
        "write": lambda: write(store, "a"),
    }
    if verb == "read":
        await write(store, "a")
    with pytest.raises(OSError, match="gone"):
        await calls[verb]()
    await write(store, "a")
    assert await calls[verb]() == 1
    await store.aclose()


@pytest.mark.parametrize("answer", [-1, 2, None, 1.5, True, "1"])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("verb", ["read", "write"])
async def test_an_answer_that_cannot_be_true_is_a_fault(name: str, verb: str, answer: object) -> None:
    """No wrapper passes a count on that the store inside cannot have."""
    memory = MemoryStore()
    await write(WRAPPERS[name](memory) if name != "tiered" else memory, "a")
    lying = Telling(LyingStore(memory, {verb: answer}))
    store = TieredStore(NullStore(), lying) if name == "tiered" else WRAPPERS[name](lying)
    with pytest.raises(StoreUnavailable, match="answered"):
        await (read(store, "a") if verb == "read" else write(store, "a"))
    await store.aclose()


@pytest.mark.parametrize("name", WRAPPERS)
async def test_closing_closes_the_store_inside(name: str) -> None:
    """And waits for nothing that hangs."""
    memory = MemoryStore()
    hanging = Telling(HangingStore(memory, "write"))
    store = WRAPPERS[name](hanging)
    call = asyncio.ensure_future(store.write(["a"], [memoryview(bytes(1000))]))
    assert isinstance(hanging.inner, HangingStore)
    await hanging.inner.hung()
    await store.aclose()
    with pytest.raises(StoreUnavailable, match="closed"):
        await memory.count_prefix(["a"])
    call.cancel()
    await asyncio.wait([call])


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("verb", ["count_prefix", "read", "write"])
async def test_a_cancel_at_each_await_leaves_nothing_behind(name: str, verb: str) -> None:
    """Cancelled after any number of turns: no task, no busy buffer is left, and the next call works."""
    for num_turns in range(14):
        store = WRAPPERS[name](Telling(Slow(MemoryStore())))
        await write(store, "a")
        stop = StopToken()
        calls = {
            "count_prefix": lambda: store.count_prefix(["a"]),  # noqa: B023 - used in this round
            "read": lambda: store.read(["a"], [memoryview(bytearray(1000))], stop),  # noqa: B023
            "write": lambda: write(store, "a", "b"),  # noqa: B023
        }
        call = asyncio.ensure_future(calls[verb]())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        call.cancel()
        (result,) = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(result, int | asyncio.CancelledError)
        await settled(stop)
        assert await read(store, "a") == 1
        await store.aclose()
        await until(lambda: len(asyncio.all_tasks()) == 1)


class Slow(StoreWrapper):
    """Take some turns of the loop."""

    async def around(self, verb: str, call: Callable[[], object], stop: StopToken) -> int:
        for _ in range(3):
            await asyncio.sleep(0)
        return await call()  # type: ignore[misc, no-any-return]


async def settled(stop: StopToken) -> None:
    """Return when no thread is in the buffers any more."""
    if stop.busy:
        quiet = asyncio.get_running_loop().create_future()
        stop.when_quiet(lambda: quiet.set_result(None))
        await quiet


# Parts of a token


async def test_a_part_is_stopped_with_the_whole_and_not_the_other_way() -> None:
    """It shares the priority, and has a reason of its own."""
    whole = StopToken(3)
    part, other = (PartToken(whole, shares_buffers=shares) for shares in (True, False))
    whole.priority = 5
    assert (part.priority, part.stopped, other.stopped) == (5, False, False)
    part.stop()
    part.reason = Stop.CORRUPT
    assert (part.stopped, whole.stopped, other.stopped, whole.reason) == (True, False, False, None)
    whole.stop()
    assert other.stopped


async def test_a_part_that_shares_buffers_keeps_the_whole_busy() -> None:
    """One with buffers of its own does not."""
    whole = StopToken()
    sharing, apart = PartToken(whole, shares_buffers=True), PartToken(whole, shares_buffers=False)
    apart.job_started()
    assert (apart.busy, whole.busy, whole.tracked) == (True, False, False)
    sharing.job_started()
    assert whole.busy and whole.tracked
    sharing.job_ended()
    assert not whole.busy and apart.busy


async def test_zstd_needs_to_be_told_sizes() -> None:
    """A store that cannot is refused when opened, with what is missing; the others take any."""
    bare = StoreWrapper(MemoryStore())
    with pytest.raises(ConfigError, match=r"codec zstd needs a store .* a StoreWrapper lacks SupportsStat"):
        CodecStore(bare, Zstd())
    assert await write(CodecStore(bare, AesGcm(KEY_ENV)), "a") == 1
