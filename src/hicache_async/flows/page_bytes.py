"""How a store sees host pages: the arena's own memory, or scratch pages where the layout keeps another order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .._hop import Hop
from ..types import Pages, StopToken
from .context import Context

SCRATCH_PAGES = 16
"""Pages of one store call when each needs a scratch page: bounds the memory beside the arena."""


class PageBuffers(NamedTuple):
    """The bytes of host pages, in the order of stored objects.

    Attributes:
        pages: one buffer for each page.
        chunks: the same memory as a store sees it: one view for each object of each page, page by page.
    """

    pages: Sequence[memoryview]
    chunks: Sequence[memoryview]


def batch_pages(ctx: Context) -> int:
    """Return how many pages one store call carries."""
    limit = ctx.config.store_batch_pages
    return limit if ctx.arena.is_direct else min(limit, SCRATCH_PAGES)


def empty_buffers(ctx: Context, pages: Pages) -> PageBuffers:
    """Return buffers of ``pages`` for a store to fill; :func:`publish` makes them the pages' bytes."""
    arena, keys = ctx.arena, ctx.keys
    direct = arena.is_direct
    buffers = list(map(arena.page_bytes, pages.tolist())) if direct else arena.scratch(len(pages))
    if keys.num_chunks == 1:
        return PageBuffers(buffers, buffers)
    spans = keys.spans(arena.page_nbytes)
    return PageBuffers(buffers, [buffer[span] for buffer in buffers for span in spans])


async def filled_buffers(ctx: Context, pages: Pages, stop: StopToken) -> PageBuffers:
    """Return the bytes of ``pages`` for a store to read: not copied, or copied once in a thread."""
    buffers = empty_buffers(ctx, pages)
    if not ctx.arena.is_direct:
        await _in_thread(ctx, "gather", lambda: ctx.arena.gather(pages, buffers.pages), stop)
    return buffers


async def publish(ctx: Context, pages: Pages, buffers: PageBuffers, stop: StopToken) -> None:
    """Make the first buffers, which a store has filled, the bytes of ``pages``."""
    if not ctx.arena.is_direct and len(pages):
        filled = buffers.pages[: len(pages)]
        await _in_thread(ctx, "scatter", lambda: ctx.arena.scatter(pages, filled), stop)


async def _in_thread(ctx: Context, name: str, fn: Callable[[], None], stop: StopToken) -> None:
    # The token keeps the pages with their hop while the thread runs, whatever happens to this task.
    def ended(hop: Hop[None]) -> None:
        stop.job_ended()

    hop = ctx.hops.start_job(name, ctx.threads, fn, ended)
    stop.job_started()
    await asyncio.wait((hop.settled,))
    if hop.error is not None:
        raise hop.error
