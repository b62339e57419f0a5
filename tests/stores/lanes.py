"""What the tests of lanes share: calls of any kind, and lanes that the test moves by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hicache_async.stores._lane import Call, Kind, Lanes
from hicache_async.testing.manual import ManualThreads
from hicache_async.types import StopToken
from tests.stores.pages import until

Perform = Callable[[int], str | None]


def nothing(item: int) -> None:
    """Do an item well."""


def call_of(num_items: int, perform: Perform = nothing, kind: Kind = Kind.READ, item_nbytes: int = 1) -> Call:
    return Call(kind, num_items, perform, StopToken(), item_nbytes)


class Rig:
    """Lanes on threads that the test moves by hand."""

    def __init__(self, num_lanes: int = 2) -> None:
        self.threads = ManualThreads()
        self.lanes = Lanes(asyncio.get_running_loop(), self.threads, num_lanes)
        self.performed: list[str] = []

    def start(
        self, name: str, num_items: int, kind: Kind = Kind.READ, item_nbytes: int = 1
    ) -> tuple[asyncio.Task[None], Call]:
        call = call_of(num_items, lambda item: self.performed.append(f"{name}{item}"), kind, item_nbytes)
        return asyncio.create_task(self.lanes.run(call)), call

    async def pending(self, num_jobs: int) -> None:
        await until(lambda: self.threads.pending == num_jobs)

    async def settle(self) -> None:
        """Let the loop do whatever it can do without a thread."""
        for _ in range(20):
            await asyncio.sleep(0)
