"""The event loops that the exams make for themselves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest
import uvloop


class DebugLoop(asyncio.SelectorEventLoop):
    """A loop in debug mode, whatever the runner says."""

    def set_debug(self, enabled: bool) -> None:
        super().set_debug(True)


def eager_loop() -> asyncio.AbstractEventLoop:
    """Return a loop whose tasks run up to their first suspension when they are made."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    return loop


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "debug": DebugLoop,
    "uvloop": uvloop.new_event_loop,
}
if sys.version_info >= (3, 12):
    LOOPS["eager"] = eager_loop

each_loop = pytest.mark.parametrize("loop_factory", LOOPS.values(), ids=LOOPS)
