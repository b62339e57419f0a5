"""Conversations: what a turn costs, what keys share, and a prefix that a turn finds while it is under way."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from hicache_async import CapacityError, Tier, TokenKey
from hicache_async.core import hashing
from hicache_async.core.hashing import HashChain
from hicache_async.core.node import Node
from hicache_async.core.tokens import token_bytes
from hicache_async.core.tree import PrefixTree
from hicache_async.explanation import Keeper
from hicache_async.stores.memory import MemoryStore
from hicache_async.types import Tokens
from tests.flows.explaining import explained, places
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, on_host, tokens, turns

pytestmark = pytest.mark.asyncio

NUM_TURNS = 6
SAID, ANSWERED = 7, 5
"""Tokens that each turn adds: by the user, and decoded. Together three pages."""
PAGES_A_TURN = (SAID + ANSWERED) // PAGE_TOKENS


class CountedBytes(bytearray):
    """The tokens of a key; counts the bytes that are copied out of it."""

    num_copied = 0

    def __getitem__(self, place: slice) -> bytearray:  # type: ignore[override]
        part = super().__getitem__(place)
        self.num_copied += len(part)
        return part

    def __bytes__(self) -> bytes:
        return bytes(self[:])


@dataclass
class Costs:
    """What a cache does with tokens.

    Attributes:
        hashed: what page hashes were made of, in order: the hash before, and the tokens of a page.
        num_keys: keys built.
    """

    hashed: list[bytes] = field(default_factory=list)
    num_keys: int = 0

    def spent(self) -> tuple[int, int]:
        """Return how many hashes were made and keys built since this was last asked."""
        spent = len(self.hashed), self.num_keys
        self.hashed, self.num_keys = [], 0
        return spent


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Costs:
    """Count hashes and keys."""
    counted = Costs()
    build = TokenKey.__init__

    def sha256(data: bytes) -> object:
        counted.hashed.append(bytes(data))
        return hashlib.sha256(data)

    def init(key: TokenKey, ids: Tokens = ()) -> None:
        counted.num_keys += 1
        build(key, ids)

    monkeypatch.setattr(hashing, "hashlib", SimpleNamespace(sha256=sha256))
    monkeypatch.setattr(TokenKey, "__init__", init)
    return counted


def check_digests(rig: Rig) -> int:
    """Compare the digests on all nodes with the chained hash of the tokens above them; returns how many there are."""
    count = 0

    def walk(node: Node, previous: bytes) -> None:
        nonlocal count
        step = PAGE_TOKENS * 4
        for page, digest in enumerate(node.hashes):
            previous = hashlib.sha256(previous + node.segment[page * step : (page + 1) * step]).digest()
            assert digest == previous, f"{node!r} has a wrong digest for its page {page}"
            count += 1
        for child in (node.children or {}).values():
            walk(child, previous)

    for seed, root in rig.ctx.tree.roots.items():
        walk(root, seed)
    return count


async def take_turn(rig: Rig, prompt: Tokens | TokenKey, answer: list[int]) -> tuple[int, TokenKey]:
    """Serve one turn, committing as it decodes; returns how many tokens were cached, and the lease's key."""
    with rig.cache.match_prefix("conversation", prompt) as lease:
        await lease.prefetch()
        loading = await lease.load(lease.num_tokens + len(answer))
        await rig.forward(lease, loading)
        lease.commit(lease.num_tokens)
        for token in answer:
            known = lease.num_tokens
            lease.extend([token])
            lease.allocate_nowait(lease.num_tokens).block()
            rig.compute(lease, start=known)
            lease.commit(lease.num_tokens)
        rig.check(lease, lease.num_tokens)
        key = lease.key
    await rig.cache.admin.flush()
    return loading.tokens, key


ABOVE = {Tier.DEVICE: [], Tier.HOST: [Tier.DEVICE], Tier.STORE: [Tier.DEVICE, Tier.HOST]}


async def leave_in(rig: Rig, tier: Tier) -> None:
    """Forget what is cached above ``tier``."""
    for above in ABOVE[tier]:
        await rig.cache.admin.clear(above)


# What a turn costs


@pytest.mark.parametrize("tier", list(Tier))
async def test_a_turn_hashes_and_copies_what_it_adds(open_cache: Opener, costs: Costs, tier: Tier) -> None:
    """Wherever the turns before it are, a kept key is never built anew; only new pages are hashed, once, and copied."""
    rig = await open_cache(store=MemoryStore(), device_pages=32, host_pages=64)
    key = TokenKey(range(16))
    key.data = CountedBytes(key.data)
    costs.spent()
    copied: list[int] = []
    hashed: list[bytes] = []
    for turn in range(NUM_TURNS):
        key.extend([1000 + turn] * SAID)
        cached, lease_key = await take_turn(rig, key, [2000 + turn] * ANSWERED)
        assert lease_key is key and len(key) == 16 + (turn + 1) * (SAID + ANSWERED)
        hashed += costs.hashed
        assert costs.spent() == (PAGES_A_TURN + (0 if turn else 4), 0)
        assert cached == (16 + turn * (SAID + ANSWERED) if turn else 0)
        refetched = cached * 4 if tier is Tier.STORE else 0  # nodes that are made anew need their tokens
        copied.append(key.data.num_copied - refetched)
        key.data.num_copied = 0
        await leave_in(rig, tier)
    assert len(hashed) == len(set(hashed)) == len(key) // PAGE_TOKENS
    assert len(set(copied[1:])) == 1, f"copies grow with the conversation: {copied}"
    if tier is not Tier.STORE:
        assert check_digests(rig) == len(key) // PAGE_TOKENS


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
async def test_a_list_costs_the_hashes_of_what_is_not_cached(
    open_cache: Opener, costs: Costs, tier: Tier
) -> None:
    """A prompt that comes as a list each turn is read again, and of its pages only the new ones are hashed."""
    rig = await open_cache(store=MemoryStore(), device_pages=32, host_pages=64)
    prompt = list(range(16))
    for turn in range(NUM_TURNS):
        answer = [2000 + turn] * ANSWERED
        prompt += [1000 + turn] * SAID
        cached, _ = await take_turn(rig, prompt, answer)
        prompt += answer
        assert costs.spent() == (PAGES_A_TURN + (0 if turn else 4), 1)
        assert cached == (len(prompt) - SAID - ANSWERED if turn else 0)
        await leave_in(rig, tier)
    assert check_digests(rig) == len(prompt) // PAGE_TOKENS


async def test_a_prompt_of_exactly_whole_pages(open_cache: Opener, costs: Costs) -> None:
    """Its last page is computed twice, since a token must be left, and hashed once; the next turn finds all of it."""
    rig = await open_cache(store=MemoryStore())
    key = TokenKey(tokens("ab")[:-1])
    costs.spent()
    assert [(await take_turn(rig, key, []))[0] for _ in range(2)] == [0, 4]
    assert costs.spent() == (2, 0)
    await leave_in(rig, Tier.STORE)
    assert (await take_turn(rig, key, []))[0] == 4
    key.extend([7] * 4)
    assert (await take_turn(rig, key, []))[0] == 8
    assert costs.spent() == (1, 0)
    assert check_digests(rig) == 3


# What keys share


async def test_parallel_samples_fork_what_is_hashed(open_cache: Opener, costs: Costs) -> None:
    """Forks of a key, taken turn after turn, hash and compute what they add, and none sees another's tokens."""
    rig = await open_cache(device_pages=64, host_pages=128)
    keys = [TokenKey(tokens("abc"))]
    await take_turn(rig, keys[0], [])
    assert costs.spent() == (3, 1)
    for turn in range(3):
        keys = [key.fork() for key in keys for _ in range(2)]
        costs.spent()
        for sample, key in enumerate(keys):
            before = len(key) // PAGE_TOKENS * PAGE_TOKENS
            key.extend([100 * turn + sample] * SAID)
            cached, lease_key = await take_turn(rig, key, [500 + sample] * ANSWERED)
            assert lease_key is key
            assert (cached, len(key)) == (before, 13 + (turn + 1) * 12)
        assert costs.spent() == (len(keys) * PAGES_A_TURN, 0)
    assert len({bytes(key.data) for key in keys}) == 8
    assert check_digests(rig) == 3 + (2 + 4 + 8) * PAGES_A_TURN


@pytest.mark.parametrize("alike", [True, False])
async def test_leases_of_two_lengths_share_a_key(open_cache: Opener, costs: Costs, alike: bool) -> None:
    """A lease that decodes into what the next turn has appended keeps the key; one that decodes otherwise forks it."""
    rig = await open_cache(device_pages=32)
    key = TokenKey(tokens("ab"))
    with rig.cache.match_prefix("early", key) as early:
        await rig.run(early)
        key.extend([7] * 11)
        with rig.cache.match_prefix("late", key) as late:
            await rig.run(late)
            assert (early.num_tokens, late.num_tokens) == (9, 20)
            costs.spent()
            early.extend([7 if alike else 8] * 15)  # beyond the end of the other one's, too
            (await early.allocate(24)).block()
            rig.compute(early, start=8)
            assert early.commit(24) == 24
            assert (early.key is key, late.key is key) == (alike, True)
            assert (len(key), late.num_tokens) == (24 if alike else 20, 20)
            assert costs.spent() == ((1, 0) if alike else (4, 1))
            late.extend([9] * 4)
            (await late.allocate(24)).block()
            rig.compute(late, start=20)
            late.commit(24)
            assert key.data == token_bytes([*tokens("ab"), *([7] * 15 if alike else [7] * 11 + [9] * 4)])
            for lease in (early, late):
                rig.check(lease, 24)
    assert check_digests(rig) == (7 if alike else 10)


async def test_digests_on_nodes_stay_those_of_the_tokens(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However nodes are split, joined, left by a tier and brought back, each keeps the digests computed for it."""
    joined: list[bool] = []
    merge = PrefixTree.merge

    def counted_merge(tree: PrefixTree, node: Node) -> None:
        was_attached = node.attached
        merge(tree, node)
        joined.append(was_attached and not node.attached)

    monkeypatch.setattr(PrefixTree, "merge", counted_merge)
    rig = await open_cache(store=MemoryStore(), device_pages=12, host_pages=16)
    key = TokenKey(tokens("abcdefgh"))
    await take_turn(rig, key, [])
    (node,) = (rig.ctx.tree.roots[b""].children or {}).values()
    computed = key.page_hashes(HashChain(b"", PAGE_TOKENS * 4), 8)
    assert all(kept is digest for kept, digest in zip(node.hashes, computed, strict=True))
    num_nodes = set()
    for letters in ("abXY", "abcdefQR", "mn", "op", "q", "abcdefghij", "rst", "u", "v", "wxy", "abcdefgh"):
        await rig.serve(letters)
        await rig.cache.admin.flush()
        rig.cache.audit()
        assert check_digests(rig) > 0
        num_nodes.add(rig.cache.stats().nodes)
    assert len(num_nodes) > 2 and any(joined)
    for tier in (Tier.DEVICE, Tier.HOST, None):
        await rig.cache.admin.clear(tier)
        await rig.serve("abcdefgh")
        assert check_digests(rig) >= 8


# A prefix that is under way


@dataclass
class UnderWay:
    """Four pages on their way: of a load, an offload, or a forward that still writes them.

    Attributes:
        tier: which they are on their way to.
        end: lets them arrive.
    """

    rig: Rig
    tier: Tier
    end: Callable[[], object]


async def loading(open_cache: Opener) -> UnderWay:
    rig = await on_host(open_cache, PREFIX, device_pages=8, host_pages=6)
    with rig.lease(PREFIX) as lease:
        await lease.load()
    return UnderWay(rig, Tier.DEVICE, rig.virtual.advance_all)


async def offloading(open_cache: Opener) -> UnderWay:
    rig = await open_cache(store=MemoryStore(), device_pages=8, host_pages=6)
    rig.virtual.auto = False
    with rig.lease(PREFIX) as lease:
        await rig.run(lease, prefetch=False)
    return UnderWay(rig, Tier.HOST, rig.virtual.advance_all)


async def computing(open_cache: Opener) -> UnderWay:
    rig = await open_cache(store=MemoryStore(), device_pages=9, host_pages=6)  # one for the last token
    fence = rig.cache.host_fence()
    with rig.lease(PREFIX) as lease:
        await rig.forward(lease, await lease.load())
        lease.commit(lease.num_tokens, after=fence)
        lease.release(after=fence)
    return UnderWay(rig, Tier.DEVICE, fence.set)


PREFIX = "abcd"
each_way = pytest.mark.parametrize(
    "start", [loading, offloading, computing], ids=lambda start: start.__name__
)
Start = Callable[[Opener], Awaitable[UnderWay]]


@each_way
async def test_what_is_under_way_is_matched_and_joined(open_cache: Opener, start: Start) -> None:
    """A match covers it, a load waits for what runs and copies nothing again, and an explanation says so."""
    moving = await start(open_cache)
    rig, on_device = moving.rig, moving.tier is Tier.DEVICE
    num_copies = rig.virtual.num_submitted
    explanation = await explained(rig, PREFIX)
    device, host, _ = places(explanation)
    assert (device if on_device else host) == "~~~~"
    assert all(page.keepers == (Keeper.MOVE,) for page in explanation.pages)
    with rig.lease(PREFIX) as lease:
        assert (lease.device_tokens, lease.local_tokens, explanation.device_tokens) == (16, 16, 16)
        loaded = await lease.load()
        assert (loaded.tokens, loaded.loaded_tokens, loaded.done) == (16, 0, not on_device)
        assert rig.virtual.num_submitted == num_copies
        moving.end()
        await loaded.finished()
        rig.check(lease, 16)
    await turns()
    assert rig.virtual.num_submitted == num_copies + (start is computing)  # its copy to the host follows
    await rig.cache.admin.flush()
    assert places(await explained(rig, PREFIX)) == ("yyyy", "yyyy", "yyyy")
    rig.check_local(PREFIX)


@each_way
async def test_what_is_under_way_is_not_evicted(open_cache: Opener, start: Start) -> None:
    """Neither end of it makes room, on device or host, before it has arrived; afterwards both do."""
    moving = await start(open_cache)
    rig = moving.rig
    where = rig.where(PREFIX)
    await rig.put_in_store("wxyz")
    with rig.lease("wxyz") as lease:
        assert (await lease.prefetch()).fetched_tokens == (16 if start is computing else 8)
    with rig.lease("mnop") as lease:
        await lease.load(total_tokens=0)
        with pytest.raises(CapacityError):
            lease.allocate_nowait(20)
        assert rig.where(PREFIX) == where
        rig.cache.audit()
        moving.end()
        rig.virtual.auto = True
        await turns()
        lease.allocate_nowait(rig.ctx.device_pool.capacity * PAGE_TOKENS)
    assert set(rig.where(PREFIX)) <= {"h"}


@each_way
@pytest.mark.parametrize("cleared", [None, Tier.DEVICE, Tier.HOST])
async def test_what_is_under_way_survives_a_clear_and_is_freed_when_it_has_arrived(
    open_cache: Opener, start: Start, cleared: Tier | None
) -> None:
    """Nobody gets pages that are still read or written, and what arrives late is in nobody else's pages."""
    moving = await start(open_cache)
    rig = moving.rig
    held = {Tier.DEVICE: 4, Tier.HOST: 0 if start is computing else 4}
    await rig.cache.admin.clear(cleared)
    rig.cache.audit()
    before = rig.cache.stats()
    assert (before.device.in_tree, before.host.in_tree) == (held[Tier.DEVICE], held[Tier.HOST])
    with rig.lease("mnop") as lease:
        assert (await lease.load(total_tokens=0)).tokens == 0
        lease.allocate_nowait(16).block()
        rig.compute(lease, 16)
        moving.end()
        rig.virtual.auto = True
        await turns()
        rig.check(lease, 16)
        rig.cache.audit()
    await rig.cache.admin.clear()
    assert not rig.ctx.tree.detached
    after = rig.cache.stats()
    assert (after.device.free, after.host.free) == (after.device.capacity, after.host.capacity)
