"""The reasons not to prefetch, each by itself."""

from __future__ import annotations

import pytest

from hicache_async import CacheConfig, State, Stop
from hicache_async.flows.gates import (
    Share,
    ask_in_batches,
    is_worth_fetching,
    outcome,
    quota_pages,
    refusal_to_ask,
    share_of,
)
from hicache_async.stores.memory import MemoryStore
from tests.flows.rig import PAGE_TOKENS, Opener


@pytest.mark.asyncio
async def test_the_store_is_not_asked_in_vain(open_cache: Opener) -> None:
    """Nothing missing comes before no store, and that before too little."""
    rig = await open_cache(store=MemoryStore(), prefetch_threshold_tokens=3 * PAGE_TOKENS - 1)
    assert [refusal_to_ask(rig.ctx, pages) for pages in (-1, 0, 1, 2, 3)] == [
        Stop.NOTHING_MISSING, Stop.NOTHING_MISSING, Stop.BELOW_THRESHOLD, Stop.BELOW_THRESHOLD, None,
    ]  # fmt: skip
    rig.ctx.state = State.NO_REUSE
    assert refusal_to_ask(rig.ctx, 3) is Stop.DETACHED
    rig.ctx.state, rig.ctx.store = State.OPEN, None
    assert [refusal_to_ask(rig.ctx, pages) for pages in (0, 1)] == [Stop.NOTHING_MISSING, Stop.DETACHED]


@pytest.mark.parametrize(("threshold", "page_size", "worth"), [(0, 4, 1), (8, 4, 2), (9, 4, 3), (256, 64, 4)])
def test_what_is_worth_fetching(threshold: int, page_size: int, worth: int) -> None:
    """The threshold in whole pages, and never less than one."""
    config = CacheConfig(prefetch_threshold_tokens=threshold, page_size=page_size)
    assert not is_worth_fetching(config, worth - 1)
    assert is_worth_fetching(config, worth)


@pytest.mark.asyncio
async def test_questions_end_at_the_first_short_answer() -> None:
    """Batches follow one another until one is short, cannot be answered, or is the last."""
    asked: list[tuple[int, int]] = []

    def store_with(num_pages: int, fault_at: int | None = None) -> object:
        async def ask(start: int, end: int) -> int | Stop:
            asked.append((start, end))
            return Stop.STORE_FAULT if start == fault_at else max(0, min(end, num_pages) - start)

        return ask

    async def of(num_pages: int, fault_at: int | None = None) -> tuple[int, Stop | None]:
        asked.clear()
        return await ask_in_batches(store_with(num_pages, fault_at), 3, 12, 4)  # type: ignore[arg-type]

    assert await of(20) == (9, None)
    assert asked == [(3, 7), (7, 11), (11, 12)]
    assert await of(9) == (6, None)
    assert asked == [(3, 7), (7, 11)]
    assert await of(7) == (4, None)
    assert await of(3) == (0, Stop.NOT_STORED)
    assert asked == [(3, 7)]
    assert await of(20, fault_at=7) == (4, Stop.STORE_FAULT)
    assert asked == [(3, 7), (7, 11)]


@pytest.mark.parametrize(
    ("wanted", "quota", "room", "shrunk", "refused"),
    [
        (4, 9, 9, Share(4, Stop.COMPLETE), Share(4, Stop.COMPLETE)),
        (4, 4, 4, Share(4, Stop.COMPLETE), Share(4, Stop.COMPLETE)),
        (4, 3, 9, Share(3, Stop.RATE_LIMITED), Share(0, Stop.RATE_LIMITED)),
        (4, 0, 9, Share(0, Stop.RATE_LIMITED), Share(0, Stop.RATE_LIMITED)),
        (4, -2, 0, Share(0, Stop.RATE_LIMITED), Share(0, Stop.RATE_LIMITED)),
        (4, 9, 3, Share(3, Stop.NO_HOST_ROOM), Share(0, Stop.NO_HOST_ROOM)),
        (4, 9, 0, Share(0, Stop.NO_HOST_ROOM), Share(0, Stop.NO_HOST_ROOM)),
        (4, 3, 2, Share(2, Stop.NO_HOST_ROOM), Share(0, Stop.NO_HOST_ROOM)),
        (4, 3, 3, Share(3, Stop.RATE_LIMITED), Share(0, Stop.RATE_LIMITED)),
    ],
)
def test_the_share_of_a_hit(wanted: int, quota: int, room: int, shrunk: Share, refused: Share) -> None:
    """What is tighter, the quota or the room, is the reason; ``refuse`` takes all or nothing."""
    for overflow, share in (("shrink", shrunk), ("refuse", refused)):
        config = CacheConfig(prefetch_overflow=overflow)  # type: ignore[arg-type]
        assert share_of(config, wanted, quota_pages=quota, room_pages=room) == share


@pytest.mark.asyncio
async def test_the_quota_counts_what_prefetches_hold(open_cache: Opener) -> None:
    """Of the share of the host, what is charged is gone until it is let go."""
    rig = await open_cache(store=MemoryStore(), host_pages=11, prefetch_capacity_fraction=0.5)
    await rig.put_in_store("abcd")
    assert quota_pages(rig.ctx) == 5
    with rig.lease("abcd") as lease:
        await lease.prefetch()
        assert quota_pages(rig.ctx) == 1
    assert quota_pages(rig.ctx) == 5


@pytest.mark.parametrize(
    ("hit_pages", "cut", "ended", "stop"),
    [
        (4, None, Stop.COMPLETE, Stop.COMPLETE),
        (4, Stop.STORE_FAULT, Stop.COMPLETE, Stop.STORE_FAULT),
        (4, Stop.PEER_SHORTER, Stop.VANISHED, Stop.VANISHED),
        (1, None, None, Stop.BELOW_THRESHOLD),
        (1, Stop.STORE_FAULT, None, Stop.STORE_FAULT),
        (0, Stop.NOTHING_MISSING, None, Stop.NOTHING_MISSING),
        (0, None, None, Stop.NOT_STORED),
    ],
)
def test_the_outcome(hit_pages: int, cut: Stop | None, ended: Stop | None, stop: Stop) -> None:
    """A fetch that went wrong comes before a search that was cut short, and that before too small a hit."""
    assert outcome(hit_pages, cut, ended) is stop
