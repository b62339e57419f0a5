"""What a check is, and what it may need of a store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ... import abc
from ...abc import Store
from .candidate import Candidate

if TYPE_CHECKING:
    from .exam import Exam

Examine: TypeAlias = "Callable[[Exam], Awaitable[None]]"

FACTS: Mapping[str, tuple[Callable[[Candidate], bool], str]] = {
    "keeps": (lambda each: each.keeps, "keeps is False"),
    "persists": (lambda each: each.persists, "persists is False"),
    "shared": (lambda each: each.shared, "shared is False"),
    "processes": (lambda each: each.processes, "processes is False"),
    "bounded": (lambda each: each.open_bounded is not None, "there is no hook open_bounded()"),
    "damage": (lambda each: each.damage is not None, "there is no hook damage()"),
    "two sizes": (lambda each: len(each.object_nbytes) > 1, "object_nbytes has one size only"),
}
"""What may be declared of a store, and what is said where it is not."""

CAPABILITIES: Mapping[str, tuple[type, str]] = {
    "delete": (abc.SupportsDelete, "it has no delete(): see abc.SupportsDelete"),
    "list": (abc.SupportsListing, "it has no list_keys(): see abc.SupportsListing"),
    "stat": (abc.SupportsStat, "it has no stat(): see abc.SupportsStat"),
    "namespaces": (abc.SupportsNamespaces, "it has no list_namespaces(): see abc.SupportsNamespaces"),
    "sweep": (abc.SupportsSweep, "it has no sweep(): see abc.SupportsSweep"),
    "codec": (abc.SupportsCodec, "it has no codec: see abc.SupportsCodec"),
    "stats": (abc.SupportsStats, "it has no stats: see abc.SupportsStats"),
    "refusal": (abc.SupportsRefusal, "it has no refusal(): see abc.SupportsRefusal"),
}
"""What a store may be able to do, asked by isinstance as the cache does."""


class Missing(Exception):
    """A check was left out; the message says which fact, hook or capability it needs."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property of stores.

    Attributes:
        part: of the exam.
        name: says the property.
        examine: raises AssertionError where it does not hold.
        needs: names in :data:`FACTS` and :data:`CAPABILITIES`.
        warm_up: makes what the process makes once and keeps, before what is left behind is counted.
    """

    part: str
    name: str
    examine: Examine
    needs: tuple[str, ...] = ()
    warm_up: Callable[[], None] = lambda: None

    def __str__(self) -> str:
        return f"{self.part}.{self.name}"

    def require_facts(self, candidate: Candidate) -> None:
        """Raise Missing where the candidate lacks what this needs."""
        for need in self.needs:
            if need in FACTS and not FACTS[need][0](candidate):
                raise Missing(FACTS[need][1])

    def require_capabilities(self, store: Store) -> None:
        """Raise Missing where the store lacks what this needs."""
        for need in self.needs:
            if need in CAPABILITIES and not isinstance(store, CAPABILITIES[need][0]):
                raise Missing(CAPABILITIES[need][1])


def check(*needs: str) -> Callable[[Examine], Check]:
    """Make a function a check of the part that its module is; its name says the property."""
    unknown = set(needs) - {*FACTS, *CAPABILITIES}
    assert not unknown, f"nobody has heard of {unknown}"

    def make(examine: Examine) -> Check:
        part = examine.__module__.rpartition(".")[2]
        return Check(part, examine.__name__, examine, needs)

    return make


def checks_of(module: object) -> tuple[Check, ...]:
    """Return the checks of a module, in order."""
    found: list[Check] = []
    for value in vars(module).values():
        found += [value] if isinstance(value, Check) else []
    return tuple(found)
