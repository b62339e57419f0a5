"""Several processes on one segment: racing on keys, and killed at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
from pathlib import Path

import pytest

from hicache_async.stores._slots.store import SlotStore
from tests.stores.pages import read, write
from tests.stores.slot_programs import (
    KINDS,
    NUM_SLOTS,
    check_accounts,
    finish,
    hear,
    index_of,
    open_slots,
    start,
    tell,
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of store."""
    return str(request.param)


RACE = """
async def main():
    store = open_slots(kind, directory)
    await store.count_prefix(["a"])
    print("ready", flush=True)
    sys.stdin.readline()
    for turn in range(number):
        shared = [f"shared-{turn}-{page}" for page in range(4)]
        own = [f"{os.getpid()}-{turn}-{page}" for page in range(4)]
        keys = [key for pair in zip(shared, own) for key in pair]
        assert await write(store, *keys, nbytes=5000) == 8, store.stats
        await read(store, *keys, nbytes=5000)
        assert await store.count_prefix(keys) <= 8
    # Of others' needs a page may have been evicted, or replaced while it was read; nothing else may happen.
    assert set(store.stats) <= {"missing", "replaced", "evicted"}, store.stats
    await store.aclose()

asyncio.run(main())
"""


async def race(kind: str, directory: Path, num_racers: int, rounds: int) -> None:
    with contextlib.ExitStack() as stack:
        racers = [stack.enter_context(start(RACE, kind, directory, rounds)) for _ in range(num_racers)]
        for racer in racers:
            await asyncio.to_thread(hear, racer, "ready")
        for racer in racers:
            tell(racer)
        for racer in racers:
            await asyncio.to_thread(finish, racer)
    store = open_slots(kind, directory)
    keys = await store.list_keys()
    # Slots that the last of several writers of one key took for it are free again.
    assert NUM_SLOTS - 4 * (num_racers - 1) <= len(keys) <= NUM_SLOTS
    for key in keys:
        assert await read(store, key, nbytes=5000) == 1
    assert not store.stats
    await check_accounts(store)
    await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("num_racers", [2, 4])
async def test_processes_write_the_same_and_other_keys(kind: str, tmp_path: Path, num_racers: int) -> None:
    """Racing for keys and slots no write fails, every byte read is right, and no slot is lost or doubled."""
    await race(kind, tmp_path, num_racers, 40)


@pytest.mark.asyncio
@pytest.mark.stress
async def test_processes_write_the_same_and_other_keys_for_long(kind: str, tmp_path: Path) -> None:
    """However long four processes race, no write fails, every byte is right, and no slot is lost."""
    await race(kind, tmp_path, 4, 1000)


# -- killed at random

KILLED = """
async def write_for_ever(seed):
    dice = random.Random(seed)
    store = open_slots(kind, directory)
    while True:
        keys = [f"key{dice.randrange(60)}" for _ in range(6)]
        await write(store, *keys, nbytes=8192)
        await read(store, *keys, nbytes=8192)

dice = random.Random(number)
for turn in range(number):
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(write_for_ever(turn))
        finally:
            os._exit(1)
    time.sleep(dice.uniform(0.005, 0.05))  # any moment will do: nothing waits for this
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL  # not by an error of its own
print("over", flush=True)
"""


async def work(store: SlotStore, killer: subprocess.Popen[str]) -> int:
    """Read and write beside the ones that are killed until the last is; returns how many calls that were."""
    dice = random.Random(3)
    num_calls = 0
    while killer.poll() is None:
        keys = [f"key{dice.randrange(60)}" for _ in range(6)]
        assert await write(store, *keys, nbytes=8192) == 6, store.stats
        await read(store, *keys, nbytes=8192)
        await store.count_prefix(keys)
        num_calls += 3
    return num_calls


async def kill(kind: str, directory: Path, rounds: int) -> None:
    store = open_slots(kind, directory)
    await write(store, "key0", nbytes=8192)
    with start(KILLED, kind, directory, rounds) as killer:
        num_calls = await work(store, killer)
        assert finish(killer) == "over\n"
    assert num_calls > rounds
    await check_accounts(store)
    for key in await store.list_keys():
        assert await read(store, key, nbytes=8192) == 1
    assert not {"checksum", "size", "taken", "no_room", "unreadable"} & set(store.stats), store.stats
    later = open_slots(kind, directory)
    assert set(await later.list_keys()) == set(await store.list_keys())
    await check_accounts(later)
    for opened in (store, later):
        await opened.aclose()


@pytest.mark.asyncio
async def test_twenty_kills(kind: str, tmp_path: Path) -> None:
    """Killed at any moment a writer leaves no wrong byte, no lock and no lost slot to those that go on."""
    await kill(kind, tmp_path, 20)


@pytest.mark.asyncio
@pytest.mark.stress
@pytest.mark.timeout(300)
async def test_a_hundred_kills(kind: str, tmp_path: Path) -> None:
    """However often writers are killed, no wrong byte, no lock and no lost slot is left."""
    await kill(kind, tmp_path, 100)


# -- killed at chosen moments

KILLED_COPYING = """
put = Segment.put

def pause(segment, slot, payload, at=0):
    put(segment, slot, payload[:100], at)
    print("copying", flush=True)
    time.sleep(60)

Segment.put = pause
asyncio.run(write(open_slots(kind, directory), "c", "d", "e", nbytes=8000))
"""


@pytest.mark.asyncio
async def test_the_slots_of_a_dead_writer_come_back(kind: str, tmp_path: Path) -> None:
    """Slots being written are not taken from a live process; from a dead one by whoever needs room."""
    store = open_slots(kind, tmp_path)
    await write(store, "a", "b")
    with start(KILLED_COPYING, kind, tmp_path) as writer:
        await asyncio.to_thread(hear, writer, "copying")
        await check_accounts(store, writing=3)
        keys = [f"key{number}" for number in range(NUM_SLOTS)]
        assert await write(store, *keys) == NUM_SLOTS - 3
        assert len(index_of(store).writing) == 3
        writer.kill()
    assert await write(store, *keys) == NUM_SLOTS
    assert store.stats["abandoned"] == 3
    assert await read(store, *keys) == NUM_SLOTS
    await check_accounts(store)
    await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["sweep", "open"])
async def test_a_sweep_and_an_open_free_the_slots_of_the_dead(kind: str, tmp_path: Path, how: str) -> None:
    """Both look through the table for slots of writers that have died; the sweep says how many."""
    store = open_slots(kind, tmp_path)
    await write(store, "a", "b")
    with start(KILLED_COPYING, kind, tmp_path) as writer:
        await asyncio.to_thread(hear, writer, "copying")
        writer.kill()
    if how == "sweep":
        assert await store.sweep() == {"abandoned": 3, "damaged": 0}
    else:
        later = open_slots(kind, tmp_path)
        assert await later.count_prefix(["a", "b", "c"]) == 2
        assert not index_of(later).writing
        await later.aclose()
    assert await read(store, "a", "b") == 2
    await check_accounts(store)
    await store.aclose()


KILLED_INSIDE = """
set_record = SlotTable.set_record

def pause(table, slot, record):
    set_record(table, slot, record[:200].ljust(512))
    print("inside", flush=True)
    time.sleep(60)

store = open_slots(kind, directory)
assert asyncio.run(store.count_prefix(["a"])) == 1
SlotTable.set_record = pause
asyncio.run(write(open_slots(kind, directory), "c", "d", "e"))
"""


@pytest.mark.asyncio
async def test_a_kill_inside_the_lock_holds_nobody_up(kind: str, tmp_path: Path) -> None:
    """While a process changes the table others read; when it dies in it they write, and nothing is lost."""
    store = open_slots(kind, tmp_path)
    await write(store, "a", "b")
    with start(KILLED_INSIDE, kind, tmp_path) as writer:
        await asyncio.to_thread(hear, writer, "inside")
        writing = asyncio.create_task(write(store, "c", "d"))
        assert await read(store, "a", "b") == 2
        assert await store.count_prefix(["a", "b", "c"]) == 2
        assert not writing.done()
        writer.kill()
        assert await writing == 2
    assert await read(store, "a", "b", "c", "d") == 4
    await check_accounts(store)
    await store.aclose()
