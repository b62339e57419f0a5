"""Eviction policies: who leaves a tier first. One key per node says it; the smallest goes.

To write one, give a class the method ``key`` of :class:`EvictionPolicy`, pass an object of it as an option
of the cache, and let :func:`hicache_async.testing.eviction_exam.check_eviction_policy` examine it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from .errors import ConfigError


class Candidate(Protocol):
    """What a policy may know of a run of pages that could leave its tier. It may read, and never write.

    How long the run is is not among it: runs are split and joined as prompts come and go, and of the
    victim just as many pages go as are needed, the last ones first.
    """

    @property
    def used(self) -> int:
        """When it was last matched or committed, in ticks that rise with each match and commit."""

    @property
    def hits(self) -> int:
        """How many requests have committed it."""

    @property
    def created(self) -> int:
        """When it was first committed or fetched, in the ticks of ``used``."""

    @property
    def priority(self) -> int:
        """The highest priority among the requests that have committed it."""


class Comparable(Protocol):
    """An int, or a tuple of ints: anything of which any two have an order."""

    def __lt__(self, other: Any, /) -> bool: ...


@runtime_checkable
class EvictionPolicy(Protocol):
    """The order in which nodes leave a tier, each after all that stand on it."""

    def key(self, candidate: Candidate, /) -> Comparable:
        """Return the place of ``candidate`` among all others: the smallest goes first.

        Four things are demanded, which keep the cost of an eviction free of how much is cached:

        - it is a function of the candidate's attributes, and changes nothing, here or there;
        - while ``used``, ``hits`` and ``priority`` of one candidate rise, it never falls: it is asked
          for again only when the candidate seems to be the next to go;
        - any two keys can be compared, and are in one order;
        - it never raises: a policy that does, or whose keys cannot be compared, is replaced by lru.

        It is called a few times for each release and eviction, on the event loop, so it must be short.
        """


@dataclass(frozen=True, slots=True)
class Lru:
    """What was used longest ago goes first."""

    def key(self, candidate: Candidate, /) -> int:
        """Return when the candidate was used."""
        return candidate.used


@dataclass(frozen=True, slots=True)
class Lfu:
    """What was committed least often goes first; among equals what was used longest ago."""

    def key(self, candidate: Candidate, /) -> tuple[int, int]:
        """Return how often the candidate was committed, and when it was used."""
        return candidate.hits, candidate.used


@dataclass(frozen=True, slots=True)
class Slru:
    """Segmented LRU: by last use, and what was committed often only after all that was not.

    A prompt seen once cannot push out what many share, as it does under :class:`Lru`.

    Attributes:
        protected_hits: how many commits protect, 1 or more.

    Raises: ConfigError: it is less, or no integer.
    """

    protected_hits: int = 2

    def __post_init__(self) -> None:
        hits = self.protected_hits
        if isinstance(hits, bool) or not isinstance(hits, int) or hits < 1:
            raise ConfigError(f"protected_hits is {hits!r}; it must be an integer >= 1")

    def key(self, candidate: Candidate, /) -> tuple[bool, int]:
        """Return whether the candidate is protected, and when it was used."""
        return candidate.hits >= self.protected_hits, candidate.used


@dataclass(frozen=True, slots=True)
class Fifo:
    """What came first goes first, however much it was used since."""

    def key(self, candidate: Candidate, /) -> int:
        """Return when the candidate came."""
        return candidate.created


@dataclass(frozen=True, slots=True)
class Priority:
    """What only requests of low priority have committed goes first; among equals what was used longest ago."""

    def key(self, candidate: Candidate, /) -> tuple[int, int]:
        """Return the priority of the candidate, and when it was used."""
        return candidate.priority, candidate.used


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "fifo": Fifo,
    "priority": Priority,
}
"""The policies that an option can name."""


def policy_named(name_or_policy: object, *, field: str) -> EvictionPolicy:
    """Return the policy that an option names, or is.

    Args:
        field: the option, for the message.
    Raises:
        ConfigError: neither a name of :data:`POLICIES` nor an object with the method ``key``.
    """
    if isinstance(name_or_policy, str):
        if name_or_policy in POLICIES:
            return POLICIES[name_or_policy]()
    elif isinstance(name_or_policy, EvictionPolicy) and not isinstance(name_or_policy, type):
        return name_or_policy
    names = ", ".join(POLICIES)
    raise ConfigError(
        f"{field} is {name_or_policy!r}; give one of {names}, or an object with the method key(candidate)"
    )
