"""Random damage to the files of objects: never a wrong byte, never an exception, and a new write heals."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_async.stores import FileStore
from hicache_async.types import StopToken
from tests.stores.pages import page_of, read, write
from tests.stores.test_file_damage import path_of

HEAD_NBYTES = 4096
KEYS = [f"{number:064x}_ukv1-0123456789abcdef_model_0_1" for number in range(12)]
SIZES = (1, 1000, 4096, 10_000)


def flip(draw: random.Random, path: Path, other: Path) -> None:
    """Flip 1 to 8 bits, in the head as often as in the payload."""
    data = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 8)):
        end = min(200, len(data)) if draw.random() < 0.5 else len(data)
        data[draw.randrange(end)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut(draw: random.Random, path: Path, other: Path) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def extend(draw: random.Random, path: Path, other: Path) -> None:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.choice((1, 7, 4096, 9000))))


def swap(draw: random.Random, path: Path, other: Path) -> None:
    """Exchange two whole files."""
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def swap_payloads(draw: random.Random, path: Path, other: Path) -> None:
    """Exchange what stands behind the heads."""
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(one[:HEAD_NBYTES] + two[HEAD_NBYTES:])
    other.write_bytes(two[:HEAD_NBYTES] + one[HEAD_NBYTES:])


def replace_head(draw: random.Random, path: Path, other: Path) -> None:
    """Write another head, of noise, zeros or another object, in whole or in part."""
    data = path.read_bytes()
    head = draw.choice((draw.randbytes(HEAD_NBYTES), bytes(HEAD_NBYTES), other.read_bytes()[:HEAD_NBYTES]))
    num_kept = draw.choice((0, 0, 8, 16, 60, 2000))
    path.write_bytes(data[:num_kept] + head[num_kept:] + data[HEAD_NBYTES:])


def scatter(draw: random.Random, path: Path, other: Path) -> None:
    """Write a piece of noise or zeros anywhere, beyond the end too."""
    piece = draw.choice((draw.randbytes, bytes))(draw.randint(1, 600))
    with path.open("r+b") as file:
        file.seek(draw.randrange(path.stat().st_size + 50))
        file.write(piece)


DAMAGES: tuple[Callable[[random.Random, Path, Path], None], ...] = (
    flip, cut, extend, swap, swap_payloads, replace_head, scatter,
)  # fmt: skip


async def _damage_and_read(store: FileStore, seed: int, num_rounds: int) -> int:
    draw = random.Random(seed)
    num_changed = 0
    nbytes = draw.choice(SIZES)
    for _ in range(num_rounds):
        assert await write(store, *KEYS, nbytes=nbytes) == len(KEYS)
        good = {key: path_of(store, key).read_bytes() for key in KEYS}
        one, two = draw.sample(KEYS, 2)
        draw.choice(DAMAGES)(draw, path_of(store, one), path_of(store, two))
        whole = {key for key in KEYS if path_of(store, key).read_bytes() == good[key]}
        num_changed += len(KEYS) - len(whole)
        first_bad = next((index for index, key in enumerate(KEYS) if key not in whole), len(KEYS))

        assert await read(store, *KEYS, nbytes=nbytes) == first_bad
        for key in KEYS:
            assert await read(store, key, nbytes=nbytes) == (key in whole)
            assert await store.count_prefix([key]) == (key in whole)
    return num_changed


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(4))
async def test_damaged_files_are_misses(tmp_path: Path, seed: int) -> None:
    """Exactly the files that were changed are misses, and a later write makes them good again."""
    store = FileStore(tmp_path / "store")
    assert await _damage_and_read(store, seed, 40) > 30
    await store.aclose()


@pytest.mark.stress
@pytest.mark.asyncio
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 110))
async def test_damaged_files_are_misses_for_long(tmp_path: Path, seed: int) -> None:
    """The same, 1,000 times for each of 10 seeds."""
    store = FileStore(tmp_path / "store")
    assert await _damage_and_read(store, seed, 1000) > 900
    await store.aclose()


@pytest.mark.asyncio
async def test_the_store_is_what_finds_the_damage(tmp_path: Path) -> None:
    """Without damage every read is whole, and nothing is counted as missed."""
    store = FileStore(tmp_path / "store")
    await write(store, *KEYS)
    into = [memoryview(bytearray(len(page_of(KEYS[0])))) for _ in KEYS]
    assert await store.read(KEYS, into, StopToken()) == len(KEYS)
    assert not +store.stats
    await store.aclose()
