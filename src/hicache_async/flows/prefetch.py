"""Prefetch, L3 to L2: gates, look, agree, then fetch; ended by completion, deadline, stop or cancel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import TypeVarTuple

from ..config import PrefetchPolicy
from ..core.holding import Holding
from ..core.node import Node
from ..types import PrefetchResult, Stop
from .charge import Charge
from .context import Context, consensus_error
from .deadlines import Deadline
from .fetch import Fetch
from .gates import is_worth_fetching, outcome, refusal_to_ask
from .look import Look
from .offload import Offloads
from .phase import Phase
from .waiting import Waiters, wait_among, wake

Ts = TypeVarTuple("Ts")

STOP_GRACE_S = 0.02
"""How long a stopped prefetch waits for the page in hand, so that what has arrived is not thrown away."""

BY_OTHERS = (Stop.STOPPED, Stop.DEADLINE, Stop.DETACHED)
"""What ends a prefetch from outside; one that had brought all by then is complete."""


class Prefetch:
    """One request's prefetch. Nobody runs it: it goes on when it is admitted, when a store answers, when the
    ranks have agreed and when its time is up; whoever waits for it may go at any time.

    So one that waits is this object and no more: no task, no timer of its own.

    Pages of the prompt (half-open), each bound at most the next one:

        [0, start)              local when it looked
        [start, goal)           agreed; of these, ``brought`` came for this request, and others may have computed some
        [goal, found)           stored here, but not on every rank
        [found, end)            not found

    Attributes:
        priority: higher is served first.
        is_large: whether more than one store batch is still to come.
        start_page: as above; not final before it has ended.
        brought: runs of pages that were brought to the host for this request, ascending.
    """

    __slots__ = (
        "_charges", "_context", "_ctx", "_cut", "_deadline", "_end_page", "_fetch", "_found_page", "_goal_page",
        "_has_slot", "_hashes", "_holding", "_offloads", "_outcome", "_phase", "_question", "_stop_reason",
        "_ticket", "_tried_page", "_useful_page", "_waiters", "brought", "is_large", "priority",
        "start_page",
    )  # fmt: skip

    def __init__(
        self,
        ctx: Context,
        offloads: Offloads,
        holding: Holding,
        policy: PrefetchPolicy,
        ticket: bytes,
        *,
        priority: int = 0,
    ) -> None:
        self._ctx = ctx
        self._context = copy_context()  # of the request: its store calls are made in it
        self._offloads = offloads
        self._holding = holding
        self._ticket = ticket
        self.priority = priority
        self._end_page = holding.limit_pages
        self._start_at(self._local_pages())
        self._useful_page, self._tried_page = 0, -1
        self._has_slot = self.is_large = False
        self._hashes: Sequence[bytes] = ()
        self._charges: tuple[Charge, ...] = ()
        self._question: Look | None = None
        self._fetch: Fetch | None = None
        self._cut: Stop | None = None
        self._stop_reason: Stop | None = None
        self._deadline: Deadline | None = None
        self._waiters: Waiters | None = None
        self._outcome: PrefetchResult | Exception | None = None
        self._phase = Phase.QUEUED_TO_LOOK
        self._begin(policy)

    def _start_at(self, page: int) -> None:
        self.start_page = self._found_page = self._goal_page = page
        self.brought: tuple[range, ...] = ()

    def _begin(self, policy: PrefetchPolicy) -> None:
        ctx = self._ctx
        missing = self._end_page - self.start_page
        refusal = refusal_to_ask(ctx, missing)
        if refusal is not None:
            self._looked(refusal)
            return
        deadline_s = policy.deadline_s(missing * ctx.page_tokens, ctx.config)
        if deadline_s is not None:
            self._deadline = ctx.deadlines.add(deadline_s, self)
        ctx.prefetches.add(self)
        self._enter(Phase.QUEUED_TO_LOOK, missing)

    # What others may ask of it

    def stop(self) -> int:
        """End the prefetch; returns the tokens attached so far. Sync, may be called again."""
        return self._end(Stop.STOPPED)

    def leave_store(self) -> None:
        """End the prefetch because its store is taken away; what is attached stays."""
        self._end(Stop.DETACHED)

    async def settled(self) -> PrefetchResult:
        """Return what was found and brought, once the prefetch has ended.

        Raises: InvariantError: the cache has failed; ConsensusError: a rank was lost before the ranks had
            agreed; ClosedError: it was closed.
        Cancellation: ends the wait only.
        """
        if self._outcome is None:
            self._waiters = self._waiters or []
            await wait_among(self._waiters)
        self._ctx.check_open()
        if isinstance(self._outcome, PrefetchResult):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome.with_traceback(None)

    def give_up_charges(self) -> None:
        """Stop counting against the quota: the request has loaded or gone."""
        for charge in self._charges:
            charge.let_go()
        self._charges = ()

    @property
    def fetched_pages(self) -> int:
        """Pages brought to the host for this request so far."""
        return sum(map(len, self.brought))

    # Waiting for a slot

    @property
    def waits(self) -> bool:
        """Whether it stands in the admission queue."""
        return self._phase is Phase.QUEUED_TO_LOOK or self._phase is Phase.QUEUED_TO_FETCH

    @property
    def has_begun(self) -> bool:
        """Whether it has looked."""
        return self._phase is not Phase.QUEUED_TO_LOOK

    def _enter(self, phase: Phase, num_pages: int) -> None:
        self._phase = phase
        self.is_large = num_pages > self._ctx.config.store_batch_pages
        self._ctx.admission.enter(self)

    def admitted(self) -> None:
        """Go on with the slot that was waited for."""
        self._has_slot = True
        looks = self._phase is Phase.QUEUED_TO_LOOK
        self._phase = Phase.LOOKING if looks else Phase.FETCHING
        self._context.run(self._attempt, self._look if looks else self._start_fetch)

    def _give_slot_back(self) -> None:
        if self._has_slot:
            self._has_slot = False
            self._ctx.admission.give_back(is_large=self.is_large)

    def _attempt(self, step: Callable[[*Ts], None], *args: *Ts) -> None:
        try:
            step(*args)
        except Exception as bug:  # noqa: BLE001 - a mover's top level: who waits for this one has to hear of it
            self._phase = Phase.ENDED
            self._ctx.fail(bug)
            self._settle(self._ctx.invariant_error())

    # Looking

    def _local_pages(self) -> int:
        return self._holding.match(self._end_page).local_pages if self._ctx.reuses else 0

    def _look(self) -> None:
        ctx = self._ctx
        self._start_at(self._local_pages())
        refusal = refusal_to_ask(ctx, self._end_page - self.start_page)
        if ctx.store is None or refusal is not None:
            if refusal is Stop.NOTHING_MISSING:  # by now: others have brought or computed it
                self._holding.keep_on_host(self.start_page)
            self._looked(refusal)
            return
        self._hashes = self._holding.hashes(self._end_page)
        start, end = self.start_page, self._end_page
        self._question = Look(
            ctx, ctx.store, self._hashes, start, end, lambda cut: self._attempt(self._looked, cut)
        )
        self._question.ask()

    def _looked(self, cut: Stop | None) -> None:
        ctx = self._ctx
        self._cut = cut
        self._end_look(cut or Stop.NOT_STORED)
        if self._found_page > self.start_page and ctx.ranks.size > 1:
            self._phase = Phase.AGREEING
            ctx.spawn(self._agree(), "agree")
        else:
            self._vote()
            self._agreed(self._found_page)

    def _end_look(self, reason: Stop) -> None:
        look, self._question = self._question, None
        if look is not None:
            look.leave()
            self._found_page = look.page
        if self._found_page < self._end_page:
            missing = self._end_page - self._found_page
            self._ctx.metrics.unfulfilled[reason] += missing * self._ctx.page_tokens
        self._give_slot_back()

    # Agreeing

    def _vote(self) -> None:
        # Every rank votes for every prompt that has a page, whatever became of its look: to vote for less makes
        # the prefix shorter, to say nothing keeps the others waiting.
        ctx = self._ctx
        if ctx.ranks.size > 1 and self._end_page and ctx.ranks_lost is None:
            ctx.ranks.cast(self._ticket, (self._found_page * ctx.page_tokens,))

    async def _agree(self) -> None:
        # In a task of the cache's own: whatever becomes of the prefetch meanwhile, its vote is cast.
        ctx = self._ctx
        agreed = await ctx.agree(self._ticket, (self._found_page * ctx.page_tokens,))
        if self._phase is Phase.AGREEING and agreed is not None:
            self._attempt(self._agreed, int(agreed[0]) // ctx.page_tokens)

    def _agreed(self, agreed_page: int) -> None:
        if self._cut is None and agreed_page < self._found_page:
            self._cut = Stop.PEER_SHORTER
        self._goal_page = max(self.start_page, min(self._found_page, agreed_page))
        if is_worth_fetching(self._ctx.config, self._goal_page - self.start_page):
            self._want(self.start_page)
        else:
            self._finish(None)

    # Fetching

    def _want(self, page: int) -> None:
        # Whose pages are on their way needs no slot of its own.
        running = self._ctx.fetches.get(self._hashes[page])
        if running is None:
            self._enter(Phase.QUEUED_TO_FETCH, self._goal_page - page)
        else:
            self._join(running, page, page + running.num_shared(self._hashes))

    def _start_fetch(self) -> None:
        ctx, goal = self._ctx, self._goal_page
        match = self._holding.match(goal)
        page = match.local_pages
        running = ctx.fetches.get(self._hashes[page]) if page < goal else None
        if running is None and ctx.store is not None and self._tried_page < page < goal:
            fetch = Fetch(ctx, ctx.store, self._offloads, self._holding, match, goal, is_large=self.is_large)
            self._has_slot = False  # the fetch has it now
            self._join(fetch, page, goal)
            fetch.start()
            return
        self._give_slot_back()
        if running is not None:
            self._join(running, page, page + running.num_shared(self._hashes))
        else:
            self._finish_unfetched(match.local_pages)

    def _finish_unfetched(self, local_page: int) -> None:
        if local_page < self._goal_page:
            self._finish(Stop.VANISHED if self._ctx.store else Stop.DETACHED)
            return
        # Others have brought or computed all that was to come.
        self._holding.keep_on_host(local_page)
        if not self.brought:
            self._goal_page = self.start_page
        self._finish(Stop.COMPLETE if self.brought else Stop.NOTHING_MISSING)

    def _join(self, fetch: Fetch, page: int, end_page: int) -> None:
        # Each fetch joined starts further on than the one before, so there are at most as many as pages.
        self._phase = Phase.FETCHING
        self._tried_page = page
        self._useful_page = min(self._goal_page, end_page)
        if fetch.interested:
            self._ctx.metrics.counters["fetches_joined"] += 1
        self._fetch = fetch
        fetch.join(self)

    def reached(self, node: Node, end_page: int, charge: Charge) -> None:
        """Take note of attached pages and keep them on the host for this request."""
        holding, useful_page = self._holding, self._useful_page
        if holding.released or holding.loaded:
            return
        if end_page > useful_page:  # of a prompt that goes on differently
            node, end_page = self._ctx.tree.cut(holding.match(useful_page), useful_page), useful_page
        holding.pin_host(node, end_page)
        run = range(self._tried_page, end_page)
        self.brought = (*[run for run in self.brought if run.start < self._tried_page], run)
        if charge not in self._charges:
            charge.hold()
            self._charges = (*self._charges, charge)
        if end_page == useful_page:
            self._has_all_of_fetch()

    def _has_all_of_fetch(self) -> None:
        self._leave_fetch()
        if self._stop_reason is not None:
            self._finish(self._stop_reason)
        elif self._useful_page == self._goal_page:
            self._finish(Stop.COMPLETE)
        else:
            self._want(self._useful_page)

    def fetch_ended(self, fetch: Fetch) -> None:
        """Take note that nothing more comes of what was waited for."""
        self._fetch = None
        stop = Stop.DETACHED if fetch.stop is Stop.COMPLETE else fetch.stop
        self._attempt(self._finish, self._stop_reason or stop)

    def _leave_fetch(self) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.leave(self)

    # Ending

    def time_is_up(self) -> None:
        """End it: the deadline has come, or the page in hand has had its moment."""
        if self._stop_reason is None:
            self._end(Stop.DEADLINE)
        else:
            self._finish(self._stop_reason)

    def _end(self, reason: Stop) -> int:
        if self._phase is not Phase.ENDED and (self._stop_reason is None or self._ctx.closing):
            self._stop_reason = reason
            self._attempt(self._end_fetching if self._phase is Phase.FETCHING else self._end_early, reason)
        return self.fetched_pages * self._ctx.page_tokens

    def _end_early(self, reason: Stop) -> None:
        phase, is_queued = self._phase, self.waits
        self._phase = Phase.ENDED
        if is_queued:
            self._ctx.admission.left(self)
        if phase is Phase.QUEUED_TO_LOOK or phase is Phase.LOOKING:
            self._end_look(reason)
            self._vote()
        if phase is not Phase.QUEUED_TO_FETCH:
            if self._ctx.ranks_lost is not None:
                self._settle(consensus_error(self._ctx.ranks_lost))
                return
            self._goal_page = self._found_page
        self._finish(reason)

    def _end_fetching(self, reason: Stop) -> None:
        ctx, fetch = self._ctx, self._fetch
        assert fetch is not None
        fetch.withdraw(self)
        if fetch.has_ended or fetch.interested or ctx.closing:
            self._finish(reason)
        else:
            ctx.deadlines.cancel(self._deadline)
            self._deadline = ctx.deadlines.add(STOP_GRACE_S, self)

    def _finish(self, ended: Stop | None) -> None:
        ctx, start = self._ctx, self.start_page
        hit = self._goal_page - start
        fetched = min(hit, self.fetched_pages)
        stop = outcome(hit, self._cut, ended)
        if fetched == hit and hit and stop in BY_OTHERS:
            stop = Stop.COMPLETE
        page_tokens, logger = ctx.page_tokens, ctx.logger
        if missing := self._found_page - start - fetched:
            ctx.metrics.unfulfilled[stop] += missing * page_tokens
        result = PrefetchResult(hit * page_tokens, fetched * page_tokens, stop)
        logger.debug(
            "prefetch.settled", hit=result.hit_tokens, fetched=result.fetched_tokens, stop=stop.value
        )
        self._settle(result)

    def _settle(self, outcome: PrefetchResult | Exception) -> None:
        self._phase = Phase.ENDED
        self._outcome = outcome
        self._ctx.prefetches.discard(self)
        self._give_slot_back()
        self._leave_fetch()
        if self._question is not None:
            self._question.leave()
        self._ctx.deadlines.cancel(self._deadline)
        if self._waiters is not None:
            wake(self._waiters)
