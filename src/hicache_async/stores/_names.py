"""Names of objects in a directory: injective, inside it, and legal on any file system."""

from __future__ import annotations

import hashlib
import re
import zlib

SUFFIX = ".kv"

_SHARDS = tuple(f"{shard:02x}" for shard in range(256))  # to format one takes as long as all the rest
_MAX_NAME = 200  # bytes; file systems allow 255
_PLAIN = b"abcdefghijklmnopqrstuvwxyz0123456789_-"
_TO_ESCAPE = re.compile(rb"[^a-z0-9_-]")
_ESCAPED = re.compile(rb"%([0-9a-f]{2})")


def key_bytes(key: str) -> bytes:
    """Return the bytes of any str, lone surrogates included, injectively."""
    return key.encode("utf-8", "surrogatepass")


def object_name(raw_key: bytes) -> str:
    """Return the path of an object, relative to the directory of objects, by the bytes of its key.

    It is ``xx/name.kv``, where xx spreads the objects over 256 directories. The name is the key with
    every byte escaped as ``%xx`` that is not a lower-case letter, a digit, ``_`` or ``-``: upper case
    too, as some file systems ignore case. A long key is named by its SHA-256, after a ``~`` that no
    escaped key contains.
    """
    name = (raw_key if not raw_key.translate(None, _PLAIN) else _escape(raw_key)).decode()
    if len(name) > _MAX_NAME:
        name = "~" + hashlib.sha256(raw_key).hexdigest()
    return f"{_SHARDS[zlib.crc32(raw_key) & 0xFF]}/{name}{SUFFIX}"


def _escape(raw_key: bytes) -> bytes:
    return _TO_ESCAPE.sub(lambda byte: b"%%%02x" % byte[0][0], raw_key)


def key_of_name(file_name: str) -> str | None:
    """Return the key whose object has this file name; None where the name does not tell."""
    name = file_name.removesuffix(SUFFIX)
    if name == file_name or name.startswith("~"):
        return None
    try:
        raw = _ESCAPED.sub(lambda digits: bytes.fromhex(digits[1].decode()), name.encode())
        key = raw.decode("utf-8", "surrogatepass")
    except UnicodeError:
        return None
    return key if object_name(raw).partition("/")[2] == file_name else None
