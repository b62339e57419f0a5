"""Steps and waits: in order, in one hop, and no completion is missed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from hicache_async import (
    Books,
    ClosedError,
    ConfigError,
    HiCache,
    LeaseError,
    LoopRunner,
    PrefixLease,
    StepBatch,
    WrongLoopError,
)
from tests.runner.tools import WAIT_S, Flag, held_loop, nothing, num_leases, open_toy, take_lease
from tests.toy_engine import check, fill, make_config, make_kv, page_hashes, prompt

# Steps


def serve(runner: LoopRunner, name: str, tokens: list[int]) -> Books:
    """Serve one request from a thread that is not the cache's; its bytes are checked."""
    hashes = page_hashes(tokens)

    async def admit(cache: HiCache) -> PrefixLease:
        lease = cache.match_prefix(name, tokens)
        loading = await lease.load()
        await loading.finished()
        check(cache, loading.pages, hashes[: len(loading.pages)])
        return lease

    async def compute(cache: HiCache) -> Books:
        pages = lease.pages[lease.device_tokens // cache._ctx.page_tokens : len(hashes)]
        fill(cache, pages, hashes[len(hashes) - len(pages) :])
        return lease.books

    lease = runner.post(admit).result(WAIT_S)
    (allocation,) = runner.step(StepBatch(allocate=[(lease, len(tokens))])).allocations
    assert allocation is not None
    allocation.block()
    books = runner.post(compute).result(WAIT_S)
    runner.step(StepBatch(commit=[(lease, len(tokens))], release=[lease]))
    return books


def test_a_thread_serves_requests(runner: LoopRunner) -> None:
    """An engine that is not async computes a prompt once, and finds it the second time."""
    assert [serve(runner, f"turn {turn}", prompt(1)).device for turn in range(2)] == [0, 24]


def test_a_step_costs_one_hop(runner: LoopRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is woken once for a whole batch."""
    leases = [runner.post(take_lease).result(WAIT_S)]
    wake = runner._loop.call_soon_threadsafe
    woken: list[object] = []

    class Counting:
        """The loop, counting."""

        def call_soon_threadsafe(self, *args: object) -> object:
            woken.append(args)
            return wake(*args)  # type: ignore[arg-type]

    inbox = runner._inbox
    assert inbox is not None
    monkeypatch.setattr(inbox, "_loop", Counting(), raising=True)
    monkeypatch.setattr(Counting, "create_task", staticmethod(runner._loop.create_task), raising=False)
    result = runner.step(StepBatch(allocate=[(lease, 8) for lease in leases], after=None))
    assert len(result.allocations) == len(woken) == 1
    monkeypatch.undo()
    runner.step(StepBatch(release=leases))


def test_a_step_raises_what_the_cache_raises(runner: LoopRunner) -> None:
    """A mistake in a batch comes back from step and from the future, and the runner goes on."""
    lease = runner.post(take_lease).result(WAIT_S)
    bad = StepBatch(commit=[(lease, 1000)])
    with pytest.raises(LeaseError, match="commit of 1000 tokens"):
        runner.step(bad)
    assert isinstance(runner.step_nowait(bad).exception(WAIT_S), LeaseError)
    assert runner.step_nowait(StepBatch(release=[lease])).result(WAIT_S).allocations == []
    assert num_leases(runner) == 0


def test_a_step_is_cancelled_as_a_whole(runner: LoopRunner) -> None:
    """A step that was not begun can be cancelled and does nothing; one that was done cannot."""
    lease = runner.post(take_lease).result(WAIT_S)
    with held_loop(runner):
        step = runner.step_nowait(StepBatch(release=[lease]))
        assert step.cancel()
    assert concurrent.futures.wait([step], WAIT_S).done == {step}
    assert num_leases(runner) == 1
    step = runner.step_nowait(StepBatch(release=[lease]))
    step.result(WAIT_S)
    assert not step.cancel()


def record_order(runner: LoopRunner) -> list[int]:
    """Return in which order six posts and steps are begun that one thread asked for in turn."""
    order: list[int] = []

    async def begin(number: int) -> None:
        order.append(number)
        await asyncio.sleep(0)

    with held_loop(runner):
        for number in range(6):
            if number % 2:
                step = runner.step_nowait(StepBatch())
                step.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
            else:
                runner.post(lambda cache, number=number: begin(number))  # type: ignore[misc]
    step.result(WAIT_S)
    runner.post(nothing).result(WAIT_S)
    return order


def test_steps_and_posts_keep_their_order(runner: LoopRunner) -> None:
    """What one thread asks for is begun in that order, whether step or post."""
    assert record_order(runner) == list(range(6))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_eager_tasks_keep_the_order() -> None:
    """A loop that starts tasks at once keeps the order, too."""

    @asynccontextmanager
    async def eager() -> AsyncIterator[HiCache]:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
        async with open_toy() as cache:
            yield cache

    with LoopRunner(eager) as runner:
        assert record_order(runner) == list(range(6))


def test_begin_step(runner: LoopRunner) -> None:
    """An engine that is not async gets its grant through a post, and its loads are named in it."""
    lease = runner.post(take_lease).result(WAIT_S)
    grant = runner.post(lambda cache: cache.begin_step(3)).result(WAIT_S)
    assert (grant.num_pages, grant.loaded) == (3, (lease,))
    runner.step(StepBatch(release=[lease]))


# Waiting


def test_a_wait_counts_once_what_has_finished(runner: LoopRunner) -> None:
    """Several that have finished since the last wait count once; steps do not count."""
    futures = [runner.post(nothing) for _ in range(3)]
    runner.post(nothing).result(WAIT_S)  # has begun after all of them, and so finished after them
    assert all(future.done() for future in futures)
    while runner.wait(0):
        pass
    with held_loop(runner):
        for _ in range(3):
            runner.post(nothing)
        end = runner.post(nothing)
    end.result(WAIT_S)
    assert runner.wait(WAIT_S)
    runner.step(StepBatch())  # behind what counts the last of them
    runner.wait(0)
    runner.step(StepBatch())
    assert not runner.wait(0)
    assert not runner.wait(0.001)


def test_a_wait_is_woken(runner: LoopRunner) -> None:
    """A thread that waits is woken when something finishes, and finds its future done."""
    go, started = Flag(), Flag()

    async def fn(cache: HiCache) -> None:
        started.set()
        await asyncio.get_running_loop().run_in_executor(None, go.await_set)

    future = runner.post(fn)
    started.await_set()
    while runner.wait(0):
        pass
    woken: list[bool] = []

    def wait() -> None:
        assert runner.wait(WAIT_S)  # of this thread the first: it was told of nothing before
        while not future.done():
            assert runner.wait(WAIT_S)
        woken.append(future.done())

    thread = threading.Thread(target=wait)
    thread.start()
    go.set()
    thread.join(WAIT_S)
    assert woken == [True]


def test_each_thread_is_told(runner: LoopRunner) -> None:
    """Two threads that each wait for their own post both return, whoever is told first."""
    done: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            future = runner.post(nothing)
            while not future.done():
                assert runner.wait(WAIT_S)
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(done) == [0, 1, 2, 3]


@pytest.mark.parametrize("timeout_s", [-1, -0.5, math.nan, math.inf, "1", True])
def test_a_time_that_cannot_be(runner: LoopRunner, timeout_s: float) -> None:
    """Not a number, below zero or without end: refused, and said to be so."""
    with pytest.raises(ConfigError, match=r"timeout_s is .*; give a finite number of seconds"):
        runner.wait(timeout_s)


def test_a_very_long_time(runner: LoopRunner) -> None:
    """A time that no lock can wait for is as good as for ever."""
    runner.post(nothing)
    assert runner.wait(1e300)


def test_a_wait_ends_with_the_runner() -> None:
    """Who waits when the runner is closed is told so."""
    errors: list[BaseException] = []
    waiting = Flag()

    def wait() -> None:
        while runner.wait(0):
            pass
        waiting.set()
        try:
            runner.wait()
        except ClosedError as error:
            errors.append(error)

    with LoopRunner(open_toy) as runner:
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.await_set()
    thread.join(WAIT_S)
    assert len(errors) == 1


def test_the_loops_own_thread_never_waits_for_itself(runner: LoopRunner) -> None:
    """step, wait and leaving raise on the loop, and name the way out; step_nowait and post work there."""

    async def fn(cache: HiCache) -> list[str]:
        refusals: list[str] = []
        for use in (
            lambda: runner.step(StepBatch()),
            runner.wait,
            lambda: runner.__exit__(None, None, None),
        ):
            with pytest.raises(
                WrongLoopError, match="would wait for itself; call it from another"
            ) as refusal:
                use()
            refusals.append(str(refusal.value).split(" on the runner's own loop")[0])
        await asyncio.wrap_future(runner.step_nowait(StepBatch()))
        await asyncio.wrap_future(runner.post(nothing))
        return refusals

    assert runner.post(fn).result(WAIT_S) == ["step()", "wait()", "leaving the runner"]


def test_what_a_step_was_given_is_let_go(runner: LoopRunner) -> None:
    """A batch that failed is kept alive by nobody once its error is gone."""
    import gc
    import weakref

    class Tokens(list[int]): ...

    gc.collect()
    gc.disable()
    try:
        tokens = Tokens([-1])
        gone = weakref.ref(tokens)
        lease = runner.post(take_lease).result(WAIT_S)
        with pytest.raises(ConfigError):
            runner.step(StepBatch(extend=[(lease, tokens)]))
        runner.step(StepBatch(release=[lease]))
        del tokens
        assert gone() is None
    finally:
        gc.enable()


def test_a_cache_of_its_own_options() -> None:
    """``make`` is called on the runner's loop, once."""
    calls: list[str] = []

    def make():  # type: ignore[no-untyped-def]
        calls.append(threading.current_thread().name)
        return HiCache.open(make_config(), kv=make_kv())

    with LoopRunner(make):
        pass
    assert calls == ["hicache-loop"]
