"""Isolation: no cache, request or process ever finds pages that were computed under another name."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from hicache_async import DeviceKV, Stop, Tier
from hicache_async.core.tokens import token_bytes
from hicache_async.stores.file import FileStore
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HeldStore
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, page_tokens, tokens, turns
from tests.flows.stores import page_keys
from tests.flows.test_mla import latent_kv, serve

pytestmark = pytest.mark.asyncio

World = tuple[bytes, str | None]
"""A salt and an adapter."""

WORLDS: list[World] = [
    (b"", None), (b"", ""), (b"X", None), (b"X", ""), (b"", "X"), (b"X", "X"), (b"XX", None), (b"", "XX"),
    (b"a", "bc"), (b"ab", "c"), (b"abc", None), (b"", "abc"), (b"a:b", None), (b"a", ":b"), (b"\0", None),
    (b"", "\0"), (b"\0\0", ""), ("ü".encode(), None), (b"", "ü"),
]  # fmt: skip

GOLDEN_NAMES = [
    page_hash + "_ukv1-5d085df0fbd88616_org%2fmodel_0_1"
    for page_hash in (
        "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe",
        "01414b052706d93bd0f1f1646c0e8ca2fa8ef5efd7bcc99f7a1cee8eb11ad052",
        "9a9a1c452063dfcdae88db2c9ab8101243f0ae4a0f081da802d7c296fea290a3",
        "f8d0c0160f77dd43866a778e43740b3c858f6b46f8aa1d343164b3889f1ae1d0",
    )
]
"""Of two pages, plainly and with a salt."""


# Salt and adapter


async def test_salt_and_adapter_isolate_every_tier(open_cache: Opener, tmp_path: Path) -> None:
    """Equal tokens are found on device, host and in the store, also by a new process, under equal names only."""
    store = FileStore(tmp_path)
    rig = await open_cache(store=store, device_pages=48, host_pages=64)
    for salt, adapter in WORLDS:
        books = await serve(rig, "ab", (salt, adapter), salt=salt, adapter=adapter)
        assert books.computed == 9, f"{(salt, adapter)} found the pages of another name"
    names = set(await page_keys(store))
    assert len(names) == 2 * len(WORLDS)
    first, second = (token_bytes(page_tokens(letter)) for letter in "ab")
    plain = [sha256(first), sha256(sha256(first).digest() + second)]
    assert {page_hash.hexdigest() + rig.ctx.keys.suffix for page_hash in plain} < names

    async def found(rig: Rig, tier: str) -> None:
        for salt, adapter in WORLDS:
            books = await serve(rig, "ab", (salt, adapter), salt=salt, adapter=adapter)
            assert getattr(books, tier) == 8, (salt, adapter, books)

    await found(rig, "device")
    await rig.cache.admin.clear(Tier.DEVICE)
    await found(rig, "host")
    await rig.cache.close()
    await store.aclose()
    store = FileStore(tmp_path)
    again = await open_cache(store=store, device_pages=48, host_pages=64)
    await found(again, "store")
    assert len(set(await page_keys(store))) == 2 * len(WORLDS)
    await again.cache.close()
    await store.aclose()


@pytest.mark.parametrize(("salt", "adapter"), [(b"xy", None), (b"x", "y"), (b"abc", "abc"), (b"", "lora-1")])
async def test_no_page_of_tokens_stands_for_a_salt(
    open_cache: Opener, salt: bytes, adapter: str | None
) -> None:
    """A plain prompt whose first page spells out a salt and an adapter shares no page with the prompts of these."""
    name = (adapter or "").encode()
    parts = struct.pack("<cQ", b"s", len(salt)) + salt
    parts += struct.pack("<cQ", b"-" if adapter is None else b"a", len(name)) + name
    spelt = list(struct.unpack(f"<{len(parts) // 4}I", parts))
    options = {"page_size": len(spelt), "store": MemoryStore()}
    plain, tenant = [
        await open_cache(kv=heads(torch.float32, page_size=len(spelt)), **options) for _ in range(2)
    ]
    said = list(range(3 * len(spelt) + 1))
    await serve(plain, [*spelt, *said], "plain")
    assert (await serve(tenant, said, "tenant", salt=salt, adapter=adapter)).store == 0


async def test_equal_tokens_of_two_tenants_share_no_read(open_cache: Opener) -> None:
    """Prefetches of two salts at once read what each has stored, and one that is stopped does not end the other."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store)
    salts = [b"one", b"two", b"never stored"]
    for salt in salts[:2]:
        await serve(rig, "ab", salt, salt=salt)
    for tier in (Tier.DEVICE, Tier.HOST):
        await rig.cache.admin.clear(tier)
    leases = [rig.cache.match_prefix(str(salt), tokens("ab"), salt=salt) for salt in salts]
    prefetches = [lease.start_prefetch() for lease in leases]
    await store.arrived(2)
    assert len(rig.ctx.fetches) == 2
    prefetches[0].stop()
    store.open()
    results = [await prefetch.settled() for prefetch in prefetches[1:]]
    assert [(result.fetched_tokens, result.stop) for result in results] == [
        (8, Stop.COMPLETE), (0, Stop.NOT_STORED),
    ]  # fmt: skip
    for lease in leases:
        lease.release()
    stopped, brought = [await serve(rig, "ab", salt, salt=salt) for salt in salts[:2]]
    assert (stopped.store, brought.host) == (8, 8)


async def test_equal_cold_prompts_of_two_tenants_do_not_wait_for_each_other(open_cache: Opener) -> None:
    """What one tenant has announced is nothing to the other: both compute, and neither can tell."""
    rig = await open_cache()
    with rig.cache.match_prefix("one", tokens("ab"), salt=b"one") as one:
        await one.load()
        with rig.cache.match_prefix("two", tokens("ab"), salt=b"two") as two:
            assert two.pending_tokens == 0
            loading = asyncio.create_task(two.load())
            await turns()
            assert (await loading).tokens == 0
        with rig.cache.match_prefix("another", tokens("ab"), salt=b"one") as another:
            assert another.pending_tokens == 8


# Whose pages they are


def heads(
    dtype: torch.dtype,
    *,
    page_size: int = PAGE_TOKENS,
    num_layers: int = 2,
    num_heads: int = 2,
    dims: tuple[int, int] = (8, 8),
) -> DeviceKV:
    """Return the tensors of a model with heads whose K and V have ``dims`` numbers a token."""
    k, v = (
        [torch.zeros((32, page_size, num_heads, dim), dtype=dtype) for _ in range(num_layers)] for dim in dims
    )
    return DeviceKV.from_layers(k, v)


@dataclass(frozen=True)
class Owner:
    """One kind of cache over the shared directory."""

    make_kv: Callable[[], DeviceKV] = lambda: heads(torch.bfloat16)
    options: dict[str, object] = field(default_factory=dict)


OWNERS = {
    "plain": Owner(),
    "fp16": Owner(lambda: heads(torch.float16)),
    "fp8 e4m3": Owner(lambda: heads(torch.float8_e4m3fn)),
    "fp8 e5m2": Owner(lambda: heads(torch.float8_e5m2)),
    "uint8": Owner(lambda: heads(torch.uint8)),
    "model": Owner(options={"model_id": "org/model"}),
    "model with a dash": Owner(options={"model_id": "org-model"}),
    "fingerprint": Owner(options={"fingerprint": "v2"}),
    "page size": Owner(lambda: heads(torch.bfloat16, page_size=8), {"page_size": 8}),
    "layout": Owner(options={"host_layout": "page_first_direct", "io_mode": "direct"}),
    "layers": Owner(lambda: heads(torch.bfloat16, num_layers=1)),
    "heads": Owner(lambda: heads(torch.bfloat16, num_heads=4)),
    "wider": Owner(lambda: heads(torch.bfloat16, dims=(16, 16))),
    "wider k": Owner(lambda: heads(torch.bfloat16, dims=(16, 8))),
    "wider v": Owner(lambda: heads(torch.bfloat16, dims=(8, 16))),
    "tp": Owner(options={"tp_size": 2, "tp_rank": 1}),
    "tp 0": Owner(options={"tp_size": 2}),
    "pp": Owner(options={"pp_size": 2, "pp_rank": 1, "first_layer": 4}),
    "cp": Owner(options={"cp_size": 2, "cp_rank": 1}),
    "mla": Owner(lambda: latent_kv(32, dtype=torch.bfloat16)),
}  # fmt: skip


async def test_caches_of_one_directory_find_their_own_pages_only(open_cache: Opener, tmp_path: Path) -> None:
    """Whatever tells two caches apart, neither finds, replaces or removes what the other one has stored."""
    prompt = list(range(25))

    async def served(name: str) -> tuple[int, int]:
        store = FileStore(tmp_path)
        owner = OWNERS[name]
        rig = await open_cache(kv=owner.make_kv(), store=store, **owner.options)
        books = await serve(rig, prompt, name)
        num_objects = len(await page_keys(store))
        await rig.cache.close()
        await store.aclose()
        return books.store, num_objects

    num_objects = 0
    for name in OWNERS:
        hit, after = await served(name)
        assert hit == 0, f"{name} has found the pages of another"
        assert after == num_objects + (3 if name == "page size" else 6), f"{name} shares a name with another"
        num_objects = after
    for name in OWNERS:
        assert await served(name) == (24, num_objects)


# Every process


CHILD = """
import asyncio, sys, torch
from hicache_async import CacheConfig, DeviceKV, HiCache

async def serve(dtype=torch.bfloat16, page_size=4, salt=b"", adapter=None, **options):
    kv = DeviceKV.from_layers(*([torch.zeros(8, page_size, 2, 8, dtype=dtype)] * 2 for _ in "kv"))
    config = CacheConfig(page_size=page_size, host_bytes=1 << 16, host_reserve_bytes=0, prefetch_threshold_tokens=0,
                         write_policy="write_through", **{"model_id": "org/model", **options})
    async with HiCache.open(config, kv=kv, store="file://" + sys.argv[1]) as cache:
        with cache.match_prefix("request", range(9), salt=salt, adapter=adapter) as lease:
            await lease.prefetch()
            await lease.load()
            lease.allocate_nowait(9)
            lease.commit(9)
            print("> found", lease.books.store)
        explained = await cache.admin.explain(range(9), salt=salt, adapter=adapter)
        print("> names", *(page.key for page in explained.pages))

async def main():
    await serve()
    await serve(salt=b"tenant-a")
    await serve(adapter="lora-1")
    await serve(torch.float8_e4m3fn)
    await serve(torch.float8_e5m2)
    await serve(model_id="org-model")
    await serve(fingerprint="v2")
    await serve(host_layout="page_first_direct", io_mode="direct")
    await serve(page_size=8)
    print("> hash", hash("a word"))

asyncio.run(main())
"""


def run_child(directory: Path, hash_seed: str) -> dict[str, list[str]]:
    """Let a process serve over ``directory`` what ``CHILD`` lists; returns what it says, by the first word."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(directory)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        text=True,
        timeout=50,
        check=True,
    )
    said: dict[str, list[str]] = {"found": [], "names": [], "hash": []}
    for line in done.stdout.splitlines():
        if line.startswith("> "):  # the rest is the log
            word, *values = line.split()[1:]
            said[word] += values
    return said


async def test_every_process_finds_the_same_names(tmp_path: Path) -> None:
    """Processes whose own hashes of strings differ find each other's pages, and no others, under names for ever."""
    first = await asyncio.to_thread(run_child, tmp_path, "1")
    others = await asyncio.gather(*(asyncio.to_thread(run_child, tmp_path, seed) for seed in ("2", "3")))
    assert len({said["hash"][0] for said in (first, *others)}) == 3, "the processes did not differ at all"
    assert first["found"] == ["0"] * 9
    assert [said["found"] for said in others] == [["8"] * 9] * 2
    assert len(set(first["names"])) == 8 * 2 + 1
    assert [said["names"] for said in others] == [first["names"]] * 2
    assert first["names"][:4] == GOLDEN_NAMES
