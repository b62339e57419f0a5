"""Starting, emptying, changing and ending follow an order, may be repeated, and never touch what is others'."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hicache_async import PrefetchPolicy, PrefixLease, Stop, Tier
from hicache_async.stores import FileStore
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HangingStore, HeldStore
from tests.e2e.test_sigkill import ROOT
from tests.flows.rig import Opener, Rig, driven, on_host, turns
from tests.flows.stores import RecordingStore, page_keys
from tests.flows.test_cancellation import check_all_given_back
from tests.flows.test_clear import CanClear
from tests.flows.test_close import Logs, events

pytestmark = pytest.mark.asyncio


# Changes under load leave nothing behind


def store_threads() -> list[threading.Thread]:
    """Return the threads of file stores, ended or not."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("hicache-store")]


async def test_fifty_changes_under_load_leave_no_worker(open_cache: Opener, tmp_path: Path) -> None:
    """Attach, clear and detach fifty times while requests run: tasks, threads and files stay as many as they were."""
    rng = random.Random(0)
    rig = await open_cache(device_pages=32, host_pages=48, prefetch_policy="wait_complete")
    stores = rig.cache._owned.stores
    used: list[FileStore] = []

    async def request() -> None:
        await rig.serve("".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))))

    async def change(number: int) -> None:
        admin = rig.cache.admin
        await admin.attach_store(f"file://{tmp_path}?num_lanes=2")
        (store,) = stores
        assert isinstance(store, FileStore)
        used.append(store)
        await asyncio.gather(request(), request(), admin.flush())
        await admin.clear(rng.choice([None, *Tier]))
        await asyncio.gather(request(), admin.detach_store(force=number % 2 == 0), request())

    async def left() -> tuple[int, int, int]:
        for thread in store_threads():
            thread.join(30)  # it was told to end
        await turns()
        return len(asyncio.all_tasks()), threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = None
    for number in range(50):
        requests = [asyncio.create_task(request()) for _ in range(3)]
        await change(number)
        await asyncio.gather(*requests)
        await rig.cache.admin.flush()
        await check_all_given_back(rig)
        assert not stores
        assert all(store._closed for store in used)
        before = before or await left()
        assert await left() == before
    for letters in ("aaaaa", "ababa", "bbbbb"):
        rig.check_local(letters)


async def test_a_detached_store_hears_of_nothing_any_more(open_cache: Opener) -> None:
    """Of ten stores one after the other each is called while it is attached, and never again."""
    rig = await open_cache()
    counts: list[tuple[RecordingStore, int]] = []
    for number in range(10):
        store = RecordingStore(MemoryStore())
        await rig.cache.admin.attach_store(store)
        await rig.serve("ab" + str(number))
        await rig.cache.admin.detach_store(force=number % 2 == 0)
        counts.append((store, store.calls.total()))
    assert [store.calls.total() for store, _ in counts] == [count for _, count in counts]
    assert all(count > 0 for _, count in counts)


# A detach with work of every kind under way


@dataclass
class Busy:
    """A cache that has every kind of work for its store under way at once."""

    rig: Rig
    leases: list[PrefixLease]
    letters: tuple[str, ...] = ("ab", "cd", "ef")

    def release(self) -> None:
        for lease in self.leases:
            lease.release()


async def busy(open_cache: Opener, store: HeldStore | HangingStore) -> Busy:
    """Start a look, a read that two share, a write, and two that wait behind it."""
    rig = await open_cache(store=store)
    await rig.put_in_store("abcdwxyz")
    leases = [rig.lease(letters) for letters in ("abcdwxyz", "abcdwxyz")]
    for lease in leases:
        lease.start_prefetch(PrefetchPolicy.wait_complete())
    await turns()
    for letters in ("ef", "gh", "ij"):
        await rig.serve(letters, prefetch=False)
    await turns()
    rig.cache.audit()
    return Busy(rig, leases, ("ef", "gh", "ij"))


async def test_a_graceful_detach_drains_and_ends_what_reads(open_cache: Opener) -> None:
    """With a read, a write and waiting writes under way all writes are done, the reads end, and nothing is held."""
    store = HeldStore(MemoryStore(), {"read", "write"})
    work = await busy(open_cache, store)
    rig = work.rig
    assert sorted(store.waiting) == ["read", "write"]
    detaching = asyncio.create_task(rig.cache.admin.detach_store())
    await turns()
    assert not detaching.done()
    store.open("write")
    await turns()
    rig.clock.advance(0.05)
    results = [await lease._prefetch.settled() for lease in work.leases if lease._prefetch is not None]
    assert [result.stop for result in results] == [Stop.DETACHED] * 2
    store.open()
    await detaching
    rig.cache.audit()
    assert [await rig.check_stored(letters) for letters in work.letters] == [2, 2, 2]
    work.release()
    await check_all_given_back(rig)


@pytest.mark.parametrize("verb", ["count_prefix", "read", "write"])
async def test_a_forced_detach_ends_in_bound_and_the_next_store_works(
    open_cache: Opener, logs: Logs, verb: str
) -> None:
    """With the store hung in any of its verbs: detached in time, another one attached, late answers ignored."""
    old = HangingStore(MemoryStore(), verb)
    work = await busy(open_cache, old)
    rig = work.rig
    assert old.num_hanging > 0
    start_s = rig.clock.monotonic()
    await driven(rig.cache.admin.detach_store(force=True), rig.clock, step_s=0.5)
    assert rig.clock.monotonic() - start_s <= rig.ctx.config.store_timeout_s + 1
    rig.cache.audit()
    (line,) = events(logs, "store.detached")
    assert set(line["stuck"]) == (
        set() if verb == "count_prefix" else {f"store.{verb}"}
    )  # a look can be left
    new = RecordingStore(MemoryStore())
    await rig.cache.admin.attach_store(new)
    work.release()
    await rig.serve("abcdwxyz")
    await rig.cache.admin.flush()
    for letters in ("abcdwxyz", *work.letters):
        assert await rig.check_stored(letters, new) == len(letters)
    before = (rig.counters["backed_up_pages"], rig.counters.get("fetched_pages", 0), rig.where("abcdwxyz"))
    nodes = {node: node.stored for root in rig.ctx.tree.roots.values() for node in root.subtree()}
    num_calls = old.calls.total()
    old.release()
    await check_all_given_back(rig)
    assert before == (
        rig.counters["backed_up_pages"],
        rig.counters.get("fetched_pages", 0),
        rig.where("abcdwxyz"),
    )
    assert nodes == {node: node.stored for root in rig.ctx.tree.roots.values() for node in root.subtree()}
    assert old.calls.total() == num_calls
    rig.check_local("abcdwxyz")
    assert not rig.ctx.tree.detached


# Every stage of the pipeline, one at a time


@dataclass
class Stage:
    """A cache in which one stage is at work, on the prompt ``abcd``.

    Attributes:
        end: lets it end.
        is_on_its_way_down: whether a flush to the store waits for it.
        is_write: whether the store is being written to.
    """

    rig: Rig
    end: Callable[[], object]
    is_on_its_way_down: bool = False
    is_write: bool = False
    leases: list[PrefixLease] = field(default_factory=list)


async def forward_awaited(open_cache: Opener) -> Stage:
    rig = await open_cache(store=CanClear(MemoryStore()))
    fence = rig.cache.host_fence()
    with rig.lease("abcd") as lease:
        await rig.forward(lease, await lease.load())
        lease.commit(17, after=fence)
        lease.release(after=fence)
    return Stage(rig, fence.set, is_on_its_way_down=True)


async def offload_running(open_cache: Opener) -> Stage:
    rig = await open_cache(store=CanClear(MemoryStore()))
    rig.virtual.auto = False
    await rig.serve("abcd", prefetch=False)
    assert rig.virtual.pending
    return Stage(rig, rig.virtual.advance_all, is_on_its_way_down=True)


async def backup_running(open_cache: Opener) -> Stage:
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=CanClear(store))
    await rig.serve("abcd", prefetch=False)
    await store.arrived()
    return Stage(rig, store.open, is_on_its_way_down=True, is_write=True)


async def backup_waiting(open_cache: Opener) -> Stage:
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=CanClear(store))
    await rig.serve("wxyz", prefetch=False)
    await store.arrived()
    await rig.serve("abcd", prefetch=False)
    await turns()
    assert len(rig.cache._movers.backups) == 1
    return Stage(rig, store.open, is_on_its_way_down=True, is_write=True)


async def prefetch_held(open_cache: Opener, verb: str) -> Stage:
    store = HeldStore(MemoryStore(), {verb})
    rig = await open_cache(store=CanClear(store))
    await rig.put_in_store("abcd")
    lease = rig.lease("abcd")
    lease.start_prefetch(PrefetchPolicy.wait_complete())
    await store.arrived()
    return Stage(rig, store.open, leases=[lease])


async def prefetch_in_look(open_cache: Opener) -> Stage:
    return await prefetch_held(open_cache, "count_prefix")


async def prefetch_in_read(open_cache: Opener) -> Stage:
    return await prefetch_held(open_cache, "read")


async def load_running(open_cache: Opener) -> Stage:
    rig = await on_host(open_cache, "abcd")
    lease = rig.lease("abcd")
    assert (await lease.load()).tokens == 16
    return Stage(rig, rig.virtual.advance_all, leases=[lease])


STAGES = [
    forward_awaited,
    offload_running,
    backup_waiting,
    backup_running,
    prefetch_in_look,
    prefetch_in_read,
    load_running,
]
EachStage = pytest.mark.parametrize("make", STAGES)
MakeStage = Callable[[Opener], Awaitable[Stage]]


async def end(stage: Stage, change: asyncio.Task[None]) -> None:
    """Let the stage and the change end, and prove the books."""
    stage.rig.cache.audit()
    stage.end()
    await driven(change, stage.rig.clock, step_s=0.5)
    stage.rig.cache.audit()
    stage.rig.virtual.auto = True
    stage.rig.virtual.advance_all()
    for lease in stage.leases:
        lease.release()
    await check_all_given_back(stage.rig)
    assert not stage.rig.ctx.tree.detached


@EachStage
async def test_a_flush_waits_for_what_is_on_its_way_down(open_cache: Opener, make: MakeStage) -> None:
    """In each stage of the way down flush waits until it has ended and all is stored; on the way up it does not."""
    stage = await make(open_cache)
    flushing = asyncio.create_task(stage.rig.cache.admin.flush())
    await turns()
    assert flushing.done() is not stage.is_on_its_way_down
    await end(stage, flushing)
    assert await stage.rig.check_stored("abcd") == 4


@EachStage
@pytest.mark.parametrize("tier", [None, *Tier])
async def test_a_clear_is_safe_in_every_stage(open_cache: Opener, make: MakeStage, tier: Tier | None) -> None:
    """Nothing of the tier is found afterwards, what is under way keeps its pages, and the next request is served."""
    stage = await make(open_cache)
    rig = stage.rig
    clearing = asyncio.create_task(rig.cache.admin.clear(tier))
    await turns()
    assert clearing.done() is not (stage.is_write and tier in (None, Tier.STORE))
    found = rig.where("abcd")
    assert not set(found) & {None: set("bdh"), Tier.DEVICE: set("bd"), Tier.HOST: set("bh")}.get(tier, set())
    for lease in stage.leases:
        if lease._holding.loaded and rig.virtual.pending:
            rig.virtual.advance_all()
            rig.check(lease, 16)
    await end(stage, clearing)
    if tier in (None, Tier.STORE):
        kept = (
            4
            if rig.where("abcd") and tier is Tier.STORE and make in (forward_awaited, offload_running)
            else 0
        )
        await rig.cache.admin.flush()
        assert await rig.check_stored("abcd") == kept
    if tier is None:
        assert rig.where("abcd") == ""
        assert (await rig.serve("abcd")).tokens == 0
    else:
        await rig.serve("abcd")
    await rig.cache.admin.flush()
    await rig.check_everywhere("abcd")
    assert await rig.check_stored("abcd") == 4


@EachStage
@pytest.mark.parametrize("force", [False, True])
async def test_a_detach_is_safe_in_every_stage(open_cache: Opener, make: MakeStage, force: bool) -> None:
    """Gracefully what was on its way down is stored first; either way the store is gone and requests are served."""
    stage = await make(open_cache)
    rig = stage.rig
    detaching = asyncio.create_task(rig.cache.admin.detach_store(force=force))
    await turns()
    if stage.is_on_its_way_down and not force:
        assert not detaching.done()
    if force:
        assert rig.ctx.store is None
    await end(stage, detaching)
    assert rig.ctx.store is None
    if stage.is_on_its_way_down and not force:
        assert await rig.check_stored("abcd") == 4
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    await check_all_given_back(rig)


# What is others'


def num_page_files(directory: Path) -> int:
    """Return how many files below ``directory`` are called as pages are, a stranger's included."""
    return sum(not path.name.startswith("manifest_") for path in directory.rglob("*.kv"))


async def test_closing_keeps_the_data_and_clearing_takes_only_ones_own(
    open_cache: Opener, tmp_path: Path
) -> None:
    """Two models share a directory with a stranger's files: what one clears the others still have."""
    url = f"file://{tmp_path}?num_lanes=1"
    first = await open_cache(store=url, model_id="first")
    second = await open_cache(store=url, model_id="second")
    for rig in (first, second):
        await rig.serve("abcd")
        await rig.cache.admin.flush()
    foreign = [tmp_path / "notes.txt", tmp_path / "v2" / "notes.txt", tmp_path / "v2" / "objects.kv"]
    for path in foreign:
        path.write_text("mine")
    num_objects = num_page_files(tmp_path)
    await first.cache.close()
    assert num_page_files(tmp_path) == num_objects == 9
    first = await open_cache(store=url, model_id="first")
    assert (await first.serve("abcd")).books.store == 16
    with second.lease("abcdefgh") as lease:
        reading = lease.start_prefetch()
        await first.cache.admin.clear()
        await reading.settled()
    assert [path.read_text() for path in foreign] == ["mine"] * 3
    assert num_page_files(tmp_path) == 5
    third = await open_cache(store=url, model_id="second")
    assert (await third.serve("abcd")).books.store == 16
    assert (await first.serve("abcd")).tokens == 0
    await first.cache.admin.flush()
    for rig in (first, second, third):
        await check_all_given_back(rig)
        await rig.cache.close()
    for thread in store_threads():
        thread.join(30)


TERMINATED = """
import asyncio, signal, sys, threading
from hicache_async.stores import FileStore
from tests.toy_engine import open_cache, prompt, serve

class Held(FileStore):
    async def write(self, keys, pages):
        await self.terminated.wait()
        if "hangs" in sys.argv:
            await asyncio.get_running_loop().run_in_executor(self._threads, threading.Event().wait)
        return await super().write(keys, pages)

async def main():
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    store = Held(sys.argv[1], num_lanes=1)
    store.terminated = asyncio.Event()

    def terminate():
        store.terminated.set()
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        async with open_cache(store=store, close_timeout_s=float(sys.argv[2])) as cache:
            for number in range(3):
                await serve(cache, f"request {number}", prompt(number))
            print("ready", flush=True)
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("terminated", cache.state, flush=True)
    finally:
        await store.aclose()

asyncio.run(main())
"""


def terminate(directory: Path, *arguments: str) -> tuple[list[str], int]:
    """Send SIGTERM to a process with 18 pages to write; returns what it printed then, and its exit status."""
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINATED, str(directory), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert not list(directory.rglob("*.kv"))
    process.send_signal(signal.SIGTERM)
    lines = process.stdout.read().splitlines()
    process.stdout.close()
    return lines, process.wait(30)


async def test_a_process_that_is_told_to_end_writes_what_is_pending(tmp_path: Path) -> None:
    """A process that leaves its cache at SIGTERM ends with everything stored that it had computed."""
    lines, status = await asyncio.to_thread(terminate, tmp_path, "30")
    assert (lines[-1], status) == ("terminated closed", 0)
    store = FileStore(tmp_path, num_lanes=1)
    assert len(await page_keys(store)) == 18
    await store.aclose()
    for thread in store_threads():
        await asyncio.to_thread(thread.join, 30)


async def test_a_process_that_is_told_to_end_does_so_though_its_store_hangs(tmp_path: Path) -> None:
    """After close_timeout_s it says what is stuck and ends; a thread that never comes back keeps it no longer."""
    lines, status = await asyncio.to_thread(terminate, tmp_path, "0.2", "hangs")
    assert (lines[-1], status) == ("terminated closed", 0)
    assert len([line for line in lines if "cache.close_abandoned" in line and "store.write" in line]) == 1
