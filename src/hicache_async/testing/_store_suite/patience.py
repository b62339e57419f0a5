"""How long anything may take that should end by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..leaks import describe_task, live_tasks

T = TypeVar("T")

CASES_PER_CHECK = 4
"""A check whose cases run on loops of their own gives each so many times less than it has itself."""


async def within(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``.

    Raises: AssertionError: it takes longer; names the tasks that wait, and where.
    Cancellation: cancels ``work``, and waits for its end, once as long.
    """
    __tracebackhide__ = True
    others = live_tasks()
    task = asyncio.get_running_loop().create_task(work, name="exam:check")
    try:
        await asyncio.wait((task,), timeout=limit_s)
        if task.done():
            return task.result()
        waiting = "; ".join(map(describe_task, live_tasks() - others))
        raise AssertionError(f"it hangs, or takes longer than {limit_s:g} s: {waiting}")
    finally:
        if task.cancel():
            await asyncio.wait((task,), timeout=limit_s)
