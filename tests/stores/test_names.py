"""Object names: injective, legal everywhere, inside the directory."""

from __future__ import annotations

import itertools
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from hicache_async.stores._names import key_of_name, place_of

ODD_KEYS = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/",
    "a/b",
    "a-b",
    "a%2fb",
    "a%2Fb",
    "A",
    "a",
    "%41",
    "~a",
    "a.kv",
    "con",
    "nul",
    "com1",
    "CON",
    "con_",
    "a\nb",
    "a\0b",
    " ",
    "ключ",
    "\ud800",
    "k" * 200,
    "k" * 201,
    "k" * 10_000,
    "K" * 67,
    "~" + "0" * 64,
]


WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}


def name_of(key: str) -> str:
    """Return the path of an object below the directory of its namespace."""
    return place_of(key).path.partition("/")[2]


@pytest.mark.parametrize("key", ODD_KEYS, ids=ascii)
def test_a_name_is_legal_and_stays_inside(key: str) -> None:
    """Any key gives two short path components of harmless characters."""
    assert re.fullmatch(r"[0-9a-f]{2}/[a-z0-9_%~-]{0,200}\.kv", name_of(key))
    assert name_of(key)[3:].partition(".")[0] not in WINDOWS_DEVICES


def test_names_are_injective() -> None:
    """Different keys have different names, on a file system that ignores case too."""
    letters = ["".join(pair) for pair in itertools.product("aA/-_.%2", repeat=2)]
    keys = dict.fromkeys([*ODD_KEYS, *letters])
    assert len({name_of(key).lower() for key in keys}) == len(keys)


@hypothesis.given(st.lists(st.text(st.characters(), max_size=300), max_size=20))
def test_no_key_leaves_the_directory(keys: list[str]) -> None:
    """Whatever two keys are, their paths are two, of three components that every system takes."""
    paths = [place_of(key).path for key in dict.fromkeys(keys)]
    assert len({path.lower() for path in paths}) == len(paths)
    for path in paths:
        assert re.fullmatch(r"(_|ukv[0-9]+-[0-9a-f]{16})/[0-9a-f]{2}/[a-z0-9_%~-]{0,200}\.kv", path)
        assert path.rpartition("/")[2].partition(".")[0] not in WINDOWS_DEVICES


def test_a_namespace_has_a_directory_of_its_own() -> None:
    """Pages and the manifest of a namespace lie together, and what only looks like a namespace does not."""
    digest = "ukv1-0123456789abcdef"
    assert place_of(f"0f_{digest}_model").path.startswith(f"{digest}/")
    assert place_of(f"manifest_{digest}").namespace == digest
    for key in (digest, f"0f_{digest}0", f"0f_{digest.upper()}_m", f"0f_x_{digest}", f"0f_../{digest}_m"):
        assert place_of(key).path.startswith("_/"), key


@pytest.mark.parametrize("key", ODD_KEYS, ids=ascii)
def test_a_name_tells_its_key_unless_it_is_long(key: str) -> None:
    """A file name gives the key back; that of a long key does not."""
    name = name_of(key).partition("/")[2]
    assert key_of_name(name) == (None if name.startswith("~") else key)


@pytest.mark.parametrize(
    "name", ["a", "A.kv", "a%.kv", "a%2.kv", "%zz.kv", "%ff.kv", "%61.kv", "a.b.kv", ".kv.kv"]
)
def test_a_foreign_file_has_no_key(name: str) -> None:
    """A file name that no key has is nobody's."""
    assert key_of_name(name) is None


def test_objects_are_spread() -> None:
    """Keys that look alike fall into many directories."""
    assert len({name_of(f"{number:064x}_model_0_1").partition("/")[0] for number in range(4096)}) == 32


def test_names_are_for_ever() -> None:
    """The names of objects on disk do not change from release to release."""
    assert name_of("0f3a_ukv1-00_Model/8B_0_2") == "11/0f3a_ukv1-00_%4dodel%2f8%42_0_2.kv"
