"""Opening stores for the command, and saying what a store lacks for a verb."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

from ..abc import Store, SupportsDelete, SupportsListing, SupportsStat, SupportsSweep
from ..errors import HiCacheError
from ..stores.registry import open_store
from ._problem import Problem
from ._urls import check_places, unlimited

_URL = re.compile(r"[a-z][a-z0-9+.-]+:")  # one letter and a colon is a path, if an odd one


@asynccontextmanager
async def opened(
    store: str, *, read_only: bool, must_exist: bool = True, limited: bool = True
) -> AsyncIterator[Store]:
    """Open the store behind a URL, or the FileStore in a directory, and close it at the end.

    Args:
        store: a URL, or the path of a directory.
        read_only: let every FileStore in it remove, make and repair nothing, and no limit be enforced; other
            stores have no such option.
        limited: let limits in the URL be enforced, where it may write.
        must_exist: refuse what is not there or cannot be listed, rather than find it empty or make it.
    Raises: Problem: it is not there, or nothing can open this.
    """
    url = _url_of(store)
    try:
        check_places(url, must_exist=must_exist)
        if read_only or not limited:
            url = unlimited(url, read_only=read_only)
        opening = open_store(url)
    except HiCacheError as error:
        raise Problem(f"cannot open {store!r}: {error}") from error
    try:
        yield opening
    finally:
        await opening.aclose()


def _url_of(store: str) -> str:
    return store if _URL.match(store) else "file://" + quote(os.path.abspath(store))


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
