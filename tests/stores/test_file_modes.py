"""Who may read and write the files of a FileStore: exactly whom its options name, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_async.errors import ConfigError
from hicache_async.stores import FileStore, open_store
from tests.stores.pages import files_below, read, write
from tests.stores.programs import finish, start

GROUP = 54321
NAMESPACED = "0f_ukv1-0123456789abcdef_model"


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Another umask of this process."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes_below(root: Path) -> tuple[set[int], set[int]]:
    """Return the modes of all files, and of all directories."""
    paths = [root, *root.rglob("*")]
    files, directories = (
        {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir() is kind}
        for kind in (False, True)
    )
    return files, directories


@pytest.mark.asyncio
@pytest.mark.parametrize("unnamed_temp", [False, True])
@pytest.mark.parametrize(
    ("mode", "directory_mode"),
    [(None, 0o700), (0o600, 0o700), (0o640, 0o750), (0o660, 0o2770), (0o644, 0o755)],
)
async def test_files_and_directories_get_the_modes_of_the_store(
    tmp_path: Path, umask: int, mode: int | None, directory_mode: int, unnamed_temp: bool
) -> None:
    """Objects and books have the mode asked for, 0600 if none was, and directories the one that goes with it."""
    options: dict[str, Any] = {} if mode is None else {"mode": mode}
    root = tmp_path / "kv"
    store = FileStore(root, max_bytes=1 << 20, unnamed_temp=unnamed_temp, **options)
    assert await write(store, "a", NAMESPACED) == 2
    assert modes_below(root) == ({mode or 0o600}, {directory_mode})
    await store.aclose()


@pytest.mark.asyncio
async def test_a_directory_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    """What somebody else made is theirs: only directories that the store makes get its mode."""
    tmp_path.chmod(0o711)
    store = FileStore(tmp_path, mode=0o660)
    await write(store, "a")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o711
    await store.aclose()


@pytest.mark.asyncio
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to any group")
async def test_everything_belongs_to_the_group(tmp_path: Path) -> None:
    """Objects and directories belong to the group that was named."""
    root = tmp_path / "kv"
    store = FileStore(root, mode=0o640, group=GROUP)
    await write(store, "a", NAMESPACED)
    assert {path.stat().st_gid for path in (root, *root.rglob("*"))} == {GROUP}
    await store.aclose()


MEMBER = """
async def main():
    os.setgroups([])
    os.setgid(options["group"])
    os.setuid(number)
    os.umask(0o077)
    store = FileStore(root, mode=0o660, max_bytes=1 << 20, existence_ttl_s=0, num_lanes=2, group=options["group"])
    assert await read(store, *options["theirs"]) == len(options["theirs"])
    assert await write(store, *options["theirs"], *options["mine"]) == len(options["theirs"]) + len(options["mine"])
    if options["theirs"]:
        assert await store.delete(options["theirs"][:1]) == 1
        assert (await store.sweep())["evicted_bytes"] == 0
    await store.aclose()

asyncio.run(main())
"""

STRANGER = """
async def main():
    os.setgroups([])
    os.setgid(number)
    os.setuid(number)
    store = FileStore(root, existence_ttl_s=0)
    assert await store.count_prefix(["a"]) == 0
    assert await read(store, "a") == 0
    assert store.stats == {"unreadable": 1}, store.stats
    try:
        await write(store, "a")
    except StoreUnavailable as error:
        assert "Permission denied" in str(error)
    else:
        raise AssertionError("a stranger has written")
    await store.aclose()

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other users")
def test_users_of_one_group_share_a_directory(shared: Path) -> None:
    """Two users of a group read, touch, delete and keep limits of each other's objects; a third cannot look in."""
    shared.chmod(0o777)
    root = shared / "kv"
    finish(start(MEMBER, root, 60001, group=GROUP, theirs=[], mine=["a", "b"]))
    finish(start(MEMBER, root, 60002, group=GROUP, theirs=["a", "b"], mine=["c"]))
    assert {path.stat().st_uid for path in files_below(root, "objects")} == {60001, 60002}
    finish(start(STRANGER, root, 60003))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other users")
@pytest.mark.asyncio
async def test_nobody_else_reads_a_default_store(shared: Path) -> None:
    """Objects of a store that says nothing of modes are for its own user."""
    shared.chmod(0o777)
    store = FileStore(shared / "kv")
    await write(store, "a")
    finish(start(STRANGER, shared / "kv", 60003))
    assert await read(store, "a") == 1
    await store.aclose()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mode": 0o400}, "mode is 0o400"),
        ({"mode": 0o700}, "mode is 0o700"),
        ({"mode": 0o2660}, "mode is 0o2660"),
        ({"mode": 0o620}, "mode is 0o620"),
        ({"mode": "rw"}, "mode is 'rw'"),
        ({"root": None, "mode": 0o660}, "mode is 432 without a root"),
        ({"group": "no such group"}, "group is 'no such group'"),
        ({"group": -1, "mode": 0o660}, "group is -1"),
        ({"group": True, "mode": 0o660}, "group is True"),
        ({"group": 0}, "mode is 0o600, which gives nothing to the group"),
        ({"durability": "some"}, "durability is 'some'"),
        ({"durability": "batch", "unnamed_temp": True}, "unnamed_temp is True"),
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"max_bytes": 1.5}, "max_bytes is 1.5"),
        ({"min_free_bytes": -1}, "min_free_bytes is -1"),
        ({"low_water": 0}, "low_water is 0"),
        ({"low_water": 1.1}, "low_water is 1.1"),
        ({"read_only": True, "max_bytes": 1}, "max_bytes is 1 and min_free_bytes 0 with read_only"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], complaint: str) -> None:
    """Each option is refused by name and value, with what would be right."""
    with pytest.raises(ConfigError, match=f"{complaint}.*; give"):
        FileStore(**{"root": "/nowhere", **options})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other users")
def test_a_group_of_others_is_refused(tmp_path: Path) -> None:
    """A process that is no member of the group hears so when it opens the store."""
    program = """
from hicache_async.errors import ConfigError
os.setgroups([])
os.setgid(number)
os.setuid(number)
try:
    FileStore(root, group=options["group"], mode=0o660)
except ConfigError as error:
    assert "which this process is not in" in str(error)
else:
    raise AssertionError("it was opened")
"""
    finish(start(program, tmp_path, 60001, group=GROUP))


@pytest.mark.asyncio
async def test_every_option_stands_in_a_url(tmp_path: Path) -> None:
    """A URL opens the same store as the arguments do."""
    store = open_store(
        f"file://{tmp_path}/kv?max_bytes=1.5GiB&min_free_bytes=10MB&low_water=0.8&durability=each&mode=660"
        f"&group={os.getgid()}&unnamed_temp=true&read_only=false&existence_ttl_s=-1&num_lanes=1"
    )
    assert isinstance(store, FileStore)
    options = store._options
    assert (options.max_bytes, options.min_free_bytes, options.low_water) == (3 << 29, 10_000_000, 0.8)
    assert (options.durability, options.mode, options.gid) == ("each", 0o660, os.getgid())
    assert (options.unnamed_temp, options.read_only) == (True, False)
    assert await write(store, "a") == 1
    await store.aclose()


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("max_bytes=12GX", "bytes, plain or with KB"),
        ("max_bytes=-1", "bytes, plain or with KB"),
        ("max_bytes=0.3KB0", "bytes, plain or with KB"),
        ("read_only=perhaps", "true or false"),
        ("mode=rw", "permissions in octal"),
        ("num_lanes=two", "an integer"),
        ("low_water=high", "a number"),
    ],
)
def test_a_url_that_does_not_read_is_refused(query: str, wanted: str) -> None:
    """A text that is not of its option's type is refused with what would be right."""
    with pytest.raises(ConfigError, match=f"; give {wanted}"):
        open_store(f"file:///nowhere?{query}")
