"""A bug in a mover turns the cache to FAILED: it serves on without reuse, and nobody hangs."""

from __future__ import annotations

import asyncio
from types import ModuleType

import pytest
from structlog.testing import capture_logs

from hicache_async import CapacityError, HiCacheError, InvariantError, State, Stop
from hicache_async.flows import backup, fetch, load, offload
from hicache_async.flows.backup import Backups
from hicache_async.flows.fetch import Fetch
from hicache_async.flows.prefetch import Prefetch
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HeldStore
from tests.flows.rig import Opener, Rig, turns

pytestmark = pytest.mark.asyncio


class Bug(Exception):
    """What is raised where nothing should be."""


def plant(monkeypatch: pytest.MonkeyPatch, owner: type | ModuleType, name: str) -> None:
    """Make a function raise."""

    def broken(*args: object, **kwargs: object) -> None:
        raise Bug(f"{owner.__name__}.{name}")

    monkeypatch.setattr(owner, name, broken)


async def failed(rig: Rig) -> None:
    """Turn a cache to FAILED as a mover's bug would, and wait until that has happened."""

    async def mover() -> None:
        raise Bug("here")

    rig.ctx.spawn(mover(), "buggy")
    await turns()
    assert rig.cache.state is State.FAILED


async def check_serves_without_reuse(rig: Rig) -> None:
    """Check that a request gets what a cache without memory would give it, at once and without the tree."""
    rig.ctx.tree.match = None  # type: ignore[assignment] # not to be trusted any more
    with rig.lease("abcd") as lease:
        assert (lease.device_tokens, lease.local_tokens, lease.pending_tokens) == (0, 0, 0)
        result = await lease.prefetch()
        assert (result.hit_tokens, result.fetched_tokens, result.stop) == (0, 0, Stop.DETACHED)
        loading = await lease.load()
        assert (loading.tokens, loading.reserved_tokens) == (0, 17)
        await loading.finished()
        assert len(lease.allocate_nowait(17).pages) == 5
        rig.compute(lease)
        assert lease.commit(17) == 0
        lease.extend([1, 2, 3, 4])
        assert len((await lease.allocate(21)).pages) == 1
        lease.discard(17)
        rig.check(lease, 16)
    await rig.cache.admin.flush()
    assert (await rig.cache.begin_step(2)).num_pages == 2


async def test_a_failed_cache_still_serves(open_cache: Opener) -> None:
    """Matches, prefetches and loads are 0 at once, a commit keeps nothing, pages come from free and released ones."""
    rig = await open_cache(store=MemoryStore())
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    with capture_logs() as logs:
        await failed(rig)
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["cache.failed"]
    for _ in range(3):
        await check_serves_without_reuse(rig)
    rig.cache.audit()
    assert rig.cache.stats().device.free + 2 == 16 - 4
    assert rig.cache.stats().counters["bugs"] == 1


async def test_requests_in_hand_come_to_their_end(open_cache: Opener) -> None:
    """What a request held when the cache failed it may use and must give back; its own pages are free then."""
    rig = await open_cache(store=MemoryStore())
    with rig.lease("abcd") as lease:
        await rig.run(lease)
        await failed(rig)
        rig.check(lease, 16)
        lease.extend([1, 2, 3])
        lease.allocate_nowait(lease.num_tokens)
        assert lease.commit(lease.num_tokens) == 16
        rig.cache.audit()
    assert rig.cache.stats().device.leased == 0


async def test_nobody_waits_for_a_failed_cache(open_cache: Opener) -> None:
    """Who waits for a store, a slot, an announced range or a flush goes on when the cache fails."""
    store = HeldStore(MemoryStore(), {"read", "write"})
    rig = await open_cache(store=store, max_loads_in_flight=1)
    for letters in ("ab", "cd", "ef"):
        await rig.put_in_store(letters)
    store.open("read")
    leases = [rig.lease(letters) for letters in ("ab", "cd", "ef", "wx", "wx")]
    for lease in leases[:2]:
        await lease.prefetch()
    rig.virtual.auto = False
    store.hold("read")
    await leases[0].load()
    slot = asyncio.create_task(leases[1].load())
    reading = asyncio.create_task(leases[2].prefetch())
    await leases[3].load()
    announced = asyncio.create_task(leases[4].load())
    flushing = asyncio.create_task(rig.cache.admin.flush())
    await turns()
    waiting = (slot, reading, announced)
    assert not any(task.done() for task in waiting)
    await failed(rig)
    rig.clock.advance(0.05)
    await turns()
    assert all(task.done() for task in waiting)
    assert [task.result().tokens for task in (slot, announced)] == [0, 0]
    assert reading.result().fetched_tokens == 0
    rig.virtual.advance_all()
    store.open()
    await flushing
    for lease in leases:
        lease.release()
    await turns()
    assert rig.cache.stats().hops == 0
    assert rig.ctx.prefetch_pages == 0


async def test_who_waits_for_pages_gets_them_or_an_error(open_cache: Opener) -> None:
    """A waiter for pages never gets fewer than it asked for: it waits for released ones, or hears CapacityError."""
    rig = await open_cache(device_pages=8)
    holder, first, second = rig.lease("abcd"), rig.lease("ij"), rig.lease("kl")
    for lease, pages in ((holder, 4), (first, 2), (second, 2)):
        await lease.load(total_tokens=pages * 4)
        lease.allocate_nowait(pages * 4)
    waiting = [asyncio.create_task(lease.allocate(20)) for lease in (first, second)]
    await turns()
    await failed(rig)
    await turns()
    assert not any(task.done() for task in waiting)
    holder.release()
    assert len((await waiting[0]).pages) == 3
    assert len(first.pages) == 5
    first.release()
    assert len((await waiting[1]).pages) == 3
    last = asyncio.create_task(second.allocate(36))
    with pytest.raises(CapacityError):
        await last
    second.release()
    assert rig.cache.stats().device.free == 8


async def test_all_wait_in_a_failed_cache(open_cache: Opener) -> None:
    """When all who hold pages wait, the last is refused in a failed cache, too."""
    rig = await open_cache(device_pages=8)
    leases = [rig.lease("ij"), rig.lease("kl")]
    for lease in leases:
        await lease.load(total_tokens=16)
        lease.allocate_nowait(16)
    fence = rig.cache.host_fence()
    leases[0].extend([0] * 8)
    leases[0].commit(8, after=fence)  # a move that pins device pages
    await failed(rig)
    waiting = [asyncio.create_task(lease.allocate(20)) for lease in leases]
    await turns()
    assert waiting[1].done()
    with pytest.raises(CapacityError):
        await waiting[1]
    leases[1].release()
    await waiting[0]
    fence.set()
    leases[0].release()


PLACES = [
    (Prefetch, "_look"),
    (Prefetch, "_join"),
    (Fetch, "_hold_anchor"),
    (Fetch, "_reserve"),
    (Fetch, "_start_read"),
    (Fetch, "_attach"),
    (Fetch, "_advance"),
    (Backups, "_next_batch"),
    (Backups, "_write"),
    (Backups, "_settled"),
    (backup, "mark_stored"),
    (fetch, "mark_stored"),
    (offload, "settle_ready"),
    (load, "settle_ready"),
]


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda part: getattr(part, "__name__", part))
async def test_a_bug_anywhere_in_a_mover(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch, owner: type | ModuleType, name: str
) -> None:
    """Wherever a mover breaks, the requests around it end, later ones are served, and close does not wait."""
    rig = await open_cache(store=MemoryStore(), close_timeout_s=1000)
    await rig.put_in_store("abcdef")
    plant(monkeypatch, owner, name)
    served = await asyncio.gather(
        *(rig.serve(letters) for letters in ("abcd", "abcdef", "abxy")), return_exceptions=True
    )
    for outcome in served:
        assert not isinstance(outcome, BaseException) or isinstance(outcome, InvariantError)
    await rig.cache.admin.flush()
    assert rig.cache.state is State.FAILED
    assert isinstance(rig.ctx.failure, Bug)
    monkeypatch.undo()
    await check_serves_without_reuse(rig)
    await rig.cache.close()
    open_cache.rigs.remove(rig)  # where the books stood when a callback broke off is anybody's guess


async def test_a_waiter_of_a_broken_prefetch_is_told(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one whose prefetch broke gets InvariantError, whose cause is the bug."""
    rig = await open_cache(store=MemoryStore())
    plant(monkeypatch, Prefetch, "_look")
    with rig.lease("abcd") as lease:
        with pytest.raises(InvariantError, match=r"serves without reuse: Bug\('Prefetch._look'\)") as caught:
            await lease.prefetch()
        assert isinstance(caught.value.__cause__, Bug)
        assert isinstance(caught.value, HiCacheError)


async def test_a_device_that_refuses_a_copy(open_cache: Opener) -> None:
    """A device that cannot take a copy fails the cache, not the request that needed it."""
    rig = await open_cache(store=MemoryStore())
    await rig.put_in_store("abcd")
    lease = rig.lease("abcd")
    await lease.prefetch()
    await rig.virtual.aclose()
    loading = await lease.load()
    assert loading.tokens == 0
    assert rig.cache.state is State.FAILED
    lease.release()
    await check_serves_without_reuse(rig)
    rig.cache.audit()


async def test_a_failed_cache_takes_back_what_it_had_cached(open_cache: Opener) -> None:
    """A device full of cached pages serves on after a failure: they come back when no request holds any."""
    rig = await open_cache(device_pages=8, host_pages=16)
    for prompt in ("abc", "wxy"):
        await rig.serve(prompt)
    await rig.cache.admin.flush()
    running = rig.lease("uv")
    await running.load()
    await failed(rig)
    with rig.lease("klmno") as lease:
        await lease.load()
        with pytest.raises(CapacityError):
            lease.allocate_nowait(lease.num_tokens)
    running.release()
    for prompt in ("klmno", "abcdefg"):
        with rig.lease(prompt) as lease:
            await lease.load()
            assert len((await lease.allocate(lease.num_tokens)).pages) == len(prompt) + 1
    rig.cache.audit()
