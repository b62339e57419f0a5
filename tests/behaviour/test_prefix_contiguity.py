"""What is cached, stored or counted is a whole path from the first page on: no gap, no orphan, no empty node."""

from __future__ import annotations

import pytest

from hicache_async import CapacityError, Stop
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HeldStore
from tests.behaviour.tools import AT_EVICTION, holding_pages, tree_nodes
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, on_host, page_hashes, prefetched, tokens, turns
from tests.flows.stores import FaultAt, page_keys

pytestmark = pytest.mark.asyncio

POLICIES = ["write_through", "write_through_selective", "write_back"]


# What the store holds after a life under write_back

ROOT = "ab"
TAIL_PAGES = 18
PROMPTS = [ROOT + "".join(chr(0x100 * tail + page) for page in range(TAIL_PAGES)) for tail in range(1, 8)]
"""Seven prompts of twenty pages that share their first two: 128 pages."""


async def write_back_life(rig: Rig) -> None:
    """Serve long tails on a hot root: each pushes the one before it out of the device, the root stays."""
    for letters in PROMPTS:
        await rig.serve(letters, prefetch=False)
        await turns()
        assert rig.where(ROOT)[0] in "db"


async def reachable_keys(rig: Rig) -> set[str]:
    """Return the stored keys that a lookup from the first page of some prompt finds."""
    found: set[str] = set()
    for letters in PROMPTS:
        count = await rig.check_stored(letters)
        found.update(rig.ctx.keys.keys(page_hashes(letters)[:count]))
    return found


@pytest.mark.parametrize("ending", ["close", "flush"])
@pytest.mark.parametrize("low_water", [0.0, 0.1])
@pytest.mark.parametrize("host_pages", [18, 20, 40, 200])
async def test_no_tail_is_stored_without_its_head(
    open_cache: Opener, host_pages: int, low_water: float, ending: str
) -> None:
    """A hot root that never leaves the device is stored with the tails that did, or they are not; all is reachable."""
    store = MemoryStore()
    options: dict[str, object] = {"write_policy": "write_back", "write_back_low_water": low_water}
    rig = await open_cache(store=store, device_pages=24, host_pages=host_pages, **options)
    await write_back_life(rig)
    await (rig.cache.close() if ending == "close" else rig.cache.admin.flush())
    assert await reachable_keys(rig) == set(await page_keys(store))
    stored = [await rig.check_stored(letters) for letters in PROMPTS]
    if host_pages == 200:
        assert stored[:-1] == [2 + TAIL_PAGES] * 6
    again = await open_cache(store=store, device_pages=200, host_pages=400, **options)
    for letters, num_stored in zip(PROMPTS, stored, strict=True):
        local = len(again.where(letters))
        served = await again.serve(letters)
        assert served.tokens == max(local, num_stored) * PAGE_TOKENS
        assert served.result is not None
        if not num_stored:
            assert (served.result.hit_tokens, served.result.stop) == (0, Stop.NOT_STORED)
    again.check_local(PROMPTS[0])
    assert set(again.unfulfilled()) <= {Stop.NOT_STORED}


# Splits


async def test_a_node_split_in_mid_backup_is_stored_in_both_halves(open_cache: Opener) -> None:
    """A write of four pages whose node is split after two of them marks both halves, and all four come back."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store)
    await rig.serve("abcd", prefetch=False)
    await store.arrived()
    assert [node.num_pages for node in tree_nodes(rig)] == [4]
    await rig.serve("abxy", prefetch=False)
    assert sorted(node.num_pages for node in tree_nodes(rig)) == [2, 2, 2]
    rig.cache.audit()
    store.open()
    await rig.cache.admin.flush()
    assert store.calls["write"] == 2
    for node in tree_nodes(rig):
        assert node.stored == rig.ctx.tree.store_epoch
        assert (node.device.pins, node.host.pins, node.anchors) == (0, 0, 0)
    hashes = [page_hash for node in tree_nodes(rig) for page_hash in node.hashes]
    assert sorted(hashes) == sorted({*page_hashes("abcd"), *page_hashes("abxy")})
    rig = await open_cache.restart(rig)
    for letters in ("abcd", "abxy"):
        assert (await rig.serve(letters)).books.computed == 1
    assert rig.cache.stats().store_tokens == 16 + 8
    await rig.check_everywhere("abcd")


@pytest.mark.parametrize("kind", ["raise", 0])
async def test_a_write_of_nothing_makes_no_empty_node(open_cache: Opener, kind: object) -> None:
    """A write that fails at its first page splits nothing off, and what it was for can be evicted."""
    store = FaultAt(MemoryStore(), "write", 1, kind)
    rig = await open_cache(store=store, device_pages=4, host_pages=6)
    await rig.serve("abc", prefetch=False)
    await rig.cache.admin.flush()
    (node,) = tree_nodes(rig)
    assert (node.num_pages, node.stored, node.host.pins) == (3, 0, 0)
    await rig.push_out(3)
    assert rig.where("abc") == ""
    assert rig.cache.stats().dropped_tokens == {"host_eviction_unstored": 12}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("num_tokens", range(1, 10))
async def test_a_prefetch_of_part_of_a_page_is_rounded_down(
    open_cache: Opener, num_tokens: int, whole: bool
) -> None:
    """Tokens that fill no page are not asked for: whole pages come, no empty node, and they can be evicted."""
    rig = await open_cache(store=MemoryStore(), device_pages=4, host_pages=6)
    await rig.put_in_store("abc")
    num_pages = (num_tokens - (not whole)) // PAGE_TOKENS
    with rig.lease(tokens("abc")[:num_tokens], whole=whole) as lease:
        result = await lease.prefetch()
        rig.cache.audit()
    expected = (num_pages * PAGE_TOKENS,) * 2
    assert (result.hit_tokens, result.fetched_tokens) == expected
    assert result.stop is (Stop.COMPLETE if num_pages else Stop.NOTHING_MISSING)
    assert [node.num_pages for node in tree_nodes(rig)] == ([num_pages] if num_pages else [])
    assert rig.unfulfilled() == {}
    await rig.push_out(3)
    assert rig.where("abc") == ""


# Evictions


async def under_host_pressure(rig: Rig, num_pages: int) -> None:
    """Fetch another prompt of so many pages into the host, whatever room that takes, and let it go."""
    await prefetched(rig, "z" * num_pages)


@pytest.mark.parametrize(("head", "then"), [("h", ["hh", "h", ""]), ("b", ["bh", "b", "d"])])
async def test_inner_nodes_stay_above_a_pinned_end(open_cache: Opener, head: str, then: list[str]) -> None:
    """Of three nodes in a row on the host, the last one pinned, none goes; afterwards they go from the end."""
    rig = await on_host(open_cache, "a", "ab", host_pages=4)
    rig.virtual.auto = True
    await rig.put_in_store("abc")
    await rig.put_in_store("zzzz")
    if head == "b":
        with rig.lease("a") as lease:
            assert (await lease.load()).tokens == PAGE_TOKENS
        await turns()
    with rig.lease("abc") as lease:
        assert (await lease.prefetch()).fetched_tokens == PAGE_TOKENS
        assert [node.num_pages for node in tree_nodes(rig)] == [1, 1, 1]
        for _ in range(2):
            await under_host_pressure(rig, 4)
            assert rig.where("abc") == head + "hh"
            rig.cache.audit()
    for num_pages, found in zip((2, 3, 4), then, strict=True):
        await under_host_pressure(rig, num_pages)
        assert rig.where("abc") == found
        with rig.lease("abc") as lease:
            assert lease.local_tokens == len(found) * PAGE_TOKENS
    assert await rig.check_stored("abc") == 3
    assert (await prefetched(rig, "abc"))[1] == (3 - len(found)) * PAGE_TOKENS
    rig.check_local("abc")


async def fetched_below_the_device(open_cache: Opener) -> Rig:
    """Open a cache under write_back: the device alone holds "a" and "ab", the host, now full, "c" below them."""
    rig = await open_cache(store=MemoryStore(), device_pages=4, host_pages=1, **AT_EVICTION)
    for letters in ("a", "ab"):
        await rig.serve(tokens(letters)[:-1], prefetch=False)
    await rig.put_in_store("abc")
    return rig


async def test_a_head_that_only_the_device_has_stays_above_a_pinned_end(open_cache: Opener) -> None:
    """Device nodes that could neither move to a full host nor be missed by a pinned host node below are not evicted."""
    rig = await fetched_below_the_device(open_cache)
    with rig.lease("abc") as lease:
        assert (await lease.prefetch()).fetched_tokens == PAGE_TOKENS
        assert rig.where("abc") == "ddh"
        with pytest.raises(CapacityError, match="2 of 4 can be had"):
            await holding_pages(rig, 3)
        assert rig.where("abc") == "ddh"
        assert (await lease.load()).tokens == 12
        rig.check(lease, 12)


async def test_what_hangs_below_a_lost_head_is_not_counted(open_cache: Opener) -> None:
    """As the device gives nodes up to a host too small for them, a match ends where they end; no page is orphaned."""
    rig = await fetched_below_the_device(open_cache)
    assert (await prefetched(rig, "abc"))[1] == PAGE_TOKENS
    assert rig.where("abc") == "ddh"
    for num_pages in (3, 4):
        (await holding_pages(rig, num_pages)).release()
        await turns()
        found = rig.where("abc")
        with rig.lease("abc") as lease:
            assert lease.local_tokens == len(found) * PAGE_TOKENS
        in_tree = rig.cache.stats().device.in_tree + rig.cache.stats().host.in_tree
        assert in_tree == len(found) < 3
        rig.cache.audit()
    assert (await rig.serve("abc")).tokens == len(found) * PAGE_TOKENS
    rig.check_local("abc")


TEN = "abcdefghij"


@pytest.mark.parametrize(
    ("policy", "found", "dropped"),
    [
        ("write_through", "bbbbbbbhhh", {}),
        ("write_through_selective", "ddddddd", {"unbacked_eviction": 12}),
        ("write_back", "dddddddhhh", {}),
    ],
)
async def test_exactly_the_missing_device_pages_are_evicted(
    open_cache: Opener, policy: str, found: str, dropped: dict[str, int]
) -> None:
    """Of a prompt of ten pages the last three go when three are asked for, wherever the policy puts them."""
    rig = await open_cache(device_pages=10, write_policy=policy, write_back_low_water=0.0)
    await rig.serve(tokens(TEN)[:-1])
    await turns()
    assert rig.cache.stats().device.free == 0
    other = await holding_pages(rig, 3)
    rig.cache.audit()
    await turns()
    assert rig.where(TEN) == found
    stats = rig.cache.stats()
    assert (stats.device.evicted_pages, stats.dropped_tokens) == (3, dropped)
    rig.check_local(TEN)
    other.release()
    assert rig.cache.stats().device.free == 3


@pytest.mark.parametrize(("device_pages", "left"), [(32, "bbbbbbbddd"), (4, "hhhhhhh")])
async def test_exactly_the_missing_host_pages_are_evicted(
    open_cache: Opener, device_pages: int, left: str
) -> None:
    """Of ten pages on the host the last three go when three are fetched, whether or not the device has them too."""
    rig = await open_cache(store=MemoryStore(), device_pages=device_pages, host_pages=10)
    await rig.put_in_store(TEN)
    await rig.put_in_store("xyz")
    assert (await prefetched(rig, TEN))[1] == 40
    if device_pages > 10:
        with rig.lease(TEN) as lease:
            await lease.load()
        await turns()
    assert await prefetched(rig, "xyz") == (12, 12, Stop.COMPLETE)
    assert rig.where(TEN) == left
    assert rig.cache.stats().host.evicted_pages == 3
    rig.check_local(TEN)
    rig.cache.audit()


async def test_a_parent_follows_its_child_in_one_eviction(open_cache: Opener) -> None:
    """Under write_back two pages asked for take a child and then its parent, and both device pages are really there."""
    rig = await open_cache(device_pages=2, **AT_EVICTION)
    for letters in ("a", "ab"):
        await rig.serve(tokens(letters)[:-1])
    assert [node.num_pages for node in tree_nodes(rig)] == [1, 1]
    before = {int(page) for node in tree_nodes(rig) for page in node.device.pages}  # type: ignore[union-attr]
    rig.virtual.auto = False
    other = await holding_pages(rig, 2)
    assert set(other.pages.tolist()) == before
    assert rig.where("ab") == "hh"
    assert rig.cache.stats().device.evicted_pages == 2
    rig.virtual.advance_all()
    await turns()
    other.release()
    assert rig.cache.stats().device.free == 2
    rig.check_local("ab")


# A process that starts with nothing


@pytest.mark.parametrize("company", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
async def test_an_empty_cache_asks_a_full_store(open_cache: Opener, policy: str, company: bool) -> None:
    """With nothing local, so nothing backed up, all that another process stored is fetched, alone or in company."""
    store = MemoryStore()
    writer = await open_cache(store=store, write_policy="write_through")
    await writer.serve("abcd")
    await writer.cache.close()
    rig = await open_cache(store=store, write_policy=policy)
    cold = rig.lease("wxyz")
    if company:
        await cold.load()
    assert await prefetched(rig, "abcd") == (16, 16, Stop.COMPLETE)
    assert (rig.where("abcd"), rig.unfulfilled()) == ("hhhh", {})
    cold.release()
    assert (await rig.serve("abcd")).tokens == 16
    await rig.check_everywhere("abcd")
