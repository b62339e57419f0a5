"""All checks, and doing one of them: what it needs, how long it may take, and what it must not leave behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..leaks import LeakWatch
from . import (
    cancellation,
    capacity,
    catalog,
    closing,
    contiguity,
    contract,
    damage,
    keys,
    loops,
    processes,
    races,
    restart,
    stopping,
    visibility,
)
from .candidate import Candidate
from .checks import Check, Missing, checks_of
from .exam import Exam
from .patience import within

CHECKS: tuple[Check, ...] = (
    *checks_of(contract),
    *checks_of(contiguity),
    *checks_of(keys),
    *checks_of(catalog),
    *checks_of(visibility),
    *checks_of(stopping),
    *checks_of(races),
    *checks_of(capacity),
    *checks_of(restart),
    *damage.CHECKS,
    *checks_of(closing),
    *loops.CHECKS,
    *checks_of(loops),
    *cancellation.CHECKS,
    *checks_of(processes),
)
"""The whole exam, in the order in which it is sat."""


async def examine(check: Check, candidate: Candidate, directory: Path) -> None:
    """Do one check.

    Args:
        directory: empty, for this check alone.
    Raises: Missing: the candidate lacks what the check needs. AssertionError: the property does not hold.
    """
    __tracebackhide__ = True  # where the exam is read, pytest shows what the store did
    check.require_facts(candidate)
    exam = Exam(candidate, directory / "store")
    exam.directory.mkdir()
    check.warm_up()
    watch = LeakWatch(candidate.leaks, [directory])
    with _told_to_loop() as told:
        try:
            await within(candidate.patience_s, _sit(check, exam))
        except Exception as error:
            first = _first_of(error)
            if isinstance(first, (Missing, AssertionError)):
                raise first from None
            raise AssertionError(f"the store raised {first!r}") from error
        await watch.check()
    if told:
        raise AssertionError(f"the loop was told: {'; '.join(told)}")


async def _sit(check: Check, exam: Exam) -> None:
    __tracebackhide__ = True
    try:
        await exam.start()
        check.require_capabilities(exam.store.inner)
        await check.examine(exam)
    finally:
        await exam.finish()


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextlib.contextmanager
def _told_to_loop() -> Iterator[list[str]]:
    """Collect what the loop is told of: errors that nobody took."""
    loop, told = asyncio.get_running_loop(), list[str]()

    def tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        told.append(f"{context.get('message')}: {context.get('exception')!r}")

    before = loop.get_exception_handler()
    loop.set_exception_handler(tell)
    try:
        yield told
    finally:
        loop.set_exception_handler(before)
