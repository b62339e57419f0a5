"""Catalog: which namespaces a store holds, and what their manifests say."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

from ..abc import Store, SupportsListing, SupportsNamespaces
from ..core.keys import Namespace, namespace_of
from ..core.manifest import MANIFEST_NBYTES, Manifest, decode, encode, is_manifest_key, manifest_key
from ..types import StopToken

_KEYS_A_TURN = 1 << 14
"""Listed names looked through in one turn of the loop, some 10 ms."""


async def list_namespaces(store: Store) -> list[str] | None:
    """Return the digests of the namespaces in ``store``, in order of name; None: it cannot tell.

    A store that can only list its keys is asked for those, and has the namespaces whose manifests are there.
    Raises: what the store raises.
    """
    if isinstance(store, SupportsNamespaces):
        return sorted({digest for digest in await store.list_namespaces() if digest})
    if not isinstance(store, SupportsListing):
        return None
    counts = await count_objects(await store.list_keys(), manifests=True)
    return sorted(digest for digest in counts if digest)


async def count_objects(keys: Sequence[str], *, manifests: bool = False) -> Counter[str]:
    """Return how many of ``keys`` are pages of each namespace; "" stands for what is in none.

    Args:
        keys: in no particular order; looked through in turns, since there may be millions.
        manifests: count manifests instead of pages.
    """
    counts: Counter[str] = Counter()
    for start in range(0, len(keys), _KEYS_A_TURN):
        for key in keys[start : start + _KEYS_A_TURN]:
            if is_manifest_key(key) is manifests:
                counts[namespace_of(key)] += 1
        await asyncio.sleep(0)
    return counts


async def read_manifests(store: Store, digests: Iterable[str]) -> dict[str, Manifest]:
    """Return the manifests of ``digests`` that are there and can be believed, in that order.

    Raises: what the store raises. Cost: 4 KiB for each, in one call of the store where all are there.
    """
    wanted = list(digests)
    found: dict[str, Manifest] = {}
    while wanted:
        buffers = [bytearray(MANIFEST_NBYTES) for _ in wanted]
        keys = [manifest_key(digest) for digest in wanted]
        count = await store.read(keys, [memoryview(buffer) for buffer in buffers], StopToken())
        count = min(max(0, count), len(wanted))
        for digest, data in zip(wanted[:count], buffers, strict=False):
            manifest = decode(digest, data)
            if manifest is not None:
                found[digest] = manifest
        wanted = wanted[count + 1 :]  # the first that was not read is not to be had
    return found


async def write_manifest(store: Store, namespace: Namespace) -> bool:
    """Write the manifest of ``namespace`` unless it is there; returns whether it is there now.

    Raises: ConfigError: its fields are too long; what the store raises.
    """
    page = memoryview(encode(namespace))
    return await store.write([manifest_key(namespace.digest)], [page]) == 1
