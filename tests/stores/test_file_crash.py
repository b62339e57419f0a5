"""FileStore with limits whose writers are killed: whatever the moment, what is found is whole and within them."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from hicache_async.stores import FileStore
from tests.stores.capacity import Shelf, opened, start
from tests.stores.pages import files_below, read, write

pytestmark = pytest.mark.asyncio

LIMIT = 4 << 20
SIZES = [1, 5000, 65536, 200_000]

WRITER = """
import asyncio, itertools
from hicache_async.stores import FileStore
from tests.stores.pages import write

async def main():
    dice, durability = random.Random(args[0]), args[1]
    store = FileStore(root, num_lanes=2, max_bytes=int(args[2]), durability=durability)
    for turn in itertools.count():
        nbytes = dice.choice(eval(args[3]))
        await asyncio.gather(*(
            write(store, *(f"{nbytes}-{dice.randrange(300)}" for _ in range(4)), nbytes=nbytes) for _ in range(3)
        ))
        print(turn, flush=True)

asyncio.run(main())
"""


async def read_all(store: FileStore) -> int:
    """Read every object that is listed; each is right, or a miss that is counted. Returns how many there are."""
    keys, misses = await store.list_keys(), 0
    for key in keys:
        misses += 1 - await read(store, key, nbytes=int(key.partition("-")[0]))
    assert sum(store.stats.values()) == misses
    return len(keys)


def write_and_kill(root: Path, number: int, durability: str, dice: random.Random) -> None:
    """Let a process write for a while, and kill it somewhere in the middle."""
    with start(WRITER, root, number, durability, LIMIT, SIZES) as writer:
        assert writer.stdout
        for _ in range(dice.randrange(1, 12)):
            assert writer.stdout.readline()
        time.sleep(dice.uniform(0, 0.02))  # any moment will do: nothing waits for this
        writer.kill()
        writer.communicate()


async def kill_and_reopen(root: Path, durability: str, num_kills: int) -> None:
    dice, shelf, most = random.Random(durability), Shelf(root), 0
    for number in range(num_kills):
        write_and_kill(root, number, durability, dice)
        most = max(most, shelf.nbytes())
        assert most <= LIMIT, "at the moment of the kill, with what was under construction"
        store = FileStore(root, num_lanes=2, max_bytes=LIMIT, durability=durability, existence_ttl_s=0)
        assert await read_all(store) > 0
        assert files_below(root, "temp") == []
        assert await write(store, f"5000-again{number}", nbytes=5000) == 1
        quota = shelf.quota(max_bytes=LIMIT)
        with opened(quota):
            assert quota.usage() == (shelf.nbytes(), 0)
        assert shelf.nbytes() <= LIMIT
        await store.aclose()
    if num_kills > 5:
        assert most > LIMIT // 2, "the limit was never near"


@pytest.mark.parametrize("durability", ["none", "batch"])
async def test_a_killed_writer_leaves_limits_and_books_right(tmp_path: Path, durability: str) -> None:
    """After SIGKILL what is listed is whole, within the limit and on the books, and no other file is left."""
    await kill_and_reopen(tmp_path, durability, 2)


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("durability", ["none", "batch"])
async def test_fifty_killed_writers_leave_limits_and_books_right(tmp_path: Path, durability: str) -> None:
    """After each of 50 SIGKILLs at random moments nothing is torn, lost from the books, or beyond the limit."""
    await kill_and_reopen(tmp_path, durability, 50)


async def keep_writing(root: Path, num_kills: int) -> None:
    dice, shelf = random.Random(7), Shelf(root)
    store = FileStore(root, num_lanes=2, max_bytes=LIMIT, existence_ttl_s=0)
    for number in range(num_kills):
        with start(WRITER, root, number, "none", LIMIT, SIZES) as writer:
            assert writer.stdout
            assert writer.stdout.readline()
            for turn in range(dice.randrange(1, 8)):
                assert await write(store, f"65536-{number}-{turn}", nbytes=65536) == 1
            writer.kill()
            writer.communicate()
    assert shelf.nbytes() <= LIMIT
    await read_all(store)
    quota = shelf.quota(max_bytes=LIMIT)
    with opened(quota):
        assert sum(quota.usage()) >= shelf.nbytes()
        assert quota.trim() == 0
        assert quota.usage() == (shelf.nbytes(), 0)
    assert files_below(root, "temp") == []
    await store.aclose()


async def test_a_survivor_keeps_to_the_limit(tmp_path: Path) -> None:
    """While others are killed around it a store goes on writing, and finds what they had reserved."""
    await keep_writing(tmp_path, 2)


@pytest.mark.stress
@pytest.mark.timeout(1200)
async def test_a_survivor_keeps_to_the_limit_for_long(tmp_path: Path) -> None:
    """However many are killed around it a store goes on writing, and finds what they had reserved."""
    await keep_writing(tmp_path, 30)
