"""What the tests of the core share: a small cache without bytes, whose prompts are strings.

Each letter of a prompt is one page of two tokens. A page's content is its chained hash, so a page
that ends up under the wrong prefix accuses itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings

import hicache_async
from hicache_async.core.audit import (
    check_anchors,
    check_capacity,
    check_owner,
    check_pins,
    check_tree,
    tree_pages,
)
from hicache_async.core.hashing import HashChain
from hicache_async.core.node import Node
from hicache_async.core.observer import TreeObserver
from hicache_async.core.pool import NO_PAGES, FreeList, Grant, Owner, PagePool
from hicache_async.core.room import Room, RoomPlan
from hicache_async.core.tokens import token_bytes
from hicache_async.core.tree import TIERS, PrefixTree
from hicache_async.core.walk import Match
from hicache_async.types import Pages, Tier

PAGE_NBYTES = 8
DEVICE, HOST = Tier.DEVICE, Tier.HOST

_CALM = (HealthCheck.too_slow, HealthCheck.data_too_large)
QUICK = settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=_CALM)
LONG = settings(QUICK, max_examples=2000, stateful_step_count=50)

_CORE_ALONE = """
import sys, types
package = sys.modules["hicache_async"] = types.ModuleType("hicache_async")
package.__path__ = [sys.argv[1]]
"""

Prefix = tuple[bytes, str]
"""The seed and the letters from the root: names one page, the last."""


def start_core(script: str, *flags: str, **environment: str) -> subprocess.Popen[str]:
    """Start a Python process that runs ``script`` with the core alone: no torch, nothing above."""
    package = str(Path(hicache_async.__file__).parent)
    return subprocess.Popen(
        [sys.executable, *flags, "-c", _CORE_ALONE + script, package],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


class OpenFence:
    """A fence that passes when the test says so."""

    def __init__(self) -> None:
        self.is_passed = False

    def passed(self) -> bool:
        return self.is_passed

    def block(self, stream: object | None = None) -> None:
        assert self.is_passed, "nobody blocks on a fence here"


def prompt_bytes(prompt: str) -> bytes:
    """Return the token ids of a prompt: all pages share their first token and differ in the second."""
    return token_bytes([token for letter in prompt for token in (7, ord(letter))])


def page_hashes(prompt: str, seed: bytes = b"") -> list[bytes]:
    """Return the chained hash of each page of a prompt."""
    hashes: list[bytes] = []
    HashChain(seed, PAGE_NBYTES).extend(hashes, prompt_bytes(prompt), len(prompt))
    return hashes


def letters(node: Node) -> str:
    """Return the run of a node as letters."""
    return "".join(chr(token) for token in np.frombuffer(node.segment, np.uint32)[1::2])


def prefix_of(node: Node) -> str:
    """Return all letters from the root to the end of a node."""
    return "".join(letters(above) for above in node.path())


def named_pages(node: Node) -> list[Prefix]:
    """Return the prefix that each page of a node ends, the first page first."""
    top = node
    while top.parent is not None:
        top = top.parent
    prefix = prefix_of(node)
    return [(top.segment, prefix[:end]) for end in range(len(prefix) - node.num_pages + 1, len(prefix) + 1)]


class Mirror:
    """What a tree holds, told from what its observer hears alone; nothing may be said twice, or of nothing."""

    def __init__(self) -> None:
        self.cached: dict[Tier, set[Prefix]] = {tier: set() for tier in TIERS}

    def stored(self, tier: Tier, node: Node) -> None:
        for prefix in named_pages(node):
            assert prefix not in self.cached[tier], f"{prefix} came to {tier} twice"
            self.cached[tier].add(prefix)

    def removed(self, tier: Tier, node: Node) -> None:
        for prefix in named_pages(node):
            assert prefix in self.cached[tier], f"{prefix} left {tier}, where it was not"
            self.cached[tier].remove(prefix)

    def cleared(self, seed: bytes) -> None:
        for prefixes in self.cached.values():
            prefixes.difference_update([prefix for prefix in prefixes if prefix[0] == seed])


@dataclass(slots=True, eq=False)
class Copy:
    """A copy on its way between the tiers, with the pins that keep both of its ends."""

    source: Tier
    source_pages: Pages
    target: Tier
    target_pages: Pages
    after: list[Copy]
    pins: list[tuple[Tier, Node]]
    fence: OpenFence = field(default_factory=OpenFence)


class World:
    """Tree, pools and room, and what every page holds.

    Args:
        device_pages, host_pages: sizes of the pools.
        write_back: whether device victims move to the host.
        observer: who hears of changes of the tree.
    """

    def __init__(
        self,
        device_pages: int = 16,
        host_pages: int = 16,
        *,
        write_back: bool = False,
        observer: TreeObserver | None = None,
    ) -> None:
        sizes = {DEVICE: device_pages, HOST: host_pages}
        self.write_back = write_back
        self.pools = {tier: PagePool(str(tier), FreeList(size), size) for tier, size in sizes.items()}
        self.tree = PrefixTree(PAGE_NBYTES, self.pools, observer=observer)
        self.room = Room(self.tree, self.pools, write_back=write_back)
        self.content: dict[Tier, list[bytes]] = {tier: [b""] * size for tier, size in sizes.items()}
        self.copies: list[Copy] = []

    # Verbs

    def match(self, prompt: str, seed: bytes = b"") -> Match:
        """Match a whole prompt."""
        return self.tree.match(seed, prompt_bytes(prompt), len(prompt))

    def cut(self, prompt: str, seed: bytes = b"") -> Node:
        """Return the node that ends where ``prompt``, which is cached, ends."""
        return self.tree.cut(self.match(prompt, seed), len(prompt))

    def make_room(self, tier: Tier, num_pages: int) -> RoomPlan:
        """Plan room and submit the copies of the plan."""
        plan = self.room.plan_room(tier, num_pages)
        for move in plan.moves:
            copy = Copy(DEVICE, move.device_pages, HOST, move.host_pages, [], [(HOST, move.node)])
            move.node.host.ready = (copy.fence,)
            self._submit(copy)
            self.pools[DEVICE].free(move.device_pages, Owner.TREE, after=copy.fence)
        return plan

    def grab(self, tier: Tier, num_pages: int, owner: Owner = Owner.LEASE) -> Pages:
        """Take pages, waiting for the copies that still read them."""
        grant = self.pools[tier].take(num_pages, owner, fenced=tier is DEVICE)
        self.wait(grant)
        return grant.pages

    def wait(self, grant: Grant) -> None:
        """Finish the copies that the taker of ``grant`` has to be ordered behind."""
        for copy in [copy for copy in self.copies if copy.fence in grant.after]:
            self.finish(copy)

    def write(self, tier: Tier, pages: Pages, hashes: Sequence[bytes]) -> None:
        """Fill pages."""
        for page, page_hash in zip(pages.tolist(), hashes, strict=True):
            self.content[tier][page] = page_hash

    def graft(
        self, tier: Tier, prompt: str, start: int = 0, seed: bytes = b"", *, pages: Pages | None = None
    ) -> Node:
        """Compute or fetch the pages of ``prompt`` from ``start`` on and attach them; duplicates go back."""
        parent = self.cut(prompt[:start], seed)
        pages = self.grab(tier, len(prompt) - start) if pages is None else pages
        hashes = page_hashes(prompt, seed)
        self.write(tier, pages, hashes[start:])
        graft = self.tree.graft(tier, parent, prompt_bytes(prompt), hashes, start, pages, source=Owner.LEASE)
        self.pools[tier].free(pages[~graft.taken], Owner.LEASE)
        return graft.end

    def copy_nodes(self, source: Tier, nodes: Sequence[Node], pages: Pages) -> None:
        """Start to copy whole nodes of one path, top first, from ``source`` into leased ``pages``."""
        target = HOST if source is DEVICE else DEVICE
        reading = {fence for node in nodes for fence in node.copy_in(source).ready}
        after = [copy for copy in self.copies if copy.fence in reading]
        from_pages = np.concatenate(
            [held for node in nodes if (held := node.copy_in(source).pages) is not None]
        )
        copy = Copy(source, from_pages, target, pages, after, [(source, nodes[-1]), (target, nodes[-1])])
        start = 0
        for node in nodes:
            inside = slice(start, start + node.num_pages)
            self.tree.put(target, node, pages[inside], source=Owner.LEASE, ready=(copy.fence,))
            start += node.num_pages
        self._submit(copy)

    def _submit(self, copy: Copy) -> None:
        for tier, node in copy.pins:
            self.tree.pin(tier, node)
        self.copies.append(copy)

    def finish(self, copy: Copy) -> None:
        """Let a copy happen, behind those that it follows, let go of its pins, and join what it left alike."""
        for earlier in copy.after:
            if earlier in self.copies:
                self.finish(earlier)
        self.copies.remove(copy)
        moved = [self.content[copy.source][page] for page in copy.source_pages.tolist()]
        self.write(copy.target, copy.target_pages, moved)
        copy.fence.is_passed = True
        for node in self.all_nodes():
            if copy.fence in node.copy_in(copy.target).ready:
                node.copy_in(copy.target).ready = ()
        for tier, node in copy.pins:
            self.tree.unpin(tier, node)
            self.tree.merge(node)

    def finish_all(self) -> None:
        """Let every copy happen, in the order in which they were submitted."""
        while self.copies:
            self.finish(self.copies[0])

    # Looking

    def all_nodes(self) -> list[Node]:
        """Return every node but the roots, detached ones included."""
        roots = self.tree.roots.values()
        reachable = [node for root in roots for node in root.subtree() if node is not root]
        return reachable + list(self.tree.detached)

    def pages(self) -> Iterator[tuple[Prefix, Node, int]]:
        """Yield every page that a match can reach: its prefix, its node and its place in it."""
        for seed, root in self.tree.roots.items():
            for node in root.subtree():
                if node is not root:
                    prefix = prefix_of(node)
                    start = len(prefix) - node.num_pages
                    for place in range(node.num_pages):
                        yield (seed, prefix[: start + place + 1]), node, place

    def cached(self) -> dict[Prefix, dict[Tier, int]]:
        """Return for every cached prefix the page that each tier holds of it."""
        found: dict[Prefix, dict[Tier, int]] = {}
        for prefix, node, place in self.pages():
            copies = ((tier, node.copy_in(tier).pages) for tier in TIERS)
            found[prefix] = {tier: int(pages[place]) for tier, pages in copies if pages is not None}
        return found

    def residency(self) -> dict[str, str]:
        """Return the nodes of the plain prompts: prefix to residency."""
        root = self.tree.roots.get(b"")
        nodes = root.subtree() if root is not None else ()
        return {prefix_of(node): str(node.residency) for node in nodes if node is not root}

    # Proving

    def audit(
        self,
        pins: dict[Tier, Counter[Node]] | None = None,
        owned: dict[tuple[Tier, Owner], Pages] | None = None,
        anchors: Counter[Node] | None = None,
    ) -> None:
        """Prove tree, pins, books and contents.

        Args:
            pins: what holds nodes, other than the copies on their way.
            owned: pages of leases and hops.
            anchors: what will attach pages below nodes.
        """
        check_tree(self.tree, write_through=not self.write_back)
        expected = {tier: Counter(pins[tier]) if pins else Counter() for tier in TIERS}
        for copy in self.copies:
            for tier, node in copy.pins:
                expected[tier][node] += 1
        check_pins(self.tree, expected)
        check_anchors(self.tree, Counter() if anchors is None else anchors)
        for tier in TIERS:
            check_capacity(self.pools[tier])
            check_owner(self.pools[tier], Owner.TREE, tree_pages(self.tree, tier))
            for owner in (Owner.LEASE, Owner.HOP):
                check_owner(self.pools[tier], owner, (owned or {}).get((tier, owner), NO_PAGES))
        self._check_contents()

    def _check_contents(self) -> None:
        for (seed, prefix), node, place in self.pages():
            expected = page_hashes(prefix, seed)[-1]
            assert node.hashes[place] == expected, f"{node!r} has a wrong hash for {prefix!r}"
            for tier in TIERS:
                copy = node.copy_in(tier)
                if copy.pages is not None and copy.is_ready():
                    assert self.content[tier][copy.pages[place]] == expected, f"{prefix!r} on {tier}"

    def close(self) -> None:
        """Finish every copy, empty the tree and prove that every page is free."""
        self.finish_all()
        assert not self.tree.detached
        for root in list(self.tree.roots.values()):
            for node in list((root.children or {}).values()):
                self.tree.prune(node)
        assert not self.tree.roots
        for pool in self.pools.values():
            assert pool.available(fenced=False) == pool.capacity
            assert len(pool.take(pool.capacity, Owner.LEASE, fenced=False).pages) == pool.capacity
