"""A process is killed while it backs up; another one opens what it left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hicache_async import HiCache, StopToken
from hicache_async.stores import FileStore
from hicache_async.testing.golden import check_object
from tests.e2e.kill_writer import PAGES_EACH, make_big_kv, prompt_of
from tests.flows.stores import page_keys
from tests.toy_engine import PAGE_SIZE, open_cache, page_hashes, serve

ROOT = Path(__file__).parents[2]


def write_and_kill(directory: Path, num_prompts: int, delay_s: float) -> int:
    """Let a process write ``num_prompts`` and a moment longer; returns how many it has done."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.kill_writer", str(directory)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    for _ in range(num_prompts):
        assert writer.stdout.readline()
    time.sleep(delay_s)  # any moment will do: nothing waits for this
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read().splitlines()
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL
    return num_prompts + len(rest)


async def check_objects(directory: Path) -> int:
    """Read every object, golden byte by golden byte; returns how many there are."""
    kv = make_big_kv()
    store = FileStore(directory)
    keys = await page_keys(store)
    for key in keys:
        payload = bytearray(kv.page_nbytes)
        assert await store.read([key], [memoryview(payload)], StopToken()) == 1, f"{key} is not whole"
        check_object(kv, bytes(payload), bytes.fromhex(key.partition("_")[0]))
    await store.aclose()
    return len(keys)


async def stored_pages(cache: HiCache, number: int) -> int:
    """Return how many pages of a prompt are stored, from the first on."""
    ctx = cache._ctx
    assert ctx.store is not None
    return await ctx.store.count_prefix(ctx.keys.keys(page_hashes(prompt_of(number))))


async def reopen(directory: Path, num_prompts: int) -> None:
    """Serve every prompt again, and the one that was cut off: what is stored is found, all of it is right."""
    async with open_cache(kv=make_big_kv(), store=f"file://{directory}") as cache:
        for number in range(num_prompts + 1):
            found = await stored_pages(cache, number)
            books = await serve(cache, f"again {number}", prompt_of(number))  # checks each page it finds
            assert books.store == found * PAGE_SIZE
        await cache.admin.flush()
        assert [await stored_pages(cache, number) for number in range(num_prompts + 1)] == [PAGES_EACH] * (
            num_prompts + 1
        )


def kill_and_reopen(directory: Path, seed: int) -> None:
    chance = random.Random(seed)
    num_prompts = write_and_kill(directory, chance.randint(1, 12), chance.uniform(0, 0.05))
    assert list((directory / "v2" / "temp").iterdir()) != []
    num_objects = asyncio.run(check_objects(directory))
    assert num_objects >= PAGES_EACH
    assert list((directory / "v2" / "temp").iterdir()) == []
    asyncio.run(reopen(directory, num_prompts))
    assert asyncio.run(check_objects(directory)) == (num_prompts + 1) * PAGES_EACH


def test_a_kill_in_mid_backup_leaves_whole_objects_only(tmp_path: Path) -> None:
    """After a SIGKILL every object is whole, no temporary file is left, and every answer is the same."""
    kill_and_reopen(tmp_path, 0)


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    """Whenever the kill comes, nothing but whole objects is found afterwards."""
    kill_and_reopen(tmp_path, seed)
