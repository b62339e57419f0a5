"""PrefixTree, pools and room against a plain dict: every cached prefix, and the page of each tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from hicache_async.core.node import Node
from hicache_async.core.pool import NO_PAGES, Owner
from hicache_async.core.tree import TIERS
from hicache_async.types import Pages, Tier
from tests.core.room_proof import proven_room, traits
from tests.core.world import (
    DEVICE,
    HOST,
    LONG,
    QUICK,
    Mirror,
    Prefix,
    World,
    page_hashes,
    prefix_of,
    prompt_bytes,
)

SEED = st.sampled_from([b"", b"tenant"])
TAIL = st.text("ab", min_size=1, max_size=6)
WHICH = st.integers(0, 99)
TIER = st.sampled_from(TIERS)


@dataclass(slots=True, eq=False)
class Hold:
    """A pin, and the pages that it protects: those of its tier from the end upwards."""

    tier: Tier
    node: Node
    seed: bytes
    prompt: str
    pages: list[int]


@dataclass(slots=True, eq=False)
class Fetch:
    """A prefetch on its way: its anchor, and the host pages that it fills."""

    anchor: Node
    seed: bytes
    prompt: str
    start: int
    pages: Pages = field(default_factory=lambda: NO_PAGES)


def pages_above(node: Node, tier: Tier) -> list[int]:
    """Return the pages of ``tier`` from the end of ``node`` upwards to the first gap, from the top."""
    pages: list[int] = []
    for above in reversed(node.path()):
        held = above.copy_in(tier).pages
        if held is None:
            break
        pages = held.tolist() + pages
    return pages


class TreeMachine(RuleBasedStateMachine):
    """What requests, moves and administrators do to the tree, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.open(1, 1, False, "")

    @initialize(
        device_pages=st.integers(2, 12), host_pages=st.integers(1, 14), write_back=st.booleans(), prompt=TAIL
    )
    def open(self, device_pages: int, host_pages: int, write_back: bool, prompt: str) -> None:
        self.mirror = Mirror()
        self.world = World(device_pages, host_pages, write_back=write_back, observer=self.mirror)
        self.tree, self.pools = self.world.tree, self.world.pools
        self.model: dict[Prefix, dict[Tier, int]] = {}
        self.holds: list[Hold] = []
        self.fetches: list[Fetch] = []
        self.commit(b"", 0, prompt, 0, False)

    # The model

    def tiers(self, seed: bytes, prompt: str) -> dict[Tier, int]:
        return self.model.get((seed, prompt), {})

    def device_length(self, seed: bytes, prompt: str) -> int:
        """Return how many pages of a prompt are on the device, from the root on."""
        ends = range(1, len(prompt) + 1)
        return next((end - 1 for end in ends if DEVICE not in self.tiers(seed, prompt[:end])), len(prompt))

    def local_length(self, seed: bytes, prompt: str) -> int:
        """Return how many pages of a prompt are on device or host, from the root on."""
        ends = range(1, len(prompt) + 1)
        return next((end - 1 for end in ends if not self.tiers(seed, prompt[:end])), len(prompt))

    def put(self, tier: Tier, seed: bytes, prompt: str, start: int, pages: Pages) -> list[bool]:
        """Put pages where the model has none in ``tier``; returns where that was."""
        taken = []
        for place, page in enumerate(pages.tolist()):
            tiers = self.model.setdefault((seed, prompt[: start + place + 1]), {})
            taken.append(tier not in tiers)
            tiers.setdefault(tier, page)
        return taken

    def cached_in(self, tier: Tier, *, only: bool = False) -> list[Prefix]:
        """Return the prefixes that ``tier`` holds, and no other one does if ``only``."""
        return sorted(key for key, tiers in self.model.items() if tier in tiers and len(tiers) < 3 - only)

    def prompt(self, seed: bytes, which: int, tail: str) -> str:
        """Return a prompt that goes on from something cached, or from nothing."""
        known = ["", *sorted(prompt for cached_seed, prompt in self.model if cached_seed == seed)]
        return known[which % len(known)] + tail

    # Room

    def make_room(self, tier: Tier, num_pages: int) -> None:
        """Make room; :func:`proven_room` says what may go."""
        proven_room(self.world, tier, num_pages)
        self.model = self.world.cached()

    # What requests do

    @rule(seed=SEED, which=WHICH, tail=st.text("ab", max_size=4))
    def match(self, seed: bytes, which: int, tail: str) -> None:
        prompt = self.prompt(seed, which, tail)
        match = self.world.match(prompt, seed)
        assert match.device_pages == self.device_length(seed, prompt)
        assert match.local_pages == self.local_length(seed, prompt)
        assert sum(node.num_pages for node in match.path[:-1]) + match.tail_pages == match.local_pages

    @precondition(lambda self: self.model)
    @rule(which=WHICH)
    def cut(self, which: int) -> None:
        seed, prompt = sorted(self.model)[which % len(self.model)]
        before = traits(self.world)
        assert prefix_of(self.world.cut(prompt, seed)) == prompt
        for prefix, now in traits(self.world).items():
            assert now == before[prefix]._replace(used=now.used), "the halves differ"

    @rule(seed=SEED, which=WHICH, tail=TAIL, back=WHICH, hold=st.booleans(), priority=st.integers(0, 1))
    def commit(self, seed: bytes, which: int, tail: str, back: int, hold: bool, priority: int = 0) -> None:
        prompt = self.prompt(seed, which, tail)
        start = back % (self.device_length(seed, prompt) + 1)
        parent = self.world.cut(prompt[:start], seed)
        self.tree.pin(DEVICE, parent)
        self.make_room(DEVICE, len(prompt) - start)
        end = min(len(prompt), start + self.pools[DEVICE].available(fenced=True))
        pages = self.world.grab(DEVICE, end - start)
        hashes = page_hashes(prompt, seed)
        self.world.write(DEVICE, pages, hashes[start:end])
        graft = self.tree.graft(
            DEVICE, parent, prompt_bytes(prompt), hashes, start, pages, source=Owner.LEASE
        )
        assert graft.taken.tolist() == self.put(DEVICE, seed, prompt, start, pages)
        self.pools[DEVICE].free(pages[~graft.taken], Owner.LEASE)
        if hold:
            self.add_hold(DEVICE, graft.end, seed, prompt[:end])
        for node in graft.end.path():
            node.hits += 1
            node.priority = max(node.priority, priority)
        self.tree.unpin(DEVICE, parent)

    @precondition(lambda self: self.cached_in(HOST, only=True))
    @rule(which=WHICH)
    def load(self, which: int) -> None:
        known = self.cached_in(HOST, only=True)
        seed, prompt = known[which % len(known)]
        start, end = self.device_length(seed, prompt), len(prompt)
        top, source = self.world.cut(prompt[:start], seed), self.world.cut(prompt[:end], seed)
        self.tree.pin(DEVICE, top)
        self.tree.pin(HOST, source)
        self.make_room(DEVICE, end - start)
        end = min(end, start + self.pools[DEVICE].available(fenced=True))
        if end > start:
            pages = self.world.grab(DEVICE, end - start)
            nodes = [node for node in self.world.cut(prompt[:end], seed).path() if node.device.pages is None]
            self.world.copy_nodes(HOST, nodes, pages)
            self.put(DEVICE, seed, prompt, start, pages)
        self.tree.unpin(HOST, source)
        self.tree.unpin(DEVICE, top)

    @precondition(lambda self: self.cached_in(DEVICE, only=True))
    @rule(which=WHICH)
    def offload(self, which: int) -> None:
        known = self.cached_in(DEVICE, only=True)
        seed, prompt = known[which % len(known)]
        end = self.world.cut(prompt, seed)
        self.tree.pin(DEVICE, end)
        while missing := [node for node in end.path() if node.host.pages is None]:
            node = missing[0]  # ancestors first, and no hole
            above = node.parent
            assert above is not None
            if above.parent is not None:
                self.tree.pin(HOST, above)
            self.make_room(HOST, node.num_pages)
            if above.parent is not None:
                self.tree.unpin(HOST, above)
            if self.pools[HOST].available(fenced=False) < node.num_pages:
                break
            pages = self.world.grab(HOST, node.num_pages)
            self.world.copy_nodes(DEVICE, [node], pages)
            prefix = prefix_of(node)
            self.put(HOST, seed, prefix, len(prefix) - node.num_pages, pages)
        self.tree.unpin(DEVICE, end)

    @rule(seed=SEED, which=WHICH, tail=TAIL, back=WHICH)
    def start_fetch(self, seed: bytes, which: int, tail: str, back: int) -> None:
        prompt = self.prompt(seed, which, tail)
        start = back % (self.local_length(seed, prompt) + 1)
        anchor = self.world.cut(prompt[:start], seed)
        self.tree.anchor(anchor)
        self.make_room(HOST, len(prompt) - start)
        count = min(len(prompt) - start, self.pools[HOST].available(fenced=False))
        pages = self.world.grab(HOST, count, Owner.HOP)
        self.fetches.append(Fetch(anchor, seed, prompt[: start + count], start, pages))

    @precondition(lambda self: self.fetches)
    @rule(which=WHICH, hold=st.booleans())
    def finish_fetch(self, which: int, hold: bool) -> None:
        fetch = self.fetches.pop(which % len(self.fetches))
        hashes = page_hashes(fetch.prompt, fetch.seed)
        self.world.write(HOST, fetch.pages, hashes[fetch.start :])
        if self.is_anchored(fetch):
            assert self.world.cut(fetch.prompt[: fetch.start], fetch.seed) is fetch.anchor
            graft = self.tree.graft(
                HOST,
                fetch.anchor,
                prompt_bytes(fetch.prompt),
                hashes,
                fetch.start,
                fetch.pages,
                source=Owner.HOP,
            )
            assert graft.taken.tolist() == self.put(HOST, fetch.seed, fetch.prompt, fetch.start, fetch.pages)
            self.pools[HOST].free(fetch.pages[~graft.taken], Owner.HOP)
            if hold and graft.end.host.pages is not None:
                self.add_hold(HOST, graft.end, fetch.seed, fetch.prompt)
        else:
            self.pools[HOST].free(fetch.pages, Owner.HOP)
        self.tree.unanchor(fetch.anchor)

    def is_anchored(self, fetch: Fetch) -> bool:
        """Return whether fetched pages may be attached; an anchor in the tree keeps its prefix cached."""
        if not fetch.anchor.attached:
            return False
        assert self.local_length(fetch.seed, fetch.prompt[: fetch.start]) == fetch.start
        above = self.tiers(fetch.seed, fetch.prompt[: fetch.start])
        return self.world.write_back or not fetch.start or HOST in above

    # Holding

    def add_hold(self, tier: Tier, node: Node, seed: bytes, prompt: str) -> None:
        self.tree.pin(tier, node)
        self.holds.append(Hold(tier, node, seed, prompt, pages_above(node, tier)))

    @precondition(lambda self: self.model)
    @rule(tier=TIER, which=WHICH)
    def hold(self, tier: Tier, which: int) -> None:
        known = self.cached_in(tier)
        if known:
            seed, prompt = known[which % len(known)]
            self.add_hold(tier, self.world.cut(prompt, seed), seed, prompt)

    @precondition(lambda self: self.holds)
    @rule(which=WHICH)
    def let_go(self, which: int) -> None:
        hold = self.holds.pop(which % len(self.holds))
        self.tree.unpin(hold.tier, hold.node)

    # What happens by itself, and from outside

    @precondition(lambda self: self.world.copies)
    @rule(which=WHICH)
    def finish_copy(self, which: int) -> None:
        self.world.finish(self.world.copies[which % len(self.world.copies)])

    @precondition(lambda self: self.model)
    @rule(tier=TIER, more=st.integers(1, 8))
    def evict(self, tier: Tier, more: int) -> None:
        self.make_room(tier, self.pools[tier].available(fenced=tier is DEVICE) + more)

    @precondition(lambda self: self.model)
    @rule(which=WHICH)
    def merge(self, which: int) -> None:
        nodes = self.world.all_nodes()
        before = traits(self.world)
        self.tree.merge(nodes[which % len(nodes)])
        assert traits(self.world) == before

    @precondition(lambda self: self.model)
    @rule(which=WHICH)
    def store(self, which: int) -> None:
        seed, prompt = sorted(self.model)[which % len(self.model)]
        self.world.cut(prompt, seed).stored = self.tree.store_epoch

    @precondition(lambda self: len(self.model) > 3)
    @rule(which=WHICH)
    def clear(self, which: int) -> None:
        seed, _ = sorted(self.model)[which % len(self.model)]
        self.tree.detach(self.tree.roots[seed])
        assert seed not in self.tree.roots
        self.model = {key: tiers for key, tiers in self.model.items() if key[0] != seed}

    @precondition(lambda self: len(self.model) > 3)
    @rule(which=WHICH)
    def detach(self, which: int) -> None:
        seed, prompt = sorted(self.model)[which % len(self.model)]
        node = self.world.cut(prompt, seed)
        prefix = prefix_of(node)
        first = prefix[: len(prefix) - node.num_pages + 1]
        self.tree.detach(node)
        gone = [(s, p) for s, p in self.model if s == seed and p.startswith(first)]
        for key in gone:
            del self.model[key]

    # What always holds

    @invariant()
    def proves(self) -> None:
        pins = {tier: Counter[Node]() for tier in TIERS}
        for hold in self.holds:
            pins[hold.tier][hold.node] += 1
        hops = [fetch.pages for fetch in self.fetches]
        anchors = Counter(fetch.anchor for fetch in self.fetches)
        self.world.audit(pins, {(HOST, Owner.HOP): np.concatenate([NO_PAGES, *hops])}, anchors)

    @invariant()
    def agrees_with_the_dict(self) -> None:
        assert self.world.cached() == self.model

    @invariant()
    def tells_its_observer(self) -> None:
        for tier in TIERS:
            assert self.mirror.cached[tier] == {
                prefix for prefix, tiers in self.model.items() if tier in tiers
            }

    @invariant()
    def keeps_what_is_held(self) -> None:
        for hold in self.holds:
            assert prefix_of(hold.node) == hold.prompt, "the end of a hold moved"
            pages = pages_above(hold.node, hold.tier)
            assert pages[len(pages) - len(hold.pages) :] == hold.pages
            if all(node.copy_in(hold.tier).is_ready() for node in hold.node.path()):
                hashes = page_hashes(hold.prompt, hold.seed)[len(hold.prompt) - len(hold.pages) :]
                assert [self.world.content[hold.tier][page] for page in hold.pages] == hashes

    def teardown(self) -> None:
        while self.fetches:
            self.finish_fetch(0, False)
        while self.holds:
            self.let_go(0)
        self.world.close()
        assert not any(self.mirror.cached.values())


def test_tree_agrees_with_a_dict() -> None:
    """Whatever requests, moves, evictions and clearing do, every prefix has the pages that a dict says."""
    run_machine(TreeMachine, settings=settings(QUICK, max_examples=80))


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_tree_agrees_with_a_dict_for_long() -> None:
    """As above, many times."""
    run_machine(TreeMachine, settings=LONG)
