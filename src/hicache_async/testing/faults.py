"""Stores that misbehave in one way each, around any other store; they can be stacked.

    store = FlakyStore(HeldStore(MemoryStore()), "read", at={2}, error=OSError("gone"))

``verb`` is "count_prefix", "read" or "write" throughout; calls are numbered from 1. They are calls for pages:
what a cache notes of itself in its store, the manifest of its namespace, goes through untouched and uncounted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import cast

from ..abc import Store
from ..core.manifest import is_manifest_key
from ..types import StopToken

VERBS = ("count_prefix", "read", "write")


class StoreWrapper:
    """Pass every call on to ``inner``; a fault overrides :meth:`around`.

    Attributes:
        calls: how often each verb was called.

    Ownership: closing the wrapper closes ``inner``.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        """Do one call, or something else."""
        return await call()

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return what the inner store counts, unless the fault strikes."""
        self.calls["count_prefix"] += 1
        return await self.around("count_prefix", lambda: self.inner.count_prefix(keys), StopToken())

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Read from the inner store, unless the fault strikes."""
        if keys and all(map(is_manifest_key, keys)):
            return await self.inner.read(keys, into, stop)
        self.calls["read"] += 1
        return await self.around("read", lambda: self.inner.read(keys, into, stop), stop)

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Write to the inner store, unless the fault strikes."""
        if keys and all(map(is_manifest_key, keys)):
            return await self.inner.write(keys, pages)
        self.calls["write"] += 1
        return await self.around("write", lambda: self.inner.write(keys, pages), StopToken())

    async def aclose(self) -> None:
        """Close the inner store."""
        await self.inner.aclose()


class HeldStore(StoreWrapper):
    """Hold calls at the door until the test lets them in.

    Args:
        held: verbs to hold from the start.

    Attributes:
        waiting: the verbs of the calls at the door, oldest first.
    """

    def __init__(self, inner: Store, held: Collection[str] = VERBS) -> None:
        super().__init__(inner)
        self._held = set(held)
        self._door: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._arrived = asyncio.Condition()

    @property
    def waiting(self) -> tuple[str, ...]:
        """The verbs of the calls at the door, oldest first."""
        return tuple(verb for verb, gate in self._door if not gate.done())

    def hold(self, *verbs: str) -> None:
        """Hold calls of these verbs from now on."""
        self._held.update(verbs)

    def let_in(self, verb: str, num_calls: int = 1) -> None:
        """Let the oldest waiting calls of ``verb`` in; later ones wait as before."""
        for gate in [gate for waiting, gate in self._door if waiting == verb and not gate.done()][:num_calls]:
            gate.set_result(None)

    def open(self, *verbs: str) -> None:
        """Hold these verbs (none given: any) no more, and let in who waits."""
        for verb in verbs or VERBS:
            self._held.discard(verb)
            self.let_in(verb, len(self._door))

    async def arrived(self, num_calls: int = 1, verb: str | None = None) -> None:
        """Return when ``num_calls`` calls (of ``verb``) wait at the door."""
        async with self._arrived:
            await self._arrived.wait_for(
                lambda: sum(verb in (None, waiting) for waiting in self.waiting) >= num_calls
            )

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        """Wait at the door, then call. A cancelled call leaves the door and never happens."""
        if verb in self._held:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            place = (verb, gate)
            self._door.append(place)
            stop.job_started()
            try:
                async with self._arrived:
                    self._arrived.notify_all()
                await gate
            finally:
                self._door.remove(place)
                stop.job_ended()
        return await call()


class FlakyStore(StoreWrapper):
    """Raise instead of doing the k-th calls of one verb.

    Args:
        at: the numbers of the calls that fail; None: every call.
        error: what is raised.
    """

    def __init__(
        self, inner: Store, verb: str, *, error: Exception, at: Collection[int] | None = (1,)
    ) -> None:
        super().__init__(inner)
        self._verb = verb
        self._error = error
        self._at = at

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        """Raise where it is time to, else call."""
        if verb == self._verb and (self._at is None or self.calls[verb] in self._at):
            raise self._error
        return await call()


class LyingStore(StoreWrapper):
    """Do what is asked, and return nonsense.

    Args:
        answers: verb to what is returned: -1, 10**6, None, 1.5, or a function of the true count.
    """

    def __init__(self, inner: Store, answers: Mapping[str, object]) -> None:
        super().__init__(inner)
        self._answers = dict(answers)

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        """Call, then lie."""
        count = await call()
        answer = self._answers.get(verb, count)
        return cast("int", answer(count) if callable(answer) else answer)


class HangingStore(StoreWrapper):
    """Never come back from one verb until released, as a thread in a dead file system does.

    A cancel ends the coroutine, and its buffers stay busy all the same; ``stop`` is not looked at.

    Args:
        verb: which calls hang.
        after_calls: how many go well before that.
    """

    def __init__(self, inner: Store, verb: str, *, after_calls: int = 0) -> None:
        super().__init__(inner)
        self._verb = verb
        self._after_calls = after_calls
        self._hanging: list[tuple[asyncio.Future[None], StopToken]] = []
        self._hung = asyncio.Condition()
        self._released = False

    @property
    def num_hanging(self) -> int:
        """How many calls hang, whether or not anybody still waits for them."""
        return len(self._hanging)

    async def hung(self, num_calls: int = 1) -> None:
        """Return when ``num_calls`` calls hang."""
        async with self._hung:
            await self._hung.wait_for(lambda: self.num_hanging >= num_calls)

    def release(self) -> None:
        """Let every hanging call go on, and hang no more."""
        self._released = True
        hanging, self._hanging = self._hanging, []
        for gate, stop in hanging:
            if not gate.done():
                gate.set_result(None)
            stop.job_ended()

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        """Hang, or call."""
        if verb == self._verb and not self._released and self.calls[verb] > self._after_calls:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            stop.job_started()
            self._hanging.append((gate, stop))
            async with self._hung:
                self._hung.notify_all()
            await gate
        return await call()
