"""gc, rm and cp: they change what they were asked to, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hicache_async.testing.leaks import temp_files
from tests.cli.conftest import Hicache
from tests.cli.stores import PlainStore, fill, keys_of, listed, names, path_of, run

OWN, OTHER = names(), names(page_size=16)
DIGEST = OWN.namespace.digest


@pytest.fixture
def filled(root: Path) -> Path:
    """Return the directory of a file store with two namespaces."""
    fill(f"file://{root}", (OWN, 5), (OTHER, 3))
    return root


# gc


def test_gc_sweeps(filled: Path, hicache: Hicache) -> None:
    """What dead writers left behind goes, and what is stored stays."""
    before = listed(f"file://{filled}")
    ended = hicache("gc", filled)
    assert ended.status == 0 and ended.out.startswith("swept: temp_files 0")
    assert hicache("gc", "full:a", "--format", "json").json["swept"] == {"temp_files": 3}
    assert listed(f"file://{filled}") == before
    assert not temp_files(filled)


def test_gc_deletes_what_is_old(filled: Path, hicache: Hicache) -> None:
    """Objects not used for that long go, newer ones stay, and a manifest goes with the last of its namespace."""
    old = [*keys_of(OWN, 2), *keys_of(OTHER, 3), f"manifest_{DIGEST}", f"manifest_{OTHER.namespace.digest}"]
    for key in old:
        os.utime(path_of_any(filled, key), (1e9, 1e9))
    everything = listed(f"file://{filled}")
    dry = hicache("gc", filled, "--older-than", "30d", "--dry-run")
    assert dry.status == 0 and "old: 6 objects, 6.5 KiB, would be deleted" in dry.out
    assert listed(f"file://{filled}") == everything
    ended = hicache("gc", filled, "--older-than", "30d", "--format", "json")
    assert (ended.status, ended.json["old_objects"], ended.json["deleted"]) == (0, 6, 6)
    assert listed(f"file://{filled}") == {*keys_of(OWN, 5)[2:], f"manifest_{DIGEST}"}
    assert hicache("gc", filled, "--older-than", "30d", "--format", "json").json["deleted"] == 0


def path_of_any(root: Path, key: str) -> Path:
    """Return the file of an object or manifest."""
    (path,) = [path for path in root.rglob("*.kv") if path.name.startswith(key)]
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plain:a"], "lacks SupportsSweep"),
        (["plain:a", "--older-than", "1d"], "lacks SupportsListing"),
        (["full:a", "--older-than", "1"], "give a number and a unit, as 30d"),
        (["full:a", "--older-than", "-1d"], "expected one argument"),
    ],
)
def test_gc_that_cannot_be(hicache: Hicache, arguments: list[str], words: str) -> None:
    """What is missing, or what a duration looks like, is said."""
    ended = hicache("gc", *arguments)
    assert ended.status == 2 and words in ended.err


# rm


def test_rm_deletes_one_namespace(filled: Path, hicache: Hicache) -> None:
    """Its objects and its manifest go; those of another, and foreign files, stay."""
    (filled / "README").write_text("mine")
    ended = hicache("rm", filled, "--namespace", DIGEST, "--yes")
    assert (ended.status, ended.out) == (0, "6 objects of 6 deleted\n")
    assert listed(f"file://{filled}") == {*keys_of(OTHER, 3), f"manifest_{OTHER.namespace.digest}"}
    assert (filled / "README").read_text() == "mine"


def test_rm_deletes_several_and_all(hicache: Hicache) -> None:
    """--namespace may be repeated, and --all means every object."""
    for url, arguments in {
        "full:a": ["--namespace", DIGEST, "--namespace", OTHER.namespace.digest],
        "full:b": ["--all"],
        "full:c": ["--all", "--namespace", ""],
    }.items():
        fill(url, (OWN, 5), (OTHER, 3))
        ended = hicache("rm", url, *arguments, "--yes", "--format", "json")
        assert (ended.status, ended.json["deleted"]) == (0, 10)
        assert not PlainStore._by_url[url.partition(":")[2]]._objects


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        ([], "give --namespace D", 2),
        (["--namespace", "", "--yes"], "--namespace is empty", 2),
        (["--namespace", DIGEST, "--namespace", "", "--yes"], "--namespace is empty", 2),
        (["--namespace", DIGEST, "--all", "--yes"], "without --namespace", 2),
        (["--namespace", "ukv1-0000000000000000", "--yes"], DIGEST, 1),
    ],
)
def test_rm_that_is_refused(
    filled: Path, hicache: Hicache, arguments: list[str], words: str, status: int
) -> None:
    """Nothing is deleted unless it was named, and an empty name is none."""
    before = listed(f"file://{filled}")
    ended = hicache("rm", filled, *arguments)
    assert ended.status == status and words in ended.err
    assert listed(f"file://{filled}") == before


def test_rm_asks(filled: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it asks, and only yes deletes; without one it refuses and says what to give."""

    class Terminal:
        def __init__(self, answer: str) -> None:
            self.answer = answer

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return self.answer

    before = listed(f"file://{filled}")
    done = run("rm", "kv", "--namespace", DIGEST, cwd=filled.parent)
    assert done.returncode == 2 and "--yes" in done.stderr and "delete 6 objects" in done.stderr
    for answer in ("", "n\n", "no\n"):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        ended = hicache("rm", filled, "--namespace", DIGEST)
        assert (ended.status, ended.out) == (1, "") and "nothing was deleted" in ended.err
    assert listed(f"file://{filled}") == before
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert hicache("rm", filled, "--namespace", DIGEST).status == 0
    assert len(listed(f"file://{filled}")) == 4


@pytest.mark.parametrize("url", ["plain:a", "naming:a"])
def test_rm_of_a_store_that_cannot_delete(hicache: Hicache, url: str) -> None:
    """What the store lacks is said before anything is asked."""
    ended = hicache("rm", url, "--all", "--yes")
    assert ended.status == 2 and "SupportsListing" in ended.err


# cp


def test_cp_copies_everything_once(filled: Path, hicache: Hicache) -> None:
    """Between stores of two kinds and back all objects arrive, whole; what is there already is skipped."""
    ended = hicache("cp", filled, "full:a", "--format", "json")
    assert (ended.status, ended.json["copied"], ended.json["present"]) == (0, 10, 0)
    again = hicache("cp", filled, "full:a", "--format", "json")
    assert (again.status, again.json["copied"], again.json["present"]) == (0, 0, 10)
    back = filled.parent / "back"
    assert hicache("cp", "full:a", back).out.startswith("10 objects: 10 copied")
    assert listed(f"file://{back}") == listed(f"file://{filled}")
    assert hicache("verify", back).status == 0
    assert hicache("ls", back).out.replace("back", "kv").count("model_id") == 2


def test_cp_goes_on_where_it_was(filled: Path, hicache: Hicache) -> None:
    """With some objects there, wherever among the others, the rest is copied."""
    fill("full:a", (OWN, 5))
    del PlainStore._by_url["a"]._objects[keys_of(OWN, 5)[2]]
    ended = hicache("cp", filled, "full:a", "--format", "json")
    assert (ended.json["copied"], ended.json["present"], ended.json["left"]) == (5, 5, 0)


def test_cp_of_one_namespace(filled: Path, hicache: Hicache) -> None:
    """Only what was asked for is copied, with its manifest."""
    assert hicache("cp", filled, "full:a", "--namespace", DIGEST).status == 0
    assert listed("full:a") == {*keys_of(OWN, 5), f"manifest_{DIGEST}"}
    assert hicache("cp", filled, "full:a", "--namespace", "ukv1-x").status == 1


def test_cp_copies_no_bad_object(filled: Path, hicache: Hicache) -> None:
    """What is damaged in the source is reported and left there; its neighbours are copied."""
    bad = keys_of(OWN, 5)[2]
    path = path_of(filled, bad)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    ended = hicache("cp", filled, "full:a", "--format", "json")
    assert (ended.status, ended.json["unreadable"], ended.json["copied"]) == (1, [bad], 9)
    assert path.exists() and "hicache verify" in ended.err


def test_cp_into_a_store_that_is_full(filled: Path, hicache: Hicache) -> None:
    """It stops where the target takes no more, says how much is left and what to do; then it goes on."""
    ended = hicache("cp", filled, "small:a", "--format", "json")
    assert (ended.status, ended.json["copied"], ended.json["left"]) == (1, 3, 7)
    assert "give it room" in ended.err
    assert hicache("cp", filled, "full:a", "--format", "json").json["copied"] == 7


def test_cp_holds_little_in_memory(filled: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one run of pages would be too large it is split, and everything arrives."""
    from hicache_async.cli import cp

    monkeypatch.setattr(cp, "COPY_NBYTES", 600)
    assert hicache("cp", filled, "full:a", "--format", "json").json["copied"] == 10


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("plain:a", "full:a", "SupportsListing"),
        ("nowhere", "full:a", "there is no directory"),
        ("full:a", "what:", "scheme"),
    ],
)
def test_cp_that_cannot_be(hicache: Hicache, source: str, target: str, words: str) -> None:
    """A source that cannot list, is not there, or a target that nothing opens is said to be."""
    ended = hicache("cp", source, target)
    assert ended.status == 2 and words in ended.err


@pytest.mark.parametrize("kind", ["shm", "mmap", "tiered", "zstd", "guard"])
def test_every_kind_of_store_is_looked_after(filled: Path, hicache: Hicache, kind: str) -> None:
    """Of slots, tiers, codecs and guards, too, what was copied there is listed, summed up, checked and removed."""
    name = f"hicache-tools-{os.getpid()}"
    url = {
        "shm": f"shm:{name}?max_bytes=1MB&slot_bytes=8192",
        "mmap": f"mmap://{filled.parent}/slots?max_bytes=1MB&slot_bytes=8192",
        "tiered": f"tiered:?fast=memory%3A&slow=file%3A%2F%2F{str(filled.parent / 'slow').replace('/', '%2F')}",
        "zstd": f"zstd+file://{filled.parent}/packed",
        "guard": f"guard+file://{filled.parent}/guarded",
    }[kind]
    (filled.parent / "packed").mkdir()
    (filled.parent / "guarded").mkdir()
    try:
        assert hicache("cp", filled, url, "--format", "json").json["copied"] == 10
        assert hicache("cp", filled, url, "--format", "json").json["present"] == 10
        assert set(hicache("ls", url, "--keys").out.split()) == listed(f"file://{filled}")
        assert hicache("stat", url, "--format", "json").json["nbytes"] == 8 * 512
        ended = hicache("verify", url, "--format", "json")
        skipped = {"raw": 8} if kind == "zstd" else {}  # their manifests say that they are none of zstd
        assert (ended.status, ended.json["objects"], ended.json["skipped"]) == (
            0,
            10 - len(skipped) * 8,
            skipped,
        )
        assert hicache("rm", url, "--namespace", DIGEST, "--yes").status == 0
        assert len(hicache("ls", url, "--format", "json").json["namespaces"]) == 1
    finally:
        Path(f"/dev/shm/hicache-{name}").unlink(missing_ok=True)
