"""Importing the package is quick: names are found when first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hicache_async

SCRIPT = """
import sys
import hicache_async
from hicache_async import CacheConfig, StoreError, open_store
import hicache_async.stores
assert "torch" not in sys.modules, "torch was loaded"
from hicache_async import HiCache
assert "torch" in sys.modules
"""


@pytest.mark.parametrize("name", hicache_async.__all__)
def test_every_public_name_can_be_found(name: str) -> None:
    """Each name of __all__ is where the package says, and listed by dir()."""
    assert getattr(hicache_async, name).__name__ == name
    assert name in dir(hicache_async)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A name that does not exist is refused as usual."""
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = hicache_async.Nonsense


def test_stores_and_options_do_not_wait_for_torch() -> None:
    """The package, its options, errors and stores are imported without torch; the cache brings it."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
