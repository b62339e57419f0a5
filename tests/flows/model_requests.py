"""What the engine of the modelled cache has in hand: requests, and forwards that run."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache_async import Loading, PrefixLease
from hicache_async.abc import Fence, HostFence
from tests.flows.model_world import Call
from tests.flows.rig import PAGE_TOKENS


class ForwardError(Exception):
    """A forward went wrong."""


@dataclass(slots=True, eq=False)
class Forward:
    """A forward that reads pages and will have written others when it is over.

    Attributes:
        fence: what the engine sets when it is over; None: it runs on the device's own stream.
        reads, writes: device pages and the identity that their bytes have meanwhile.
        results: what it leaves in the pages that it writes.
        committed: names of pages that were committed behind it.
        end_page: how many pages of its request will be there.
    """

    fence: HostFence | None
    reads: dict[int, bytes]
    writes: dict[int, bytes]
    results: dict[int, bytes]
    end_page: int
    committed: set[bytes] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Request:
    """A lease, and what the model knows of it.

    Attributes:
        names: of its whole pages.
        weights: those it computes with: of the time when it loaded.
        is_usable: all of the loaded prefix was seen to be there.
        guaranteed_tokens: up to where it can allocate whatever comes.
        computed: pages, from the first on, that hold their bytes.
        committed: pages that it has committed, or found.
        credited: pages that have counted it.
        is_cut: what it stands on may have been cleared or doubted.
        is_broken: good for nothing but to be released.
        after: fences to be passed before its own pages are written.
    """

    lease: PrefixLease
    namespace: int
    tokens: list[int]
    names: list[bytes]
    weights: int = 0
    call: Call | None = None
    prefetch_call: Call | None = None
    prefetch_step: int = 0
    has_loaded: bool = False
    loading: Loading | None = None
    is_usable: bool = False
    guaranteed_tokens: int = 0
    computed: int = 0
    committed: int = 0
    credited: int = 0
    is_cut: bool = False
    is_broken: bool = False
    is_released: bool = False
    after: list[Fence] = field(default_factory=list)
    forward: Forward | None = None

    def is_ready(self) -> bool:
        """Whether its prefix is there and nobody is busy with it."""
        return self.is_usable and not self.is_broken and self.call is None

    def can_prefetch(self) -> bool:
        """Whether nothing was asked for yet."""
        return self.prefetch_call is None and not self.has_prefetch() and not self.has_loaded

    def has_prefetch(self) -> bool:
        """Whether a prefetch has begun."""
        return self.lease._prefetch is not None

    def can_load(self) -> bool:
        """Whether it was not asked to load yet."""
        return not self.has_loaded

    def has_to_compute(self) -> bool:
        """Whether a forward may start as soon as there are pages."""
        more = len(self.tokens) > self.computed * PAGE_TOKENS
        return self.is_ready() and self.forward is None and more

    def can_compute(self) -> bool:
        """Whether a forward over all of its tokens may start."""
        has_pages = len(self.lease.pages) * PAGE_TOKENS >= len(self.tokens)
        return self.has_to_compute() and has_pages and all(fence.passed() for fence in self.after)
