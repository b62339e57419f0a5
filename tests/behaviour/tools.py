"""What the behaviour tests share, beside the rig of the flows."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

from hicache_async import CapacityError, PrefixLease
from hicache_async.core.node import Node
from tests.flows.rig import PAGE_TOKENS, Rig

AT_EVICTION: dict[str, object] = {"write_policy": "write_back", "write_back_low_water": 0.0}
"""Nothing is copied ahead: under write_back each page stays where it is until it has to go."""


def tree_nodes(rig: Rig) -> Iterator[Node]:
    """Yield every node that a match can reach."""
    for root in rig.ctx.tree.roots.values():
        yield from (node for node in root.subtree() if node is not root)


def num_pins(rig: Rig) -> int:
    """Return how many pins and anchors there are on all of the tree."""
    counts = [(node.device.pins, node.host.pins, node.anchors) for node in tree_nodes(rig)]
    assert all(count >= 0 for each in counts for count in each)
    return sum(map(sum, counts))


async def holding_pages(rig: Rig, num_pages: int) -> PrefixLease:
    """Return a request that holds so many device pages of its own; where there is no room it raises and holds none."""
    lease = rig.lease("#" * num_pages)
    await lease.load(total_tokens=0)
    try:
        lease.allocate_nowait(num_pages * PAGE_TOKENS)
    except CapacityError:
        lease.release()
        raise
    return lease


class FillingDisk:
    """The calls of the operating system that write, one of which finds the disk full.

    Args:
        failing: its number, from 1; 0: none.
    """

    def __init__(self, failing: int) -> None:
        self.failing = failing
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name not in ("open", "writev", "close", "rename", "mkdir"):
            return call

        def counted(*args: object, **options: object) -> object:
            self.num_calls += 1
            failed = self.num_calls == self.failing
            result = call(*args, **options) if name == "close" or not failed else None
            if failed:
                raise OSError(errno.ENOSPC, "no space left on device")
            return result

        return counted
