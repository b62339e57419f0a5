"""What both sides do to their trees, so that it is the same, as often and as warm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ..harness import Sample, repeated, timed, undone
from .samples import NUM_WARMUPS, Series, report, steady

NODES = (1, 16, 512)
PINNED_NODES = 512
NUM_LEAVES = 2_000
REPEATS = 5
"""Calls in one sample, which is their mean: so few that the slower side is seldom interrupted in one."""
NUM_SAMPLES = 100


class Side(Protocol):
    """One side. The long prompt's tokens are there as its callers have them, made outside the time."""

    def matching(self, num_nodes: int) -> Callable[[], object]:
        """Return what matches the long prompt, all of it cached in a chain of so many nodes."""

    def pinning(self, num_nodes: int) -> Callable[[], object]:
        """Return what pins the last node of such a chain and lets go of it."""

    def leaves(self, num_leaves: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return what evicts one of so many leaves of one page, and what puts a new one in its place."""


def report_tree(side: Side) -> None:
    """Measure the records named on the command line."""
    samples: dict[str, Callable[[], Sample]] = {
        **{f"tree.match.nodes{nodes}": partial(_calling, side.matching, nodes) for nodes in NODES},
        f"tree.pin.nodes{PINNED_NODES}": partial(_calling, side.pinning, PINNED_NODES),
        f"tree.evict1of{NUM_LEAVES}": partial(_evicting, side),
    }
    report({name: partial(_take, make) for name, make in samples.items()})


def _calling(make: Callable[[int], Callable[[], object]], num_nodes: int) -> Sample:
    return timed(make(num_nodes), repeats=REPEATS)


def _evicting(side: Side) -> Sample:
    evict, grow = side.leaves(NUM_LEAVES)

    async def put_in_place() -> None:
        grow()

    return repeated(undone(timed(evict), put_in_place), REPEATS)


def _take(make: Callable[[], Sample]) -> Series:
    async def take() -> Series:
        sample = make()
        return steady([await sample() for _ in range(NUM_WARMUPS + NUM_SAMPLES)])

    return asyncio.run(take())
