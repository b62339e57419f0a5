"""Survey: what the store says of each page of one prompt, in a bounded number of questions."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from .._hop import Hop
from ..abc import Store, SupportsListing
from ..config import PrefetchPolicy
from ..types import Stop, StopToken
from .calls import answered_count, fault_of, page_count, start_store_call
from .context import Context, settled_within
from .gates import ask_in_batches, refusal_of

MAX_QUESTIONS = 32
"""Questions about existence beyond those of a prefetch; pages that they do not reach stay unknown."""

NAMES_A_TURN = 1 << 16
"""Listed names looked through in one turn of the loop, some 10 ms."""


class Survey:
    """Asks a store about pages and raises for nothing that the store does.

    Args:
        store: None: there is nobody to ask.
        hashes: of the whole pages of the prompt.

    Attributes:
        refusal: why the store is not to be called now; then nothing is asked.
        fault: what went wrong first; nothing is asked after that.
        written: pages that this process has written since it asked.
    """

    def __init__(self, ctx: Context, store: Store | None, hashes: Sequence[bytes]) -> None:
        self._ctx = ctx
        self.store = store
        self.refusal = None if store is None else refusal_of(store)
        self._epoch = ctx.tree.store_epoch
        self._keys = ctx.keys  # of this store: another one may encode its objects otherwise
        self._hashes = hashes
        self._answers: dict[int, bool] = {}
        self._listed: dict[str, set[str]] | None = None
        self._cut: tuple[int, Stop] | None = None
        self._asked = 0
        self.fault: str | None = None
        self.written: set[int] = set()

    # Asking

    async def look(self, start_page: int, end_page: int) -> None:
        """Ask what a prefetch asks, with its deadline."""
        ctx = self._ctx
        deadline_s = PrefetchPolicy(ctx.config.prefetch_policy).deadline_s(
            (end_page - start_page) * ctx.page_tokens, ctx.config
        )
        start_s = ctx.clock.monotonic()

        def is_over() -> bool:
            return deadline_s is not None and ctx.clock.monotonic() - start_s >= deadline_s

        async def ask(start: int, end: int) -> int | Stop:
            count = None if is_over() else await self._ask(start, end)
            if is_over():
                return Stop.DEADLINE
            if not self.is_current:
                return Stop.DETACHED
            return Stop.STORE_FAULT if count is None else count

        found, cut = await ask_in_batches(ask, start_page, end_page, ctx.config.store_batch_pages)
        if cut is not None and cut is not Stop.NOT_STORED:
            self._cut = (start_page + found, cut)

    async def complete(self) -> None:
        """Learn of the other pages: from the names of the store where it lists them, else by asking on."""
        if self._may_ask:
            await self._list_names()
        position, stride, num_pages = 0, 1, len(self._hashes)
        while self._asked < MAX_QUESTIONS and self._may_ask:
            unknown = [page for page in range(num_pages) if self.is_stored(page) is None]
            if not unknown:
                return
            page = next((page for page in unknown if page >= position), unknown[0])
            self._asked += 1
            count = await self._ask(page, self._end_of_unknown(page)) or 0
            # After a miss the next page, then one twice as far each time: a hole may be long.
            position = page + (count + 1 if count else stride)
            stride = 1 if count else 2 * stride

    @property
    def _may_ask(self) -> bool:
        return self.refusal is None and self.fault is None and self.is_current

    def _end_of_unknown(self, page: int) -> int:
        end = min(len(self._hashes), page + self._ctx.config.store_batch_pages)
        return next((later for later in range(page, end) if self.is_stored(later) is not None), end)

    async def _ask(self, start: int, end: int) -> int | None:
        keys, num_pages, store = self._keys.keys(self._hashes[start:end]), end - start, self.store
        assert store is not None

        async def count_pages(stop: StopToken) -> object:
            return page_count(await store.count_prefix(keys), num_pages, len(keys))

        hop = await self._call("count_prefix", count_pages)
        count = answered_count(hop, num_pages) if hop.settled.done() else None
        if count is None:
            self.fault = f"count_prefix: {self._fault_of(hop, num_pages)}"
            return None
        self._answers.update(dict.fromkeys(range(start, start + count), True))
        if start + count < end:
            self._answers[start + count] = False
        return count

    def _fault_of(self, hop: Hop[int], limit: int) -> str:
        if hop.settled.done():
            return fault_of(hop, limit)
        return f"no answer in {self._ctx.config.store_timeout_s:g} s (store_timeout_s)"

    async def _list_names(self) -> None:
        store = self.store
        if isinstance(store, SupportsListing):
            listed: dict[str, set[str]] = defaultdict(set)
            hop = await self._call("list_keys", lambda stop: self._sort_names(store, listed))
            if hop.settled.done() and hop.error is None:
                self._listed = listed

    async def _sort_names(self, store: SupportsListing, listed: dict[str, set[str]]) -> None:
        # Keeps what the names of our pages end in, whoever wrote them.
        wanted = {page_hash.hex() for page_hash in self._hashes}
        hash_length = 2 * len(self._hashes[0])
        names = list(await store.list_keys())
        for start in range(0, len(names), NAMES_A_TURN):
            for name in names[start : start + NAMES_A_TURN]:
                if name[:hash_length] in wanted:
                    listed[name[:hash_length]].add(name[hash_length:])
            await asyncio.sleep(0)

    async def _call(self, name: str, call: Callable[[StopToken], Awaitable[object]]) -> Hop[int]:
        # Not settled when it returns: there was no answer in time.
        ctx = self._ctx
        hop = start_store_call(ctx, name, call, lambda hop: None)
        hop.stop.tracked = True  # it fills no buffer: torn away, it has ended
        try:
            await settled_within(ctx.clock, hop.settled, ctx.config.store_timeout_s)
        finally:
            if hop.task is not None:
                hop.task.cancel()
        return hop

    # What came of it

    @property
    def is_current(self) -> bool:
        """Whether the store is still the one that was asked, and was not cleared since."""
        return self._epoch == self._ctx.tree.store_epoch

    def found(self, start_page: int, end_page: int) -> tuple[int, Stop | None]:
        """Return how many pages a prefetch of ``[start_page, end_page)`` finds, and what ends its search."""
        cut_page, cut = self._cut or (end_page, None)
        page = start_page
        while page < min(end_page, cut_page) and self._answers.get(page):
            page += 1
        if page == end_page:
            return page - start_page, None
        if page not in self._answers:  # nobody answered
            return page - start_page, cut or Stop.STORE_FAULT
        if page == cut_page:
            return page - start_page, cut
        return page - start_page, None if page > start_page else Stop.NOT_STORED

    def is_stored(self, page: int) -> bool | None:
        """Return whether the store has ``page``; None: not known."""
        if page in self.written:
            return True
        if self._listed is None or (page in self._answers and not self.is_stale(page)):
            return self._answers.get(page)
        return self._is_listed(page)

    def is_stale(self, page: int) -> bool:
        """Return whether the store has counted ``page`` and does not list it."""
        return self._listed is not None and self._answers.get(page, False) and not self._is_listed(page)

    def other_namespace(self, page: int) -> str | None:
        """Return what the name of ``page`` ends in where the store has it under another name; None: it has not."""
        suffixes = self._suffixes(page).difference(self._keys.suffixes)
        return min(suffixes) if suffixes else None

    def missing_chunks(self, page: int) -> list[int] | None:
        """Return which chunks of ``page`` the store does not list; None: it lists nothing."""
        if self._listed is None:
            return None
        there = self._suffixes(page)
        return [chunk for chunk, suffix in enumerate(self._keys.suffixes) if suffix not in there]

    @property
    def lists_names(self) -> bool:
        """Whether the store has told all its names."""
        return self._listed is not None

    def _is_listed(self, page: int) -> bool:
        return self._suffixes(page).issuperset(self._keys.suffixes)

    def _suffixes(self, page: int) -> set[str]:
        return (self._listed or {}).get(self._hashes[page].hex(), set())
