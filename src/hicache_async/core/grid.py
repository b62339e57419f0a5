"""Grid: which part of every page of a model one rank holds, and how that is cut into chunks that ranks share.

A page of the whole model is a box of layers x KV heads x tokens. A rank holds a box within it, in absolute
coordinates. The grid cuts the model's box into cells of ``layer_partition`` layers, ``head_group`` heads and
``token_group`` tokens; a rank whose box is not made of whole cells is refused, since what it stored could not
be put together again by another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..config import CacheConfig, HostLayout, KeyScheme
from ..errors import NamespaceError


class KVShape(Protocol):
    """What keys depend on of an engine's tensors: a :class:`DeviceKV`, or what describes one."""

    @property
    def num_layers(self) -> int:
        """Layers of this rank."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page on this rank."""
        ...

    @property
    def dtype(self) -> str:
        """Logical dtype by name."""
        ...

    @property
    def kv_heads(self) -> int:
        """KV heads of this rank; MLA: 1."""
        ...

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Elements of one head of K and of V; MLA: of the latent vector."""
        ...

    @property
    def is_mla(self) -> bool:
        """Whether there is one latent plane instead of K and V."""
        ...


class PageCells(NamedTuple):
    """How many groups of heads, and cells of tokens, lie apart in head_grouped order."""

    head_groups: int = 1
    token_cells: int = 1


WHOLE = PageCells()
"""A page in one piece."""


class Cell(NamedTuple):
    """What one chunk of a page holds: half-open ranges of the model; ``head_group`` is None for MLA."""

    head_group: int | None
    tokens: range
    layers: range


@dataclass(frozen=True, slots=True)
class Grid:
    """The box of one rank, and the cells it is cut into.

    Attributes:
        heads, tokens, layers: what the rank holds of each page; MLA: no heads.
        total_heads, page_size, total_layers: the whole model's; MLA: 0 heads.
        head_group, token_group, layer_partition: how large a cell is; MLA: 0 heads.
        is_writer: of the ranks that hold the same box this is the first.
    """

    heads: range
    tokens: range
    layers: range
    total_heads: int
    page_size: int
    total_layers: int
    head_group: int
    token_group: int
    layer_partition: int
    is_writer: bool

    @property
    def page_cells(self) -> PageCells:
        """How this rank's part of a page is cut; across layers a cut needs no bytes to move."""
        groups = len(self.heads) // self.head_group if self.heads else 1
        return PageCells(groups, len(self.tokens) // self.token_group)

    def cells(self) -> Iterator[Cell]:
        """Yield this rank's cells in the order of their bytes: head group, tokens, layers."""
        for group in self._head_groups():
            for tokens in _cut(self.tokens, self.token_group):
                for layers in _cut(self.layers, self.layer_partition):
                    yield Cell(group, tokens, layers)

    def _head_groups(self) -> Sequence[int | None]:
        if not self.heads:
            return (None,)
        return range(self.heads.start // self.head_group, self.heads.stop // self.head_group)


def _cut(whole: range, step: int) -> Iterator[range]:
    for start in range(whole.start, whole.stop, step):
        yield range(start, min(start + step, whole.stop))


def grid_of(config: CacheConfig, kv: KVShape) -> Grid:
    """Return where the tensors of a rank lie in the model, and how the fleet cuts it.

    Raises: NamespaceError: what is given does not fit together, or may mean two things; names what to set.
    """
    heads, head_copies = _heads(config, kv)
    tokens, token_copies = _tokens(config, kv)
    layers = _layers(config, kv)
    total_layers = layers.stop if config.total_layers is None else config.total_layers
    return Grid(
        heads=heads,
        tokens=tokens,
        layers=layers,
        total_heads=total_heads(config, kv),
        page_size=config.page_size,
        total_layers=total_layers,
        head_group=head_group(config, kv),
        token_group=_token_group(config, kv),
        layer_partition=_layer_partition(config, layers, total_layers),
        is_writer=config.tp_rank % head_copies == 0 and config.cp_rank % token_copies == 0,
    )


def page_cells(config: CacheConfig, kv: KVShape) -> PageCells:
    """Return how pages are cut in head_grouped order, in the arena or in a store.

    Raises: NamespaceError: as :func:`grid_of`.
    """
    if config.key_scheme is KeyScheme.UNIFIED:
        return grid_of(config, kv).page_cells
    if config.host_layout is HostLayout.HEAD_GROUPED and not kv.is_mla:
        return PageCells(kv.kv_heads // head_group(config, kv))
    return WHOLE


# Heads


def total_heads(config: CacheConfig, kv: KVShape) -> int:
    """Return how many KV heads the model has; MLA: 0.

    Raises: NamespaceError: ``total_kv_heads`` does not fit the ranks, or has to be said and is not.
    """
    stated, local, tp_size = config.total_kv_heads, kv.kv_heads, config.tp_size
    if kv.is_mla:
        for field in ("total_kv_heads", "head_group", "tp_lcm_size"):
            if getattr(config, field) is not None:
                raise NamespaceError(
                    f"{field} is {getattr(config, field)}, and kv is MLA: one latent for all heads, the same on all "
                    f"tp ranks; leave {field} unset"
                )
        return 0
    if stated is None:
        if local == 1 and tp_size > 1 and config.key_scheme is KeyScheme.UNIFIED:
            raise NamespaceError(
                f"total_kv_heads is not set, and kv has 1 KV head on each of {tp_size} tp ranks: each may be another "
                "one, or several ranks hold copies of the same; set total_kv_heads to that of the model"
            )
        return local * tp_size
    is_copied = local == 1 and tp_size % stated == 0
    if local * tp_size != stated and not is_copied:
        raise NamespaceError(
            f"total_kv_heads is {stated}, and kv has {local} on each of tp_size {tp_size} ranks, {local * tp_size} in "
            f"all; set it to {local * tp_size}, or, where ranks hold copies of one head each, to a divisor of {tp_size}"
        )
    return stated


def head_group(config: CacheConfig, kv: KVShape) -> int:
    """Return how many heads a chunk holds; MLA: 0.

    Raises: NamespaceError: the heads of the model, or of this rank, are not made of whole groups.
    """
    total, local, lcm_size = total_heads(config, kv), kv.kv_heads, config.tp_lcm_size
    if kv.is_mla:
        return 0
    group = config.head_group
    if lcm_size is not None:
        if total % lcm_size:
            raise NamespaceError(
                f"tp_lcm_size is {lcm_size} and does not divide the model's {total} KV heads; set head_group instead, "
                f"to 1 where a tp size exceeds {total}"
            )
        if group is not None and group != total // lcm_size:
            raise NamespaceError(
                f"head_group is {group}, and tp_lcm_size {lcm_size} makes it {total // lcm_size}; set one of the two"
            )
        group = total // lcm_size
    if group is None:
        group = local
    if total % group or local % group:
        raise NamespaceError(
            f"head_group is {group}; it must divide the model's {total} KV heads and the {local} of this rank: set it "
            f"to {total} / the least common multiple of the tp sizes of all that share"
        )
    return group


def _heads(config: CacheConfig, kv: KVShape) -> tuple[range, int]:
    # Which heads, and how many ranks hold the same: neighbours do.
    total, local = total_heads(config, kv), kv.kv_heads
    if not total:
        return range(0), config.tp_size
    copies = local * config.tp_size // total
    start = config.tp_rank // copies * local
    return range(start, start + local), copies


# Tokens


def token_share(config: CacheConfig, kv: KVShape) -> int:
    """Return among how many cp ranks a page is split; 1: each holds all of it.

    Raises: NamespaceError: a page of the tensors is neither a whole page nor a cp rank's slice of one.
    """
    local, whole, cp_size = kv.page_size, config.page_size, config.cp_size
    if local == whole:
        return 1
    if local * cp_size == whole:
        return cp_size
    if cp_size == 1:
        raise NamespaceError(f"page_size is {whole} in the config and {local} in kv; make them equal")
    raise NamespaceError(
        f"page_size is {whole} in the config and {local} in kv, with cp_size {cp_size}; in kv it must be {whole}, "
        "where each cp rank holds whole pages, or page_size / cp_size, where each holds a slice of tokens: set "
        f"page_size to {local * cp_size} for that"
    )


def _tokens(config: CacheConfig, kv: KVShape) -> tuple[range, int]:
    # Which tokens of a page, and how many ranks hold the same: slices follow each other.
    if token_share(config, kv) == 1:
        return range(config.page_size), config.cp_size
    start = config.cp_rank * kv.page_size
    return range(start, start + kv.page_size), 1


def _token_group(config: CacheConfig, kv: KVShape) -> int:
    group = kv.page_size if config.token_group is None else config.token_group
    if config.page_size % group or kv.page_size % group:
        raise NamespaceError(
            f"token_group is {group}; it must divide page_size {config.page_size} and the {kv.page_size} tokens of a "
            f"page on this rank: set it to {config.page_size} / the least common multiple of the cp sizes of all that "
            "share"
        )
    return group


# Layers


def first_layer(config: CacheConfig) -> int:
    """Return where in the model the layers of this stage begin.

    An even split is not taken for granted: a stage cannot tell that it is one, and two fleets that are uneven in
    different ways would exchange wrong layers under right names.

    Raises: NamespaceError: it has to be said and is not.
    """
    first = config.first_layer
    if first is None and config.pp_rank > 0:
        raise NamespaceError(
            f"first_layer is not set, and this is stage {config.pp_rank} of pp_size {config.pp_size}; set "
            "first_layer to the number of the first layer that it holds, counted from 0"
        )
    return first or 0


def _layers(config: CacheConfig, kv: KVShape) -> range:
    num, total = kv.num_layers, config.total_layers
    pp_rank, pp_size = config.pp_rank, config.pp_size
    if total is None:
        if pp_size > 1:
            raise NamespaceError(
                f"total_layers is not set, and with pp_size {pp_size} the {num} layers of this stage do not tell where "
                "in the model they lie; set total_layers to that of the model"
            )
        total = num
    first = first_layer(config)
    last = total - (pp_size - 1 - pp_rank)  # every stage before and after has a layer at least
    is_possible = pp_rank <= first and first + num <= last
    is_at_end = (pp_rank > 0 or first == 0) and (pp_rank < pp_size - 1 or first + num == total)
    if not (is_possible and is_at_end):
        raise NamespaceError(
            f"first_layer is {first}, so that stage {pp_rank} of pp_size {pp_size} holds layers {first} .. "
            f"{first + num - 1} of total_layers {total}; the first stage must begin at 0, the last one end at "
            f"{total - 1}, and each hold a layer at least: set first_layer, total_layers, pp_rank and pp_size right"
        )
    return range(first, first + num)


def _layer_partition(config: CacheConfig, layers: range, total: int) -> int:
    partition = len(layers) if config.layer_partition is None else config.layer_partition
    for edge in (layers.start, layers.stop):
        if edge % partition and edge != total:
            raise NamespaceError(
                f"layer_partition is {partition}{_if_unset(config.layer_partition)}, and this stage holds layers "
                f"{layers.start} .. {layers.stop - 1}, whose edge {edge} is no multiple of it; set layer_partition to "
                "a common divisor of the first layers of all stages of all that share"
            )
    return partition


def _if_unset(value: int | None) -> str:
    return " (unset: the layers of this stage)" if value is None else ""


# What keeps a rank from sharing


def narrow_fields(config: CacheConfig, kv: KVShape) -> dict[str, str]:
    """Return which unset options of the unified scheme let objects be shared by alike shapes only, and why."""
    found: dict[str, str] = {}
    if config.key_scheme is not KeyScheme.UNIFIED:
        return found
    grid = grid_of(config, kv)
    is_whole = config.head_group is None and config.tp_lcm_size is None
    if is_whole and config.tp_size > 1 and not kv.is_mla:
        found["head_group"] = (
            f"objects hold {grid.head_group} of {grid.total_heads} KV heads and are shared only at tp_size "
            f"{config.tp_size}; set head_group to {grid.total_heads} / the least common multiple of the fleet's tp "
            "sizes, or tp_lcm_size to that multiple"
        )
    if config.layer_partition is None and config.pp_size > 1:
        found["layer_partition"] = (
            f"objects hold {grid.layer_partition} of {grid.total_layers} layers and are shared only at pp_size "
            f"{config.pp_size}; set layer_partition to a common divisor of the first layers of all stages"
        )
    if config.token_group is None and token_share(config, kv) > 1:
        found["token_group"] = (
            f"objects hold {grid.token_group} of {grid.page_size} tokens of a page and are shared only at cp_size "
            f"{config.cp_size}; set token_group to {grid.page_size} / the least common multiple of the fleet's cp sizes"
        )
    return found
