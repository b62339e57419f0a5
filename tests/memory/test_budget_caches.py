"""Whole caches that share a budget: what they open with, what they refuse, and what they give back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from hicache_async.errors import ConfigError
from hicache_async.memory.budget import host_memory_budget
from hicache_async.testing.virtual_device import VirtualDevice
from tests.flows.rig import PAGE_NBYTES, Opener, Rig
from tests.memory.machine import GIB, MIB, Machine

pytestmark = pytest.mark.asyncio

POOL_PAGES = MIB // PAGE_NBYTES // 8
"""An eighth of what the container has."""


@pytest_asyncio.fixture
async def open_cache() -> AsyncIterator[Opener]:
    """Open caches; at the end every one is audited and closed."""
    opener = Opener()
    yield opener
    await opener.finish()


@pytest.fixture
def container(tmp_path: Path) -> Machine:
    """Give a machine with 64 GiB free on which this process may take 1 MiB."""
    machine = Machine(tmp_path, available_bytes=64 * GIB)
    machine.group("", limit=MIB, used=0)
    return machine


def host_nbytes(rigs: list[Rig]) -> int:
    """Return the bytes of all host pools."""
    return sum(rig.cache.stats().host.capacity * rig.kv.page_nbytes for rig in rigs)


async def test_four_ranks_with_two_caches_each_fill_a_container_and_no_more(
    open_cache: Opener, container: Machine
) -> None:
    """Eight pools of an eighth of the limit open, one page more on any rank is refused; each says its size."""
    with host_memory_budget(container.root), capture_logs() as lines:
        for rank in [0, 1, 2, 3] * 2:
            await open_cache(host_pages=POOL_PAGES, tp_rank=rank, tp_size=4)
        for rank in range(4):
            with pytest.raises(ConfigError, match=rf"4 ranks; .*memory\.max {MIB} bytes are free"):
                await open_cache(host_pages=1, tp_rank=rank, tp_size=4)
    opened = [line for line in lines if line["event"] == "cache.opened"]
    assert [line["host_nbytes"] for line in opened] == [MIB // 8] * 8
    assert host_nbytes(open_cache.rigs) == MIB


async def test_caches_that_open_at_once_share_what_is_free(open_cache: Opener, container: Machine) -> None:
    """Of ten caches opened side by side in one budget, those that fit open and the others are refused."""
    with host_memory_budget(container.root):
        opened = await asyncio.gather(
            *(open_cache(host_pages=POOL_PAGES) for _ in range(10)), return_exceptions=True
        )
    assert [type(result) for result in opened] == [Rig] * 8 + [ConfigError] * 2
    assert host_nbytes(open_cache.rigs) == MIB


async def test_a_cache_that_closes_gives_its_memory_back(open_cache: Opener, container: Machine) -> None:
    """Inside a budget the pool of a closed cache is free for the next one."""
    with host_memory_budget(container.root):
        for _ in range(3):
            rig = await open_cache(host_pages=8 * POOL_PAGES)
            with pytest.raises(ConfigError, match="leaves 0 for each"):
                await open_cache(host_pages=1)
            await rig.cache.close()


class NoBuffers(VirtualDevice):
    """A device that has no host memory to give, or never comes to an end of giving it."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(auto=True)
        self.error = error
        self.asked = asyncio.Event()

    async def host_buffer(self, nbytes: int) -> None:  # type: ignore[override]
        self.asked.set()
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


async def test_a_cache_that_fails_to_open_gives_its_memory_back(
    open_cache: Opener, container: Machine
) -> None:
    """Whether opening fails or is cancelled, what was booked for it is free again."""
    with host_memory_budget(container.root):
        with pytest.raises(MemoryError):
            await open_cache(host_pages=8 * POOL_PAGES, device=NoBuffers(MemoryError("none left")))
        hanging = NoBuffers(None)
        opening = asyncio.create_task(open_cache(host_pages=8 * POOL_PAGES, device=hanging))
        await hanging.asked.wait()
        with pytest.raises(ConfigError, match="leaves 0 for each"):
            await open_cache(host_pages=1)
        opening.cancel()
        await asyncio.wait([opening])
        await open_cache(host_pages=8 * POOL_PAGES)


@pytest.mark.parametrize("host_pages", [16, 15, 1], ids=["the device's size", "a page less", "one page"])
async def test_a_host_no_larger_than_the_device_is_refused_or_works(
    open_cache: Opener, host_pages: int
) -> None:
    """Under write_through open refuses it with both numbers; allowed, it serves more than fits, and all of it right."""
    with pytest.raises(ConfigError, match=f"host pool of {host_pages} pages, and the device pool has 16"):
        await open_cache(device_pages=16, host_pages=host_pages, allow_small_host=False)
    rig = await open_cache(device_pages=16, host_pages=host_pages)
    for _ in range(2):
        for prompt in ("abcdefgh", "ABCDEFGH", "ijklmnop", "abcdIJKL"):
            await rig.serve(prompt)
            rig.check_local(prompt)
            rig.cache.audit()


async def test_a_pool_of_unknown_room_says_so_at_open(open_cache: Opener, tmp_path: Path) -> None:
    """With the usage of the container unreadable, a pool by bytes opens with one warning, one by ratio does not."""
    machine = Machine(tmp_path)
    machine.group("", limit=MIB)
    with host_memory_budget(machine.root), capture_logs() as lines:
        await open_cache(host_pages=POOL_PAGES)
        with pytest.raises(ConfigError, match=r"host_ratio is 2\.0, .*memory\.current.*give host_bytes"):
            await open_cache(host_bytes=None)
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["host.usage_unreadable"]
