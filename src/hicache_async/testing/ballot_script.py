"""Scripts for votes alone: tickets that every rank brings in an order of its own, late, for nothing or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from ..abc import Ranks
from ..errors import ConsensusError
from ._watched_ranks import BallotRecord, WatchedRanks
from .lockstep_script import Pause

NUM_TICKETS = 24
LATE = 60.0
"""Units of time by which a late vote is late."""


class Act(Enum):
    """What one rank does with one ticket."""

    AGREE = auto()
    CAST = auto()
    """Vote, and wait for nothing."""
    GIVE_UP = auto()
    """Vote, wait, and be cancelled."""
    TWICE = auto()
    """Wait twice, with two votes, of which the first counts."""
    LATE = auto()
    ZERO = auto()
    """Vote zeros."""
    SILENT = auto()
    """Never vote."""


_ACTS = (*[Act.AGREE] * 10, Act.CAST, Act.CAST, Act.GIVE_UP, Act.GIVE_UP, Act.TWICE, Act.LATE)


@dataclass(frozen=True, slots=True)
class BallotScript:
    """Tickets and what each rank does with them; all of it follows from the seed.

    Attributes:
        acts: by rank, then by ticket.
    """

    seed: int
    size: int
    acts: tuple[tuple[Act, ...], ...]
    num_values: tuple[int, ...]

    @classmethod
    def random(cls, seed: int, size: int, *, faults: bool = True) -> BallotScript:
        """Return the script of a seed.

        Args:
            faults: whether now and then a rank votes zeros, or never.
        """
        rng = random.Random(f"ballots {seed} {size}")
        columns = []
        for _ in range(NUM_TICKETS):
            column = [rng.choice(_ACTS) for _ in range(size)]
            if faults and rng.random() < 0.15:  # one in seven goes wrong on one rank
                column[rng.randrange(size)] = rng.choice((Act.ZERO, Act.SILENT))
            columns.append(column)
        acts = tuple(zip(*columns, strict=True))
        return cls(seed, size, acts, tuple(rng.randint(1, 3) for _ in range(NUM_TICKETS)))

    def ticket(self, number: int) -> bytes:
        """Return the name of a ticket, the same on every rank."""
        return hashlib.sha256(f"{self.seed} {number}".encode()).digest()[:16]


async def vote_all(script: BallotScript, ranks: Ranks, pause: Pause) -> BallotRecord:
    """Do one rank's part, and return when it has heard of all it waits for."""
    watched = WatchedRanks(ranks)
    rng = random.Random(f"voter {script.seed} {ranks.rank}")
    order = list(range(NUM_TICKETS))
    rng.shuffle(order)
    tasks = []
    for at, number in enumerate(order):
        if at % 4 == 0:
            await pause(rng.choice((0.0, rng.uniform(0, 6))))
        act = script.acts[ranks.rank][number]
        vote = [rng.randint(1, 1 << 40) for _ in range(script.num_values[number])]
        tasks.append(asyncio.create_task(_vote(act, watched, script.ticket(number), vote, pause)))
        if act is Act.GIVE_UP:
            tasks.append(asyncio.create_task(_cancel(tasks[-1], pause, rng.uniform(0, 8))))
    await asyncio.wait(tasks)
    for task in tasks:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ConsensusError):
            raise error
    return watched.ballots()


async def _vote(act: Act, ranks: WatchedRanks, ticket: bytes, vote: Sequence[int], pause: Pause) -> None:
    if act is Act.LATE:
        await pause(LATE)
    if act is Act.ZERO:
        vote = [0] * len(vote)
    if act is Act.CAST:
        ranks.cast(ticket, vote)
    elif act is not Act.SILENT:
        await ranks.agree(ticket, vote)
        if act is Act.TWICE:
            await ranks.agree(ticket, [each + 1 for each in vote])


async def _cancel(task: asyncio.Task[None], pause: Pause, moment: float) -> None:
    await pause(moment)
    task.cancel()
