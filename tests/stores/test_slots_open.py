"""Opening a segment: what is there is looked at, nothing foreign is touched, a medium too small is an error."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from structlog.testing import capture_logs

from hicache_async.errors import ConfigError, StoreUnavailable
from hicache_async.stores._slots import segment as _segment
from hicache_async.stores._slots.store import SlotStore
from tests.stores.pages import read, write
from tests.stores.slot_programs import (
    KINDS,
    MAX_BYTES,
    NUM_SLOTS,
    SLOT_BYTES,
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


def path_in(directory: Path) -> Path:
    return directory / "hicache-kv"


async def make(kind: str, directory: Path) -> None:
    """Make a segment that holds "a"."""
    store = open_slots(kind, directory)
    assert await write(store, "a") == 1
    await store.aclose()


def shape(store: SlotStore) -> tuple[int, int]:
    table = index_of(store)._table
    return table.num_slots, table._segment.geometry.slot_nbytes


@pytest.mark.asyncio
async def test_a_segment_takes_what_it_was_given_and_no_more(kind: str, tmp_path: Path) -> None:
    """All of it is reserved when it is made, within max_bytes, readable by its user only."""
    await make(kind, tmp_path)
    found = path_in(tmp_path).stat()
    assert found.st_size <= MAX_BYTES
    assert found.st_blocks * 512 >= found.st_size
    assert found.st_mode & 0o777 == 0o600


@pytest.mark.asyncio
async def test_sizes_are_whole_blocks(kind: str, tmp_path: Path) -> None:
    """A slot takes whole blocks of 4096 bytes, at least one, however little is asked."""
    for slot_bytes, expected in ((1, 4096), (4097, 8192), (8192, 8192)):
        directory = tmp_path / str(slot_bytes)
        directory.mkdir()
        store = open_slots(kind, directory, slot_bytes=slot_bytes)
        await write(store, "a", nbytes=slot_bytes)
        assert shape(store)[1] == expected
        await store.aclose()


@pytest.mark.asyncio
async def test_a_segment_that_exists_gives_its_shape(kind: str, tmp_path: Path) -> None:
    """Without a shape, or with a part of it that is right, an existing segment is opened as it is."""
    await make(kind, tmp_path)
    for options in (
        {"max_bytes": None, "slot_bytes": None},
        {"max_bytes": None, "slot_bytes": SLOT_BYTES - 100},
        {"max_bytes": MAX_BYTES, "slot_bytes": None},
    ):
        store = open_slots(kind, tmp_path, **options)
        assert await read(store, "a") == 1
        assert shape(store) == (NUM_SLOTS, SLOT_BYTES)
        await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slot_bytes": 16384}, r"has 40 slots of 8192 bytes, and \d+ slots of 16384 bytes are asked for"),
        ({"slot_bytes": 16384, "max_bytes": None}, "40 slots of 16384 bytes are asked for"),
        ({"max_bytes": 2 * MAX_BYTES}, r"has 40 slots of 8192 bytes, and \d+ slots of 8192 bytes"),
    ],
)
async def test_another_shape_is_refused(
    kind: str, tmp_path: Path, options: dict[str, int | None], message: str
) -> None:
    """Asked for another shape than a segment has, opening says both and what to do."""
    await make(kind, tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        open_slots(kind, tmp_path, **options)
    assert "leave out max_bytes and slot_bytes to take it as it is, or remove" in str(caught.value)


@pytest.mark.asyncio
@pytest.mark.parametrize("options", [{"slot_bytes": 4096}, {"slot_bytes": 4096, "max_bytes": None}])
async def test_larger_slots_than_asked_for_will_do(
    kind: str, tmp_path: Path, options: dict[str, int | None]
) -> None:
    """A cache of smaller pages may use what a cache of larger ones has made."""
    await make(kind, tmp_path)
    await open_slots(kind, tmp_path, **options).aclose()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": None}, "does not exist, and to make it max_bytes must be given"),
        ({"slot_bytes": None}, "does not exist, and to make it slot_bytes must be given"),
        ({"max_bytes": 20_000}, r"max_bytes is 20000; one slot of 8192 bytes and its table take \d+"),
        ({"max_bytes": 0}, "max_bytes is 0; give a number of bytes"),
        ({"slot_bytes": -1}, "slot_bytes is -1; give a number of bytes"),
        ({"slot_bytes": 1.5}, "slot_bytes is 1.5; give a number of bytes"),
        ({"mode": 0o777}, "mode is 0o777; give 0o600, 0o660 or 0o666"),
        ({"mode": 0o440}, "mode is 0o440; give 0o600, 0o660 or 0o666"),
        ({"num_lanes": 0}, "num_lanes is 0; give an integer >= 1"),
    ],
)
def test_options_that_cannot_work(
    kind: str, tmp_path: Path, options: dict[str, int | None], message: str
) -> None:
    """Each is refused at open, saying its value and what would be right, and nothing is made."""
    with pytest.raises(ConfigError, match=message):
        open_slots(kind, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def overwrite(offset: int, data: bytes) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return act


def other_version(path: Path) -> None:
    title = _segment._TITLE.pack(b"HiCacheS", 99, _segment._MADE, SLOT_BYTES, NUM_SLOTS)
    overwrite(0, title + xxhash.xxh3_64_intdigest(title).to_bytes(8, "little"))(path)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda path: path.write_bytes(b"something of mine"),
            "is something else, beginning with b'somethin'",
        ),
        (lambda path: path.write_bytes(bytes(50_000)), "is something else, beginning with b'"),
        (overwrite(1, b"X"), "is something else"),
        (overwrite(20, b"\xff"), "is damaged in its first bytes"),
        (overwrite(33, b"\xff"), "is damaged in its first bytes"),
        (other_version, "has format 99, this is format 1"),
        (lambda path: os.truncate(path, MAX_BYTES // 2), rf"was cut to {MAX_BYTES // 2} bytes; 40 slots"),
        (lambda path: os.truncate(path, 5000), "was cut to 5000 bytes"),
        (lambda path: os.truncate(path, 20), "is something else"),
    ],
)
async def test_what_is_not_a_whole_segment_is_left_alone(
    kind: str, tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    """A foreign, damaged, cut or newer file is refused at open with what to do, and stays as it is."""
    await make(kind, tmp_path)
    path = path_in(tmp_path)
    harm(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=message) as caught:
        open_slots(kind, tmp_path)
    assert "remove" in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.asyncio
async def test_what_became_another_thing_after_the_look(kind: str, tmp_path: Path) -> None:
    """A file that was replaced between open and first use is an error of the call, and stays as it is."""
    store = open_slots(kind, tmp_path)
    path_in(tmp_path).write_bytes(b"something of mine")
    for call in (store.count_prefix(["a"]), read(store, "a"), write(store, "a"), store.list_keys()):
        with pytest.raises(ConfigError, match="is something else"):
            await call
    assert path_in(tmp_path).read_bytes() == b"something of mine"
    await store.aclose()


@pytest.mark.asyncio
async def test_an_extended_segment_is_a_segment(kind: str, tmp_path: Path) -> None:
    """Bytes behind the last slot change nothing."""
    await make(kind, tmp_path)
    with path_in(tmp_path).open("ab") as file:
        file.write(b"x" * 12345)
    store = open_slots(kind, tmp_path)
    assert await read(store, "a") == 1
    await store.aclose()


def test_a_copy_with_holes_is_filled_up(kind: str, tmp_path: Path) -> None:
    """A sparse copy of a segment gets the space that it lacks, so that no later access can fail for it."""
    asyncio.run(make(kind, tmp_path))
    path, sparse = path_in(tmp_path), tmp_path / "sparse"
    sparse.mkdir()
    subprocess.run(["cp", "--sparse=always", str(path), str(path_in(sparse))], check=True)
    assert path_in(sparse).stat().st_blocks < path.stat().st_blocks
    store = open_slots(kind, sparse)

    async def use() -> None:
        assert await read(store, "a") == 1
        await store.aclose()

    asyncio.run(use())
    assert path_in(sparse).stat().st_blocks >= path.stat().st_blocks


@pytest.mark.asyncio
async def test_a_directory_or_a_fifo_of_that_name(kind: str, tmp_path: Path) -> None:
    """Neither hangs nor harms: every call says what is wrong."""
    path_in(tmp_path).mkdir()
    store = open_slots(kind, tmp_path)
    with capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="Is a directory"):
                await store.count_prefix(["a"])
    assert [line["event"] for line in logs] == ["store.unwritable"]
    await store.aclose()
    path_in(tmp_path).rmdir()
    os.mkfifo(path_in(tmp_path))
    with pytest.raises(ConfigError, match="not a file"):
        open_slots(kind, tmp_path)


@pytest.mark.asyncio
async def test_a_directory_that_is_absent(kind: str, tmp_path: Path) -> None:
    """Calls fail until it is there, and no longer."""
    directory = tmp_path / "later"
    store = open_slots(kind, directory)
    with pytest.raises(StoreUnavailable, match="No such file"):
        await write(store, "a")
    directory.mkdir()
    assert await write(store, "a") == 1
    await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("state", ["empty", "begun"])
async def test_a_segment_whose_maker_died_is_made_again(kind: str, tmp_path: Path, state: str) -> None:
    """An empty file, and one that says it is being made while nobody holds it, become a segment."""
    path = path_in(tmp_path)
    path.touch()
    if state == "begun":
        fd = os.open(path, os.O_RDWR)
        _segment._write_title(fd, _segment._MAKING, _segment.Geometry(4096, 3))
        os.ftruncate(fd, 9999)
        os.close(fd)
    store = open_slots(kind, tmp_path)
    assert await write(store, "a") == 1
    assert shape(store) == (NUM_SLOTS, SLOT_BYTES)
    await check_accounts(store)
    await store.aclose()


@pytest.mark.asyncio
async def test_a_segment_removed_under_the_store_goes_on(kind: str, tmp_path: Path) -> None:
    """Who has it open keeps it; who opens then gets a new one."""
    store = open_slots(kind, tmp_path)
    await write(store, "a")
    path_in(tmp_path).unlink()
    later = open_slots(kind, tmp_path)
    assert await later.count_prefix(["a"]) == 0
    assert await write(later, "b") == 1
    assert await write(store, "c") == 1
    assert await read(store, "a", "c") == 2
    assert await store.count_prefix(["b"]) == 0
    for opened in (store, later):
        await check_accounts(opened)
        await opened.aclose()


OPENER = """
async def main():
    store = open_slots(kind, directory)
    print("ready", flush=True)
    sys.stdin.readline()
    assert await write(store, f"key{number}") == 1
    print("written", flush=True)
    sys.stdin.readline()
    assert await read(store, "key0", "key1", "key2", "key3") == 4
    await check_accounts(store)
    await store.aclose()

asyncio.run(main())
"""


def test_four_processes_make_one_segment(kind: str, tmp_path: Path) -> None:
    """Of processes that open at once one makes the segment, and all use it."""
    with contextlib.ExitStack() as stack:
        openers = [stack.enter_context(start(OPENER, kind, tmp_path, number)) for number in range(4)]
        for line in ("ready", "written"):
            for opener in openers:
                hear(opener, line)
            for opener in openers:
                tell(opener)
        for opener in openers:
            finish(opener)


# -- users and full file systems

OTHER_USER = """
os.setuid(65534)
try:
    open_slots(kind, directory)
except ConfigError as error:
    assert "belongs to user 1234, this is 65534" in str(error), error
    assert "mode=0o660" in str(error), error
else:
    raise AssertionError("another user's segment was opened")
store = open_slots(kind, directory, mode=0o666)
assert asyncio.run(read(store, "a")) == 1
"""


@pytest.mark.asyncio
async def test_another_users_segment_is_not_trusted(kind: str) -> None:
    """A segment of another user is refused unless the mode says that it is shared."""
    if os.geteuid() != 0:
        pytest.skip("needs to be root, to make files of other users")
    directory = Path(f"/tmp/hicache-test-{os.getpid()}")
    directory.mkdir()
    try:
        directory.chmod(0o777)
        await make(kind, directory)
        path_in(directory).chmod(0o666)
        os.chown(path_in(directory), 1234, -1)
        finish(start(OTHER_USER, kind, directory))
    finally:
        shutil.rmtree(directory)


FULL = """
import subprocess
import threading
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", directory], check=True)

async def main():
    store = open_slots(kind, directory, max_bytes=10_000_000)
    for call in (store.count_prefix(["a"]), write(store, "a"), read(store, "a")):
        try:
            await call
        except StoreUnavailable as error:
            assert "needs 99" in str(error) and "its file system has 524288" in str(error), error
            assert "lower max_bytes or make room" in str(error), error
        else:
            raise AssertionError("there was room")
    assert os.listdir(directory) == []
    await store.aclose()

    store = open_slots(kind, directory)
    assert await write(store, "first") == 1
    with open(f"{directory}/rest", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert "No space left" in str(error), error
    keys = [f"key{turn}" for turn in range(40)]
    for _ in range(3):
        assert await write(store, *keys, nbytes=8192) == 40
        assert await read(store, *keys, nbytes=8192) == 40
        await store.delete(keys)
    await check_accounts(store)
    await store.aclose()

asyncio.run(main())
"""


def test_a_file_system_that_is_too_small(kind: str, tmp_path: Path) -> None:
    """It is an error with both figures and leaves nothing; once made, a segment needs no more space ever."""
    unshare = ["unshare", "--mount"]
    probe = [*unshare, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs a mount of its own, which is not permitted here")
    finish(start(FULL, kind, tmp_path, wrapper=unshare))


@pytest.mark.asyncio
async def test_a_segment_that_cannot_be_reserved_leaves_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A medium that fills up while it is reserved is an error too, and the next attempt succeeds."""
    reserve = os.posix_fallocate

    def full(*_: int) -> None:
        monkeypatch.setattr(os, "posix_fallocate", reserve)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = open_slots(kind, tmp_path)
    with pytest.raises(StoreUnavailable, match=r"No space left on device; lower max_bytes or make room"):
        await write(store, "a")
    assert list(tmp_path.iterdir()) == []
    assert await write(store, "a") == 1
    await store.aclose()


def test_space_that_is_not_there_is_not_begun_to_be_reserved(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the file system has free is refused before anything is written: memory would be filled first."""
    asked: list[object] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *sizes: asked.append(sizes))
    store = open_slots(kind, tmp_path, max_bytes=1 << 60)
    with pytest.raises(StoreUnavailable, match="No space left; lower max_bytes"):
        asyncio.run(write(store, "a"))
    assert not asked
    assert list(tmp_path.iterdir()) == []
    asyncio.run(store.aclose())


def test_a_segment_removed_while_its_lock_is_awaited(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited to open it makes a new one, and does not use what nobody can find any more."""
    asyncio.run(make(kind, tmp_path))
    path = path_in(tmp_path)
    waits = threading.Event()
    flock = _segment._flock

    def watched(fd: int, timeout_s: float) -> bool:
        waits.set()
        return flock(fd, timeout_s)

    monkeypatch.setattr(_segment, "_flock", watched)
    wanted = open_slots(kind, tmp_path)._wanted
    found: list[_segment.Segment] = []
    opening = threading.Thread(target=lambda: found.append(_segment.open_segment(wanted)))
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        opening.start()
        assert waits.wait(30)
        path.unlink()
    opening.join(30)
    assert os.path.samestat(os.fstat(found[0]._fd), path.stat())
