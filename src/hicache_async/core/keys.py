"""Names of stored objects: what must match for two processes to share bytes is in the name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import msgspec

from ..config import CacheConfig

SCHEMA_VERSION = 1
_DIGEST = re.compile(r"ukv[0-9]+-[0-9a-f]{16}")


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that makes the bytes of one page differ, tokens aside."""

    schema_version: int = SCHEMA_VERSION
    model_id: str
    fingerprint: str
    dtype: str
    page_size: int
    rank_replicated: bool
    total_kv_heads: int
    head_group: int
    layer_partition: str
    object_layout: str
    codec: str

    @property
    def digest(self) -> str:
        """The short name: "ukv1-" and 64 bits of sha256 over the msgpack of all fields."""
        packed = msgspec.msgpack.encode(msgspec.to_builtins(self), order="sorted")
        return "ukv1-" + hashlib.sha256(packed).hexdigest()[:16]


def namespace_of(key: str) -> str:
    """Return the digest of the namespace that ``key`` is in, as "ukv1-0123456789abcdef"; "": in none.

    Every key of this library is ``{page hash or word}_{digest}_...`` or ``{word}_{digest}``.
    """
    parts = key.split("_", 2)
    return parts[1] if len(parts) > 1 and _DIGEST.fullmatch(parts[1]) else ""


def escape_model_id(model_id: str) -> str:
    """Return ``model_id`` in letters that every file system takes; injective, so a/b differs from a-b."""
    plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-"
    return "".join(
        letter if letter in plain else "".join(f"%{byte:02x}" for byte in letter.encode())
        for letter in model_id
    )


class RankSuffixKeys:
    """Name pages ``{hash}_{digest}_{model}_{tp}_{tp_size}[_{pp_size}_{pp}][_cp{r}_{n}]``.

    With replicated KV (MLA) the tensor-parallel part is left out: all ranks hold the same bytes.
    """

    __slots__ = ("namespace", "suffix", "writes")

    def __init__(self, namespace: Namespace, config: CacheConfig) -> None:
        self.namespace = namespace
        parts = [namespace.digest, escape_model_id(namespace.model_id)]
        if not namespace.rank_replicated:
            parts += [str(config.tp_rank), str(config.tp_size)]
        if config.pp_size > 1:
            parts += [str(config.pp_size), str(config.pp_rank)]
        if config.cp_size > 1:
            parts += [f"cp{config.cp_rank}", str(config.cp_size)]
        self.suffix = "_" + "_".join(parts)
        self.writes = not namespace.rank_replicated or config.tp_rank == 0
        """Whether this rank writes: of ranks that hold the same bytes only the first does."""

    def keys(self, hashes: Sequence[bytes]) -> list[str]:
        """Return the object names of pages with these hashes, in order."""
        suffix = self.suffix
        return [page_hash.hex() + suffix for page_hash in hashes]
