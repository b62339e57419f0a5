"""Any doubt about an object is a miss for that object: counted, and removed where it is damaged."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_async.stores import FileStore
from hicache_async.stores._names import key_bytes, object_name
from hicache_async.stores._object import payload_offset, read_object, write_object
from hicache_async.types import Stop, StopToken
from tests.stores.pages import PAGE_NBYTES, page_of, read, write

KEY = "key1"
OTHER = "key2"


def path_of(store: FileStore, key: str) -> Path:
    return Path(store.root, "v1", "objects", object_name(key_bytes(key)))


def flip(offset: int) -> Callable[[Path, Path], None]:
    def damage(path: Path, other: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)

    return damage


def cut_to(nbytes: int) -> Callable[[Path, Path], None]:
    return lambda path, other: os.truncate(path, nbytes)


def fill(content: bytes) -> Callable[[Path, Path], None]:
    return lambda path, other: path.write_bytes(content) and None


def become(make: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    def damage(path: Path, other: Path) -> None:
        path.unlink()
        make(path)

    return damage


def link_to_good(path: Path, other: Path) -> None:
    path.rename(path.with_name("good"))
    path.symlink_to("good")


def other_length(path: Path, other: Path) -> None:
    path.unlink()
    write_object(str(path), f"{path}.temp", key_bytes(KEY), memoryview(page_of(KEY, PAGE_NBYTES + 1)))


def head_of_other(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes()[:4096] + path.read_bytes()[4096:])


def payload_of_other(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:4096] + other.read_bytes()[4096:])


# name: (what happens to the file, the reason that is counted, whether the file goes)
DAMAGES: dict[str, tuple[Callable[[Path, Path], None], str, bool]] = {
    "removed": (lambda path, other: path.unlink(), "missing", True),
    "emptied": (cut_to(0), "empty", True),
    "cut in the prefix": (cut_to(7), "short", True),
    "cut in the head": (cut_to(100), "short", True),
    "cut before the payload": (cut_to(4096), "short", True),
    "cut by a byte": (cut_to(4096 + PAGE_NBYTES - 1), "short", True),
    "one byte more": (cut_to(4096 + PAGE_NBYTES + 1), "long", True),
    "a block more": (cut_to(8192 + PAGE_NBYTES), "long", True),
    "another page size": (other_length, "long", True),
    "flip in the magic": (flip(3), "foreign", True),
    "flip in the header's length": (flip(8), "foreign", True),
    "flip in the payload's offset": (flip(13), "checksum", True),
    "flip in the version": (flip(17), "foreign", True),
    "flip in the algorithm": (flip(18), "foreign", True),
    "flip in the key": (flip(21), "wrong_key", True),
    "flip in the checksum": (flip(35), "checksum", True),
    "flip in the first payload byte": (flip(4096), "checksum", True),
    "flip in the last payload byte": (flip(-1), "checksum", True),
    "zeros, as after a crash": (fill(bytes(4096 + PAGE_NBYTES)), "foreign", True),
    "another program's": (fill(b"\x89PNG" * 1274), "foreign", True),
    "swapped": (lambda path, other: shutil.copyfile(other, path) and None, "wrong_key", True),
    "head of another": (head_of_other, "wrong_key", True),
    "payload of another": (payload_of_other, "checksum", True),
    "a directory": (become(lambda path: path.mkdir()), "not_a_file", False),
    "a FIFO": (become(lambda path: os.mkfifo(path)), "unreadable", False),
    "a link to nowhere": (become(lambda path: path.symlink_to("nowhere")), "unreadable", False),
    "a link to a good one": (link_to_good, "unreadable", False),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", DAMAGES)
async def test_a_damaged_object_is_a_miss(store: FileStore, name: str) -> None:
    """The read ends before it, the reason is counted, the belief dropped, neighbours are whole."""
    damage, reason, removed = DAMAGES[name]
    await write(store, "key0", KEY, OTHER)
    path = path_of(store, KEY)
    damage(path, path_of(store, OTHER))
    assert await read(store, "key0", KEY, OTHER) == 1
    assert store.stats == {reason: 1}
    assert os.path.lexists(path) is not removed
    assert await read(store, OTHER) == 1
    assert await read(store, "key0") == 1
    if removed:
        assert await store.count_prefix(["key0", KEY, OTHER]) == 1
        assert await write(store, KEY) == 1
        assert await read(store, "key0", KEY, OTHER) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("removed", Stop.VANISHED),
        ("swapped", Stop.CORRUPT),
        ("emptied", Stop.CORRUPT),
        ("a FIFO", Stop.STORE_FAULT),
    ],
)
async def test_the_token_says_why_a_read_came_back_short(store: FileStore, name: str, reason: Stop) -> None:
    """Gone, damaged and unreadable are told apart; a whole read and a stopped one give no reason."""
    await write(store, "key0", KEY, OTHER)
    token, stopped = StopToken(), StopToken()
    stopped.stop()
    into = [memoryview(bytearray(PAGE_NBYTES)) for _ in range(3)]
    assert await store.read(["key0", KEY, OTHER], into, token) == 3
    assert await store.read(["key0", KEY, OTHER], into, stopped) == 0
    assert (token.reason, stopped.reason) == (None, None)
    DAMAGES[name][0](path_of(store, KEY), path_of(store, OTHER))
    assert await store.read(["key0", KEY, OTHER], into, token) == 1
    assert token.reason is reason


@pytest.mark.asyncio
async def test_every_flipped_bit_is_found(store: FileStore) -> None:
    """One bit changed anywhere in header or payload makes the object a miss."""
    await write(store, KEY, nbytes=64)
    path = path_of(store, KEY)
    whole = path.read_bytes()
    header_end = 16 + int.from_bytes(whole[8:12], "little")
    for offset in (*range(header_end), *range(4096, len(whole))):
        for bit in range(8):
            data = bytearray(whole)
            data[offset] ^= 1 << bit
            path.write_bytes(data)
            into = memoryview(bytearray(64))
            assert read_object(str(path), key_bytes(KEY), into) is not None, f"byte {offset}, bit {bit}"
    path.write_bytes(whole)
    assert await read(store, KEY, nbytes=64) == 1


@pytest.mark.asyncio
async def test_a_damaged_object_does_not_end_its_neighbours_read(store: FileStore) -> None:
    """Reads that share a job with one that meets a damaged object are whole."""
    keys = [f"key{number}" for number in range(30)]
    await write(store, *keys)
    flip(-1)(path_of(store, KEY), Path())
    counts = await asyncio.gather(*(read(store, *keys[first : first + 3]) for first in range(0, 30, 3)))
    assert counts == [1] + [3] * 9


@pytest.mark.asyncio
async def test_a_newer_object_is_not_removed(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a good file took the place of the damaged one during the read, it stays."""
    await write(store, KEY)
    path = path_of(store, KEY)
    good = path.with_name("good")
    shutil.copyfile(path, good)
    flip(-1)(path, path)
    preadv = os.preadv

    def preadv_then_replace(fd: int, buffers: list[memoryview], offset: int) -> int:
        moved = preadv(fd, buffers, offset)
        if good.exists():
            good.rename(path)
        return moved

    monkeypatch.setattr(os, "preadv", preadv_then_replace)
    assert await read(store, KEY) == 0
    assert store.stats == {"checksum": 1}
    assert await read(store, KEY) == 1


def test_a_file_descriptor_is_closed_after_every_damage(tmp_path: Path) -> None:
    """However a read of an object ends, its descriptor is closed."""
    path, other = tmp_path / "a", tmp_path / "b"
    before = len(os.listdir("/proc/self/fd"))
    for damage, _, _ in DAMAGES.values():
        for each in (path, other):
            if each.is_dir():
                each.rmdir()
            each.unlink(missing_ok=True)
        write_object(str(path), f"{path}.temp", key_bytes(KEY), memoryview(page_of(KEY)))
        write_object(str(other), f"{other}.temp", key_bytes(OTHER), memoryview(page_of(OTHER)))
        damage(path, other)
        assert read_object(str(path), key_bytes(KEY), memoryview(bytearray(PAGE_NBYTES))) is not None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("key_nbytes", [0, 1, 255, 4015, 4016, 4017, 5000, 70_000])
def test_a_head_has_room_for_its_key(tmp_path: Path, key_nbytes: int) -> None:
    """For a key of any length the payload begins at a block behind the header, and comes back."""
    key, page = b"k" * key_nbytes, memoryview(page_of("page"))
    path = tmp_path / "object"
    write_object(str(path), str(tmp_path / "temp"), key, page)
    offset = payload_offset(key)
    assert offset % 4096 == 0
    data = path.read_bytes()
    assert data[offset:] == page
    assert 16 + int.from_bytes(data[8:12], "little") <= offset
    into = memoryview(bytearray(PAGE_NBYTES))
    assert read_object(str(path), key, into) is None
    assert into == page
