"""Names of objects in a directory: injective, inside it, and legal on any file system."""

from __future__ import annotations

import hashlib
import re
import zlib
from functools import lru_cache
from typing import NamedTuple

from ..core.keys import namespace_of

SUFFIX = ".kv"
NO_NAMESPACE = "_"
"""The directory of keys that are in no namespace."""

SHARDS = tuple(f"{shard:02x}" for shard in range(32))
"""Directories of a namespace: many enough that a million objects are tens of thousands in each, and few enough
that to sync each directory once costs little beside the data of 64 objects. Measured on ext4, it is 0.4 of the
time that syncing object by object takes; with 256 directories it is 0.7."""

_MAX_NAME = 200  # bytes; file systems allow 255
_PLAIN = b"abcdefghijklmnopqrstuvwxyz0123456789_-"
_TO_ESCAPE = re.compile(rb"[^a-z0-9_-]")
_ESCAPED = re.compile(rb"%([0-9a-f]{2})")
_DEVICES = frozenset(
    [b"con", b"prn", b"aux", b"nul", *(b"%s%d" % (port, n) for port in (b"com", b"lpt") for n in range(10))]
)
"""No file of Windows may be named so, whatever its suffix."""


class Place(NamedTuple):
    """Where the object of one key lies, and the two fields of its header that follow from the key.

    Attributes:
        path: relative to the directory of objects.
        key: the bytes of the key.
        namespace: digest of its namespace; "" when it is in none.
    """

    path: str
    key: bytes
    namespace: str


def place_of(key: str) -> Place:
    """Return the place of ``key``: ``{namespace or "_"}/xx/name.kv``, where xx is one of 32 directories.

    The name is the key with every byte escaped as ``%xx`` that is not a lower-case letter, a digit, ``_``
    or ``-``: upper case too, as some file systems ignore case, and the first letter of a device of Windows.
    A long key is named by its SHA-256, after a ``~`` that no escaped key contains.
    """
    raw_key = key_bytes(key)
    head, underscore, tail = key.partition("_")
    name, namespace = _escape(head), ""
    if underscore:
        escaped_tail, namespace = _tail_of(tail)
        name = f"{name}_{escaped_tail}"
    elif raw_key in _DEVICES:
        name = f"%{raw_key[0]:02x}{name[1:]}"
    if len(name) > _MAX_NAME:
        name = "~" + hashlib.sha256(raw_key).hexdigest()
    path = f"{namespace or NO_NAMESPACE}/{shard_of(raw_key)}/{name}{SUFFIX}"
    return Place(path, raw_key, namespace)


def key_bytes(key: str) -> bytes:
    """Return the bytes of any str, lone surrogates included, injectively."""
    return key.encode("utf-8", "surrogatepass")


def shard_of(raw_key: bytes) -> str:
    """Return the directory, within that of its namespace, in which the object of a key lies."""
    return SHARDS[zlib.crc32(raw_key) & 0x1F]


@lru_cache(maxsize=256)
def _tail_of(tail: str) -> tuple[str, str]:
    """Return what follows the first ``_`` of a key, escaped, and the namespace that stands there.

    The pages of one rank have it in common, and to escape it takes longer than to look into a file.
    """
    return _escape(tail), namespace_of(f"_{tail}")


def _escape(text: str) -> str:
    raw = key_bytes(text)
    if raw.translate(None, _PLAIN):
        raw = _TO_ESCAPE.sub(lambda byte: b"%%%02x" % byte[0][0], raw)
    return raw.decode()


def key_of_name(file_name: str) -> str | None:
    """Return the key whose object has this file name; None where the name does not tell."""
    name = file_name.removesuffix(SUFFIX)
    if name == file_name or name.startswith("~"):
        return None
    head, underscore, tail = name.partition("_")
    try:
        key = _unescape(head) + (f"_{_unescaped_tail(tail)}" if underscore else "")
    except UnicodeError:
        return None
    return key if place_of(key).path.rpartition("/")[2] == file_name else None


@lru_cache(maxsize=256)
def _unescaped_tail(tail: str) -> str:
    return _unescape(tail)


def _unescape(name: str) -> str:
    raw = name.encode()
    if b"%" in raw:
        raw = _ESCAPED.sub(lambda digits: bytes.fromhex(digits[1].decode()), raw)
    return raw.decode("utf-8", "surrogatepass")
