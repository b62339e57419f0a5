"""HiCache: opens, closes and composes the flows; matches prompts; takes one batch a step."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import cast

import anyio

from ._fence import EngineFence
from ._log import logger
from ._threads import check_process
from .abc import Clock, Device, DevicePool, Fence, HostFence, Ranks, Store
from .admin import Admin
from .assembly import Owned, Parts, assemble
from .checks import checked_count, checked_priority, checked_prompt
from .config import CacheConfig, RankLoss
from .core.holding import Holding
from .core.tokens import TokenKey
from .errors import CapacityError, ClosedError, ConfigError, WrongLoopError
from .flows.audit import audit
from .flows.context import Context, leave_ranks
from .flows.movers import Movers
from .flows.namespaces import Namespaces
from .kv_events import MAX_PENDING_PAGES, EventReader
from .lease import Allocation, PrefixLease
from .memory.device_kv import DeviceKV
from .stats import snapshot
from .step import StepBatch, StepGrant, StepResult, check_batch
from .types import CacheStats, State, Tokens

MAX_REMEMBERED_REQUESTS = 1 << 16
"""Request ids whose number of leases is remembered."""


class HiCache:
    """A three-tier KV cache on one event loop. Open it with :meth:`open`.

    Attributes:
        admin: what an operator does with a running cache.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._leases: dict[PrefixLease, Holding] = {}
        self._sequences: dict[str, int] = {}
        self._pid = os.getpid()
        # Bound once, not for each lease: a bound method is an object that the garbage collector has to visit.
        self._check_of_leases, self._forget_of_leases = self._check, self._forget
        self._closed: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        """Closes the cache after the loss of a rank."""
        self._ctx: Context
        self._owned: Owned
        self._movers: Movers
        self.admin: Admin

    @classmethod
    def open(
        cls,
        config: CacheConfig,
        *,
        kv: DeviceKV,
        device: Device | None = None,
        store: Store | str | None = None,
        ranks: Ranks | None = None,
        clock: Clock | None = None,
        threads: Executor | None = None,
        device_pool: DevicePool | None = None,
    ) -> AbstractAsyncContextManager[HiCache]:
        """Open a cache over an engine's tensors: ``async with HiCache.open(config, kv=kv) as cache``.

        Args:
            kv: the engine's K and V tensors; the engine owns their bytes.
            device: moves pages; None: a CpuDevice.
            store: an object or a URL like "file:///data/kv"; None: no third tier.
            ranks: the group that agrees, for this cache alone, which leaves it when it is closed; None: this
                process alone.
            clock, threads: seams for tests: where deadlines come from, where copies run.
            device_pool: the engine's own book of free device pages.
        Raises: ConfigError: on entering, for parts that do not fit together.
        Ownership: closes what it made itself (a device, ranks or threads not given, a store given by URL).
        Cancellation: leaving drains for at most ``close_timeout_s`` and then abandons what hangs.
        """
        return _Opening(cls(Parts(config, kv, device, store, ranks, clock, threads, device_pool)))

    def __repr__(self) -> str:
        pools = f"{self._ctx.device_pool!r} {self._ctx.host_pool!r}"
        return f"<HiCache {self.state} {pools} {len(self._leases)} leases>"

    @property
    def state(self) -> State:
        """OPEN; NO_REUSE or FAILED: it serves, without reuse; CLOSED."""
        return State.CLOSED if self._ctx.closing else self._ctx.state

    @property
    def config(self) -> CacheConfig:
        """What it was opened with."""
        return self._parts.config

    # Requests

    def match_prefix(
        self,
        request_id: str,
        tokens: Tokens | TokenKey,
        *,
        salt: bytes = b"",
        adapter: str | None = None,
        priority: int = 0,
        output_priority: int | None = None,
        whole: bool = False,
    ) -> PrefixLease:
        """Look up how much of a prompt is cached, and return the request's lease.

        Args:
            request_id: names the request, the same on every rank.
            tokens: ids, or a :class:`TokenKey` kept for the conversation, which is cheaper.
            salt, adapter: prompts share pages only with the same salt and adapter.
            priority: how much the prompt's pages are worth keeping, to eviction by priority; a page keeps
                the highest of the requests that committed it.
            output_priority: the same for what is decoded; None: as the prompt's.
            whole: match all whole pages even if nothing is left to compute, so without logits.
        Returns: a lease; use it in ``with``, or release it yourself.
        Raises: ConfigError: ids that are not integers in 0 .. 2**32-1, or a name or salt of another type.
        Ownership: nothing is pinned until prefetch or load.
        """
        self._check_open()
        if not isinstance(request_id, str) or not request_id:
            raise ConfigError(f"request_id is {request_id!r}; give a non-empty string")
        key, chain = checked_prompt(tokens, self._ctx.page_tokens, salt, adapter)
        worth = checked_priority("priority", priority)
        output_worth = worth
        if output_priority is not None:
            output_worth = checked_priority("output_priority", output_priority)
        holding = Holding(
            self._ctx.tree,
            self._ctx.device_pool,
            key,
            len(key),
            chain,
            whole=whole,
            priority=worth,
            output_priority=output_worth,
        )
        sequence = self._next_sequence(request_id)
        lease = PrefixLease(
            self._movers,
            holding,
            request_id,
            sequence,
            check=self._check_of_leases,
            on_released=self._forget_of_leases,
        )
        self._leases[lease] = holding
        self._ctx.events.remember(chain.seed, salt, adapter, self._seeds_in_use)
        return lease

    def _seeds_in_use(self) -> Iterator[bytes]:
        # Those that the tree has a root for, and those that a request may yet make one for.
        yield from self._ctx.tree.roots
        for holding in self._leases.values():
            yield holding.chain.seed

    def _next_sequence(self, request_id: str) -> int:
        # Counts a request's leases, so that a preempted one gets fresh tickets; the oldest are forgotten.
        sequence = self._sequences.pop(request_id, 0) + 1
        self._sequences[request_id] = sequence
        if len(self._sequences) > MAX_REMEMBERED_REQUESTS:
            del self._sequences[next(iter(self._sequences))]
        return sequence

    def _forget(self, lease: PrefixLease) -> None:
        del self._leases[lease]

    # Steps

    async def begin_step(self, num_pages: int = 0) -> StepGrant:
        """Say which loads may enter the next step and how many pages every rank can grant.

        Every rank calls it once a step. Never raises for room.

        Args:
            num_pages: device pages wanted for this step's ``allocate``.
        Raises: ConsensusError: a rank was lost. Run nothing that was agreed upon with it; the next call serves
            without reuse, or raises ClosedError, as ``on_rank_loss`` says.
        Cancellation: the next call gets what this one would have got.
        """
        self._check()
        self._movers.steps.check_loss()
        self._ctx.check_open()
        pages, entered = await self._movers.steps.begin(checked_count("num_pages", num_pages))
        take_back = partial(self._take_back, self._movers.steps.number)
        return StepGrant(pages, cast("tuple[PrefixLease, ...]", tuple(entered)), take_back)

    def _take_back(self, number: int, loaded: Sequence[PrefixLease]) -> None:
        self._check()
        self._movers.steps.take_back(number, [lease for lease in loaded if lease in self._leases])

    def step(self, batch: StepBatch) -> StepResult:
        """Do what a step has brought, sync, in the order commit, extend, discard, release, allocate.

        Raises: ConfigError, LeaseError: a mistake anywhere in ``batch``, of which nothing is then done.
        """
        self._check_open()
        check_batch(batch, self._leases)
        for lease, num_tokens in batch.commit:
            lease.commit(num_tokens, after=batch.after)
        for lease, token_ids in batch.extend:
            lease.extend(token_ids)
        for lease, from_token in batch.discard:
            lease.discard(from_token, after=batch.after)
        for lease in batch.release:
            lease.release(after=batch.after)
        return StepResult([self._allocate(lease, total) for lease, total in batch.allocate])

    def _allocate(self, lease: PrefixLease, total_tokens: int) -> Allocation | None:
        total_pages = -(-total_tokens // self._ctx.page_tokens)
        try:
            self._movers.device_room.ensure(self._leases[lease], total_pages, in_step=True)
        except CapacityError:
            return None
        return lease.allocate_nowait(total_tokens)

    def fence(self, stream: object | None = None) -> Fence:
        """Return a fence behind what ``stream`` has queued; None: the engine's compute stream."""
        self._check_open()
        return self._movers.fence() if stream is None else self._ctx.device.fence(stream)

    def host_fence(self) -> HostFence:
        """Return a fence that the engine sets when its forward, in a thread, is over.

        Ownership: the caller must ``set()`` or ``fail()`` it, from any thread.
        """
        self._check_open()
        return EngineFence(self._ctx.loop, "forward")

    # Looking inside

    def stats(self) -> CacheStats:
        """Return a frozen snapshot of what the cache holds and has done."""
        self._check()
        return snapshot(self._ctx, self.state, len(self._leases))

    def audit(self) -> None:
        """Prove that every page is in one place and every pin is somebody's.

        Raises: InvariantError: naming what is wrong. Cost: the size of the pools and the tree.
        """
        self._check()
        audit(self._ctx, list(self._leases.values()), self._movers.device_room.step.own_pages())

    def events(self, *, snapshot: bool = False, max_pending_pages: int = MAX_PENDING_PAGES) -> EventReader:
        """Read what a match finds from now on and what no more: ``async for event in cache.events()``.

        Events come in the order of the changes, of the device and the host; what a store drops by itself
        is not known here. A reader that is slow is never waited for: it gets a gap marker.

        Args:
            snapshot: begin with a :class:`Gap` and all that is held now, as :class:`Stored`, and do so again
                after every gap; a mirror that forgets all at a gap then always finds what a match finds.
            max_pending_pages: pages of events that may wait for this reader.
        Returns: an async iterator; it ends when the cache is closed or has failed.
        Raises: ConfigError: ``max_pending_pages`` is not an integer >= 1.
        Ownership: a reader that is dropped, or closed with ``aclose()``, costs nothing any more.
        """
        self._check_open()
        if (
            isinstance(max_pending_pages, bool)
            or not isinstance(max_pending_pages, int)
            or max_pending_pages < 1
        ):
            raise ConfigError(f"max_pending_pages is {max_pending_pages!r}; it must be an integer >= 1")
        roots = self._ctx.tree.roots
        return self._ctx.events.read(
            roots, snapshot=snapshot, max_pending_pages=max_pending_pages, check=self._check
        )

    def _check_open(self) -> None:
        self._check()
        self._ctx.check_open()

    def _check(self) -> None:
        # First: a child may run the very loop that it has inherited.
        check_process(self._pid, "this cache", "open a cache of its own")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is self._ctx.loop:
            return
        where = "a thread without its loop running" if loop is None else f"another event loop, {loop!r}"
        raise WrongLoopError(
            f"this cache belongs to {self._ctx.loop!r} and was used from {where}; "
            "call it on its loop, e.g. with loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe"
        )

    # Opening and closing

    async def _open(self) -> None:
        self._pid = os.getpid()  # it may have been made before a fork
        self._ctx, self._owned = await assemble(self._parts, self._pump)
        self._movers = Movers(self._ctx, self._leases.values)
        namespaces = Namespaces(self._ctx)
        self.admin = Admin(self._ctx, self._movers, self._check_open, self._owned, namespaces)
        self._ctx.spawn(self._movers.backups.run(), "backups")
        namespaces.meet(self._ctx.store)
        self._ctx.loss.add_done_callback(self._after_loss)
        self._ctx.ranks.when_lost(self._ctx.lose_ranks)

    def _after_loss(self, loss: asyncio.Future[None]) -> None:
        # What is cached may not be what the others think it is: it is matched no more, and its room is free.
        ctx = self._ctx
        if ctx.state is State.CLOSED:
            return
        if ctx.state is not State.FAILED:
            self._movers.forget()
        if ctx.config.on_rank_loss is RankLoss.CLOSE and self._closed is None:
            self._closing = ctx.loop.create_task(self.close(), name="hicache:close")

    def _pump(self) -> None:
        self._movers.device_room.pump()

    async def close(self) -> None:
        """Refuse new work, write what is pending for at most ``close_timeout_s``, then abandon what hangs.

        Pages of a hung hop keep their owner, and the arena with it; the report names the stuck calls.
        May be called again. Cancellation: a native one abandons at once what was not drained; a scope waits.
        """
        self._check()
        if self._closed is not None:
            await asyncio.wait((self._closed,))
            return
        ctx = self._ctx
        self._closed = ctx.loop.create_future()
        ctx.closing = True
        self._movers.pins.drop_all()
        leave_ranks(ctx)
        ctx.wake_all()
        try:
            with anyio.move_on_after(ctx.config.close_timeout_s, shield=True):
                await self._movers.finish()
        finally:
            self._abandon()
            try:
                with anyio.move_on_after(ctx.config.close_timeout_s, shield=True):
                    if ctx.leaving is not None:
                        await asyncio.wait((ctx.leaving,))
                    await self._owned.aclose()
                    await asyncio.sleep(0)  # lets the cancelled tasks end before the loop does
            finally:
                self._closed.set_result(None)
        self._warn_of_leases()

    def _abandon(self) -> None:
        ctx = self._ctx
        stuck = sorted(hop.name for hop in ctx.hops.live)
        if stuck or len(self._movers.backups):
            logger.warning("cache.close_abandoned", stuck=stuck, backups_dropped=len(self._movers.backups))
        self._movers.backups.drop_all()
        ctx.state = State.CLOSED
        ctx.events.end()
        ctx.deadlines.clear()
        for task in [*ctx.tasks, *(hop.task for hop in ctx.hops.live if hop.task is not None)]:
            task.cancel()
        logger.info("cache.closed")

    def _warn_of_leases(self) -> None:
        # Last of all, for the application may turn warnings into errors.
        for lease in [each for each, holding in self._leases.items() if not holding.released]:
            message = f"{lease!r} was not released before the cache was closed"
            warnings.warn(message, ResourceWarning, stacklevel=3, source=lease)


class _Opening(AbstractAsyncContextManager[HiCache]):
    def __init__(self, cache: HiCache) -> None:
        self._cache = cache
        self._is_used = False

    async def __aenter__(self) -> HiCache:
        if self._is_used:
            raise ClosedError(
                "this opening was entered before; call HiCache.open(...) again for another cache"
            )
        self._is_used = True
        await self._cache._open()
        return self._cache

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cache.close()
