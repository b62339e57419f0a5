"""``hicache ls``: the namespaces of a store, or its keys."""

from __future__ import annotations

from argparse import Namespace as Options
from collections.abc import Iterator

from ..core.sharing import shown
from ._inventory import KEYS_A_BATCH, Entry, batches, keys_of, stat_all, take_inventory
from ._opening import listing_of, opened
from ._output import Output
from ._problem import FINE, FOUND, Problem


async def run(options: Options, output: Output) -> int:
    """List what ``options`` ask for; returns the exit status."""
    async with opened(options.store, read_only=True) as store:
        if options.keys:
            listing = listing_of(store, "ls --keys lists the keys of a store")
            digests = [] if options.namespace is None else [options.namespace]
            for batch in batches(await keys_of(listing, digests), KEYS_A_BATCH):
                for key, stat in zip(batch, await stat_all(store, batch), strict=True):
                    nbytes, used_s = (None, None) if stat is None else (stat.nbytes, stat.modified_s)
                    output.line({"key": key, "nbytes": nbytes, "last_used_s": used_s}, key)
            return FINE
        entries = (await take_inventory(store, output)).entries
    if options.namespace is not None:
        entries = [entry for entry in entries if entry.digest == options.namespace]
        if not entries:
            raise Problem(
                f"there is no namespace {options.namespace!r}; hicache ls lists those there are", FOUND
            )
    document = {"store": options.store, "namespaces": [entry.as_dict() for entry in entries]}
    output.document(document, _text(entries))
    return FINE


def _text(entries: list[Entry]) -> Iterator[str]:
    if not entries:
        yield "the store is empty"
    for entry in entries:
        yield entry.headline()
        yield from fields_text(entry)


def fields_text(entry: Entry) -> Iterator[str]:
    """Yield what is written down of a namespace, for people."""
    if entry.manifest is not None:
        for name, value in entry.manifest.fields.items():
            yield f"    {name} = {shown(value)}"
    elif entry.digest:
        yield "    no manifest that can be read, so what differs is not known"
    if entry.sample_key is not None and entry.manifest is None:
        yield f"    one of its keys: {entry.sample_key}"
