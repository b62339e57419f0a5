"""Inbox: what threads ask of a cache's loop, and how each of it ends.

A future is ended by whoever takes its work out of ``_unsettled``, under the lock: once, and never not.
What a caller's ``future.cancel()`` does to a post depends on when it comes:

    before the loop has taken it up   fn is never called
    while fn runs                     its task is cancelled; what it returns all the same is undone
    when fn has returned              the result is undone, for nobody will get it
    when the result is handed over    cancel() returns False; the result is the caller's
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

from .._log import logger
from .._threads import post_to_loop
from ..cache import HiCache
from ..errors import ClosedError
from ..step import StepBatch, StepResult

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Post(Generic[T]):
    """A coroutine that a thread has asked for; ``undo`` gets a result that nobody else will."""

    fn: Callable[[HiCache], Awaitable[T]]
    undo: Callable[[T], None] | None
    future: Future[T] = field(default_factory=Future)
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class Step:
    """A step that a thread has asked for."""

    batch: StepBatch
    future: Future[StepResult] = field(default_factory=Future)
    task: asyncio.Task[None] | None = None


class _Seen(threading.local):
    """How many finished posts the calling thread has been told of."""

    num_finished = 0


class Inbox:
    """Takes work from any thread, does it on the loop in the order it came, and ends every future.

    Of no use in a forked child, where a thread of the parent may seem to hold its lock for ever.

    Args:
        loop: where the work is done.
        cache: what it is done with.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cache: HiCache) -> None:
        self.cache = cache
        self._loop = loop
        self._pid = os.getpid()
        # Under the lock, and told of when they change:
        self._changed = threading.Condition()
        self._unsettled: set[Post[Any] | Step] = set()
        self._num_finished = 0
        self._is_closed = False
        self._failure: BaseException | None = None
        self._seen = _Seen()

    # In any thread

    def put_step(self, step: Step) -> None:
        """Have a step done.

        Raises: ClosedError.
        """
        self._put(step, self._begin_step)

    def put_post(self, post: Post[Any]) -> None:
        """Have a post run.

        Raises: ClosedError.
        """
        post.future.add_done_callback(partial(self._ended_by_caller, post))
        self._put(post, self._begin_post)

    def _put(self, work: Post[Any] | Step, begin: Callable[[Any], None]) -> None:
        with self._changed:
            self._check_open()
            self._unsettled.add(work)
            # Under the lock: what is let in reaches the loop in order, and before the word to leave. The
            # loop takes the caller's contextvars along, and a task those of whoever makes it.
            self._loop.call_soon_threadsafe(begin, work)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until a post has finished that this thread was not told of; returns False when time is over.

        Raises: ClosedError: also when it is closed meanwhile.
        """
        seen = self._seen
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._num_finished != seen.num_finished, timeout_s
            )
            self._check_open()
            has_finished, seen.num_finished = self._num_finished != seen.num_finished, self._num_finished
            return has_finished

    def close(self, failure: BaseException | None = None) -> bool:
        """Take nothing more, because of ``failure`` if that is why; returns whether this was the first call."""
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
            if is_first:
                self._failure = failure
            self._changed.notify_all()
        return is_first

    def abandon(self) -> list[str]:
        """Tell whoever still waits that nothing will come; returns what for."""
        with self._changed:
            abandoned, self._unsettled = list(self._unsettled), set()
            waited_for = [work for work in abandoned if _may_end(work)]
        for work in waited_for:
            work.future.set_exception(self._closed_error())
        return [repr(work.fn) if isinstance(work, Post) else "step" for work in abandoned]

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        ended = "" if self._failure is None else f", its loop ended with {self._failure!r}"
        error = ClosedError(f"the runner is closed{ended}; make a new one with LoopRunner(...)")
        error.__cause__ = self._failure
        return error

    def _ended_by_caller(self, post: Post[Any], future: Future[Any]) -> None:
        if future.cancelled() and self._pid == os.getpid():
            post_to_loop(self._loop.call_soon_threadsafe, self._cancel, post)

    def _claim(self, work: Post[Any] | Step) -> bool:
        # Whether it is the caller's to end the future: nobody has yet, and it was not cancelled.
        with self._changed:
            if work not in self._unsettled:
                return False
            self._unsettled.discard(work)
            return _may_end(work)

    # On the loop: steps

    def _begin_step(self, step: Step) -> None:
        # A task, as a post is: whether the loop starts tasks at once or in turn, the order is kept.
        step.task = self._loop.create_task(self._perform_step(step), name="hicache:step")

    async def _perform_step(self, step: Step) -> None:
        with self._changed:
            if step not in self._unsettled or not step.future.set_running_or_notify_cancel():
                self._unsettled.discard(step)
                return
        try:
            result = self.cache.step(step.batch)
        except BaseException as error:  # noqa: BLE001 - a future carries whatever its work raised
            if self._claim(step):
                step.future.set_exception(error)
            del step  # the traceback holds this frame: a cycle would keep the batch alive
        else:
            if self._claim(step):
                step.future.set_result(result)

    # On the loop: posts

    def _begin_post(self, post: Post[Any]) -> None:
        if post.future.cancelled():
            self._claim(post)
            self._count_finished()
            return
        post.task = self._loop.create_task(self._perform_post(post), name="hicache:post")
        post.task.add_done_callback(partial(self._post_ended, post))

    async def _perform_post(self, post: Post[T]) -> None:
        try:
            work: object = post.fn(self.cache)
            if not inspect.isawaitable(work):
                if post.undo is not None:
                    _undo(post.undo, cast("T", work))
                raise TypeError(f"{post.fn!r} returned {work!r}; post a function that returns an awaitable")
            result = await work
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it must not end the loop under all others
            if self._claim(post):
                post.future.set_exception(error)
            else:
                logger.warning("runner.post_failed", post=repr(post.fn), error=repr(error), exc_info=error)
            del post  # the traceback holds this frame: a cycle would keep what was posted alive
        else:
            if self._claim(post):
                post.future.set_result(result)
            elif post.undo is not None:
                _undo(post.undo, result)

    def _post_ended(self, post: Post[Any], task: asyncio.Task[None]) -> None:
        # Also for a task that was cancelled before its first step, and so has run nothing of the above.
        if self._claim(post):
            post.future.set_exception(self._error_of(task))
        self._count_finished()

    def _error_of(self, task: asyncio.Task[None]) -> BaseException:
        if not task.cancelled():
            return task.exception() or CancelledError()
        return self._closed_error() if self._is_closed else CancelledError()

    def _count_finished(self) -> None:
        # After the future is done: who is woken looks at it.
        with self._changed:
            self._num_finished += 1
            self._changed.notify_all()

    def _cancel(self, post: Post[Any]) -> None:
        if post.task is not None:
            post.task.cancel()

    async def end_posts(self, grace_s: float) -> None:
        """Cancel what runs, wait for at most ``grace_s`` until it has ended, and abandon the rest."""
        tasks = [work.task for work in self._unsettled if work.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        if stuck := self.abandon():
            logger.warning("runner.posts_abandoned", after_s=grace_s, stuck=stuck)


def _may_end(work: Post[Any] | Step) -> bool:
    # Whether the future was not cancelled; from now on it cannot be.
    return work.future.running() or work.future.set_running_or_notify_cancel()


def _undo(undo: Callable[[T], None], result: T) -> None:
    try:
        undo(result)
    except BaseException as error:  # noqa: BLE001 - nobody waits for it any more
        logger.error("runner.undo_failed", undo=repr(undo), error=repr(error), exc_info=error)
