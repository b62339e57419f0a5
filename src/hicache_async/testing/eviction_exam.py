"""The exam for eviction policies: keys that never fall, and a tree that evicts by them, each time exactly.

All it takes to adopt a policy of your own is an object of it and a test::

    from dataclasses import dataclass

    from hicache_async.eviction import Candidate
    from hicache_async.testing.eviction_exam import check_eviction_policy


    @dataclass(frozen=True)
    class BatchFirst:
        interactive_priority: int = 10

        def key(self, candidate: Candidate, /) -> tuple[bool, int]:
            return candidate.priority >= self.interactive_priority, candidate.used


    def test_batch_first() -> None:
        check_eviction_policy(BatchFirst())

Then ``CacheConfig(device_eviction_policy=BatchFirst())`` evicts by it.
"""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from ..core.node import Node
from ..core.pool import FreeList, Owner, PagePool
from ..core.tokens import TOKEN_NBYTES, token_bytes
from ..core.tree import TIERS, PrefixTree
from ..eviction import Candidate, EvictionPolicy
from ..types import Tier

_RUNS = range(4)
_ROOT_SEED = b""
_KEYS_PER_EVICTION = 3
"""Asked for at most, on average: of the victim, and of those that were only matched since the last."""


def check_eviction_policy(policy: EvictionPolicy) -> None:
    """Examine a policy: its keys alone, then in trees of two tiers that commit, match and evict by it.

    It is a matter of a second or two, and the same each time.

    Raises:
        AssertionError: says which demand of :class:`~hicache_async.eviction.EvictionPolicy` is broken,
            and by which candidate.
    """
    _demand(
        isinstance(policy, EvictionPolicy) and not isinstance(policy, type),
        f"{policy!r} is no object with a method key(candidate)",
    )
    try:
        _examine(policy)
    except AssertionError:
        raise
    except Exception as error:  # whatever the policy raised
        raise AssertionError(f"{policy!r} raised {error!r}; a key never raises") from error


def _examine(policy: EvictionPolicy) -> None:
    for run in _RUNS:
        _check_keys(policy, random.Random(run))
    for run in _RUNS:
        _check_evictions(policy, random.Random(run))
    for num_leaves in (16, 1024):
        _check_cost(policy, num_leaves)


def _demand(kept: bool, message: str) -> None:
    if not kept:
        raise AssertionError(message)


# Keys alone


class Facts(NamedTuple):
    """A candidate that has what a policy may read, and nothing else."""

    used: int
    hits: int
    created: int
    priority: int


def _facts_of(candidate: Candidate) -> Facts:
    return Facts(candidate.used, candidate.hits, candidate.created, candidate.priority)


class _Watched:
    """A policy, how often it was asked, and a look at what it does to whom it is asked about."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.calls = 0

    def key(self, candidate: Candidate, /) -> Any:
        self.calls += 1
        before = _facts_of(candidate)
        try:
            key = self.policy.key(candidate)
        except AttributeError as error:
            allowed = ", ".join(Facts._fields)
            raise AssertionError(f"{self.policy!r} may read {allowed} and set nothing: {error}") from error
        after = _facts_of(candidate)
        _demand(after == before, f"{self.policy!r} changes a candidate: {before} became {after}")
        return key


def _check_keys(policy: EvictionPolicy, rng: random.Random) -> None:
    watched = _Watched(policy)
    asked: list[tuple[Facts, Any]] = []
    for _ in range(40):
        life = [(facts, watched.key(facts)) for facts in _life(rng)]
        for (before, known), (facts, key) in pairwise(life):
            _demand(
                not _less(policy, key, known),
                f"{policy!r} lets a key fall: {known!r} of {before} became {key!r} of {facts}",
            )
        asked += life
    for facts, key in asked:
        for again in (facts, facts._replace()):
            _demand(
                bool(watched.key(again) == key),
                f"{policy!r} has two keys for one candidate, {key!r} and another, of {facts}: "
                "a key must be a function of the candidate's attributes",
            )
    _check_order(policy, [key for _, key in rng.sample(asked, 150)])


def _life(rng: random.Random) -> list[Facts]:
    """Return what a candidate is from its first commit on: nothing of it ever falls."""
    tick = rng.choice([1, 1_000, 1 << 40]) + rng.randrange(100)
    facts = Facts(used=tick, hits=rng.choice([0, 0, 1, 1_000]), created=tick, priority=rng.randint(-2, 2))
    life = [facts]
    for _ in range(20):
        tick += rng.choice([0, 1, 50])
        hits = facts.hits + rng.choice([0, 1])
        priority = facts.priority + rng.choice([0, 0, 0, 1, 10])
        facts = facts._replace(used=tick, hits=hits, priority=priority)
        life.append(facts)
    return life


def _check_order(policy: EvictionPolicy, keys: list[Any]) -> None:
    for one, other in combinations(keys, 2):
        places = (_less(policy, one, other), _less(policy, other, one), bool(one == other))
        _demand(sum(places) == 1, f"keys of {policy!r} have no order: {one!r} and {other!r}")
    keys.sort()
    for first, second in combinations(keys, 2):
        _demand(
            not _less(policy, second, first),
            f"keys of {policy!r} go in a circle: {first!r} and {second!r}",
        )


def _less(policy: EvictionPolicy, one: Any, other: Any) -> bool:
    try:
        return bool(one < other)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{policy!r} has keys that cannot be compared: {one!r} and {other!r}") from error


# In a tree


class _Cache:
    """A tree of two tiers that evicts by a policy, page after page of one token."""

    def __init__(self, policy: EvictionPolicy, num_pages: int) -> None:
        self.policy = policy
        self.expected = _Watched(policy)
        self.watched = _Watched(policy)
        self.pools = {tier: PagePool(tier.value, FreeList(num_pages), num_pages) for tier in TIERS}
        self.tree = PrefixTree(TOKEN_NBYTES, self.pools, policies=dict.fromkeys(TIERS, self.watched))
        self.pinned: list[Node] = []

    def nodes(self) -> list[Node]:
        return [node for root in self.tree.roots.values() for node in root.subtree() if node is not root]

    def match(self, tokens: list[int]) -> None:
        self.tree.match(_ROOT_SEED, token_bytes(tokens), len(tokens))

    def commit(self, tokens: list[int], priority: int = 0) -> None:
        """Compute what of a prompt is not on the device, as far as there is room, and count a hit."""
        data = token_bytes(tokens)
        match = self.tree.match(_ROOT_SEED, data, len(tokens))
        start = match.device_pages
        parent = self.tree.cut(match, start)
        self.tree.pin(Tier.DEVICE, parent)
        end = start + self.make_room(Tier.DEVICE, len(tokens) - start)
        pages = self.pools[Tier.DEVICE].take(end - start, Owner.LEASE, fenced=False).pages
        graft = self.tree.graft(Tier.DEVICE, parent, data, [b""] * end, start, pages, source=Owner.LEASE)
        self.tree.pin(Tier.DEVICE, graft.end)
        self.tree.unpin(Tier.DEVICE, parent)
        for node in graft.end.path():
            node.hits += 1
            node.priority = max(node.priority, priority)
        self.tree.unpin(Tier.DEVICE, graft.end)

    def offload(self, end: Node) -> None:
        """Copy a path to the host, ancestors first, as far as there is room."""
        for node in end.path():
            assert node.parent is not None
            if node.host.pages is None:
                self.tree.pin(Tier.HOST, node.parent)
                num_pages = self.make_room(Tier.HOST, node.num_pages)
                self.tree.unpin(Tier.HOST, node.parent)
                if num_pages < node.num_pages:
                    return
                pages = self.pools[Tier.HOST].take(num_pages, Owner.LEASE, fenced=False).pages
                self.tree.put(Tier.HOST, node, pages, source=Owner.LEASE)

    def pin(self, node: Node) -> None:
        self.tree.pin(Tier.DEVICE, node)
        self.pinned.append(node)

    def unpin(self) -> None:
        self.tree.unpin(Tier.DEVICE, self.pinned.pop(0))

    def make_room(self, tier: Tier, num_pages: int) -> int:
        """Evict until there is room for ``num_pages``, and return for how many there is, at most so many."""
        pool = self.pools[tier]
        while pool.available(fenced=False) < num_pages and self.evict(tier):
            pass
        return min(num_pages, pool.available(fenced=False))

    def evict(self, tier: Tier) -> bool:
        """Let the first node go, and check that it is the first; False: nobody may go."""
        keys = {node: self.expected.key(node) for node in self.nodes() if self._may_lose(tier, node)}
        victim = self.tree.queues[tier].pop()
        if victim is None:
            _demand(not keys, f"{self.policy!r} keeps {len(keys)} nodes on {tier} that may go")
            return False
        _demand(
            victim in keys,
            f"{self.policy!r} evicts {victim!r} from {tier}, which somebody holds or stands on",
        )
        first = min(keys, key=keys.__getitem__)
        _demand(
            bool(keys[victim] == keys[first]),
            f"{self.policy!r} evicts {_facts_of(victim)} from {tier} before {_facts_of(first)}",
        )
        self.pools[tier].free(self.tree.take(tier, victim), Owner.TREE)
        return True

    @staticmethod
    def _may_lose(tier: Tier, node: Node) -> bool:
        below = (node.children or {}).values()
        stands = any(child.copy_in(tier).pages is not None for child in below)
        return node.copy_in(tier).pages is not None and not node.copy_in(tier).pins and not stands


def _check_evictions(policy: EvictionPolicy, rng: random.Random) -> None:
    cache = _Cache(policy, num_pages=20)
    for _ in range(250):
        tokens = rng.choices(range(4), k=rng.randint(1, 5))
        on_device = [node for node in cache.nodes() if node.device.pages is not None]
        move = rng.randrange(10)
        if move < 4:
            cache.commit(tokens, rng.randrange(4))
        elif move < 6:
            cache.match(tokens)
        elif move < 8 and on_device:
            cache.offload(rng.choice(on_device))
        elif move == 8 and on_device and len(cache.pinned) < 3:
            cache.pin(rng.choice(on_device))
        elif move == 9 and cache.pinned:
            cache.unpin()
    while cache.pinned:
        cache.unpin()
    for tier in TIERS:
        while cache.evict(tier):
            pass


def _check_cost(policy: EvictionPolicy, num_leaves: int) -> None:
    cache, rng, num_evictions = _Cache(policy, num_leaves), random.Random(0), 32
    for _ in range(2):  # no eviction has put anything in order when the first one is counted
        for token in range(num_leaves):
            cache.commit([token], rng.randrange(4))
    calls = 0
    for token in range(num_leaves, num_leaves + num_evictions):
        cache.match([rng.randrange(token)])
        cache.watched.calls = 0
        cache.evict(Tier.DEVICE)
        calls += cache.watched.calls
        cache.commit([token], rng.randrange(4))
    _demand(
        calls <= _KEYS_PER_EVICTION * num_evictions,
        f"{policy!r} was asked for {calls} keys in {num_evictions} evictions from {num_leaves} leaves",
    )
