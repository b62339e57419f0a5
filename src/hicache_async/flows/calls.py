"""Calls of a store: with a deadline, and with an answer that is checked before it is believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._hop import Hop
from .._log import logger
from ..abc import Store
from ..types import StopToken
from .context import Context, settled_within


def checked_count(ctx: Context, hop: Hop[int], limit: int) -> int:
    """Return how many pages a settled store call vouches for: 0 .. ``limit``; nonsense and faults count 0."""
    value = hop.result
    if hop.error is None and isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit:
        return value
    ctx.metrics.counters["store_faults"] += 1
    fault = repr(hop.error) if hop.error is not None else f"answered {value!r}, expected 0 .. {limit}"
    logger.warning("store.fault", call=hop.name, fault=fault)
    return 0


def is_fault(hop: Hop[int], limit: int) -> bool:
    """Return whether a settled store call raised or answered nonsense."""
    value = hop.result
    return hop.error is not None or not isinstance(value, int) or not 0 <= value <= limit


async def count_prefix(ctx: Context, store: Store, keys: Sequence[str]) -> int | None:
    """Ask how many keys exist from the first on; None: the store failed or did not answer in time.

    Cancellation: the question is left to end by itself; it owns nothing.
    """
    hop = start_store_call(ctx, "count_prefix", lambda stop: store.count_prefix(keys), lambda hop: None)
    if not await settled_within(ctx.clock, hop.settled, ctx.config.store_timeout_s):
        ctx.metrics.counters["store_timeouts"] += 1
        logger.warning(
            "store.fault", call="count_prefix", fault=f"no answer in {ctx.config.store_timeout_s} s"
        )
        if hop.task is not None:
            hop.task.cancel()
        return None
    count = checked_count(ctx, hop, len(keys))
    return None if is_fault(hop, len(keys)) else count


def start_store_call(
    ctx: Context, name: str, call: Callable[[StopToken], object], on_settled: Callable[[Hop[int]], None]
) -> Hop[int]:
    """Start a store's coroutine as a hop. Whatever it raises, or is, ends in ``hop.error``."""

    async def run(stop: StopToken) -> int:
        return await call(stop)  # type: ignore[misc, no-any-return] # checked when it has settled

    ctx.metrics.counters[f"store_calls_{name}"] += 1
    return ctx.hops.start_call(f"store.{name}", run, on_settled)
