"""Fixtures of the runner tests: one runner on each kind of loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hicache_async import LoopRunner
from tests.flows.conftest import logs
from tests.runner.tools import open_toy

__all__ = ["logs"]


@pytest.fixture(params=["asyncio", "debug", "uvloop"])
def uvloop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Say which loop a runner shall take; one of them is asyncio's in debug mode."""
    if request.param == "debug":
        monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    return bool(request.param == "uvloop")


@pytest.fixture
def runner(uvloop: bool) -> Iterator[LoopRunner]:
    """Give a runner that is open; in the end its books balance and its thread is gone."""
    before = set(threading.enumerate())
    with LoopRunner(open_toy, uvloop=uvloop) as runner:
        yield runner
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("hicache"):
            thread.join(30)  # it was told to end
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("hicache")]
