"""How long a store takes that compresses or encrypts, beside the library that does it, in one thread."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast
from unittest import mock

import numpy as np

from hicache_async.stores.codec import AesGcm, Codec, CodecStore, Zstd
from hicache_async.stores.memory import MemoryStore

from .harness import Benchmark, Record, measure, timed, timed_async, undone
from .objects import ClearableStore, Objects

SIZE = 1 << 20
NUM_OBJECTS = 32
ZSTD_LEVEL = 3
KEY_ENV = "HICACHE_BENCH_KEY"

Coder = Callable[[bytes | memoryview], bytes]


@dataclass(frozen=True, slots=True)
class Plain:
    """A codec, and the same work by its library alone."""

    codec: Codec
    encode: Coder
    decode: Coder


def _zstd() -> Plain:
    import zstandard  # of the extra codecs, like cryptography below

    return Plain(
        Zstd(ZSTD_LEVEL),
        zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress,
        zstandard.ZstdDecompressor().decompress,
    )


def _aesgcm() -> Plain:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    key, nonce = secrets.token_bytes(32), bytes(12)
    cipher = AESGCM(key)
    with mock.patch.dict(os.environ, {KEY_ENV: key.hex()}):
        codec = AesGcm(KEY_ENV)
    return Plain(
        codec,
        lambda page: cipher.encrypt(nonce, page, None),
        lambda page: cipher.decrypt(nonce, page, None),
    )


PLAINS = {"zstd": _zstd, "aesgcm": _aesgcm}


@asynccontextmanager
async def workload(codec: Codec, num_objects: int) -> AsyncIterator[Objects]:
    """Make a store on top of memory, and pages of numbers like those of a model: normal, in float16."""
    store = CodecStore(MemoryStore(), codec)
    objects = Objects(cast("ClearableStore", store), SIZE, num_objects)
    rng = np.random.default_rng(0)
    for page in objects.pages:
        page[:] = rng.standard_normal(SIZE // 2, dtype=np.float32).astype(np.float16).tobytes()
    try:
        yield objects
    finally:
        await store.aclose()


async def read_records(quick: bool) -> AsyncIterator[Record]:
    """Read and decode pages by one call of the store; for each page."""
    for name, plain, num_objects, rounds in _runs(quick):
        async with workload(plain.codec, num_objects) as objects:
            await objects.write()
            frames = [plain.encode(page) for page in objects.pages]
            yield await measure(
                "codec.read",
                objects.params(codec=name),
                timed_async(objects.read, pieces=num_objects),
                timed(partial(_code, plain.decode, frames), pieces=num_objects),
                floor_name="the library",
                unit="us",
                rounds=rounds,
            )


async def write_records(quick: bool) -> AsyncIterator[Record]:
    """Encode and write pages by one call of the store; for each page."""
    for name, plain, num_objects, rounds in _runs(quick):
        async with workload(plain.codec, num_objects) as objects:
            yield await measure(
                "codec.write",
                objects.params(codec=name),
                undone(timed_async(objects.write, pieces=num_objects), objects.clear),
                timed(partial(_code, plain.encode, objects.pages), pieces=num_objects),
                floor_name="the library",
                unit="us",
                rounds=rounds,
            )


def _code(coder: Coder, pieces: Sequence[bytes | memoryview]) -> None:
    for piece in pieces:
        coder(piece)


def _runs(quick: bool) -> Iterator[tuple[str, Plain, int, int]]:
    for name, make in PLAINS.items():
        yield (name, make(), 4, 3) if quick else (name, make(), NUM_OBJECTS, 11)


BENCHMARKS = [Benchmark("codec.read", read_records), Benchmark("codec.write", write_records)]
