"""What the tests of wrappers share: each wrapper around any store, and stores that can do only some things."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence

import pytest

from hicache_async._hop import Hop, HopRegistry
from hicache_async.abc import (
    Store,
    SupportsCodec,
    SupportsDelete,
    SupportsListing,
    SupportsNamespaces,
    SupportsRefusal,
    SupportsStat,
    SupportsSweep,
)
from hicache_async.stores import GuardedStore, MemoryStore
from hicache_async.stores.codec import AesGcm, Codec, CodecStore, Fp8, Zstd
from hicache_async.stores.tiered import TieredStore
from hicache_async.testing.faults import StoreWrapper
from hicache_async.types import ObjectStat, Stop, StopToken

KEY_ENV = "HICACHE_TEST_KEY"
CODECS: Mapping[str, Callable[[], Codec]] = {
    "zstd": Zstd,
    "fp8": lambda: Fp8("bfloat16"),
    "aesgcm": lambda: AesGcm(KEY_ENV),
}
LOSSLESS = ("zstd", "aesgcm")
ALL = {
    SupportsCodec,
    SupportsDelete,
    SupportsListing,
    SupportsNamespaces,
    SupportsRefusal,
    SupportsStat,
    SupportsSweep,
}
WRAPPERS: Mapping[str, Callable[[Store], Store]] = {
    "guard": GuardedStore,
    "zstd": lambda inner: CodecStore(inner, Zstd()),
    "fp8": lambda inner: CodecStore(inner, Fp8("bfloat16")),
    "aesgcm": lambda inner: CodecStore(inner, AesGcm(KEY_ENV)),
    "tiered": lambda inner: TieredStore(MemoryStore(), inner),
}


@pytest.fixture(autouse=True)
def key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give AesGcm a key."""
    monkeypatch.setenv(KEY_ENV, os.urandom(32).hex())


def abilities(store: Store) -> set[type]:
    """Return what a store can do beside the four methods and counting."""
    return {capability for capability in ALL if isinstance(store, capability)}


class Deleting(StoreWrapper):
    """Can delete."""

    async def delete(self, keys: Sequence[str]) -> int:
        assert isinstance(self.inner, SupportsDelete)
        return await self.inner.delete(keys)


class Telling(StoreWrapper):
    """Knows sizes, from the store behind all wrappers."""

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        self.calls["stat"] += 1
        inner = self.inner
        while isinstance(inner, StoreWrapper):
            inner = inner.inner
        assert isinstance(inner, SupportsStat)
        return await inner.stat(keys)


class Sweeping(StoreWrapper):
    """Can be swept, refuses, and encodes nothing under a name."""

    codec = "plain"

    async def sweep(self) -> Mapping[str, int]:
        return {"temp_files": 3}

    def refusal(self) -> Stop | None:
        return Stop.BREAKER_OPEN

    def why_refused(self) -> str:
        return "it sweeps"


class Whole(Deleting, Telling, Sweeping):
    """Can do it all."""

    async def list_keys(self) -> Sequence[str]:
        assert isinstance(self.inner, SupportsListing)
        return await self.inner.list_keys()

    async def list_namespaces(self) -> Sequence[str]:
        return ["ukv1-0123456789abcdef"]


async def filled(store: TieredStore) -> None:
    """Return when nothing is on its way into the fast tier."""
    while tasks := [fill.task for fill in store._fills._fills if fill.task is not None]:
        await asyncio.wait(tasks)
        await asyncio.sleep(0)


class ReadCall:
    """A read as the cache makes it: its buffers are poisoned as soon as they are handed back."""

    POISON = 0xAA

    def __init__(self, store: Store, keys: Sequence[str], nbytes: int) -> None:
        self.bugs: list[BaseException] = []
        self.buffers = [bytearray(nbytes) for _ in keys]
        self.given_back = False
        self.filled: list[bytes] = []
        hops = HopRegistry(asyncio.get_running_loop(), self.bugs.append)

        async def call(stop: StopToken) -> int:
            return await store.read(keys, [memoryview(buffer) for buffer in self.buffers], stop)

        self.hop: Hop[int] = hops.start_call("read", call, self._give_back)

    def _give_back(self, hop: Hop[int]) -> None:
        self.given_back = True
        self.filled = [bytes(buffer) for buffer in self.buffers[: hop.result or 0]]
        for buffer in self.buffers:
            buffer[:] = bytes([self.POISON]) * len(buffer)

    async def over(self) -> None:
        """Return when the buffers were handed back, and check that nothing touches them some turns later."""
        await asyncio.wait([self.hop.settled])
        for _ in range(20):
            await asyncio.sleep(0)
        assert self.bugs == []
        assert all(set(buffer) <= {self.POISON} for buffer in self.buffers)

    async def tear(self) -> None:
        """Cancel its own task, which nobody but a loop that shuts down does."""
        assert self.hop.task is not None
        self.hop.task.cancel()
        await asyncio.wait([self.hop.task])
        await asyncio.sleep(0)
