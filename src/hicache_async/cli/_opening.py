"""Opening stores for the command, and saying what a store lacks for a verb."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import quote

from ..abc import Store, SupportsDelete, SupportsListing, SupportsStat, SupportsSweep
from ..errors import HiCacheError
from ..stores._url import url_path
from ..stores.registry import open_store
from ._problem import Problem

_URL = re.compile(r"[a-z][a-z0-9+.-]+:")  # one letter and a colon is a path, if an odd one
_FILE = re.compile(r"(?:[a-z0-9.-]+\+)*file:")

_READ_ONLY: Mapping[str, object] = {"read_only": True, "max_bytes": None, "min_free_bytes": 0}
"""Options of a FileStore that changes nothing; limits, which a URL for an engine has, would make it delete."""


@asynccontextmanager
async def opened(store: str, *, read_only: bool, must_exist: bool = True) -> AsyncIterator[Store]:
    """Open the store behind a URL, or the FileStore in a directory, and close it at the end.

    Args:
        store: a URL, or the path of a directory.
        read_only: let a FileStore remove, make and repair nothing; other stores have no such option.
        must_exist: refuse a directory that is not there, rather than find it empty or make it.
    Raises: Problem: there is no such directory, or nothing can open this.
    """
    url = _url_of(store)
    options: dict[str, object] = {}
    try:
        if _FILE.match(url):
            _check_directory(url, must_exist=must_exist)
            options = dict(_READ_ONLY) if read_only else {}
        opening = open_store(url, **options)
    except HiCacheError as error:
        raise Problem(f"cannot open {store!r}: {error}") from error
    try:
        yield opening
    finally:
        await opening.aclose()


def _url_of(store: str) -> str:
    return store if _URL.match(store) else "file://" + quote(os.path.abspath(store))


def _check_directory(url: str, *, must_exist: bool) -> None:
    path = url_path(url)
    if not path:  # the private directory of this user
        return
    if os.path.exists(path) and not os.path.isdir(path):
        raise Problem(f"{path!r} is not a directory; give the directory that the file store is in")
    if must_exist and not os.path.isdir(path):
        raise Problem(
            f"there is no directory {path!r}; give the directory of a file store, or a URL such as "
            "file:///data/kv or shm:name"
        )


def listing_of(store: Store, purpose: str) -> SupportsListing:
    """Return ``store`` as one that lists its keys.

    Args:
        purpose: what that is needed for, as "ls --keys lists the keys of a store".
    Raises: Problem: it cannot.
    """
    if isinstance(store, SupportsListing):
        return store
    raise _lacks(store, "SupportsListing", "list_keys()", purpose)


def stating_of(store: Store, purpose: str) -> SupportsStat:
    """Return ``store`` as one that knows its objects' sizes and times; else as :func:`listing_of`."""
    if isinstance(store, SupportsStat):
        return store
    raise _lacks(store, "SupportsStat", "stat(keys)", purpose)


def deleting_of(store: Store, purpose: str) -> SupportsDelete:
    """Return ``store`` as one that deletes; else as :func:`listing_of`."""
    if isinstance(store, SupportsDelete):
        return store
    raise _lacks(store, "SupportsDelete", "delete(keys)", purpose)


def sweeping_of(store: Store, purpose: str) -> SupportsSweep:
    """Return ``store`` as one that sweeps; else as :func:`listing_of`."""
    if isinstance(store, SupportsSweep):
        return store
    raise _lacks(store, "SupportsSweep", "sweep()", purpose)


def _lacks(store: Store, capability: str, method: str, purpose: str) -> Problem:
    return Problem(
        f"{purpose}, and a {type(store).__name__} cannot: it lacks {capability} (async def {method}); "
        "use a store that has it"
    )
