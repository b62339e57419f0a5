"""What is where after commits, hits and evictions, under each write policy; golden bytes in every tier."""

from __future__ import annotations

import pytest

from hicache_async import Tier
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore
from tests.flows.rig import Opener, Rig, tokens, turns

pytestmark = pytest.mark.asyncio


async def served_and_settled(rig: Rig, letters: str) -> tuple[str, int]:
    """Serve one prompt and let everything go where it goes; returns where its pages are, and how many are stored."""
    await rig.serve(letters)
    await rig.cache.admin.flush()
    rig.cache.audit()
    rig.check_local(letters)
    return rig.where(letters), await rig.check_stored(letters)


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [
        ("write_through", ("bbb", 3), ("bbb", 3)),
        ("write_through_selective", ("ddd", 0), ("bbb", 3)),
        ("write_back", ("ddd", 0), ("ddd", 0)),
    ],
)
async def test_after_commits(
    open_cache: Opener, policy: str, first: tuple[str, int], second: tuple[str, int]
) -> None:
    """The first commit, and the second, bring a prompt as far down as the policy says."""
    rig = await open_cache(store=MemoryStore(), write_policy=policy)
    assert await served_and_settled(rig, "abc") == first
    assert await served_and_settled(rig, "abc") == second


@pytest.mark.parametrize(
    ("policy", "found"),
    [("write_through", "hhh"), ("write_through_selective", ""), ("write_back", "hhh")],
)
async def test_after_eviction(open_cache: Opener, policy: str, found: str) -> None:
    """What the device had to give up after one commit is on the host, except where it was not worth it."""
    rig = await open_cache(store=MemoryStore(), device_pages=4, write_policy=policy)
    await rig.serve("abc")
    await rig.push_out(2)
    await rig.cache.admin.flush()
    assert rig.where("abc") == found
    assert await rig.check_stored("abc") == len(found)
    rig.check_local("abc")
    dropped = rig.cache.stats().dropped_tokens
    assert dropped.get("unbacked_eviction", 0) == (0 if found else 12)
    assert (await rig.serve("abc")).books.host == 4 * len(found)
    rig.cache.audit()


async def test_one_commit_of_one_request_counts_once(open_cache: Opener) -> None:
    """Under selective a request that commits the same tokens again and again is still one hit."""
    rig = await open_cache(write_policy="write_through_selective")
    with rig.lease("abcd") as lease:
        await rig.run(lease, prefetch=False)
        for _ in range(3):
            lease.commit(16)
    await turns()
    assert rig.where("abcd") == "dddd"
    assert (await served_and_settled_host(rig, "abxy")) == "bbdd"
    assert rig.where("abcd") == "bbdd"


async def served_and_settled_host(rig: Rig, letters: str) -> str:
    """Serve one prompt without a store; returns where its pages are."""
    await rig.serve(letters, prefetch=False)
    await rig.cache.admin.flush(Tier.HOST)
    rig.cache.audit()
    rig.check_local(letters)
    return rig.where(letters)


async def test_chunked_commits(open_cache: Opener) -> None:
    """A prompt committed in chunks ends up where one committed at once does."""
    rig = await open_cache(store=MemoryStore(), write_policy="write_through_selective")
    for expected in ("dddddd", "bbbbbb"):
        with rig.lease("abcdef") as lease:
            loading = await lease.load()
            await loading.finished()
            lease.allocate_nowait(25)
            rig.compute(lease, start=loading.tokens)
            assert [lease.commit(end) for end in (0, 7, 9, 20, 25)] == [
                max(loading.tokens, end // 4 * 4) for end in (0, 7, 9, 20, 25)
            ]
        await rig.cache.admin.flush()
        assert rig.where("abcdef") == expected
        rig.check_local("abcdef")
    assert await rig.check_stored("abcdef") == 6


async def test_write_back_stores_a_victim_with_its_ancestors(open_cache: Opener) -> None:
    """Under write_back an evicted tail reaches the store, together with the head that is still on the device."""
    rig = await open_cache(store=MemoryStore(), device_pages=8, write_policy="write_back")
    await rig.serve("ab", prefetch=False)
    await rig.serve("abcd", prefetch=False)
    with rig.lease("ab") as lease:
        await lease.load()
        await rig.push_out(3)
        assert rig.where("abcd") == "bbhh"
        await rig.cache.admin.flush()
        assert await rig.check_stored("abcd") == 4
        rig.check_local("abcd")


async def test_write_back_without_room_for_the_ancestors(open_cache: Opener) -> None:
    """A tail whose head has no idle room on the host is not stored alone; the next hit through it tries again."""
    rig = await open_cache(store=MemoryStore(), device_pages=8, host_pages=2, write_policy="write_back")
    await rig.serve("ab", prefetch=False)
    await rig.serve("abcd", prefetch=False)
    with rig.lease("ab") as lease:
        await lease.load()
        with rig.lease("wxyz") as other:
            await other.load()
            other.allocate_nowait(17)
        await rig.cache.admin.flush()
        assert rig.where("abcd") == "ddhh"
        assert await rig.check_stored("ab") == 0
        rig.cache.audit()


async def test_write_back_gives_up_what_the_host_cannot_hold(open_cache: Opener) -> None:
    """Of more victims at once than the host has pages the last ones are dropped and counted."""
    rig = await open_cache(device_pages=4, host_pages=2, write_policy="write_back")
    await rig.serve("abc")
    await rig.serve("wxy")
    assert rig.where("abc") == "hh"
    assert rig.where("wxy") == "ddd"
    assert rig.cache.stats().dropped_tokens == {"host_full": 4}
    rig.cache.audit()


async def test_write_back_moves_the_tail_of_what_the_host_could_not_hold_whole(open_cache: Opener) -> None:
    """Only the pages that are missing move: a prompt longer than the host keeps its head on the device."""
    rig = await open_cache(device_pages=4, host_pages=2, write_policy="write_back")
    await rig.serve("abc")
    with rig.lease("wx") as lease:
        await rig.run(lease, prefetch=False)
        assert rig.where("abc") == "dhh"
        rig.cache.audit()
    await rig.cache.admin.flush()
    assert rig.cache.stats().dropped_tokens == {}
    rig.check_local("abc")
    with rig.lease("abc") as again:
        assert (again.device_tokens, again.local_tokens) == (4, 12)


async def test_write_back_evicts_the_hosts_own_oldest(open_cache: Opener) -> None:
    """A victim takes the room of what the host has not used for longest, and nothing is lost that is stored."""
    rig = await open_cache(store=MemoryStore(), device_pages=4, host_pages=6, write_policy="write_back")
    prompts = ("abc", "def", "ghi", "jkl")
    for letters in prompts:
        await rig.serve(letters)
        await rig.cache.admin.flush()
    assert [rig.where(letters) for letters in prompts] == ["", "hhh", "hhh", "ddd"]
    assert [await rig.check_stored(letters) for letters in prompts] == [3, 3, 3, 0]
    assert rig.cache.stats().dropped_tokens == {"host_eviction": 12}
    assert (await rig.serve("abc")).books.store == 12
    rig.cache.audit()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
async def test_every_tier_in_turn(open_cache: Opener, policy: str) -> None:
    """The same prompt is served from device, host and store, the same bytes each time."""
    rig = await open_cache(store=MemoryStore(), device_pages=8, host_pages=12, write_policy=policy)
    cold = await rig.serve("abcd")
    hit = await rig.serve("abcd")
    assert (cold.books.computed, hit.books.device) == (17, 16)
    await rig.cache.admin.flush()
    await rig.push_out(4, first="A")
    await rig.cache.admin.flush()
    assert rig.where("abcd") == "hhhh"
    assert (await rig.serve("abcd")).books.host == 16
    await rig.cache.admin.flush()
    for _ in range(2):
        await rig.push_out(16, first="K")
    assert rig.where("abcd") == ""
    assert (await rig.serve("abcd")).books.store == 16
    await rig.cache.admin.flush()
    rig = await open_cache.restart(rig, write_policy=policy)
    served = await rig.serve("abcd")
    assert (served.books.store, served.books.computed) == (16, 1)
    await rig.check_everywhere("abcd")


async def test_a_store_that_fails_once_is_made_up_for(open_cache: Opener) -> None:
    """Under every policy one failed write is made up for by the next request through the path."""
    for policy in ("write_through", "write_through_selective", "write_back"):
        store = FlakyStore(MemoryStore(), "write", error=OSError("once"))
        rig = await open_cache(store=store, device_pages=4, write_policy=policy)
        for _ in range(2):
            for _ in range(2):
                await rig.serve("abc")
                await rig.cache.admin.flush()
            await rig.push_out(2, first="P")
        assert await rig.check_stored("abc") == 3, policy
        rig.cache.audit()


async def test_forks_of_one_prompt(open_cache: Opener) -> None:
    """Parallel samples share the prompt's key and part where they decode differently."""
    rig = await open_cache(store=MemoryStore())
    with rig.lease("abcd") as first:
        await rig.run(first, prefetch=False)
        with rig.cache.match_prefix("second", first.key) as second:
            loading = await second.load()
            assert loading.tokens == 16
            for lease, token in ((first, 5), (second, 6)):
                lease.extend([token] * 7)
                lease.allocate_nowait(lease.num_tokens)
                rig.compute(lease, start=16)
                assert lease.commit(lease.num_tokens) == 24
            assert first.key is not second.key
            assert first.pages[:4].tolist() == second.pages[:4].tolist()
            assert not set(first.pages[4:].tolist()) & set(second.pages[4:].tolist())
            for lease in (first, second):
                rig.check(lease, 24)
            rig.cache.audit()
    await rig.cache.admin.flush()
    assert rig.cache.stats().host.in_tree == 4 + 2 + 2


async def test_forks_that_decode_alike(open_cache: Opener) -> None:
    """Two samples that decode the same tokens keep one key, and one copy of what they compute is published."""
    rig = await open_cache()
    with rig.lease("ab") as first:
        await rig.run(first, prefetch=False)
        with rig.cache.match_prefix("second", first.key) as second:
            await second.load()
            for lease in (first, second):
                lease.extend([7] * 7)
                lease.allocate_nowait(lease.num_tokens)
                rig.compute(lease, start=8)
                lease.commit(lease.num_tokens)
            assert first.key is second.key
            assert rig.cache.stats().device.in_tree == 4
            assert rig.cache.stats().device.leased == 2
            rig.check(second, 16)
            rig.cache.audit()
    assert rig.cache.stats().device.leased == 0


async def test_rejected_speculation(open_cache: Opener) -> None:
    """discard() forgets tokens and gives back whole pages of them; other tokens may follow, and count instead."""
    rig = await open_cache(store=MemoryStore())
    with rig.lease("ab") as lease:
        await rig.run(lease, prefetch=False)
        lease.extend([1] * 11)
        lease.allocate_nowait(20)
        free = rig.cache.stats().device.free
        lease.discard(11)
        assert rig.cache.stats().device.free == free + 2
        assert lease.num_tokens == 11
        rig.cache.audit()
        lease.extend([2] * 5)
        lease.allocate_nowait(16)
        rig.compute(lease, start=8)
        assert lease.commit(16) == 16
        prompt = list(memoryview(bytes(lease.key.data)).cast("I"))
        assert len(prompt) == 16
        rig.check(lease, 16)
    await rig.cache.admin.flush()
    with rig.lease([*prompt, 9]) as again:
        assert again.local_tokens == 16
        assert (await again.load()).tokens == 16
        rig.check(again, 16)


async def test_discarded_pages_wait_for_the_forward(open_cache: Opener) -> None:
    """Pages discarded behind an unset fence are nobody's before it is set."""
    rig = await open_cache(device_pages=4)
    with rig.lease("abcd") as lease:
        await lease.load(total_tokens=16)
        lease.allocate_nowait(16)
        fence = rig.cache.host_fence()
        lease.discard(4, after=fence)
        rig.cache.audit()
        assert rig.cache.stats().device.free == 0
        fence.set()
        await turns()
        assert rig.cache.stats().device.free == 3


async def test_the_whole_prompt(open_cache: Opener) -> None:
    """whole=True matches and fetches all whole pages, with nothing left to compute; else the last one is left."""
    rig = await open_cache(store=MemoryStore())
    await rig.serve("abcd")
    await rig.cache.admin.flush()
    exact = tokens("abcd")[:-1]
    for whole, expected in ((False, 12), (True, 16)):
        with rig.lease(exact, whole=whole) as lease:
            assert lease.local_tokens == expected
            assert (await lease.load()).tokens == expected
            assert lease.books.computed == 16 - expected
            assert lease.commit(expected) == expected
    rig = await open_cache.restart(rig)
    with rig.lease(exact, whole=True) as lease:
        assert (await lease.prefetch()).fetched_tokens == 16
        assert (await lease.load()).tokens == 16
        rig.check(lease, 16)


@pytest.mark.parametrize("again", ["abcd", "abxy", "abcdef"])
async def test_a_prompt_that_is_evicted_after_each_use_is_kept_in_the_end(
    open_cache: Opener, again: str
) -> None:
    """Under write_through_selective the second commit counts as such, even if the pages had left meanwhile."""
    rig = await open_cache(device_pages=8, host_pages=16, write_policy="write_through_selective")
    await rig.serve("abcd")
    await rig.serve("stuvwxy")
    assert rig.where("abcd") == ""
    await rig.serve(again)
    await rig.cache.admin.flush(Tier.HOST)
    common = len([1 for mine, theirs in zip("abcd", again, strict=False) if mine == theirs])
    assert rig.where(again) == "b" * common + "d" * (len(again) - common)
    rig.check_local(again)
    rig.cache.audit()


async def test_a_clear_forgets_what_was_here(open_cache: Opener) -> None:
    """After a clear a prompt is as new as on the first day."""
    rig = await open_cache(device_pages=8, host_pages=16, write_policy="write_through_selective")
    await rig.serve("abcd")
    await rig.serve("stuvwxy")
    await rig.cache.admin.clear()
    await rig.serve("abcd")
    await rig.cache.admin.flush(Tier.HOST)
    assert rig.where("abcd") == "dddd"
