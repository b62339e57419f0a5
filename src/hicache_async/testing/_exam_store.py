"""The stores of the exams: any store, but each call does what a script says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, cast

from ..abc import Store, SupportsDelete, SupportsListing
from ..errors import StoreUnavailable
from ..types import StopToken
from .faults import StoreWrapper

Call: TypeAlias = Callable[[], Awaitable[Any]]
Behaviour: TypeAlias = Callable[["ScriptedStore", Call, StopToken], Awaitable[Any]]
"""What becomes of one call."""

Script: TypeAlias = Callable[[str, int], Behaviour | None]
"""Verb, and how many calls there were in all with this one, to what becomes of it; None: what is asked."""


class ScriptedStore(StoreWrapper):
    """Do each call as a script says.

    Attributes:
        script: asked at each call.
        num_calls: calls so far, of all verbs.
        num_waiting: calls that wait for :meth:`open`.
    """

    def __init__(self, inner: Store, script: Script = lambda verb, number: None) -> None:
        super().__init__(inner)
        self.script = script
        self.num_calls = 0
        self.num_waiting = 0
        self._is_open = asyncio.Event()

    def open(self) -> None:
        """Let calls that wait go on, and later ones not wait at all."""
        self._is_open.set()

    async def opened(self) -> None:
        """Wait for :meth:`open`."""
        self.num_waiting += 1
        try:
            await self._is_open.wait()
        finally:
            self.num_waiting -= 1

    async def around(self, verb: str, call: Call, stop: StopToken) -> Any:
        """Do what the script says."""
        self.num_calls += 1
        behave = self.script(verb, self.num_calls)
        return await (call() if behave is None else behave(self, call, stop))


class ClearableScriptedStore(ScriptedStore):
    """The same for a store that can list and delete."""

    async def list_keys(self) -> Sequence[str]:
        """List, or what the script says."""
        self.calls["list_keys"] += 1
        inner = cast("SupportsListing", self.inner)
        return cast("Sequence[str]", await self.around("list_keys", inner.list_keys, StopToken()))

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete, or what the script says."""
        self.calls["delete"] += 1
        inner = cast("SupportsDelete", self.inner)
        return cast("int", await self.around("delete", lambda: inner.delete(keys), StopToken()))


def scripted(inner: Store) -> ScriptedStore:
    """Return a scripted store that can do what ``inner`` can."""
    clearable = isinstance(inner, SupportsListing) and isinstance(inner, SupportsDelete)
    return ClearableScriptedStore(inner) if clearable else ScriptedStore(inner)


# What may become of a call


async def waits(store: ScriptedStore, call: Call, stop: StopToken) -> Any:
    """Wait at the door; a call that is cancelled there never happens."""
    stop.job_started()
    try:
        await store.opened()
    finally:
        stop.job_ended()
    return await call()


async def dawdles(store: ScriptedStore, call: Call, stop: StopToken) -> Any:
    """Take a few turns before and after."""
    for _ in range(2):
        await asyncio.sleep(0)
    result = await call()
    await asyncio.sleep(0)
    return result


async def comes_late(store: ScriptedStore, call: Call, stop: StopToken) -> Any:
    """Do it as a thread does: a cancel ends the wait only, and the bytes move later, when the door opens."""

    async def work() -> Any:
        await store.opened()
        return await call()

    stop.job_started()
    working = asyncio.get_running_loop().create_task(work(), name="hicache:exam-thread")
    working.add_done_callback(lambda task: _thread_ended(task, stop))
    await asyncio.wait((working,))
    return working.result()


def _thread_ended(task: asyncio.Task[Any], stop: StopToken) -> None:
    if not task.cancelled():
        task.exception()  # seen: nobody may be waiting any more
    stop.job_ended()


def raises(error: type[BaseException]) -> Behaviour:
    """Raise ``error`` instead of doing anything."""

    async def behave(store: ScriptedStore, call: Call, stop: StopToken) -> Any:
        raise error("the exam's own")

    return behave


def answers(lie: Callable[[Any], object]) -> Behaviour:
    """Do it, and answer something else, made of the truth."""

    async def behave(store: ScriptedStore, call: Call, stop: StopToken) -> Any:
        return lie(await call())

    return behave


fails = raises(StoreUnavailable)


# How a call may go wrong


def _half(truth: Any) -> object:
    return truth // 2 if isinstance(truth, int) else truth[: len(truth) // 2]


def _more(truth: Any) -> object:
    return truth + 1 if isinstance(truth, int) else [*truth, 7, None]


FAULTS: dict[str, Behaviour] = {
    "raises RuntimeError": raises(RuntimeError),
    "raises TimeoutError": raises(TimeoutError),
    "raises OSError": raises(OSError),
    "raises KeyError": raises(KeyError),
    "raises StoreUnavailable": raises(StoreUnavailable),
    "raises a CancelledError of its own": raises(asyncio.CancelledError),
    "answers the half": answers(_half),
    "answers 0": answers(lambda truth: 0),
    "answers -1": answers(lambda truth: -1),
    "answers one more": answers(_more),
    "answers 10**30": answers(lambda truth: 10**30),
    "answers None": answers(lambda truth: None),
    "answers True": answers(lambda truth: True),
    "answers a string": answers(lambda truth: "2"),
    "answers a list": answers(lambda truth: [truth]),
    "answers nan": answers(lambda truth: float("nan")),
    "hangs": comes_late,
}
"""What a call does instead of what is asked. One that hangs does it in the end, when nobody waits any more."""
