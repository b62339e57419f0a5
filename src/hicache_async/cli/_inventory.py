"""Inventory: the namespaces of a store, with what is written down of each and how much there is of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..abc import Store, SupportsListing, SupportsStat
from ..core.keys import namespace_of
from ..core.manifest import Manifest, is_manifest_key
from ..stores.catalog import list_namespaces, read_manifests
from ..types import ObjectStat
from ._opening import listing_of
from ._output import Output, counted, nbytes_text, time_text
from ._problem import FOUND, Problem

KEYS_A_BATCH = 1024
"""Keys whose objects are looked up in one call."""


@dataclass(slots=True)
class Entry:
    """One namespace of a store.

    Attributes:
        digest: "": objects that are in no namespace.
        manifest: None: there is none that can be read and believed.
        num_objects: without the manifest; None: the store cannot list its keys.
        nbytes: of their payload; None: the store cannot tell.
        last_used_s: the newest time that an object was written or used, since 1970; None: unknown.
        sample_key: the name of one of the objects.
    """

    digest: str
    manifest: Manifest | None = None
    num_objects: int | None = None
    nbytes: int | None = None
    last_used_s: float | None = None
    sample_key: str | None = None

    def count(self, key: str, stat: ObjectStat | None) -> None:
        """Add one object."""
        self.num_objects = (self.num_objects or 0) + 1
        self.sample_key = key
        if stat is not None:
            self.nbytes = (self.nbytes or 0) + stat.nbytes
            self.last_used_s = max(self.last_used_s or 0.0, stat.modified_s)

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "namespace": self.digest,
            "manifest": None if self.manifest is None else self.manifest.fields,
            "objects": self.num_objects,
            "nbytes": self.nbytes,
            "last_used_s": self.last_used_s,
        }

    def headline(self) -> str:
        """Return how much there is of it, in a line."""
        size = f"{counted(self.num_objects, 'object')}, {nbytes_text(self.nbytes)}"
        return f"{self.digest or '(no namespace)'}: {size}, last used {time_text(self.last_used_s)}"


@dataclass(slots=True)
class Inventory:
    """What a store holds.

    Attributes:
        entries: the namespaces in order of name, and last what is in none.
        keys: of all objects, in order; None: the store cannot list them.
    """

    entries: list[Entry]
    keys: Sequence[str] | None


async def take_inventory(store: Store, output: Output) -> Inventory:
    """Return what ``store`` holds, by namespace.

    Raises: Problem: the store can list neither keys nor namespaces.
    """
    entries: dict[str, Entry] = {}
    keys: Sequence[str] | None = None
    if isinstance(store, SupportsListing):
        keys = sorted(await store.list_keys())
        await _count(store, keys, entries, output)
    else:
        digests = await list_namespaces(store)
        if digests is None:
            listing_of(store, "this lists the keys of a store")
        entries = {digest: Entry(digest) for digest in digests or ()}
    manifests = await read_manifests(store, [digest for digest in entries if digest])
    for digest, manifest in manifests.items():
        entries[digest].manifest = manifest
    ordered = [entries[digest] for digest in sorted(entries, key=lambda digest: (not digest, digest))]
    return Inventory(ordered, keys)


async def _count(store: Store, keys: Sequence[str], entries: dict[str, Entry], output: Output) -> None:
    with output.progress("looking", len(keys), " objects") as bar:
        for batch in batches(keys, KEYS_A_BATCH):
            stats = await stat_all(store, batch)
            for key, stat in zip(batch, stats, strict=True):
                digest = namespace_of(key)
                entry = entries.setdefault(digest, Entry(digest, num_objects=0))
                if not is_manifest_key(key):
                    entry.count(key, stat)
            bar.update(len(batch))
    if isinstance(store, SupportsStat):
        for entry in entries.values():
            entry.nbytes = entry.nbytes or 0


async def stat_all(store: Store, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
    """Return what ``store`` knows of its objects; None for each where it can tell nothing."""
    if isinstance(store, SupportsStat):
        return await store.stat(keys)
    return [None] * len(keys)


async def keys_of(store: SupportsListing, digests: Collection[str]) -> list[str]:
    """Return the keys in the namespaces ``digests``, their manifests included, in order; empty: all keys.

    Raises: Problem: a namespace that the store does not have.
    """
    keys = sorted(await store.list_keys())
    if not digests:
        return keys
    there = {namespace_of(key) for key in keys}
    for digest in digests:
        if digest not in there:
            names = ", ".join(sorted(filter(None, there))) or "none"
            raise Problem(f"there is no namespace {digest!r} in this store; there are: {names}", FOUND)
    return [key for key in keys if namespace_of(key) in digests]


def batches(keys: Sequence[str], num_keys: int) -> Iterator[Sequence[str]]:
    """Yield ``keys`` in runs of at most ``num_keys``."""
    for start in range(0, len(keys), num_keys):
        yield keys[start : start + num_keys]
