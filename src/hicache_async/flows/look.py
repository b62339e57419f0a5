"""Look: asks the store how many pages of a run it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._hop import Hop
from .._log import logger
from ..abc import Store
from ..types import Stop, StopToken
from .calls import checked_count, page_count, start_store_call
from .context import Context
from .deadlines import Deadline
from .gates import refusal_of


class Look:
    """Counts pages ``[page, end_page)`` of a prompt, batch by batch, up to the first that comes back short.

    It owns nothing, so it can be left at any time.

    Args:
        hashes: of the prompt's pages, from page 0.
        on_ended: called once, with what ended it before the first page that is not there; None: nothing did.

    Attributes:
        page: up to here the store has said to have them.
    """

    __slots__ = ("_batch_end", "_ctx", "_deadline", "_end_page", "_hashes", "_hop", "_on_ended", "_start_page",
                 "_store", "page")  # fmt: skip

    def __init__(
        self,
        ctx: Context,
        store: Store,
        hashes: Sequence[bytes],
        page: int,
        end_page: int,
        on_ended: Callable[[Stop | None], None],
    ) -> None:
        self._ctx = ctx
        self._store = store
        self._hashes = hashes
        self._start_page = self.page = self._batch_end = page
        self._end_page = end_page
        self._on_ended = on_ended
        self._hop: Hop[int] | None = None
        self._deadline: Deadline | None = None

    def ask(self) -> None:
        """Ask for the next batch."""
        ctx = self._ctx
        self._batch_end = min(self.page + ctx.config.store_batch_pages, self._end_page)
        self._deadline = ctx.deadlines.add(ctx.config.store_timeout_s, self)
        self._hop = start_store_call(ctx, "count_prefix", self._count_prefix, self._answered)
        self._hop.stop.tracked = True  # it fills no buffer: torn away, it has ended

    async def _count_prefix(self, stop: StopToken) -> object:
        stop.reason = refusal_of(self._store)  # another call may have had its answer since the gate
        num_pages = self._batch_end - self.page
        keys = self._ctx.keys.keys(self._hashes[self.page : self._batch_end])
        if stop.reason is not None:
            return 0
        return page_count(await self._store.count_prefix(keys), num_pages, len(keys))

    def leave(self) -> None:
        """Hear no more; the question ends by itself."""
        hop, self._hop = self._hop, None
        self._ctx.deadlines.cancel(self._deadline)
        if hop is not None and hop.task is not None:
            hop.task.cancel()

    def time_is_up(self) -> None:
        """End it: the store has not answered in time."""
        ctx = self._ctx
        ctx.metrics.counters["store_timeouts"] += 1
        logger.warning(
            "store.fault", call="count_prefix", fault=f"no answer in {ctx.config.store_timeout_s} s"
        )
        self.leave()
        self._on_ended(Stop.STORE_FAULT)

    def _answered(self, hop: Hop[int]) -> None:
        if hop is not self._hop:
            return
        self._hop = None
        self._ctx.deadlines.cancel(self._deadline)
        if hop.stop.reason is not None:
            self._on_ended(hop.stop.reason)
            return
        count = checked_count(self._ctx, hop, self._batch_end - self.page)
        if count is None:
            self._on_ended(Stop.STORE_FAULT)
            return
        self.page += count
        if self.page < self._batch_end:
            self._on_ended(None if self.page > self._start_page else Stop.NOT_STORED)
        elif self.page < self._end_page:
            self.ask()
        else:
            self._on_ended(None)
