"""What sharing costs: objects of another shape of ranks are read into the arena itself, and written from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from hicache_async.config import IO_MODES, HostLayout
from hicache_async.core.manifest import is_manifest_key
from hicache_async.flows.context import Context
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import StoreWrapper
from hicache_async.types import StopToken
from tests.sharing.caches import CACHE_OPTIONS, open_rank, prompt
from tests.sharing.models import GQA, MHA, MLA, Model
from tests.sharing.ranks import Cut, Grid, configs

pytestmark = pytest.mark.asyncio

HEAD_GROUPED = HostLayout.HEAD_GROUPED


@dataclass(eq=False)
class Seen:
    """The memory that a store was given, (address, length), by verb."""

    buffers: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {"read": [], "write": []})


class WatchingStore(StoreWrapper):
    """Remember where the buffers lie that pages are read into and written from."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.seen = Seen()

    def _note(self, verb: str, keys: Sequence[str], buffers: Sequence[memoryview]) -> None:
        if not is_manifest_key(keys[0]):
            self.seen.buffers[verb] += [
                (np.frombuffer(each, np.uint8).ctypes.data, each.nbytes) for each in buffers
            ]

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        self._note("read", keys, into)
        return await super().read(keys, into, stop)

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        self._note("write", keys, pages)
        return await super().write(keys, pages)


def is_the_arenas(ctx: Context, buffers: Sequence[tuple[int, int]]) -> bool:
    """Return whether all buffers lie in the arena and share no byte."""
    start = ctx.arena.planes(0)[0].untyped_storage().data_ptr()
    end = start + ctx.arena.num_pages * ctx.arena.page_nbytes
    ordered = sorted(buffers)
    apart = all(one + length <= other for (one, length), (other, _) in itertools.pairwise(ordered))
    return apart and ordered[0][0] >= start and sum(ordered[-1]) <= end


CASES: dict[str, tuple[Model, Cut, Grid, Grid]] = {
    "tp 4 at tp 2": (MHA, Cut(2, 4, 8), Grid(4), Grid(2)),
    "tp 2 at tp 4": (MHA, Cut(2, 4, 8), Grid(2), Grid(4)),
    "tp 8 with copies at tp 1": (GQA, Cut(1, 4, 8), Grid(8), Grid(1)),
    "stages and slices at one rank": (GQA, Cut(2, 2, 4), Grid(2, 2, 2, True), Grid()),
    "one rank at stages and slices": (GQA, Cut(2, 2, 4), Grid(), Grid(2, 2, 2, True)),
    "latents at stages and slices": (MLA, Cut(1, 2, 4), Grid(2), Grid(2, 2, 2, True)),
}


@pytest.mark.parametrize("case", CASES)
async def test_no_byte_is_copied_twice(case: str) -> None:
    """Between head_grouped arenas of different shapes a store works on the arenas' own memory, on each chunk once."""
    model, cut, writers, readers = CASES[case]
    options = CACHE_OPTIONS | cut.options(model) | {"host_layout": HEAD_GROUPED}
    inner = MemoryStore()
    for grid, is_first in ((writers, True), (readers, False)):
        for config in configs(model, grid, **options):
            store = WatchingStore(inner)
            async with open_rank(model, grid, config, store) as rank:
                books, ctx = await rank.serve(prompt(model, 1)), rank.cache._ctx
                verb = (
                    "write" if is_first and ctx.keys.writes else "read"
                )  # a copy is read from the first one
                assert books.store == (0 if verb == "write" else 3 * model.tokens)
                assert (ctx.arena.num_gathered, ctx.arena.num_scattered) == (0, 0)
                buffers = store.seen.buffers[verb]
                assert len(buffers) == 3 * ctx.keys.num_chunks
                assert is_the_arenas(ctx, buffers)
                assert sum(length for _, length in buffers) == 3 * ctx.arena.page_nbytes


@pytest.mark.parametrize("layout", [layout for layout in HostLayout if layout is not HEAD_GROUPED])
async def test_other_layouts_copy_each_page_once(layout: HostLayout) -> None:
    """From and into another order each page goes through one scratch page, whatever the shapes."""
    options = (
        CACHE_OPTIONS | Cut(2, 2, 4).options(MHA) | {"host_layout": layout, "io_mode": IO_MODES[layout][0]}
    )
    inner = MemoryStore()
    for grid, copies in ((Grid(4), (3, 0)), (Grid(2), (0, 3))):
        for config in configs(MHA, grid, **options):
            async with open_rank(MHA, grid, config, inner) as rank:
                await rank.serve(prompt(MHA, 1))
                arena = rank.cache._ctx.arena
                assert (arena.num_gathered, arena.num_scattered) == copies


async def test_the_first_to_compute_stores_for_all() -> None:
    """Of shapes that serve the same prompts by turns none stores again what another one has stored."""
    options = CACHE_OPTIONS | Cut(1, 2, 4).options(MHA) | {"host_layout": HEAD_GROUPED}
    inner = MemoryStore()
    shapes = [Grid(4), Grid(2, 2), Grid(1, 1, 2, True)]
    for number, grid in enumerate(shapes):
        for config in configs(MHA, grid, **options):
            async with open_rank(MHA, grid, config, inner) as rank:
                for turn in range(number + 1):
                    books = await rank.serve(prompt(MHA, turn))
                    assert books.store == (24 if turn < number else 0)
    pages = [key for key in await inner.list_keys() if not is_manifest_key(key)]
    assert len(pages) == len(shapes) * 3 * 8 * 2 * 2
