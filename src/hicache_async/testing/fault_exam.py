"""The fault exam: every call of your store goes wrong once, in every way, in the middle of a working day.

All it takes is a test::

    from hicache_async.stores import FileStore
    from hicache_async.testing.fault_exam import check_store_faults


    def test_store_faults() -> None:
        check_store_faults(FileStore)

Whatever happens no request fails, every byte is right, the books close, and nothing is left behind; once the
fault is over, what it has cost is made up for.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ..abc import Device, Ranks, Store, SupportsDelete, SupportsListing
from ..config import WritePolicy
from ..errors import StoreUnavailable
from ..types import Tier
from ._exam_checks import check_all_free, check_bytes, check_returned, check_spoiled
from ._exam_engine import PATIENCE_S, ExamEngine, Parts, prompt
from ._exam_loop import LoopFactory, Surroundings, check_names, warm_up
from ._exam_store import FAULTS, Behaviour, scripted
from .virtual_device import VirtualDevice

MakeStore: TypeAlias = Callable[[Path], Store]

FIRST, SECOND = "abcd", "abxyz"
"""The prompts of the story; they share two pages."""

_STEP_S = 6.0
"""More than a store may take."""


@dataclass(slots=True)
class FaultReport:
    """What was examined.

    Attributes:
        calls: of the store, in a story without a fault.
        faults: stories with one.
    """

    calls: int = 0
    faults: int = 0


def check_store_faults(
    make_store: MakeStore,
    make_device: Callable[[], Device] = VirtualDevice,
    *,
    make_ranks: Callable[[], Ranks] | None = None,
    loop_factory: LoopFactory | None = None,
    options: Mapping[str, object] | None = None,
    faults: Collection[str] = tuple(FAULTS),
    share: float = 1.0,
    seed: int = 0,
    patience_s: float = PATIENCE_S,
) -> FaultReport:
    """Tell a story of two lives of one cache, again and again; each time another call of its store goes wrong.

    A request is computed, hit on the device, on the host and in the store, with everything that an operator may
    do in between. It makes its loops itself, so call it where none runs.

    Args:
        make_store: called with an empty directory, which it may use.
        make_device: a device of 12 CPU pages.
        make_ranks: a group of which the exam is one rank, and the others agree by themselves.
        loop_factory: None: asyncio's own.
        options: of the ``CacheConfig``.
        faults: names in :data:`FAULTS`.
        share: of the stories that are to be told, 0 .. 1, chosen at random by ``seed``.
        patience_s: how long anything may take that should end by itself.
    Raises: AssertionError: names the call, what it did, and what came of it. ConfigError: no such fault.
    """
    check_names("faults", faults, FAULTS)
    parts = Parts(
        make_device=make_device, make_ranks=make_ranks, options=options or {}, patience_s=patience_s
    )
    warm_up(loop_factory)
    with tempfile.TemporaryDirectory(prefix="hicache-exam-") as directory:
        exam = _Exam(make_store, parts, loop_factory, Path(directory))
        calls = exam.tell(0, "nothing")
        cases = [(at, fault) for at in range(1, calls + 1) for fault in faults]
        chosen = random.Random(seed).sample(cases, math.ceil(share * len(cases)))
        for at, fault in chosen:
            exam.tell(at, fault)
    return FaultReport(calls, len(chosen))


class _Exam:
    def __init__(
        self, make_store: MakeStore, parts: Parts, loop_factory: LoopFactory | None, directory: Path
    ) -> None:
        self._make_store = make_store
        self._parts = parts
        self._loop_factory = loop_factory
        self._directory = directory
        self._num_stories = 0

    def tell(self, at: int, fault: str) -> int:
        """Tell the story with a fault in call number ``at``; 0: in none. Returns how many calls there were."""
        self._num_stories += 1
        around = Surroundings(self._directory / str(self._num_stories), self._parts.patience_s)
        story = _Story(self._make_store, self._parts, around, at, FAULTS.get(fault))
        try:
            around.run(story.tell, self._loop_factory)
        except Exception as error:
            where = f"call {at} ({story.verb}) {fault}" if at else "no fault at all"
            raise AssertionError(f"{where}, while {story.chapter}: {error}") from error
        return story.num_calls


class _Story:
    """One story.

    Attributes:
        verb: of the call that went wrong.
        chapter: what was done last.
    """

    def __init__(
        self, make_store: MakeStore, parts: Parts, around: Surroundings, at: int, behaviour: Behaviour | None
    ) -> None:
        self._make_store = make_store
        self._parts = parts
        self._around = around
        self._at = at
        self._behaviour = behaviour
        self.verb = "not reached"
        self.chapter = "opening"
        self.num_calls = 0
        self._engines: list[ExamEngine] = []

    async def tell(self) -> None:
        """Tell it."""
        self._around.watch_loop()
        self._around.directory.mkdir(parents=True, exist_ok=True)
        store = scripted(self._make_store(self._around.directory))
        store.script = self._script
        try:
            async with ExamEngine.open(self._parts, store) as engine:
                await self._first_life(engine)
            async with ExamEngine.open(self._parts, store) as engine:
                await self._second_life(engine)
                self.num_calls = store.num_calls
                await self._make_up(engine)
        finally:
            await store.aclose()
        self.chapter = "closing"
        for each in self._engines:
            check_spoiled(each)
        await self._around.check_loop()

    def _script(self, verb: str, number: int) -> Behaviour | None:
        if number != self._at:
            return None
        self.verb = verb
        return self._behaviour

    async def _first_life(self, engine: ExamEngine) -> None:
        self._engines.append(engine)
        await self._serve(engine, FIRST, expected=0)
        await self._do(engine, "flushing", engine.cache.admin.flush)
        await self._serve(engine, FIRST, expected=4)
        await self._do(engine, "clearing the device", partial(engine.cache.admin.clear, Tier.DEVICE))
        await self._serve(engine, SECOND, expected=2)
        await self._do(engine, "explaining", partial(engine.cache.admin.explain, prompt(SECOND + "q")))
        await self._serve(engine, FIRST, expected=4)
        await self._do(engine, "flushing", engine.cache.admin.flush)
        check_bytes(engine)

    async def _second_life(self, engine: ExamEngine) -> None:
        self._engines.append(engine)
        admin = engine.cache.admin
        await self._do(engine, "explaining", partial(admin.explain, prompt(FIRST)))
        await self._serve(engine, FIRST, expected=4)
        await self._serve(engine, SECOND, expected=5)
        await self._do(engine, "detaching the store", admin.detach_store)
        await self._do(engine, "attaching the store", partial(admin.attach_store, engine.store))
        await self._do(engine, "flushing", admin.flush)
        is_cleared = await self._clear(engine)
        await self._serve(engine, FIRST, expected=0 if is_cleared else None)
        await self._serve(engine, SECOND, expected=2 if is_cleared else None)
        await self._do(engine, "flushing", admin.flush)
        check_bytes(engine)

    async def _make_up(self, engine: ExamEngine) -> None:
        """Let what hangs go on; then everything works, and is stored whole."""
        engine.store.script = lambda verb, number: None
        engine.let_go()
        await self._clear(engine)
        for _ in range(2):  # a path that was written in part is gone on with at the next hit
            for letters in (FIRST, SECOND):
                await self._serve(engine, letters)
                await self._do(engine, "flushing", engine.cache.admin.flush)
        await engine.rest()
        check_bytes(engine)
        check_returned(engine)
        for letters in (FIRST, SECOND):
            found = await engine.check_stored(letters)
            if found < len(letters) and engine.config.write_policy is WritePolicy.WRITE_THROUGH:
                raise AssertionError(f"of the {len(letters)} pages of a prompt the store has only {found}")
        for tier in (Tier.DEVICE, Tier.HOST):
            await engine.cache.admin.clear(tier)
        await engine.rest()
        check_all_free(engine)

    async def _serve(self, engine: ExamEngine, letters: str, expected: int | None = None) -> None:
        cached: list[int] = []

        async def serve() -> None:
            cached.append(await engine.serve(letters))

        await self._do(engine, f"serving {letters!r}", serve)
        is_told = self._at == 0 and engine.config.write_policy is WritePolicy.WRITE_THROUGH
        if is_told and expected is not None and cached != [expected * engine.config.page_size]:
            raise AssertionError(f"{cached} tokens were cached, which should be {expected} pages")

    async def _clear(self, engine: ExamEngine) -> bool:
        """Clear all tiers; returns whether that came to its end."""
        if not (isinstance(engine.store, SupportsListing) and isinstance(engine.store, SupportsDelete)):
            return False
        try:
            await self._do(engine, "clearing all", engine.cache.admin.clear, is_patient=True)
        except StoreUnavailable:
            return False
        return True

    async def _do(
        self,
        engine: ExamEngine,
        chapter: str,
        work: Callable[[], Awaitable[object]],
        *,
        is_patient: bool = False,
    ) -> None:
        """Do one thing; time moves on whenever nothing else does.

        Args:
            is_patient: whether it may wait until the store answers, however long that takes.
        """
        self.chapter = chapter
        loop = asyncio.get_running_loop()
        task, end_s = asyncio.ensure_future(work()), loop.time() + engine.parts.patience_s
        while not task.done():
            await self._around.pause(task)
            if engine.store.num_waiting:
                engine.clock.advance(_STEP_S)
                await self._around.pause(task)
                if is_patient:
                    engine.store.open()
            if loop.time() > end_s:
                task.cancel()
                raise AssertionError("it hangs")
        task.result()
        for each in self._engines:
            check_spoiled(each)
        if not engine.cache.stats().hops:
            engine.cache.audit()
