"""LoopRunner: a cache on a loop of its own, in a thread, for engines that are not async."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self, TypeVar

from .._log import logger
from .._threads import check_process, post_to_loop
from ..cache import HiCache
from ..checks import checked_seconds
from ..errors import ClosedError, ConfigError, WrongLoopError
from ..step import StepBatch, StepResult
from ._inbox import Inbox, Post, Step

T = TypeVar("T")

GRACE_S = 5.0
"""What closing may take beyond the cache's own time limit: for posts to end once cancelled, and the loop."""


class LoopRunner:
    """A cache on its own loop in a daemon thread: ``with LoopRunner(lambda: HiCache.open(...)) as runner``.

    Any thread may call it. What one thread asks for, steps and posts, is begun in that order. The cache and
    its leases belong on the loop, so all they do goes through :meth:`post` or :meth:`step`; only what is
    documented for any thread, such as ``loading.block``, is called directly.

    Entering starts the thread and returns when the cache is open, or raises what opening raised. Leaving
    cancels what was posted, closes the cache and ends the thread; any thread may do it but the loop's own,
    again, and several at once. An engine that starts and stops in two places keeps the runner in a
    ``contextlib.ExitStack``.

    Args:
        make: returns what ``HiCache.open`` returns, or an async context manager of your own around that;
            called on the loop, in the context (``contextvars``) of who enters.
        uvloop: None: uvloop where it is installed; True: nothing else; False: asyncio's own loop.
    Raises: ConfigError: ``uvloop=True`` without uvloop; a ``make`` that is no function.
    Ownership: the loop, its thread and the cache are the runner's.
    """

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[HiCache]], *, uvloop: bool | None = None
    ) -> None:
        if not callable(make):
            raise ConfigError(f"make is {make!r}; give a function, e.g. lambda: HiCache.open(config, kv=kv)")
        self._make = make
        self._new_loop = _loop_factory(uvloop)
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._first_to_leave = threading.Lock()
        # Made by the thread, read by others once it is open, or has ended:
        self._opened: Future[None] = Future()
        self._ended = threading.Event()
        self._inbox: Inbox | None = None
        self._failure: BaseException | None = None
        # On the loop: when and how the main task ends.
        self._main_task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    # Starting and ending

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._check_process()
            raise ClosedError("this runner was entered before; make another one with LoopRunner(...)")
        self._pid = os.getpid()
        runner = asyncio.Runner(loop_factory=self._new_loop)
        self._loop = runner.get_loop()  # here, so that it runs in the context of who enters
        try:
            self._start_thread(runner)
            self._opened.result()
        except BaseException:
            # Opening has failed, and the thread ends; or whoever waits was interrupted, and it has to be told.
            if self._thread is not None:
                self._end(self._thread, GRACE_S)
            raise
        return self

    def _start_thread(self, runner: asyncio.Runner) -> None:
        self._thread = threading.Thread(target=self._run, args=(runner,), name="hicache-loop", daemon=True)
        try:
            self._thread.start()
        except Exception:  # an interrupt is none, and may come when the thread runs
            self._thread = None
            runner.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the cache and end the thread; in a forked child do nothing, for they are its parent's.

        Posts that still run are cancelled; their futures, unless they return all the same, end with
        ClosedError. Waits for twice the cache's ``close_timeout_s``, once to drain and once for its parts,
        and a grace; then says what hangs and leaves it behind in its daemon thread.

        Raises: WrongLoopError: called on the loop's own thread. To the first who leaves: what closing
            raised, or what had ended the loop before.
        """
        inbox, thread = self._inbox, self._thread
        if inbox is None or thread is None or self._pid != os.getpid():
            return
        self._check_off_loop("leaving the runner")
        is_first = self._first_to_leave.acquire(blocking=False)
        inbox.close()
        stuck = self._end(thread, 2 * (inbox.cache.config.close_timeout_s + GRACE_S))
        if is_first and stuck is not None:
            logger.warning("runner.close_abandoned", at=_place_of(thread), stuck=stuck)
        elif is_first and self._failure is not None:
            raise self._failure

    def _end(self, thread: threading.Thread, timeout_s: float) -> list[str] | None:
        # Returns None when the thread has ended, else what was given up.
        post_to_loop(self._loop.call_soon_threadsafe, self._leave)
        if self._ended.wait(min(timeout_s, threading.TIMEOUT_MAX)):
            thread.join()
            return None
        return [] if self._inbox is None else self._inbox.abandon()

    def _leave(self) -> None:
        self._stop.set()
        if not self._opened.done() and self._main_task is not None:
            self._main_task.cancel()

    def _run(self, runner: asyncio.Runner) -> None:
        try:
            with runner:
                try:
                    runner.run(self._main())
                except BaseException as failure:
                    self._close_inbox(failure)  # before the loop cancels what runs, so that all know why
                    raise
        except BaseException as failure:  # noqa: BLE001 - the thread's top level: who enters or leaves raises it
            self._failure = failure
            self._close_inbox(failure)
        if self._inbox is not None:
            self._inbox.abandon()
        if not self._opened.done():
            self._opened.set_exception(self._failure or ClosedError("the runner was left while it opened"))
        self._ended.set()

    def _close_inbox(self, failure: BaseException) -> None:
        if self._inbox is not None and self._inbox.close(failure):
            logger.error("runner.failed", error=repr(failure), exc_info=failure)

    async def _main(self) -> None:
        self._main_task = asyncio.current_task()
        if self._stop.is_set():
            return
        async with self._make() as cache:
            inbox = self._inbox = Inbox(self._loop, cache)
            self._opened.set_result(None)
            await self._stop.wait()
            await inbox.end_posts(GRACE_S)

    # Asking the loop

    def step(self, batch: StepBatch) -> StepResult:
        """Do what a step has brought, as :meth:`HiCache.step`, and return what comes of it: one thread hop.

        Raises: what :meth:`HiCache.step` raises. ClosedError. WrongLoopError: called on the loop's own thread,
            which would wait for itself, or in a forked child.
        """
        self._check_off_loop("step()")
        return self.step_nowait(batch).result()

    def step_nowait(self, batch: StepBatch) -> Future[StepResult]:
        """As :meth:`step`, but return at once.

        Raises: ClosedError; WrongLoopError: in a forked child.
        Cancellation: of the future succeeds only before the step is begun, and then nothing of it is done.
        """
        step = Step(batch)
        self._open_inbox().put_step(step)
        return step.future

    def post(
        self, fn: Callable[[HiCache], Awaitable[T]], *, undo: Callable[[T], None] | None = None
    ) -> Future[T]:
        """Run ``fn(cache)`` as a task on the loop, in the caller's context (``contextvars``).

        Args:
            fn: an async function; what it raises, whatever it is, the future raises.
            undo: called on the loop with a result that nobody will get, because the future was cancelled
                before, or the runner closed; for a lease: ``PrefixLease.release``. What it raises is logged.
        Returns: a future; its callbacks run on the loop's thread, or in that of who cancels it.
        Raises: ConfigError: what cannot be called. ClosedError; WrongLoopError: in a forked child.
        Ownership: the result is the caller's, unless ``cancel()`` returned True.
        Cancellation: ``future.cancel()`` cancels the task and returns at once, before the task has ended.
        """
        if not callable(fn):
            raise ConfigError(f"fn is {fn!r}; give an async function that takes the cache")
        if undo is not None and (not callable(undo) or inspect.iscoroutinefunction(undo)):
            raise ConfigError(f"undo is {undo!r}; give a plain function that takes the result, or None")
        post = Post(fn, undo)
        self._open_inbox().put_post(post)
        return post.future

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until something posted has finished since the calling thread's last ``wait``; steps do not count.

        Several that have finished count once, and one that did before the call is not missed: look at all
        futures after it. A post has finished when its task has, and its ``undo``.

        Args:
            timeout_s: None: for ever; 0: only look.
        Returns: False: the time is over.
        Raises: ConfigError: no time. ClosedError: the runner is closed, or was while this waited.
            WrongLoopError: called on the loop's own thread, or in a forked child.
        """
        if timeout_s is not None:
            timeout_s = 0.0 if timeout_s == 0 else checked_seconds("timeout_s", timeout_s)
            timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._check_off_loop("wait()")
        return self._open_inbox().wait(timeout_s)

    def _check_process(self) -> None:
        # Before any lock: in a forked child nobody may be left to let it go.
        check_process(self._pid, "this runner", "make a LoopRunner of its own")

    def _open_inbox(self) -> Inbox:
        self._check_process()
        if self._inbox is None:
            raise ClosedError("the runner is not open; use it inside `with LoopRunner(...) as runner`")
        return self._inbox

    def _check_off_loop(self, what: str) -> None:
        self._check_process()
        if self._thread is threading.current_thread():
            raise WrongLoopError(
                f"{what} on the runner's own loop would wait for itself; "
                "call it from another thread, or use the cache itself here"
            )


def _place_of(thread: threading.Thread) -> str:
    """Return where a thread is; one whose loop waits for tasks is in the loop."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "its end"
    at = traceback.extract_stack(frame)[-1]
    return f"{at.filename}:{at.lineno} in {at.name}"


def _loop_factory(uvloop: bool | None) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes the loop.

    Raises: ConfigError: no such choice, or one that is not installed.
    """
    if uvloop is not None and not isinstance(uvloop, bool):
        raise ConfigError(f"uvloop is {uvloop!r}; choose True, False, or None: where it is installed")
    if uvloop is False:
        return asyncio.SelectorEventLoop
    try:
        from uvloop import new_event_loop
    except ImportError as missing:
        if uvloop is None:
            return asyncio.SelectorEventLoop
        raise ConfigError(
            "uvloop is True and it is not installed: pip install uvloop, or give None or False"
        ) from missing
    return new_event_loop
