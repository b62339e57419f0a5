"""Any doubt about an object is a miss for that object: counted, and removed where it is damaged."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_async.errors import StoreUnavailable
from hicache_async.stores import FileStore
from hicache_async.stores._files.object import decode_head, encode_head, payload_offset, read_verified
from hicache_async.stores._names import key_bytes, place_of
from hicache_async.types import Stop, StopToken
from tests.stores.pages import PAGE_NBYTES, page_of, read, write

KEY = "key1"
OTHER = "key2"


def path_of(store: FileStore, key: str) -> Path:
    return Path(store.root, "v2", "objects", place_of(key).path)


def flip(offset: int) -> Callable[[Path, Path], None]:
    def damage(path: Path, other: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)

    return damage


def cut_to(nbytes: int) -> Callable[[Path, Path], None]:
    return lambda path, other: os.truncate(path, nbytes)


def object_bytes(key: str, page: bytes) -> bytes:
    """Return the file of an object."""
    head = encode_head("", key_bytes(key), memoryview(page), payload_offset(key_bytes(key)))
    return head + page


def fault_of(path: Path, key: str, nbytes: int) -> str | None:
    """Return what a reader finds wrong with a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_verified(fd, "", key_bytes(key), memoryview(bytearray(nbytes)))
    finally:
        os.close(fd)


def fill(content: bytes) -> Callable[[Path, Path], None]:
    return lambda path, other: path.write_bytes(content) and None


def become(make: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    def damage(path: Path, other: Path) -> None:
        path.unlink()
        make(path)

    return damage


def bind(path: Path) -> None:
    """Make a socket; its path is too long to be bound where it belongs."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{directory}/socket")
        os.rename(f"{directory}/socket", path)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device is not permitted here")


def link_to_good(path: Path, other: Path) -> None:
    path.rename(path.with_name("good"))
    path.symlink_to("good")


def other_length(path: Path, other: Path) -> None:
    path.write_bytes(object_bytes(KEY, page_of(KEY, PAGE_NBYTES + 1)))


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
    "another page size": (other_length, "size", False),
    "flip in the magic": (flip(3), "foreign", True),
    "flip in the header's length": (flip(8), "foreign", True),
    "flip in the payload's offset": (flip(13), "checksum", True),
    "flip in the version": (flip(17), "foreign", True),
    "flip in the algorithm": (flip(18), "foreign", True),
    "flip in the key": (flip(22), "wrong_key", True),
    "flip in the checksum": (flip(35), "checksum", True),
    "flip in the first payload byte": (flip(4096), "checksum", True),
    "flip in the last payload byte": (flip(-1), "checksum", True),
    "zeros, as after a crash": (fill(bytes(4096 + PAGE_NBYTES)), "foreign", True),
    "another program's": (fill(b"\x89PNG" * 1274), "foreign", True),
    "swapped": (lambda path, other: shutil.copyfile(other, path) and None, "wrong_key", True),
    "flip in the padding": (flip(3000), "checksum", True),
    "head of another": (head_of_other, "wrong_key", True),
    "payload of another": (payload_of_other, "checksum", True),
    "a directory": (become(lambda path: path.mkdir()), "not_a_file", False),
    "a FIFO": (become(lambda path: os.mkfifo(path)), "unreadable", False),
    "a socket": (become(bind), "unreadable", False),
    "a device": (become(make_device), "not_a_file", False),
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


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """One bit changed anywhere, in header, padding or payload, makes the object a miss."""
    whole = object_bytes(KEY, page_of(KEY, 64))
    path = tmp_path / "object"
    path.write_bytes(whole)
    assert fault_of(path, KEY, 64) is None
    header_end = 16 + int.from_bytes(whole[8:12], "little")
    fd = os.open(path, os.O_RDWR)
    for offset in range(len(whole)):
        padding = header_end <= offset < 4096
        for bit in (offset % 8,) if padding else range(8):
            os.pwrite(fd, bytes([whole[offset] ^ 1 << bit]), offset)
            into = memoryview(bytearray(64))
            assert read_verified(fd, "", key_bytes(KEY), into) is not None, f"byte {offset}, bit {bit}"
        os.pwrite(fd, whole[offset : offset + 1], offset)
    os.close(fd)
    assert fault_of(path, KEY, 64) is None


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


def publish_at(monkeypatch: pytest.MonkeyPatch, name: str, good: Path, path: Path) -> list[str]:
    """Let another process publish ``good`` at ``path`` right before the first call of ``os.{name}`` for it."""
    original, calls = getattr(os, name), []

    def overtaken(source: str, *rest: str) -> object:
        if source == str(path) and good.exists():
            calls.append(source)
            os.replace(good, path)
        return original(source, *rest)

    monkeypatch.setattr(os, name, overtaken)
    return calls


@pytest.mark.asyncio
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("name", ["lstat", "rename"])
async def test_an_object_published_at_the_last_moment_is_not_removed(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, name: str, links: bool
) -> None:
    """Where a good file takes the place of a damaged one between a look and its removal, it stays."""
    await write(store, KEY)
    path = path_of(store, KEY)
    good = Path(store.root, "good")
    shutil.copyfile(path, good)
    flip(-1)(path, path)
    calls = publish_at(monkeypatch, name, good, path)
    if not links:

        def refusing(source: str, target: str) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refusing)
    assert await read(store, KEY) == 0
    assert store.stats == {"checksum": 1}
    assert len(calls) == 1
    assert await read(store, KEY) == 1
    assert list(Path(store.root, "v2", "temp").iterdir()) == []


@pytest.mark.asyncio
async def test_what_cannot_be_removed_is_a_miss_each_time(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged object that the disk does not let go is counted as what it is, and stops nothing."""
    await write(store, "key0", KEY)
    flip(-1)(path_of(store, KEY), Path())

    def refusing(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "rename", refusing)
    for _ in range(2):
        assert await read(store, "key0", KEY) == 1
    assert store.stats == {"checksum": 2}


@pytest.mark.asyncio
async def test_a_directory_in_the_place_of_an_object_fails_its_write_only(store: FileStore) -> None:
    """A write that finds a directory in the way ends there, and leaves the directory and nothing else."""
    await write(store, "key0", KEY)
    become(lambda path: path.mkdir())(path_of(store, KEY), Path())
    assert await write(store, "key0", KEY, OTHER) == 1
    with pytest.raises(StoreUnavailable, match="Is a directory"):
        await write(store, KEY)
    assert path_of(store, KEY).is_dir()
    assert await store.delete([KEY]) == 0
    assert await write(store, OTHER) == 1
    assert list(Path(store.root, "v2", "temp").iterdir()) == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "name", ["a FIFO", "a link to nowhere", "a link to a good one", "emptied", "one byte more"]
)
async def test_a_write_replaces_what_can_be_no_object(store: FileStore, name: str) -> None:
    """A write puts its object in the place of whatever is no whole one there."""
    await write(store, KEY)
    DAMAGES[name][0](path_of(store, KEY), Path())
    assert await write(store, KEY) == 1
    assert await read(store, KEY) == 1


@pytest.mark.asyncio
async def test_a_file_descriptor_is_closed_after_every_damage(store: FileStore) -> None:
    """However a read of an object ends, its descriptor is closed."""
    await write(store, KEY, OTHER)
    path, other = path_of(store, KEY), path_of(store, OTHER)
    before = len(os.listdir("/proc/self/fd"))
    for damage, _, _ in DAMAGES.values():
        for each in (path, other):
            if each.is_dir():
                each.rmdir()
            each.unlink(missing_ok=True)
        await write(store, KEY, OTHER)
        damage(path, other)
        assert store._directory.read(KEY, memoryview(bytearray(PAGE_NBYTES))) is not None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("key_nbytes", [0, 1, 255, 3983, 3984, 3985, 5000, 70_000])
def test_a_head_has_room_for_its_key(tmp_path: Path, key_nbytes: int) -> None:
    """For a key of any length the payload begins at a block behind the header, and comes back."""
    key, page = "k" * key_nbytes, page_of("page")
    path = tmp_path / "object"
    data = object_bytes(key, page)
    path.write_bytes(data)
    offset = payload_offset(key.encode())
    assert offset % 4096 == 0
    assert data[offset:] == page
    assert 16 + int.from_bytes(data[8:12], "little") <= offset
    assert fault_of(path, key, PAGE_NBYTES) is None


def test_the_longest_header_fits(tmp_path: Path) -> None:
    """With every field at its longest the header still ends before its payload, and a reader takes it."""
    namespace, page = "ukv1-0123456789abcdef", page_of("page")
    for key_nbytes in (3983, 3984):
        key = b"k" * key_nbytes
        head = encode_head(namespace, key, memoryview(page), payload_offset(key))
        assert len(head) == payload_offset(key)
        header = decode_head(head)
        assert header is not None
        assert (header.namespace, header.key, header.nbytes) == (namespace, key, PAGE_NBYTES)
