"""One read of a tiered store: what the fast tier has from there, the rest from the slow one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from ...abc import Store
from ...errors import StoreUnavailable
from ...types import Stop, StopToken
from .._guard.operations import is_fault
from .._wrapping import PartToken

MAX_TURNS = 8
"""How often a call goes from one tier to the other, where that is the only way to tell who has what."""


class TierRead:
    """Fill the buffers of one read from two stores.

    Attributes:
        missing: the items, indexes of keys and buffers, that are not filled yet, in order.
        from_slow: the items that the slow tier filled.
        error: what the slow tier raised.
    """

    def __init__(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> None:
        self.missing = list(range(len(keys)))
        self.from_slow: list[int] = []
        self.error: Exception | None = None
        self._keys = keys
        self._into = into
        self._stop = stop
        self._fast_failed = False

    @property
    def count(self) -> int:
        """How many buffers are filled, consecutive from 0."""
        return self.missing[0] if self.missing else len(self._keys)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do, or nobody wants it any more."""
        return not self.missing or self._stop.stopped

    async def run(
        self, fast: Store, slow: Store, held: Callable[[Sequence[str]], Awaitable[frozenset[str]]]
    ) -> None:
        """Read from both until all is filled or neither has the first missing one.

        Args:
            held: returns which of some keys the fast tier holds, as far as that is known.
        """
        for turn in range(MAX_TURNS):
            num_fast = await self._from_fast(fast, self.missing)
            if self.is_over or (turn and not num_fast):
                return
            if turn == 0 and len(self.missing) > 1 and not self._fast_failed:
                there = await held([self._keys[item] for item in self.missing[1:]])
                await self._from_fast(fast, [item for item in self.missing if self._keys[item] in there])
                if self.is_over:
                    return
            if not await self._from_slow(slow) or self.is_over:
                return

    async def _from_fast(self, fast: Store, items: Sequence[int]) -> int:
        if self._fast_failed or not items or self._stop.stopped:
            return 0
        try:
            return len(await self._part(fast, items))
        except _Failed:
            self._fast_failed = True
            return 0

    async def _from_slow(self, slow: Store) -> int:
        try:
            filled = await self._part(slow, self.missing)
        except _Failed as failed:
            self.error = failed.cause
            self._stop.reason = Stop.STORE_FAULT
            return 0
        self.from_slow += filled
        return len(filled)

    async def _part(self, store: Store, items: Sequence[int]) -> Sequence[int]:
        items = tuple(items)
        token = PartToken(self._stop, shares_buffers=True)
        keys = [self._keys[item] for item in items]
        try:
            count = await store.read(keys, [self._into[item] for item in items], token)
        except Exception as error:
            if not is_fault(error):
                raise
            if token.busy:
                # Two must not fill one buffer, and nobody knows which of them it is in.
                raise StoreUnavailable(f"a tier was left in the middle of a read: {error}") from error
            raise _Failed(error) from error
        filled = items[:count]
        if count < len(items):
            self._stop.reason = token.reason
        done = frozenset(filled)
        self.missing = [item for item in self.missing if item not in done]
        return filled


class _Failed(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
