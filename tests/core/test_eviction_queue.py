"""EvictionQueue: the one whose key is smallest goes first, whatever happened since it was offered."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from structlog.testing import capture_logs

from hicache_async.core.eviction_queue import EvictionQueue
from hicache_async.core.node import Node
from hicache_async.eviction import POLICIES, Candidate, EvictionPolicy, Lfu, Lru, Priority
from hicache_async.types import Tier
from tests.core.world import DEVICE, HOST, LONG, QUICK, OpenFence


class Counted:
    """A policy that counts how often it is asked."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.calls = 0

    def key(self, candidate: Candidate) -> Any:
        self.calls += 1
        return self.policy.key(candidate)


class ByHand:
    """A policy whose keys are what the test says."""

    def __init__(self, keys: dict[Node, Any]) -> None:
        self.keys = keys

    def key(self, candidate: Any) -> Any:
        key = self.keys[candidate]
        if isinstance(key, Exception):
            raise key
        return key


class Drifting:
    """A policy whose every key is larger than all before, whatever it is asked for."""

    def __init__(self) -> None:
        self.numbers = count()

    def key(self, candidate: Candidate) -> int:
        return next(self.numbers)


def make_node(used: int, tier: Tier = DEVICE, *, hits: int = 0, priority: int = 0) -> Node:
    """Return a node of one page in ``tier``."""
    node = Node(Node(None, b"", []), b"\x00" * 8, [b""])
    node.own_copy(tier).pages = np.zeros(1, dtype=np.int64)
    node.used, node.hits, node.priority = used, hits, priority
    return node


def make_queue(*nodes: Node, tier: Tier = DEVICE, policy: EvictionPolicy | None = None) -> EvictionQueue:
    queue = EvictionQueue(tier, policy or Lru())
    for node in nodes:
        queue.offer(node)
    return queue


def pop_nodes(queue: EvictionQueue) -> Iterator[Node]:
    while (node := queue.pop()) is not None:
        yield node


def pop_all(queue: EvictionQueue) -> list[int]:
    """Return when each node was used, in the order in which they go."""
    return [node.used for node in pop_nodes(queue)]


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_least_recently_used_goes_first(tier: Tier) -> None:
    """Nodes come out by their last use, in whatever order they were offered."""
    queue = make_queue(*(make_node(used, tier) for used in (5, 1, 4, 2, 3)), tier=tier)
    assert pop_all(queue) == [1, 2, 3, 4, 5]


def test_each_tier_has_a_policy_of_its_own() -> None:
    """Nodes of both tiers leave each of them in the order of that tier's policy."""
    nodes = [
        make_node(1, hits=3, priority=2),
        make_node(2, hits=2, priority=1),
        make_node(3, hits=1, priority=3),
    ]
    for node in nodes:
        node.own_copy(HOST).pages = node.device.pages
    assert pop_all(make_queue(*nodes, policy=Lfu())) == [3, 2, 1]
    assert pop_all(make_queue(*nodes, tier=HOST, policy=Priority())) == [2, 1, 3]


def test_equals_go_by_how_long_they_wait() -> None:
    """Nodes of one key, which nothing else can compare, come out in the order of their first offers."""
    nodes = [make_node(7) for _ in range(20)]
    queue = make_queue(*nodes, nodes[3], nodes[0])
    assert list(pop_nodes(queue)) == nodes


def test_a_use_after_the_offer_counts() -> None:
    """A node that was used since it was offered goes by that use."""
    nodes = [make_node(used) for used in (1, 2, 3)]
    queue = make_queue(*nodes)
    nodes[0].used = 9
    assert pop_all(queue) == [2, 3, 9]


def test_offering_twice_is_offering_once() -> None:
    """A node that is in the queue is not put there again."""
    node = make_node(1)
    queue = make_queue(node, node)
    assert len(queue) == 1 and node in queue
    assert pop_all(queue) == [1]
    assert node not in queue


def test_what_may_not_go_is_not_taken_up() -> None:
    """A node that is pinned, stood upon, detached or without pages in the tier is no candidate."""
    pinned, parent, detached, elsewhere = (make_node(used) for used in range(4))
    pinned.own_copy(DEVICE).pins = 1
    parent.device.children = 1
    detached.attached = False
    elsewhere.device.pages = None
    queue = make_queue(pinned, parent, detached, elsewhere)
    assert len(queue) == 0 and queue.pop() is None


def test_what_may_not_go_any_more_is_forgotten_until_offered_again() -> None:
    """A node pinned after its offer is passed over; the offer at its unpin brings it back."""
    first, second = make_node(1), make_node(2)
    queue = make_queue(first, second)
    first.device.pins = 1
    assert queue.pop() is second
    assert queue.pop() is None
    first.device.pins = 0
    assert queue.pop() is None
    queue.offer(first)
    assert queue.pop() is first


def test_pins_of_the_other_tier_do_not_count() -> None:
    """A node pinned on the host may lose the device."""
    node = make_node(1)
    held = node.own_copy(HOST)
    held.pins = held.children = 1
    assert make_queue(node).pop() is node


def test_an_unsettled_node_is_skipped_and_not_lost() -> None:
    """A node whose bytes are on their way stays in the queue and goes once they are there."""
    moving, other = make_node(1), make_node(2)
    moving.device.ready = (OpenFence(),)
    queue = make_queue(moving, other)
    assert queue.pop() is other
    assert queue.pop() is None
    assert moving in queue
    moving.device.ready = ()
    assert queue.pop() is moving


def test_a_discarded_node_does_not_come_out() -> None:
    """A node that left the tree is never a victim; discarding what is not there does nothing."""
    gone, other = make_node(1), make_node(2)
    queue = make_queue(gone, other)
    queue.discard(gone)
    queue.discard(gone)
    assert gone not in queue
    assert pop_all(queue) == [2]


def test_a_discarded_node_may_come_back() -> None:
    """An entry left behind by a discard is no second chance for a node offered anew."""
    node = make_node(1)
    queue = make_queue(node)
    queue.discard(node)
    node.used = 7
    queue.offer(node)
    assert pop_all(queue) == [7]


def test_a_use_costs_no_entry() -> None:
    """Uses and departures between two pops leave no more in the queue than the nodes there are."""
    nodes = [make_node(used) for used in range(10)]
    gone = [make_node(used) for used in range(10)]
    queue = make_queue(*nodes, *gone)
    for used in range(10, 1000):
        nodes[used % 10].used = used
        queue.offer(nodes[used % 10])
    for node in gone:
        queue.discard(node)
    assert len(queue) == 10
    assert sum(len(block) for block in queue._sorted._blocks) == 10
    assert pop_all(queue) == list(range(990, 1000))


@pytest.mark.parametrize("size", [10, 1000])
def test_a_pop_asks_for_few_keys(size: int) -> None:
    """A pop asks for its victim's key and for those that were used since, however many nodes there are."""
    nodes = [make_node(used) for used in range(size)]
    policy = Counted(Lru())
    queue = make_queue(*nodes, policy=policy)
    assert policy.calls == size
    assert queue.pop() is nodes[0]
    assert policy.calls == size + 1
    for used, node in enumerate(nodes[1:4], size):
        node.used = used
    assert queue.pop() is nodes[4]
    assert policy.calls == size + 1 + 3 + 1


@pytest.mark.parametrize("size", [10, 1000])
def test_a_long_time_of_hits_alone_is_not_made_up_for_at_a_pop(size: int) -> None:
    """When all nodes were used, pinned and unpinned since the last pop, the next one asks for one key."""
    nodes = [make_node(used) for used in range(size)]
    policy = Counted(Lru())
    queue = make_queue(*nodes, policy=policy)
    for used, node in enumerate(reversed(nodes), size):
        node.used = used
        node.device.pins = 1
        queue.offer(node)
        node.device.pins = 0
        queue.offer(node)
    assert policy.calls == 2 * size
    assert queue.pop() is nodes[-1]
    assert policy.calls == 2 * size + 1


# To look at what would go


def test_the_coldest_come_in_the_order_of_eviction_and_stay() -> None:
    """All evictable nodes are yielded as pops would find them, and pops find them afterwards."""
    nodes = [make_node(used) for used in (5, 1, 4, 2, 3)]
    queue = make_queue(*nodes)
    nodes[1].used = 6
    nodes[2].device.pins = 1
    nodes[3].device.ready = (OpenFence(),)
    assert [node.used for node in queue.coldest()] == [3, 5, 6]
    assert nodes[3] in queue
    nodes[3].device.ready = ()
    assert pop_all(queue) == [2, 3, 5, 6]


def test_the_queue_may_be_used_while_it_is_looked_at() -> None:
    """Pops and offers between two nodes find the queue whole, and what they change shows at the next."""
    nodes = [make_node(used) for used in range(1, 7)]
    queue = make_queue(*nodes)
    coldest = queue.coldest()
    assert [next(coldest), next(coldest)] == nodes[:2]
    assert [queue.pop(), queue.pop(), queue.pop()] == nodes[:3]
    nodes[4].device.pins = 1
    queue.offer(nodes[0])
    queue.offer(make_node(9))
    assert [node.used for node in coldest] == [4, 6, 9]
    nodes[4].device.pins = 0
    queue.offer(nodes[4])
    assert pop_all(queue) == [1, 4, 5, 6, 9]


def test_a_node_put_further_back_while_it_is_looked_at_comes_again() -> None:
    """A node that was used and offered behind its turn has a new one; to use it alone is not enough."""
    again, used, other = nodes = [make_node(used) for used in (1, 2, 3)]
    queue = make_queue(*nodes)
    coldest = queue.coldest()
    assert [next(coldest), next(coldest)] == [again, used]
    again.used = used.used = 8
    queue.offer(again)
    assert list(coldest) == [other, again]


# Policies that break their word


def test_a_fallen_key_is_a_wrong_order_and_no_more() -> None:
    """A node whose key fell goes late, by the key that was known, and nobody is lost or comes twice."""
    nodes = [make_node(used) for used in range(6)]
    keys: dict[Node, Any] = {node: node.used for node in nodes}
    queue = make_queue(*nodes, policy=ByHand(keys))
    keys[nodes[5]] = keys[nodes[2]] = -1
    assert pop_all(queue) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [1, 2, 50])
def test_keys_that_rise_by_themselves_end_no_search_late(size: int) -> None:
    """When every key is larger than the one before, each search asks each node once, and finds one."""
    nodes = [make_node(0) for _ in range(size)]
    policy = Counted(Drifting())
    queue = make_queue(*nodes, policy=policy)
    for left in range(size, 0, -1):
        policy.calls = 0
        assert queue.pop() is not None
        assert policy.calls <= left
    assert queue.pop() is None


def test_a_key_without_order_is_an_order_of_any_kind() -> None:
    """Keys that are not even equal to themselves empty the queue in some order."""
    nodes = [make_node(used) for used in range(9)]
    keys = {node: float("nan") if node.used % 2 else float(node.used) for node in nodes}
    assert sorted(pop_all(make_queue(*nodes, policy=ByHand(keys)))) == list(range(9))


def test_a_key_that_raises_loses_nobody() -> None:
    """After an error of the policy the queue is whole, and goes by last use."""
    nodes = [make_node(used) for used in range(3)]
    nodes[0].device.ready = (OpenFence(),)
    keys: dict[Node, Any] = {node: -node.used for node in nodes}
    queue = make_queue(*nodes, policy=ByHand(keys))
    keys[nodes[1]] = ValueError("no key today")
    with capture_logs() as lines:
        assert queue.pop() is nodes[2]  # the first by its key; nobody had to ask the others
        assert queue.pop() is nodes[1]
    assert [line["event"] for line in lines] == ["eviction.policy_failed"]
    nodes[0].device.ready = ()
    assert pop_all(queue) == [0]


def test_a_key_of_another_kind_loses_nobody() -> None:
    """Where keys cannot be compared the queue goes by last use from then on."""
    nodes = [make_node(used) for used in range(4)]
    keys: dict[Node, Any] = {node: (-node.used, "tick") for node in nodes}
    queue = make_queue(*nodes[:3], policy=ByHand(keys))
    keys[nodes[3]] = 3
    with capture_logs() as lines:
        queue.offer(nodes[3])
    assert len(lines) == 1 and len(queue) == 4
    assert pop_all(queue) == [0, 1, 2, 3]


class QueueMachine(RuleBasedStateMachine):
    """Drive a queue as the tree does and compare every pop with a search of all nodes."""

    policy: EvictionPolicy

    @initialize(count=st.integers(1, 12))
    def open(self, count: int) -> None:
        self.queue = EvictionQueue(DEVICE, self.policy)
        self.nodes = [self.make(used) for used in range(count)]
        self.tick = count
        for node in self.nodes:
            self.queue.offer(node)

    def make(self, tick: int) -> Node:
        node = make_node(tick)
        node.created = tick
        return node

    def node(self, number: int) -> Node:
        return self.nodes[number % len(self.nodes)]

    def key(self, node: Node) -> Any:
        return self.policy.key(node)

    def evictable(self) -> list[Node]:
        return [node for node in self.nodes if self.queue.is_evictable(node) and not node.device.ready]

    @rule(number=st.integers(0, 11))
    def use(self, number: int) -> None:
        self.tick += 1
        self.node(number).used = self.tick

    @rule(number=st.integers(0, 11), priority=st.integers(0, 3))
    def commit(self, number: int, priority: int) -> None:
        self.use(number)
        node = self.node(number)
        node.hits += 1
        node.priority = max(node.priority, priority)

    @rule(number=st.integers(0, 11))
    def pin(self, number: int) -> None:
        self.node(number).device.pins += 1

    @rule(number=st.integers(0, 11))
    def unpin(self, number: int) -> None:
        node = self.node(number)
        if node.device.pins:
            node.device.pins -= 1
            self.queue.offer(node)

    @rule(number=st.integers(0, 11))
    def toggle_child(self, number: int) -> None:
        node = self.node(number)
        node.device.children ^= 1
        self.queue.offer(node)

    @rule(number=st.integers(0, 11))
    def toggle_ready(self, number: int) -> None:
        copy = self.node(number).device
        copy.ready = () if copy.ready else (OpenFence(),)

    @rule(number=st.integers(0, 11))
    def replace(self, number: int) -> None:
        gone = self.node(number)
        gone.attached = False
        self.queue.discard(gone)
        self.tick += 1
        self.nodes[self.nodes.index(gone)] = new = self.make(self.tick)
        self.queue.offer(new)

    @rule(back=st.booleans())
    def pop(self, back: bool) -> None:
        smallest = min((self.key(node) for node in self.evictable()), default=None)
        popped = self.queue.pop()
        if popped is None:
            assert smallest is None
            return
        assert popped in self.evictable() and self.key(popped) == smallest
        if back:
            self.queue.offer(popped)
        else:
            popped.device.pages = None
            self.replace(self.nodes.index(popped))

    @rule(number=st.integers(0, 11))
    def look(self, number: int) -> None:
        found = list(islice(self.queue.coldest(), number))
        keys = sorted(self.key(node) for node in self.evictable())
        assert [self.key(node) for node in found] == keys[:number]
        assert len(set(found)) == len(found)

    @invariant()
    def nobody_is_lost(self) -> None:
        for node in self.nodes:
            assert node in self.queue or not self.queue.is_evictable(node)


def machine_of(name: str) -> type[QueueMachine]:
    return type("Machine", (QueueMachine,), {"policy": POLICIES[name]()})


@pytest.mark.parametrize("name", POLICIES)
def test_order_is_that_of_a_plain_search(name: str) -> None:
    """Under any series of offers, uses, pins and departures a pop finds what a search of all nodes does."""
    run_machine(machine_of(name), settings=QUICK)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", POLICIES)
def test_order_is_that_of_a_plain_search_for_long(name: str) -> None:
    """As above, many times."""
    run_machine(machine_of(name), settings=LONG)
