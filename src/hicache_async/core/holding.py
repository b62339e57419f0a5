"""Holding: what one request holds, in pages. All of a lease's bookkeeping, sync and on integers.

Page table of a loaded request, in pages from token 0 (half-open):

    [0, committed)            the tree's, kept by the device pin at its end; some may be private duplicates
    [committed, len(table))   private: allocated, being computed
    table.reserved            private: room promised by load, not in the table yet
"""

from __future__ import annotations

from collections.abc import Sequence

from ..abc import Fence
from ..errors import InvariantError, LeaseError
from ..types import Tier
from .hashing import HashChain
from .node import Node, pages_of
from .page_table import PageTable
from .pool import Owner, PagePool
from .tokens import TOKEN_NBYTES, TokenKey
from .tree import PrefixTree
from .walk import Match


class Holding:
    """The pages and pins of one request.

    Args:
        tree, device_pool: where they come from and go back to.
        key: the request's tokens; ``length`` of them are this request's.
        chain: what the page hashes depend on.
        whole: whether a match may cover all of the tokens, leaving nothing to compute.
        priority, output_priority: how much the prompt's pages, and those behind it, are worth keeping to
            eviction by priority.
    """

    __slots__ = (
        "_tree", "chain", "committed_pages", "credited_pages", "device_end", "host_end", "host_end_page",
        "key", "length", "loaded", "output_priority", "priority", "prompt_pages", "released", "table", "whole",
    )  # fmt: skip

    def __init__(
        self,
        tree: PrefixTree,
        device_pool: PagePool,
        key: TokenKey,
        length: int,
        chain: HashChain,
        *,
        whole: bool,
        priority: int = 0,
        output_priority: int = 0,
    ) -> None:
        self._tree = tree
        self.key = key
        self.length = length
        self.chain = chain
        self.whole = whole
        self.priority = priority
        self.output_priority = output_priority
        self.prompt_pages = 0
        """Whole pages of what was known at load; what comes behind is output."""
        self.table = PageTable(device_pool)
        self.device_end: Node | None = None
        self.host_end: Node | None = None
        """The deepest node that a prefetch attached for this request, pinned on the host until load."""
        self.host_end_page = 0
        self.committed_pages = 0
        self.credited_pages = 0
        """Up to where the nodes of the path have counted this request as a hit; each counts it once."""
        self.loaded = False
        self.released = False

    # Looking

    @property
    def page_tokens(self) -> int:
        """Tokens of one page."""
        return self.chain.page_nbytes // TOKEN_NBYTES

    @property
    def num_pages(self) -> int:
        """Whole pages of the request's tokens."""
        return self.length // self.page_tokens

    @property
    def limit_pages(self) -> int:
        """How many pages a match may cover: all whole pages, less what must be left to compute for logits."""
        num_tokens = self.length if self.whole or not self.length else self.length - 1
        return num_tokens * TOKEN_NBYTES // self.chain.page_nbytes

    def match(self, num_pages: int | None = None) -> Match:
        """Return how far the request's tokens are cached now; what the tree has hashed is not hashed again.

        Args:
            num_pages: how many pages may be covered; None: as many as may be reused.
        """
        limit = self.limit_pages if num_pages is None else num_pages
        match = self._tree.match(self.chain.seed, self.key.data, limit)
        if match.local_pages and match.local_pages > self.key.num_hashed(self.chain):
            hashes = [page_hash for node in match.path for page_hash in node.hashes]
            self.key.adopt_hashes(self.chain, hashes[: match.local_pages])
        return match

    def hashes(self, num_pages: int) -> list[bytes]:
        """Return the hashes of at least the first ``num_pages``."""
        return self.key.page_hashes(self.chain, num_pages)

    def check_live(self) -> None:
        """Raise LeaseError after release."""
        if self.released:
            raise LeaseError("the lease was released")

    # Taking

    def pin_host(self, node: Node, end_page: int) -> None:
        """Keep what a prefetch attached, up to ``node``, which ends at ``end_page``."""
        if end_page > self.host_end_page:
            self._tree.pin(Tier.HOST, node)
            self.unpin_host()
            self.host_end, self.host_end_page = node, end_page

    def keep_on_host(self, end_page: int) -> None:
        """Keep the first pages as a prefetch would that had brought them, where the host has them."""
        node = self._tree.cut(self.match(end_page), end_page)
        if node.host.pages is not None and not (self.released or self.loaded):
            self.pin_host(node, end_page)

    def unpin_host(self) -> None:
        """Let go of what a prefetch attached."""
        if self.host_end is not None:
            self._tree.unpin(Tier.HOST, self.host_end)
            self.host_end, self.host_end_page = None, 0

    def settle_load(self, end: Node, num_pages: int) -> None:
        """Take over the first ``num_pages``, all on the device; ``end`` is pinned for this lease already."""
        pages = pages_of(end.path(), Tier.DEVICE)
        if len(pages) != num_pages:
            raise InvariantError(f"{len(pages)} pages are on the device up to {end!r}, not {num_pages}")
        self.table.begin(pages)
        self.device_end = end
        self.committed_pages = num_pages
        self.prompt_pages = self.num_pages
        self.loaded = True

    # Giving

    def commit(self, end_page: int, ready: Sequence[Fence]) -> Node:
        """Publish pages ``[committed, end_page)``; duplicates stay private. Returns the node at their end.

        Raises: LeaseError: nothing was loaded.
        """
        if self.device_end is None:
            raise LeaseError("commit before load(): call load() first, even when nothing is cached")
        start = self.committed_pages
        if end_page <= start:
            return self.device_end
        if not self.device_end.attached:
            # The prefix this request stands on was cleared or doubted: its pages stay private.
            self.committed_pages = end_page
            return self.device_end
        if self.priority != self.output_priority and start < self.prompt_pages < end_page:
            self._publish(self.prompt_pages, ready)  # ends a node here, so that the output can go alone
        return self._publish(end_page, ready)

    def _publish(self, end_page: int, ready: Sequence[Fence]) -> Node:
        start, device_end = self.committed_pages, self.device_end
        assert device_end is not None
        graft = self._tree.graft(
            Tier.DEVICE,
            device_end,
            self.key.data,
            self.hashes(end_page),
            start,
            self.table.pages[start:end_page],
            source=Owner.LEASE,
            ready=ready,
        )
        self.table.owned[start:end_page] = ~graft.taken
        self._tree.pin(Tier.DEVICE, graft.end)
        self._tree.unpin(Tier.DEVICE, device_end)
        self.device_end = graft.end
        self.committed_pages = end_page
        return graft.end

    def credit(self) -> None:
        """Count this request as a hit of every node that it has committed and not counted yet."""
        end_page, node = self.committed_pages, self.device_end
        while node is not None and node.parent is not None and end_page > self.credited_pages:
            if not node.hits:
                self._recall(node)
            start_page = end_page - node.num_pages
            node.hits += 1
            worth = self.priority if start_page < self.prompt_pages else self.output_priority
            node.priority = max(node.priority, worth)
            end_page, node = start_page, node.parent
        self.credited_pages = max(self.credited_pages, self.committed_pages)

    def _recall(self, node: Node) -> None:
        # About to be committed for the first time since it came: the first pages may have been here before.
        num_pages, hits = self._tree.departed.recall(node.hashes)
        if num_pages:
            returned = self._tree.split(node, num_pages) if num_pages < node.num_pages else node
            returned.hits = hits

    def extend(self, data: bytes) -> None:
        """Append token ids; a key that somebody else has extended differently is forked."""
        end = self.length * TOKEN_NBYTES
        known = bytes(self.key.data[end : end + len(data)])
        if not data.startswith(known):
            self.key = self.key.truncated(self.length)
            known = b""
        self.key.data += data[len(known) :]
        self.length += len(data) // TOKEN_NBYTES

    def release(self, after: Fence | None, *, unpin: bool = True) -> None:
        """Give everything back; private pages may be reused behind ``after``.

        Args:
            unpin: False when the tree is not to be trusted any more.
        """
        self.released = True
        self.table.free_tail(0, after)
        self.table.free_reserved()
        if unpin:
            self.unpin_host()
            if self.device_end is not None:
                self._tree.unpin(Tier.DEVICE, self.device_end)
        self.host_end = self.device_end = None
