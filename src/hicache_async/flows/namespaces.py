"""Namespaces: writes down in a store what this cache's names mean, and says when the store is full of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from .._log import logger
from ..abc import Store, SupportsListing, SupportsNamespaces
from ..core.manifest import Manifest, manifest_of
from ..core.sharing import Difference, nearest
from ..stores.catalog import count_objects, list_namespaces, read_manifests, write_manifest
from .context import Context, settled_within
from .gates import refusal_of

MAX_MANIFESTS = 64
"""Manifests of other namespaces that are read when a store comes; a store with more is one for the doctor."""

T = TypeVar("T")


class Namespaces:
    """Get to know the namespaces of each store that comes, in the background.

    No request, attach, detach or close waits for it, and no fault of it is anybody's but a count. It is no hop:
    its buffers are its own, so nothing is in doubt when it is cancelled.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._meeting: set[asyncio.Task[None]] = set()
        """What still works for the last store that came."""
        self._has_logged = False

    def meet(self, store: Store | None) -> None:
        """Look into ``store`` and then leave this cache's manifest there; None: there is no store any more."""
        for task in self._meeting:  # each of them: none may call a store that has been taken away
            task.cancel()
        self._meeting, self._has_logged = set(), False
        if store is not None and refusal_of(store) is None:
            self._meeting.add(self._ctx.spawn(self._meet(store, self._meeting), "namespaces"))

    async def _meet(self, store: Store, group: set[asyncio.Task[None]]) -> None:
        # Looks before it writes: afterwards this cache's namespace is there, whatever is in it.
        await self._within(lambda: self._look(store), group)
        if self._ctx.keys.writes:
            await self._within(lambda: write_manifest(store, self._ctx.keys.namespace), group)

    async def read(self, store: Store, digest: str) -> Manifest | None:
        """Return what is written down of the namespace ``digest``; None: nothing that can be read now.

        Cancellation: ends the call of the store, too.
        """
        found = await self._within(lambda: read_manifests(store, [digest]), set())
        return (found or {}).get(digest)

    async def _look(self, store: Store) -> None:
        ours = manifest_of(self._ctx.keys.namespace)
        digests = await list_namespaces(store)
        others = [digest for digest in digests or () if digest != ours.digest][:MAX_MANIFESTS]
        if not others:
            return
        manifests = (await read_manifests(store, others)).values()
        related = [manifest for manifest in manifests if self._may_be_ours(ours, manifest)]
        if related:
            is_new = isinstance(store, SupportsNamespaces) and ours.digest not in (digests or ())
            related = await _with_objects(store, ours.digest, related, is_new=is_new)
        if related:
            self._warn(store, nearest(ours, related))

    def _may_be_ours(self, ours: Manifest, other: Manifest) -> bool:
        # The other stages of a pipeline have other layers by right; they say nothing about this one's hits.
        names = ours.fields.keys() | other.fields.keys()
        different = {name for name in names if ours.fields.get(name) != other.fields.get(name)}
        is_stage = self._ctx.config.pp_size > 1 and different == {"layer_partition"}
        return "model_id" not in different and not is_stage

    def _warn(self, store: Store, found: Sequence[tuple[Manifest, Sequence[Difference]]]) -> None:
        other, different = found[0]
        logger.warning(
            "store.other_namespaces",
            store=type(store).__name__,
            model_id=other.model_id,
            namespace=self._ctx.keys.namespace.digest,
            others=[manifest.digest for manifest, _ in found],
            nearest=other.digest,
            different=[str(difference) for difference in different],
            advice=[difference.advice for difference in different],
            hint="the store has pages of this model_id and none under this cache's names, so nothing of it is "
            "hit; hicache doctor STORE --config CONFIG shows all of them",
        )

    async def _within(
        self, work: Callable[[], Coroutine[object, object, T]], group: set[asyncio.Task[None]]
    ) -> T | None:
        # Whatever a store does, and however long it takes, ends here; None: it failed.
        outcome: list[T] = []

        async def run() -> None:
            try:
                outcome.append(await work())
            except Exception as error:  # noqa: BLE001 - of a store made by others
                self._report(repr(error))

        ctx = self._ctx
        running = ctx.spawn(run(), "namespaces.call")
        group.add(running)
        try:
            if not await settled_within(ctx.clock, running, ctx.config.store_timeout_s):
                self._report(f"no answer in {ctx.config.store_timeout_s:g} s (store_timeout_s)")
            elif running.cancelled():  # by something of the store's own
                self._report(repr(asyncio.CancelledError()))
        finally:
            running.cancel()
            group.discard(running)
        return outcome[0] if outcome else None

    def _report(self, fault: str) -> None:
        self._ctx.metrics.counters["namespace_faults"] += 1
        if not self._has_logged:
            self._has_logged = True
            logger.warning("store.fault", call="namespaces", fault=fault)


async def _with_objects(
    store: Store, own_digest: str, others: Sequence[Manifest], *, is_new: bool
) -> list[Manifest]:
    """Return those of ``others`` that have objects; none where our own namespace has.

    A namespace may be there for its manifest alone. Only a list of all names tells, so only here is it asked for;
    where a store has none, a namespace that is there counts as one with objects.

    Args:
        is_new: our own namespace was not there; what has come since, this cache has written.
    """
    if not isinstance(store, SupportsListing):
        return list(others) if is_new else []
    counts = await count_objects(await store.list_keys())
    if counts[own_digest] and not is_new:
        return []
    return [manifest for manifest in others if counts[manifest.digest]]
