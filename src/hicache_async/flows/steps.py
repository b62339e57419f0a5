"""Steps: which loads enter which step of the engine, and what it may allocate, the same on every rank.

A load that every rank has agreed upon has not returned on every rank at the same moment, and a step that
one rank runs with it and another without it would never end. So a load is voted for together with the
number of the step that comes next on this rank, and what is agreed is the latest of these numbers. Votes
are counted in the order cast, and a step is agreed by the votes of all ranks for it: therefore all votes
for a load that enters at step k come before the votes for k, its result comes before the result of k, and
at the end of ``begin(k)`` every rank holds the same loads with numbers up to k.

The numbers count down in a vote, so that MIN is the latest one and 0 is nobody's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .allocate import DeviceRoom
from .context import Context, consensus_error, settled_within

NEVER = 1 << 62
"""A step that no engine reaches; step numbers are voted for as their distance to it."""

RETRIES_PER_TIMEOUT = 3
"""How often in ``consensus_timeout_s`` what a mute rank has spoiled is voted for again."""


@dataclass(frozen=True, slots=True)
class _Entry:
    step: int
    on_enter: Callable[[], None]


class Steps:
    """Give out loads and pages step by step.

    Attributes:
        number: of the step that was begun last; the first one is 1.
    """

    def __init__(self, ctx: Context, device_room: DeviceRoom) -> None:
        self._ctx = ctx
        self._device_room = device_room
        self.number = 0
        self._is_open = False
        """Whether the last step was begun and its result has not been seen: its caller was cancelled."""
        self._granted = 0
        self._heard_of_loss = False
        self._entering: dict[object, _Entry] = {}
        """Loads that have returned, in the order agreed."""
        self._undecided: dict[object, asyncio.Task[None]] = {}

    def vote(self) -> int:
        """Return what a load that is voted for now says about its step."""
        return NEVER - (self.number + 1)

    def returned(self, load: object, agreed: int, ticket: bytes, on_enter: Callable[[], None]) -> None:
        """Let a load that has returned here enter at the agreed step.

        Args:
            agreed: what came of :meth:`vote`; 0: a mute rank spoiled the ticket, so ask again for the step.
            ticket: of the load.
            on_enter: called as it enters, in the same order on every rank.
        """
        if agreed:
            self._entering[load] = _Entry(NEVER - agreed, on_enter)
        else:
            task = self._ctx.spawn(self._decide(load, ticket, on_enter), "step-of-load")
            if not task.done():
                self._undecided[load] = task

    def forget(self, load: object) -> None:
        """Give out a load no more: its request has gone."""
        self._entering.pop(load, None)
        if (task := self._undecided.pop(load, None)) is not None:
            task.cancel()

    async def _decide(self, load: object, ticket: bytes, on_enter: Callable[[], None]) -> None:
        agreed = await insist(self._ctx, again(ticket), lambda: (self.vote(),))
        step = self.number if agreed is None else NEVER - agreed[0]
        self._entering[load] = _Entry(step, on_enter)
        self._undecided.pop(load, None)

    async def begin(self, num_pages: int) -> tuple[int, list[object]]:
        """Begin the next step: return the pages that every rank grants, and the loads that enter.

        Raises: ConsensusError: a rank was lost; once, by the first step that ends after that.
        Cancellation: the next call gets what this one would have got.
        """
        ctx = self._ctx
        if not self._is_open:
            self._granted = self._device_room.grant_step(num_pages)
            self.number += 1
            self._is_open = True
        if ctx.ranks_lost is None:
            agreed = await insist(
                ctx, b"step" + self.number.to_bytes(12, "little"), lambda: (1, self._granted)
            )
            if agreed is not None:
                self._granted = agreed[1]
        self._is_open = False
        self._device_room.trim_step(self._granted)
        if ctx.ranks_lost is not None and not self._heard_of_loss:
            self._heard_of_loss = True
            raise consensus_error(ctx.ranks_lost)
        everything = ctx.ranks_lost is not None
        entered = [load for load, entry in self._entering.items() if everything or entry.step <= self.number]
        for load in entered:
            self._entering.pop(load).on_enter()
        return self._granted, entered


def again(ticket: bytes) -> bytes:
    """Return the ticket under which all ranks ask again."""
    return hashlib.sha256(b"again" + ticket).digest()[:16]


async def insist(ctx: Context, name: bytes, vote: Callable[[], Sequence[int]]) -> Sequence[int] | None:
    """Agree on something that no rank votes zeros for: again and again while a mute rank spoils it.

    Every rank sees the same results, so all ask again, under the next ticket. None: a rank was lost.
    """
    ticket = name
    while ctx.ranks_lost is None:
        agreed = await ctx.agree(ticket, vote())
        if agreed is None or any(agreed):
            return agreed
        ticket = again(ticket)
        never: asyncio.Future[None] = ctx.loop.create_future()
        await settled_within(ctx.clock, never, ctx.config.consensus_timeout_s / RETRIES_PER_TIMEOUT)
    return None
