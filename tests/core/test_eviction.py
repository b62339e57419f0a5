"""EvictionQueue: the one that was used longest ago goes first, whatever happened since it was offered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from hicache_async.core.eviction import EvictionQueue
from hicache_async.core.node import Node
from hicache_async.types import Tier
from tests.core.world import DEVICE, HOST, LONG, QUICK, OpenFence


def make_node(used: int, tier: Tier = DEVICE) -> Node:
    """Return a node of one page in ``tier``."""
    node = Node(Node(None, b"", []), b"\x00" * 8, [b""])
    node.copy_in(tier).pages = np.zeros(1, dtype=np.int64)
    node.used = used
    return node


def make_queue(*nodes: Node, tier: Tier = DEVICE) -> EvictionQueue:
    queue = EvictionQueue(tier)
    for node in nodes:
        queue.offer(node)
    return queue


def pop_all(queue: EvictionQueue) -> list[int]:
    """Return when each node was used, in the order in which they go."""
    popped = []
    while (node := queue.pop()) is not None:
        popped.append(node.used)
    return popped


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_least_recently_used_goes_first(tier: Tier) -> None:
    """Nodes come out by their last use, in whatever order they were offered."""
    queue = make_queue(*(make_node(used, tier) for used in (5, 1, 4, 2, 3)), tier=tier)
    assert pop_all(queue) == [1, 2, 3, 4, 5]


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
    pinned.device.pins = 1
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
    node.host.pins = node.host.children = 1
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


def test_entries_of_departed_nodes_are_bounded() -> None:
    """A queue that nobody pops keeps at most twice its nodes, and a few, however many came and went."""
    queue = EvictionQueue(DEVICE)
    for _ in range(50):
        nodes = [make_node(used) for used in range(100)]
        for node in nodes:
            queue.offer(node)
        for node in nodes:
            queue.discard(node)
            assert len(queue._heap) <= 2 * len(queue) + 64


def test_a_use_costs_no_entry() -> None:
    """Uses between two pops leave the queue as long as it was."""
    nodes = [make_node(used) for used in range(10)]
    queue = make_queue(*nodes)
    for used in range(10, 1000):
        nodes[used % 10].used = used
        queue.offer(nodes[used % 10])
    assert len(queue) == len(queue._heap) == 10
    assert pop_all(queue) == list(range(990, 1000))


class QueueMachine(RuleBasedStateMachine):
    """Drive a queue as the tree does and compare every pop with a search of all nodes."""

    @initialize(count=st.integers(1, 12))
    def open(self, count: int) -> None:
        self.queue = EvictionQueue(DEVICE)
        self.nodes = [make_node(used) for used in range(count)]
        self.tick = count
        for node in self.nodes:
            self.queue.offer(node)

    def node(self, number: int) -> Node:
        return self.nodes[number % len(self.nodes)]

    @rule(number=st.integers(0, 11))
    def use(self, number: int) -> None:
        self.tick += 1
        self.node(number).used = self.tick

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
        self.queue.discard(gone)
        self.tick += 1
        self.nodes[self.nodes.index(gone)] = new = make_node(self.tick)
        self.queue.offer(new)

    @rule(back=st.booleans())
    def pop(self, back: bool) -> None:
        evictable = [node for node in self.nodes if self.queue.is_evictable(node) and not node.device.ready]
        expected = min(evictable, key=lambda node: node.used, default=None)
        popped = self.queue.pop()
        assert popped is expected
        if popped is None:
            return
        if back:
            self.queue.offer(popped)
        else:
            popped.device.pages = None
            self.replace(self.nodes.index(popped))

    @invariant()
    def nobody_is_lost(self) -> None:
        for node in self.nodes:
            assert node in self.queue or not self.queue.is_evictable(node)


def test_order_is_that_of_a_plain_search() -> None:
    """Under any series of offers, uses, pins and departures a pop finds what a search of all nodes does."""
    run_machine(QueueMachine, settings=QUICK)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_order_is_that_of_a_plain_search_for_long() -> None:
    """As above, many times."""
    run_machine(QueueMachine, settings=LONG)
