"""``hicache gc``: removes what nobody can use any more, and what was not used for long."""

from __future__ import annotations

import time
from argparse import Namespace as Options
from collections import Counter
from collections.abc import Mapping

from ..abc import Store, SupportsSweep
from ..core.keys import namespace_of
from ..core.manifest import is_manifest_key
from ..types import ObjectStat
from ._inventory import KEYS_A_BATCH, batches
from ._opening import deleting_of, listing_of, opened, stating_of, sweeping_of
from ._output import Output, counted, nbytes_text
from ._problem import FINE


async def run(options: Options, output: Output) -> int:
    """Sweep the store, then delete what is old; returns the exit status."""
    async with opened(options.store, read_only=options.dry_run) as store:
        if options.older_than is None:
            sweeping_of(store, "gc without --older-than sweeps a store")
        swept: Mapping[str, int] | None = None
        if isinstance(store, SupportsSweep) and not options.dry_run:
            swept = dict(await store.sweep())
        old: dict[str, ObjectStat] = {}
        num_deleted = 0
        if options.older_than is not None:
            old = await _old(store, time.time() - options.older_than, output)
            num_deleted = 0 if options.dry_run else await delete_all(store, list(old), output)
    nbytes = sum(stat.nbytes for stat in old.values())
    document = {
        "store": options.store,
        "dry_run": options.dry_run,
        "swept": swept,
        "old_objects": len(old),
        "old_nbytes": nbytes,
        "deleted": num_deleted,
    }
    lines = []
    if swept is not None:
        counts = ", ".join(f"{name} {count:,}" for name, count in swept.items()) or "nothing to count"
        lines.append(f"swept: {counts}")
    elif isinstance(store, SupportsSweep):
        lines.append("not swept: what a sweep would remove is known when it is done, without --dry-run")
    if options.older_than is not None:
        verb = "would be deleted" if options.dry_run else f"found, {num_deleted:,} deleted"
        lines.append(f"old: {counted(len(old), 'object')}, {nbytes_text(nbytes)}, {verb}")
    output.document(document, lines)
    return FINE


async def _old(store: Store, end_s: float, output: Output) -> dict[str, ObjectStat]:
    """Return what was last used before ``end_s``; a manifest goes with the last object of its namespace."""
    listing = listing_of(store, "gc --older-than lists the keys of a store")
    stating = stating_of(store, "gc --older-than needs to know when objects were used")
    deleting_of(store, "gc --older-than deletes objects")
    keys = sorted(await listing.list_keys())
    old: dict[str, ObjectStat] = {}
    num_kept: Counter[str] = Counter()
    with output.progress("looking", len(keys), " objects") as bar:
        for batch in batches(keys, KEYS_A_BATCH):
            for key, stat in zip(batch, await stating.stat(batch), strict=True):
                if stat is not None and stat.modified_s < end_s:
                    old[key] = stat
                elif not is_manifest_key(key):
                    num_kept[namespace_of(key)] += 1
            bar.update(len(batch))
    return {
        key: stat for key, stat in old.items() if not (is_manifest_key(key) and num_kept[namespace_of(key)])
    }


async def delete_all(store: Store, keys: list[str], output: Output) -> int:
    """Delete ``keys``, manifests last; returns how many were there."""
    deleting = deleting_of(store, "this deletes objects")
    num_deleted = 0
    with output.progress("deleting", len(keys), " objects") as bar:
        for batch in batches(sorted(keys, key=is_manifest_key), KEYS_A_BATCH):
            num_deleted += await deleting.delete(batch)
            bar.update(len(batch))
    return num_deleted
