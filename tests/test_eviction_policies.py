"""Eviction policies: which candidate goes first under each, and how an option names one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hicache_async.errors import ConfigError
from hicache_async.eviction import (
    POLICIES,
    Candidate,
    EvictionPolicy,
    Fifo,
    Lfu,
    Lru,
    Priority,
    Slru,
    policy_named,
)


@dataclass(frozen=True)
class Facts:
    """A candidate without a node."""

    created: int
    used: int
    hits: int
    priority: int


CANDIDATES = {
    "idle": Facts(created=3, used=10, hits=4, priority=2),
    "rare": Facts(created=4, used=50, hits=0, priority=2),
    "once": Facts(created=5, used=20, hits=1, priority=2),
    "first": Facts(created=1, used=40, hits=3, priority=2),
    "low": Facts(created=2, used=30, hits=3, priority=0),
}

ORDERS = {
    "lru": ["idle", "once", "low", "first", "rare"],
    "lfu": ["rare", "once", "low", "first", "idle"],
    "slru": ["once", "rare", "idle", "low", "first"],
    "fifo": ["first", "low", "idle", "rare", "once"],
    "priority": ["low", "idle", "once", "first", "rare"],
}


def order_of(policy: EvictionPolicy) -> list[str]:
    """Return the candidates in the order in which they go."""
    keys: dict[str, Any] = {name: policy.key(candidate) for name, candidate in CANDIDATES.items()}
    return sorted(CANDIDATES, key=keys.__getitem__)


@pytest.mark.parametrize("name", ORDERS)
def test_each_policy_has_an_order_of_its_own(name: str) -> None:
    """Of five candidates each policy sends another one first, and all five in the order of the table."""
    assert order_of(policy_named(name, field="policy")) == ORDERS[name]


def test_the_table_tells_all_policies_apart() -> None:
    """Every policy that an option can name is in the table, and no two begin alike."""
    assert ORDERS.keys() == POLICIES.keys()
    assert len({order[0] for order in ORDERS.values()}) == len(POLICIES)


def test_slru_protects_from_a_chosen_number_of_hits() -> None:
    """The more commits it takes to be protected, the longer plain recency rules."""
    assert order_of(Slru(1)) == ["rare", "idle", "once", "low", "first"]
    assert order_of(Slru(4)) == ["once", "low", "first", "rare", "idle"]
    assert order_of(Slru(5)) == ORDERS["lru"]


@pytest.mark.parametrize("hits", [0, -1, True, 1.5, "2", None])
def test_slru_refuses_what_protects_nobody_or_everybody(hits: object) -> None:
    """The number of hits is an integer from 1 on."""
    with pytest.raises(ConfigError, match=f"protected_hits is {hits!r}; it must be an integer >= 1"):
        Slru(hits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "policy"),
    [("lru", Lru()), ("lfu", Lfu()), ("slru", Slru(2)), ("fifo", Fifo()), ("priority", Priority())],
)
def test_a_name_gives_its_policy(name: str, policy: EvictionPolicy) -> None:
    """An option that is a name gives the policy of that name, with its defaults."""
    assert policy_named(name, field="policy") == policy


def test_an_object_is_taken_as_it_is() -> None:
    """An option that is a policy, of whoever made it, gives that very object."""

    class Own:
        def key(self, node: Candidate) -> int:
            return -node.hits

    own = Own()
    assert policy_named(own, field="policy") is own


@pytest.mark.parametrize("wrong", ["mru", "", "LRU", None, 3, object(), Lru], ids=repr)
def test_what_is_no_policy_is_refused(wrong: object) -> None:
    """Anything else is refused by the option's name, its value and the choices; a class is not an object."""
    with pytest.raises(ConfigError) as caught:
        policy_named(wrong, field="host_eviction_policy")
    assert str(caught.value) == (
        f"host_eviction_policy is {wrong!r}; give one of lru, lfu, slru, fifo, priority, "
        "or an object with the method key(candidate)"
    )
