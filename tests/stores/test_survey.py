"""Survey: what is an object, in what order objects go, and what a look at a broken directory says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_async.stores._files.survey import Survey, evict, is_object
from hicache_async.stores._names import SHARDS, place_of
from tests.stores.capacity import Shelf

DIGEST = "ukv1-0123456789abcdef"
LETTERS = st.characters(codec="utf-8") | st.sampled_from("abz09_-%~./\\AZ")
KEYS = st.one_of(
    st.text(LETTERS, max_size=40),
    st.text("ax_%Z", min_size=180, max_size=210),
    st.sampled_from(["con", "nul", "com1", "aux.", "", "\ud800", "x" * 5000]),
    st.builds(lambda name, rest: f"{name}_{DIGEST}_{rest}", st.text(LETTERS, max_size=9), st.text(LETTERS)),
)


@given(KEYS)
def test_the_object_of_any_key_is_one(key: str) -> None:
    """Whatever a key looks like, its place is an object's, and in another namespace or shard it is none."""
    namespace, shard, name = place_of(key).path.split("/")
    assert is_object(namespace, shard, name)
    assert not is_object("ukv1-0123456789abcdee", shard, name) or name.startswith("~")
    if not name.startswith("~"):
        assert not any(is_object(namespace, other, name) for other in SHARDS if other != shard)


def test_names_that_are_nearly_right() -> None:
    """A needless escape, an escape in upper case, and what is not a whole hash are foreign."""
    key = "a" * 20
    namespace, shard, name = place_of(key).path.split("/")
    assert is_object(namespace, shard, name)
    assert not is_object(namespace, shard, "%61" + name[1:])
    shouted = place_of("A" + key).path.split("/")
    assert shouted[2].startswith("%41")
    assert is_object(*shouted)
    dotted = place_of("/" + key).path.split("/")
    assert is_object(*dotted)
    assert not is_object(dotted[0], dotted[1], dotted[2].replace("%2f", "%2F"))
    hashed = place_of("x" * 500).path.split("/")
    assert is_object(*hashed)
    assert not is_object(hashed[0], hashed[1], hashed[2].replace(".kv", "0.kv"))


def test_the_oldest_come_first_over_all_shards(tmp_path: Path) -> None:
    """Objects of any namespace and shard come in the order of their last use."""
    shelf = Shelf(tmp_path)
    keys = [f"{number:08x}_ukv1-{number % 3:016x}_m" for number in range(50)]
    shelf.leave(*keys)
    survey = Survey.of(str(shelf.directory / "objects"), str(shelf.directory / "temp"))
    assert [found.path for found in survey.oldest_first()] == [str(shelf.path(key)) for key in keys]
    assert (survey.num_objects, survey.nbytes, survey.temp_nbytes) == (50, 50 * 8192, 0)


def test_files_under_construction_are_counted_apart(tmp_path: Path) -> None:
    """Whoever writes them, they take room and are nobody's to evict."""
    shelf = Shelf(tmp_path)
    shelf.begin(5000)
    survey = Survey.of(str(shelf.directory / "objects"), str(shelf.directory / "temp"))
    assert (survey.num_objects, survey.nbytes, survey.temp_nbytes) == (0, 0, 8192)
    assert list(survey.oldest_first()) == []
    assert survey.error is None, "there are no objects yet"


def test_what_cannot_be_listed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shard that fails costs no other, and the survey says that it is not whole."""
    shelf = Shelf(tmp_path)
    keys = [f"key{number}" for number in range(20)]
    shelf.leave(*keys)
    bad = shelf.path(keys[0]).parent
    num_bad = sum(shelf.path(key).parent == bad for key in keys)
    scandir = os.scandir

    def failing_scandir(path: str) -> object:
        if path == str(bad):
            raise OSError(5, "Input/output error", path)
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing_scandir)
        survey = Survey.of(str(shelf.directory / "objects"), str(shelf.directory / "temp"))
    assert survey.num_objects == 20 - num_bad
    assert isinstance(survey.error, OSError)


def test_an_eviction_tells_what_became_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What went, what somebody else removed, what was touched and what cannot be removed are told apart."""
    shelf = Shelf(tmp_path)
    shelf.leave("goes", "gone", "touched", "stays")
    survey = Survey.of(str(shelf.directory / "objects"), str(shelf.directory / "temp"))
    victims = list(survey.oldest_first())
    shelf.path("gone").unlink()
    os.utime(shelf.path("touched"))
    unlink = os.unlink

    def refusing_unlink(path: str) -> None:
        if "stays" in path:
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refusing_unlink)
    evicted = evict(victims)
    assert (evicted.nbytes, evicted.paths) == (8192, [str(shelf.path("goes"))])
    assert [error.filename for error in evicted.errors] == [str(shelf.path("stays"))]
    assert shelf.keys("goes", "gone", "touched", "stays") == ["touched", "stays"]
