"""Forecast: what a fetch would get if it started now, without doing any of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing

from ..core.node import Node
from ..core.tree import PrefixTree
from ..core.walk import Match
from ..types import Residency, Stop, Tier
from .context import Context
from .gates import Share, quota_pages, share_of
from .readiness import awaits_engine


def foresee_fetch(ctx: Context, match: Match, hashes: Sequence[bytes], end_page: int) -> Share:
    """Return what a prefetch that found everything up to ``end_page`` would bring now.

    Args:
        match: where the prompt ends here; looked up without a trace.
        hashes: of the whole pages of the prompt.
    """
    start_page = match.local_pages
    joined = 0
    running = ctx.fetches.get(hashes[start_page])
    if running is not None:
        joined = min(running.num_shared(hashes), end_page - start_page)
        if joined == end_page - start_page or running.stop is not Stop.COMPLETE:
            return Share(joined, running.stop)
    wanted = end_page - start_page - joined
    room = host_room(ctx, match, wanted)
    if room is None:
        return Share(joined, Stop.ANCHOR_NOT_BACKED)
    share = share_of(ctx.config, wanted, quota_pages=quota_pages(ctx), room_pages=room)
    return Share(joined + share.num_pages, share.stop)


def host_room(ctx: Context, match: Match, num_pages: int) -> int | None:
    """Return how many host pages can be had below the end of ``match``, ``num_pages`` or fewer.

    None: under write-through the pages above it are to be brought to the host first, and cannot be.
    """
    path, tail_pages = match.path, match.tail_pages
    lacking = [node for node in path if node.host.pages is None]
    if ctx.is_write_back:
        kept = path[-1] if path and path[-1].host.pages is not None else None
        above_pages = 0
    else:
        kept = next((node for node in reversed(path) if node.host.pages is not None), None)
        above_pages = sum(tail_pages if node is path[-1] else node.num_pages for node in lacking)
        if lacking and (_is_copying_enough(ctx) or any(awaits_engine(node) for node in lacking)):
            return None
    kept_pages = 0 if kept is None else tail_pages if kept is path[-1] else kept.num_pages
    free = ctx.host_pool.available(fenced=False)
    missing = above_pages + num_pages - free
    room = free + (evictable_host_pages(ctx.tree, kept, kept_pages, missing) if missing > 0 else 0)
    return min(num_pages, room - above_pages) if room >= above_pages else None


def _is_copying_enough(ctx: Context) -> bool:
    running = sum(hop.name == "offload" for hop in ctx.hops.live)
    return running >= ctx.config.max_offloads_in_flight


def evictable_host_pages(tree: PrefixTree, kept: Node | None, kept_pages: int, enough: int) -> int:
    """Return how many host pages could be evicted; no more are looked for when there are ``enough``.

    Args:
        kept: a node whose first ``kept_pages`` are to stay, and all above it.
    """
    total = 0
    gone_below: Counter[Node] = Counter()
    with closing(tree.queues[Tier.HOST].coldest()) as leaves:
        for leaf in leaves:
            node: Node | None = leaf
            while node is not None and total < enough and _may_go(node, gone_below[node]):
                if node is kept:
                    total += node.num_pages - kept_pages
                    break
                total += node.num_pages
                node = node.parent
                if node is not None:
                    gone_below[node] += 1
            if total >= enough:
                break
    return total


def _may_go(node: Node, gone_below: int) -> bool:
    copy = node.host
    if node.parent is None or copy.pages is None or copy.pins or not copy.is_ready():
        return False
    return copy.children == gone_below and (node.residency is Residency.BOTH or not node.is_held)
