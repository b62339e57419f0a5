"""Every verb, cancelled at every await in every way, each time on a store and a loop of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from ...abc import SupportsDelete, SupportsListing, SupportsNamespaces, SupportsStat, SupportsSweep
from ...errors import StoreUnavailable
from .._exam_loop import LoopFactory, Surroundings, warm_up
from .._pauses import WAYS, Cancel, Pauses
from .candidate import Candidate
from .checks import Check
from .exam import CheckedStore, Exam
from .pages import Arena, WatchedStop, expect, page_keys, quiet
from .patience import CASES_PER_CHECK, within

_WAYS = tuple(way for way in WAYS.values() if not way.closes_loop)
_MAX_CASES = 12
"""Of one verb, in one round."""

_NEVER = -1


@dataclass(slots=True)
class _Scene:
    """A store with objects in it, and the buffers of a call that is to be cancelled."""

    store: CheckedStore
    stop: WatchedStop
    arena: Arena
    pages: list[bytes]

    there: tuple[str, ...] = tuple(page_keys(4, "there"))
    new: tuple[str, ...] = tuple(page_keys(4, "new"))


Call: TypeAlias = Callable[[_Scene], Awaitable[object]]

_CALLS: dict[str, tuple[Call, tuple[str, ...]]] = {
    "count_prefix": (lambda scene: scene.store.inner.count_prefix(scene.there), ()),
    "read": (lambda scene: scene.store.inner.read(scene.there, scene.arena.buffers, scene.stop), ()),
    "write": (
        lambda scene: scene.store.inner.write(scene.new, [memoryview(page) for page in scene.pages]),
        (),
    ),
    "delete": (lambda scene: cast("SupportsDelete", scene.store.inner).delete(scene.there), ("delete",)),
    "list_keys": (lambda scene: cast("SupportsListing", scene.store.inner).list_keys(), ("list",)),
    "stat": (lambda scene: cast("SupportsStat", scene.store.inner).stat(scene.there), ("stat",)),
    "list_namespaces": (
        lambda scene: cast("SupportsNamespaces", scene.store.inner).list_namespaces(),
        ("namespaces",),
    ),
    "sweep": (lambda scene: cast("SupportsSweep", scene.store.inner).sweep(), ("sweep",)),
    "aclose": (lambda scene: scene.store.inner.aclose(), ()),
}
"""The calls, and what a store must be able to do for each."""


def _check_of(verb: str, needs: tuple[str, ...]) -> Check:
    async def examine(exam: Exam) -> None:
        loop_factory = type(asyncio.get_running_loop())  # a loop of the kind that this check runs on
        cases = _Cases(exam.candidate, verb, exam.directory.parent / "cancelled", loop_factory)
        try:
            await asyncio.to_thread(cases.run_all)
        finally:
            cases.is_over = True  # where this check was given up its thread goes no further

    return Check("cancellation", f"{verb}_is_cancelled_at_every_await", examine, ("keeps", *needs))


CHECKS = tuple(_check_of(verb, needs) for verb, (_, needs) in _CALLS.items())


class _Cases:
    """The cancels of one verb, in a thread.

    Attributes:
        is_over: set when no more of them are wanted.
    """

    def __init__(self, candidate: Candidate, verb: str, directory: Path, loop_factory: LoopFactory) -> None:
        self._candidate = candidate
        self._verb = verb
        self._directory = directory
        self._loop_factory = loop_factory
        self._num_cases = 0
        self.is_over = False

    def run_all(self) -> None:
        """Count the awaits of a call that nobody cancels; then cancel it at each of them."""
        warm_up(self._loop_factory)
        num_awaits = self._run(_NEVER, Cancel)
        cases = [(at, way) for at in range(num_awaits + 1) for way in _WAYS]
        num_cases = min(len(cases), _MAX_CASES * self._candidate.rounds)
        for at, way in random.Random(self._verb).sample(cases, num_cases):
            if not self.is_over:
                self._run(at, way)

    def _run(self, at: int, way: type[Cancel]) -> int:
        self._num_cases += 1
        directory = self._directory / str(self._num_cases)
        directory.mkdir(parents=True)
        around = Surroundings(directory, self._candidate.patience_s)
        case = _Case(self._candidate, self._verb, at, way, around)
        try:
            around.run(case.run, self._loop_factory)
        except Exception as error:
            where = "not cancelled" if at == _NEVER else f"cancelled {way.name} at await {at}"
            raise AssertionError(f"{self._verb} {where}: {error}") from error
        finally:
            if self._candidate.discard is not None:
                self._candidate.discard(directory)
        return case.num_awaits


class _Case:
    """One call, cancelled at one await in one way.

    Attributes:
        num_awaits: how many there were.
    """

    def __init__(
        self, candidate: Candidate, verb: str, at: int, way: type[Cancel], around: Surroundings
    ) -> None:
        self._exam = Exam(candidate, around.directory)
        self._verb = verb
        self._at = at
        self._way = way
        self._around = around
        self.num_awaits = 0

    async def run(self) -> None:
        """Do it, and look at what there is afterwards."""
        self._around.watch_loop()
        await within(self._exam.candidate.patience_s / CASES_PER_CHECK, self._play())
        await self._around.check_loop()

    async def _play(self) -> None:
        exam = self._exam
        await exam.start()
        try:
            scene = _Scene(exam.store, WatchedStop(), Arena([exam.candidate.small] * 4), [])
            scene.pages += [exam.page(key) for key in scene.new]
            await scene.store.write_all(scene.there)
            await self._cancelled(scene)
            await self._let_go(scene)
            spoiled = scene.arena.spoil()
            await self._check_store(scene)
        finally:
            await exam.finish()
        expect(scene.arena.content() == spoiled, "buffers were written when nothing could be busy with them")

    async def _cancelled(self, scene: _Scene) -> None:
        pauses = Pauses()
        call = _CALLS[self._verb][0]
        cancel = self._way(cast("Callable[[], Coroutine[Any, Any, object]]", lambda: call(scene)))
        if self._at == 0:
            cancel.strike()
        pauses.watch(self._at, cancel.strike, as_it_ends=self._way.as_it_ends)
        while not cancel.task.done():
            await self._around.pause(cancel.task)
        self.num_awaits = pauses.count
        pauses.watch(0, cancel.strike)
        complaint = cancel.complaint()
        expect(complaint is None, str(complaint))
        expect(cancel.error is None, f"it raised {cancel.error!r}")

    async def _let_go(self, scene: _Scene) -> None:
        """Wait until the buffers of the call are free; its counted pages were right, if it counted any."""
        await quiet(scene.stop)
        scene.arena.check_guards()

    async def _check_store(self, scene: _Scene) -> None:
        store = scene.store
        if self._verb == "aclose":
            await store.inner.aclose()
            await _check_closed(store, scene)
            return
        for key in (*scene.there, *scene.new):
            await store.read([key])  # checks every byte of what it counts
        if self._verb != "delete":
            await store.read_all(scene.there)
        for keys in (scene.there, scene.new):
            await store.write_all(keys)
            await store.read_all(keys)
            expect(await store.count(keys) == len(keys), "count_prefix does not count what was written again")


async def _check_closed(store: CheckedStore, scene: _Scene) -> None:
    try:
        await store.count(scene.there)
    except StoreUnavailable:
        return
    raise AssertionError("aclose was cancelled and called again, and the store still answers")
