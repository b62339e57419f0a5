"""The life of a runner: what opening raises, who may end it and how often, and that nothing hangs with it."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import uvloop as uvloop_package

from hicache_async import ClosedError, ConfigError, HiCache, LoopRunner, State, StepBatch
from hicache_async.runner import loop_runner
from tests.programs import run_program
from tests.runner.tools import WAIT_S, Flag, nothing, open_toy, take_lease
from tests.toy_engine import make_config, make_kv

TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")
OWN_LOOPS = {False: asyncio.SelectorEventLoop, True: uvloop_package.Loop}


def loop_threads() -> list[threading.Thread]:
    """Return the threads of runners that still live."""
    return [thread for thread in threading.enumerate() if thread.name == "hicache-loop"]


def runner_events(logs: list[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    """Return what was logged of runners."""
    return [line for line in logs if line["event"].startswith("runner.")]


# Starting


async def running_loop(cache: HiCache) -> asyncio.AbstractEventLoop:
    """Return the loop that this runs on."""
    return asyncio.get_running_loop()


def test_which_loop_it_takes(uvloop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop where it is installed and not refused, else asyncio's own, whatever the policy is."""
    for choice, kind in ((uvloop, OWN_LOOPS[uvloop]), (None, OWN_LOOPS[True])):
        with LoopRunner(open_toy, uvloop=choice) as runner:
            assert type(runner.post(running_loop).result(WAIT_S)) is kind
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with LoopRunner(open_toy) as runner:
        assert type(runner.post(running_loop).result(WAIT_S)) is OWN_LOOPS[False]
    with pytest.raises(ConfigError, match="uvloop is True and it is not installed: pip install uvloop"):
        LoopRunner(open_toy, uvloop=True)


@pytest.mark.parametrize(
    ("make", "uvloop", "message"),
    [
        (HiCache.open(make_config(), kv=make_kv()), None, "make is .*; give a function"),
        (open_toy, 1, "uvloop is 1; choose True, False, or None"),
    ],
)
def test_bad_arguments(make: Any, uvloop: Any, message: str) -> None:
    """What cannot work is refused before a thread is started."""
    with pytest.raises(ConfigError, match=message):
        LoopRunner(make, uvloop=uvloop)


def bad_config() -> AbstractAsyncContextManager[HiCache]:
    """Open a cache whose page size is not that of its tensors."""
    return HiCache.open(make_config(page_size=8), kv=make_kv())


def exits() -> AbstractAsyncContextManager[HiCache]:
    """Raise what would end a program."""
    raise SystemExit(3)


@asynccontextmanager
async def interrupted_open() -> AsyncIterator[HiCache]:
    """Raise what would end a program, in a task."""
    await asyncio.sleep(0)
    if TENANT.get() == "nobody":
        raise KeyboardInterrupt
    async with open_toy() as cache:
        yield cache


@pytest.mark.parametrize(
    ("make", "kind"), [(bad_config, ConfigError), (exits, SystemExit), (interrupted_open, KeyboardInterrupt)]
)
def test_entering_raises_what_opening_raises(
    make: Callable[[], AbstractAsyncContextManager[HiCache]], kind: type[BaseException], uvloop: bool
) -> None:
    """Its thread and its loop are gone by then, and what was not opened cannot be used."""
    runner = LoopRunner(make, uvloop=uvloop)
    with pytest.raises(kind):
        runner.__enter__()
    assert loop_threads() == []
    assert runner._loop.is_closed()
    with pytest.raises(ClosedError, match="the runner is not open"):
        runner.step(StepBatch())
    runner.__exit__(None, None, None)


def test_an_interrupted_entering(uvloop: bool) -> None:
    """Ctrl-C while the cache opens cancels the opening; nothing of it is left behind."""
    ends: list[str] = []

    @asynccontextmanager
    async def endless() -> AsyncIterator[HiCache]:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")
        async with open_toy() as cache:
            yield cache

    with pytest.raises(KeyboardInterrupt):
        LoopRunner(endless, uvloop=uvloop).__enter__()
    assert ends == ["cancelled"]
    assert loop_threads() == []


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a thread there is no loop, and entering says why."""
    runner = LoopRunner(open_toy)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            runner.__enter__()
    assert runner._loop.is_closed()
    with runner:
        assert runner.post(nothing).result(WAIT_S) is None


def test_opening_sees_the_context_of_who_enters(uvloop: bool) -> None:
    """Context variables of the entering thread, such as a host memory budget, hold for what it opens."""
    seen: list[str] = []

    def make() -> AbstractAsyncContextManager[HiCache]:
        seen.append(TENANT.get())
        return open_toy()

    token = TENANT.set("engine")
    with LoopRunner(make, uvloop=uvloop):
        pass
    TENANT.reset(token)
    assert seen == ["engine"]


def uses(runner: LoopRunner) -> list[Callable[[], object]]:
    """Return one call of everything but entering and leaving."""
    return [
        lambda: runner.step(StepBatch()),
        lambda: runner.step_nowait(StepBatch()),
        lambda: runner.post(nothing),
        runner.wait,
    ]


def test_use_outside_the_with(runner: LoopRunner) -> None:
    """Before it is entered, after it was left, and entered twice: one clear error each."""
    other = LoopRunner(open_toy)
    for use in uses(other):
        with pytest.raises(ClosedError, match="the runner is not open; use it inside `with LoopRunner"):
            use()
    other.__exit__(None, None, None)
    with other:
        with pytest.raises(ClosedError, match="was entered before; make another one"):
            other.__enter__()
        assert other.post(nothing).result(WAIT_S) is None
    for use in uses(other):
        with pytest.raises(ClosedError, match="the runner is closed; make a new one"):
            use()
    with pytest.raises(ClosedError, match="was entered before; make another one"):
        other.__enter__()


# Leaving


def test_leaving_closes_the_cache(uvloop: bool) -> None:
    """When leaving returns, the cache is closed, and the thread and the loop are gone."""

    async def itself(cache: HiCache) -> HiCache:
        return cache

    with LoopRunner(open_toy, uvloop=uvloop) as runner:
        cache = runner.post(itself).result(WAIT_S)
        assert len(loop_threads()) == 1
    assert cache.state is State.CLOSED
    assert loop_threads() == []
    assert runner._loop.is_closed()


def test_any_thread_may_leave_and_several_at_once(uvloop: bool) -> None:
    """Each returns when the thread has ended, also who comes later."""
    runner = LoopRunner(open_toy, uvloop=uvloop).__enter__()
    together = threading.Barrier(4)
    ended: list[bool] = []

    def leave() -> None:
        together.wait(WAIT_S)
        runner.__exit__(None, None, None)
        ended.append(runner._loop.is_closed())

    threads = [threading.Thread(target=leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert ended == [True] * 4
    runner.__exit__(None, None, None)
    assert loop_threads() == []


def test_an_exit_stack_keeps_it(uvloop: bool) -> None:
    """An engine with a start and a stop of its own enters in one thread and leaves in another."""
    stack = ExitStack()
    runner = stack.enter_context(LoopRunner(open_toy, uvloop=uvloop))
    runner.post(nothing).result(WAIT_S)
    thread = threading.Thread(target=stack.close)
    thread.start()
    thread.join(WAIT_S)
    assert loop_threads() == []


def test_leaving_ends_every_future(uvloop: bool) -> None:
    """Posts that run are cancelled and told why; one that returns all the same has its result."""
    started = Flag()

    async def waits(cache: HiCache) -> None:
        await asyncio.Event().wait()

    async def returns(cache: HiCache) -> State:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return cache.state
        raise AssertionError

    with LoopRunner(open_toy, uvloop=uvloop) as runner:
        futures = [runner.post(waits) for _ in range(2)]
        stubborn = runner.post(returns)
        started.await_set()
        step = runner.step_nowait(StepBatch())
    for future in futures:
        with pytest.raises(ClosedError, match="the runner is closed"):
            future.result(0)
    assert stubborn.result(0) is State.OPEN  # the cache is closed after the posts have ended
    assert step.result(0).allocations == []


def test_leaving_raises_what_closing_raises(uvloop: bool) -> None:
    """A lease that was never released is warned of; where warnings are errors, the first to leave raises it."""
    runner = LoopRunner(lambda: HiCache.open(make_config(), kv=make_kv()), uvloop=uvloop).__enter__()
    runner.post(take_lease).result(WAIT_S)
    with pytest.raises(ResourceWarning, match="was not released before the cache was closed"):
        runner.__exit__(None, None, None)
    runner.__exit__(None, None, None)
    assert loop_threads() == []


# What hangs, and what ends a loop


def test_a_post_that_ignores_its_cancel(
    uvloop: bool, monkeypatch: pytest.MonkeyPatch, logs: list[MutableMapping[str, Any]]
) -> None:
    """It is given up after the grace: its future ends, the cache closes, its late result is undone."""
    monkeypatch.setattr(loop_runner, "GRACE_S", 0.05)
    started, over, undone = Flag(), threading.Event(), Flag()
    caches: list[HiCache] = []

    async def stubborn(cache: HiCache) -> str:
        caches.append(cache)
        started.set()
        while not over.is_set():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        return "late"

    def make() -> AbstractAsyncContextManager[HiCache]:
        return HiCache.open(make_config(close_timeout_s=0.1), kv=make_kv())

    with LoopRunner(make, uvloop=uvloop) as runner:
        future = runner.post(stubborn, undo=lambda result: undone.set())
        started.await_set()
    with pytest.raises(ClosedError):
        future.result(0)
    assert caches[0]._ctx.state is State.CLOSED
    given_up, at_last = runner_events(logs)
    assert (given_up["event"], at_last["event"]) == ("runner.posts_abandoned", "runner.close_abandoned")
    assert "stubborn" in given_up["stuck"][0]
    assert len(loop_threads()) == 1

    def cancel_once_more() -> None:
        over.set()
        for task in asyncio.all_tasks(runner._loop):
            task.cancel()

    runner._loop.call_soon_threadsafe(cancel_once_more)
    undone.await_set()
    for thread in loop_threads():
        thread.join(WAIT_S)
    assert loop_threads() == []


def test_a_loop_that_is_blocked(
    uvloop: bool, monkeypatch: pytest.MonkeyPatch, logs: list[MutableMapping[str, Any]]
) -> None:
    """Leaving says where the loop's thread hangs and gives up; whoever waits for a step is told."""
    monkeypatch.setattr(loop_runner, "GRACE_S", 0.05)
    started, go = Flag(), Flag()

    async def block(cache: HiCache) -> None:
        started.set()
        go.await_set()

    def make() -> AbstractAsyncContextManager[HiCache]:
        return HiCache.open(make_config(close_timeout_s=0), kv=make_kv())

    with LoopRunner(make, uvloop=uvloop) as runner:
        blocked = runner.post(block)
        started.await_set()
        step = runner.step_nowait(StepBatch())
    for future in (blocked, step):
        with pytest.raises(ClosedError):
            future.result(0)
    (report,) = runner_events(logs)
    assert report["event"] == "runner.close_abandoned"
    assert report["at"].endswith(" in wait")
    assert sorted(report["stuck"])[1] == "step" and "block" in sorted(report["stuck"])[0]
    go.set()
    for thread in loop_threads():
        thread.join(WAIT_S)
    assert loop_threads() == []


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_task_that_ends_the_loop(
    uvloop: bool, kind: type[BaseException], logs: list[MutableMapping[str, Any]]
) -> None:
    """A stray task that raises what ends a loop leaves nobody waiting: all futures end, and say why."""
    caches: list[HiCache] = []

    async def waits(cache: HiCache) -> None:
        caches.append(cache)
        await asyncio.Event().wait()

    async def stray() -> None:
        raise kind("of a stray task")

    async def start_stray(cache: HiCache) -> None:
        task = asyncio.get_running_loop().create_task(stray())
        await asyncio.wait([task])

    runner = LoopRunner(open_toy, uvloop=uvloop).__enter__()
    waiting, starting = runner.post(waits), runner.post(start_stray)
    for future in (waiting, starting):
        with pytest.raises(ClosedError, match=f"its loop ended with {kind.__name__}") as closed:
            future.result(WAIT_S)
        assert isinstance(closed.value.__cause__, kind)
    for use in uses(runner):
        with pytest.raises(ClosedError, match=f"its loop ended with {kind.__name__}"):
            use()
    with pytest.raises(kind, match="of a stray task"):
        runner.__exit__(None, None, None)
    runner.__exit__(None, None, None)
    assert loop_threads() == []
    assert caches[0]._ctx.state is State.CLOSED
    assert [line["event"] for line in runner_events(logs)] == ["runner.failed"]


NEVER_LEFT = """
import sys, threading
from hicache_async import LoopRunner
from tests.runner.tools import nothing, open_toy, take_lease

blocked = threading.Event()

async def block(cache):
    blocked.set()
    threading.Event().wait()

runner = LoopRunner(open_toy, uvloop={uvloop}).__enter__()
lease = runner.post(take_lease).result(30)
if {hangs}:
    runner.post(block)
    blocked.wait()
print("the end")
"""


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("uvloop", [False, True])
def test_a_program_that_never_leaves_ends(uvloop: bool, hangs: bool, tmp_path: Path) -> None:
    """A runner that is still open, or hangs, does not keep the interpreter."""
    script = tmp_path / "program.py"
    script.write_text(NEVER_LEFT.format(uvloop=uvloop, hangs=hangs))
    done = run_program(script, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
