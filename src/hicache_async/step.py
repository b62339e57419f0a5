"""One step of an engine: what it is granted, what it has to say, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .abc import Fence
from .checks import check_commit, check_discard, check_fence, check_loaded, checked_count
from .core.holding import Holding
from .core.tokens import token_bytes
from .errors import LeaseError
from .lease import Allocation, PrefixLease
from .types import Tokens


@dataclass(frozen=True, slots=True)
class StepGrant:
    """What an engine may use in its next step.

    Attributes:
        num_pages: device pages that every rank can grant; those not used return at the next call.
        loaded: leases whose load has returned on every rank since the last grant; each once.
    """

    num_pages: int
    loaded: tuple[PrefixLease, ...]
    _take_back: Callable[[Sequence[PrefixLease]], None] | None = field(
        default=None, repr=False, compare=False
    )

    def give_back(self) -> None:
        """Undo the step, of which nothing has been used: the next ``begin_step`` gets this grant again.

        Raises: LeaseError: another step was begun since, or it was given back before.

        For an engine that may cancel the call when it has just ended: ``post(..., undo=StepGrant.give_back)``.
        """
        if self._take_back is not None:
            self._take_back(self.loaded)


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """What an engine has to say after a step; done in this order.

    Attributes:
        commit: leases and how many tokens, absolute.
        extend: leases and the tokens they decoded.
        discard: leases and from which token on.
        release: leases that are finished or preempted; one that was released before is left alone.
        allocate: leases and up to how many tokens they need pages.
        after: the fence of the step, for commit, discard and release.
    """

    commit: Sequence[tuple[PrefixLease, int]] = ()
    extend: Sequence[tuple[PrefixLease, Tokens]] = ()
    discard: Sequence[tuple[PrefixLease, int]] = ()
    release: Sequence[PrefixLease] = ()
    allocate: Sequence[tuple[PrefixLease, int]] = ()
    after: Fence | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per ``allocate`` of the batch; None: no room, preempt a request."""

    allocations: Sequence[Allocation | None]


def check_batch(batch: StepBatch, leases: Mapping[PrefixLease, Holding]) -> None:
    """Raise for a mistake anywhere in ``batch``, so that no step is done half.

    Args:
        leases: all live ones of the cache.
    Raises: ConfigError, LeaseError: as the methods of the lease would.
    """
    check_fence(batch.after)
    committed: dict[PrefixLease, int] = {}
    for lease, num_tokens in batch.commit:
        pages = check_commit(lease, _holding(lease, leases), num_tokens)
        committed[lease] = max(pages, committed.get(lease, 0))
    for lease, token_ids in batch.extend:
        _holding(lease, leases)
        token_bytes(token_ids)
    for lease, from_token in batch.discard:
        holding = _holding(lease, leases)
        check_discard(lease, holding, from_token, max(holding.committed_pages, committed.get(lease, 0)))
    for lease in batch.release:
        if not isinstance(lease, PrefixLease):
            raise LeaseError(f"release has {lease!r}; give leases of this cache")
    released = set(batch.release)
    for lease, total_tokens in batch.allocate:
        check_loaded(lease, _holding(lease, leases))
        checked_count("total_tokens", total_tokens)
        if lease in released:
            raise LeaseError(f"{lease!r} is released and allocated for in one step; do one of the two")


def _holding(lease: PrefixLease, leases: Mapping[PrefixLease, Holding]) -> Holding:
    holding = leases.get(lease)
    if holding is None:
        raise LeaseError(
            f"{lease!r} is no live lease of this cache: it was released, or another cache made it"
        )
    return holding
