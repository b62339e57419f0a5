"""A forked child: what is its parent's refuses or does nothing there, and the parent does not notice."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import traceback
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from hicache_async import HiCache, LoopRunner, PrefixLease, StepBatch, Tier, WrongLoopError
from hicache_async.stores import FileStore
from hicache_async.types import StopToken
from tests.programs import run_program

REFUSED = re.compile(
    r"(this|the) (cache|runner|store at .*|executor '.*'|fence '.*'|copy '.*') belongs to process (\d+), "
    r"this is its fork (\d+): (open|make) .* its own here"
)


def run(script: str, directory: Path, *lines_expected: str) -> None:
    """Run a program of its own, so that this process with its threads is never forked."""
    path = directory / "program.py"
    path.write_text("from tests.behaviour.test_fork import *\n" + script)
    done = run_program(path, directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == list(lines_expected)


# For the programs


def fork() -> int:
    """Fork, threads or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads, since Python 3.12
        return os.fork()


def in_child(act: Callable[[], object]) -> None:
    """Call ``act`` in a forked child, which must end well, and go on in the parent."""
    sys.stdout.flush()
    child = fork()
    if child == 0:
        try:
            act()
        except BaseException:  # noqa: BLE001 - the child's top level: its parent hears of it by the exit status
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def check_refused(uses: dict[str, Callable[[], object]]) -> None:
    """Call everything; each must refuse, naming both processes. Coroutines run on a loop of the child's own."""

    async def awaited(result: Awaitable[object]) -> None:
        await asyncio.wait_for(result, 20)

    for name, use in uses.items():
        try:
            result = use()
            if isinstance(result, Awaitable):
                asyncio.run(awaited(result))
        except WrongLoopError as error:
            match = REFUSED.fullmatch(str(error))
            assert match, f"{name}: {error}"
            assert match.groups()[2:4] == (str(os.getppid()), str(os.getpid())), f"{name}: {error}"
        else:
            raise AssertionError(f"{name} does not refuse")


def uses_of_cache(cache: HiCache, lease: PrefixLease) -> dict[str, Callable[[], object]]:
    """Return a call of everything that belongs on the cache's loop."""
    admin, reader = cache.admin, cache.events()
    return {
        "match_prefix": lambda: cache.match_prefix("r", [1]),
        "begin_step": cache.begin_step,
        "step": lambda: cache.step(StepBatch(release=[lease])),
        "fence": cache.fence,
        "host_fence": cache.host_fence,
        "stats": cache.stats,
        "audit": cache.audit,
        "events": cache.events,
        "close": cache.close,
        "reader": reader.__anext__,
        "reader.next_nowait": reader.next_nowait,
        "reader.resync": reader.resync,
        "reader.aclose": reader.aclose,
        "start_prefetch": lease.start_prefetch,
        "prefetch": lease.prefetch,
        "load": lease.load,
        "allocate_nowait": lambda: lease.allocate_nowait(4),
        "allocate": lambda: lease.allocate(4),
        "extend": lambda: lease.extend([1]),
        "commit": lambda: lease.commit(4),
        "discard": lambda: lease.discard(4),
        "release": lease.release,
        "explain": lambda: admin.explain([1]),
        "flush": admin.flush,
        "clear": lambda: admin.clear(Tier.HOST),
        "attach_store": lambda: admin.attach_store("memory:"),
        "detach_store": admin.detach_store,
        "pin": lambda: admin.pin([1], ttl_s=1),
        "unpin": lambda: admin.unpin([1]),
    }


def uses_of_store(store: FileStore) -> dict[str, Callable[[], object]]:
    """Return a call of everything of a file store but its end."""
    page = memoryview(bytearray(64))
    return {
        "count_prefix": lambda: store.count_prefix(["key"]),
        "read": lambda: store.read(["key"], [page], StopToken()),
        "write": lambda: store.write(["key"], [page]),
        "delete": lambda: store.delete(["key"]),
        "list_keys": store.list_keys,
    }


def uses_of_runner(runner: LoopRunner) -> dict[str, Callable[[], object]]:
    """Return a call of everything of a runner but its end."""
    return {
        "enter": runner.__enter__,
        "step": lambda: runner.step(StepBatch()),
        "step_nowait": lambda: runner.step_nowait(StepBatch()),
        "post": lambda: runner.post(lambda cache: cache.begin_step()),
        "wait": runner.wait,
    }


def file_names(directory: Path) -> list[str]:
    """Return all files below a directory."""
    return sorted(str(path) for path in directory.rglob("*") if path.is_file())


def posted(runner: LoopRunner, fn: Callable[[HiCache], Coroutine[Any, Any, Any]]) -> Any:
    """Return what a coroutine on the runner's loop returns."""
    return runner.post(fn).result(30)


# The tests

REFUSALS = """
from tests.toy_engine import open_cache, prompt, serve

async def main():
    store = FileStore(os.path.abspath("kv"), num_lanes=1)
    async with open_cache(store=store) as cache:
        await serve(cache, "before", prompt(1))
        lease = cache.match_prefix("r", prompt(2))
        uses = uses_of_cache(cache, lease) | uses_of_store(store)
        await cache.admin.flush()
        files, booking = file_names(Path("kv")), cache._owned.host_booking

        def child():
            check_refused(uses)
            asyncio.run(store.aclose())
            assert file_names(Path("kv")) == files
            print(len(uses), "refusals")

        in_child(child)
        assert booking in booking._budget._bookings
        assert file_names(Path("kv")) == files
        await lease.load()
        lease.release()
        assert (await serve(cache, "after", prompt(1))).computed == 1
    await store.aclose()

asyncio.run(main())
print("the parent goes on")
"""


def test_everything_refuses_in_a_child(tmp_path: Path) -> None:
    """Cache, leases, admin, events and file store name both processes; the parent's files and pages stay."""
    run(REFUSALS, tmp_path, "34 refusals", "the parent goes on")


OPEN_FENCES = """
import threading
import numpy
from hicache_async.abc import CopyPlan
from tests.toy_engine import make_config, make_kv

class Gate:
    # A fence that the test opens.
    def __init__(self):
        self.event = threading.Event()
    def passed(self):
        return self.event.is_set()
    def block(self, stream=None):
        self.event.wait()

async def main():
    async with HiCache.open(make_config(), kv=make_kv()) as cache:
        gate, fence = Gate(), cache.host_fence()
        ctx, page = cache._ctx, numpy.arange(1)
        copy = ctx.device.device_to_host(CopyPlan(ctx.kv, ctx.arena, page, page), [gate])

        def child():
            check_refused({"fence": fence.block, "copy": copy.block, "copy awaited": copy.wait})
            check_refused({"threads": lambda: ctx.threads.submit(print)})
            print("no wait for what cannot come")

        in_child(child)
        gate.event.set()
        await copy.wait()
        fence.set()
        await fence.wait()
        in_child(lambda: (fence.block(), copy.block()))

asyncio.run(main())
"""


def test_nobody_waits_for_threads_that_are_not_there(tmp_path: Path) -> None:
    """An open fence, and a copy under way, raise in the child instead of waiting for ever; what has passed passes."""
    run(OPEN_FENCES, tmp_path, "no wait for what cannot come")


WITH_RUNNER = """
import atexit
from tests.toy_engine import make_config, make_kv, open_cache, prompt, serve

uvloop = {uvloop}
url = "file://" + os.path.abspath("kv")
atexit.register(lambda: print("atexit", flush=True))

async def start_load(cache):
    lease = cache.match_prefix("r", prompt(2))
    await lease.load()
    return lease

async def wait(cache):
    started.set()
    await go.wait()
    return "waited"

def serve_in_child():
    # The child's own cache finds in the store what the parent has written.
    with LoopRunner(lambda: open_cache(store=url), uvloop=uvloop) as own:
        print(posted(own, lambda cache: serve(cache, "child", prompt(1))).store, "tokens from the store")

import threading
started, go = threading.Event(), asyncio.Event()
with LoopRunner(lambda: open_cache(store=url), uvloop=uvloop) as runner:
    posted(runner, lambda cache: serve(cache, "before", prompt(1)))
    posted(runner, lambda cache: cache.admin.flush())
    lease, waiting = posted(runner, start_load), runner.post(wait)
    started.wait()

    async def temp_path(cache):
        return cache._ctx.store._directory._temps.new()

    half_written = posted(runner, temp_path)
    Path(half_written).write_bytes(b"half of a page")
    files = file_names(Path("kv"))
    for how in ("falls through", "exits"):
        child = fork()
        if child == 0:
            check_refused(uses_of_runner(runner))
            assert waiting.cancel()
            if how == "exits":
                sys.exit(0)
            break
        assert os.waitpid(child, 0)[1] == 0
        assert file_names(Path("kv")) == files, file_names(Path("kv"))
        assert runner.step(StepBatch()).allocations == []
    else:
        assert not waiting.done()
        runner._loop.call_soon_threadsafe(go.set)
        print(waiting.result(30))
        runner.step(StepBatch(release=[lease]))
        os.unlink(half_written)
        child = None
if child == 0:
    serve_in_child()
else:
    print("the parent ends")
"""


@pytest.mark.parametrize("uvloop", [False, True])
def test_a_child_of_a_process_with_a_runner_ends_as_any_program(uvloop: bool, tmp_path: Path) -> None:
    """It leaves the runner's `with` without touching the parent's loop, serves from a cache of its own, and exits."""
    run(
        WITH_RUNNER.format(uvloop=uvloop),
        tmp_path,
        "24 tokens from the store",
        "atexit",
        "atexit",
        "waited",
        "the parent ends",
        "atexit",
    )


MULTIPROCESSING = """
import multiprocessing
from tests.toy_engine import make_config, make_kv, open_cache, prompt, serve

def work(results):
    async def main():
        async with open_cache() as own:
            return (await serve(own, "child", prompt(1))).computed
    results.put(asyncio.run(main()))

def start_and_join():
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=work, args=(results,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    process.join(30)
    print(results.get(), "computed by a worker that ended with", process.exitcode)

async def main():
    async with open_cache(store="memory:") as cache:
        await serve(cache, "before", prompt(1))
        start_and_join()
        assert (await serve(cache, "after", prompt(1))).computed == 1

asyncio.run(main())
with LoopRunner(lambda: open_cache()) as runner:
    posted(runner, lambda cache: serve(cache, "before", prompt(1)))
    start_and_join()
    assert posted(runner, lambda cache: serve(cache, "after", prompt(1))).computed == 1
"""


def test_workers_of_multiprocessing(tmp_path: Path) -> None:
    """The start method "fork" works beside a cache on this thread's loop and beside a runner's."""
    line = "25 computed by a worker that ended with 0"
    run(MULTIPROCESSING, tmp_path, line, line)


BUDGET = """
from hicache_async import ConfigError, host_memory_budget
from tests.toy_engine import make_config, make_kv, open_cache, prompt, serve

page_nbytes = make_kv().page_nbytes
Path("proc").mkdir()
Path("proc/meminfo").write_text(f"MemAvailable: {100 * page_nbytes // 1024} kB\\n")

async def open_with(num_pages):
    async with open_cache(host_bytes=num_pages * page_nbytes):
        pass

async def main():
    with host_memory_budget(Path()):
        async with open_cache(host_bytes=60 * page_nbytes) as cache:
            budget = cache._owned.host_booking._budget

            def child():
                asyncio.run(open_with(40))
                try:
                    asyncio.run(open_with(60))
                except ConfigError as error:
                    print("pools opened before take" in str(error))

            in_child(child)
            assert [booking.num_pages for booking in budget._bookings] == [60]
        assert budget._bookings == []

asyncio.run(main())
"""


def test_a_child_counts_what_its_parent_has_booked(tmp_path: Path) -> None:
    """Host memory of the parent is not free in its child, and what the child books and gives back is its own."""
    run(BUDGET, tmp_path, "True")


UNUSED_PARTS = """
from tests.toy_engine import make_config, make_kv, prompt, serve

store = FileStore(os.path.abspath("kv"), num_lanes=1)
opening = HiCache.open(make_config(), kv=make_kv(), store=store)
runner = LoopRunner(lambda: HiCache.open(make_config(), kv=make_kv()))

async def main():
    async with opening as cache:
        print((await serve(cache, "r", prompt(1))).computed)
    await store.aclose()

def work():
    asyncio.run(main())
    with runner:
        print(posted(runner, lambda cache: serve(cache, "r", prompt(1))).computed)

in_child(work)
work()
"""


def test_what_was_made_but_not_used_before_the_fork(tmp_path: Path) -> None:
    """A server that makes its parts first and forks its workers then can open them in each."""
    run(UNUSED_PARTS, tmp_path, "25", "25", "1", "25")


INHERITED_LOOP = """
from tests.toy_engine import make_config, make_kv, prompt, serve

loop = asyncio.new_event_loop()
opening = HiCache.open(make_config(), kv=make_kv())
cache = loop.run_until_complete(opening.__aenter__())

def child():
    async def use():
        check_refused({"stats": cache.stats, "match_prefix": lambda: cache.match_prefix("r", [1])})
        print("refused on its own loop")

    loop.run_until_complete(use())

in_child(child)
assert loop.run_until_complete(serve(cache, "after", prompt(1))).computed == 25
loop.run_until_complete(opening.__aexit__(None, None, None))
loop.close()
"""


def test_a_child_that_runs_the_loop_it_inherited(tmp_path: Path) -> None:
    """A fork between two runs of a loop leaves the child a loop that looks right, and the cache still refuses there."""
    run(INHERITED_LOOP, tmp_path, "refused on its own loop")
