"""Names of stored objects: what must match for two processes to share bytes is in the name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from ..config import CacheConfig, HostLayout, KeyScheme
from .grid import Cell, KVShape, first_layer, grid_of, page_cells, token_share, total_heads

SCHEMA_VERSION = 1
_DIGEST = re.compile(r"ukv[0-9]+-[0-9a-f]{16}")


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that makes the bytes of one page differ, tokens aside.

    Attributes:
        total_kv_heads, head_group: heads of the model and of one object; MLA: 0.
        layer_partition: layers of one object.
        object_layout: order of its axes, widths of K and V, and what else of the model or page it is a part of.
        codec: how the store encodes objects; "raw": not at all.
    """

    schema_version: int = SCHEMA_VERSION
    model_id: str
    fingerprint: str
    dtype: str
    page_size: int
    rank_replicated: bool
    total_kv_heads: int
    head_group: int
    layer_partition: int
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


class KeyNames:
    """The names of the objects of one rank: each page is one or more chunks, and each chunk is one object.

    Args:
        namespace: whose digest stands behind the page's hash.
        tails: how the name of each chunk of a page goes on behind the digest, in the order of their bytes.
        writes: whether this rank writes; of ranks that hold the same bytes under one name only the first does.
        chunk_layers: how many layers each chunk holds, which is its share of the page's bytes.
    """

    __slots__ = ("_chunk_layers", "_tails", "namespace", "suffixes", "writes")

    def __init__(
        self, namespace: Namespace, tails: Sequence[str], *, writes: bool, chunk_layers: Sequence[int] = (1,)
    ) -> None:
        self.namespace = namespace
        self.writes = writes
        self._tails = tuple(tails)
        self._chunk_layers = tuple(chunk_layers)
        self.suffixes = tuple(f"_{namespace.digest}{tail}" for tail in self._tails)
        """What follows the page's hash in the name of each chunk."""

    @property
    def suffix(self) -> str:
        """What follows the page's hash in the name of its first chunk."""
        return self.suffixes[0]

    @property
    def num_chunks(self) -> int:
        """Objects of one page."""
        return len(self.suffixes)

    def keys(self, hashes: Sequence[bytes]) -> list[str]:
        """Return the names of all chunks of pages with these hashes, page by page."""
        suffixes = self.suffixes
        if len(suffixes) == 1:
            suffix = suffixes[0]
            return [page_hash.hex() + suffix for page_hash in hashes]
        return [page + suffix for page in map(bytes.hex, hashes) for suffix in suffixes]

    def spans(self, page_nbytes: int) -> list[slice]:
        """Return where in the bytes of a page, in the order of the object, each chunk lies."""
        layer_nbytes = page_nbytes // sum(self._chunk_layers)
        ends = [layer_nbytes * num_layers for num_layers in accumulate(self._chunk_layers)]
        return [slice(start, end) for start, end in pairwise((0, *ends))]

    def with_codec(self, codec: str) -> KeyNames:
        """Return the names in a store whose objects are encoded as ``codec`` says."""
        if codec == self.namespace.codec:
            return self
        namespace = msgspec.structs.replace(self.namespace, codec=codec)
        return KeyNames(namespace, self._tails, writes=self.writes, chunk_layers=self._chunk_layers)


def key_names(config: CacheConfig, kv: KVShape, *, codec: str = "raw") -> KeyNames:
    """Return how the objects of a cache are named, by the scheme that its config asks for.

    Raises: NamespaceError: the shape of the rank does not fit its config, or the grid of those that share.
    """
    if config.key_scheme is KeyScheme.UNIFIED:
        return unified_names(config, kv, codec=codec)
    return rank_suffix_names(config, kv, codec=codec)


# One object a page and rank


def rank_suffix_names(config: CacheConfig, kv: KVShape, *, codec: str = "raw") -> KeyNames:
    """Name pages ``{hash}_{digest}_{model}_{tp}_{tp_size}[_{pp_size}_{pp}][_cp{r}_{n}]``.

    With replicated KV (MLA) the tensor-parallel part is left out: all its ranks hold the same bytes. Every cp
    rank has a name of its own, whether it holds a slice of each page or all of it.

    Raises: NamespaceError: as :func:`key_names`.
    """
    parts = [escape_model_id(config.model_id)]
    if not kv.is_mla:
        parts += [str(config.tp_rank), str(config.tp_size)]
    if config.pp_size > 1:
        parts += [str(config.pp_size), str(config.pp_rank)]
    if config.cp_size > 1:
        parts += [f"cp{config.cp_rank}", str(config.cp_size)]
    namespace = Namespace(
        **_facts(config, kv),
        head_group=_heads_in_order(config, kv),
        layer_partition=kv.num_layers,
        object_layout=_own_layout(config, kv),
        codec=codec,
    )
    writes = not kv.is_mla or config.tp_rank == 0
    return KeyNames(namespace, ["_" + "_".join(parts)], writes=writes)


def _heads_in_order(config: CacheConfig, kv: KVShape) -> int:
    if kv.is_mla:
        return 0
    return kv.kv_heads // page_cells(config, kv).head_groups


def _own_layout(config: CacheConfig, kv: KVShape) -> str:
    # Outermost axis first: host layouts that give the same bytes share objects.
    if page_cells(config, kv).head_groups > 1:
        order = "group_layer_kv_token"
    elif config.host_layout is HostLayout.PAGE_FIRST_DIRECT and not kv.is_mla:
        order = "kv_layer_token"
    else:
        order = "layer_kv_token"
    is_slice = token_share(config, kv) > 1
    first = first_layer(config)
    place = (f";tokens={kv.page_size}" if is_slice else "") + (f";first_layer={first}" if first else "")
    return f"{order}:{_widths(kv)}{place}"


# One object a cell of the model


def unified_names(config: CacheConfig, kv: KVShape, *, codec: str = "raw") -> KeyNames:
    """Name chunks ``{hash}_{digest}_L{a}-{b}[_H{g}][_T{a}-{b}]``: by what they hold, never by who wrote them.

    Layers ``a .. b-1`` of the model, group ``g`` of its KV heads, tokens ``a .. b-1`` of the page. H is left out
    for MLA, and T where pages are not split by tokens.

    Raises: NamespaceError: as :func:`key_names`.
    """
    grid = grid_of(config, kv)
    cells = list(grid.cells())
    namespace = Namespace(
        **_facts(config, kv),
        head_group=grid.head_group,
        layer_partition=grid.layer_partition,
        object_layout=(
            f"group_cell_layer_kv_token:{_widths(kv)};layers={grid.total_layers};token_group={grid.token_group}"
        ),
        codec=codec,
    )
    tails = [_coordinates(cell, split=grid.token_group < grid.page_size) for cell in cells]
    return KeyNames(
        namespace, tails, writes=grid.is_writer, chunk_layers=[len(cell.layers) for cell in cells]
    )


def _coordinates(cell: Cell, *, split: bool) -> str:
    layers, tokens = cell.layers, cell.tokens
    heads = "" if cell.head_group is None else f"_H{cell.head_group}"
    return f"_L{layers.start}-{layers.stop}{heads}" + (f"_T{tokens.start}-{tokens.stop}" if split else "")


def _widths(kv: KVShape) -> str:
    return "+".join(str(dim) for dim in kv.head_dims)


def _facts(config: CacheConfig, kv: KVShape) -> dict[str, Any]:
    return {
        "model_id": config.model_id,
        "fingerprint": config.fingerprint,
        "dtype": kv.dtype,
        "page_size": config.page_size,
        "rank_replicated": kv.is_mla,
        "total_kv_heads": total_heads(config, kv),
    }
