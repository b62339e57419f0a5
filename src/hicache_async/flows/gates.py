"""Gates: the reasons of this process not to prefetch, or to fetch less than the store has.

They are asked by the prefetch itself and by whoever explains it, so the two can never differ.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, cast

from ..abc import Store, SupportsRefusal
from ..config import CacheConfig, PrefetchOverflow
from ..types import Stop
from .context import Context


class Share(NamedTuple):
    """How many pages of a hit are fetched, and what keeps the rest away; COMPLETE: nothing does."""

    num_pages: int
    stop: Stop


def refusal_to_ask(ctx: Context, missing_pages: int) -> Stop | None:
    """Return why the store is not asked for ``missing_pages``; None: it is."""
    if missing_pages <= 0:
        return Stop.NOTHING_MISSING
    if ctx.store is None or not ctx.reuses:
        return Stop.DETACHED
    if not is_worth_fetching(ctx.config, missing_pages):
        return Stop.BELOW_THRESHOLD
    return refusal_of(ctx.store)


def refusal_of(store: Store) -> Stop | None:
    """Return why ``store`` says that it is no use calling it now; None: it may be called. Costs no hop."""
    if not issubclass(type(store), SupportsRefusal):  # isinstance costs 50 us on a protocol, this 1
        return None
    try:
        refusal = cast("SupportsRefusal", store).refusal()
    except Exception:  # noqa: BLE001 - of a store made by others, which fails no request
        return Stop.STORE_FAULT
    return refusal if refusal is None or isinstance(refusal, Stop) else Stop.STORE_FAULT


async def ask_in_batches(
    ask: Callable[[int, int], Awaitable[int | Stop]], start_page: int, end_page: int, batch_pages: int
) -> tuple[int, Stop | None]:
    """Ask for pages ``[start_page, end_page)`` batch by batch, up to the first that comes back short.

    Args:
        ask: returns how many pages of its range exist from the first on, or why it cannot tell.
    Returns: how many exist, and what ended the search before the first page that does not; None: nothing.
    """
    page = start_page
    while page < end_page:
        batch_end = min(page + batch_pages, end_page)
        answer = await ask(page, batch_end)
        if isinstance(answer, Stop):
            return page - start_page, answer
        page += answer
        if page < batch_end:
            return page - start_page, None if page > start_page else Stop.NOT_STORED
    return page - start_page, None


def is_worth_fetching(config: CacheConfig, num_pages: int) -> bool:
    """Return whether so many pages are worth the trouble: ``prefetch_threshold_tokens``, and one at least."""
    return num_pages > 0 and num_pages * config.page_size >= config.prefetch_threshold_tokens


def quota_pages(ctx: Context) -> int:
    """Return how many host pages prefetches may still take; less than 0: they hold more than their share."""
    return int(ctx.config.prefetch_capacity_fraction * ctx.host_pool.capacity) - ctx.prefetch_pages


def share_of(config: CacheConfig, wanted_pages: int, *, quota_pages: int, room_pages: int) -> Share:
    """Return how much of a hit is fetched.

    Args:
        quota_pages: as :func:`quota_pages`.
        room_pages: host pages that can be had, if need be by evicting others.
    """
    allowed = min(wanted_pages, quota_pages)
    if allowed <= 0:
        return Share(0, Stop.RATE_LIMITED)
    available = min(allowed, room_pages)
    if available == wanted_pages:
        return Share(wanted_pages, Stop.COMPLETE)
    stop = Stop.NO_HOST_ROOM if available < allowed else Stop.RATE_LIMITED
    refused = available <= 0 or config.prefetch_overflow is PrefetchOverflow.REFUSE
    return Share(0 if refused else available, stop)


def outcome(hit_pages: int, cut: Stop | None, ended: Stop | None) -> Stop:
    """Return why a prefetch ended where it did.

    Args:
        hit_pages: what the store has, as agreed.
        cut: what made the hit shorter than asked for, other than the store's not having more.
        ended: how fetching the hit ended; None: it was not worth fetching.
    """
    if ended is not None and ended is not Stop.COMPLETE:
        return ended
    if cut is not None:
        return cut
    if ended is not None:
        return Stop.COMPLETE
    return Stop.BELOW_THRESHOLD if hit_pages else Stop.NOT_STORED
