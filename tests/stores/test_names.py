"""Object names: injective, legal everywhere, inside the directory."""

from __future__ import annotations

import itertools
import re

import pytest

from hicache_async.stores._names import key_bytes, key_of_name, object_name

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


def name_of(key: str) -> str:
    return object_name(key_bytes(key))


@pytest.mark.parametrize("key", ODD_KEYS, ids=ascii)
def test_a_name_is_legal_and_stays_inside(key: str) -> None:
    """Any key gives two short path components of harmless characters."""
    assert re.fullmatch(r"[0-9a-f]{2}/[a-z0-9_%~-]{0,200}\.kv", name_of(key))


def test_names_are_injective() -> None:
    """Different keys have different names, on a file system that ignores case too."""
    letters = ["".join(pair) for pair in itertools.product("aA/-_.%2", repeat=2)]
    keys = dict.fromkeys([*ODD_KEYS, *letters])
    assert len({name_of(key).lower() for key in keys}) == len(keys)


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
    assert len({name_of(f"{number:064x}_model_0_1").partition("/")[0] for number in range(4096)}) == 256


def test_names_are_for_ever() -> None:
    """The names of objects on disk do not change from release to release."""
    assert name_of("0f3a_ukv1-00_Model/8B_0_2") == "91/0f3a_ukv1-00_%4dodel%2f8%42_0_2.kv"
