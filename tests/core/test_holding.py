"""Holding: what a request hashes, what its pages are worth, and what becomes of it when its root is cleared."""

from __future__ import annotations

import hashlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_async.core import hashing
from hicache_async.core.hashing import HashChain
from hicache_async.core.holding import Holding
from hicache_async.core.pool import Owner
from hicache_async.core.tokens import TokenKey
from hicache_async.types import Tier
from tests.core.world import DEVICE, HOST, PAGE_NBYTES, World, page_hashes, prefix_of, prompt_bytes


class CountedHashes:
    """Counts the sha256 calls that page hashes cost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls = 0
        monkeypatch.setattr(hashing, "hashlib", SimpleNamespace(sha256=self._sha256))

    def _sha256(self, data: bytes) -> object:
        self._calls += 1
        return hashlib.sha256(data)

    def spent(self) -> int:
        """Return how many calls were made since this was last asked."""
        calls, self._calls = self._calls, 0
        return calls


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountedHashes:
    """Count the page hashes of a test."""
    return CountedHashes(monkeypatch)


def token_list(prompt: str) -> list[int]:
    """Return the tokens of a prompt, and one more that is no whole page."""
    return [*np.frombuffer(prompt_bytes(prompt), np.uint32).tolist(), 7]


def make_holding(
    world: World, tokens: str | TokenKey, *, seed: bytes = b"", priority: int = 0, output_priority: int = 0
) -> Holding:
    """Return what one request holds, before load."""
    key = tokens if isinstance(tokens, TokenKey) else TokenKey(token_list(tokens))
    chain = HashChain(seed, PAGE_NBYTES)
    return Holding(
        world.tree,
        world.pools[DEVICE],
        key,
        len(key),
        chain,
        whole=False,
        priority=priority,
        output_priority=output_priority,
    )


def load(world: World, holding: Holding) -> Holding:
    """Take over what is on the device."""
    match = holding.match()
    end = world.tree.cut(match, match.device_pages)
    world.tree.pin(DEVICE, end)
    holding.settle_load(end, match.device_pages)
    return holding


def compute(world: World, holding: Holding, prompt: str, *ends: int) -> None:
    """Compute the rest of ``prompt`` and commit it up to each of ``ends``, in pages; by default all at once."""
    known = holding.length * 4 // PAGE_NBYTES * PAGE_NBYTES
    tail = prompt_bytes(prompt)[known:]
    if tail:
        holding.length, holding.key = known // 4, holding.key.truncated(known // 4)
        holding.extend(tail)
    missing = holding.table.missing_pages(len(prompt))
    holding.table.reserve(world.pools[DEVICE].take(missing, Owner.LEASE, fenced=True))
    new = holding.table.place(len(prompt))
    world.write(DEVICE, new, page_hashes(prompt, holding.chain.seed)[len(prompt) - len(new) :])
    for end in ends or (len(prompt),):
        holding.commit(end, ())
        holding.credit()


def serve(world: World, prompt: str, full: str = "", *ends: int, **worth: Any) -> Holding:
    """Run one request from its match to its last commit."""
    holding = load(world, make_holding(world, prompt, **worth))
    compute(world, holding, full or prompt, *ends)
    return holding


def worths(world: World) -> dict[str, int]:
    """Return the priority of every node, by the prefix that it ends."""
    return {prefix_of(node): node.priority for node in world.all_nodes()}


# Hashes


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_a_cached_prompt_is_not_hashed_again(counted: CountedHashes, tier: Tier) -> None:
    """A list of tokens that the tree knows costs no hash at all, and has the right ones."""
    world = World()
    world.graft(tier, "abcde")
    counted.spent()
    holding = make_holding(world, "abcde")
    assert holding.match().local_pages == 5
    hashes = holding.hashes(5)
    assert counted.spent() == 0
    assert hashes == page_hashes("abcde")


def test_only_what_is_new_is_hashed(counted: CountedHashes) -> None:
    """Behind the cached part, which may end inside a node, each page is hashed once, from the last known one on."""
    world = World()
    world.graft(DEVICE, "ab")
    world.graft(DEVICE, "abcdef", 2)
    counted.spent()
    holding = make_holding(world, "abcdxyz")
    holding.match()
    assert counted.spent() == 0
    hashes = list(holding.hashes(7))
    assert counted.spent() == 3
    for _ in range(2):
        holding.match()
        holding.hashes(7)
    assert counted.spent() == 0
    assert hashes == page_hashes("abcdxyz")


def test_a_key_that_knows_more_than_the_tree_keeps_it(counted: CountedHashes) -> None:
    """What a conversation has hashed itself is not replaced by the fewer hashes of a shorter match."""
    world = World()
    key = TokenKey(token_list("abcd"))
    known = list(make_holding(world, key).hashes(4))
    world.graft(DEVICE, "ab")
    counted.spent()
    holding = make_holding(world, key)
    assert holding.match().local_pages == 2
    hashes = holding.hashes(4)
    assert counted.spent() == 0
    assert all(mine is theirs for mine, theirs in zip(hashes, known, strict=True))


def test_hashes_of_another_namespace_are_not_taken(counted: CountedHashes) -> None:
    """A key that knew the hashes of one seed takes those of the other from the tree, or computes them."""
    world = World()
    world.graft(DEVICE, "abc", seed=b"tenant")
    key = TokenKey(token_list("abc"))
    plain = make_holding(world, key)
    plain.hashes(3)
    counted.spent()
    tenant = make_holding(world, key, seed=b"tenant")
    tenant.match()
    assert tenant.hashes(3) == page_hashes("abc", b"tenant")
    spent = counted.spent() - 3  # those of page_hashes
    assert spent == 0
    plain.match()
    assert plain.hashes(3) == page_hashes("abc")


def test_a_request_hashes_each_page_once(counted: CountedHashes) -> None:
    """From match to the last commit a cold prompt costs one hash a page, and the next turn only what it adds."""
    world = World()
    expected = page_hashes("abcdef")
    counted.spent()
    holding = load(world, make_holding(world, "abcd"))
    assert counted.spent() == 0
    holding.table.reserve(world.pools[DEVICE].take(4, Owner.LEASE, fenced=True))
    world.write(DEVICE, holding.table.place(4), expected[:4])
    for end in (1, 3, 4):
        holding.commit(end, ())
    assert counted.spent() == 4
    holding.release(None)
    again = load(world, make_holding(world, "abcdef"))
    again.table.reserve(world.pools[DEVICE].take(2, Owner.LEASE, fenced=True))
    world.write(DEVICE, again.table.place(6), expected[4:])
    again.commit(6, ())
    assert counted.spent() == 2
    again.release(None)
    world.audit()


# Priorities


def test_a_commit_ends_a_node_where_the_prompt_ends() -> None:
    """Where output is worth less than the prompt the two are nodes of their own, though committed in one go."""
    world = World()
    serve(world, "ab", "abxyz", priority=5, output_priority=1).release(None)
    assert worths(world) == {"ab": 5, "abxyz": 1}
    assert world.residency() == {"ab": "device", "abxyz": "device"}
    world.audit()


@pytest.mark.parametrize("ends", [(1, 4, 5), (2, 5), (4, 5), (5,)])
def test_the_end_of_the_prompt_does_not_depend_on_the_commits(ends: tuple[int, ...]) -> None:
    """Wherever commits end, each page is worth what its part of the request is worth."""
    world = World()
    serve(world, "ab", "abxyz", *ends, priority=1, output_priority=5).release(None)
    priorities = {prefix[1]: node.priority for prefix, node, _ in world.pages()}
    assert priorities == {"a": 1, "ab": 1, "abx": 5, "abxy": 5, "abxyz": 5}
    world.audit()


def test_equal_priorities_cut_nothing() -> None:
    """Where output is worth as much as the prompt, one commit is one node."""
    world = World()
    serve(world, "ab", "abxyz", priority=5, output_priority=5).release(None)
    assert worths(world) == {"abxyz": 5}


def test_a_page_that_is_half_prompt_counts_as_output() -> None:
    """The last whole page of the prompt is the last one that is worth what the prompt is."""
    world = World()
    holding = load(world, make_holding(world, "ab", priority=5, output_priority=1))
    assert (holding.length, holding.prompt_pages) == (5, 2)
    compute(world, holding, "abc")
    assert worths(world) == {"ab": 5, "abc": 1}
    holding.release(None)


def test_a_node_is_worth_the_most_that_anybody_gave_it() -> None:
    """Requests of less priority take nothing away, also where the output of one is the prompt of another."""
    world = World()
    for priority, expected in ((2, 2), (7, 7), (3, 7)):
        serve(world, "abc", priority=priority, output_priority=priority).release(None)
        assert worths(world) == {"abc": expected}
    serve(world, "abc", "abcxy", priority=0, output_priority=1).release(None)
    assert worths(world) == {"abc": 7, "abcxy": 1}
    serve(world, "abcxy", priority=4, output_priority=4).release(None)
    assert worths(world) == {"abc": 7, "abcxy": 4}
    world.audit()


def test_a_commit_cuts_what_is_cached_where_its_prompt_ends() -> None:
    """A node across the end of a later, shorter prompt is split there: its tail may be worth less."""
    world = World()
    serve(world, "abcd", priority=0, output_priority=0).release(None)
    shorter = make_holding(world, "ab", priority=6, output_priority=2)
    root = world.tree.root(b"")
    world.tree.pin(DEVICE, root)
    shorter.settle_load(root, 0)
    compute(world, shorter, "abcd")
    assert worths(world) == {"ab": 6, "abcd": 2}
    assert shorter.table.owned.tolist() == [True] * 4, "all of it was there already: private duplicates"
    shorter.release(None)
    world.audit()


def test_created_is_when_a_node_came_however_often_it_is_used() -> None:
    """Uses, commits through it and a second tier leave it; both parts of a split have it."""
    world = World()
    first = world.graft(DEVICE, "abcd")
    second = world.graft(DEVICE, "xy")
    assert first.created < second.created
    created = first.created
    world.match("abcd")
    world.graft(HOST, "abcd")
    world.graft(DEVICE, "abcd")
    assert first.created == created
    assert world.cut("ab").created == first.created == created
    assert world.graft(DEVICE, "abcdef", 4).created > second.created


# Cleared


def test_a_lease_on_a_cleared_root_keeps_its_pages_private() -> None:
    """What it commits afterwards no match finds; it reads what it had, and all is free when it ends."""
    world = World()
    holding = serve(world, "ab", priority=1)
    world.tree.detach(world.tree.roots[b""])
    compute(world, holding, "abcd")
    assert world.residency() == {} and not world.tree.roots
    assert (len(holding.table), holding.committed_pages) == (4, 4)
    assert holding.table.owned.tolist() == [False, False, True, True]
    end = holding.device_end
    assert end is not None and prefix_of(end) == "ab"
    leased = {(DEVICE, Owner.LEASE): holding.table.pages[2:]}
    world.audit({DEVICE: Counter({end: 1}), HOST: Counter()}, leased)
    assert [world.content[DEVICE][page] for page in holding.table.pages.tolist()] == page_hashes("abcd")
    holding.release(None)
    assert world.pools[DEVICE].num_free == 16 and not world.tree.detached
    world.close()


def test_a_lease_with_nothing_cached_survives_the_clear_of_its_root() -> None:
    """It stands on the root alone: its commits stay private, and the next request grows a new root."""
    world = World()
    holding = load(world, make_holding(world, "abc"))
    assert holding.device_end is world.tree.roots[b""]
    world.tree.detach(world.tree.roots[b""])
    compute(world, holding, "abc")
    assert holding.table.owned.all() and not world.tree.roots
    other = serve(world, "abc")
    assert world.residency() == {"abc": "device"}
    assert not set(other.table.pages.tolist()) & set(holding.table.pages.tolist())
    holding.release(None)
    assert world.residency() == {"abc": "device"}
    other.release(None)
    world.audit()
    world.close()
