"""What a test left behind: live tasks, jobs in threads of the library, open descriptors, temporary files.

Look before, and again at the end::

    watch = LeakWatch(directories=[store.root])
    ...
    await watch.check()  # raises LeakError, which says what is left and where it was made

A loop in debug mode tells in addition which line created a task.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, CoroutineType, FrameType

from .._threads import DaemonThreads
from ..stores._temp import Writer

_POLL_S = 0.002
_JOB_CODE: CodeType = DaemonThreads._run.__code__
"""In the stack of a thread of the library while it runs a job; an idle thread is no leak."""


@dataclass(frozen=True, slots=True)
class Leak:
    """One thing that was left behind.

    Attributes:
        kind: "task", "thread job", "descriptor", "temporary file"; other checks have kinds of their own.
        what: which one, and where it was made or where it is now.
    """

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


class LeakError(AssertionError):
    """Something was left behind.

    Attributes:
        leaks: all of it.
    """

    def __init__(self, leaks: Sequence[Leak]) -> None:
        self.leaks = tuple(leaks)
        super().__init__("left behind: " + "\n  and ".join(map(str, leaks)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakChecks:
    """What is looked for; everything unless told otherwise.

    Attributes:
        leases: requests that were not released; for the fixtures of the pytest plugin.
        failures: a bug that turned the cache to FAILED; for these fixtures, too.
        tasks: tasks of the running loop, the library's and any other.
        threads: jobs in threads of the library.
        descriptors: open files, sockets and pipes of this process.
        temp_files: files under construction below the watched directories.
        grace_s: how long what is ending may take: a cancelled task, a thread between its last page and its return.
    """

    leases: bool = True
    failures: bool = True
    tasks: bool = True
    threads: bool = True
    descriptors: bool = True
    temp_files: bool = True
    grace_s: float = 1.0


class LeakWatch:
    """Remember what is there now, to tell later what was added. Made and asked on one running loop.

    Args:
        checks: what to look for.
        directories: below which to look for temporary files; absent ones are empty.
    """

    def __init__(
        self, checks: LeakChecks | None = None, directories: Iterable[str | os.PathLike[str]] = ()
    ) -> None:
        self.checks = checks or LeakChecks()
        self._tasks = asyncio.all_tasks()
        self._jobs = set(thread_jobs())
        self._descriptors = open_descriptors()
        self._directories: list[str] = []
        self._temp_files: set[str] = set()
        self._own_checks: list[Callable[[], Iterable[Leak]]] = []
        for directory in directories:
            self.add_directory(directory)

    def add_directory(self, directory: str | os.PathLike[str]) -> None:
        """Watch ``directory``, too; temporary files that are there now are not counted."""
        if os.fspath(directory) not in self._directories:
            self._directories.append(os.fspath(directory))
            self._temp_files |= temp_files(directory)

    def add_check(self, find: Callable[[], Iterable[Leak]]) -> None:
        """Count what ``find`` returns, too; it is asked anew at each look."""
        self._own_checks.append(find)

    def leaks(self) -> list[Leak]:
        """Return what is there now and was not before. The calling task is not counted."""
        return [leak for find in (*self._own_checks, self._found) for leak in find()]

    async def settled(self) -> list[Leak]:
        """Return what is left when nothing is, or ``grace_s`` is over. Where nothing is left it never waits.

        Cancellation: ends the wait.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.checks.grace_s
        await asyncio.sleep(0)  # lets tasks end that were cancelled in this very turn
        # No event tells that a descriptor, a file or a foreign thread is gone.
        while (found := self.leaks()) and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return found

    async def check(self) -> None:
        """Raise LeakError if anything is left after ``grace_s``."""
        if found := await self.settled():
            raise LeakError(found)

    def _found(self) -> Iterator[Leak]:
        checks = self.checks
        if checks.tasks:
            for task in sorted(live_tasks() - self._tasks, key=asyncio.Task.get_name):
                yield Leak("task", describe_task(task))
        if checks.threads:
            for thread, frames in thread_jobs().items():
                if thread not in self._jobs:
                    yield Leak("thread job", describe_job(thread, frames))
        if checks.descriptors:
            for number, target in open_descriptors().items():
                if self._descriptors.get(number) != target:
                    yield Leak("descriptor", f"{number} is open: {target}{_address(number, target)}")
        if checks.temp_files:
            for directory in self._directories:
                for path in sorted(temp_files(directory) - self._temp_files):
                    yield Leak("temporary file", f"{path} of {_nbytes(path)} bytes")


def live_tasks() -> set[asyncio.Task[object]]:
    """Return the tasks of the running loop that are not done, but for the one that asks."""
    return asyncio.all_tasks() - {asyncio.current_task()}


def describe_task(task: asyncio.Task[object]) -> str:
    """Say which task this is and at which line it waits; in debug mode also which line made it."""
    coroutine: object = task.get_coro()
    while isinstance(coroutine, CoroutineType) and isinstance(coroutine.cr_await, CoroutineType):
        coroutine = coroutine.cr_await
    frame = coroutine.cr_frame if isinstance(coroutine, CoroutineType) else None
    return f"{task!r}" if frame is None else f"{task!r} waits at {_place(frame)}"


def thread_jobs() -> Mapping[threading.Thread, Sequence[FrameType]]:
    """Return the threads of the library that run a job, with the frames of the job, outermost first."""
    stacks = sys._current_frames()
    jobs: dict[threading.Thread, Sequence[FrameType]] = {}
    for thread in threading.enumerate():
        frames: list[FrameType] = []
        frame = stacks.get(thread.ident or 0)
        while frame is not None and frame.f_code is not _JOB_CODE:
            frames.append(frame)
            frame = frame.f_back
        if frame is not None:
            jobs[thread] = frames[::-1]
    return jobs


def describe_job(thread: threading.Thread, frames: Sequence[FrameType]) -> str:
    """Say what a thread runs and where it is in that."""
    if not frames:
        return f"{thread.name} is at the end of a job"
    return f"{thread.name} runs {frames[0].f_code.co_qualname}, now at {_place(frames[-1])}"


def open_descriptors() -> dict[int, str]:
    """Return the open files, sockets and pipes of this process, by number.

    But not what event loops wake up by, which a loop may make anew each time it runs: epoll and the like, and
    sockets of the machine that have no name.
    """
    descriptors: dict[int, str] = {}
    for name in _names_in("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("anon_inode:") and not (_is_socket(target) and _is_nameless(int(name))):
                descriptors[int(name)] = target.removesuffix(" (deleted)")
        except OSError:
            continue  # gone since it was listed, as the directory itself is
    return descriptors


def _is_socket(target: str) -> bool:
    return target.startswith("socket:")


def _is_nameless(number: int) -> bool:
    family, name = _socket_name(number)
    return family == socket.AF_UNIX and not name


def _address(number: int, target: str) -> str:
    try:
        return f" at {_socket_name(number)[1]}" if _is_socket(target) else ""
    except OSError:
        return ""  # closed since it was listed


def _socket_name(number: int) -> tuple[int, object]:
    copy = os.dup(number)
    try:
        opened = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with opened:
        return opened.family, opened.getsockname()


def temp_files(directory: str | os.PathLike[str]) -> set[str]:
    """Return the files below ``directory`` that are named ``*.tmp``, or that a FileStore of this process builds."""
    mine = ".".join(map(str, Writer.current())) + "."
    return {
        os.path.join(folder, name)
        for folder, _, names in os.walk(directory)
        for name in names
        if name.endswith(".tmp") or name.startswith(mine)
    }


def _names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _nbytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
