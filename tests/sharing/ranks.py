"""Ranks of bytes only: the names, arenas and buffers of real caches, without engines, requests or tasks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from hicache_async import CacheConfig, DeviceKV
from hicache_async.abc import Store
from hicache_async.config import IO_MODES, HostLayout
from hicache_async.core.grid import grid_of, page_cells
from hicache_async.core.keys import key_names
from hicache_async.flows.calls import page_count
from hicache_async.flows.context import Context
from hicache_async.flows.page_bytes import empty_buffers
from hicache_async.memory.host import HostArena
from hicache_async.types import Pages, StopToken
from tests.sharing.models import Bytes, Model, whose


@dataclass(frozen=True)
class Grid:
    """How a deployment splits a model.

    Attributes:
        slices: cp ranks hold slices of each page; else each holds all of it.
        starts: first layer of each pipeline stage; None: alike stages.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    slices: bool = False
    starts: tuple[int, ...] | None = None

    def __str__(self) -> str:
        cp = f"-cp{self.cp}{'s' if self.slices else 'c'}" if self.cp > 1 else ""
        return f"tp{self.tp}-pp{self.pp}{cp}"

    def first_layers(self, model: Model) -> tuple[int, ...]:
        """Return where each stage begins, and the end of the model."""
        even = tuple(range(0, model.layers, model.layers // self.pp))
        return (*(self.starts or even), model.layers)


GRIDS = [
    Grid(tp, pp, cp, slices)
    for tp, pp in itertools.product((1, 2, 4, 8), (1, 2))
    for cp, slices in ((1, False), (2, False), (2, True))
]
"""All tensor-parallel sizes up to 8, with and without two stages, two slices or two copies of each page."""


@dataclass(frozen=True)
class Cut:
    """What a fleet has agreed to cut pages into."""

    head_group: int
    layer_partition: int
    token_group: int

    def options(self, model: Model) -> dict[str, int | None]:
        """Return these as options of a config."""
        return dataclasses.asdict(self) | ({"head_group": None} if model.is_mla else {})


FINE = Cut(1, 2, 4)
"""Fine enough for all of ``GRIDS``."""


def configs(model: Model, grid: Grid, **options: Any) -> Iterator[CacheConfig]:
    """Yield the config of each rank; tp varies fastest."""
    starts = grid.first_layers(model)
    for pp, cp, tp in itertools.product(range(grid.pp), range(grid.cp), range(grid.tp)):
        yield CacheConfig(
            **{
                "model_id": model.name,
                "page_size": model.tokens,
                "key_scheme": "unified",
                "total_kv_heads": model.heads or None,
                "total_layers": model.layers,
                "first_layer": starts[pp],
                "tp_rank": tp, "tp_size": grid.tp, "pp_rank": pp, "pp_size": grid.pp, "cp_rank": cp, "cp_size": grid.cp,
            }
            | options
        )  # fmt: skip


def kv_of(model: Model, grid: Grid, config: CacheConfig, num_pages: int = 1) -> DeviceKV:
    """Return the tensors of one rank."""
    starts = grid.first_layers(model)
    return tensors(
        starts[config.pp_rank + 1] - starts[config.pp_rank],
        num_pages,
        model.tokens // grid.cp if grid.slices else model.tokens,
        max(1, model.heads // grid.tp),
        model.row_nbytes,
    )


def tensors(layers: int, pages: int, tokens: int, heads: int, row_nbytes: Sequence[int]) -> DeviceKV:
    """Return tensors of bytes; one plane is MLA."""
    sides = (
        [torch.zeros(pages, tokens, heads, row, dtype=torch.uint8) for _ in range(layers)]
        for row in row_nbytes
    )
    return DeviceKV.from_layers(*sides)


_shape_of = functools.lru_cache(maxsize=512)(tensors)
"""Of tensors that only lend their shape one will do for all."""


class ByteRank:
    """One rank: its host pages, and the names and bytes that a store sees of them."""

    def __init__(self, model: Model, grid: Grid, config: CacheConfig, num_pages: int) -> None:
        starts = grid.first_layers(model)
        kv = _shape_of(
            starts[config.pp_rank + 1] - starts[config.pp_rank],
            1,
            model.tokens // grid.cp if grid.slices else model.tokens,
            max(1, model.heads // grid.tp),
            model.row_nbytes,
        )
        self.model = model
        self.config = config
        self.keys = key_names(config, kv)
        self.box = grid_of(config, kv)
        self.arena = HostArena(
            kv,
            config.host_layout,
            num_pages,
            torch.zeros(HostArena.nbytes_needed(kv, num_pages), dtype=torch.uint8),
            cells=page_cells(config, kv),
            stored_layout=HostLayout.HEAD_GROUPED,
        )
        self.pages: Pages = np.arange(num_pages)
        self._ctx = cast("Context", SimpleNamespace(arena=self.arena, keys=self.keys))

    def compute(self, hashes: Sequence[bytes]) -> None:
        """Fill the pages with what the model has for them."""
        for layer, plane, held in self._planes():
            for page, page_hash in enumerate(hashes):
                held[page] = self._wanted(page_hash, layer, plane).reshape(held.shape[1:])

    def objects(self, hashes: Sequence[bytes]) -> tuple[list[str], Sequence[memoryview]]:
        """Return the names of all chunks of the pages and their bytes, as a backup hands them to a store."""
        buffers = empty_buffers(self._ctx, self.pages)
        if not self.arena.is_direct:
            self.arena.gather(self.pages, buffers.pages)
        return self.keys.keys(hashes), buffers.chunks

    async def read(self, store: Store, hashes: Sequence[bytes]) -> int:
        """Fill the pages from ``store`` as a fetch does; returns how many it has, from the first."""
        names, buffers = self.keys.keys(hashes), empty_buffers(self._ctx, self.pages)
        found = await store.count_prefix(names)
        count = await store.read(names[:found], buffers.chunks[:found], StopToken())
        if not self.arena.is_direct:
            self.arena.scatter(self.pages, buffers.pages)
        pages = page_count(count, len(hashes), len(names))
        assert isinstance(pages, int)
        return pages

    def check(self, hashes: Sequence[bytes]) -> None:
        """Raise AssertionError unless the pages hold what the model has for them; names the rows."""
        for layer, plane, held in self._planes():
            for page, page_hash in enumerate(hashes):
                wanted = self._wanted(page_hash, layer, plane)
                found = held[page].reshape(wanted.shape)
                if not np.array_equal(found, wanted):
                    token, head = np.argwhere((found != wanted).any(axis=-1))[0]
                    raise AssertionError(
                        f"{self.config.host_layout} page {page}, layer {layer}: {whose(wanted[token, head])} "
                        f"is wanted and {whose(found[token, head])} found"
                    )

    def _planes(self) -> Iterator[tuple[int, int, Bytes]]:
        for index, layer in enumerate(self.box.layers):
            for plane, tensor in enumerate(self.arena.planes(index)):
                yield layer, plane, tensor.numpy()

    def _wanted(self, page_hash: bytes, layer: int, plane: int) -> Bytes:
        tokens, heads = self.box.tokens, self.box.heads or range(1)
        whole = self.model.plane(page_hash, plane)
        return whole[layer, tokens.start : tokens.stop, heads.start : heads.stop]


def ranks_of(model: Model, grid: Grid, cut: Cut, layout: HostLayout, num_pages: int) -> Iterator[ByteRank]:
    """Yield all ranks of a deployment."""
    options = {"host_layout": layout, "io_mode": IO_MODES[layout][0], **cut.options(model)}
    for config in configs(model, grid, **options):
        yield ByteRank(model, grid, config, num_pages)
