"""Write down, when a write-back cache closes: what has not left the device yet goes to the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..core.node import Node
from .context import Context
from .offload import Offloads


async def write_down(
    ctx: Context, offloads: Offloads, back_up: Callable[[Node], None], drain: Callable[[], Awaitable[None]]
) -> None:
    """Store every prefix that is cached here, what was used last first; returns when no more can be stored.

    The host takes as much at once as it has pages, and gives up what is stored for what comes next.

    Args:
        back_up: sees to it that the host's part of a path is stored.
        drain: returns when what was asked for has been done.
    Cancellation: what is stored stays stored, each prefix from its first page on.
    """
    if not ctx.is_write_back or not ctx.keys.writes:
        return
    left = -1
    while ctx.store is not None and ctx.reuses:
        ends = _unstored_ends(ctx)
        before, left = left, sum(node.num_pages for node in _unstored(ctx, ends))
        if not ends or left == before:
            return
        for end in sorted(ends, key=lambda end: end.used, reverse=True):
            if end.attached and offloads.offload_path(end, min_hits=0, only_unstored=True):
                back_up(end)
        await drain()


def _unstored_ends(ctx: Context) -> list[Node]:
    leaves = (node for root in ctx.tree.roots.values() for node in root.subtree() if not node.children)
    return [leaf for leaf in leaves if _unstored(ctx, [leaf])]


def _unstored(ctx: Context, ends: list[Node]) -> set[Node]:
    epoch = ctx.tree.store_epoch
    return {node for end in ends for node in end.path() if node.stored != epoch}
