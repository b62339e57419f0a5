"""Admin: what an operator does with a running cache."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from ._fence import resolve
from ._log import logger
from .abc import Store
from .assembly import Owned
from .checks import checked_prompt, checked_seconds
from .core.clear import clear_tier
from .core.tokens import TokenKey
from .errors import ConfigError
from .explanation import Explanation
from .flows.attachment import Attachment
from .flows.context import Context
from .flows.explain import explain
from .flows.movers import Movers
from .flows.namespaces import Namespaces
from .stores.null import NullStore
from .types import State, Tier, Tokens


class Admin:
    """Operations beside the request path; ``cache.admin``.

    Changes of the store and of what is cached follow one another; the rest goes beside them.

    Args:
        check: raises unless the cache is open and used on its own loop.
        owned: what the cache closes in the end; stores that are opened here are added to it.
        namespaces: meets the stores that are attached here.
    """

    def __init__(
        self,
        ctx: Context,
        movers: Movers,
        check: Callable[[], None],
        owned: Owned,
        namespaces: Namespaces,
    ) -> None:
        self._ctx = ctx
        self._movers = movers
        self._check = check
        self._owned = owned
        self._namespaces = namespaces
        self._attachment = Attachment(ctx, movers.backups, namespaces, self._owned.close_store)
        self._change = asyncio.Lock()

    def pin(
        self, tokens: Tokens | TokenKey, *, ttl_s: float, salt: bytes = b"", adapter: str | None = None
    ) -> int:
        """Keep what is cached here of a prefix, whatever the policies say, until ``ttl_s`` have passed.

        It stays on device or host; what is on the device only is brought to the host. Pinning the same tokens
        again sets the time anew. All pins together keep ``pin_capacity_fraction`` of the pools at most.

        Args:
            tokens: the prefix; its whole pages count.
            ttl_s: seconds, more than 0.
        Returns: how many tokens are pinned; fewer than given where fewer are cached, or fit.
        Raises: ConfigError: tokens or a time that cannot be.
        """
        self._check()
        seconds = checked_seconds("ttl_s", ttl_s)
        key, chain = checked_prompt(tokens, self._ctx.page_tokens, salt, adapter)
        return self._movers.pins.pin(key, chain, seconds)

    def unpin(self, tokens: Tokens | TokenKey, *, salt: bytes = b"", adapter: str | None = None) -> None:
        """Let go of what :meth:`pin` keeps for the same tokens; does nothing when there is none."""
        self._check()
        key, chain = checked_prompt(tokens, self._ctx.page_tokens, salt, adapter)
        self._movers.pins.unpin(key, chain)

    async def explain(
        self, tokens: Tokens | TokenKey, *, salt: bytes = b"", adapter: str | None = None
    ) -> Explanation:
        """Say for each page of a prompt where it is, and why a match and a prefetch would end where they do.

        Changes nothing: no page, pin, count or order of eviction. The store is asked, within its time limits,
        and may count that as use. Never raises for I/O.

        Raises: ConfigError: tokens that cannot be.
        Cancellation: ends the questions to the store.
        """
        self._check()
        key, chain = checked_prompt(tokens, self._ctx.page_tokens, salt, adapter)
        return await explain(
            self._ctx, key, chain, self._namespaces.read, operator_pins=self._movers.pins.kept
        )

    # Tiers and the store

    async def flush(self, tier: Tier = Tier.STORE) -> None:
        """Wait until what is on its way down to ``tier`` now has arrived or was given up.

        What begins after the call is not waited for, so this returns under any traffic.

        Args:
            tier: HOST: copies behind running forwards, and running ones; STORE: these, the backups that
                follow, and what is written because a store was attached.
        Raises: ClosedError: the cache is closed, or was while this waited.
        Cancellation: ends the wait only.
        """
        self._check()
        if tier not in (Tier.HOST, Tier.STORE):
            raise ConfigError(f"tier is {tier!r}; things move down to {Tier.HOST} or {Tier.STORE}")
        flushing = self._ctx.spawn(self._movers.flush(tier), "flush")
        try:
            await self._until_over(flushing)
        finally:
            flushing.cancel()

    async def attach_store(self, store: Store | str) -> None:
        """Use a store from now on; what is on the host already is written to it, too, as its queue drains.

        Args:
            store: an object or a URL. The one that is attached already changes nothing, a NullStore or
                "null:" is none.
        Raises: ConfigError: not a store, or another one is attached, or one whose codec does not go with the KV
            or with what is here from a lossy one; nothing has changed. ClosedError.
        Ownership: a store given by URL is closed by the cache, one given as an object is the caller's.
        Cancellation: nothing has changed.
        """
        self._check()
        async with self._change:
            self._check()
            if not self._attachment.may_attach(store):
                return
            opened = self._owned.open_store(store) if isinstance(store, str) else store
            if opened is None or isinstance(opened, NullStore):
                return
            try:
                self._attachment.check_codec(opened)
            except ConfigError:
                await self._owned.close_store(opened)
                raise
            self._attachment.attach(opened)

    async def detach_store(self, *, force: bool = False) -> None:
        """Use no store any more; does nothing where there is none.

        Prefetches end with ``DETACHED`` and keep what has arrived, what waits to be written is dropped and
        counted. Then this waits for calls of the store under way, at most ``store_timeout_s``; those that
        hang longer keep their pages until they end, and change nothing. Another store may be attached.

        Args:
            force: at once, and wait for 0.1 s at most; False: when what is pending now is written, as
                :meth:`flush`, and after a running clear or attach, which a forced detach ends.
        Raises: ClosedError: the cache is closed, or was while this waited.
        Ownership: the cache closes a store that it opened by URL.
        Cancellation: the store is attached as before, or gone and then closed all the same.
        """
        self._check()
        store = self._attachment.store
        if force or store is None:
            over = self._attachment.detach(force=force)
        else:
            await self.flush()
            async with self._change:
                self._check()
                over = self._attachment.detach() if self._attachment.store is store else None
        if over is not None:
            await self._until_over(over)

    async def clear(self, tier: Tier | None = None) -> None:
        """Forget what is cached; pins of an operator are let go.

        A request that runs meanwhile keeps its pages until it releases them. What it stands on is cut off from
        matching, with all below it, and what it computes on top of that is committed nowhere.

        Args:
            tier: None: all of them, for a change of weights: nothing of before is served to a request that
                loads from now on. DEVICE or HOST: what another tier has stays. STORE: the objects of this
                cache's namespace, of all its ranks (but pipeline stages with other numbers of layers, which
                have a namespace of their own), and no others; what is still on the host is written again
                at the next commit or hit. While a store is cleared it is used for nothing else. A store that
                is not attached is not cleared: after a change of weights clear it when it has been attached,
                or open the cache with another ``fingerprint``.
        Raises: ConfigError: the store cannot list or delete; nothing has changed. StoreUnavailable: the store
            could not be cleared to the end, or was detached meanwhile; the other tiers are cleared, and the
            store is used for nothing until a later clear succeeds, or it is detached. ClosedError.
        Cancellation: as if the store had failed. A store that never answers a question for its names, or to
            delete, is waited for until this is cancelled or the store is detached by force.
        """
        self._check()
        if tier is not None and tier not in tuple(Tier):
            raise ConfigError(f"tier is {tier!r}; choose one of {', '.join(Tier)}, or None for all")
        async with self._change:
            self._check()
            wipes = tier in (None, Tier.STORE) and self._attachment.store is not None
            if wipes:
                self._attachment.check_clearable()
            async with self._nothing_offered():
                if wipes:
                    # The store first, and what is here in the same step: otherwise a prefetch would bring the
                    # old back, or a backup carry it down again. The objects last, when no write can follow.
                    self._attachment.suspend()
                num_pages = self._clear_here(None if tier is None else Tier(tier))
            num_objects = await self._attachment.wipe() if wipes else 0
            logger.info("cache.cleared", tier=tier or "all", pages=num_pages, objects=num_objects)

    @contextlib.asynccontextmanager
    async def _nothing_offered(self) -> AsyncIterator[None]:
        # What loads have offered the other ranks must stay true until that is settled. Meanwhile nothing new is
        # offered, rather than waited with: so this ends, and no rank waits for another here.
        ctx = self._ctx
        ctx.offers_nothing = True
        try:
            while ctx.votes:
                await asyncio.wait(set(ctx.votes))
                self._check()
            yield
        finally:
            ctx.offers_nothing = False

    def _clear_here(self, tier: Tier | None) -> int:
        ctx = self._ctx
        if tier is None:
            ctx.lossy_codec = None
        if tier is Tier.STORE or ctx.state is State.FAILED:  # a tree in doubt is matched by nobody
            return 0
        if tier is None:
            return self._movers.forget()
        self._movers.pins.drop_all()
        num_pages = clear_tier(ctx.tree, tier, ctx.device_pool if tier is Tier.DEVICE else ctx.host_pool)
        ctx.room.dropped_pages["cleared"] += num_pages
        self._movers.released()
        return num_pages

    async def _until_over(self, work: asyncio.Task[None]) -> None:
        over = self._ctx.loop.create_future()
        work.add_done_callback(lambda _: resolve(over))
        await self._ctx.until(over)
