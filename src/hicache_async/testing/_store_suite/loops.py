"""The event loop: any kind of it will do, and it is never kept from its other work."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

from .._exam_loop import LoopFactory, Surroundings
from .candidate import Candidate
from .checks import Check, Missing, check
from .exam import Exam
from .pages import expect, page_keys
from .patience import CASES_PER_CHECK, within

_NBYTES_PER_TURN = 8 << 20
"""As much may be moved while the loop stands still: some milliseconds."""


class _DebugLoop(asyncio.SelectorEventLoop):
    """A loop in debug mode, whatever its runner says."""

    def set_debug(self, enabled: bool) -> None:
        super().set_debug(True)


def _uvloop() -> asyncio.AbstractEventLoop:
    if importlib.util.find_spec("uvloop") is None:
        raise Missing("uvloop is not installed")
    import uvloop

    return uvloop.new_event_loop()


def _eager() -> asyncio.AbstractEventLoop:
    if sys.version_info < (3, 12):
        raise Missing("tasks start eagerly from Python 3.12 on")
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)
    return loop


def _check_of(name: str, loop_factory: LoopFactory) -> Check:
    async def examine(exam: Exam) -> None:
        await _use(exam)  # so that what belongs to one loop belongs to this one
        directory = exam.directory.with_name(name)
        directory.mkdir()
        await asyncio.to_thread(_live_a_day, exam.candidate, directory, loop_factory)

    return Check("loops", f"it_works_on_{name}", examine, warm_up=lambda: loop_factory().close())


def _live_a_day(candidate: Candidate, directory: Path, loop_factory: LoopFactory) -> None:
    """Open a store on a loop of its own, use it, close it, and see that nothing is left."""
    around = Surroundings(directory, candidate.patience_s)

    async def live() -> None:
        around.watch_loop()
        exam = Exam(candidate, directory)
        await exam.start()
        try:
            await within(candidate.patience_s / CASES_PER_CHECK, _use(exam))
        finally:
            await exam.finish()
        await around.check_loop()

    around.run(live, loop_factory)


async def _use(exam: Exam) -> None:
    keys = page_keys(8)
    async with asyncio.TaskGroup() as group:
        for first in (0, 2, 4):
            group.create_task(exam.store.write(keys[first : first + 4]))
    if exam.candidate.keeps:
        expect(await exam.store.count(keys) == 8, "count_prefix counts less than was stored")
        await exam.store.read_all(keys)


CHECKS = tuple(
    _check_of(name, loop_factory)
    for name, loop_factory in {
        "asyncio": asyncio.new_event_loop,
        "debug_mode": _DebugLoop,
        "uvloop": _uvloop,
        "eager_tasks": _eager,
    }.items()
)


@check("keeps")
async def the_loop_runs_during_a_large_batch(exam: Exam) -> None:
    """While much is written, counted and read the loop takes turns for others, again and again."""
    nbytes = exam.candidate.large
    num_keys = max(1, exam.candidate.batch_nbytes // nbytes)
    keys, store = page_keys(num_keys), exam.store
    wanted = num_keys * nbytes // _NBYTES_PER_TURN
    for verb, call in (("write", store.write_all), ("read", store.read_all)):
        working = asyncio.create_task(call(keys, nbytes))
        turns = -1  # the one in which the call begins
        while not working.done():
            turns += 1
            await asyncio.sleep(0)
        await working
        expect(
            turns >= wanted,
            f"the loop ran {turns} times while {verb} moved {num_keys * nbytes} bytes; {wanted} times is the least",
        )
