"""Programs that tests run in processes of their own, as other users too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hicache_async

PRELUDE = """
import asyncio, os, sys, types
package, tests = sys.argv[1:3]
sys.path.append(tests)
sys.modules["hicache_async"] = types.ModuleType("hicache_async")  # the stores alone: they need no torch
sys.modules["hicache_async"].__path__ = [package]
from structlog.testing import capture_logs
from hicache_async.errors import StoreUnavailable
from hicache_async.stores import FileStore
from tests.stores.pages import files_below, page_of, read, write
assert "torch" not in sys.modules
root, number, options = sys.argv[3], int(sys.argv[4]), eval(sys.argv[5])

"""


def start(program: str, root: Path, number: int = 0, **options: object) -> subprocess.Popen[str]:
    """Start a Python program that has the store, ``root``, ``number`` and ``options`` at hand."""
    package = str(Path(hicache_async.__file__).parent)
    tests = str(Path(__file__).parents[2])
    arguments = [package, tests, str(root), str(number), repr(options)]
    command = [sys.executable, "-W", "error", "-c", PRELUDE + program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """Return the output of a program that ends well."""
    with process:
        output, _ = process.communicate(timeout=50)
    assert process.returncode == 0
    return output
