"""Posts: a cancel at any moment loses nothing, whatever is raised comes back, and nobody is left waiting."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any

import pytest

from hicache_async import ConfigError, HiCache, LoopRunner, PrefixLease, StepBatch
from tests.runner.tools import WAIT_S, Flag, held_loop, nothing, num_leases, take_lease
from tests.toy_engine import prompt

request_of: ContextVar[str] = ContextVar("request_of", default="nobody's")


class Undo:
    """Takes results that nobody gets, and remembers in which thread and context."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, str, str]] = []
        self.called = Flag()

    def __call__(self, result: object) -> None:
        self.calls.append((result, threading.current_thread().name, request_of.get()))
        self.called.set()


def test_a_result_comes_back(runner: LoopRunner) -> None:
    """What fn returns is the future's result, fn runs on the loop's thread, and nothing is undone."""
    undo = Undo()

    async def where(cache: HiCache) -> tuple[str, str]:
        await asyncio.sleep(0)
        return cache.state, threading.current_thread().name

    future = runner.post(where, undo=undo)
    assert future.result(WAIT_S) == ("open", "hicache-loop")
    assert not future.cancel()
    runner.post(nothing).result(WAIT_S)
    assert undo.calls == []


def test_a_cancel_before_it_is_begun(runner: LoopRunner) -> None:
    """A post that was cancelled before the loop came to it is never called, and has finished all the same."""
    called: list[str] = []

    async def fn(cache: HiCache) -> None:
        called.append("fn")

    with held_loop(runner):
        runner.wait(0)
        future = runner.post(fn, undo=lambda _: called.append("undo"))
        assert future.cancel()
    assert concurrent.futures.wait([future], WAIT_S).done == {future}
    while runner.wait(0):
        pass
    runner.post(nothing).result(WAIT_S)
    assert called == []


def test_a_cancel_before_its_task_has_run(runner: LoopRunner) -> None:
    """A cancel that comes with the post, in one turn of the loop, ends it before or in its first step."""
    ends: list[str] = []

    async def fn(cache: HiCache) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def begin_and_cancel(cache: HiCache) -> concurrent.futures.Future[None]:
        future = runner.post(fn)
        await asyncio.sleep(0)  # its task is made, and in most loops has not run
        assert future.cancel()
        return future

    future = runner.post(begin_and_cancel).result(WAIT_S)
    assert concurrent.futures.wait([future], WAIT_S).done == {future}
    assert future.cancelled() and ends in ([], ["cancelled"])


def test_a_cancel_while_it_runs(runner: LoopRunner) -> None:
    """The task is cancelled where it waits, and what it raises then is nobody's."""
    started, ended, undo = Flag(), Flag(), Undo()

    async def fn(cache: HiCache) -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = runner.post(fn, undo=undo)
    started.await_set()
    assert future.cancel()
    ended.await_set()
    assert concurrent.futures.wait([future], WAIT_S).done == {future}
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert undo.calls == []


def test_a_cancel_when_the_work_is_done(runner: LoopRunner) -> None:
    """A result that was there but not handed over is undone on the loop, in the context of the post."""
    started, go, undo = Flag(), Flag(), Undo()

    async def fn(cache: HiCache) -> str:
        started.set()
        go.await_set()  # nothing is awaited from here on: no cancel can reach it
        return "result"

    request_of.set("mine")
    future = runner.post(fn, undo=undo)
    started.await_set()
    assert future.cancel()
    go.set()
    undo.called.await_set()
    assert undo.calls == [("result", "hicache-loop", "mine")]
    assert concurrent.futures.wait([future], WAIT_S).done == {future}


def test_a_cancel_that_is_swallowed(runner: LoopRunner) -> None:
    """What a task returns though it was cancelled is undone."""
    started, undo = Flag(), Undo()

    async def fn(cache: HiCache) -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "all the same"
        raise AssertionError

    future = runner.post(fn, undo=undo)
    started.await_set()
    assert future.cancel()
    undo.called.await_set()
    assert [result for result, *_ in undo.calls] == ["all the same"]


def test_no_lease_leaks(runner: LoopRunner) -> None:
    """A lease whose taker was cancelled too late is released."""
    started, go = Flag(), Flag()

    async def admit(cache: HiCache) -> PrefixLease:
        lease = await take_lease(cache)
        started.set()
        go.await_set()
        return lease

    future = runner.post(admit, undo=PrefixLease.release)
    started.await_set()
    assert future.cancel()
    go.set()
    assert num_leases(runner) == 0


def cancel_at_random(runner: LoopRunner, num_posts: int) -> None:
    """Cancel each of many admissions at some moment of its life, and release those that were admitted."""
    chance = random.Random(num_posts)
    num_admitted = 0
    for number in range(num_posts):
        reached, count = Flag(), chance.randrange(4)

        async def admit(
            cache: HiCache, number: int = number, reached: Flag = reached, count: int = count
        ) -> PrefixLease:
            with cache.match_prefix("request", prompt(number)) as lease:
                for turn in range(3):
                    if turn == count:
                        reached.set()
                    await asyncio.sleep(0)
                await lease.load()
                reached.set()
                return lease.keep()

        future = runner.post(admit, undo=PrefixLease.release)
        if chance.random() < 0.8:
            reached.await_set()
        if not future.cancel():
            num_admitted += 1
            runner.step(StepBatch(release=[future.result(WAIT_S)]))
        assert concurrent.futures.wait([future], WAIT_S).done == {future}
    assert 0 < num_admitted < num_posts
    assert num_leases(runner) == 0


def test_cancels_at_random_moments_leak_nothing(runner: LoopRunner) -> None:
    """Each admission ends either with its caller or undone."""
    cancel_at_random(runner, 100)


@pytest.mark.stress
def test_many_cancels_at_random_moments_leak_nothing(runner: LoopRunner) -> None:
    """Each of thousands of admissions ends either with its caller or undone."""
    cancel_at_random(runner, 5000)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_is_raised_comes_back(runner: LoopRunner, kind: type[BaseException]) -> None:
    """Whatever fn raises, its future raises, and the loop goes on for everybody else."""
    error = kind("of fn")

    async def fn(cache: HiCache) -> None:
        await asyncio.sleep(0)
        raise error

    assert runner.post(fn).exception(WAIT_S) is error
    assert runner.post(nothing).result(WAIT_S) is None


def test_a_cancel_from_within(runner: LoopRunner) -> None:
    """A task that cancels itself, or what it waits for, ends its future as cancelled."""

    async def fn(cache: HiCache) -> None:
        inner = asyncio.ensure_future(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(inner.cancel)
        await inner

    with pytest.raises(concurrent.futures.CancelledError):
        runner.post(fn).result(WAIT_S)


def test_no_coroutine(runner: LoopRunner) -> None:
    """A function that returns what cannot be awaited fails its future."""
    with pytest.raises(TypeError, match="await"):
        runner.post(lambda cache: 5).result(WAIT_S)  # type: ignore[arg-type, return-value]


def test_bad_arguments(runner: LoopRunner) -> None:
    """What cannot be called, or would have to be awaited, is refused before anything is posted."""

    async def undo(result: object) -> None: ...

    with pytest.raises(ConfigError, match="fn is 5; give an async function that takes the cache"):
        runner.post(5)  # type: ignore[arg-type]
    for bad in (5, undo):
        with pytest.raises(ConfigError, match="undo is .*; give a plain function that takes the result"):
            runner.post(nothing, undo=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_an_undo_that_fails(
    runner: LoopRunner, kind: type[BaseException], logs: list[MutableMapping[str, Any]]
) -> None:
    """It is logged; neither the future nor the loop hear of it."""
    started, go = Flag(), Flag()

    async def fn(cache: HiCache) -> str:
        started.set()
        go.await_set()
        return "result"

    def undo(result: str) -> None:
        raise kind(result)

    future = runner.post(fn, undo=undo)
    started.await_set()
    assert future.cancel()
    go.set()
    runner.post(nothing).result(WAIT_S)
    assert future.cancelled()
    assert [(line["event"], line["log_level"]) for line in logs if "runner" in line["event"]] == [
        ("runner.undo_failed", "error")
    ]
    assert "result" in logs[-1]["error"]


def test_a_failure_that_nobody_gets(runner: LoopRunner, logs: list[MutableMapping[str, Any]]) -> None:
    """What a cancelled post raises instead of ending is logged, not lost."""
    started = Flag()

    async def fn(cache: HiCache) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("while it cleaned up")

    future = runner.post(fn)
    started.await_set()
    assert future.cancel()
    assert concurrent.futures.wait([future], WAIT_S).done == {future}
    runner.post(nothing).result(WAIT_S)
    assert [line["event"] for line in logs if "runner" in line["event"]] == ["runner.post_failed"]


def test_a_context_is_carried_along(runner: LoopRunner) -> None:
    """fn sees the context variables of the thread that posted it, and changes none of them there."""

    async def swap(cache: HiCache) -> str:
        found = request_of.get()
        request_of.set("fn's")
        return found

    for name in ("first", "second"):
        request_of.set(name)
        assert runner.post(swap).result(WAIT_S) == name
        assert request_of.get() == name


def test_a_post_from_the_loop(runner: LoopRunner) -> None:
    """A coroutine on the loop may post, and await what it posted."""

    async def outer(cache: HiCache) -> str:
        async def inner(cache: HiCache) -> str:
            return "inner"

        return await asyncio.wrap_future(runner.post(inner))

    assert runner.post(outer).result(WAIT_S) == "inner"
