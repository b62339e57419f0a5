"""Leaks: what was left behind is found and named, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_async._threads import DaemonThreads
from hicache_async.stores._temp import TempFiles
from hicache_async.testing.leaks import Leak, LeakChecks, LeakError, LeakWatch, thread_jobs

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

AT_ONCE = LeakChecks(grace_s=0.0)
PATIENT = LeakChecks(grace_s=math.inf)


async def lingering(event: asyncio.Event) -> None:
    """Wait for what a test sets at its end."""
    await event.wait()


def running_job(is_running: threading.Event, may_end: threading.Event) -> None:
    """Be the job of a thread until told to end."""
    is_running.set()
    may_end.wait()


@contextlib.contextmanager
def busy_thread() -> Iterator[DaemonThreads]:
    """Keep one thread of the library in a job."""
    threads = DaemonThreads(1, "hicache-busy")
    is_running, may_end = threading.Event(), threading.Event()
    job = threads.submit(running_job, is_running, may_end)
    is_running.wait()
    try:
        yield threads
    finally:
        may_end.set()
        job.result()
        threads.shutdown()


@contextlib.contextmanager
def open_descriptor(path: Path) -> Iterator[int]:
    """Open a file, and close it in the end."""
    number = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        yield number
    finally:
        os.close(number)


async def test_nothing_left_is_no_leak_and_takes_no_time(tmp_path: Path) -> None:
    """Where nothing was left a watch returns at once, however patient it is."""
    watch = LeakWatch(PATIENT, [tmp_path])
    assert await watch.settled() == []
    await watch.check()


async def test_a_task_is_named_with_the_line_where_it_waits() -> None:
    """A live task is a leak until it ends: the message has its name and the line where it waits."""
    watch, event = LeakWatch(AT_ONCE), asyncio.Event()
    task = asyncio.create_task(lingering(event), name="the stray one")
    await asyncio.sleep(0)
    with pytest.raises(
        LeakError, match=r"^left behind: task: .*the stray one.* waits at .* in Event.wait$"
    ) as caught:
        await watch.check()
    assert "lingering() running at" in str(caught.value)
    assert ("created at" in str(caught.value)) == asyncio.get_running_loop().get_debug()
    assert [leak.kind for leak in caught.value.leaks] == ["task"]
    event.set()
    await task
    await watch.check()


async def test_tasks_of_before_and_the_caller_are_none() -> None:
    """What ran before the watch was made is not counted, nor is the task that asks."""
    event = asyncio.Event()
    before = asyncio.create_task(lingering(event))
    watch = LeakWatch(AT_ONCE)
    asking = asyncio.create_task(watch.settled())
    assert await asking == []
    event.set()
    await before


async def test_what_ends_within_the_grace_is_none() -> None:
    """A task that was cancelled in this turn is no leak; one that ends a little later is none to the patient."""
    event = asyncio.Event()
    hasty, patient = LeakWatch(AT_ONCE), LeakWatch(PATIENT)
    cancelled = asyncio.create_task(lingering(event))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await hasty.settled() == []
    ending = asyncio.create_task(lingering(event))
    looks: list[bool] = []

    def end_at_the_second_look() -> list[Leak]:
        looks.append(ending.done())
        if len(looks) == 2:
            event.set()
        return []

    patient.add_check(end_at_the_second_look)
    await patient.check()
    assert looks[:2] == [False, False]
    assert looks[-1]


async def test_a_job_in_a_thread_is_named_and_an_idle_thread_is_none() -> None:
    """A thread of the library is a leak while it runs a job: the message says which, and where it is in that."""
    watch = LeakWatch(AT_ONCE)
    with busy_thread() as threads:
        with pytest.raises(LeakError, match="thread job: hicache-busy-1 runs running_job, now at .* in "):
            await watch.check()
        assert await LeakWatch(AT_ONCE).settled() == []  # it ran before
    threads = DaemonThreads(1, "hicache-idle")
    threads.submit(int).result()
    await LeakWatch(PATIENT).check()
    assert await watch.settled() == []
    assert not [thread for thread in thread_jobs() if thread.name.startswith("hicache-idle")]
    threads.shutdown()


async def test_a_descriptor_is_named_by_what_it_is(tmp_path: Path) -> None:
    """An open file is named by its path and a socket by its address, until they are closed."""
    watch = LeakWatch(AT_ONCE)
    with open_descriptor(tmp_path / "objects"), socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with pytest.raises(LeakError) as caught:
            await watch.check()
    assert [leak.kind for leak in caught.value.leaks] == ["descriptor", "descriptor"]
    assert f"is open: {tmp_path}/objects" in str(caught.value)
    assert f"at {address}" in str(caught.value)
    await watch.check()


async def test_a_descriptor_that_changed_hands_is_one(tmp_path: Path) -> None:
    """A number that leads to another file than before is a leak; one whose file was removed meanwhile is none."""
    with open_descriptor(tmp_path / "old") as number:
        watch = LeakWatch(AT_ONCE)
        (tmp_path / "old").unlink()
        assert await watch.settled() == []
        with open_descriptor(tmp_path / "new") as other:
            os.dup2(other, number)
        assert [leak.what for leak in await watch.settled()] == [f"{number} is open: {tmp_path}/new"]


async def test_what_a_loop_wakes_up_by_is_none() -> None:
    """Another event loop that was made meanwhile is none of the descriptors that count."""
    watch = LeakWatch(AT_ONCE)
    loop = asyncio.new_event_loop()
    try:
        assert await watch.settled() == []
    finally:
        loop.close()


async def test_files_under_construction_are_named(tmp_path: Path) -> None:
    """Files named *.tmp, and those that a store of this process builds, are leaks; those of before are none."""
    (tmp_path / "before.tmp").touch()
    watch = LeakWatch(AT_ONCE, [tmp_path / "absent", tmp_path])
    (tmp_path / "objects" / "deep").mkdir(parents=True)
    mine = Path(TempFiles(str(tmp_path / "objects")).new())
    other = mine.with_name(mine.name.replace(f".{os.getpid()}.", ".4194304."))
    for path in (tmp_path / "objects" / "deep" / "half.tmp", mine, other, tmp_path / "objects" / "page.kv"):
        path.write_bytes(b"x" * 7)
    found = [leak.what for leak in await watch.settled()]
    assert sorted(found) == sorted(
        [f"{tmp_path}/objects/deep/half.tmp of 7 bytes", f"{mine} of 7 bytes"],
    )


async def test_a_directory_can_be_added(tmp_path: Path) -> None:
    """A directory is watched from when it was added on, and nothing of it is counted twice."""
    watch = LeakWatch(AT_ONCE)
    (tmp_path / "before.tmp").touch()
    watch.add_directory(tmp_path)
    (tmp_path / "after.tmp").touch()
    watch.add_directory(tmp_path)
    assert [leak.what for leak in await watch.settled()] == [f"{tmp_path}/after.tmp of 0 bytes"]


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("tasks", "task"),
        ("threads", "thread job"),
        ("descriptors", "descriptor"),
        ("temp_files", "temporary file"),
    ],
)
async def test_each_check_can_be_switched_off(tmp_path: Path, option: str, kind: str) -> None:
    """What is not looked for is not found, and the rest is."""
    watch = LeakWatch(LeakChecks(grace_s=0.0, **{option: False}), [tmp_path])
    event = asyncio.Event()
    task = asyncio.create_task(lingering(event))
    with busy_thread(), open_descriptor(tmp_path / "half.tmp"):
        kinds = [leak.kind for leak in await watch.settled()]
    event.set()
    await task
    assert set(kinds) == {"task", "thread job", "descriptor", "temporary file"} - {kind}


async def test_own_checks_count_too() -> None:
    """What a check of one's own finds is told with the rest, all of it in one message."""
    watch = LeakWatch(AT_ONCE)
    watch.add_check(lambda: [Leak("engine", "slot 3 is taken"), Leak("engine", "slot 4 is taken")])
    with pytest.raises(
        LeakError, match="^left behind: engine: slot 3 is taken\n  and engine: slot 4 is taken$"
    ):
        await watch.check()
