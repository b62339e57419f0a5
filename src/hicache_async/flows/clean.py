"""Clean, under write_back: copy what the device will evict next to the host ahead of need, so that evicting frees."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from ..core.node import Node
from ..types import Tier
from .context import Context
from .offload import Offloads


class Cleaner:
    """Keeps a share of the device's pages free, or on the host already.

    It runs where nobody waits for pages: after a commit or a release. A request that needs room then
    frees clean pages, and no copy stands between it and its pages. Nothing is copied while enough pages are
    free: cold is what would be evicted next, not what is merely idle.
    """

    def __init__(self, ctx: Context, offloads: Offloads) -> None:
        self._ctx = ctx
        self._offloads = offloads
        self._low_water_pages = min(
            int(ctx.config.write_back_low_water * ctx.device_pool.capacity),
            ctx.host_pool.capacity // 2,  # beyond that one copy would push out another
        )

    def run(self) -> None:
        """Copy the coldest pages that are not on the host, up to the mark."""
        ctx = self._ctx
        if not ctx.is_write_back or not ctx.reuses:
            return
        ahead = ctx.device_pool.available(fenced=True) + self._offloads.pages_ahead
        missing = self._low_water_pages - ahead
        if missing <= 0:
            return
        dirty: list[Node] = []
        with closing(self._coldest()) as coldest:
            for node in coldest:
                missing -= node.num_pages
                if node.host.pages is None:
                    dirty.append(node)
                if missing <= 0:
                    break
        if missing < 0 and dirty and dirty[-1] is node:
            ctx.tree.split(node, -missing)  # of the last one only the tail would be evicted
        self._offloads.offload_nodes(dirty)

    def _coldest(self) -> Generator[Node]:
        # The order of eviction: when a leaf has gone, the node above may be next.
        queue = self._ctx.tree.queues[Tier.DEVICE]
        for leaf in queue.coldest():
            yield leaf
            above, key = leaf.parent, queue.key(leaf)
            while above is not None and above.parent is not None and _stands_alone(above):
                if key < queue.key(above):
                    break
                yield above
                above = above.parent


def _stands_alone(node: Node) -> bool:
    return node.device.children == 1 and not node.device.pins and node.device.is_ready()
