"""The step-cancel exam: it covers every public coroutine, and names each way of getting a cancel wrong."""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hicache_async
import hicache_async.stores
from hicache_async import PrefixLease
from hicache_async._fence import PassedFence
from hicache_async.abc import CopyPlan, Fence
from hicache_async.core.pool import Owner
from hicache_async.errors import ConfigError, StoreUnavailable
from hicache_async.flows.load import Slots
from hicache_async.flows.prefetch import Prefetch
from hicache_async.stores import MemoryStore
from hicache_async.testing import cancel_exam
from hicache_async.testing._pauses import Pauses
from hicache_async.testing.cancel_exam import SUBJECTS, check_cancellation
from hicache_async.testing.virtual_device import VirtualDevice
from hicache_async.types import Stop, StopToken
from tests.flows.conftest import logs

__all__ = ["logs"]

EXAMINED_ELSEWHERE: set[str] = {
    "Ranks.join",  # needs a group to join: the tests of the groups cancel it
    # What a cache does not call, or may lack, is cancelled by the exam of stores.
    *(f"Store.{name}" for name in ("stat", "list_namespaces", "sweep")),
    *("SupportsStat.stat", "SupportsNamespaces.list_namespaces", "SupportsSweep.sweep"),
}
ROLES = {
    "count_prefix": "Store",
    "list_keys": "Store",
    "delete": "Store",
    "host_to_device": "Device",
    "agree": "Ranks",
}
"""What a class is that has such a method, whatever its name."""


def memory(directory: Path) -> MemoryStore:
    """Return a store that needs no directory."""
    return MemoryStore()


# What is examined


def public_coroutines(*modules: ModuleType) -> set[str]:
    """Return the qualified names of all coroutines of all classes that ``modules`` export."""
    names = set()
    for module in modules:
        for thing in (getattr(module, name) for name in module.__all__):
            methods = inspect.getmembers(thing, inspect.iscoroutinefunction) if inspect.isclass(thing) else ()
            role = next((role for method, role in ROLES.items() if hasattr(thing, method)), None)
            names |= {
                f"{role or thing.__name__}.{name}"
                for name, _ in methods
                if not name.startswith("_") or name == "__anext__"
            }
    return names


def test_every_public_coroutine_is_examined() -> None:
    """A coroutine that the package or its stores export is a subject of the exam; a new one needs a situation."""
    exported = public_coroutines(hicache_async, hicache_async.stores) - EXAMINED_ELSEWHERE
    assert len(exported) > 20
    assert exported <= {subject.coroutine for subject in SUBJECTS}


def test_the_documented_example_passes() -> None:
    """The example in the documentation is a whole test; a small share of it passes here."""
    _, example = (cancel_exam.__doc__ or "").split("::\n", 1)
    code = textwrap.dedent(example.split("A coroutine's awaits", 1)[0])
    names: dict[str, Any] = {"__name__": __name__}
    exec(code.replace("(FileStore)", "(FileStore, only='Store', ways=['natively'])"), names)
    names["test_cancellation"]()


def test_the_report_says_how_much_was_examined() -> None:
    """Each await of each situation is cancelled in each way, and once more before the first step."""
    report = check_cancellation(
        memory, only="PrefixLease.prefetch", moods=["ready", "held"], ways=["natively", "twice"]
    )
    assert (report.coroutines, report.situations) == (1, 6)
    assert report.awaits > 8
    assert report.cancels == 2 * report.awaits  # none behind its last step, and two before its first one


def test_names_that_there_are_not_are_refused() -> None:
    """A coroutine, a way or a mood that nobody has heard of is an error, and not an exam of nothing."""
    for options in ({"only": "PrefixLease.fly"}, {"ways": ["kindly"]}, {"moods": ["glad"]}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} (is|has) "):
            check_cancellation(memory, **options)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_it_runs_where_no_loop_does() -> None:
    """Called on a running loop it says where to call it, and in a thread beside one it works."""
    with pytest.raises(RuntimeError, match="call it from a plain test, or with asyncio.to_thread"):
        check_cancellation(memory)
    report = await asyncio.to_thread(check_cancellation, memory, only="Ranks.agree")
    assert report.coroutines == 1


def test_a_share_is_chosen_by_the_seed() -> None:
    """A share of the cancels is examined, some of each situation, and the same ones for the same seed."""
    seen: list[list[str]] = []

    class Seen(cancel_exam._Exam):
        def _run(self, case: cancel_exam._Case) -> cancel_exam._Case:
            seen[-1].append(str(case))
            return super()._run(case)

    for seed in (1, 1, 2):
        seen.append([])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cancel_exam, "_Exam", Seen)
            check_cancellation(memory, only="Admin.attach", ways=["twice"], share=0.5, seed=seed)
    assert seen[0] == seen[1] != seen[2]
    assert len(seen[0]) > 2


@pytest.mark.asyncio
async def test_pauses_of_all_tasks_are_counted() -> None:
    """Every suspension and end of every task counts, also of those that it starts; the strike comes where asked for."""
    pauses = Pauses()
    struck: list[int] = []

    async def child() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def parent() -> str:
        await asyncio.sleep(0)
        await asyncio.create_task(child())
        return "done"

    task = asyncio.get_running_loop().create_task(parent())
    pauses.watch(3, lambda: struck.append(pauses.count))
    assert await task == "done"
    assert pauses.count == 6
    assert struck == [3]


@pytest.mark.asyncio
async def test_a_strike_as_the_wait_ends_comes_before_its_task_hears() -> None:
    """What a task waits for is done, and the task has not run yet, when it is struck."""
    pauses = Pauses()
    gate: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    seen: list[bool] = []

    async def waiting() -> int:
        return await gate

    task = asyncio.get_running_loop().create_task(waiting())
    pauses.watch(1, lambda: seen.append(gate.done() and task.cancel()), as_it_ends=True)
    await asyncio.sleep(0)
    gate.set_result(1)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [True]


# Stores and devices that get it wrong


class WritesAfterItsStop(MemoryStore):
    """Writes once more into a buffer, some turns after it has said that it is quiet."""

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        loop, turns = asyncio.get_running_loop(), 20

        def scribble() -> None:
            nonlocal turns
            turns -= 1
            if turns:
                loop.call_soon(scribble)
            else:
                into[-1][:] = bytes(len(into[-1]))

        await asyncio.sleep(0)
        if stop.stopped:
            loop.call_soon(scribble)
            return 0
        return await super().read(keys, into, stop)


class SwallowsCancels(MemoryStore):
    """Takes a cancel for an answer."""

    async def count_prefix(self, keys: Sequence[str]) -> int:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return 0
        return await super().count_prefix(keys)


class WritesByHalves(MemoryStore):
    """Publishes an object before all of it is there."""

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        for key, page in zip(keys, pages, strict=True):
            half = bytes(len(page) // 2)
            self._objects[key] = bytes(page[: len(half)]) + half
            await asyncio.sleep(0)
            self._objects[key] = bytes(page)
        return len(keys)


class KeepsADescriptor(MemoryStore):
    """Opens something that a cancel keeps it from closing."""

    async def count_prefix(self, keys: Sequence[str]) -> int:
        descriptor = os.open("/dev/null", os.O_RDONLY)
        await asyncio.sleep(0)
        os.close(descriptor)
        return await super().count_prefix(keys)


class KeepsATask(MemoryStore):
    """Starts something that it does not wait for when it is cancelled."""

    async def list_keys(self) -> Sequence[str]:
        task = self.task = asyncio.get_running_loop().create_task(asyncio.sleep(3600), name="forgotten")
        await asyncio.sleep(0)
        task.cancel()
        return await super().list_keys()


class KeepsAFile(MemoryStore):
    """Builds an object in a file that a cancel keeps it from publishing."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._numbers = itertools.count()

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        self._directory.mkdir(exist_ok=True)
        temporary = self._directory / f"{next(self._numbers)}.tmp"
        temporary.touch()
        await asyncio.sleep(0)
        temporary.rename(self._directory / keys[0])
        return await super().write(keys, pages)


class RaisesWhenCancelled(MemoryStore):
    """Turns a cancel into an error."""

    async def delete(self, keys: Sequence[str]) -> int:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise StoreUnavailable("cancelled") from None
        return await super().delete(keys)


class NeverEnds(MemoryStore):
    """Waits for something else when it is cancelled."""

    async def count_prefix(self, keys: Sequence[str]) -> int:
        try:
            await asyncio.sleep(0)
        finally:
            await asyncio.sleep(3600)
        return 0


BROKEN_STORES: dict[Callable[[Path], Any], tuple[str, str]] = {
    lambda _: WritesAfterItsStop(): (
        "PrefixLease.prefetch",
        r"pages were written after they were freed: HostArena pages|should hold page \w+, but holds",
    ),
    lambda _: SwallowsCancels(): (
        "Store.count_prefix",
        "the cancel was swallowed; the call ended with 'a result'",
    ),
    lambda _: WritesByHalves(): (
        "Store.write",
        "layer 1, plane 0: should hold page .*, but holds zeros",
    ),
    lambda _: KeepsADescriptor(): ("Store.count_prefix", r"descriptor: \d+ is open: /dev/null"),
    lambda _: KeepsATask(): ("Store.list_keys", "task: .*forgotten"),
    KeepsAFile: ("Store.write", r"temporary file: .*\.tmp"),
    lambda _: RaisesWhenCancelled(): ("Store.delete", "the cancel was swallowed; .*StoreUnavailable"),
    lambda _: NeverEnds(): ("Store.count_prefix", "it does not end, although it was cancelled|it hangs"),
}
"""Which subject finds a broken store, and by what message."""


@pytest.mark.parametrize(("make_store", "found"), BROKEN_STORES.items(), ids=[
    "writes after its stop", "swallows", "writes by halves", "keeps a descriptor", "keeps a task", "keeps a file",
    "raises", "never ends",
])  # fmt: skip
def test_a_broken_store_fails(make_store: Callable[[Path], Any], found: tuple[str, str]) -> None:
    """The message names the coroutine, the await, the way, the store's mood, and what is wrong."""
    only, message = found
    told = rf"{only} \(.*\), (not )?cancelled.*, with the store (ready|held|failing|slow|late): (.|\n)*({message})"
    with pytest.raises(AssertionError, match=told):
        check_cancellation(make_store, only=only, ways=["natively", "twice"], patience_s=0.3)


class CopiesLate(VirtualDevice):
    """Says that bytes have been copied to the host, and copies them some turns later."""

    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> Any:
        def copy(turns: int) -> None:
            if turns:
                asyncio.get_running_loop().call_soon(copy, turns - 1)
            else:
                VirtualDevice(auto=True).device_to_host(plan, after)

        copy(30)
        return PassedFence()


def test_a_device_that_copies_late_fails() -> None:
    """Pages that the device says are on the host, and are not, accuse themselves."""
    with pytest.raises(AssertionError, match=r"HostArena page \d+.*: should hold page \w+, but holds poison"):
        check_cancellation(memory, CopiesLate, only="Admin.flush", ways=["natively"])


# A cache that gets it wrong

release = PrefixLease.release
settled = Prefetch.settled


def release_all_but_one(lease: PrefixLease, **options: Any) -> None:
    """Forget a page."""
    pool = lease._movers.ctx.device_pool
    release(lease, **options)
    if pool.available(fenced=False) == pool.capacity:
        pool.take(1, Owner.LEASE, fenced=False)


def release_without_unpinning(lease: PrefixLease, **options: Any) -> None:
    """Forget a pin on the host."""
    lease._holding.host_end = None
    release(lease, **options)


async def settled_in_any_case(prefetch: Prefetch) -> Any:
    """Answer although the question was withdrawn."""
    try:
        return await settled(prefetch)
    except asyncio.CancelledError:
        return Stop.STOPPED


async def take_and_lose(slots: Slots, priority: int) -> None:
    """Lose a slot that was given in the turn of the cancel."""
    if slots._free:
        slots._free -= 1
        return
    slots._sequence += 1
    given = asyncio.get_running_loop().create_future()
    heapq.heappush(slots._waiting, (-priority, slots._sequence, given))
    await slots._ctx.until(given)


BROKEN_CACHES: dict[str, tuple[type, str, Any, str, str]] = {
    "loses a page": (
        PrefixLease,
        "release",
        release_all_but_one,
        "PrefixLease.load",
        "booked to lease, 0 found",
    ),
    "loses a pin": (
        PrefixLease,
        "release",
        release_without_unpinning,
        "PrefixLease.prefetch",
        "pins on host do not match",
    ),
    "swallows": (Prefetch, "settled", settled_in_any_case, "Prefetch.settled", "the cancel was swallowed"),
}


@pytest.mark.parametrize("way", BROKEN_CACHES)
def test_a_broken_cache_fails(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A page, a pin, or a cancel that the cache loses is found, and named."""
    owner, name, broken, only, message = BROKEN_CACHES[way]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError, match=rf"{only}.*: (.|\n)*{message}"):
        check_cancellation(memory, only=only, ways=["natively"], patience_s=2.0)


def test_a_slot_that_is_lost_in_the_turn_of_the_cancel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given in the very turn of a cancel is missed by the next request, which waits for it for ever."""
    monkeypatch.setattr(Slots, "take", take_and_lose)
    with pytest.raises(
        AssertionError, match="cancelled as the wait ends at await .*: does not end within 1.0 s"
    ):
        check_cancellation(memory, only="PrefixLease.load", ways=["as the wait ends"], patience_s=1.0)
