"""Write down, when a cache closes: what the write policy owes the store and has not brought there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..core.node import Node
from ..core.write_policy import MIN_COMMITS
from .context import Context
from .offload import Offloads


async def write_down(
    ctx: Context, offloads: Offloads, back_up: Callable[[Node], None], drain: Callable[[], Awaitable[None]]
) -> None:
    """Store what the policy wants stored of all that is cached here, what was used last first.

    Returns when no more can be stored. Under write_back that is everything, under the others what was
    committed often enough and missed its copy or its write.

    The host takes as much at once as it has pages, and gives up what is stored for what comes next.

    Args:
        back_up: sees to it that the host's part of a path is stored.
        drain: returns when what was asked for has been done.
    Cancellation: what is stored stays stored, each prefix from its first page on.
    """
    if not ctx.keys.writes:
        return
    min_hits = MIN_COMMITS.get(ctx.config.write_policy, 0)
    left = -1
    while ctx.store is not None and ctx.reuses:
        ends = _unstored_ends(ctx, min_hits)
        before, left = left, sum(node.num_pages for node in _unstored(ctx, ends, min_hits))
        if not ends or left == before:
            return
        for end in sorted(ends, key=lambda end: end.used, reverse=True):
            only_unstored = ctx.is_write_back
            if end.attached and offloads.offload_path(end, min_hits=min_hits, only_unstored=only_unstored):
                back_up(end)
        await drain()


def _unstored_ends(ctx: Context, min_hits: int) -> list[Node]:
    leaves = (node for root in ctx.tree.roots.values() for node in root.subtree() if not node.children)
    return [leaf for leaf in leaves if _unstored(ctx, [leaf], min_hits)]


def _unstored(ctx: Context, ends: list[Node], min_hits: int) -> set[Node]:
    epoch = ctx.tree.store_epoch
    return {node for end in ends for node in end.path() if node.stored != epoch and node.hits >= min_hits}
