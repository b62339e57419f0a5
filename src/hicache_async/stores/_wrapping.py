"""What stores around other stores share: capabilities that follow those inside, and parts of a stop token.

Others ask what a store can do by ``isinstance``, so what a wrapper can do has to be in its class. A wrapper
lists a *mixin* for each capability, and :func:`kind_of` makes, once, the class that has those that are needed:

    class Loud(Wrapping):
        def __new__(cls, inner: Store) -> Self:
            return object.__new__(kind_of(cls, FORWARDS, able(inner)))
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from ..abc import (
    Store,
    SupportsCodec,
    SupportsDelete,
    SupportsListing,
    SupportsNamespaces,
    SupportsRefusal,
    SupportsStat,
    SupportsStats,
    SupportsSweep,
)
from ..errors import StoreUnavailable
from ..types import ObjectStat, Stop, StopToken

W = TypeVar("W")
Mixins: TypeAlias = "Mapping[type[Any], type[Any]]"
"""Capability, a protocol of ``abc``, to the class that has it."""

CAPABILITIES: tuple[type[Any], ...] = (
    SupportsDelete, SupportsListing, SupportsStat, SupportsNamespaces, SupportsSweep, SupportsRefusal, SupportsCodec,
)  # fmt: skip
"""What a store may be able to do beside the four methods; counting is left out: every wrapper counts."""


def able(store: Store) -> frozenset[type[Any]]:
    """Return which of :data:`CAPABILITIES` ``store`` has."""
    return frozenset(capability for capability in CAPABILITIES if isinstance(store, capability))


def kind_of(cls: type[W], mixins: Mixins, wanted: Collection[type[Any]]) -> type[W]:
    """Return ``cls`` with the mixins of the capabilities that are ``wanted``, under the same name.

    What ``cls`` defines itself comes first, a subclass of a wrapper that has a method of its own too.
    """
    needed = tuple(mixin for capability, mixin in mixins.items() if capability in wanted)
    missing = tuple(mixin for mixin in needed if not issubclass(cls, mixin))
    return _combined(cls, missing) if missing else cls  # type: ignore[arg-type] # a class is hashable


@functools.cache  # so that stores of one kind have one class
def _combined(cls: type[Any], mixins: tuple[type[Any], ...]) -> type[Any]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, *mixins), names)


def checked_count(answer: object, limit: int) -> int:
    """Return what a store answered as a count.

    Raises: StoreUnavailable: it is none, or not in 0 .. ``limit``.
    """
    is_count = isinstance(answer, (int, np.integer)) and not isinstance(answer, bool)
    if not is_count or not 0 <= answer <= limit:  # type: ignore[operator]
        raise StoreUnavailable(f"answered {answer!r}, expected 0 .. {limit}")
    return int(answer)  # type: ignore[call-overload, no-any-return]


def checked_stats(answer: object, num_keys: int) -> Sequence[ObjectStat | None]:
    """Return what a store answered about ``num_keys`` objects.

    Raises: StoreUnavailable: it is not one ObjectStat or None for each.
    """
    items: Sequence[object] = answer if isinstance(answer, Sequence) and len(answer) == num_keys else (0,)
    if not all(item is None or isinstance(item, ObjectStat) for item in items):
        raise StoreUnavailable(f"answered {answer!r:.80}, expected what is known of {num_keys} objects")
    return cast("Sequence[ObjectStat | None]", items)


class Wrapping:
    """A store around another one.

    Attributes:
        inner: the store inside.
    """

    inner: Store


class ForwardsDelete(Wrapping):
    """Delete in the store inside."""

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete the keys that exist; returns how many did."""
        return await cast("SupportsDelete", self.inner).delete(keys)


class ForwardsListing(Wrapping):
    """List what the store inside holds."""

    async def list_keys(self) -> Sequence[str]:
        """Return the keys of all complete objects, in no particular order."""
        return await cast("SupportsListing", self.inner).list_keys()


class ForwardsStat(Wrapping):
    """Know of objects what the store inside knows."""

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        """Return for each key what is known of its object; None: there is none, or it cannot be one."""
        return await cast("SupportsStat", self.inner).stat(keys)


class ForwardsNamespaces(Wrapping):
    """Know the namespaces that the store inside knows."""

    async def list_namespaces(self) -> Sequence[str]:
        """Return the namespace digests of its objects, in order of name."""
        return await cast("SupportsNamespaces", self.inner).list_namespaces()


class ForwardsSweep(Wrapping):
    """Sweep the store inside."""

    async def sweep(self) -> Mapping[str, int]:
        """Remove what dead writers left behind and trim to the store's limits; returns counts by name."""
        return await cast("SupportsSweep", self.inner).sweep()


class ForwardsRefusal(Wrapping):
    """Refuse where the store inside does."""

    def refusal(self) -> Stop | None:
        """Return why nothing should be asked of it now; None: it may be asked."""
        return cast("SupportsRefusal", self.inner).refusal()

    def why_refused(self) -> str:
        """Say for a human, in a clause, why, since when and until when."""
        return cast("SupportsRefusal", self.inner).why_refused()


class ForwardsCodec(Wrapping):
    """Encode as the store inside does."""

    @property
    def codec(self) -> str:
        """How objects are encoded, outermost first."""
        return cast("SupportsCodec", self.inner).codec


FORWARDS: Mixins = {
    SupportsDelete: ForwardsDelete,
    SupportsListing: ForwardsListing,
    SupportsStat: ForwardsStat,
    SupportsNamespaces: ForwardsNamespaces,
    SupportsSweep: ForwardsSweep,
    SupportsRefusal: ForwardsRefusal,
    SupportsCodec: ForwardsCodec,
}
"""For each capability a mixin that passes calls on to ``inner`` as they are."""


def stats_of(store: Store) -> dict[str, int]:
    """Return what ``store`` counts; what one of others calls its stats may be anything."""
    stats = store.stats if isinstance(store, SupportsStats) else None
    if not isinstance(stats, Mapping):
        return {}
    return {name: count for name, count in stats.items() if isinstance(count, int)}


def without(mixins: Mixins, capabilities: Iterable[type[Any]]) -> dict[type[Any], type[Any]]:
    """Return ``mixins`` less those of ``capabilities``, which a wrapper has itself."""
    left_out = frozenset(capabilities)
    return {capability: mixin for capability, mixin in mixins.items() if capability not in left_out}


class PartToken(StopToken):
    """The stop token of one part of a read: stopped with the whole, with a reason and an end of its own.

    A part may be stopped, and found to be late, while the whole goes on.

    Args:
        whole: the token of the read.
        shares_buffers: whether the part fills buffers of the whole, which then is busy while the part is.
    """

    __slots__ = ("_is_stopped", "_shares_buffers", "_whole")

    def __init__(self, whole: StopToken, *, shares_buffers: bool) -> None:
        self._whole = whole
        self._is_stopped = False
        self._shares_buffers = shares_buffers
        super().__init__(whole.priority)

    @property
    def stopped(self) -> bool:
        """Whether the part or the whole is to end."""
        return self._is_stopped or self._whole.stopped

    @stopped.setter
    def stopped(self, value: bool) -> None:
        self._is_stopped = value

    @property
    def priority(self) -> int:
        """That of the whole, which may rise."""
        return self._whole.priority

    @priority.setter
    def priority(self, value: int) -> None:
        pass

    def job_started(self) -> None:
        """Count one piece of thread work of this part."""
        super().job_started()
        if self._shares_buffers:
            self._whole.job_started()

    def job_ended(self) -> None:
        """Count one piece of thread work of this part as over."""
        super().job_ended()
        if self._shares_buffers:
            self._whole.job_ended()
