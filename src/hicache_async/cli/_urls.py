"""URLs of stores that change nothing, and where the stores that they are composed of keep their objects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from urllib.parse import parse_qsl, urlencode

from ..stores._composed import TIERED, WRAPPERS, tier_urls
from ..stores._url import url_path
from ._problem import Problem

_LIMITS = ("max_bytes", "min_free_bytes", "slot_bytes")
"""What a URL for an engine has: limits would make a store delete, and sizes are those of what is there."""


def unlimited(url: str, *, read_only: bool) -> str:
    """Return ``url`` without limits, and, if asked for, read-only wherever a store has that option, in tiers too."""
    prefixes, inner = _split(url)
    head, _, query = inner.partition("?")
    scheme = head.partition(":")[0]
    if scheme not in ("file", "shm", "mmap", TIERED):
        return url
    dropped = (*_LIMITS, "read_only") if read_only else _LIMITS
    pairs = [pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] not in dropped]
    if scheme == TIERED:  # what is read from the slow store is not put into the fast one
        pairs = [
            (name, unlimited(value, read_only=read_only) if name in ("fast", "slow") else value)
            for name, value in pairs
            if name != "fill_bytes"
        ]
        pairs.append(("fill_bytes", "0"))
    elif scheme == "file" and read_only:
        pairs.append(("read_only", "true"))
    return prefixes + head + (f"?{urlencode(pairs)}" if pairs else "")


def check_places(url: str, *, must_exist: bool) -> None:
    """Look whether what a URL keeps objects in can be there, and can be listed.

    Args:
        must_exist: refuse what is not there.
    Raises: Problem: with the path, and why. ConfigError: the URL is none.
    """
    for leaf in _leaves(url):
        scheme = leaf.partition(":")[0]
        if scheme == "file":
            _check_directory(url_path(leaf), must_exist=must_exist)
        elif must_exist and scheme in ("shm", "mmap"):
            _check_segment(leaf, scheme)


def _split(url: str) -> tuple[str, str]:
    """Return the prefixes of the wrappers, and the URL behind them."""
    prefixes = ""
    while True:
        name, plus, rest = url.partition("+")
        if not plus or name not in WRAPPERS:
            return prefixes, url
        prefixes, url = prefixes + name + plus, rest


def _leaves(url: str) -> Iterator[str]:
    _, inner = _split(url)
    if inner.partition(":")[0] != TIERED:
        yield inner
        return
    for tier in tier_urls(inner).values():
        yield from _leaves(tier)


def _check_segment(url: str, scheme: str) -> None:
    path = url_path(url)
    if scheme == "shm":
        directory = dict(parse_qsl(url.partition("?")[2])).get("directory", "/dev/shm")
        path = os.path.join(directory, f"hicache-{path}")
    if not os.path.exists(path):
        raise Problem(
            f"{path!r} does not exist, and nothing is made to be looked at; give a store that is there"
        )


def _check_directory(path: str, *, must_exist: bool) -> None:
    if not path:  # the private directory of this user
        return
    if os.path.exists(path) and not os.path.isdir(path):
        raise Problem(f"{path!r} is not a directory; give the directory that the file store is in")
    if not must_exist:
        return
    try:
        _names_in(path)
    except FileNotFoundError:
        raise Problem(
            f"there is no directory {path!r}; give the directory of a file store, or a URL such as "
            "file:///data/kv or shm:name"
        ) from None
    objects = os.path.join(path, "v2", "objects")
    with contextlib.suppress(FileNotFoundError):  # nothing was stored yet
        for namespace in _names_in(objects):
            with contextlib.suppress(FileNotFoundError):  # the last of it has gone
                _names_in(os.path.join(objects, namespace))


def _names_in(path: str) -> list[str]:
    """Return the directories in ``path``.

    Raises: Problem: it cannot be listed, so it would be taken for empty. FileNotFoundError.
    """
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Problem(
            f"{path!r} cannot be listed: {error.strerror}; run this as a user who may read it"
        ) from error
