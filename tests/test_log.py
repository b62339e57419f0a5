"""Logging: a closed list of events, and silence below warnings until the application asks for more."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hicache_async
from hicache_async._log import EVENTS

SCRIPT = """
import structlog
from hicache_async._log import logger
if {configured}:
    structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
logger.debug("prefetch.settled")
logger.info("cache.opened")
logger.warning("store.fault")
"""


def logged_events() -> set[str]:
    """Return the first argument of every call of the logger in the package."""
    found: set[str] = set()
    for path in Path(hicache_async.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "logger":
                assert isinstance(node.args[0], ast.Constant), path
                found.add(str(node.args[0].value))
    return found


def output(configured: bool) -> str:
    """Return what a process prints that logs at three levels."""
    script = SCRIPT.format(configured=configured)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_events_are_those_of_the_list() -> None:
    """The library logs the events of its list and no others."""
    assert logged_events() == EVENTS


def test_an_unconfigured_application_hears_warnings_only() -> None:
    """Without structlog.configure nothing below a warning is printed."""
    lines = output(configured=False)
    assert "store.fault" in lines
    assert "cache.opened" not in lines and "prefetch.settled" not in lines


def test_a_configured_application_hears_what_it_asked_for() -> None:
    """With structlog.configure its levels and processors hold."""
    lines = output(configured=True)
    assert all(event in lines for event in ("store.fault", "cache.opened", "prefetch.settled"))
