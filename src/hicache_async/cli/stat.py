"""``hicache stat``: how much a store holds, of which sizes, and what it has counted."""

from __future__ import annotations

import os
from argparse import Namespace as Options
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ..abc import Store, SupportsStat, SupportsStats
from ..core.keys import namespace_of
from ..core.manifest import is_manifest_key
from ..stores.file import FileStore
from ._inventory import KEYS_A_BATCH, batches
from ._opening import listing_of, opened
from ._output import Output, counted, nbytes_text, table
from ._problem import FINE


async def run(options: Options, output: Output) -> int:
    """Sum up the store; returns the exit status."""
    async with opened(options.store, read_only=True) as store:
        listing = listing_of(store, "stat counts the keys of a store")
        keys = await listing.list_keys()
        sizes = await _sizes(store, keys, output)
        if isinstance(store, SupportsStat) and any(_lacks_size(key, sizes) for key in keys):
            # What was deleted meanwhile is none that cannot be whole.
            there = frozenset(await listing.list_keys())
            keys = [key for key in keys if key in there or not _lacks_size(key, sizes)]
            lacking = [key for key in keys if _lacks_size(key, sizes)]
            sizes |= await _sizes(store, lacking, output)
        stats = dict(store.stats) if isinstance(store, SupportsStats) else {}
        document = _document(options.store, store, keys, sizes, stats)
        document["options"] = dict(parse_qsl(urlsplit(options.store).query))
        document["under_construction"] = _num_under_construction(store)
    output.document(document, _text(document))
    return FINE


def _num_under_construction(store: Store) -> int | None:
    # Files that a writer builds now, or that a dead one left; a store that keeps no files has none to tell of.
    if not isinstance(store, FileStore):
        return None
    try:
        return len(os.listdir(os.path.join(store.root, "v2", "temp")))
    except OSError:
        return 0


def _lacks_size(key: str, sizes: Mapping[str, int]) -> bool:
    return key not in sizes and not is_manifest_key(key)


async def _sizes(store: Store, keys: Sequence[str], output: Output) -> dict[str, int]:
    # Of pages only: a manifest is one size by definition.
    found: dict[str, int] = {}
    if not isinstance(store, SupportsStat):
        return found
    with output.progress("looking", len(keys), " objects") as bar:
        for batch in batches(keys, KEYS_A_BATCH):
            for key, stat in zip(batch, await store.stat(batch), strict=True):
                if stat is not None and not is_manifest_key(key):
                    found[key] = stat.nbytes
            bar.update(len(batch))
    return found


def _document(
    name: str, store: Store, keys: Sequence[str], sizes: Mapping[str, int], stats: Mapping[str, int]
) -> dict[str, Any]:
    pages = [key for key in keys if not is_manifest_key(key)]
    by_namespace = Counter(namespace_of(key) for key in pages)
    ordered = sorted(sizes.values())
    knows = isinstance(store, SupportsStat)
    return {
        "store": name,
        "kind": type(store).__name__,
        "objects": len(pages),
        "manifests": len(keys) - len(pages),
        "nbytes": sum(ordered) if knows else None,
        "namespaces": dict(sorted(by_namespace.items())),
        "size": (
            {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]} if ordered else None
        ),
        "sizes": [{"nbytes": size, "objects": count} for size, count in _histogram(ordered)],
        "unsized": len(pages) - len(ordered) if knows else None,
        "stats": stats,
    }


def _histogram(sizes: Sequence[int]) -> list[tuple[int, int]]:
    # Objects of a namespace are mostly of one size, so sizes themselves tell more than bins; the most frequent ones.
    return sorted(Counter(sizes).most_common(16))


def _text(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"{document['store']}, a {document['kind']}"
    total = f"{counted(document['objects'], 'object')}, {nbytes_text(document['nbytes'])}"
    yield f"holds     {total}, and {counted(document['manifests'], 'manifest')}"
    if document["size"] is not None:
        size = {name: nbytes_text(nbytes) for name, nbytes in document["size"].items()}
        yield f"sizes     min {size['min']}, median {size['median']}, max {size['max']}"
        rows = [
            [nbytes_text(each["nbytes"]), counted(each["objects"], "object")] for each in document["sizes"]
        ]
        yield from table(rows, " " * 10)
    if document["unsized"]:
        yield f"unsized   {counted(document['unsized'], 'object')} cannot be whole; hicache verify says why"
    if document["namespaces"]:
        yield "namespaces"
        rows = [
            [digest or "(none)", counted(count, "object")] for digest, count in document["namespaces"].items()
        ]
        yield from table(rows, " " * 10)
    if document["options"]:
        yield "options   " + ", ".join(f"{name}={value}" for name, value in document["options"].items())
    if document["under_construction"]:
        number = counted(document["under_construction"], "file")
        yield f"building  {number} under construction; hicache gc removes those of dead writers"
    if document["stats"]:
        yield "counts of the store itself"
        yield from table([[name, f"{count:,}"] for name, count in document["stats"].items()], " " * 10)
