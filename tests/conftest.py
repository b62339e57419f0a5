"""What every test module may use: the choice of event loops.

A module that marks its tests ``every_loop`` runs each of them on three loops.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest
import uvloop


class DebugLoop(asyncio.SelectorEventLoop):
    """A loop in debug mode, whatever the runner says."""

    def set_debug(self, enabled: bool) -> None:
        super().set_debug(True)


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "debug": DebugLoop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_configure() -> None:
    """Hear Ctrl-C, which a shell lets the commands that it runs in the background ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Say which loops an async test runs on."""
    if item.get_closest_marker("every_loop"):
        return LOOPS
    return {"asyncio": LOOPS["asyncio"]}
