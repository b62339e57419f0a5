"""Context: what the flows of one cache share, and the owner of every task they start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from structlog.typing import FilteringBoundLogger

from .._fence import resolve
from .._hop import Hop, HopRegistry
from .._log import logger
from ..abc import Clock, CopyPlan, Device, Ranks, Store
from ..config import CacheConfig, WritePolicy
from ..core.announcements import Announcements
from ..core.keys import KeyNames
from ..core.node import Node
from ..core.pool import PagePool
from ..core.room import Room
from ..core.tree import PrefixTree
from ..errors import ClosedError, ConsensusError, InvariantError
from ..kv_events import KVEvents
from ..memory.device_kv import DeviceKV
from ..memory.host import HostArena
from ..metrics import Metrics
from ..types import Pages, State, Tier
from .admission import Admission
from .deadlines import Deadlines
from .waiting import end_of

if TYPE_CHECKING:
    from .charge import Charge
    from .fetch import Fetch
    from .prefetch import Prefetch


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Pinned:
    """What a running move, or an operator, keeps: for audits.

    Attributes:
        tiers: the tiers of ``node`` that it keeps; none: whichever there is, as an anchor.
    """

    node: Node
    tiers: tuple[Tier, ...]


@dataclass(slots=True, eq=False)
class Context:
    """The parts of one open cache. Flows read and call them; only :class:`HiCache` puts them together.

    Attributes:
        store: None while none is attached.
        prefetch_pages: host pages charged to prefetches, the sum of ``charges``.
        fetches: running reads, by the hash of the next page to come.
        hop_pages: host pages that running reads may still be writing.
        deadlines, admission: of all prefetches and of their store calls.
        moves: what running moves, and operators, have pinned.
        waits, prefetches: what a failure or close has to end.
        logger: the module's, bound once; for lines of which there is one a request.
        ranks_lost: why the group of ranks is no more.
        loss: done when it is.
        votes: loads whose offer to the other ranks is out and not settled yet: it must stay true.
        lossy_codec: of the store that pages here came from, where that is not exact; None: all are what was computed.
        offers_nothing: a tier is about to be cleared, so loads offer nothing of what is cached.
        leaving: tells the other ranks that this one votes no more; a close waits for it.
    """

    config: CacheConfig
    loop: asyncio.AbstractEventLoop
    clock: Clock
    threads: Executor
    kv: DeviceKV
    arena: HostArena
    device: Device
    store: Store | None
    keys: KeyNames
    ranks: Ranks
    device_pool: PagePool
    host_pool: PagePool
    tree: PrefixTree
    events: KVEvents
    room: Room
    metrics: Metrics = field(default_factory=Metrics)
    logger: FilteringBoundLogger = field(default_factory=logger.bind)
    announcements: Announcements = field(default_factory=Announcements)
    state: State = State.OPEN
    failure: BaseException | None = None
    ranks_lost: ConsensusError | None = None
    prefetch_pages: int = 0
    fetches: dict[bytes, Fetch] = field(default_factory=dict)
    charges: set[Charge] = field(default_factory=set)
    hop_pages: dict[Hop[int], Pages] = field(default_factory=dict)
    moves: set[Pinned] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    closing: bool = False
    waits: dict[asyncio.Future[None], None] = field(default_factory=dict)
    prefetches: set[Prefetch] = field(default_factory=set)
    votes: set[asyncio.Future[None]] = field(default_factory=set)
    offers_nothing: bool = False
    lossy_codec: str | None = None
    leaving: asyncio.Task[None] | None = None
    loss: asyncio.Future[None] = field(init=False)
    hops: HopRegistry = field(init=False)
    deadlines: Deadlines = field(init=False)
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        self.loss = self.loop.create_future()
        self.hops = HopRegistry(self.loop, self.fail)
        self.deadlines = Deadlines(self.loop, self.clock, self.fail)
        self.admission = Admission(self.loop, self.config.max_prefetches_in_flight)

    @property
    def page_tokens(self) -> int:
        """Tokens of one page."""
        return self.config.page_size

    @property
    def reuses(self) -> bool:
        """Whether prefixes are matched and kept."""
        return self.state is State.OPEN

    @property
    def is_write_back(self) -> bool:
        """Whether pages reach the host at eviction rather than at commit."""
        return self.config.write_policy is WritePolicy.WRITE_BACK

    def pin(self, node: Node, *tiers: Tier) -> Pinned:
        """Keep ``tiers`` of ``node`` and of all above it for a move."""
        pinned = Pinned(node, tiers)
        for tier in tiers:
            self.tree.pin(tier, node)
        self.moves.add(pinned)
        return pinned

    def anchor(self, node: Node) -> Pinned:
        """Keep ``node`` in at least one tier, whichever, and so all above it."""
        self.tree.anchor(node)
        pinned = Pinned(node, ())
        self.moves.add(pinned)
        return pinned

    def unpin(self, pinned: Pinned) -> None:
        """Undo one :meth:`pin` or :meth:`anchor`."""
        self.moves.discard(pinned)
        for tier in pinned.tiers:
            self.tree.unpin(tier, pinned.node)
        if not pinned.tiers:
            self.tree.unanchor(pinned.node)

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run a mover as a task of the cache's own; what it raises turns the cache to FAILED."""
        task = self.loop.create_task(work, name=f"hicache:{name}")
        self.tasks.add(task)
        task.add_done_callback(self._mover_ended)
        return task

    def _mover_ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    def attempt(self, submit: Callable[[], T]) -> T | None:
        """Submit device work; what that raises turns the cache to FAILED and fails nobody's request. None: it did."""
        try:
            return submit()
        except Exception as bug:  # noqa: BLE001 - the top level of a move: nobody above could do better
            self.fail(bug)
            return None

    def fail(self, error: BaseException) -> None:
        """Record a bug: from now on nothing is matched or kept, and nobody waits for a move any more."""
        self.metrics.counters["bugs"] += 1
        if self.state in (State.FAILED, State.CLOSED):
            return
        self.state, self.failure = State.FAILED, error
        self.events.end()
        logger.error("cache.failed", error=repr(error), exc_info=error)
        self.wake_all()

    async def agree(
        self, ticket: bytes, vote: Sequence[int], *, patient: bool = False
    ) -> Sequence[int] | None:
        """Agree with the other ranks; None: one of them was lost, or the cache is closing and the vote stands."""
        if self.ranks.size == 1:
            return await self.ranks.agree(ticket, vote, patient=patient)
        # Tasks begin in the order made, so votes are cast in the order of these calls; and all waits take the same
        # number of turns, so they end in the order in which the tickets settled.
        agreeing = self.loop.create_task(self.ranks.agree(ticket, vote, patient=patient))
        try:
            while not agreeing.done():
                await self.until(end_of(agreeing))
            return agreeing.result()
        except ConsensusError as lost:
            self.lose_ranks(lost)  # those who were told first have mostly done that
            return None
        except ClosedError:
            return None
        finally:
            agreeing.cancel()

    def lose_ranks(self, error: ConsensusError) -> None:
        """Record that what was agreed can no longer be trusted: from now on nothing is matched or kept."""
        if self.ranks_lost is not None or self.closing:
            return
        self.ranks_lost = error
        self.loss.set_result(None)
        self.metrics.counters["ranks_lost"] += 1
        logger.error("ranks.lost", error=str(error), on_rank_loss=self.config.on_rank_loss.value)
        if self.state is State.OPEN:
            self.state = State.NO_REUSE
            self.events.end()
        self.wake_all()

    async def until(self, future: asyncio.Future[None]) -> None:
        """Wait for what others do, but not beyond a failure or close: look at the state afterwards.

        Raises: ClosedError: the cache is closing.
        """
        self.waits[future] = None
        try:
            await future
        finally:
            del self.waits[future]
        self.check_open()

    def check_open(self) -> None:
        """Raise ClosedError when the cache is closing or closed."""
        if self.closing and self.ranks_lost is not None:
            raise ClosedError(f"the cache is closed because {self.ranks_lost}") from self.ranks_lost
        if self.closing:
            raise ClosedError("the cache is closed; open a new one with HiCache.open(...)")

    def wake_all(self) -> None:
        """End the waits of requests, the oldest first, and stop their prefetches."""
        for future in list(self.waits):
            resolve(future)
        for prefetch in list(self.prefetches):
            prefetch.stop()

    def invariant_error(self) -> InvariantError:
        """Return the error that waiters get after a bug."""
        error = InvariantError(f"the cache has failed and serves without reuse: {self.failure!r}")
        error.__cause__ = self.failure
        return error


def leave_ranks(ctx: Context) -> None:
    """Tell the other ranks, if there are any, that this one votes no more."""
    if ctx.ranks.size > 1 and ctx.leaving is None:
        ctx.leaving = ctx.loop.create_task(ctx.ranks.aclose(), name="hicache:leave-ranks")


def consensus_error(lost: ConsensusError | None) -> ConsensusError:
    """Return what those get who waited for an agreement when a rank was lost."""
    error = ConsensusError(f"{lost}; run no step that was agreed upon with it")
    error.__cause__ = lost
    return error


async def settled_within(clock: Clock, future: asyncio.Future[None], timeout_s: float) -> bool:
    """Wait for a shared future, at most ``timeout_s``; returns whether it is done.

    Cancellation: ends the wait, never what is waited for.
    """
    if future.done():
        return True
    over: asyncio.Future[None] = future.get_loop().create_future()
    timer = clock.call_later(timeout_s, lambda: resolve(over))
    try:
        await asyncio.wait((future, over), return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
    return future.done()


def copy_plan(ctx: Context, device_pages: Pages, host_pages: Pages) -> CopyPlan:
    """Pair pages of the two tiers, to be moved as the cache is configured."""
    return CopyPlan(ctx.kv, ctx.arena, device_pages, host_pages, ctx.config.io_mode)
