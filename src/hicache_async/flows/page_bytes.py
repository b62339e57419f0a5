"""How a store sees host pages: the arena's own memory, or scratch pages where the layout scatters a page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from .._hop import Hop
from ..types import Pages, StopToken
from .context import Context

SCRATCH_PAGES = 16
"""Pages of one store call when each needs a scratch page: bounds the memory beside the arena."""


def batch_pages(ctx: Context) -> int:
    """Return how many pages one store call carries."""
    limit = ctx.config.store_batch_pages
    return limit if ctx.arena.is_direct else min(limit, SCRATCH_PAGES)


def empty_views(ctx: Context, pages: Pages) -> Sequence[memoryview]:
    """Return one buffer per page for a store to fill; :func:`publish` makes them the pages' bytes."""
    if ctx.arena.is_direct:
        return [ctx.arena.page_bytes(page) for page in pages.tolist()]
    return ctx.arena.scratch(len(pages))


async def filled_views(ctx: Context, pages: Pages, stop: StopToken) -> Sequence[memoryview]:
    """Return the bytes of ``pages`` for a store to read: not copied, or copied once in a thread."""
    views = empty_views(ctx, pages)
    if not ctx.arena.is_direct:
        await _in_thread(ctx, "gather", lambda: ctx.arena.gather(pages, views), stop)
    return views


async def publish(ctx: Context, pages: Pages, views: Sequence[memoryview], stop: StopToken) -> None:
    """Make filled views the bytes of ``pages``."""
    if not ctx.arena.is_direct and len(pages):
        await _in_thread(ctx, "scatter", lambda: ctx.arena.scatter(pages, views), stop)


async def _in_thread(ctx: Context, name: str, fn: Callable[[], None], stop: StopToken) -> None:
    # The token keeps the pages with their hop while the thread runs, whatever happens to this task.
    def ended(hop: Hop[None]) -> None:
        stop.job_ended()

    hop = ctx.hops.start_job(name, ctx.threads, fn, ended)
    stop.job_started()
    await asyncio.wait((hop.settled,))
    if hop.error is not None:
        raise hop.error
