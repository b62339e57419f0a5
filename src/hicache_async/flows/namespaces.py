"""Namespaces: writes down in a store what this cache's names mean, and says when the store is full of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from .._log import logger
from ..abc import Store, SupportsListing, SupportsNamespaces
from ..config import KeyScheme
from ..core.manifest import Manifest, manifest_of
from ..core.sharing import Difference, RankGrid, is_other_stage, nearest, rank_grid
from ..stores.catalog import count_objects, list_namespaces, read_manifests, write_manifest
from .context import Context, settled_within
from .gates import refusal_of

MAX_MANIFESTS = 64
"""Manifests of other namespaces that are read when a store comes; a store with more is one for the doctor."""

MAX_GRIDS = 16
"""Ranks of another grid that the warning names."""

_KEYS_A_TURN = 1 << 14
"""Listed names looked through in one turn of the loop, some 10 ms."""

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
        keys: Sequence[str] | None = None
        if isinstance(store, SupportsNamespaces):
            digests = await list_namespaces(store) or []
        elif isinstance(store, SupportsListing):
            keys = await store.list_keys()
            digests = sorted(await count_objects(keys, manifests=True))
        else:
            return
        related = await self._related(store, ours, digests)
        is_known = ours.digest in digests
        # All names may be millions: they are listed where another namespace, or another rank, may have what we lack.
        if (
            keys is None
            and isinstance(store, SupportsListing)
            and (related or (is_known and self._has_peers))
        ):
            keys = await store.list_keys()
        if keys is None:
            if related and not is_known:
                self._warn(store, nearest(ours, related))
            return
        grids = await self._other_grids(keys)
        is_new = isinstance(store, SupportsNamespaces) and not is_known
        if grids:
            self._warn_of_grids(store, grids)
        elif related and (found := await _with_objects(keys, ours.digest, related, is_new=is_new)):
            self._warn(store, nearest(ours, found))

    async def _related(self, store: Store, ours: Manifest, digests: Sequence[str]) -> list[Manifest]:
        # The other stages of a pipeline have other layers by right; they say nothing about this one's hits.
        others = [digest for digest in digests if digest not in ("", ours.digest)][:MAX_MANIFESTS]
        found = (await read_manifests(store, others)).values() if others else ()
        return [
            other for other in found if other.model_id == ours.model_id and not is_other_stage(ours, other)
        ]

    @property
    def _has_peers(self) -> bool:
        config = self._ctx.config
        return config.tp_size * config.pp_size * config.cp_size > 1

    async def _other_grids(self, keys: Sequence[str]) -> list[RankGrid]:
        """Return whose pages of our own namespace there are where all are of rank grids of other sizes than ours.

        The other ranks of our own grid may have stored before us, so theirs are no reason to say anything.
        """
        names = self._ctx.keys
        if self._ctx.config.key_scheme is KeyScheme.UNIFIED:
            return []
        is_mla = names.namespace.rank_replicated
        own = rank_grid(names.suffix, is_mla=is_mla)
        suffixes = await _suffixes_of(keys, names.namespace.digest)
        if own is None or not suffixes.isdisjoint(names.suffixes):
            return []
        found = {rank_grid(suffix, is_mla=is_mla) for suffix in suffixes}
        return sorted(grid for grid in found if grid is not None and grid.sizes != own.sizes)

    def _warn_of_grids(self, store: Store, grids: Sequence[RankGrid]) -> None:
        names = self._ctx.keys
        own = rank_grid(names.suffix, is_mla=names.namespace.rank_replicated)
        logger.warning(
            "store.other_namespaces",
            store=type(store).__name__,
            model_id=names.namespace.model_id,
            namespace=names.namespace.digest,
            others=[str(grid) for grid in grids[:MAX_GRIDS]],
            nearest=names.namespace.digest,
            different=[f"stored for {grids[0]}; this rank is {own}"],
            advice=[
                "run with the same tp_size, pp_size and cp_size as those that wrote it, or set "
                'key_scheme = "unified" on both sides, and store anew'
            ],
            hint="the store has pages of this namespace, all of ranks of another grid, so nothing of it is hit",
        )

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
    keys: Sequence[str], own_digest: str, others: Sequence[Manifest], *, is_new: bool
) -> list[Manifest]:
    """Return those of ``others`` that have objects; none where our own namespace has.

    A namespace may be there for its manifest alone. Only the list of all names tells.

    Args:
        is_new: our own namespace was not there; what has come since, this cache has written.
    """
    counts = await count_objects(keys)
    if counts[own_digest] and not is_new:
        return []
    return [manifest for manifest in others if counts[manifest.digest]]


async def _suffixes_of(keys: Sequence[str], digest: str) -> set[str]:
    """Return what the names of the pages of one namespace end in, without the hashes of pages."""
    found: set[str] = set()
    wanted = f"_{digest}_"
    for start in range(0, len(keys), _KEYS_A_TURN):
        for key in keys[start : start + _KEYS_A_TURN]:
            _, middle, tail = key.partition(wanted)
            if middle:  # a manifest ends with the digest
                found.add(middle + tail)
        await asyncio.sleep(0)
    return found
