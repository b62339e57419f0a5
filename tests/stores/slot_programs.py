"""What the tests of shm and mmap share: opening one of either kind, its accounts, and other processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hicache_async
from hicache_async.stores._slots.index import SlotIndex
from hicache_async.stores._slots.store import SlotStore
from hicache_async.stores.mmap import MmapStore
from hicache_async.stores.shm import ShmStore

KINDS = ("shm", "mmap")
SLOT_BYTES = 8192
NUM_SLOTS = 40
MAX_BYTES = 6 * 4096 + NUM_SLOTS * (SLOT_BYTES + 512)


def open_slots(kind: str, directory: Path | str, **options: Any) -> SlotStore:
    """Open the segment of ``directory``, of 40 slots if it is not there; None leaves an option out."""
    options = {"max_bytes": MAX_BYTES, "slot_bytes": SLOT_BYTES, "num_lanes": 2} | options
    if kind == "shm":
        return ShmStore("kv", directory=directory, **options)
    return MmapStore(Path(directory) / "hicache-kv", **options)


def index_of(store: SlotStore) -> SlotIndex:
    """Return the index of a store that is in use."""
    assert store._slots is not None
    return store._slots.index


def descriptors_of(path: str) -> int:
    """Return how many descriptors this process has of one file."""
    directory = "/proc/self/fd"
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries]
    count = 0
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            count += os.readlink(f"{directory}/{name}") == path
    return count


async def check_accounts(store: SlotStore, *, writing: int = 0) -> None:
    """Check that every slot is in one state, after a sweep, and that no more are being written than said."""
    await store.sweep()
    index = index_of(store)
    table = index._table
    assert len(index.free) + len(index.slots) + len(index.writing) == table.num_slots
    assert not index.damaged
    assert len(index.writing) == writing
    assert {ready.key: slot for slot, ready in index._ready.items()} == index.slots


PRELUDE = """
import asyncio, itertools, os, random, signal, sys, time, types
package, tests, kind, directory, number = sys.argv[1:6]
number = int(number)
sys.path.append(tests)
sys.modules["hicache_async"] = types.ModuleType("hicache_async")  # the stores alone: they need no torch
sys.modules["hicache_async"].__path__ = [package]
from hicache_async.errors import ConfigError, StoreUnavailable, WrongLoopError
from hicache_async.stores._slots.segment import Segment
from hicache_async.stores._slots.table import SlotTable
from hicache_async.types import StopToken
from tests.stores.pages import page_of, read, write
from tests.stores.slot_programs import check_accounts, index_of, open_slots
assert "torch" not in sys.modules

"""


def start(
    program: str, kind: str, directory: Path, number: int = 0, wrapper: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start a Python program that has the stores, ``kind``, ``directory`` and ``number`` at hand."""
    package = str(Path(hicache_async.__file__).parent)
    tests = str(Path(__file__).parents[2])
    python = [*wrapper, sys.executable, "-W", "error", "-c", PRELUDE + program]
    command = [*python, package, tests, kind, str(directory), str(number)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def hear(process: subprocess.Popen[str], line: str) -> None:
    """Wait until a program says ``line``."""
    assert process.stdout
    assert process.stdout.readline() == line + "\n"


def tell(process: subprocess.Popen[str], line: str = "go") -> None:
    """Say ``line`` to a program that reads it."""
    assert process.stdin
    process.stdin.write(line + "\n")
    process.stdin.flush()


def finish(process: subprocess.Popen[str]) -> str:
    """Return the output of a program that ends well."""
    with process:
        output, _ = process.communicate(timeout=50)
    assert process.returncode == 0
    return output
