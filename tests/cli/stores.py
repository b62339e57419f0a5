"""What the tests of the command share: stores to look after, and running the command."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from hicache_async import CacheConfig, open_store, register_store
from hicache_async.abc import Store
from hicache_async.cli._config import TensorShape
from hicache_async.core.keys import KeyNames, key_names, namespace_of
from hicache_async.stores.catalog import write_manifest
from hicache_async.stores.memory import MemoryStore
from hicache_async.types import ObjectStat, StopToken

PAGE_NBYTES = 512
CONFIG = """\
model_id = "llama"
page_size = {page_size}

[kv]
num_layers = 2
kv_heads = 8
head_dim = 128
dtype = "bfloat16"
"""


class PlainStore:
    """A store of four methods, the same for all who open one URL."""

    _by_url: dict[str, MemoryStore] = {}  # noqa: RUF012 - shared on purpose, as a server would be

    def __init__(self, inner: MemoryStore) -> None:
        self.inner = inner

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        return cls(cls._by_url.setdefault(url.partition(":")[2], MemoryStore()))

    async def count_prefix(self, keys: Sequence[str]) -> int:
        return await self.inner.count_prefix(keys)

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        return await self.inner.read(keys, into, stop)

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        return await self.inner.write(keys, pages)

    async def aclose(self) -> None:
        return None


class NamingStore(PlainStore):
    """One that knows its namespaces and cannot list its keys."""

    async def list_namespaces(self) -> Sequence[str]:
        return sorted({namespace_of(key) for key in self.inner._objects} - {""})


class FullStore(NamingStore):
    """One that can do everything."""

    stats: Mapping[str, int] = {"max_bytes": 1000}

    async def list_keys(self) -> Sequence[str]:
        return tuple(self.inner._objects)

    async def delete(self, keys: Sequence[str]) -> int:
        return await self.inner.delete(keys)

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        objects = self.inner._objects
        return [ObjectStat(len(objects[key]), 1e9) if key in objects else None for key in keys]

    async def sweep(self) -> Mapping[str, int]:
        return {"temp_files": 3}


class BrokenStore(FullStore):
    """One whose server is gone."""

    async def list_keys(self) -> Sequence[str]:
        raise RuntimeError("the server is gone")


class SmallStore(FullStore):
    """One that takes three objects."""

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        room = max(0, 3 - len(self.inner._objects))
        return await self.inner.write(keys[:room], pages[:room])


for scheme, kind in {
    "plain": PlainStore, "naming": NamingStore, "full": FullStore, "broken": BrokenStore, "small": SmallStore,
}.items():  # fmt: skip
    register_store(scheme, f"tests.cli.stores:{kind.__name__}")


def names(page_size: int = 64, codec: str = "raw", **options: object) -> KeyNames:
    """Return how a cache names its objects whose config is CONFIG, but for ``options``."""
    config = CacheConfig.from_mapping({"model_id": "llama", "page_size": page_size, **options})
    shape = TensorShape(2, page_size, "bfloat16", 8, (128, 128), is_mla=False)
    return key_names(config, shape, codec=codec)


def keys_of(found: KeyNames, num_pages: int) -> list[str]:
    """Return the names of the first pages of a prompt."""
    return found.keys([hashlib.sha256(b"%d" % page).digest() for page in range(num_pages)])


def fill(url: str, *contents: tuple[KeyNames, int], manifests: bool = True) -> None:
    """Store pages of some namespaces, and what is written down of them."""

    async def write() -> None:
        store = open_store(url)
        for found, num_pages in contents:
            pages = [memoryview(bytes([page % 256]) * PAGE_NBYTES) for page in range(num_pages)]
            assert await store.write(keys_of(found, num_pages), pages) == num_pages
            if manifests:
                assert await write_manifest(store, found.namespace)
        await store.aclose()

    asyncio.run(write())


def listed(url: str) -> set[str]:
    """Return the keys of a store."""

    async def look() -> set[str]:
        store: Store = open_store(url)
        found = set(await store.list_keys())  # type: ignore[attr-defined]
        await store.aclose()
        return found

    return asyncio.run(look())


def path_of(root: Path, key: str) -> Path:
    """Return the file of an object of a file store."""
    (path,) = [
        path for path in root.rglob("*") if path.name.startswith(key[:64]) and namespace_of(key) in str(path)
    ]
    return path


def command(*arguments: str, cwd: Path | None = None) -> list[str]:
    """Return how to run the command in a process of its own."""
    return [sys.executable, "-W", "error", "-m", "hicache_async.cli", *arguments]


def environment() -> dict[str, str]:
    """Return what such a process needs to find the library."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run(*arguments: str, cwd: Path | None = None, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, with a pipe for each stream."""
    return subprocess.run(
        command(*arguments),
        input=text,
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
    )
