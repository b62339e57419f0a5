"""Calls of a store: with a deadline, and with an answer that is checked before it is believed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from .._hop import Hop
from .._log import logger
from ..types import StopToken
from .context import Context


def answered_count(hop: Hop[int], limit: int) -> int | None:
    """Return how many pages a settled store call vouches for; None: it raised, or gave no count in 0 .. ``limit``."""
    value = hop.result
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return value if hop.error is None and is_count and 0 <= value <= limit else None  # type: ignore[operator]


def checked_count(ctx: Context, hop: Hop[int], limit: int) -> int | None:
    """As :func:`answered_count`, and report a fault."""
    count = answered_count(hop, limit)
    if count is None:
        report_fault(ctx, hop.name, fault_of(hop, limit))
    return count


def report_fault(ctx: Context, call: str, fault: str) -> None:
    """Count and log what went wrong with a call of the store."""
    ctx.metrics.counters["store_faults"] += 1
    logger.warning("store.fault", call=call, fault=fault)


def fault_of(hop: Hop[int], limit: int) -> str:
    """Say what is wrong with the answer of a settled store call."""
    return repr(hop.error) if hop.error is not None else f"answered {hop.result!r}, expected 0 .. {limit}"


def plain_count(value: object) -> object:
    """Return a count of whatever integer type as int, and anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def page_count(answer: object, num_pages: int, num_keys: int) -> object:
    """Turn a store's count of objects into one of whole pages; what is no such count stays what it is, and none.

    Args:
        answer: what a call about ``num_keys`` objects returned, which are all that ``num_pages`` pages have.
    """
    count = plain_count(answer)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= num_keys:
        return count
    return count * num_pages // num_keys if num_keys else count


def start_store_call(
    ctx: Context,
    name: str,
    call: Callable[[StopToken], object],
    on_settled: Callable[[Hop[int]], None],
    *,
    priority: int = 0,
) -> Hop[int]:
    """Start a store's coroutine as a hop. Whatever it raises, or is, ends in ``hop.error``."""
    ctx.metrics.counters[f"store_calls_{name}"] += 1
    return ctx.hops.start_call(f"store.{name}", partial(_answer_of, call), on_settled, priority=priority)


async def _answer_of(call: Callable[[StopToken], object], stop: StopToken) -> int:
    count = await call(stop)  # type: ignore[misc] # whatever it is; checked when it has settled
    return plain_count(count)  # type: ignore[return-value]
