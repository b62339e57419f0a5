"""A loop of its own for each case of an exam, and what must not outlive it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError
from .leaks import Leak, LeakChecks, LeakError, LeakWatch, open_descriptors, temp_files

LoopFactory: TypeAlias = Callable[[], asyncio.AbstractEventLoop]

GRACE_S = 5.0
"""How long a thread may take to leave the page in hand, and what ends with it to be gone."""

STALL_TURNS = 12
STALL_S = 0.01
"""After so long without a step nothing can be expected to happen by itself; the seconds are for threads."""


def warm_up(loop_factory: LoopFactory | None) -> None:
    """Run a loop once, so that what the first one makes for its process is there, and counted to nobody.

    Raises: RuntimeError: a loop runs in this thread.
    """
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            "the exam makes its loops itself: call it from a plain test, or with asyncio.to_thread"
        )

    async def nothing() -> None:
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(nothing())


def check_names(field: str, names: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError for a name that is not known."""
    if unknown := set(names) - set(known):
        raise ConfigError(f"{field} has {sorted(unknown)}; there are {', '.join(known)}")


class Surroundings:
    """What the process and the loop have beside one case: made before it, asked after it.

    Args:
        directory: where its store may keep files.
        grace_s: how long what is ending may take.
    """

    def __init__(self, directory: Path, grace_s: float) -> None:
        self.directory = directory
        self._grace_s = min(grace_s, GRACE_S)
        self._descriptors = open_descriptors()
        self._threads = set(threading.enumerate())
        self._told: list[str] = []
        self._watch: LeakWatch | None = None

    def run(self, work: Callable[[], Coroutine[Any, Any, None]], loop_factory: LoopFactory | None) -> None:
        """Run ``work`` on a loop of its own.

        Raises: AssertionError: something outlives the loop, or it was told of an error that nobody took.
        """
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.get_loop().set_exception_handler(self._tell)
            runner.run(work())
        end_s = time.monotonic() + self._grace_s
        while left := list(self._left()):
            if time.monotonic() > end_s:
                raise LeakError(left)
            time.sleep(0.001)
        if self._told:
            raise AssertionError(f"the loop was told: {'; '.join(self._told)}")

    def watch_loop(self) -> None:
        """Remember which tasks there are; the calling one and those that come are to end before the loop does."""
        self._watch = LeakWatch(LeakChecks(grace_s=self._grace_s), [self.directory])

    async def check_loop(self) -> None:
        """Raise LeakError if a task, a job or a file is left in the running loop."""
        assert self._watch is not None
        await self._watch.check()

    async def pause(self, *futures: asyncio.Future[Any]) -> None:
        """Return when one of ``futures`` is done, or when nothing can be expected to happen by itself."""
        for _ in range(STALL_TURNS):
            await asyncio.sleep(0)
            if any(future.done() for future in futures):
                return
        if threading.active_count() > len(self._threads):
            await asyncio.wait(futures, timeout=STALL_S, return_when=asyncio.FIRST_COMPLETED)

    def _tell(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._told.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _left(self) -> Iterator[Leak]:
        for number, target in open_descriptors().items():
            if self._descriptors.get(number) != target:
                yield Leak("descriptor", f"{number} is open: {target}")
        for path in temp_files(self.directory):
            yield Leak("temporary file", path)
        for thread in threading.enumerate():
            if thread not in self._threads:
                yield Leak("thread", thread.name)
