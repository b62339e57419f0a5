"""A hop settles once, whatever its job, its callback or its loop does."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading

import pytest
import uvloop

from hicache_async._hop import Hop, HopRegistry
from hicache_async._threads import DaemonThreads
from hicache_async.errors import InvariantError
from hicache_async.types import StopToken
from tests.hop.book import LIMIT_S, Book, Bugs, settled

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


async def test_an_error_settles_like_a_result(hops: HopRegistry, threads: DaemonThreads, bugs: Bugs) -> None:
    """A job or a call that raises settles its hop with the error, which is no bug of the cache."""

    def fail() -> int:
        raise OSError("unreadable")

    async def call(stop: StopToken) -> int:
        return fail()

    outcomes: list[BaseException | None] = []
    by_job = hops.start_job("job", threads, fail, lambda hop: outcomes.append(hop.error))
    await settled(by_job)
    by_call = hops.start_call("call", call, lambda hop: outcomes.append(hop.error))
    await settled(by_call)
    assert [str(error) for error in outcomes] == ["unreadable", "unreadable"]
    assert by_job.result is by_call.result is None
    assert not bugs


async def test_a_job_that_never_ran_settles_as_cancelled(
    hops: HopRegistry, book: Book, threads: DaemonThreads
) -> None:
    """Shutting the threads down settles the hops whose jobs were still waiting."""
    both_started = threading.Barrier(3)

    def block() -> None:
        both_started.wait(LIMIT_S)
        assert book.finish.wait(LIMIT_S)

    blocked = [threads.submit(block) for _ in range(2)]
    await asyncio.to_thread(both_started.wait, LIMIT_S)
    given_back: list[str] = []
    hop = hops.start_job("late", threads, lambda: 1, lambda hop: given_back.append(hop.name))
    threads.shutdown()
    await settled(hop)
    assert given_back == ["late"]
    assert isinstance(hop.error, asyncio.CancelledError)
    book.finish.set()
    for job in blocked:
        await asyncio.wrap_future(job)


async def test_threads_that_are_shut_down_make_no_hop(hops: HopRegistry, threads: DaemonThreads) -> None:
    """When the job cannot be submitted the caller hears at once, and no hop stays live."""
    threads.shutdown()
    with pytest.raises(RuntimeError):
        hops.start_job("never", threads, lambda: 1, lambda hop: None)
    assert not hops.live


async def test_settling_twice_is_a_bug(hops: HopRegistry) -> None:
    """The second settle raises and on_settled runs once."""
    calls: list[int | None] = []
    hop: Hop[int] = Hop("copy", lambda hop: calls.append(hop.result), hops)
    hop.settle(5)
    with pytest.raises(InvariantError, match="<Hop copy settled> settled twice"):
        hop.settle(6)
    assert calls == [5]


async def test_a_bug_in_on_settled_is_reported_and_wakes_the_waiters(
    hop: Hop[int], book: Book, hops: HopRegistry, bugs: Bugs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What on_settled raises reaches on_bug, and nobody waits for ever."""
    monkeypatch.setattr(book, "free", None)  # give_back now raises
    book.finish.set()
    await settled(hop)
    assert [type(bug) for bug in bugs] == [AttributeError]
    assert not hops.live


async def test_whatever_on_settled_raises_the_waiters_wake(hops: HopRegistry, bugs: Bugs) -> None:
    """What is no Exception passes through to the loop, and still nobody waits for ever."""

    def torn(hop: Hop[int]) -> None:
        raise asyncio.CancelledError

    hop: Hop[int] = Hop("copy", torn, hops)
    with pytest.raises(asyncio.CancelledError):
        hop.settle(1)
    await settled(hop)
    assert not bugs


async def test_a_cancelled_settled_future_does_not_break_the_hop(
    hop: Hop[int], book: Book, hops: HopRegistry, bugs: Bugs
) -> None:
    """A waiter that awaits the future itself and is cancelled takes the future along, not the page."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await hop.settled
    assert hop.settled.cancelled()
    assert book.free == []
    heard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    book.finish.set()
    await book.given_back.wait()
    book.check_given_back(hop, hops)
    assert not bugs
    assert not heard


HUNG = """
import asyncio, sys, threading
import uvloop
from hicache_async._hop import HopRegistry
from hicache_async._threads import DaemonThreads

async def main():
    threads = DaemonThreads(1)
    hops = HopRegistry(asyncio.get_running_loop(), print)
    started = threading.Event()
    hop = hops.start_job("hung", threads, lambda: (started.set(), threading.Event().wait()), print)
    await asyncio.to_thread(started.wait)
    try:
        async with asyncio.timeout(0):
            await asyncio.wait([hop.settled])
    except TimeoutError:
        pass
    threads.shutdown(wait=True)
    print("closed with", hops.live)

new_loop = uvloop.new_event_loop if "uvloop" in sys.argv else asyncio.new_event_loop
with asyncio.Runner(debug="debug" in sys.argv, loop_factory=new_loop) as runner:
    runner.run(main())
"""


async def test_a_hung_hop_keeps_neither_shutdown_nor_the_interpreter() -> None:
    """A process whose thread hangs for ever inside a hop still closes, and exits with 0."""
    loop = asyncio.get_running_loop()
    kind = ["uvloop"] * isinstance(loop, uvloop.Loop) + ["debug"] * loop.get_debug()
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", HUNG, *kind],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed with {<Hop hung running>}\n", "")


async def test_a_thread_that_ends_after_its_loop_is_no_error(book: Book, threads: DaemonThreads) -> None:
    """With the loop of a hop closed its thread ends in silence, and the page is given to nobody."""
    loop = asyncio.new_event_loop()
    book.take()
    HopRegistry(loop, print).start_job("fill", threads, book.fill, book.give_back)
    loop.close()
    book.finish.set()
    await asyncio.wrap_future(threads.submit(lambda: None))
    threads.shutdown(cancel_futures=False)
    assert book.free == []
