"""TieredStore: a fast store in front of a slow one, which has the last word."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..abc import (
    Clock,
    Store,
    SupportsCodec,
    SupportsDelete,
    SupportsListing,
    SupportsNamespaces,
    SupportsStat,
    SupportsSweep,
)
from ..errors import ConfigError
from ..types import ObjectStat, Stop, StopToken
from ._buffers import check_buffers
from ._guard.attempt import Deadline
from ._guard.operations import is_fault
from ._tiers.fills import Fills, Source
from ._tiers.read import MAX_TURNS, TierRead
from ._wrapping import Mixins, able, kind_of, stats_of
from .guard import GuardedStore, RunningLoopClock

DEFAULT_FILL_BYTES = 64 << 20
_TURNS_BEFORE_STAT = 2


class _Tiers:
    """What the parts of a tiered store share."""

    fast: GuardedStore
    slow: GuardedStore
    _fills: Fills
    _counts: Counter[str]
    _clock: Clock
    _fast_timeout_s: float

    async def _held_by_fast(self, keys: Sequence[str]) -> frozenset[str]:
        """Return which of ``keys`` the fast tier holds; none where it cannot tell at once, or fails."""
        if not isinstance(self.fast, SupportsStat) or not keys:
            return frozenset()
        try:
            stats = await self.fast.stat(keys)
        except Exception as error:
            if not is_fault(error):
                raise
            return frozenset()
        return frozenset(key for key, stat in zip(keys, stats, strict=True) if stat is not None)


class TieredStore(_Tiers):
    """Read from ``fast`` what it has and from ``slow`` what it lacks; write to both.

    The slow store is the truth. What is written is written there, and counts as far as it got there; the fast
    one gets copies in the background, of what was written and of what was read from the slow one. Copies that
    do not fit into ``fill_bytes``, or that the fast store does not take, cost nothing but a count.

    Each tier stands behind a guard: a GuardedStore that was given, or else one that is put around it. One
    failure makes the fast tier be left alone for a while; five in a row the slow one, as with any guard. While
    it is, reads and lookups are served by the other. A read that hangs in a tier fails, for its buffers are that
    tier's until it ends; it is the last one that does.

    ==================  ============================================================================
    capability          it has it where
    ==================  ============================================================================
    delete, list_keys   both have: else objects would be left, or not be told of
    stat                both have: the fast one's answer, and the slow one's for what that lacks
    list_namespaces     the slow one has; of both, as far as the fast one can tell
    sweep               one of them has; counts begin with ``fast_`` and ``slow_``
    codec               one of them has; see :attr:`codec`
    refusal             always: it refuses while both do
    ==================  ============================================================================

    Args:
        fast: best a store in memory or on a local disk, of bounded size.
        slow: best a store that is shared.
        fast_timeout_s: for a read from the fast store.
        fast_lookup_timeout_s: for a lookup there; together with that of the slow store's guard, 0.5, less than
            ``prefetch_timeout_base_s`` of the cache.
        fill_bytes: copies on their way into the fast store at once; as much memory is kept.
        clock: where deadlines come from; None: the running loop.

    Attributes:
        fast, slow: the guards.
        stats: what both count, with ``fast_`` and ``slow_`` before it, and "pages_from_fast",
            "pages_from_slow", "pages_filled", "pages_not_filled", "fill_failures".

    Ownership: closing it closes both. The buffers of a read are free when the read has returned, or, where it
        raised or was cancelled, when ``stop`` is quiet.
    Cancellation: as of the tier that is being waited for. What is on its way into the fast store goes on.
    Raises: ConfigError: an option that cannot work.
    """

    def __new__(cls, fast: Store, slow: Store, **options: Any) -> TieredStore:
        """Make the kind of store that can do what its tiers can: isinstance() is how others ask."""
        both, either = able(fast) & able(slow), able(fast) | able(slow)
        wanted = {SupportsDelete, SupportsListing, SupportsStat} & both
        wanted |= {SupportsNamespaces} & able(slow) | {SupportsSweep, SupportsCodec} & either
        return object.__new__(kind_of(cls, _MIXINS, wanted))

    def __init__(
        self,
        fast: Store,
        slow: Store,
        *,
        fast_timeout_s: float = 1.0,
        fast_lookup_timeout_s: float = 0.2,
        fill_bytes: int = DEFAULT_FILL_BYTES,
        clock: Clock | None = None,
    ) -> None:
        if isinstance(fill_bytes, bool) or not isinstance(fill_bytes, int) or fill_bytes < 0:
            raise ConfigError(f"fill_bytes is {fill_bytes!r}; give an integer >= 0")
        self._clock = clock or RunningLoopClock()
        self._fast_timeout_s = fast_timeout_s
        self.fast = (
            fast
            if isinstance(fast, GuardedStore)
            else GuardedStore(
                fast,
                timeout_s=fast_timeout_s,
                lookup_timeout_s=fast_lookup_timeout_s,
                max_attempts=1,
                max_failures=1,
                clock=self._clock,
            )
        )
        self.slow = slow if isinstance(slow, GuardedStore) else GuardedStore(slow, clock=self._clock)
        self._counts = Counter(dict.fromkeys(("pages_from_fast", "pages_from_slow"), 0))
        # Not through the guard: a full fast tier that refuses writes can still be read.
        self._fills = Fills(fast, fill_bytes, lambda: self.fast.refusal() is not None, self._counts)

    def __repr__(self) -> str:
        return f"<TieredStore {self.fast!r} {self.slow!r}>"

    @property
    def stats(self) -> Counter[str]:
        """What is counted here and in both tiers, by name."""
        counts = Counter(self._counts)
        for prefix, tier in (("fast", self.fast), ("slow", self.slow)):
            counts.update({f"{prefix}_{name}": count for name, count in stats_of(tier).items()})
        return counts

    def refusal(self) -> Stop | None:
        """Return why nothing should be asked of either tier now; None: one of them may be asked."""
        return None if self.fast.refusal() is None else self.slow.refusal()

    def why_refused(self) -> str:
        """Say for a human, in a clause, why, since when and until when."""
        return f"of its fast tier {self.fast.why_refused()}; of its slow tier {self.slow.why_refused()}"

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys exist in either tier, consecutive from ``keys[0]``, in a bounded number of calls.

        It is exact where the fast tier can tell what it holds (``stat``); else it may fall short where one
        tier's objects and the other's alternate more than 8 times.

        Raises: what the slow tier raised, where the fast one has not even the first.
        """
        keys = tuple(keys)
        found = 0
        for turn in range(MAX_TURNS):
            in_fast = await self._count_in_fast(keys[found:])
            found += in_fast
            if found == len(keys) or (turn and not in_fast):
                return found
            try:
                if turn == _TURNS_BEFORE_STAT and isinstance(self.fast, SupportsStat):
                    return found + await self._count_by_stat(keys[found:])
                in_slow = await self.slow.count_prefix(keys[found:])
            except Exception as error:
                if not is_fault(error) or found == 0:
                    raise
                return found
            found += in_slow
            if found == len(keys) or not in_slow:
                return found
        return found

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Fill buffers whole, in order, and return how many, consecutive from 0.

        Raises: StoreUnavailable: a tier hangs in the buffers. Else what the slow tier raised, where not even
            the first buffer could be filled.
        Ownership, Cancellation: see the class.
        """
        keys, into = tuple(keys), tuple(into)
        check_buffers(keys, into, writable=True)
        if not keys:
            return 0
        stop.job_started()
        try:
            with self._fills.source(keys) as source:
                return await self._read(keys, into, stop, source)
        finally:
            stop.job_ended()

    async def _read(
        self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken, source: Source
    ) -> int:
        reading = TierRead(keys, into, stop)
        await reading.run(self.fast, self.slow, self._held_by_fast)
        num_slow = len(reading.from_slow)
        self._counts["pages_from_slow"] += num_slow
        self._counts["pages_from_fast"] += len(keys) - len(reading.missing) - num_slow
        if reading.error is not None and reading.count == 0:
            raise reading.error
        if reading.from_slow and not stop.stopped:
            brought = reading.from_slow
            await self._fills.add(source, [keys[item] for item in brought], [into[item] for item in brought])
        if not reading.missing:
            stop.reason = None
        return reading.count

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Store pages in the slow tier, in order, and return how many, consecutive from 0.

        Raises: what the slow tier raised; then the fast one gets nothing.
        Ownership: the pages are read until this returns; the fast tier reads copies.
        """
        keys, pages = tuple(keys), tuple(pages)
        check_buffers(keys, pages, writable=False)
        with self._fills.source(keys) as source:
            count = await self.slow.write(keys, pages)
            await self._fills.add(source, keys[:count], pages[:count])
        return count

    async def aclose(self) -> None:
        """Close both; never waits for a hung operation."""
        try:
            await self._fills.aclose()
        finally:
            try:
                await self.fast.aclose()
            finally:
                await self.slow.aclose()

    async def _count_in_fast(self, keys: Sequence[str]) -> int:
        try:
            return await self.fast.count_prefix(keys)
        except Exception as error:
            if not is_fault(error):
                raise
            return 0

    async def _count_by_stat(self, keys: Sequence[str]) -> int:
        # What the fast tier lacks, in order: the first of it that the slow one lacks too is where it ends.
        held = await self._held_by_fast(keys)
        lacking = [item for item, key in enumerate(keys) if key not in held]
        count = await self.slow.count_prefix([keys[item] for item in lacking])
        return lacking[count] if count < len(lacking) else len(keys)


class _Deletes(_Tiers):
    """Delete from both."""

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete the keys that exist in either tier; returns how many did.

        Reads and writes under way bring none of them into the fast tier. What is on its way there already is
        waited for, at most ``fast_timeout_s``, and deleted when it arrives later.

        Raises: what a tier raised; the other may have deleted them.
        """
        keys = tuple(dict.fromkeys(keys))
        in_slow = await self._held_by_slow(keys)
        num_slow = await cast("SupportsDelete", self.slow).delete(keys)
        await self._revoke_fills(keys)
        fast = cast("SupportsDelete", self.fast)
        await fast.delete([key for key in keys if key in in_slow])
        only_fast = await fast.delete([key for key in keys if key not in in_slow])
        return min(len(keys), num_slow + only_fast)  # what came to the slow one meanwhile was in neither list

    async def _revoke_fills(self, keys: Sequence[str]) -> None:
        if not (pending := self._fills.revoke(keys)):
            return
        deadline = Deadline(self._clock, self._fast_timeout_s, lambda: None)
        all_ended = asyncio.ensure_future(asyncio.wait(pending))
        try:
            await asyncio.wait((all_ended, deadline.over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            all_ended.cancel()
            deadline.cancel()

    async def _held_by_slow(self, keys: Sequence[str]) -> frozenset[str]:
        if isinstance(self.slow, SupportsStat):
            stats = await self.slow.stat(keys)
            return frozenset(key for key, stat in zip(keys, stats, strict=True) if stat is not None)
        held: list[str] = []
        start = 0
        while start < len(keys):
            count = await self.slow.count_prefix(keys[start:])
            held += keys[start : start + count]
            start += count + 1
        return frozenset(held)


class _Lists(_Tiers):
    """List both."""

    async def list_keys(self) -> Sequence[str]:
        """Return the keys of the objects of both tiers, in no particular order."""
        slow = await cast("SupportsListing", self.slow).list_keys()
        fast = await cast("SupportsListing", self.fast).list_keys()
        return tuple(dict.fromkeys((*slow, *fast)))


class _Stats(_Tiers):
    """Ask both for sizes and times."""

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        """Return for each key what is known of its object; None: there is none, or it cannot be one.

        Of an object in both tiers it is the later time: a write reaches the fast one after it has returned, and a
        read may reach that one alone.

        Raises: what the slow tier raised, where the fast one has none of them.
        """
        stats: list[ObjectStat | None] = [None] * len(keys)
        try:
            stats = list(await cast("SupportsStat", self.fast).stat(keys))
        except Exception as error:
            if not is_fault(error):
                raise
        try:
            found = await cast("SupportsStat", self.slow).stat(keys)
        except Exception as error:
            if not is_fault(error) or not any(stats):
                raise
            return stats
        return [_later(*both) for both in zip(found, stats, strict=True)]


def _later(one: ObjectStat | None, other: ObjectStat | None) -> ObjectStat | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda stat: stat.modified_s)


class _ListsNamespaces(_Tiers):
    """Know the namespaces of both."""

    async def list_namespaces(self) -> Sequence[str]:
        """Return the namespace digests of the objects of both tiers, in order of name."""
        namespaces = set(await cast("SupportsNamespaces", self.slow).list_namespaces())
        if isinstance(self.fast, SupportsNamespaces):
            namespaces |= set(await self.fast.list_namespaces())
        return sorted(namespaces)


class _Sweeps(_Tiers):
    """Sweep what can be swept."""

    async def sweep(self) -> Mapping[str, int]:
        """Sweep both tiers; returns counts by name, with ``fast_`` and ``slow_`` before it."""
        counts: dict[str, int] = {}
        for prefix, tier in (("fast", self.fast), ("slow", self.slow)):
            if isinstance(tier, SupportsSweep):
                swept = await tier.sweep()
                counts |= {f"{prefix}_{name}": count for name, count in swept.items()}
        return counts


class _Encodes(_Tiers):
    """Know what both encode."""

    @property
    def codec(self) -> str:
        """That of the slow tier, which others may share, where the fast one has the same or none.

        Else both, as "zstd|raw": a page may come back as either made it, which matters if one is lossy.
        """
        fast, slow = (
            tier.codec if isinstance(tier, SupportsCodec) else "" for tier in (self.fast, self.slow)
        )
        return slow if fast in ("", slow) else f"{fast}|{slow or 'raw'}"


_MIXINS: Mixins = {
    SupportsDelete: _Deletes,
    SupportsListing: _Lists,
    SupportsStat: _Stats,
    SupportsNamespaces: _ListsNamespaces,
    SupportsSweep: _Sweeps,
    SupportsCodec: _Encodes,
}
