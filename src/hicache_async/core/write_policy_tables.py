"""Write policies as tables: what is in which tier when, and what each policy asks for, copies and can lose.

The documentation is generated from these tables, and the tests hold a cache against every cell.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ..config import WritePolicy
from ..types import Tier

T = TypeVar("T")
Row: TypeAlias = Mapping[WritePolicy, T]


class Then(enum.StrEnum):
    """What came after the commits of a prompt.

    EVICTED: as many pages of other prompts as the device has, committed as often as the prompt itself.
    CLOSED: a clean close, without an eviction before it.
    """

    NOTHING = ""
    EVICTED = "evicted from the device"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Stage:
    """A moment in the life of a prompt that fits the host pool: a row of :data:`TIERS`."""

    num_commits: int
    then: Then = Then.NOTHING

    def __str__(self) -> str:
        times = "once" if self.num_commits == 1 else "twice"
        return f"committed {times}" + (f", then {self.then}" if self.then else "")


@dataclass(frozen=True, slots=True)
class Holders:
    """Which tiers hold a prompt, all of its pages; no other tier holds any of them.

    Attributes:
        tiers: those that do whatever the size of the host pool.
        host_if_larger: whether the host does, too, where it has more pages than the device.
    """

    tiers: tuple[Tier, ...] = ()
    host_if_larger: bool = False

    def at(self, *, device_pages: int, host_pages: int) -> frozenset[Tier]:
        """Return the tiers that hold the prompt with pools of these sizes."""
        larger = self.host_if_larger and host_pages > device_pages
        return frozenset((*self.tiers, Tier.HOST) if larger else self.tiers)

    def __str__(self) -> str:
        always = ", ".join(self.tiers) or "nowhere"
        return f"{always}; host, if larger than the device" if self.host_if_larger else always


class HostNeed(enum.StrEnum):
    """How large the host pool must be."""

    LARGER = "larger than the device; `open` refuses any other unless `allow_small_host` is set"
    ANY = "any size"

    def allows(self, *, device_pages: int, host_pages: int) -> bool:
        """Return whether a cache opens with pools of these sizes, ``allow_small_host`` not set."""
        return self is HostNeed.ANY or host_pages > device_pages


class LongPrompt(enum.StrEnum):
    """How much goes down of a prompt that is longer than the host pool."""

    HEAD = "its first pages, as many as the host pool has"
    ALL = "all of it, part by part"

    def stored_pages(self, num_pages: int, *, host_pages: int) -> int:
        """Return how many pages of such a prompt reach the store."""
        return min(num_pages, host_pages) if self is LongPrompt.HEAD else num_pages


class Lost(enum.StrEnum):
    """What is gone from all tiers."""

    NOTHING = "nothing"
    ONE_COMMIT = "what was committed once only"
    DEVICE_ONLY = "what is on the device only"
    BURST = "nothing, except what one request evicts at once beyond the host pool"

    def includes(self, stage: Stage) -> bool:
        """Return whether a prompt is lost in this stage of its life, or at the end of it."""
        if self is Lost.ONE_COMMIT:
            return stage.num_commits == 1
        return self is Lost.DEVICE_ONLY and stage.then is Then.NOTHING

    def burst_pages(self, num_pages: int, *, host_pages: int) -> int:
        """Return how many are lost of ``num_pages`` that one request evicts at once, none copied ahead."""
        return max(0, num_pages - host_pages) if self is Lost.BURST else 0


class Copied(enum.StrEnum):
    """When a page is copied from the device to the host; each is copied once."""

    FIRST_COMMIT = "one a page, at its first commit"
    SECOND_COMMIT = "one a page, at its second commit"
    LEAVING = "one a page, when it is about to leave the device, or at a clean close"

    def by(self, stage: Stage) -> bool:
        """Return whether the copy has been made by then."""
        if self is Copied.LEAVING:
            return stage.then is not Then.NOTHING
        return stage.num_commits >= (1 if self is Copied.FIRST_COMMIT else 2)


class Awaited(enum.StrEnum):
    """Which of the copies a request for device pages has to wait for."""

    NONE = "none"
    BEYOND_LOW_WATER = "those of pages it takes at once beyond `write_back_low_water`"

    def num_pages(self, num_pages: int, *, low_water_pages: int) -> int:
        """Return how many are copied on the way of a request that evicts ``num_pages``."""
        return max(0, num_pages - low_water_pages) if self is Awaited.BEYOND_LOW_WATER else 0


_EVERYWHERE = Holders((Tier.DEVICE, Tier.HOST, Tier.STORE))
_DEVICE = Holders((Tier.DEVICE,))
_HOST_AND_STORE = Holders((Tier.HOST, Tier.STORE))
_STORE = Holders((Tier.STORE,))
_STORE_AND_LARGER_HOST = Holders((Tier.STORE,), host_if_larger=True)
_NOWHERE = Holders()


def _row(write_through: T, write_through_selective: T, write_back: T) -> Row[T]:
    return dict(zip(WritePolicy, (write_through, write_through_selective, write_back), strict=True))


TIERS: Mapping[Stage, Row[Holders]] = {
    Stage(1): _row(_EVERYWHERE, _DEVICE, _DEVICE),
    Stage(2): _row(_EVERYWHERE, _EVERYWHERE, _DEVICE),
    Stage(1, Then.EVICTED): _row(_STORE_AND_LARGER_HOST, _NOWHERE, _HOST_AND_STORE),
    Stage(2, Then.EVICTED): _row(_STORE_AND_LARGER_HOST, _STORE_AND_LARGER_HOST, _HOST_AND_STORE),
    Stage(1, Then.CLOSED): _row(_STORE, _NOWHERE, _STORE),
    Stage(2, Then.CLOSED): _row(_STORE, _STORE, _STORE),
}
"""What is in which tier."""

HOST_NEED = _row(HostNeed.LARGER, HostNeed.ANY, HostNeed.ANY)
LONG_PROMPT = _row(LongPrompt.HEAD, LongPrompt.HEAD, LongPrompt.ALL)
LOST_IN_CRASH = _row(Lost.NOTHING, Lost.ONE_COMMIT, Lost.DEVICE_ONLY)
LOST_BY_EVICTION = _row(Lost.NOTHING, Lost.ONE_COMMIT, Lost.BURST)
LOST_BY_CLOSE = _row(Lost.NOTHING, Lost.ONE_COMMIT, Lost.NOTHING)
COPIED = _row(Copied.FIRST_COMMIT, Copied.SECOND_COMMIT, Copied.LEAVING)
AWAITED = _row(Awaited.NONE, Awaited.NONE, Awaited.BEYOND_LOW_WATER)

TERMS: Mapping[str, Row[HostNeed] | Row[LongPrompt] | Row[Lost] | Row[Copied] | Row[Awaited]] = {
    "host pool": HOST_NEED,
    "of a prompt longer than the host pool, stored is": LONG_PROMPT,
    "lost in a crash": LOST_IN_CRASH,
    "lost by eviction": LOST_BY_EVICTION,
    "lost by a clean close": LOST_BY_CLOSE,
    "device-to-host copies": COPIED,
    "of these a request waits for": AWAITED,
}
"""What a policy asks for and can lose, by what the documentation calls it."""
