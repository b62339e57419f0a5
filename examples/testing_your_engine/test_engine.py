"""Tests of the engine. None of them looks for leaks: the fixture ``hicache`` does, at the end of each."""

from __future__ import annotations

import asyncio

import pytest
from engine import Engine

from hicache_async import HiCache
from hicache_async.testing.faults import HeldStore
from hicache_async.testing.small_caches import SmallCaches
from hicache_async.testing.virtual_device import VirtualDevice

PROMPT = list(range(100, 114))


async def test_what_was_computed_is_not_computed_again(engine: Engine) -> None:
    """The second time only what fills no page is computed, and the answer is the same."""
    assert await engine.answer("first", PROMPT) == sum(PROMPT)
    assert await engine.answer("second", PROMPT) == sum(PROMPT)
    assert engine.num_computed == 14 + 2


async def test_other_prompts_push_it_out_and_it_comes_back(engine: Engine) -> None:
    """Pages that had to leave the device come back from the host."""
    for first in (100, 200, 300):
        assert await engine.answer("filling", list(range(first, first + 14))) == sum(range(first, first + 14))
    assert await engine.answer("again", PROMPT) == sum(PROMPT)
    assert engine.num_computed == 3 * 14 + 2


async def test_a_client_that_hangs_up_while_the_store_is_slow(
    engine: Engine, hicache: HiCache, hicache_store: HeldStore, make_hicache: SmallCaches
) -> None:
    """A request that is cancelled in the middle of its prefetch gives everything back, and the next one hits."""
    await engine.answer("before", PROMPT)
    await hicache.admin.flush()
    k, kv = Engine.new_kv()
    restarted = Engine(await make_hicache(kv=kv), k)
    hicache_store.hold("read")
    request = asyncio.create_task(restarted.answer("hangs up", PROMPT))
    await hicache_store.arrived(verb="read")
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    hicache_store.open()
    assert await restarted.answer("stays", PROMPT) == sum(PROMPT)
    assert restarted.num_computed == 2


async def test_nothing_is_read_before_it_is_there(engine: Engine, hicache_device: VirtualDevice) -> None:
    """While the copies of a request wait to be moved it waits, too: the answer is right, however late they are."""
    for first in (100, 200, 300):
        await engine.answer("filling", list(range(first, first + 14)))
    hicache_device.auto = False
    request = asyncio.create_task(engine.answer("again", PROMPT))
    for _ in range(50):  # all that can be done without the bytes is done by then
        await asyncio.sleep(0)
    assert hicache_device.pending
    assert not request.done()
    hicache_device.advance_all()
    assert await request == sum(PROMPT)
