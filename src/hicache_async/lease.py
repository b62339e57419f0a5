"""PrefixLease: what a request does with the cache, in tokens; here alone they are converted to pages.

Token ranges of a request (half-open):

    [0, loading.tokens)              cached; never computed again
    [loading.tokens, committed)      computed by this request and published, in whole pages
    [committed, allocated)           this request's own pages, being computed
    [allocated, + reserved_tokens)   room promised by load
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Self

from ._fence import ThreadFence
from .abc import Fence
from .checks import (
    check_commit,
    check_discard,
    check_fence,
    check_live,
    check_loaded,
    checked_count,
    checked_priority,
)
from .config import PrefetchPolicy
from .core.announcements import Claim
from .core.holding import Holding
from .core.tokens import TokenKey, token_bytes
from .errors import ConfigError, LeaseError
from .flows.allocate import Allocation
from .flows.books import books_of
from .flows.load import Loading
from .flows.movers import Movers
from .flows.prefetch import Prefetch
from .flows.steps import again
from .types import Books, Pages, PrefetchResult, State, Tokens

__all__ = ["Allocation", "Loading", "Prefetch", "PrefixLease"]


class PrefixLease:
    """One request's hold on its cached prefix and on the pages it computes into.

    Made by :meth:`HiCache.match_prefix`. All methods belong on the cache's loop.

    Ownership: everything the lease holds goes back at :meth:`release`, which is sync and idempotent.

    Attributes:
        device_tokens, local_tokens: cached on the device, and on device or host; hints until
            :meth:`load` has returned.
    """

    __slots__ = (
        "_announce_end", "_books", "_check", "_claim", "_holding", "_is_kept", "_load_called", "_movers",
        "_on_released", "_prefetch", "_sequence", "device_tokens", "local_tokens",
        "request_id",
    )  # fmt: skip

    def __init__(
        self,
        movers: Movers,
        holding: Holding,
        request_id: str,
        sequence: int,
        *,
        check: Callable[[], None],
        on_released: Callable[[PrefixLease], None],
    ) -> None:
        self._movers = movers
        self._holding = holding
        self.request_id = request_id
        self._sequence = sequence
        self._check = check
        self._on_released = on_released
        self._prefetch: Prefetch | None = None
        self._load_called = False
        self._is_kept = False
        self._claim = Claim(movers.ctx.announcements, holding)
        self._announce_end = 0
        self._books: Books | None = None
        self.device_tokens = self.local_tokens = 0
        if movers.ctx.reuses:
            match = holding.match()
            self.device_tokens = match.device_pages * movers.ctx.page_tokens
            self.local_tokens = match.local_pages * movers.ctx.page_tokens

    def __repr__(self) -> str:
        return (
            f"<PrefixLease {self.request_id!r} of {self._holding.length} tokens, {self.local_tokens} local>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_kept:
            self.release()

    # What it knows

    @property
    def key(self) -> TokenKey:
        """The request's tokens; this lease covers the first ones of it, as many as it was extended by."""
        return self._holding.key

    @property
    def num_tokens(self) -> int:
        """Tokens of this request: the prompt and what :meth:`extend` added."""
        return self._holding.length

    @property
    def pages(self) -> Pages:
        """Device pages from token 0, loaded and allocated ones, int64, in logical order; a copy."""
        return self._holding.table.pages.copy()

    @property
    def books(self) -> Books:
        """Where the prompt's tokens came from; final once :meth:`load` has returned."""
        return self._books or Books(self.num_tokens, 0, 0, 0, self.num_tokens)

    @property
    def pending_tokens(self) -> int:
        """Tokens beyond those local here that another lease has announced and not committed yet."""
        ctx = self._movers.ctx
        if self._holding.released or not (ctx.reuses or self._is_agreed):
            return 0
        if ctx.ranks.size > 1 and self._holding.loaded:  # from where all ranks compute
            first_page = self.local_tokens // ctx.page_tokens
        else:
            first_page = self._holding.match().local_pages
        return self._claim.pending_pages(first_page) * ctx.page_tokens

    # Bringing the prefix

    def keep(self) -> Self:
        """Hand the lease on: ``with`` no longer releases it, the engine's loop will, at a step boundary."""
        self._is_kept = True
        return self

    async def prefetch(self, policy: PrefetchPolicy | None = None, *, priority: int = 0) -> PrefetchResult:
        """Bring what the store has of the missing prefix to the host. Never raises for I/O.

        Args:
            policy: how it ends; None: the cache's ``prefetch_policy``.
            priority: higher is served first where requests queue.
        Raises: LeaseError: a second prefetch, or after load.
        Cancellation: withdraws interest; what has arrived stays.
        """
        prefetch = self.start_prefetch(policy, priority=priority)
        try:
            return await prefetch.settled()
        finally:
            prefetch.stop()

    def start_prefetch(self, policy: PrefetchPolicy | None = None, *, priority: int = 0) -> Prefetch:
        """As :meth:`prefetch`, but return at once; :meth:`load` waits for it."""
        self._check_live()
        if self._prefetch is not None or self._load_called:
            raise LeaseError(
                f"{self!r}: one prefetch a lease, and before load(); take a new lease for another"
            )
        ctx = self._movers.ctx
        if policy is None:
            policy = PrefetchPolicy(ctx.config.prefetch_policy)
        if not isinstance(policy, PrefetchPolicy):
            raise ConfigError(f"policy is {policy!r}; give one such as PrefetchPolicy.timeout(), or None")
        self._prefetch = Prefetch(
            ctx,
            self._movers.offloads,
            self._holding,
            policy,
            self._ticket(b"plan") if ctx.ranks.size > 1 else b"",
            priority=checked_priority("priority", priority),
        )
        return self._prefetch

    async def load(
        self, total_tokens: int | None = None, *, wait_pending: bool = True, priority: int = 0
    ) -> Loading:
        """Bring the local prefix to the device and reserve room for what is still to be computed.

        Waits for a range that another lease has announced, else announces what it will compute, so
        equal cold prompts compute once. Never raises for room: the longest prefix that fits is loaded.

        Args:
            total_tokens: room wanted, counted from token 0; None: for the prompt.
            wait_pending: whether to wait for announced ranges (a cache with ranks never does).
            priority: higher is served first where loads queue.
        Returns: when the copies are queued and every layer of them is recorded, where the device has streams;
            the prefix is usable layer by layer from then on.
        Raises: LeaseError: a second load.
        Cancellation: what was not queued is not moved; release the lease.
        """
        self._check_live()
        if self._load_called:
            raise LeaseError(f"{self!r}: one load a lease; take a new lease to load again")
        total = self._holding.length if total_tokens is None else checked_count("total_tokens", total_tokens)
        self._load_called = True
        movers, holding = self._movers, self._holding
        if self._prefetch is not None:
            await self._prefetch.settled()
            self._check_live()
        end_page = min(total, holding.length) // movers.ctx.page_tokens
        if movers.ctx.ranks.size == 1:
            if wait_pending:
                await movers.loads.wait_pending(holding, self._claim)
            if movers.ctx.reuses:
                # All that is cached, the last page of a prompt of whole pages too, which a match leaves out:
                # this request computes it again, but nobody has to wait for that.
                self._claim.announce(holding.match(end_page).local_pages, end_page)
        ticket = self._ticket(b"ready")
        loading, step = await movers.loads.load(
            holding, total, ticket, priority=priority, step=movers.steps.vote
        )
        books = self._loaded(loading)
        self._announce_end = end_page
        movers.steps.agreed(self, step, ticket, self._enter_step)
        try:
            await movers.loads.recorded(loading)
            self._check_live()
        finally:
            movers.steps.returned(self)
        self._books = books
        movers.ctx.metrics.book(books)
        return loading

    def _enter_step(self) -> None:
        # Announcements count from what is agreed, and are made in the order agreed: so every rank makes the same.
        if self._is_agreed:
            self._claim.announce(self.local_tokens // self._movers.ctx.page_tokens, self._announce_end)

    @property
    def _is_agreed(self) -> bool:
        # Whether what is announced is the same on every rank, one that has failed by itself among them.
        ctx = self._movers.ctx
        return ctx.ranks.size > 1 and ctx.ranks_lost is None and self._holding.loaded

    def _loaded(self, loading: Loading) -> Books:
        ctx, holding = self._movers.ctx, self._holding
        books = books_of(holding, loading, self._prefetch, ctx.page_tokens)
        if self._prefetch is not None:
            self._prefetch.give_up_charges()
        holding.unpin_host()
        self.device_tokens = self.local_tokens = loading.tokens
        if holding.device_end is not None and ctx.reuses:
            self._movers.back_up(holding.device_end)
        return books

    # Computing the rest

    def allocate_nowait(self, total_tokens: int) -> Allocation:
        """Hold pages for tokens ``[0, total_tokens)``; within ``tokens + reserved_tokens`` it cannot fail.

        Idempotent: asking for what is held returns no new page.
        Raises: CapacityError: no room even after eviction; preempt a request. LeaseError: before load.
        """
        total_pages = self._pages_for(total_tokens)
        self._movers.device_room.ensure(self._holding, total_pages)
        return self._movers.device_room.place(self._holding, total_pages)

    async def allocate(self, total_tokens: int) -> Allocation:
        """As :meth:`allocate_nowait`, but wait in turn while other requests can still give pages back.

        Raises: CapacityError: everybody who holds pages waits for some; preempt this request.
        Cancellation: what was granted so far stays reserved for this lease.
        """
        total_pages = self._pages_for(total_tokens)
        while self._holding.table.missing_pages(total_pages):
            await self._movers.device_room.wait(self._holding, total_pages)
        return self._movers.device_room.place(self._holding, total_pages)

    def extend(self, token_ids: Tokens) -> None:
        """Append decoded or accepted tokens.

        Raises: ConfigError: an id that is not an integer in 0 .. 2**32-1, naming its position.
        """
        self._check_live()
        self._holding.extend(token_bytes(token_ids))

    def commit(self, num_tokens: int, *, after: Fence | None = None) -> int:
        """Publish the KV of tokens ``[0, num_tokens)``, whole pages only; they are immutable from now on.

        Args:
            num_tokens: absolute, from token 0; may be said again.
            after: behind which the KV is there; None: behind what the engine's stream has queued.
                A forward in a thread needs :meth:`HiCache.host_fence`, or to have ended.
        Returns: how many tokens are committed now.
        Raises: LeaseError: beyond what the lease knows, or holds pages for.
        """
        self._check_live()
        check_fence(after)
        ctx, holding = self._movers.ctx, self._holding
        end_page = check_commit(self, holding, num_tokens)
        start = holding.committed_pages
        fence = self._movers.fence() if after is None else after
        doubtful = isinstance(fence, ThreadFence) and fence.error is not None
        if not ctx.reuses or doubtful:
            if self._is_agreed:  # the other ranks have it now
                self._claim.committed(start, end_page)
            return start * ctx.page_tokens
        ready = () if fence.passed() else (fence,)
        end = holding.commit(end_page, ready)
        if ready and holding.committed_pages > start:
            self._movers.hold(end, fence)
        self._movers.committed(holding)
        self._claim.committed(start, holding.committed_pages)
        return holding.committed_pages * ctx.page_tokens

    def discard(self, from_token: int, *, after: Fence | None = None) -> None:
        """Forget tokens from ``from_token`` on (rejected speculation) and give their pages back.

        A :class:`TokenKey` that the lease was made with is append-only and keeps them: go on from
        :attr:`key`, which is another one once something else was appended.

        Args:
            after: behind which the pages may be reused; None: behind what the engine's stream has queued.
        Raises: LeaseError: before load; below what is committed.
        """
        self._check_live()
        check_fence(after)
        ctx, holding = self._movers.ctx, self._holding
        from_token = check_discard(self, holding, from_token, holding.committed_pages)
        holding.length = min(holding.length, from_token)
        keep = max(-(-from_token // ctx.page_tokens), holding.committed_pages)
        if keep < len(holding.table):
            holding.table.free_tail(keep, self._movers.fence() if after is None else after)
            self._movers.device_room.pump()

    def release(self, *, after: Fence | None = None, offload: bool = False) -> None:
        """Give everything back. Sync, idempotent; a no-op after the cache was closed.

        Never call it while a forward that uses the pages runs: release at a step boundary, or say
        with ``after`` when the pages may be reused.

        Args:
            after: behind which the pages may be reused; None: behind what the engine's stream has queued.
            offload: copy committed pages to the host whatever the policy (a preempted request).
        """
        ctx, holding = self._movers.ctx, self._holding
        if holding.released:
            return
        if ctx.state is State.CLOSED:
            holding.released = True
            return
        self._check()
        check_fence(after)
        if self._prefetch is not None:
            self._prefetch.stop()
            self._prefetch.give_up_charges()
        end = holding.device_end
        if offload and end is not None and end.attached and ctx.reuses:
            self._movers.preempt(end)
        fence = self._movers.fence() if after is None else after
        if end is not None and ctx.reuses and not fence.passed():
            self._movers.hold(end, fence)
        holding.release(fence, unpin=ctx.state is not State.FAILED)
        self._claim.end()
        self._settle_votes()
        self._movers.steps.forget(self)
        self._on_released(self)
        self._movers.released()

    def _settle_votes(self) -> None:
        # The other ranks may wait for what this one has not said and never will.
        ctx = self._movers.ctx
        if ctx.ranks.size == 1 or ctx.ranks_lost is not None or self._holding.loaded:
            return
        if self._prefetch is None:
            ctx.ranks.cast(self._ticket(b"plan"), (0,))
        ready = self._ticket(b"ready")
        ctx.ranks.cast(ready, (0, 0, 0))
        ctx.ranks.cast(again(ready), (0,), patient=True)

    # Checks

    def _check_live(self) -> None:
        self._check()
        self._movers.ctx.check_open()
        check_live(self, self._holding)

    def _pages_for(self, total_tokens: int) -> int:
        self._check_live()
        check_loaded(self, self._holding)
        return -(-checked_count("total_tokens", total_tokens) // self._movers.ctx.page_tokens)

    def _ticket(self, kind: bytes) -> bytes:
        # 128 bits of a hash of what is the same on every rank.
        name = self.request_id.encode("utf-8", "surrogatepass")
        return hashlib.sha256(struct.pack("<QQ", len(name), self._sequence) + name + kind).digest()[:16]
