"""Attachment: the store of a running cache, which may come, go and be emptied while requests run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from .._fence import resolve
from .._hop import Hop
from .._log import logger
from ..abc import Store, SupportsDelete, SupportsListing
from ..core.clear import namespace_pattern
from ..core.codecs import check_dtype, codec_of
from ..errors import ConfigError, StoreUnavailable
from .backup import Backups
from .calls import answered_count, fault_of, start_store_call
from .context import Context, settled_within
from .namespaces import Namespaces


@runtime_checkable
class AnyStore(Store, Protocol):
    """A store, whatever its class."""


@runtime_checkable
class ClearableStore(Store, SupportsListing, SupportsDelete, Protocol):
    """A store that can be emptied."""


FORCED_DETACH_S = 0.1
"""How long a forced detach waits for calls under way, for which a page in hand takes milliseconds."""


class Attachment:
    """Which store the cache has, and whether it may be used.

    ``ctx.store`` is the store that moves use; it is taken away in one step, by :meth:`suspend`: prefetches
    end, what waits to be written is dropped, and what is still under way belongs to an epoch that is over,
    so its answer changes nothing any more.

    Args:
        close: closes a store, if that is the cache's to do.
    Attributes:
        store: the attached one; ``ctx.store`` is None all the same while it is cleared, and after that when
            it could not be cleared to the end.
    """

    def __init__(
        self,
        ctx: Context,
        backups: Backups,
        namespaces: Namespaces,
        close: Callable[[Store], Awaitable[None]],
    ) -> None:
        self._ctx = ctx
        self._backups = backups
        self._namespaces = namespaces
        self._close = close
        self.store = ctx.store
        self._left_behind: dict[Hop[Any], Store] = {}
        """Calls that still run of stores that were detached."""
        self._awaited: asyncio.Future[None] | None = None
        """What a running clear waits for."""

    def may_attach(self, store: Store | str) -> bool:
        """Return whether ``store`` is to be attached; False: it is already.

        Raises: ConfigError: another one is attached, or this one only in part cleared; it is not a store.
        """
        if isinstance(store, type) or not isinstance(store, (str, AnyStore)):
            raise ConfigError(
                f"store is {store!r}; give a URL, or a store with count_prefix, read, write and aclose"
            )
        if self.store is None:
            return True
        name = type(self.store).__name__
        if store is not self.store:
            raise ConfigError(f"store is {store!r}, and a {name} is attached; detach_store() first")
        if self._ctx.store is None:
            raise ConfigError(
                f"the {name} was cleared in part only; clear() it again or detach_store() first"
            )
        return False

    def check_codec(self, store: Store) -> None:
        """Raise ConfigError where ``store`` encodes other elements, or must not get what is here from a lossy one."""
        ctx, codec = self._ctx, codec_of(store)
        check_dtype(codec, ctx.kv.dtype)
        if ctx.lossy_codec is not None and codec != ctx.lossy_codec:
            raise ConfigError(
                f"the store's codec is {codec}, and there are pages here from a store with {ctx.lossy_codec}, "
                "which are not exact; clear() first, or attach a store with that codec"
            )

    def attach(self, store: Store) -> None:
        """Use ``store`` from now on; what is on the host already is written to it, too."""
        ctx = self._ctx
        ctx.tree.store_epoch += 1
        self.store = ctx.store = store
        ctx.keys = ctx.keys.with_codec(codec_of(store))
        self._namespaces.meet(store)  # before anything is written to it
        self._backups.catch_up()
        logger.info("store.attached", store=type(store).__name__)

    def suspend(self) -> None:
        """Use the store no more, from this moment on; what is under way comes to nothing."""
        ctx = self._ctx
        ctx.store = None
        ctx.tree.store_epoch += 1
        self._backups.leave_store()
        for prefetch in list(ctx.prefetches):
            prefetch.leave_store()

    def detach(self, *, force: bool = False) -> asyncio.Task[None] | None:
        """Take the store away; returns the task that waits for its calls and closes it. None: there is none.

        The task ends within ``store_timeout_s``, or FORCED_DETACH_S. Calls that hang longer keep their pages
        until they end.
        """
        ctx, store = self._ctx, self.store
        if store is None:
            return None
        num_waiting = len(self._backups)
        if ctx.store is not None:
            self.suspend()
        self.store = None
        self._namespaces.meet(None)
        calls = self._calls()
        for call in calls:
            self._left_behind[call] = store
            call.settled.add_done_callback(partial(self._forget, call))
        if self._awaited is not None:
            resolve(self._awaited)
        grace_s = FORCED_DETACH_S if force else ctx.config.store_timeout_s
        return ctx.spawn(self._let_go(store, calls, num_waiting, grace_s), "detach")

    def _forget(self, call: Hop[Any], settled: asyncio.Future[None]) -> None:
        del self._left_behind[call]

    def _calls(self) -> list[Hop[Any]]:
        return [
            hop
            for hop in self._ctx.hops.live
            if hop.name.startswith("store.") and hop not in self._left_behind
        ]

    async def _let_go(
        self, store: Store, calls: Sequence[Hop[Any]], num_waiting: int, grace_s: float
    ) -> None:
        clock = self._ctx.clock
        end_s = clock.monotonic() + grace_s
        for call in calls:
            await settled_within(clock, call.settled, max(0.0, end_s - clock.monotonic()))
        stuck = sorted(call.name for call in calls if not call.settled.done())
        name = type(store).__name__
        logger.info("store.detached", store=name, stuck=stuck, backups_dropped=num_waiting)
        await self._close(store)

    # Clearing

    def check_clearable(self) -> None:
        """Raise ConfigError unless the attached store, if there is one, can list and delete."""
        for capability in (SupportsListing, SupportsDelete):
            if self.store is not None and not isinstance(self.store, capability):
                raise ConfigError(
                    f"a {type(self.store).__name__} cannot be cleared, it lacks {capability.__name__}: "
                    "detach_store() it, or clear device and host only"
                )

    async def wipe(self) -> int:
        """Delete this cache's objects from the suspended store and use it again; returns how many went.

        What is still being written is waited for first, so that nothing comes after the deletion.

        Raises: StoreUnavailable: a write hangs or the store failed; nothing of it is used until it is
            cleared to the end, or detached. ClosedError: the cache was closed.
        Cancellation: as a failure, between two batches.
        """
        num_deleted, complete = 0, False
        try:
            assert isinstance(self.store, ClearableStore)
            await self._writes_ended(self.store)
            num_deleted = await self._delete_all(self.store)
            self._ctx.store, complete = self.store, True
        finally:
            if not complete:
                logger.warning("clear.incomplete", hint="the store is not used until cleared or detached")
        return num_deleted

    async def _writes_ended(self, store: Store) -> None:
        timeout_s = self._ctx.config.store_timeout_s
        end_s = self._ctx.clock.monotonic() + timeout_s
        changing = ("store.write", "store.delete")
        for call in [hop for hop in self._ctx.hops.live if hop.name in changing]:
            is_of_store = self._left_behind.get(call, store) is store
            if is_of_store and not await self._ended(store, call, end_s):
                raise StoreUnavailable(f"a {call.name} has not ended in {timeout_s} s; nothing was deleted")

    async def _delete_all(self, store: ClearableStore) -> int:
        ctx = self._ctx
        ours = namespace_pattern(ctx.keys.namespace.digest)
        listing = await self._call(store, "list_keys", store.list_keys)
        keys = listing.result
        if not isinstance(keys, Sequence):
            raise StoreUnavailable(f"list_keys failed: {listing.error or keys!r}") from listing.error
        num_deleted, batch = 0, ctx.config.store_batch_pages
        for start in range(0, len(keys), batch):
            self._check_is(store)
            names = keys[start : start + batch]
            if strange := [name for name in names if not isinstance(name, str)]:
                raise StoreUnavailable(f"list_keys failed: {strange[0]!r} is no key, which is a string")
            mine = [key for key in names if ours.match(key)]
            if not mine:
                await asyncio.sleep(0)
                continue
            deletion = await self._call(store, "delete", partial(store.delete, mine))
            count = answered_count(deletion, len(mine))
            if count is None:
                raise StoreUnavailable(f"delete failed: {fault_of(deletion, len(mine))}") from deletion.error
            num_deleted += count
        return num_deleted

    async def _call(self, store: Store, name: str, call: Callable[[], Awaitable[object]]) -> Hop[Any]:
        # Without a deadline: a long list takes long. A forced detach, a close and a cancel end the wait.
        hop: Hop[Any] = start_store_call(self._ctx, name, lambda stop: call(), lambda hop: None)
        await self._ended(store, hop, math.inf)
        return hop

    async def _ended(self, store: Store, call: Hop[Any], end_s: float) -> bool:
        ctx = self._ctx
        while not call.settled.done() and (left_s := end_s - ctx.clock.monotonic()) > 0:
            awaited = self._awaited = ctx.loop.create_future()
            wake = partial(_wake, awaited)
            call.settled.add_done_callback(wake)
            timer = ctx.clock.call_later(left_s, wake) if left_s < math.inf else None
            try:
                await ctx.until(awaited)
            finally:
                if timer is not None:
                    timer.cancel()
            self._check_is(store)
        return call.settled.done()

    def _check_is(self, store: Store) -> None:
        if self.store is not store:
            raise StoreUnavailable(f"the {type(store).__name__} was detached while it was cleared")


def _wake(awaited: asyncio.Future[None], settled: object = None) -> None:
    resolve(awaited)
