"""What the step-cancel exam examines: a public coroutine, in a situation in which it has to wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..lease import PrefixLease
from ._exam_engine import ExamEngine
from ._pauses import Work

PROMPT = "abcdef"
"""The prompt of most situations; four of its pages are stored where the store matters."""

STORED = PROMPT[:4]


@dataclass(slots=True, kw_only=True)
class Situation:
    """A call that is about to be made.

    Attributes:
        work: makes it.
        end: ends what it waits for, where the store and the device do not do so by themselves.
        leases: to be released when it is over.
        clean_up: closes what the call has opened, if it has.
        raises: what the call may raise when it is not cancelled.
        closes, closes_store: whether it closes the cache, or its store.
    """

    work: Work
    end: Callable[[], object] = lambda: None
    leases: Sequence[PrefixLease] = ()
    clean_up: Callable[[], Awaitable[object]] | None = None
    raises: tuple[type[Exception], ...] = ()
    closes: bool = False
    closes_store: bool = False


Prepare: TypeAlias = Callable[[ExamEngine], Awaitable[Situation]]


@dataclass(frozen=True, slots=True)
class Subject:
    """One public coroutine in one situation.

    Attributes:
        coroutine: its qualified name; several situations may have the same.
        situation: what is special about this one.
        asks_store: whether the store's mood matters to it.
    """

    coroutine: str
    situation: str
    prepare: Prepare = field(repr=False)
    asks_store: bool = False

    def __str__(self) -> str:
        return f"{self.coroutine} ({self.situation})"


async def about_to_commit(engine: ExamEngine) -> PrefixLease:
    """Return a request that has computed :data:`PROMPT` and committed nothing."""
    lease = engine.lease(PROMPT)
    await engine.forward(lease, await lease.load())
    return lease


async def on_host(engine: ExamEngine, letters: str) -> PrefixLease:
    """Return a request whose pages, all but the last, a prefetch has brought to the host."""
    await engine.put(letters)
    lease = engine.lease(letters + "x")
    await lease.prefetch()
    return lease
