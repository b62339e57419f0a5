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

from .._fence import resolve
from ..errors import ConsensusError, LeaseError
from .allocate import DeviceRoom
from .context import Context, consensus_error
from .waiting import end_of

NEVER = 1 << 62
"""A step that no engine reaches; step numbers are voted for as their distance to it."""


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
        """Loads that were agreed, in the order agreed."""
        self._undecided: dict[object, bytes] = {}
        """Loads that were agreed and whose step is still to be agreed on, and the tickets for that."""
        self._returning: dict[object, asyncio.Future[None]] = {}
        """Loads that were agreed and have not returned: their copies are not recorded yet."""

    def vote(self) -> int:
        """Return what a load that is voted for now says about its step."""
        return NEVER - (self.number + 1)

    def agreed(self, load: object, agreed: int, ticket: bytes, on_enter: Callable[[], None]) -> None:
        """Let a load that every rank has agreed upon enter at the agreed step, which waits for :meth:`returned`.

        Args:
            agreed: what came of :meth:`vote`; 0: a mute rank spoiled the ticket, so agree on the step alone.
            ticket: of the load.
            on_enter: called as it enters, in the same order on every rank.
        """
        self._returning[load] = self._ctx.loop.create_future()
        if agreed:
            self._entering[load] = _Entry(NEVER - agreed, on_enter)
        else:
            self._undecided[load] = again(ticket)
            self._ctx.spawn(self._decide(load, again(ticket), on_enter), "step-of-load")

    def returned(self, load: object) -> None:
        """Say that a load returns now, or was cancelled meanwhile; does nothing a second time."""
        if (returning := self._returning.pop(load, None)) is not None:
            resolve(returning)

    def forget(self, load: object) -> None:
        """Give out a load no more: its request has gone."""
        self._entering.pop(load, None)
        self.returned(load)
        if (ticket := self._undecided.pop(load, None)) is not None:
            self._ctx.ranks.cast(ticket, (0,), patient=True)

    async def _decide(self, load: object, ticket: bytes, on_enter: Callable[[], None]) -> None:
        agreed = await self._ctx.agree(ticket, (self.vote(),), patient=True)
        if agreed is not None and not agreed[0]:
            return  # given up elsewhere, or the rank has left whose word this would be
        if self._undecided.pop(load, None) is not None:
            self._entering[load] = _Entry(self.number if agreed is None else NEVER - agreed[0], on_enter)

    def check_loss(self) -> None:
        """Raise ConsensusError when a rank was lost and no step has said so yet."""
        if self._ctx.ranks_lost is not None and not self._heard_of_loss:
            self._heard_of_loss = True
            raise consensus_error(self._ctx.ranks_lost)

    def take_back(self, number: int, loads: Sequence[object]) -> None:
        """Undo the last step, whose result nobody has used: the next call of :meth:`begin` gets it again.

        Raises: LeaseError: step ``number`` is not the last one, or was taken back.
        """
        if number != self.number or self._is_open:
            raise LeaseError(
                f"the grant of step {number} cannot be given back: it is not the last one, {self.number}"
            )
        self._entering = {load: _Entry(self.number, _entered_before) for load in loads} | self._entering
        self._is_open = True

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
            ticket = b"step" + self.number.to_bytes(12, "little")
            agreed = await ctx.agree(ticket, (1, self._granted), patient=True)
            if agreed is None and ctx.ranks_lost is None:
                ctx.check_open()
            elif agreed is not None and not agreed[0]:
                ctx.lose_ranks(ConsensusError("a rank has left its group, and takes part in no further step"))
            elif agreed is not None:
                self._granted = agreed[1]
        while returning := [self._returning[load] for load in self._due() if load in self._returning]:
            await ctx.until(end_of(returning[0]))
        self._is_open = False
        self._device_room.trim_step(self._granted)
        self.check_loss()
        entered = self._due()
        if ctx.ranks_lost is not None:
            self._undecided.clear()
        for load in entered:
            if (entry := self._entering.pop(load, None)) is not None:
                entry.on_enter()
        return self._granted, entered

    def _due(self) -> list[object]:
        if self._ctx.ranks_lost is not None:  # nobody is left to wait for
            return [*self._entering, *self._undecided]
        return [load for load, entry in self._entering.items() if entry.step <= self.number]


def _entered_before() -> None:
    pass


def again(ticket: bytes) -> bytes:
    """Return the ticket under which all ranks agree on what was spoiled."""
    return hashlib.sha256(b"again" + ticket).digest()[:16]
