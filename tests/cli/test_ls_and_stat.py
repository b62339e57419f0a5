"""ls and stat: what a store holds, by namespace, key and size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache_async.core.keys import namespace_of
from tests.cli.conftest import Hicache
from tests.cli.stores import PAGE_NBYTES, fill, keys_of, listed, names


@pytest.fixture(params=["file", "full"])
def url(request: pytest.FixtureRequest, root: Path) -> str:
    """Return the URL of a store with two namespaces, of which one is not written down."""
    url = f"file://{root}" if request.param == "file" else "full:a"
    fill(url, (names(), 3))
    fill(url, (names(page_size=16), 2), manifests=False)
    return url


def test_namespaces_are_listed_with_their_fields(url: str, hicache: Hicache) -> None:
    """Each namespace stands there with its objects, bytes, newest use and all that is written down of it."""
    ended = hicache("ls", url)
    assert (ended.status, ended.err) == (0, "")
    assert f"{names().namespace.digest}: 3 objects, 1.5 KiB, last used 20" in ended.out
    assert '    model_id = "llama"' in ended.out and "    page_size = 64" in ended.out
    assert f"{names(page_size=16).namespace.digest}: 2 objects, 1.0 KiB" in ended.out
    assert "no manifest that can be read" in ended.out
    assert any(key in ended.out for key in keys_of(names(page_size=16), 2))


def test_namespaces_as_json(url: str, hicache: Hicache) -> None:
    """One document holds the same, with sizes in bytes and times in seconds since 1970."""
    found = {each["namespace"]: each for each in hicache("ls", url, "--format", "json").json["namespaces"]}
    assert len(found) == 2
    own = found[names().namespace.digest]
    assert (own["objects"], own["nbytes"], own["manifest"]["page_size"]) == (3, 3 * PAGE_NBYTES, 64)
    assert own["last_used_s"] > 9e8
    assert found[names(page_size=16).namespace.digest]["manifest"] is None


def test_one_namespace(url: str, hicache: Hicache) -> None:
    """A name chooses one namespace or its keys; one that is not there is a problem that names those that are."""
    digest = names().namespace.digest
    assert [
        each["namespace"]
        for each in hicache("ls", url, "--namespace", digest, "--format", "json").json["namespaces"]
    ] == [digest]
    keys = hicache("ls", url, "--keys", "--namespace", digest).out.split()
    assert sorted(keys) == sorted([*keys_of(names(), 3), f"manifest_{digest}"])
    assert hicache("ls", url, "--namespace", "ukv1-x")[:2] == (1, "")
    ended = hicache("ls", url, "--keys", "--namespace", "ukv1-x")
    assert (ended.status, ended.out) == (1, "") and digest in ended.err


def test_keys_are_lines(url: str, hicache: Hicache) -> None:
    """Every key is a line, and as JSON a document a line with its size."""
    assert set(hicache("ls", url, "--keys").out.split()) == listed(url)
    lines = [json.loads(line) for line in hicache("ls", url, "--keys", "--format", "json").out.splitlines()]
    assert {line["key"] for line in lines} == listed(url)
    assert {line["nbytes"] for line in lines} == {PAGE_NBYTES, 4096}


def test_what_is_in_no_namespace(hicache: Hicache) -> None:
    """Objects of others are shown apart, and not taken for pages of a model."""
    fill("full:a", (names(), 1))
    from hicache_async import open_store

    open_store("full:a").inner._objects["README"] = b"x"  # type: ignore[attr-defined]
    ended = hicache("ls", "full:a")
    assert "(no namespace): 1 object, 1 bytes" in ended.out
    assert hicache("ls", "full:a", "--format", "json").json["namespaces"][-1]["namespace"] == ""


def test_a_store_that_only_knows_its_namespaces(hicache: Hicache) -> None:
    """Without a list of keys namespaces and what is written down of them are shown, and numbers are unknown."""
    fill("naming:a", (names(), 3))
    ended = hicache("ls", "naming:a")
    assert ended.status == 0
    assert f"{names().namespace.digest}: ? objects, ? bytes, last used ?" in ended.out
    assert "page_size = 64" in ended.out


def test_an_empty_store(root: Path, hicache: Hicache) -> None:
    """There is nothing to list, and that is said."""
    root.mkdir()
    assert hicache("ls", root)[:2] == (0, "the store is empty\n")
    assert hicache("stat", root).status == 0


@pytest.mark.parametrize("verb", ["ls", "stat"])
def test_a_store_that_can_list_nothing(verb: str, hicache: Hicache) -> None:
    """What the store lacks, and for what, is said in one line."""
    ended = hicache(verb, "plain:a")
    assert (ended.status, ended.out) == (2, "")
    assert "PlainStore cannot: it lacks SupportsListing (async def list_keys())" in ended.err
    assert ended.err.count("\n") == 1


def test_stat_sums_up(url: str, hicache: Hicache) -> None:
    """Totals, objects by namespace and sizes add up, manifests apart."""
    found = hicache("stat", url, "--format", "json").json
    assert (found["objects"], found["manifests"], found["nbytes"]) == (5, 1, 5 * PAGE_NBYTES)
    assert found["namespaces"] == {names().namespace.digest: 3, names(page_size=16).namespace.digest: 2}
    assert found["size"] == {"min": PAGE_NBYTES, "median": PAGE_NBYTES, "max": PAGE_NBYTES}
    assert found["sizes"] == [{"nbytes": PAGE_NBYTES, "objects": 5}]
    text = hicache("stat", url).out
    assert "holds     5 objects, 2.5 KiB, and 1 manifest" in text
    assert "min 512 bytes, median 512 bytes, max 512 bytes" in text


def test_stat_shows_limits_counts_and_leftovers(root: Path, hicache: Hicache) -> None:
    """Options of the URL, what the store counts, and files under construction are shown."""
    fill(f"file://{root}", (names(), 1))
    (root / "v2" / "temp").mkdir(exist_ok=True)
    (root / "v2" / "temp" / "left").write_text("x")
    found = hicache("stat", f"file://{root}?max_bytes=1GB", "--format", "json").json
    assert (found["options"], found["under_construction"]) == ({"max_bytes": "1GB"}, 1)
    text = hicache("stat", f"file://{root}?max_bytes=1GB").out
    assert "max_bytes=1GB" in text and "1 file under construction" in text
    assert "max_bytes  1,000" in hicache("stat", "full:a").out


def test_reading_changes_nothing(root: Path, hicache: Hicache) -> None:
    """ls, stat, verify and doctor leave every file of a damaged store as it was."""
    fill(f"file://{root}", (names(), 3))
    (path,) = [path for path in root.rglob("*.kv") if path.name.startswith(keys_of(names(), 1)[0][:64])]
    path.write_bytes(path.read_bytes()[:-1])
    before = {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()
    }
    for arguments in (
        ["ls"],
        ["ls", "--keys"],
        ["stat"],
        ["verify"],
        ["gc", "--dry-run", "--older-than", "0s"],
    ):
        hicache(arguments[0], root, *arguments[1:])
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}
    assert after == before
    assert namespace_of(keys_of(names(), 1)[0])
