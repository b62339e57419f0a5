"""The step-cancel exam: every public coroutine, cancelled at every await, in every way, on your store and device.

All it takes is a test::

    from hicache_async.stores import FileStore
    from hicache_async.testing.cancel_exam import check_cancellation


    def test_cancellation() -> None:
        check_cancellation(FileStore)

A coroutine's awaits are those of all tasks that work for it. After each cancel the caller must have heard of it,
and as soon as the work in hand is done, without anybody's help: the books close, nothing is held or left behind,
no byte of a freed page has changed, and the next request for the same prompt gets the right bytes.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ..abc import Device, Ranks, Store
from ..errors import ConfigError
from ..types import Tier
from . import _other_situations, _request_situations
from ._exam_checks import check_all_free, check_bytes, check_closed, check_returned
from ._exam_engine import PATIENCE_S, ExamEngine, Parts, within
from ._exam_loop import LoopFactory, Surroundings, check_names, warm_up
from ._exam_store import Behaviour, comes_late, dawdles, fails, scripted, waits
from ._pauses import WAYS, Cancel, Pauses
from ._situation import PROMPT, Situation, Subject
from .virtual_device import VirtualDevice

MakeStore: TypeAlias = Callable[[Path], Store]

MOODS: Mapping[str, Behaviour | None] = {
    "ready": None,
    "held": waits,
    "failing": fails,
    "slow": dawdles,
    "late": comes_late,
}
"""What the store does while the call runs: "late" moves the bytes whether or not somebody still waits."""

SUBJECTS: tuple[Subject, ...] = (*_request_situations.SUBJECTS, *_other_situations.SUBJECTS)
"""What is examined."""

NEVER = -1


@dataclass(slots=True)
class CancelReport:
    """What was examined.

    Attributes:
        coroutines: public coroutines.
        situations: these, each in one situation and with one mood of the store.
        awaits: awaits in all situations.
        cancels: calls that were cancelled, one by one.
    """

    coroutines: int = 0
    situations: int = 0
    awaits: int = 0
    cancels: int = 0


def check_cancellation(
    make_store: MakeStore,
    make_device: Callable[[], Device] = VirtualDevice,
    *,
    make_ranks: Callable[[], Ranks] | None = None,
    loop_factory: LoopFactory | None = None,
    options: Mapping[str, object] | None = None,
    only: str = "",
    ways: Collection[str] = tuple(WAYS),
    moods: Collection[str] = tuple(MOODS),
    share: float = 1.0,
    seed: int = 0,
    patience_s: float = PATIENCE_S,
) -> CancelReport:
    """Cancel every public coroutine at every await, each time in a cache, on a store and on a loop of its own.

    It makes its loops itself, so call it where none runs.

    Args:
        make_store: called with an empty directory, which it may use.
        make_device: a device of 12 CPU pages; a VirtualDevice moves when the exam tells it to.
        make_ranks: a group of which the exam is one rank, and the others agree by themselves.
        loop_factory: None: asyncio's own.
        options: of the ``CacheConfig``, such as ``{"write_policy": "write_back"}``.
        only: the beginning of the qualified names that are examined; "": all.
        ways, moods: names in :data:`WAYS` and :data:`MOODS`.
        share: of the cancels that are to be tried, 0 .. 1, chosen at random by ``seed``, some of each situation.
        patience_s: how long anything may take that should end by itself.
    Raises: AssertionError: names the coroutine, the await, the way, the store's mood, and what is wrong.
        ConfigError: a name that there is not.
    """
    check_names("ways", ways, WAYS)
    check_names("moods", moods, MOODS)
    parts = Parts(
        make_device=make_device, make_ranks=make_ranks, options=options or {}, patience_s=patience_s
    )
    chosen = [subject for subject in SUBJECTS if subject.coroutine.startswith(only)]
    if not chosen:
        raise ConfigError(f"only is {only!r}; no coroutine's qualified name begins so")
    report = CancelReport(coroutines=len({subject.coroutine for subject in chosen}))
    warm_up(loop_factory)
    with tempfile.TemporaryDirectory(prefix="hicache-exam-") as directory:
        exam = _Exam(make_store, parts, loop_factory, Path(directory))
        for subject in chosen:
            for mood in moods if subject.asks_store else ("ready",):
                exam.check(subject, mood, ways, report, share, random.Random(f"{seed} {subject} {mood}"))
    return report


@dataclass(slots=True)
class _Case:
    """One call, to be cancelled at one await in one way."""

    subject: Subject
    mood: str
    way: type[Cancel]
    at: int
    """0: before its first step; less: never."""
    cancel: Cancel | None = None
    server: _Server | None = None  # a loop keeps no task alive by itself
    engine: ExamEngine | None = None
    num_awaits: int = 0
    raises: tuple[type[Exception], ...] = ()

    @property
    def is_struck(self) -> bool:
        """Whether the call was cancelled; it may have ended before."""
        return self.cancel is not None and self.cancel.struck

    def __str__(self) -> str:
        if self.at == NEVER:
            return f"{self.subject}, not cancelled, with the store {self.mood}"
        where = f"await {self.at}" if self.at else "its first step"
        return f"{self.subject}, cancelled {self.way.name} at {where}, with the store {self.mood}"


class _Exam:
    def __init__(
        self,
        make_store: MakeStore,
        parts: Parts,
        loop_factory: LoopFactory | None,
        directory: Path,
    ) -> None:
        self._make_store = make_store
        self._parts = parts
        self._loop_factory = loop_factory
        self._directory = directory
        self._num_cases = 0

    def check(
        self,
        subject: Subject,
        mood: str,
        ways: Collection[str],
        report: CancelReport,
        share: float,
        rng: random.Random,
    ) -> None:
        """Count the awaits of one call that nobody cancels; then cancel it at each of them."""
        num_awaits = self._run(_Case(subject, mood, Cancel, NEVER)).num_awaits
        cases = [_Case(subject, mood, WAYS[way], at) for at in range(num_awaits + 1) for way in ways]
        for case in rng.sample(cases, math.ceil(share * len(cases))):
            report.cancels += self._run(case).is_struck
        report.situations += 1
        report.awaits += num_awaits

    def _run(self, case: _Case) -> _Case:
        self._num_cases += 1
        around = Surroundings(self._directory / str(self._num_cases), self._parts.patience_s)
        try:
            around.run(partial(self._examine, case, around), self._loop_factory)
            assert case.cancel is not None and case.engine is not None
            _check_call(case.cancel, case.raises)
            check_closed(case.engine)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error
        return case

    async def _examine(self, case: _Case, around: Surroundings) -> None:
        pauses = Pauses()
        around.watch_loop()
        server = case.server = _Server(self._make_store, self._parts, around.directory)
        engine = case.engine = await server.started()
        situation = server.situation = await case.subject.prepare(engine)
        engine.hold_device()
        behaviour = MOODS[case.mood]
        engine.store.script = lambda verb, number: behaviour
        end = _Once(situation.end)
        case.raises = situation.raises
        cancel = case.cancel = case.way(situation.work)
        if case.at == 0:
            cancel.strike()
        pauses.watch(case.at, cancel.strike, as_it_ends=case.way.as_it_ends)
        await _until_over(cancel, pauses, engine, end, around)
        case.num_awaits = pauses.count
        if case.way.closes_loop and cancel.struck and not cancel.task.done():
            return
        engine.store.script = lambda verb, number: None
        pauses.watch(0, cancel.strike)
        _check_call(cancel, situation.raises)
        await _check_afterwards(engine, situation, end)
        await server.stop()
        await around.check_loop()


class _Server:
    """A task that opens a cache and closes it when it is told to, or cancelled."""

    def __init__(self, make_store: MakeStore, parts: Parts, directory: Path) -> None:
        loop = asyncio.get_running_loop()
        self.situation: Situation | None = None
        self._engine: asyncio.Future[ExamEngine] = loop.create_future()
        directory.mkdir(parents=True, exist_ok=True)
        self._leave = asyncio.Event()
        self._task = loop.create_task(self._serve(make_store, parts, directory), name="exam:server")

    async def started(self) -> ExamEngine:
        """Return the engine once its cache is open."""
        await asyncio.wait((self._engine, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not self._engine.done():
            self._task.result()
        return self._engine.result()

    async def stop(self) -> None:
        """Close the cache."""
        self._leave.set()
        await within(self._task)

    async def _serve(self, make_store: MakeStore, parts: Parts, directory: Path) -> None:
        store = scripted(make_store(directory))
        try:
            async with ExamEngine.open(parts, store) as engine:
                self._engine.set_result(engine)
                try:
                    await self._leave.wait()
                finally:
                    for lease in self.situation.leases if self.situation is not None else ():
                        lease.release()
        finally:
            await store.aclose()


async def _until_over(
    cancel: Cancel,
    pauses: Pauses,
    engine: ExamEngine,
    end: _Once,
    around: Surroundings,
) -> None:
    """Let the call run; when nothing moves any more end what it waits for, unless it was cancelled."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + engine.parts.patience_s
    while not cancel.task.done() and not (cancel.closes_loop and cancel.struck):
        before = pauses.count
        futures = (cancel.task,) if cancel.strikes.done() else (cancel.task, cancel.strikes)
        await around.pause(*futures)
        if pauses.count != before or cancel.task.done():
            continue
        if not cancel.struck and not end.is_done:
            end()
            engine.let_go()
        elif loop.time() > end_s:
            raise AssertionError(
                "it does not end, although it was cancelled" if cancel.struck else "it hangs"
            )


class _Once:
    """A call that is made at most once."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.is_done = False

    def __call__(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._call()


# What must hold afterwards


def _check_call(cancel: Cancel, raises: tuple[type[Exception], ...]) -> None:
    if complaint := cancel.complaint():
        raise AssertionError(f"{complaint}; the call ended with {cancel.error or 'a result'!r}")
    if cancel.error is not None and not isinstance(cancel.error, raises):
        raise AssertionError(f"the call raised {cancel.error!r}") from cancel.error


async def _check_afterwards(engine: ExamEngine, situation: Situation, end: _Once) -> None:
    if not situation.closes:
        engine.cache.audit()
    end()
    for lease in reversed(situation.leases):
        lease.release()
    if not situation.closes:
        engine.cache.audit()
    engine.let_go()
    if situation.clean_up is not None:
        await within(situation.clean_up(), engine.parts.patience_s)
    await engine.rest()
    check_bytes(engine)
    if situation.closes:
        async with ExamEngine.open(engine.parts, engine.store) as another:
            await _check_usable(another)
    else:
        check_returned(engine)
        await _check_usable(engine, with_store=not situation.closes_store)


async def _check_usable(engine: ExamEngine, *, with_store: bool = True) -> None:
    """Serve the prompt of the situations, and one that shares its beginning; then give up every page."""
    for letters in (PROMPT, PROMPT[:3] + "y"):
        await within(engine.serve(letters), engine.parts.patience_s)
        await within(engine.cache.admin.flush(), engine.parts.patience_s)
        await engine.rest()
        check_bytes(engine)
        if with_store:
            await engine.check_stored(letters)
    for tier in (Tier.DEVICE, Tier.HOST):
        await within(engine.cache.admin.clear(tier), engine.parts.patience_s)
    await engine.rest()
    check_all_free(engine)
