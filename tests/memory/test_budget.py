"""book_host_pages: how the options become a page count, what is refused, and what pools book together."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from hicache_async._log import EVENTS
from hicache_async.config import CacheConfig
from hicache_async.errors import ConfigError
from hicache_async.memory.budget import (
    HostBooking,
    HostMemoryBudget,
    book_host_pages,
    host_memory_budget,
)
from hicache_async.memory.host_memory import MemoryLimit
from tests.memory.machine import GIB, MIB, V2, Machine

CONFIG = CacheConfig(host_reserve_bytes=GIB)
SHARED = CacheConfig(host_reserve_bytes=0, tp_size=4, host_bytes=128 * MIB)
"""One of four ranks that share a host."""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Give a machine with 64 GiB free and no cgroup limit."""
    return Machine(tmp_path)


def book(config: CacheConfig, *, device_pages: int = 100) -> HostBooking:
    """Book a pool of pages of 1 MiB."""
    return book_host_pages(config, page_nbytes=MIB, device_pages=device_pages)


def pages(machine: Machine, config: CacheConfig) -> int:
    """Return how many pages one pool of its own gets on ``machine``."""
    with host_memory_budget(machine.root):
        return book(config).num_pages


def machine_with(tmp_path: Path, free: int) -> Machine:
    return Machine(tmp_path, available_bytes=free)


# One pool


def test_ratio_counts_device_pages(machine: Machine) -> None:
    """Without host_bytes the pool is a multiple of the device's pages."""
    assert pages(machine, CONFIG) == 200
    assert pages(machine, dataclasses.replace(CONFIG, host_ratio=0.5)) == 50


def test_bytes_override_the_ratio(machine: Machine) -> None:
    """host_bytes is per rank, rounded down to pages, and the ratio no longer counts."""
    config = dataclasses.replace(CONFIG, host_bytes=7 * MIB + 5, host_ratio=50.0)
    assert pages(machine, config) == 7
    assert pages(machine, dataclasses.replace(config, tp_size=8)) == 7


@pytest.mark.parametrize("grid", [{"tp_size": 8}, {"tp_size": 2, "pp_size": 4}, {"ranks_on_host": 8}])
def test_reserve_is_subtracted_before_dividing(tmp_path: Path, grid: dict[str, int]) -> None:
    """With 9 GiB free, 1 GiB kept and 8 ranks on the host each gets 1 GiB, to the byte."""
    machine = machine_with(tmp_path, 9 * GIB)
    config = dataclasses.replace(CONFIG, host_bytes=GIB, **grid)  # type: ignore[arg-type]
    assert pages(machine, config) == 1024
    with pytest.raises(ConfigError, match=f"on each of 8 ranks.*leaves {GIB - 1} for each"):
        pages(machine, dataclasses.replace(config, host_reserve_bytes=GIB + 1))


def test_too_little_names_option_request_and_limit(tmp_path: Path) -> None:
    """The refusal names what was asked for, what limits it, what is kept, and the options to lower."""
    machine = machine_with(tmp_path, 6 * GIB)
    with pytest.raises(ConfigError) as caught:
        pages(machine, dataclasses.replace(CONFIG, host_bytes=5 * GIB, ranks_on_host=2))
    message = str(caught.value)
    for part in (
        f"host_bytes is {5 * GIB}",
        f"within the machine ({tmp_path}/proc/meminfo) {6 * GIB} bytes are free",
        f"host_reserve_bytes keeps {GIB}",
        f"leaves {5 * GIB // 2} for each",
        "lower host_bytes or host_reserve_bytes",
    ):
        assert part in message
    with pytest.raises(ConfigError, match=r"host_ratio is 500\.0.*lower host_ratio"):
        pages(machine, dataclasses.replace(CONFIG, host_ratio=500.0))


def test_the_tightest_limit_counts_and_is_named(tmp_path: Path) -> None:
    """Of the machine and all cgroups the one that leaves least bounds the pool, and the refusal says which."""
    machine = Machine(tmp_path, cgroup="0::/pod/box")
    machine.group("pod/box", limit=9 * GIB, used=0)
    file = machine.group("pod", limit=3 * GIB, used=GIB)
    config = dataclasses.replace(CONFIG, host_bytes=GIB)
    assert pages(machine, config) == 1024
    with pytest.raises(ConfigError) as caught:
        pages(machine, dataclasses.replace(config, host_bytes=GIB + MIB))
    assert f"within {file} {2 * GIB} bytes are free" in str(caught.value)


def test_reserve_above_free_leaves_nothing(tmp_path: Path) -> None:
    """A machine with less free than the reserve leaves 0, not a negative number."""
    with pytest.raises(ConfigError, match="leaves 0 for each"):
        pages(machine_with(tmp_path, GIB // 2), CONFIG)


def test_less_than_a_page_is_refused(machine: Machine) -> None:
    """A pool of no page is refused with the size of a page."""
    with pytest.raises(ConfigError, match=r"host_bytes is 1048575, less than one page.* 1048576 bytes"):
        pages(machine, dataclasses.replace(CONFIG, host_bytes=MIB - 1))
    with pytest.raises(ConfigError, match=r"host_ratio is 0.001.*100 pages"):
        pages(machine, dataclasses.replace(CONFIG, host_ratio=0.001))


@pytest.mark.parametrize("ratio", [1.0, 0.99, 0.01])
def test_write_through_needs_a_larger_host(machine: Machine, ratio: float) -> None:
    """Under write_through a host pool not above the device pool is refused with both, unless allowed."""
    config = dataclasses.replace(CONFIG, host_ratio=ratio, write_policy="write_through")
    expected = int(100 * ratio)
    with pytest.raises(
        ConfigError, match=f"host pool of {expected} pages.*device pool has 100.*allow_small_host"
    ):
        pages(machine, config)
    assert pages(machine, dataclasses.replace(config, allow_small_host=True)) == expected
    assert pages(machine, dataclasses.replace(config, host_ratio=1.01)) == 101
    for other in ("write_back", "write_through_selective"):
        assert pages(machine, dataclasses.replace(config, write_policy=other)) == expected


# What is not known


@pytest.fixture
def opaque(tmp_path: Path) -> Machine:
    """Give a machine with a limit of 4 GiB whose usage cannot be read."""
    machine = Machine(tmp_path)
    machine.group("", limit=4 * GIB)
    return machine


def test_a_pool_by_ratio_is_refused_where_usage_is_unknown(opaque: Machine) -> None:
    """Nobody guesses how much is free: the refusal names the limit, the file and the option to give."""
    with capture_logs() as lines, pytest.raises(ConfigError) as caught:
        pages(opaque, CONFIG)
    message = str(caught.value)
    for part in ("host_ratio is 2.0", "memory.max", f"{opaque.root / V2}/memory.current", "give host_bytes"):
        assert part in message
    assert lines == []


def test_a_pool_by_bytes_only_warns_where_usage_is_unknown(opaque: Machine) -> None:
    """The operator said how much: one line tells what could not be read, and the pool is opened."""
    with capture_logs() as lines:
        assert pages(opaque, dataclasses.replace(CONFIG, host_bytes=GIB)) == 1024
    (line,) = lines
    assert (line["event"], line["log_level"], line["host_bytes"]) == ("host.usage_unreadable", "warning", GIB)
    assert line["event"] in EVENTS
    assert line["limits"] == str(opaque.root / V2 / "memory.max")
    assert str(opaque.root / V2 / "memory.current") in line["fault"]


def test_a_pool_by_bytes_never_exceeds_a_limit_whose_usage_is_unknown(opaque: Machine) -> None:
    """What cannot fit even if nothing is used is refused all the same."""
    with pytest.raises(ConfigError, match=f"memory.max {4 * GIB} bytes are free"):
        pages(opaque, dataclasses.replace(CONFIG, host_bytes=3 * GIB + MIB))


def test_a_known_machine_warns_of_nothing(machine: Machine) -> None:
    """No line is logged where everything can be read."""
    with capture_logs() as lines:
        pages(machine, dataclasses.replace(CONFIG, host_bytes=GIB))
    assert lines == []


# Several pools


def test_pools_of_one_budget_share_one_look_at_free_memory(tmp_path: Path) -> None:
    """Memory is looked at once, and each pool takes its own from what the ones before have left."""
    machine = machine_with(tmp_path, 5 * GIB)
    two, one = (dataclasses.replace(CONFIG, host_bytes=gib * GIB) for gib in (2, 1))
    with host_memory_budget(machine.root):
        machine_with(tmp_path, 99 * GIB)
        for config in (two, one, one):
            book(config)
        with pytest.raises(ConfigError, match=f"pools opened before take {4 * GIB}, which leaves 0 for each"):
            book(dataclasses.replace(CONFIG, host_bytes=MIB))
    with host_memory_budget(machine.root):
        book(dataclasses.replace(CONFIG, host_bytes=98 * GIB))


def test_without_a_budget_each_pool_looks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a budget free memory is read at each opening, and nothing is booked."""
    looks: list[int] = []

    def look() -> list[MemoryLimit]:
        looks.append(1)
        return [MemoryLimit("the machine", 2 * GIB)]

    monkeypatch.setattr("hicache_async.memory.budget.read_memory_limits", look)
    for _ in range(3):
        assert book(dataclasses.replace(CONFIG, host_bytes=GIB)).num_pages == 1024
    assert len(looks) == 3


def test_a_budget_inside_another_is_that_one(tmp_path: Path) -> None:
    """The outer budget counts inside an inner one and after it."""
    machine = machine_with(tmp_path, 3 * GIB)
    config = dataclasses.replace(CONFIG, host_bytes=GIB)
    with host_memory_budget(machine.root):
        with host_memory_budget(machine_with(tmp_path / "other", 99 * GIB).root):
            book(config)
        book(config)
        with pytest.raises(ConfigError, match="leaves 0 for each"):
            book(config)


def test_what_is_given_back_can_be_booked_again(tmp_path: Path) -> None:
    """A booking given back, once or twice, leaves its own bytes and nobody else's."""
    machine = machine_with(tmp_path, 3 * GIB)
    config = dataclasses.replace(CONFIG, host_bytes=GIB)
    with host_memory_budget(machine.root):
        first, _ = book(config), book(config)
        with pytest.raises(ConfigError):
            book(config)
        first.give_back()
        first.give_back()
        book(config)
        with pytest.raises(ConfigError):
            book(config)


def test_a_refused_pool_books_nothing(tmp_path: Path) -> None:
    """After a refusal a pool that fits gets all there is."""
    machine = machine_with(tmp_path, 3 * GIB)
    with host_memory_budget(machine.root):
        with pytest.raises(ConfigError):
            book(dataclasses.replace(CONFIG, host_bytes=2 * GIB + MIB))
        book(dataclasses.replace(CONFIG, host_bytes=2 * GIB))


def test_a_budget_ends_when_its_block_fails(machine: Machine) -> None:
    """What was raised inside comes out, and the next opening looks for itself."""
    with pytest.raises(RuntimeError, match="inside"), host_memory_budget(machine.root):
        raise RuntimeError("inside")
    with pytest.raises(ConfigError, match=r"\(/proc/meminfo\)"):
        book(dataclasses.replace(CONFIG, host_bytes=1 << 60))


@pytest.mark.asyncio
async def test_tasks_and_threads_of_a_budget_book_together(tmp_path: Path) -> None:
    """Tasks started in a budget, and threads of asyncio.to_thread, take from the same bytes."""
    machine = machine_with(tmp_path, 3 * GIB)
    config = dataclasses.replace(CONFIG, host_bytes=GIB)

    async def booked() -> HostBooking:
        return book(config)

    with host_memory_budget(machine.root):
        await asyncio.create_task(booked())
        await asyncio.to_thread(book, config)
        with pytest.raises(ConfigError, match="leaves 0 for each"):
            await asyncio.create_task(booked())


@pytest.mark.asyncio
async def test_a_budget_is_its_tasks_own(tmp_path: Path) -> None:
    """A task that enters a budget does not change what another task, started before, sees."""
    machine = machine_with(tmp_path, 3 * GIB)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def enter() -> None:
        with host_memory_budget(machine.root):
            entered.set()
            await leave.wait()

    task = asyncio.create_task(enter())
    await entered.wait()
    with pytest.raises(ConfigError, match=r"\(/proc/meminfo\)"):
        book(dataclasses.replace(CONFIG, host_bytes=1 << 60))
    leave.set()
    await task


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Let the interpreter switch threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless_threads")
def test_threads_that_book_at_once_do_not_exceed_the_budget() -> None:
    """Of four threads that book and give back the only page there is, no two ever have it."""
    budget = HostMemoryBudget([MemoryLimit("the machine", MIB)])
    config = CacheConfig(host_reserve_bytes=0, host_bytes=MIB)
    start, holders = threading.Barrier(4), list[int]()

    def book_and_give_back(thread: int) -> int:
        most = 0
        start.wait()
        for _ in range(10_000):
            with contextlib.suppress(ConfigError):
                booking = budget.book(config, 1, MIB)
                holders.append(thread)
                most = max(most, len(holders))
                holders.remove(thread)
                booking.give_back()
        return most

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(book_and_give_back, range(4))) == 1


# Several ranks


@pytest.fixture
def container(tmp_path: Path) -> Machine:
    """Give a machine of 64 GiB on which this process may take 1 GiB."""
    machine = Machine(tmp_path, cgroup="0::/box")
    machine.group("box", limit=GIB, used=0)
    return machine


def largest_pools(config: CacheConfig, num_pools: int) -> Iterator[int]:
    """Book ``num_pools`` pools, each the largest that is not refused, and yield their bytes."""
    for _ in range(num_pools):
        for num_pages in range(GIB // MIB, 0, -16):
            try:
                yield book(dataclasses.replace(config, host_bytes=num_pages * MIB)).nbytes
                break
            except ConfigError:
                continue


def test_ranks_of_one_process_with_two_pools_each_stay_within_the_container(container: Machine) -> None:
    """Four ranks with two pools each fill 1 GiB to the byte; one page more is refused with all numbers."""
    ranks = [dataclasses.replace(SHARED, tp_rank=rank) for rank in range(4)]
    with host_memory_budget(container.root):
        assert sum(book(rank).nbytes for rank in ranks for _ in range(2)) == GIB
    with host_memory_budget(container.root):
        for rank in ranks:
            book(rank)
        for rank in ranks:
            with pytest.raises(ConfigError) as caught:
                book(dataclasses.replace(rank, host_bytes=129 * MIB))
            for part in (
                f"host_bytes is {129 * MIB}, which takes {129 * MIB} bytes on each of 4 ranks",
                f"{container.root}/{V2}/box/memory.max {GIB} bytes are free",
                f"pools opened before take {512 * MIB}, which leaves {128 * MIB} for each",
            ):
                assert part in str(caught.value)


def test_ranks_of_many_processes_with_two_pools_each_stay_within_the_container(container: Machine) -> None:
    """Four processes that ask nobody and take the largest pools they get, two each, take 1 GiB together."""

    def process(rank: int) -> int:
        with host_memory_budget(container.root):
            return sum(largest_pools(dataclasses.replace(SHARED, tp_rank=rank), 2))

    assert sum(contextvars.Context().run(process, rank) for rank in range(4)) == GIB


def test_more_ranks_than_the_options_say_stay_within_the_container(container: Machine) -> None:
    """Pools of one process never exceed what is free, whatever they say of the ranks on the host."""
    with host_memory_budget(container.root):
        taken = [
            sum(largest_pools(dataclasses.replace(SHARED, tp_rank=rank, ranks_on_host=2), 1))
            for rank in range(4)
        ]
    assert taken == [GIB // 2, GIB // 2, 0, 0]


@given(
    pools=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 900), st.booleans())),
    free_mib=st.integers(0, 2000),
    reserve_mib=st.integers(0, 500),
)
@settings(max_examples=200, deadline=None)
def test_bookings_never_exceed_the_budget(
    pools: list[tuple[int, int, int, bool]], free_mib: int, reserve_mib: int
) -> None:
    """Whoever books, refuses or gives back: what is booked is within what is free less the reserve."""
    budget = HostMemoryBudget([MemoryLimit("the machine", free_mib * MIB), MemoryLimit("a cgroup", 4 * GIB)])
    booked: list[HostBooking] = []
    for rank, ranks_on_host, num_pages, gives_back in pools:
        config = CacheConfig(
            host_reserve_bytes=reserve_mib * MIB,
            tp_rank=rank,
            tp_size=4,
            ranks_on_host=ranks_on_host,
            host_bytes=num_pages * MIB,
        )
        mine = sum(pool.nbytes_on_host for pool in booked if pool.rank[0] == rank)
        everybodys = sum(pool.nbytes for pool in booked)
        free = (free_mib - reserve_mib) * MIB
        fits = mine + num_pages * MIB * ranks_on_host <= free and everybodys + num_pages * MIB <= free
        try:
            booked.append(budget.book(config, num_pages, MIB))
        except ConfigError:
            assert not fits
        else:
            assert fits
        if gives_back and booked:
            booked.pop(0).give_back()
