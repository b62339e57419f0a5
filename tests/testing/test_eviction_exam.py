"""The exam for eviction policies: passed by ours and by a user's, failed by each way of breaking the rules."""

from __future__ import annotations

import itertools
import random
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from hicache_async.core.eviction_queue import EvictionQueue
from hicache_async.core.node import Node
from hicache_async.eviction import POLICIES, Candidate, Lru, Slru
from hicache_async.testing import eviction_exam
from hicache_async.testing.eviction_exam import check_eviction_policy


class By:
    """A policy made of a function."""

    def __init__(self, key: Callable[[Any], Any]) -> None:
        self.key = key

    def __repr__(self) -> str:
        return "By()"


@pytest.mark.parametrize("policy", [*(make() for make in POLICIES.values()), Slru(1), Slru(9)], ids=repr)
def test_our_policies_pass(policy: Any) -> None:
    """Every policy that an option can name passes."""
    check_eviction_policy(policy)


def test_the_documented_example_passes() -> None:
    """The example in the documentation is a whole test, and passes."""
    _, example = (eviction_exam.__doc__ or "").split("::\n", 1)
    code = textwrap.dedent(example.split("Then ``CacheConfig", 1)[0])
    names: dict[str, Any] = {"__name__": __name__}
    exec(code, names)
    names["test_batch_first"]()


def test_keys_may_be_anything_that_has_an_order() -> None:
    """Keys that are strings, fractions or all alike pass."""
    check_eviction_policy(By(lambda node: f"{node.created:020}"))
    check_eviction_policy(By(lambda node: node.hits / (node.hits + 1)))
    check_eviction_policy(By(lambda node: None or 0))


class Beats:
    """A key in a circle: each of three beats the one before it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Beats) and (other.number - self.number) % 3 == 0

    def __lt__(self, other: Beats) -> bool:
        return (other.number - self.number) % 3 == 1


def forget_hits(node: Any) -> int:
    node.hits = 0
    return 0


def forget_hits_of_nodes(node: Any) -> int:
    if isinstance(node, Node):
        node.hits = 0
    return 0


def leave_a_mark(node: Any) -> int:
    node.was_seen = True
    return 0


clock = itertools.count()

BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "most recent first": (lambda node: -node.used, "lets a key fall: -"),
    "falls at the fifth hit": (
        lambda node: node.hits % 5,
        r"lets a key fall: 4 of .*hits=\d*4.* became 0 of .*hits=\d*5",
    ),
    "falls with priority": (lambda node: (-node.priority, node.used), "lets a key fall"),
    "none at first": (lambda node: node.hits or None, "has keys that cannot be compared: .*None"),
    "text or number": (lambda node: node.created if node.created % 2 else "even", "that cannot be compared"),
    "complex": (lambda node: complex(node.used), "that cannot be compared"),
    "not a number": (lambda node: float("nan"), "has two keys for one candidate, nan and another"),
    "sets": (lambda node: frozenset([node.created]), "have no order"),
    "in a circle": (lambda node: Beats(node.created), "go in a circle"),
    "writes": (forget_hits, "may read used, hits, created, priority and set nothing: "),
    "writes to nodes": (forget_hits_of_nodes, r"changes a candidate: .*hits=[1-9].* became .*hits=0"),
    "marks": (leave_a_mark, "may read .* and set nothing: .*was_seen"),
    "reads more": (lambda node: len(node.segment), "may read .* and set nothing: .*segment"),
    "by length": (
        lambda node: (node.num_pages, node.used),
        "may read .* and set nothing: .*num_pages",
    ),
    "random": (lambda node: random.random(), "lets a key fall|has two keys for one candidate"),
    "by the time": (lambda node: next(clock), "has two keys for one candidate"),
    "by identity": (lambda node: (node.created, id(node)), "lets a key fall|has two keys for one candidate"),
}


@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_policy_fails_and_is_told_why(way: str) -> None:
    """Each way to break the rules fails, by a message that names the policy and the rule."""
    key, message = BROKEN[way]
    with pytest.raises(AssertionError, match=rf"By\(\).*({message})"):
        check_eviction_policy(By(key))


def test_a_policy_with_a_memory_fails() -> None:
    """A key that depends on what was asked before is none of the candidate's attributes."""
    seen: set[int] = set()

    def is_known(node: Candidate) -> bool:
        known = node.created in seen
        seen.add(node.created)
        return known

    with pytest.raises(AssertionError, match="has two keys for one candidate, False and another"):
        check_eviction_policy(By(is_known))


@pytest.mark.parametrize("thing", [object(), "lru", Lru, None], ids=repr)
def test_what_is_no_policy_fails(thing: Any) -> None:
    """A name, a class and anything without the method are refused as such."""
    with pytest.raises(AssertionError, match=r"is no object with a method key\(candidate\)"):
        check_eviction_policy(thing)


def test_a_key_that_raises_fails() -> None:
    """What a policy raises is told, and is the cause of what the exam raises."""
    with pytest.raises(AssertionError, match="raised ZeroDivisionError.*a key never raises") as failure:
        check_eviction_policy(By(lambda candidate: 1 // (candidate.hits - 3)))
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


# The exam looks at the tree too: with a queue that is wrong nobody passes.

pop = EvictionQueue.pop


def pop_last(queue: EvictionQueue) -> Node | None:
    """Return the node that should go last."""
    nodes = list(queue.coldest())
    if nodes:
        queue.discard(nodes[-1])
    return nodes[-1] if nodes else None


def pop_parent(queue: EvictionQueue) -> Node | None:
    """Return the node above the one that should go."""
    node = pop(queue)
    return node.parent if node is not None and node.parent is not None and node.parent.parent else node


def pop_asking_everybody(queue: EvictionQueue) -> Node | None:
    """Ask for the key of each node at each eviction."""
    for node in queue.coldest():
        queue.key(node)
    return pop(queue)


@pytest.mark.parametrize(
    ("wrong_pop", "message"),
    [
        (pop_last, r"evicts Facts.* from (device|host) before Facts"),
        (pop_parent, "which somebody holds or stands on"),
        (lambda queue: None, r"keeps \d+ nodes on device that may go"),
        (pop_asking_everybody, r"was asked for \d+ keys in 32 evictions from \d+ leaves"),
    ],
    ids=["last", "parent", "nobody", "everybody"],
)
def test_a_queue_that_is_wrong_fails(
    monkeypatch: pytest.MonkeyPatch, wrong_pop: Callable[[EvictionQueue], Node | None], message: str
) -> None:
    """A wrong order, a node with nodes below it, one that never goes and a cost that grows are all found."""
    monkeypatch.setattr(EvictionQueue, "pop", wrong_pop)
    with pytest.raises(AssertionError, match=message):
        check_eviction_policy(Lru())
