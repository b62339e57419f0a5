"""Groups of ranks in one process, over queues and over real loopback connections, with one set of handles."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

from hicache_async import CacheConfig
from hicache_async.ranks._connection import Connection
from hicache_async.ranks._member import Member
from hicache_async.ranks.hub import HubRanks
from hicache_async.testing.local_ranks import LocalRanks
from hicache_async.testing.manual import ManualClock


def ticket_of(number: int) -> bytes:
    """Return the ticket of a number."""
    return number.to_bytes(16, "big")


async def turns(count: int = 30) -> None:
    """Let everything run that needs neither a clock nor a socket."""
    for _ in range(count):
        await asyncio.sleep(0)


class Shelf:
    """A rendezvous in a dictionary, whose ``get`` blocks until there is something."""

    def __init__(self, patience_s: float = 20.0) -> None:
        self.values: dict[str, bytes] = {}
        self._patience_s = patience_s
        self._filled = threading.Condition()

    def set(self, key: str, value: str) -> None:
        """Keep ``value``."""
        with self._filled:
            self.values[key] = value.encode()
            self._filled.notify_all()

    def get(self, key: str) -> bytes:
        """Return what is kept; raises after a while without anything."""
        with self._filled:
            if not self._filled.wait_for(lambda: key in self.values, self._patience_s):
                raise TimeoutError(f"nothing under {key}")
            return self.values[key]


def config_of(rank: int, size: int, **options: float) -> CacheConfig:
    """Return the config of one rank of a flat group."""
    timeouts = {"consensus_timeout_s": 0.3, "ticket_timeout_s": 5.0, "group_timeout_s": 10.0} | options
    return CacheConfig(tp_rank=rank, tp_size=size, **timeouts)  # type: ignore[arg-type]


@dataclass
class Group:
    """A group, and what a test does to it."""

    ranks: Sequence[Member]
    clock: ManualClock | None = None
    tasks: list[asyncio.Task[Sequence[int]]] = field(default_factory=list)

    def start(self, rank: int, number: int, *vote: int) -> asyncio.Task[Sequence[int]]:
        """Start a caller of agree; it has voted when this returns to the loop once."""
        task = asyncio.get_running_loop().create_task(self._agree(rank, number, vote))
        self.tasks.append(task)
        return task

    async def _agree(self, rank: int, number: int, vote: Sequence[int]) -> Sequence[int]:
        return await self.ranks[rank].agree(ticket_of(number), vote)

    async def agree(self, number: int, *votes: Sequence[int]) -> list[Sequence[int]]:
        """Return what the ranks agree on, one vote each."""
        return await asyncio.gather(*(self.start(rank, number, *vote) for rank, vote in enumerate(votes)))

    def kill(self, rank: int) -> None:
        """End a rank without a goodbye."""
        member = self.ranks[rank]
        if isinstance(member, LocalRanks):
            member.kill()
        else:
            assert isinstance(member, HubRanks)
            for link in member._connections:
                link.abort()

    async def close(self) -> None:
        """Leave on all ranks, and end the callers."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.gather(*(rank.aclose() for rank in reversed(self.ranks)))
        if self.clock is not None:
            await turns()
            assert self.clock.pending == 0


async def local_group(size: int, **timeouts: float) -> Group:
    """Return a group over queues, on a clock of its own."""
    clock = ManualClock()
    return Group(LocalRanks.group(size, clock=clock, **timeouts), clock)


async def hub_group(size: int, **timeouts: float) -> Group:
    """Return a group over loopback connections."""
    shelf = Shelf()
    joins: list[Awaitable[HubRanks]] = [
        HubRanks.join(config_of(rank, size, **timeouts), shelf) for rank in range(size)
    ]
    return Group(await asyncio.gather(*joins))


def connections_of(group: Group) -> list[Connection]:
    """Return both ends of every connection of a group over loopback."""
    return [link for rank in group.ranks if isinstance(rank, HubRanks) for link in rank._connections]
