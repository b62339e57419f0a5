"""Clients that hang up in mid-forward, and many clients with one prompt."""

from __future__ import annotations

import asyncio

import pytest

from hicache_async import HiCache
from tests.e2e.step_engine import HangUp, StepEngine, running
from tests.toy_engine import PAGE_SIZE, check, open_cache, prompt

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


def check_cached(cache: HiCache) -> int:
    """Compare every cached page of the device with its golden bytes; returns how many there are."""
    count = 0
    for root in cache._ctx.tree.roots.values():
        for node in root.subtree():
            if node.device.pages is not None:
                check(cache, node.device.pages, node.hashes)
                count += node.num_pages
    return count


async def _hang_up_in_mid_forward(cache: HiCache, engine: StepEngine) -> None:
    """Fill the device with a request that hangs up in mid-forward, while another one wants its pages."""
    await engine.serve("first", prompt(1))
    await cache.admin.flush()
    gone = asyncio.create_task(engine.serve("hangs up", prompt(2)))
    for _ in range(3):  # let it compute two pages, and hold the third
        await engine.held()
        engine.gate.set()
    await engine.held()
    gone.cancel()
    again = asyncio.create_task(engine.serve("again", prompt(1)))
    await asyncio.wait([gone])
    await engine.admitted("again")
    loads = [hop.settled for hop in cache._ctx.hops.live if hop.name == "load"]
    if loads:  # what can be loaded under the running forward is loaded
        await asyncio.wait(loads)
    engine.gate.set()
    books = await again
    assert books.device + books.host + books.computed == 25


@pytest.mark.parametrize("hang_up", [HangUp.AT_STEP_BOUNDARY, HangUp.BEHIND_THE_FENCE])
async def test_a_client_that_hangs_up_in_mid_forward_harms_nobody(hang_up: HangUp) -> None:
    """Pages of the running batch go to nobody before its forward is over: no foreign byte is ever read."""
    async with open_cache(7) as cache, running(cache, hang_up) as engine:
        await _hang_up_in_mid_forward(cache, engine)
        assert engine.foreign == []
        assert check_cached(cache) >= 6


async def test_an_engine_that_releases_in_mid_forward_is_found_out() -> None:
    """Were the pages released at once, foreign bytes would be read: the test above can fail."""
    async with open_cache(7) as cache, running(cache, HangUp.AT_ONCE) as engine:
        await _hang_up_in_mid_forward(cache, engine)
        assert engine.foreign
        assert "should hold page" in engine.foreign[0]
        cache.audit()  # the books cannot tell: they are in order


@pytest.mark.parametrize("hangs_up_after", [None, 0, 3])
async def test_equal_cold_prompts_are_computed_once(hangs_up_after: int | None) -> None:
    """Of 32 equal cold prompts one computes, another goes on if it hangs up, and no page is done twice."""
    tokens = prompt(1, 8 * PAGE_SIZE + 1)
    async with open_cache(64) as cache, running(cache) as engine:
        clients = [asyncio.create_task(engine.serve(str(i), tokens)) for i in range(32)]
        if hangs_up_after is not None:
            for _ in range(hangs_up_after):
                await engine.held()
                engine.gate.set()
            await engine.held()
            clients.pop(0).cancel()
            engine.gate.set()
        books = await asyncio.gather(*clients)
        # Each of them computes the last token, which is what gives it logits.
        assert engine.computed_tokens == 8 * PAGE_SIZE + len(clients)
        assert sum(each.device for each in books) == found_tokens(len(clients), hangs_up_after)
        assert engine.foreign == []
        assert check_cached(cache) == 8


def found_tokens(num_clients: int, hangs_up_after: int | None) -> int:
    """Return how many tokens the clients found: all but those that one of them computed itself."""
    own = 8 if hangs_up_after is None else 8 - hangs_up_after - 1
    return (num_clients * 8 - own) * PAGE_SIZE


async def test_many_clients_come_and_go() -> None:
    """Clients of different prompts that hang up at different steps leave every page to its owner."""
    async with open_cache(16) as cache, running(cache) as engine:
        for turn in range(6):
            clients = [
                asyncio.create_task(engine.serve(f"{turn} {i}", prompt(turn + i, 13))) for i in range(4)
            ]
            await engine.held()
            for client in clients[turn % 3 :: 3]:
                client.cancel()
            engine.gate.set()
            await asyncio.wait(clients)
            cache.audit()
        assert engine.foreign == []
        check_cached(cache)
