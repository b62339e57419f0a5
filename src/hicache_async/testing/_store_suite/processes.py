"""Two processes with one store: they see each other's objects, write at once, and one may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence

from ...abc import SupportsDelete
from .checks import check
from .exam import Exam
from .origin import Origin
from .pages import expect, page_keys
from .worker import Errand


class _Process:
    """Another process with the store open."""

    def __init__(self, exam: Exam) -> None:
        candidate = exam.candidate
        errand = Errand(Origin.of(candidate.open), str(exam.directory), candidate.small, candidate.lossy)
        # No pipe, which would fill up and hold it; closed in end().
        self._told = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._told,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._send(errand.encode())

    async def opened(self) -> None:
        """Return when it has opened the store."""
        await self.answer()

    async def do(self, verb: str, keys: Sequence[str], *sizes: int) -> int:
        """Let it do one call; returns its answer."""
        self.begin(verb, keys, *sizes)
        return await self.answer()

    def begin(self, verb: str, keys: Sequence[str], *sizes: int) -> None:
        """Let it begin one call."""
        self._send(json.dumps({"verb": verb, "keys": list(keys), "sizes": sizes}))

    def kill(self) -> None:
        """Kill it, as the machine's memory killer does."""
        self._process.kill()
        self._process.wait()

    async def end(self) -> None:
        """Let it close the store and end."""
        with self._told, self._process:
            await asyncio.to_thread(_end, self._process)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    async def answer(self) -> int:
        """Return the answer to the call that was begun. Raises: AssertionError: it raised, or the process ended."""
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if not line:
            self._told.seek(0)
            raise AssertionError(
                f"another process, which had the store open, ended: {self._told.read()[-2000:]}"
            )
        answer = json.loads(line)
        expect("error" not in answer, f"in another process: {answer.get('error')}")
        return answer["answer"]  # type: ignore[no-any-return]


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()


@contextlib.asynccontextmanager
async def _processes(exam: Exam, number: int) -> AsyncIterator[list[_Process]]:
    processes = [_Process(exam) for _ in range(number)]
    try:
        for process in processes:
            await process.opened()
        yield processes
    finally:
        for process in processes:
            await process.end()


@check("keeps", "shared", "processes")
async def processes_see_each_other(exam: Exam) -> None:
    """What one process stores another reads, right and at once; what it deletes another does not serve."""
    keys, large = page_keys(8), exam.candidate.large
    async with _processes(exam, 1) as (process,):
        await exam.store.write_all(keys[:4], large)
        expect(
            await process.do("read", keys, large) == 4, "another process does not read what was stored here"
        )
        expect(
            await process.do("write", keys, large) == 8, "another process cannot add to what was stored here"
        )
        await exam.store.read_all(keys, large)
        if isinstance(exam.store.inner, SupportsDelete):
            expect(
                await process.do("delete", keys[:2]) == 2,
                "another process cannot delete what was stored here",
            )
            expect(
                await exam.store.read(keys[:1], large) == 0, "what another process has deleted is read here"
            )
            await exam.store.read_all(keys[2:], large)


@check("keeps", "shared", "processes")
async def processes_write_the_same_keys_at_once(exam: Exam) -> None:
    """Processes that write the same keys at once, in different orders, are told that all is stored, and it is."""
    large = exam.candidate.large
    async with _processes(exam, 1) as (process,):
        for number in range(3 * exam.candidate.rounds):
            keys = page_keys(40, f"round {number}")
            theirs, _ = await asyncio.gather(process.do("write", keys[::-1]), exam.store.write_all(keys))
            expect(theirs == 40, f"another process stored {theirs} of 40 pages that were written here, too")
            await exam.store.read_all(keys)
            expect(
                await process.do("read", keys) == 40, "another process does not read what both have stored"
            )
            one = page_keys(1, f"large {number}")
            await asyncio.gather(process.do("write", one, large), exam.store.write_all(one, large))
            await exam.store.read_all(one, large)


@check("keeps", "shared", "processes")
async def a_killed_process_leaves_nothing_half_done(exam: Exam) -> None:
    """Of what a process was writing when it was killed each object is whole or absent, and can be written again."""
    large = exam.candidate.large
    num_keys = min(64, exam.candidate.batch_nbytes // large)
    for number in range(exam.candidate.rounds):
        keys = page_keys(num_keys, f"round {number}")
        async with _processes(exam, 1) as (process,):
            await process.do("write", keys[:1], large)
            process.begin("write", keys[1:], large)
            writing = asyncio.create_task(process.answer())
            # Nothing else tells how far a process has come.
            while not writing.done() and not await exam.store.read(  # noqa: ASYNC110
                [keys[1 + number % 9]], large
            ):
                await asyncio.sleep(0.0005)
            if writing.done():
                expect(await writing == num_keys - 1, "another process did not store all that it wrote")
            process.kill()
            await asyncio.gather(writing, return_exceptions=True)  # it says that the process ended
        await _check_whole_or_absent(exam, keys, large)


async def _check_whole_or_absent(exam: Exam, keys: list[str], nbytes: int) -> None:
    afterwards = await exam.open()
    for store in (exam.store, afterwards):
        for key in keys:
            await store.read([key], nbytes)  # checks every byte
        await store.read_all(keys[:1], nbytes)
        await store.write_all(keys, nbytes)
        await store.read_all(keys, nbytes)
    await exam.close(afterwards)
