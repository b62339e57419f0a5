"""Scripts for engines in lockstep: the requests that all ranks get alike, and the luck that each has alone.

A prompt is a string: each letter is one page of four tokens, and one token follows that is no whole page.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from ..abc import Store, SupportsDelete, SupportsListing
from ..config import PrefetchPolicy
from ..types import StopToken
from ._exam_engine import PAGE_TOKENS
from .faults import StoreWrapper

Pause = Callable[[float], Awaitable[None]]
"""Wait for so many units of time: turns of the loop, or milliseconds."""

MAX_PROMPT_PAGES = 6
MAX_OUTPUT_TOKENS = 6
MAX_REQUEST_PAGES = MAX_PROMPT_PAGES + -(-(1 + MAX_OUTPUT_TOKENS) // PAGE_TOKENS)
"""Device pages of the largest request; a smaller device would never serve it."""

FAMILIES = ("abcdef", "abcxyz", "pqrstu")
"""Where prompts begin; some share their first pages."""

_POLICIES = (
    None,
    PrefetchPolicy.wait_complete(),
    PrefetchPolicy.best_effort(),
    PrefetchPolicy.timeout(base_s=0.02, per_ki_token_s=0.0),
)


@dataclass(frozen=True, slots=True)
class LockstepRequest:
    """One request, the same on every rank.

    Attributes:
        letters: of the prompt.
        output_tokens: how many are decoded.
        room_tokens: what ``load`` is asked to reserve for.
        policy: of its prefetch; ``prefetches`` False: it has none.
        gone_at: the step before which its client hangs up; None: it stays.
    """

    name: str
    letters: str
    output_tokens: int
    room_tokens: int
    prefetches: bool
    policy: PrefetchPolicy | None
    gone_at: int | None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.letters) * PAGE_TOKENS + 1


@dataclass(frozen=True, slots=True)
class LockstepScript:
    """What happens in one run, the same on every rank; all of it follows from the seed.

    Attributes:
        size: ranks.
        requests: in the order in which one rank of them would see them.
    """

    seed: int
    size: int
    requests: tuple[LockstepRequest, ...]

    @classmethod
    def random(cls, seed: int, size: int, num_requests: int | None = None) -> LockstepScript:
        """Return the script of a seed.

        Args:
            num_requests: None: 5 to 9.
        """
        rng = random.Random(f"script {seed} {size}")
        count = rng.randint(5, 9) if num_requests is None else num_requests
        return cls(seed, size, tuple(_random_request(rng, seed, number) for number in range(count)))

    def luck(self, rank: int) -> Luck:
        """Return what ``rank`` alone meets."""
        return Luck(random.Random(f"luck {self.seed} {rank}"), self, rank)


def _random_request(rng: random.Random, seed: int, number: int) -> LockstepRequest:
    family = rng.choice(FAMILIES)
    letters = family[: rng.randint(1, len(family))]
    if len(letters) < MAX_PROMPT_PAGES and rng.random() < 0.3:
        letters += rng.choice("ghijk")
    output_tokens = rng.randint(0, MAX_OUTPUT_TOKENS)
    total_tokens = len(letters) * PAGE_TOKENS + 1 + output_tokens
    return LockstepRequest(
        name=f"request {seed}.{number}",
        letters=letters,
        output_tokens=output_tokens,
        room_tokens=rng.choice((0, total_tokens, total_tokens, total_tokens + 2 * PAGE_TOKENS)),
        prefetches=rng.random() < 0.8,
        policy=rng.choice(_POLICIES),
        gone_at=rng.randint(1, 25) if rng.random() < 0.25 else None,
    )


@dataclass(slots=True)
class Luck:
    """What one rank meets that the others do not: room, a store, moments.

    Attributes:
        device_pages, host_pages: of its pools.
        store_delay: units of time of one call of its store; one rank of a group has a slow one.
        missing: the share of the prompts' pages that its store never had.
        fault_rate: the share of the store's calls that fail or come back short.
    """

    rng: random.Random
    script: LockstepScript
    rank: int
    device_pages: int = field(init=False)
    host_pages: int = field(init=False)
    store_delay: float = field(init=False)
    missing: float = field(init=False)
    fault_rate: float = field(init=False)

    def __post_init__(self) -> None:
        rng, script = self.rng, self.script
        self.device_pages = MAX_REQUEST_PAGES + rng.randint(2, 14)
        self.host_pages = rng.randint(6, 40)
        is_slow = script.seed % script.size == self.rank
        self.store_delay = 12.0 if is_slow else rng.choice((0.0, 1.0, 3.0))
        self.missing = rng.choice((0.0, 0.0, 0.2, 1.0))
        self.fault_rate = rng.choice((0.0, 0.0, 0.1, 0.4))

    def arrivals(self) -> list[tuple[float, LockstepRequest]]:
        """Return the requests in the order in which they reach this rank, each with the pause before it."""
        order = list(self.script.requests)
        if self.rng.random() < 0.7:
            self.rng.shuffle(order)
        return [(self.moment(4), request) for request in order]

    def moment(self, most: float) -> float:
        """Return some units of time, often none."""
        return self.rng.choice((0.0, 0.0, self.rng.uniform(0, most)))


class UnluckyStore(StoreWrapper):
    """A store that takes its time, fails and comes back short, as the luck of its rank will have it."""

    def __init__(self, inner: Store, luck: Luck, pause: Pause) -> None:
        super().__init__(inner)
        self._luck = luck
        self._pause = pause

    async def around(self, verb: str, call: Callable[[], Awaitable[int]], stop: StopToken) -> int:
        """Wait, then call, fail, or call and count less."""
        luck, rng = self._luck, self._luck.rng
        await self._pause(rng.uniform(0, 2 * luck.store_delay))
        fault = rng.random()
        if fault < luck.fault_rate / 2:
            raise OSError("a fault of the exam")
        count = await call()
        return rng.randint(0, max(0, count)) if fault < luck.fault_rate else count

    async def list_keys(self) -> Sequence[str]:
        """List what the inner store, which must be able to, has."""
        return await cast("SupportsListing", self.inner).list_keys()

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete from the inner store, which must be able to."""
        return await cast("SupportsDelete", self.inner).delete(keys)
