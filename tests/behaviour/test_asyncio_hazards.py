"""Traps of asyncio and anyio: swallowed cancels, forgotten tasks, siblings that write on, other loops, busy waits."""

from __future__ import annotations

import ast
import asyncio
import gc
import threading
from collections.abc import Container, Iterator, MutableMapping
from contextvars import Context, ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache_async
from hicache_async import CacheConfig, CpuDevice, HiCache, StopToken
from hicache_async._progress import LayerFence
from hicache_async.abc import CopyPlan
from hicache_async.errors import StoreUnavailable
from hicache_async.memory.host import HostArena
from hicache_async.stores import FileStore, MemoryStore
from hicache_async.stores import _lane as lane
from hicache_async.stores._files.directory import ObjectDirectory
from hicache_async.testing.faults import FlakyStore, HeldStore, StoreWrapper
from hicache_async.testing.manual import ManualThreads
from tests.flows.rig import Opener, make_kv, page_hashes, tokens, turns

SOURCES = sorted(Path(hicache_async.__file__).parent.rglob("*.py"))

# Cancels that are swallowed


def swallowed_cancels(source: str) -> Iterator[int]:
    """Yield the lines of coroutines at which a cancel may end: caught, and not raised again."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.AsyncFunctionDef):
            for node in own_nodes(function):
                if isinstance(node, ast.Try) and any(_awaits(each) for each in node.body):
                    yield from _swallowing_handlers(node)
                elif isinstance(node, ast.Call) and _name(node.func) == "suppress":
                    yield from (node.lineno for each in node.args if _name(each) in CANCELS)


CANCELS = ("CancelledError", "BaseException")


def own_nodes(function: ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield what runs in a coroutine itself, not in functions that it defines."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            waiting += ast.iter_child_nodes(node)


def _awaits(statement: ast.stmt) -> bool:
    return any(isinstance(each, ast.Await | ast.AsyncFor | ast.AsyncWith) for each in ast.walk(statement))


def _swallowing_handlers(node: ast.Try) -> Iterator[int]:
    for handler in node.handlers:
        types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if any(each is None or _name(each) in CANCELS for each in types):
            if not isinstance(handler.body[-1], ast.Raise):
                yield handler.lineno
            return  # a later handler sees no cancel any more


def _name(node: ast.AST | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


SNIPPETS = {
    "try:\n  await x\n except BaseException:\n  pass": True,
    "try:\n  await x\n except:\n  pass": True,
    "try:\n  await x\n except (OSError, asyncio.CancelledError):\n  return 0": True,
    "with contextlib.suppress(CancelledError):\n  await x": True,
    "try:\n  await x\n except asyncio.CancelledError:\n  clean()\n  raise": False,
    "try:\n  await x\n except CancelledError:\n  raise\n except BaseException:\n  pass": False,
    "try:\n  await x\n except Exception:\n  pass": False,
    "try:\n  x()\n except BaseException:\n  pass\n await x": False,
    "def thread():\n  try:\n   x()\n  except BaseException:\n   pass": False,
}


@pytest.mark.parametrize("body", SNIPPETS, ids=range(len(SNIPPETS)))
def test_the_search_for_swallowed_cancels_finds_them(body: str) -> None:
    """Caught by name, by a base class, bare or suppressed; what raises it again, or cannot meet one, may."""
    assert bool(list(swallowed_cancels(f"async def f():\n {body}\n"))) is SNIPPETS[body]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_no_coroutine_swallows_a_cancel(path: Path) -> None:
    """Whoever catches a CancelledError in a coroutine raises it again, and nothing is shielded."""
    source = path.read_text()
    assert not list(swallowed_cancels(source)), path
    shields = [
        node for node in ast.walk(ast.parse(source)) if _name(node) == "shield" and hasattr(node, "attr")
    ]
    assert not shields, path


# Tasks that are forgotten


async def until_stored(rig: Any, letters: str) -> None:
    """Collect garbage in every turn until a prompt is stored."""
    for _ in range(200):
        gc.collect(0)
        await asyncio.sleep(0)
        if await rig.check_stored(letters) == len(letters):
            return
    raise AssertionError("nobody wrote it")


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_work_that_nobody_holds_goes_on(open_cache: Opener) -> None:
    """A write that the caller has forgotten is not collected with its garbage, and ends."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store)
    await rig.serve("abcd", prefetch=False)
    await store.arrived(1, "write")
    gc.collect()
    store.open()
    await until_stored(rig, "abcd")


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_an_error_of_work_that_nobody_waits_for_is_told(
    open_cache: Opener, logs: list[MutableMapping[str, Any]]
) -> None:
    """What a forgotten write raises is counted and logged once, and no task ends unheard."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    rig = await open_cache(store=FlakyStore(MemoryStore(), "write", error=ValueError("no more room")))
    await rig.serve("abcd", prefetch=False)
    await rig.cache.admin.flush()
    gc.collect()
    await turns()
    assert rig.counters["store_faults"] == 1
    assert sum("no more room" in str(entry.get("fault")) for entry in logs) == 1
    assert not told


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_close_waits_for_work_that_nobody_waits_for(open_cache: Opener) -> None:
    """A write that was begun in the background is over when the cache is closed."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store)
    await rig.serve("abcd", prefetch=False)
    await store.arrived(1, "write")
    closing = asyncio.create_task(rig.cache.close())
    await turns()
    assert not closing.done()
    store.open()
    await closing
    assert await rig.check_stored("abcd") == 4


# Siblings of what has failed


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_nothing_of_a_failed_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four pages the first cannot be written: the call returns when the thread of the second has left it."""
    monkeypatch.setitem(lane.JOB_LIMITS, lane.Kind.WRITE, lane.JobLimit(1, 1))
    store = FileStore(tmp_path, num_lanes=3)
    second_runs, second_may_end = threading.Event(), threading.Event()
    running: list[str] = []

    def write(key: str, payload: memoryview, spared: Container[str]) -> None:
        running.append(key)
        try:
            if key == "0":
                second_runs.wait(10)
                raise OSError("cannot be written")
            second_runs.set()
            second_may_end.wait(10)
        finally:
            running.remove(key)

    monkeypatch.setattr(store._directory, "write", write)
    pages = [memoryview(bytes(100)) for _ in range(4)]
    writing = asyncio.create_task(store.write([str(number) for number in range(4)], pages))
    while running != ["1"]:  # noqa: ASYNC110 - until the first has failed
        await asyncio.sleep(0)
    await turns()
    assert not writing.done()
    second_may_end.set()
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        await writing
    assert running == []
    await store.aclose()


# Loops


def test_a_cache_is_made_before_there_is_a_loop(tmp_path: Path) -> None:
    """Store, device and opening can be made outside of any loop; the loop on which they are used first is theirs."""
    kv = make_kv(16)
    store, device = FileStore(tmp_path), CpuDevice()
    config = CacheConfig(
        page_size=4, host_bytes=16 * kv.page_nbytes, host_reserve_bytes=0, allow_small_host=True
    )
    opening = HiCache.open(config, kv=kv, device=device, store=store)

    async def serve() -> int:
        async with opening as cache:
            with cache.match_prefix("request", tokens("abcd")) as lease:
                await lease.prefetch()
                return (await lease.load()).tokens

    assert asyncio.run(serve()) == 0
    with pytest.raises(hicache_async.ClosedError, match="entered before"):
        asyncio.run(serve())
    asyncio.run(device.aclose())


# What a request knows of itself

request_name: ContextVar[str] = ContextVar("request_name", default="nobody")


class Asking(StoreWrapper):
    """A store that looks who asks, in its coroutine and in a thread of its own."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.seen: dict[str, set[str]] = {}

    async def around(self, verb: str, call: Any, stop: StopToken) -> Any:
        seen = self.seen.setdefault(verb, set())
        seen |= {request_name.get(), await asyncio.to_thread(request_name.get)}
        return await call()


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_a_store_is_called_in_the_context_of_the_request(open_cache: Opener) -> None:
    """A context variable of a request, such as its id for logs, is what a store sees when it looks and reads for it."""
    store = Asking()
    rig = await open_cache(store=store)
    await rig.put_in_store("abcd")
    request_name.set("somebody")
    with rig.lease("abcd") as lease:
        assert (await lease.prefetch()).fetched_tokens == 16
    assert store.seen["count_prefix"] == store.seen["read"] == {"somebody"}


class AskingWho(StoreWrapper):
    """A store that notes in whose context it is asked for which page."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.seen: set[tuple[str, str, str]] = set()

    async def count_prefix(self, keys: Any) -> int:
        self.seen.add((request_name.get(), "count_prefix", keys[0]))
        return await super().count_prefix(keys)

    async def read(self, keys: Any, into: Any, stop: StopToken) -> int:
        self.seen.add((request_name.get(), "read", keys[0]))
        return await super().read(keys, into, stop)


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_requests_that_queue_keep_their_contexts_apart(open_cache: Opener) -> None:
    """With one slot for many, each call of the store is made in the context of the request that it is for."""
    store = AskingWho()
    rig = await open_cache(store=store, max_prefetches_in_flight=1)
    prompts = {name: name * 3 for name in "abcdef"}
    for letters in prompts.values():
        await rig.put_in_store(letters)

    async def request(name: str) -> None:
        request_name.set(name)
        with rig.lease(prompts[name], name) as lease:
            await lease.prefetch()

    await asyncio.gather(*(request(name) for name in prompts))
    first_keys = {name: rig.ctx.keys.keys(page_hashes(prompts[name]))[0] for name in prompts}
    expected = {(name, verb, first_keys[name]) for name in prompts for verb in ("count_prefix", "read")}
    assert store.seen == expected


class LateStore(AskingWho):
    """A store whose thread tells that it is over after the coroutine has returned, in a context of its own."""

    async def read(self, keys: Any, into: Any, stop: StopToken) -> int:
        stop.job_started()
        Context().run(asyncio.get_running_loop().call_later, 0.001, stop.job_ended)
        return await super().read(keys, into, stop)


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_later_batches_are_read_in_the_context_of_the_request(open_cache: Opener) -> None:
    """Whoever told last that the batch before was over."""
    store = LateStore()
    rig = await open_cache(store=store, store_batch_pages=1)
    await rig.put_in_store("abcd")
    request_name.set("somebody")
    with rig.lease("abcd") as lease:
        assert (await lease.prefetch()).fetched_tokens == 16
    assert {name for name, verb, _ in store.seen} == {"somebody"}
    assert sum(verb == "read" for _, verb, _ in store.seen) == 4


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_threads_of_the_file_store_see_the_context_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a thread logs for a call carries what the caller knows, also where calls share a job."""
    seen: set[tuple[str, str]] = set()
    read = ObjectDirectory.read

    def noted(self: ObjectDirectory, key: str, into: memoryview) -> Any:
        seen.add((request_name.get(), key))
        return read(self, key, into)

    monkeypatch.setattr(ObjectDirectory, "read", noted)
    store = FileStore(tmp_path)
    keys = ["one", "two", "three"]
    await store.write(keys, [memoryview(b"x" * 64)] * 3)

    async def reader(key: str) -> int:
        request_name.set(f"reader of {key}")
        return await store.read([key], [memoryview(bytearray(64))], StopToken())

    assert await asyncio.gather(*(reader(key) for key in keys)) == [1, 1, 1]
    assert seen == {(f"reader of {key}", key) for key in keys}
    await store.aclose()


# Waiting without asking


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_who_waits_for_a_copy_does_not_ask_whether_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a copy takes, 64 tasks that wait for it look at most once each before it ends, and all wake then."""
    num_looks = 0
    passed = LayerFence.passed

    def counted(fence: LayerFence) -> bool:
        nonlocal num_looks
        num_looks += 1
        return passed(fence)

    monkeypatch.setattr(LayerFence, "passed", counted)
    threads, kv = ManualThreads(), make_kv(4)
    device = CpuDevice(threads)
    buffer = await asyncio.wait_for(_host_buffer(device, threads, 4 * kv.page_nbytes), 10)
    arena = HostArena(kv, hicache_async.HostLayout.PAGE_FIRST, 4, buffer)
    pages = np.arange(4)
    *_, last = device.host_to_device(CopyPlan(kv, arena, pages, pages), ())
    waiting = [asyncio.create_task(device.wait(last)) for _ in range(64)]
    await turns(500)
    assert num_looks <= 64
    assert not any(task.done() for task in waiting)
    threads.run_all()
    await asyncio.gather(*waiting)
    await device.aclose()


async def _host_buffer(device: CpuDevice, threads: ManualThreads, nbytes: int) -> Any:
    making = asyncio.create_task(device.host_buffer(nbytes))
    while not threads.pending:  # noqa: ASYNC110 - until its job is there
        await asyncio.sleep(0)
    threads.run_all()
    return await making
