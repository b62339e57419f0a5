"""Stores in use, and shared with others: no verb takes for bad, or changes, what is somebody else's."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import pytest

from hicache_async.cli._look import REMOVED, Look, look
from hicache_async.stores.memory import MemoryStore
from hicache_async.types import ObjectStat, Stop, StopToken
from tests.cli.conftest import Hicache
from tests.cli.stores import (
    PAGE_NBYTES,
    FullStore,
    PlainStore,
    command,
    environment,
    fill,
    keys_of,
    listed,
    names,
    path_of,
    run,
)

KEYS = keys_of(names(), 5)
PAGE = memoryview(bytes(PAGE_NBYTES))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# Codecs


def test_what_other_codecs_wrote_is_skipped(root: Path, hicache: Hicache) -> None:
    """In a directory of two codecs each opening checks its own, counts the other's, and deletes none of it."""
    fill(f"file://{root}", (names(), 5))
    fill(f"zstd+file://{root}", (names(codec="zstd"), 4))
    before = listed(f"file://{root}")
    for url, objects, skipped in (("", 7, {"zstd": 4}), ("zstd+", 6, {"raw": 5})):
        ended = hicache("verify", "--delete", f"{url}file://{root}", "--format", "json")
        assert (ended.status, ended.json["objects"], ended.json["skipped"]) == (0, objects, skipped)
    assert "skipped: 5 objects of codec raw" in hicache("verify", f"zstd+file://{root}").out
    assert listed(f"file://{root}") == before


def test_without_a_manifest_only_damage_is_bad(root: Path, hicache: Hicache) -> None:
    """What cannot be decoded is skipped and stays; what is damaged in its file is bad and goes."""
    fill(f"file://{root}", (names(), 5), manifests=False)
    url = f"fp8+file://{root}?fp8_dtype=bfloat16"
    ended = hicache("verify", "--delete", url, "--format", "json")
    assert (ended.status, ended.json["skipped"]) == (0, {"unknown": 5})
    assert listed(f"file://{root}") == {*KEYS}
    flip(path_of(root, KEYS[1]))
    ended = hicache("verify", "--delete", f"file://{root}", "--format", "json")
    assert ended.json["bad"] == [{"key": KEYS[1], "reason": "checksum"}]
    assert listed(f"file://{root}") == {*KEYS} - {KEYS[1]}


def test_a_foreign_object_is_told_and_left(root: Path, hicache: Hicache) -> None:
    """A file that another program or version may read is bad here, and --delete does not remove it."""
    fill(f"file://{root}", (names(), 5))
    path = path_of(root, KEYS[0])
    path.write_bytes(b"of another version".ljust(path.stat().st_size + 100))
    ended = hicache("verify", "--delete", root, "--format", "json")
    assert (ended.status, ended.json["bad"], ended.json["deleted"]) == (
        1,
        [{"key": KEYS[0], "reason": "foreign"}],
        0,
    )
    assert path.exists() and "was left" in hicache("verify", "--delete", root).out


# Nothing is changed


def snapshot(root: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}


@pytest.mark.parametrize("verb", ["ls", "stat", "verify", "doctor", "cp"])
@pytest.mark.parametrize("kind", ["guard", "zstd", "slow", "fast"])
def test_limits_inside_are_not_enforced(root: Path, hicache: Hicache, verb: str, kind: str) -> None:
    """Behind wrappers and in tiers, too, no file is evicted, repaired, made or touched."""
    fill(f"file://{root}", (names(), 5))
    flip(path_of(root, KEYS[2]))
    (root / "v2" / "temp").mkdir(exist_ok=True)
    other = root.parent / "other"
    other.mkdir()
    limited = f"file://{root}?max_bytes=4KiB&min_free_bytes=1"
    url = {
        "guard": f"guard+{limited}&guard_timeout_s=9",
        "zstd": f"guard+zstd+{limited}&zstd_level=1",
        "slow": f"guard+tiered:?fast={quote(f'file://{other}', safe='')}&slow={quote('guard+' + limited, safe='')}",
        "fast": f"tiered:?fast={quote(limited, safe='')}&slow={quote(f'file://{other}', safe='')}",
    }[kind]
    config = root.parent / "config.json"
    config.write_text(
        '{"model_id": "x", "kv": {"num_layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "int8"}}'
    )
    arguments = {"doctor": ["--config", config], "cp": ["full:a"]}.get(verb, [])
    before = snapshot(root), snapshot(other)
    assert hicache(verb, url, *arguments).status in (0, 1)
    assert (snapshot(root), snapshot(other)) == before


@pytest.mark.parametrize(
    "arguments", [["verify", "--delete"], ["rm", "--yes", "--namespace", "ukv1-0000000000000000"]]
)
def test_deleting_enforces_no_limit(root: Path, hicache: Hicache, arguments: list[str]) -> None:
    """What deletes damage, or a namespace, evicts nothing else, whatever the limits of the engine's URL."""
    fill(f"file://{root}", (names(), 5))
    flip(path_of(root, KEYS[2]))
    hicache(arguments[0], f"file://{root}?max_bytes=4KiB", *arguments[1:])
    assert {*KEYS} - {KEYS[2]} <= listed(f"file://{root}")


@pytest.mark.parametrize("verb", ["ls", "stat", "verify", "gc", "rm"])
def test_what_is_not_there_is_not_made(tmp_path: Path, hicache: Hicache, verb: str) -> None:
    """A segment or directory that does not exist, in tiers too, is refused with its path."""
    size = "max_bytes=1MiB&slot_bytes=8KiB"
    for url, path in {
        f"mmap://{tmp_path}/slots?{size}": "slots",
        f"shm:typo?directory={tmp_path}&{size}": "hicache-typo",
        f"zstd+mmap://{tmp_path}/slots?{size}": "slots",
        f"tiered:?fast=memory%3A&slow={quote(f'file://{tmp_path}/gone', safe='')}": "gone",
    }.items():
        ended = hicache(verb, url, *(["--all", "--yes"] if verb == "rm" else []))
        assert (ended.status, ended.out) == (2, "") and str(tmp_path / path) in ended.err
    assert not list(tmp_path.iterdir())


def test_a_segment_that_exists_is_opened_as_it_is(tmp_path: Path, hicache: Hicache) -> None:
    """Sizes of the engine's URL that the segment has outgrown are no obstacle to looking."""
    fill(f"mmap://{tmp_path}/slots?max_bytes=1MiB&slot_bytes=8KiB", (names(), 2))
    assert (
        hicache("stat", f"mmap://{tmp_path}/slots?max_bytes=9MiB&slot_bytes=16KiB", "--format", "json").json[
            "objects"
        ]
        == 2
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to be refused")
def test_what_cannot_be_listed_is_not_empty(root: Path) -> None:
    """Another user's root, or namespace, is an error that names it."""
    fill(f"file://{root}", (names(), 2))
    objects = root / "v2" / "objects"
    for path in (root, root / "v2", objects, *root.parents):
        if path != Path("/") and path != Path("/tmp"):
            path.chmod(0o755)
    namespace = objects / names().namespace.digest
    assert status_as_other(root) == (2, str(namespace))
    root.chmod(0o700)
    assert status_as_other(root) == (2, str(root))


def status_as_other(root: Path) -> tuple[int, str]:
    """Check a directory as another user; returns the status, and the path that is said to be the problem."""
    from hicache_async.cli._problem import Problem
    from hicache_async.cli._urls import check_places

    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        status = 0
        os.setuid(65534)
        try:
            check_places(f"file://{root}", must_exist=True)
        except Problem as problem:
            os.write(theirs, str(problem).split("'")[1].encode())
            status = problem.status
        os._exit(status)
    _, status = os.waitpid(pid, 0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as said:
        return os.waitstatus_to_exitcode(status), said.read().decode()


# What heals itself, and what is huge


@pytest.mark.parametrize("prefix", ["", "guard+"])
def test_damage_that_the_store_removes_is_told(tmp_path: Path, hicache: Hicache, prefix: str) -> None:
    """An object that the first read frees for its damage is bad, though it is gone at the second look."""
    path = tmp_path / "slots"
    fill(f"mmap://{path}?max_bytes=1MiB&slot_bytes=8KiB", (names(), 5))
    data = path.read_bytes()
    path.write_bytes(data.replace(bytes([3]) * PAGE_NBYTES, bytes([9]) * PAGE_NBYTES, 1))
    ended = hicache("verify", f"{prefix}mmap://{path}", "--format", "json")
    assert (ended.status, ended.json["bad"]) == (1, [{"key": KEYS[3], "reason": REMOVED}])
    assert hicache("verify", f"{prefix}mmap://{path}").status == 0


def test_damage_that_a_look_at_sizes_removes_is_told(tmp_path: Path, hicache: Hicache) -> None:
    """A codec reads frames to tell sizes, and what the store inside frees then is bad all the same."""
    found, path = names(codec="zstd"), tmp_path / "slots"
    fill(f"zstd+mmap://{path}?max_bytes=1MiB&slot_bytes=8KiB", (found, 5))
    data = path.read_bytes()
    place = data.index(b"HiCodec1") + 40
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    ended = hicache("verify", f"zstd+mmap://{path}", "--format", "json")
    assert (ended.status, [bad["reason"] for bad in ended.json["bad"]]) == (1, [REMOVED])
    assert hicache("verify", f"zstd+mmap://{path}").status == 0


def test_a_huge_object_stops_nothing(root: Path, hicache: Hicache) -> None:
    """One that no memory holds is reported with its size, and all others are checked and copied."""
    fill(f"file://{root}", (names(), 5))
    os.truncate(path_of(root, KEYS[2]), 900 << 30)
    ended = hicache("verify", root, "--format", "json")
    (bad,) = ended.json["bad"]
    assert (ended.status, ended.json["objects"], bad["key"]) == (1, 6, KEYS[2])
    assert bad["reason"].startswith("too large to read: 966,3")
    ended = hicache("cp", root, "full:a", "--format", "json")
    assert (ended.status, ended.json["copied"], ended.json["unreadable"]) == (1, 5, [KEYS[2]])


# Objects that come, change and go


class Meanwhile(MemoryStore):
    """A store in which something happens between a look at an object and its read, once."""

    def __init__(self, act: Callable[[Meanwhile], Awaitable[object]]) -> None:
        super().__init__()
        self.act: Callable[[Meanwhile], Awaitable[object]] | None = act

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        found = await super().stat(keys)
        if (act := self.act) is not None:
            self.act = None
            await act(self)
        return found


@pytest.mark.parametrize("there", [0, 100, PAGE_NBYTES])
@pytest.mark.parametrize("comes", [0, PAGE_NBYTES])
def test_what_changes_while_it_is_looked_at(there: int, comes: int) -> None:
    """An object that appears, is replaced or goes between two looks is good, or gone, and never bad."""

    async def change(store: Meanwhile) -> None:
        await store.delete(["k"])
        if comes:
            await store.write(["k"], [PAGE[:comes]])

    async def check() -> Look:
        store = Meanwhile(change)
        if there:
            await store.write(["k"], [PAGE[:there]])
        return await look(store, "k", usual_nbytes=PAGE_NBYTES)

    assert asyncio.run(check()) == Look(None, is_gone=not comes)


class Corrupt(MemoryStore):
    """A store that cannot read what it has, and says so."""

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        stop.reason = Stop.CORRUPT
        return 0


def test_corruption_is_bad_always() -> None:
    """What a store says is corrupt is bad, whatever it counts."""

    async def check() -> Look:
        store = Corrupt()
        await store.write(["k"], [PAGE])
        return await look(store, "k")

    assert asyncio.run(check()) == Look("corrupt")


def test_what_is_evicted_meanwhile_is_gone(hicache: Hicache, monkeypatch: pytest.MonkeyPatch) -> None:
    """verify, cp and stat find nothing wrong with an object that was listed and is not there any more."""
    fill("full:a", (names(), 5))

    async def list_keys(self: FullStore) -> Sequence[str]:
        keys = tuple(self.inner._objects)
        self.inner._objects.pop(KEYS[1], None)
        return keys

    for verb, target in (("verify", []), ("cp", ["full:b"]), ("stat", [])):
        fill("full:a", (names(), 5))
        with monkeypatch.context() as patch:
            patch.setattr(FullStore, "list_keys", list_keys)
            ended = hicache(verb, "full:a", *target, "--format", "json")
        assert ended.status == 0
        assert ended.json.get("bad", []) == [] and not ended.json.get("unsized")
        assert ended.json.get("gone", 1) == 1


def test_manifests_are_copied_first(hicache: Hicache) -> None:
    """A copy that ends early holds what its objects are."""
    fill("full:a", (names(), 5), (names(page_size=16), 5))
    assert hicache("cp", "full:a", "small:b").status == 1
    copied = list(PlainStore._by_url["b"]._objects)
    assert [key.startswith("manifest_") for key in copied] == [True, True, False]


# The doctor, and a terminal that is closed


def test_pages_of_which_only_some_chunks_are_there(tmp_path: Path, hicache: Hicache) -> None:
    """Chunks of one rank of a fleet are no page of a config that needs all of them."""
    options = {"key_scheme": "unified", "host_layout": "head_grouped", "head_group": 2}
    found = names(**options)
    assert found.num_chunks == 4
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_id": "llama", "page_size": 64, "key_scheme": "unified", "host_layout": "head_grouped", '
        '"head_group": 2, "kv": {"num_layers": 2, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}}'
    )
    fill("full:a", (found, 0))
    objects = PlainStore._by_url["a"]._objects
    keys = keys_of(found, 3)
    objects.update({key: bytes(8) for key in keys[::4]})
    ended = hicache("doctor", "full:a", "--config", config)
    assert ended.status == 1 and "NO HITS no page is there with all" in ended.out
    objects.update({key: bytes(8) for key in keys[:4]})
    ended = hicache("doctor", "full:a", "--config", config, "--format", "json")
    assert (ended.status, ended.json["own_pages"], ended.json["own_objects"]) == (0, 1, 6)


def test_closed_streams(root: Path) -> None:
    """With standard output closed there is nothing to see, and no error."""
    fill(f"file://{root}", (names(), 1))
    script = 'exec "$@" >&-'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command("verify", str(root))],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert run("verify", str(root)).returncode == 0
