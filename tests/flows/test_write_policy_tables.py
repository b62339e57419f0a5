"""Every cell of the documented tables of write policies, at every kind of ratio of host to device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from hicache_async import ConfigError, WritePolicy
from hicache_async.abc import CopyPlan, Fence
from hicache_async.core.write_policy_tables import (
    AWAITED,
    COPIED,
    HOST_NEED,
    LONG_PROMPT,
    LOST_BY_CLOSE,
    LOST_BY_EVICTION,
    LOST_IN_CRASH,
    TERMS,
    TIERS,
    Holders,
    Stage,
    Then,
)
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.virtual_device import VirtualDevice
from hicache_async.types import Books, Tier
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, page_hashes, tokens

pytestmark = pytest.mark.asyncio

DEVICE_PAGES = 8
PROMPT = "abc"
PROMPT_TOKENS = len(PROMPT) * PAGE_TOKENS
OTHERS = "ABCDEFGH"
"""Prompts of one page each; together they fill the device."""
LOSSES = {"unbacked_eviction", "host_full", "host_eviction_unstored"}
"""Reasons for which pages are dropped that are in no tier afterwards."""

RATIOS = [0.5, 1, 2, 8]

each_policy = pytest.mark.parametrize("policy", list(WritePolicy))
each_ratio = pytest.mark.parametrize("ratio", RATIOS)
each_stage = pytest.mark.parametrize("stage", list(TIERS), ids=str)


each_policy_and_ratio = pytest.mark.parametrize(
    ("policy", "ratio"), [(policy, ratio) for policy in WritePolicy for ratio in RATIOS]
)


class WatchedDevice(VirtualDevice):
    """Count, by what is in it, how often each page is copied to the host."""

    def __init__(self) -> None:
        super().__init__(auto=True)
        self.copied: Counter[bytes] = Counter()

    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence] = ()) -> Fence:
        plane = plan.kv.planes(0)[0]
        self.copied.update(plane[page][:8].numpy().tobytes() for page in plan.device_pages.tolist())
        return super().device_to_host(plan, after)

    def num_copies(self, letters: str) -> list[int]:
        """Return how often each page of a prompt was copied; golden pages begin with their hash."""
        return [self.copied[page_hash[:8]] for page_hash in page_hashes(letters)]


def sizes(ratio: float) -> dict[str, int]:
    """Return how many pages the pools have."""
    return {"device_pages": DEVICE_PAGES, "host_pages": int(ratio * DEVICE_PAGES)}


async def opened(
    open_cache: Opener, policy: WritePolicy, ratio: float, *, low_water_pages: int = 1, **options: Any
) -> Rig:
    """Open a cache on an empty store."""
    options = {"store": MemoryStore(), "write_back_low_water": low_water_pages / DEVICE_PAGES, **options}
    return await open_cache(write_policy=policy, **sizes(ratio), **options)


async def commit(rig: Rig, letters: str, num_commits: int = 1) -> None:
    """Serve a prompt that ends with its last page, so often, and let everything go where it goes."""
    for _ in range(num_commits):
        with rig.lease(tokens(letters)[:-1], whole=True) as lease:
            await rig.run(lease, prefetch=False)
        await rig.cache.admin.flush()


async def brought_to(
    open_cache: Opener, policy: WritePolicy, stage: Stage, ratio: float, **options: Any
) -> Rig:
    """Return a cache in which PROMPT has come to a stage; of a closed one, the next on the same store."""
    rig = await opened(open_cache, policy, ratio, **options)
    await commit(rig, PROMPT, stage.num_commits)
    if stage.then is Then.EVICTED:
        for letter in OTHERS:
            await commit(rig, letter, stage.num_commits)
    rig.cache.audit()
    rig.check_local(PROMPT)
    if stage.then is Then.CLOSED:
        rig = await open_cache.restart(rig, write_policy=policy, **sizes(ratio))
    return rig


async def next_books(rig: Rig) -> Books:
    """Serve PROMPT once more, from wherever it is, reading and comparing its bytes."""
    with rig.lease(tokens(PROMPT)[:-1], whole=True) as lease:
        return (await rig.run(lease)).books


# The first table: what is where


async def check_holders(
    open_cache: Opener, policy: WritePolicy, stage: Stage, ratio: float, cell: Holders
) -> None:
    """Bring PROMPT to a stage, look at all tiers, and serve it from the uppermost that is said to hold it."""
    rig = await brought_to(open_cache, policy, stage, ratio)
    local = rig.where(PROMPT)
    num_pages = {
        Tier.DEVICE: sum(place in "db" for place in local),
        Tier.HOST: sum(place in "bh" for place in local),
        Tier.STORE: await rig.check_stored(PROMPT),
    }
    held = cell.at(**sizes(ratio))
    assert num_pages == {tier: len(PROMPT) * (tier in held) for tier in Tier}
    books = await next_books(rig)
    served = {Tier.DEVICE: books.device, Tier.HOST: books.host, Tier.STORE: books.store}
    uppermost = next((tier for tier in Tier if tier in held), None)
    assert served == {tier: PROMPT_TOKENS * (tier is uppermost) for tier in Tier}


@each_stage
@each_policy
@each_ratio
async def test_what_is_in_which_tier(
    open_cache: Opener, policy: WritePolicy, stage: Stage, ratio: float
) -> None:
    """Exactly the tiers of the cell hold the prompt, with the right bytes, and serve it."""
    await check_holders(open_cache, policy, stage, ratio, TIERS[stage][policy])


@each_stage
@each_policy
async def test_no_cell_could_say_anything_else(open_cache: Opener, policy: WritePolicy, stage: Stage) -> None:
    """A cell with one tier more or less, or that heeds the ratio where it should not, is found to be wrong."""
    cell = TIERS[stage][policy]
    changed = [tuple(t for t in Tier if (t in cell.tiers) != (t is other)) for other in Tier]
    wrong = {Holders(each, cell.host_if_larger) for each in changed}
    if Tier.HOST not in cell.tiers:
        wrong.add(Holders(cell.tiers, not cell.host_if_larger))
    for each in wrong:
        ratio = 1 if each.at(**sizes(1)) != cell.at(**sizes(1)) else 2
        with pytest.raises(AssertionError):
            await check_holders(open_cache, policy, stage, ratio, each)


# The second table: what it takes, and what can be lost


async def test_every_row_is_tested() -> None:
    """No row of the second table is without a test below."""
    tested = [HOST_NEED, LONG_PROMPT, LOST_IN_CRASH, LOST_BY_EVICTION, LOST_BY_CLOSE, COPIED, AWAITED]
    assert [id(row) for row in TERMS.values()] == [id(row) for row in tested]


@each_policy
@each_ratio
async def test_host_need(open_cache: Opener, policy: WritePolicy, ratio: float) -> None:
    """A cache opens with the host pools of the cell and no others, and with any at all if it is told to."""
    try:
        await opened(open_cache, policy, ratio, allow_small_host=False)
        opens = True
    except ConfigError as error:
        assert "allow_small_host" in str(error)
        opens = False
    assert opens == HOST_NEED[policy].allows(**sizes(ratio))
    await opened(open_cache, policy, ratio)


@each_policy_and_ratio
async def test_a_prompt_longer_than_the_host_pool(
    open_cache: Opener, policy: WritePolicy, ratio: float
) -> None:
    """Evicted or closed, as much of a prompt as the device can hold is stored as the cell says."""
    letters = OTHERS
    expected = LONG_PROMPT[policy].stored_pages(len(letters), host_pages=sizes(ratio)["host_pages"])
    for closes in (True, False):
        rig = await opened(open_cache, policy, ratio)
        await commit(rig, letters, 2)
        if closes:
            await rig.cache.close()
        else:
            for number in range(DEVICE_PAGES):
                await commit(rig, chr(ord("a") + number), 2)
                rig.cache.audit()
        assert await rig.check_stored(letters) == expected


@pytest.mark.parametrize("stage", [stage for stage in TIERS if stage.then is not Then.CLOSED], ids=str)
@each_policy
@each_ratio
async def test_lost_in_a_crash(open_cache: Opener, policy: WritePolicy, stage: Stage, ratio: float) -> None:
    """What another process finds when this one is gone without a word is all that the cell does not name."""
    rig = await brought_to(open_cache, policy, stage, ratio)
    successor = await open_cache(store=rig.store, write_policy=policy, **sizes(ratio))
    is_lost = LOST_IN_CRASH[policy].includes(stage)
    assert (await next_books(successor)).store == (0 if is_lost else PROMPT_TOKENS)


@each_policy
@each_ratio
@pytest.mark.parametrize("num_commits", [1, 2])
async def test_lost_by_eviction(
    open_cache: Opener, policy: WritePolicy, num_commits: int, ratio: float
) -> None:
    """An evicted prompt is computed again if the cell names it."""
    stage = Stage(num_commits, Then.EVICTED)
    rig = await brought_to(open_cache, policy, stage, ratio)
    is_lost = LOST_BY_EVICTION[policy].includes(stage)
    assert (await next_books(rig)).computed == (PROMPT_TOKENS if is_lost else 0)


async def full_then_burst(open_cache: Opener, policy: WritePolicy, num_commits: int, ratio: float) -> Rig:
    """Return a cache whose device OTHERS have filled, none copied ahead, and one request has emptied."""
    rig = await opened(open_cache, policy, ratio, low_water_pages=0)
    for letter in OTHERS:
        await commit(rig, letter, num_commits)
    await commit(rig, "a" * DEVICE_PAGES)
    rig.cache.audit()
    return rig


async def num_lost(rig: Rig) -> int:
    """Return how many of OTHERS are in no tier."""
    return [max(len(rig.where(letter)), await rig.check_stored(letter)) for letter in OTHERS].count(0)


@each_policy
@each_ratio
async def test_lost_in_a_burst(open_cache: Opener, policy: WritePolicy, ratio: float) -> None:
    """When one request evicts all of the device, as many pages are lost as the cell says."""
    rig = await full_then_burst(open_cache, policy, 2, ratio)
    burst_pages = LOST_BY_EVICTION[policy].burst_pages(DEVICE_PAGES, host_pages=sizes(ratio)["host_pages"])
    assert await num_lost(rig) == burst_pages


@each_policy_and_ratio
async def test_what_is_lost_is_counted(open_cache: Opener, policy: WritePolicy, ratio: float) -> None:
    """The tokens that are counted as lost are those that no tier has, be they few or many."""
    for num_commits in (1, 2):
        rig = await full_then_burst(open_cache, policy, num_commits, ratio)
        dropped = rig.cache.stats().dropped_tokens
        counted = sum(count for reason, count in dropped.items() if reason in LOSSES)
        assert counted == await num_lost(rig) * PAGE_TOKENS


@each_policy
@each_ratio
@pytest.mark.parametrize("num_commits", [1, 2])
async def test_lost_by_a_clean_close(
    open_cache: Opener, policy: WritePolicy, num_commits: int, ratio: float
) -> None:
    """What the next process computes again is what the cell names."""
    stage = Stage(num_commits, Then.CLOSED)
    rig = await brought_to(open_cache, policy, stage, ratio)
    is_lost = LOST_BY_CLOSE[policy].includes(stage)
    assert (await next_books(rig)).computed == (PROMPT_TOKENS if is_lost else 0)


@each_stage
@each_policy
@each_ratio
async def test_copies(open_cache: Opener, policy: WritePolicy, stage: Stage, ratio: float) -> None:
    """By each stage every page has been copied to the host once or not at all, as the cell says."""
    device = WatchedDevice()
    await brought_to(open_cache, policy, stage, ratio, device=device)
    assert device.num_copies(PROMPT) == [int(COPIED[policy].by(stage))] * len(PROMPT)


@each_policy
@each_ratio
@pytest.mark.parametrize("num_pages", [1, 2, 4])
async def test_copies_that_a_request_waits_for(
    open_cache: Opener, policy: WritePolicy, ratio: float, num_pages: int
) -> None:
    """A request that takes pages of a full device is given so many behind a copy as the cell says."""
    rig = await opened(open_cache, policy, ratio, low_water_pages=2)
    for letter in OTHERS:
        await commit(rig, letter, 2)
    assert rig.cache.stats().device.free == 0
    rig.virtual.auto = False
    with rig.lease(tokens("z" * num_pages)[:-1], whole=True) as lease:
        await lease.load()
        fence = lease.allocate_nowait(num_pages * PAGE_TOKENS).after
        awaited = AWAITED[policy].num_pages(num_pages, low_water_pages=2)
        assert rig.counters.get("offloaded_pages_at_eviction", 0) == awaited
        assert (fence is not None) == (awaited > 0)
        assert sum(len(copy.plan.device_pages) for copy in rig.virtual.pending) == awaited
        rig.virtual.advance_all()
    rig.virtual.auto = True


# Beside the tables


@each_ratio
async def test_the_count_of_commits_outlives_the_page(open_cache: Opener, ratio: float) -> None:
    """A prompt that left all tiers between its commits is at the second one where any other is."""
    policy = WritePolicy.WRITE_THROUGH_SELECTIVE
    rig = await brought_to(open_cache, policy, Stage(1, Then.EVICTED), ratio)
    assert rig.where(PROMPT) == ""
    await commit(rig, PROMPT)
    held = TIERS[Stage(2)][policy].at(**sizes(ratio))
    assert held == {Tier.DEVICE, Tier.HOST, Tier.STORE}
    assert (rig.where(PROMPT), await rig.check_stored(PROMPT)) == ("bbb", 3)


@each_policy
@pytest.mark.parametrize("ratio", [2, 8])
async def test_the_room_for_store_hits_costs_no_copy(
    open_cache: Opener, policy: WritePolicy, ratio: float
) -> None:
    """With the device full a hit of all of stage_room_tokens is fetched, and no page loses its copy on the host."""
    rig = await opened(open_cache, policy, ratio, low_water_pages=0)
    await commit(rig, OTHERS, 2)
    before = rig.where(OTHERS)
    assert rig.cache.stats().device.free == 0
    num_pages = rig.cache.stats().stage_room_tokens // PAGE_TOKENS
    assert num_pages == (ratio - 1) * DEVICE_PAGES
    stored = "".join(chr(0x100 + page) for page in range(num_pages))
    await rig.put_in_store(stored)
    with rig.lease(stored) as lease:
        assert (await lease.prefetch()).fetched_tokens == num_pages * PAGE_TOKENS
    assert rig.where(OTHERS) == before
