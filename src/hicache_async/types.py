"""The nouns that every layer shares: tiers, reasons, results and snapshots."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Pages: TypeAlias = NDArray[np.int64]
"""Page ids of one tier, int64, in logical order."""

Tokens: TypeAlias = "Sequence[int] | NDArray[np.integer] | torch.Tensor"
"""Token ids, 0 .. 2**32-1, one dimension."""


K = TypeVar("K", str, "Stop")


class Tier(enum.StrEnum):
    """A level of the hierarchy."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


class Residency(enum.StrEnum):
    """Which tiers hold the pages of a tree node; computed from the node, never stored."""

    DEVICE = "device"
    BOTH = "both"
    HOST = "host"
    GHOST = "ghost"


class State(enum.StrEnum):
    """What a cache can still do."""

    OPEN = "open"
    NO_REUSE = "no_reuse"
    """A rank was lost: pages are allocated and released, nothing is matched or kept."""
    FAILED = "failed"
    """A bug was caught: as NO_REUSE, and waiters get InvariantError."""
    CLOSED = "closed"


class Stop(enum.StrEnum):
    """Why a prefetch ended where it did. Each is a counter of ``stats().unfulfilled_tokens``."""

    COMPLETE = "complete"
    NOTHING_MISSING = "nothing_missing"
    NOT_STORED = "not_stored"
    BELOW_THRESHOLD = "below_threshold"
    RATE_LIMITED = "rate_limited"
    NO_HOST_ROOM = "no_host_room"
    DEADLINE = "deadline"
    STOPPED = "stopped"
    PEER_SHORTER = "peer_shorter"
    VANISHED = "vanished"
    """Counted by the store, gone when read."""
    CORRUPT = "corrupt"
    STORE_FAULT = "store_fault"
    BREAKER_OPEN = "breaker_open"
    ANCHOR_NOT_BACKED = "anchor_not_backed"
    DETACHED = "detached"


class StopToken:
    """Tell a store's thread to stop, and let the store say when its threads are quiet.

    ``stopped`` is read between pages by whatever fills or drains buffers; once it is True at most
    the page in hand is finished. A store whose threads can outlive its coroutine (a native cancel
    ends the coroutine, never the thread) brackets each piece of thread work with
    :meth:`job_started` and :meth:`job_ended`, both on the loop; the cache hands the buffers on only
    when the coroutine has ended and every job has.
    """

    __slots__ = ("_jobs", "_quiet", "priority", "reason", "stopped", "tracked")

    def __init__(self, priority: int = 0) -> None:
        self.stopped = False
        self.priority = priority
        """Where calls queue in a store the higher is served first; may rise while the call waits."""
        self.reason: Stop | None = None
        """Why a read came back short, where the store can tell: VANISHED, CORRUPT, STORE_FAULT, BREAKER_OPEN."""
        self.tracked = False
        self._jobs = 0
        self._quiet: Callable[[], None] | None = None

    def stop(self) -> None:
        """Ask the work to end after the page in hand. May be called from any thread, and again."""
        self.stopped = True

    def job_started(self) -> None:
        """Count one piece of thread work that may touch the buffers."""
        self.tracked = True
        self._jobs += 1

    def job_ended(self) -> None:
        """Count one piece of thread work as over: it touches no buffer any more."""
        self._jobs -= 1
        if self._jobs == 0 and self._quiet is not None:
            quiet, self._quiet = self._quiet, None
            quiet()

    @property
    def busy(self) -> bool:
        """Whether a bracketed job is still running."""
        return self._jobs > 0

    def when_quiet(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, at the end of the last job that runs now."""
        self._quiet = callback


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """One object of a store: payload bytes, and when it was last written or used, in seconds since 1970."""

    nbytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """What a prefetch found and brought. Local to this rank: never schedule on it."""

    hit_tokens: int
    fetched_tokens: int
    stop: Stop


@dataclass(frozen=True, slots=True)
class Books:
    """Where the tokens of one lease's prompt came from: device + host + store + computed = prompt."""

    prompt: int
    device: int
    host: int
    store: int
    computed: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """The pages of one tier, by owner. ``free`` includes ``fenced``; the rest add up to capacity."""

    capacity: int
    free: int
    fenced: int
    leased: int
    in_hops: int
    in_tree: int
    evicted_pages: int

    def since(self, earlier: TierStats) -> TierStats:
        """Return the same pages, with those evicted after ``earlier``."""
        return dataclasses.replace(self, evicted_pages=self.evicted_pages - earlier.evicted_pages)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A frozen snapshot of what the cache holds and has done."""

    state: State
    device: TierStats
    host: TierStats
    stage_room_tokens: int
    nodes: int
    leases: int
    hops: int
    device_tokens: int
    host_tokens: int
    store_tokens: int
    computed_tokens: int
    dropped_tokens: dict[str, int] = field(default_factory=dict)
    unfulfilled_tokens: dict[Stop, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def since(self, earlier: CacheStats) -> CacheStats:
        """Return what was done between ``earlier`` and this snapshot; what is held is as it is now."""
        return dataclasses.replace(
            self,
            device=self.device.since(earlier.device),
            host=self.host.since(earlier.host),
            device_tokens=self.device_tokens - earlier.device_tokens,
            host_tokens=self.host_tokens - earlier.host_tokens,
            store_tokens=self.store_tokens - earlier.store_tokens,
            computed_tokens=self.computed_tokens - earlier.computed_tokens,
            dropped_tokens=_risen(self.dropped_tokens, earlier.dropped_tokens),
            unfulfilled_tokens=_risen(self.unfulfilled_tokens, earlier.unfulfilled_tokens),
            counters=_risen(self.counters, earlier.counters),
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were not computed, 0 .. 1; None: there were none."""
        served = self.device_tokens + self.host_tokens + self.store_tokens
        prompt = served + self.computed_tokens
        return served / prompt if prompt else None


def _risen(now: dict[K, int], before: dict[K, int]) -> dict[K, int]:
    return {name: count - before.get(name, 0) for name, count in now.items()}
