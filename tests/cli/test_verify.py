"""verify: every bad object is found, by its reason, and nothing is changed unless asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache
from tests.cli.stores import PlainStore, fill, keys_of, listed, names, path_of, run

KEYS = keys_of(names(), 20)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace(path: Path) -> None:
    path.write_bytes(b"something else of the same length".ljust(path.stat().st_size))


DAMAGES = {"checksum": flip, "short": cut, "long": extend, "empty": empty, "foreign": replace}


@pytest.fixture
def filled(root: Path) -> Path:
    """Return the directory of a file store with 20 pages and a manifest."""
    fill(f"file://{root}", (names(), 20))
    return root


def test_a_good_store(filled: Path, hicache: Hicache) -> None:
    """Where all is well everything has been read, and the status is 0."""
    ended = hicache("verify", filled, "--format", "json")
    assert ended.status == 0
    assert ended.json == {
        "store": str(filled),
        "objects": 21,
        "nbytes": 20 * 512 + 4096,
        "bad": [],
        "deleted": 0,
        "skipped": {},
    }
    assert hicache("verify", filled).out == "21 objects checked, 14.0 KiB read: all good\n"


@pytest.mark.parametrize(("reason", "damage"), DAMAGES.items())
def test_a_bad_object_is_named_with_its_reason(
    filled: Path, hicache: Hicache, reason: str, damage: Callable[[Path], None]
) -> None:
    """The key and what is wrong are reported, neighbours are checked all the same, and all of it stays."""
    damage(path_of(filled, KEYS[7]))
    ended = hicache("verify", filled, "--format", "json")
    assert ended.status == 1
    assert ended.json["bad"] == [{"key": KEYS[7], "reason": reason}]
    assert ended.json["objects"] == 21
    text = hicache("verify", filled)
    assert text.status == 1
    assert f"{reason}: 1 object\n    {KEYS[7]}\n" in text.out and "nothing was changed" in text.out
    assert KEYS[7] in listed(f"file://{filled}")


def test_the_only_page_of_a_namespace(root: Path, hicache: Hicache) -> None:
    """Where there is no good page to compare with, the size of the manifest is not taken for a page's."""
    fill(f"file://{root}", (names(), 1))
    flip(path_of(root, KEYS[0]))
    assert hicache("verify", root, "--format", "json").json["bad"] == [{"key": KEYS[0], "reason": "checksum"}]


def test_several_bad_objects_of_one_batch(filled: Path, hicache: Hicache) -> None:
    """First, last and neighbouring ones are all found, each for its own reason."""
    for place, damage in zip((0, 7, 8, 9, 19), DAMAGES.values(), strict=True):
        damage(path_of(filled, sorted(KEYS)[place]))
    found = {
        each["key"]: each["reason"] for each in hicache("verify", filled, "--format", "json").json["bad"]
    }
    assert found == {
        sorted(KEYS)[place]: reason for place, reason in zip((0, 7, 8, 9, 19), DAMAGES, strict=True)
    }


def test_deleting_what_is_bad(filled: Path, hicache: Hicache) -> None:
    """With --delete the bad go and the good stay; the status tells of them, and the next run finds none."""
    for key in KEYS[3:5]:
        flip(path_of(filled, key))
    ended = hicache("verify", filled, "--delete")
    assert ended.status == 1 and "2 bad objects deleted" in ended.out
    assert {key for key in listed(f"file://{filled}") if key in KEYS} == {*KEYS} - {*KEYS[3:5]}
    assert hicache("verify", filled).status == 0


def test_a_manifest_that_says_something_else(hicache: Hicache) -> None:
    """An object that is whole, but not the manifest of its name, is bad."""
    fill("full:a", (names(), 2))
    key = f"manifest_{names().namespace.digest}"
    objects = PlainStore._by_url["a"]._objects
    objects[key] = objects[key].replace(b"64", b"65")
    ended = hicache("verify", "full:a", "--format", "json")
    assert ended.json["bad"] == [{"key": key, "reason": "manifest"}]
    assert hicache("verify", "full:a", "--delete").status == 1
    assert key not in objects and len(objects) == 2


def test_one_namespace_and_many_jobs(filled: Path, hicache: Hicache) -> None:
    """Only what was asked for is read, with as many reads at once as one likes."""
    fill(f"file://{filled}", (names(page_size=16), 5))
    digest = names(page_size=16).namespace.digest
    flip(path_of(filled, KEYS[0]))
    for jobs in ("1", "9"):
        ended = hicache("verify", filled, "--namespace", digest, "--jobs", jobs, "--format", "json")
        assert (ended.status, ended.json["objects"]) == (0, 6)


def test_memory_is_bounded(filled: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read brings more than its share, but for a single object that is larger than that."""
    from hicache_async.cli import verify
    from hicache_async.stores.file import FileStore

    monkeypatch.setattr(verify, "READ_NBYTES", 1100)
    read, sizes = FileStore.read, []

    async def counting(self, keys, into, stop):  # type: ignore[no-untyped-def]
        sizes.append([buffer.nbytes for buffer in into])
        return await read(self, keys, into, stop)

    monkeypatch.setattr(FileStore, "read", counting)
    assert hicache("verify", filled).status == 0
    assert all(len(each) == 1 or sum(each) <= 1100 for each in sizes)
    assert max(map(len, sizes)) == 2


@pytest.mark.parametrize(("url", "lacking"), [("plain:a", "SupportsListing"), ("memory:", None)])
def test_capabilities(hicache: Hicache, url: str, lacking: str | None) -> None:
    """A store that cannot be verified is refused with what it lacks."""
    ended = hicache("verify", url)
    assert ended.status == (0 if lacking is None else 2)
    assert lacking is None or lacking in ended.err


def test_in_a_process_of_its_own(filled: Path) -> None:
    """The exit status of the real command is 1 with a bad object, and 0 without."""
    assert run("verify", "kv", cwd=filled.parent).returncode == 0
    flip(path_of(filled, KEYS[0]))
    done = run("verify", "kv", cwd=filled.parent)
    assert (done.returncode, done.stderr) == (1, "")
    assert KEYS[0] in done.stdout
