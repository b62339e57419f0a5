"""The shipped exams, on our own stores, devices and loops: passed in part, and whole in the long form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hicache_async.device.cpu import CpuDevice
from hicache_async.stores import FileStore, MemoryStore
from hicache_async.testing.cancel_exam import MOODS, check_cancellation
from hicache_async.testing.fault_exam import check_store_faults
from hicache_async.testing.virtual_device import VirtualDevice
from tests.testing.loops import LOOPS, each_loop

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def memory(directory: Path) -> MemoryStore:
    """Return a store that needs no directory."""
    return MemoryStore()


PARTS: dict[str, tuple[Callable[[Path], Any], Callable[[], Any], dict[str, object]]] = {
    "memory": (memory, VirtualDevice, {}),
    "files": (FileStore, CpuDevice, {}),
    "one lane": (
        partial(FileStore, num_lanes=1, existence_ttl_s=0),
        CpuDevice,
        {"host_layout": "layer_first"},
    ),
    "write back": (memory, VirtualDevice, {"write_policy": "write_back"}),
    "chunks": (
        memory,
        VirtualDevice,
        {"key_scheme": "unified", "layer_partition": 1, "token_group": 2, "host_layout": "head_grouped"},
    ),
}
"""Stores, devices and options; what is layered by layer first goes through threads on its way to a store."""

each_kind = pytest.mark.parametrize("kind", PARTS)


@pytest.mark.parametrize(
    ("loop", "kind", "moods", "only", "share"),
    [
        ("asyncio", "memory", MOODS, "", 0.02),
        ("asyncio", "files", ["ready"], "", 0.01),
        ("debug", "memory", ["late"], "PrefixLease", 0.1),
        ("debug", "files", ["ready"], "Store", 0.2),
        ("uvloop", "memory", ["held"], "Admin", 0.1),
        ("uvloop", "files", ["ready"], "PrefixLease", 0.02),
        ("asyncio", "one lane", ["late"], "PrefixLease.prefetch", 0.1),
        ("asyncio", "write back", ["held"], "PrefixLease.load", 0.1),
        ("asyncio", "chunks", ["late"], "PrefixLease.prefetch", 0.1),
    ],
)
def test_a_share_of_all_cancels(
    loop: str, kind: str, moods: Collection[str], only: str, share: float
) -> None:
    """Whatever is cancelled, wherever and however: the caller hears, nothing is left, the next request is served."""
    make_store, make_device, options = PARTS[kind]
    report = check_cancellation(
        make_store,
        make_device,
        loop_factory=LOOPS[loop],
        options=options,
        only=only,
        moods=moods,
        share=share,
    )
    assert report.coroutines > 25 or only
    assert report.cancels > report.situations / 2


@pytest.mark.parametrize(
    ("loop", "kind", "share"),
    [
        ("asyncio", "memory", 0.05),
        ("asyncio", "files", 0.02),
        ("asyncio", "one lane", 0.02),
        ("asyncio", "write back", 0.02),
        ("asyncio", "chunks", 0.02),
        ("debug", "memory", 0.02),
        ("uvloop", "files", 0.02),
    ],
)
def test_a_share_of_all_faults(loop: str, kind: str, share: float) -> None:
    """Whichever call of the store goes wrong, and however: no request fails, every byte is right, nothing is left."""
    make_store, make_device, options = PARTS[kind]
    report = check_store_faults(
        make_store, make_device, loop_factory=LOOPS[loop], options=options, share=share
    )
    assert report.calls > 25


COROUTINES = [
    "HiCache",
    "EventReader",
    "PrefixLease",
    "Prefetch",
    "Loading",
    "Admin",
    "Store",
    "Device",
    "Ranks",
]


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("only", COROUTINES)
@each_kind
@each_loop
def test_all_cancels(loop_factory: LoopFactory, kind: str, only: str) -> None:
    """The same, at every await of every coroutine, in every way."""
    make_store, make_device, options = PARTS[kind]
    report = check_cancellation(
        make_store, make_device, loop_factory=loop_factory, options=options, only=only
    )
    assert report.coroutines


@pytest.mark.stress
@pytest.mark.timeout(1800)
@each_kind
@each_loop
def test_all_faults(loop_factory: LoopFactory, kind: str) -> None:
    """The same, for every fault of every call."""
    make_store, make_device, options = PARTS[kind]
    report = check_store_faults(make_store, make_device, loop_factory=loop_factory, options=options)
    assert report.faults > 25 * report.calls / 2
