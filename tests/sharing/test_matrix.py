"""Who shares with whom: every shape of ranks and every layout, as writers and as readers, byte by byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_async.abc import Store
from hicache_async.config import HostLayout
from hicache_async.stores.file import FileStore
from hicache_async.stores.memory import MemoryStore
from tests.sharing.models import GQA, MHA, MLA, MODELS, Model
from tests.sharing.ranks import FINE, GRIDS, ByteRank, Cut, Grid, ranks_of

HASHES = [bytes([number]) * 32 for number in (3, 7)]
LAYOUTS = list(HostLayout)

each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
each_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)


def documented(model: Model, cut: Cut, digest: str) -> dict[str, bytes]:
    """Return every object of the pages as the documents have it: in layers, K then V, tokens and heads."""
    objects = {}
    heads = max(1, model.heads)
    size = cut.head_group if model.heads else 1
    for page_hash, group, token, layer in itertools.product(
        HASHES,
        range(heads // size),
        range(0, model.tokens, cut.token_group),
        range(0, model.layers, cut.layer_partition),
    ):
        layer_end = min(layer + cut.layer_partition, model.layers)
        tokens, members = slice(token, token + cut.token_group), slice(group * size, (group + 1) * size)
        name = f"{page_hash.hex()}_{digest}_L{layer}-{layer_end}"
        name += f"_H{group}" if model.heads else ""
        name += f"_T{token}-{tokens.stop}" if cut.token_group < model.tokens else ""
        objects[name] = b"".join(
            model.plane(page_hash, plane)[each, tokens, members].tobytes()
            for each in range(layer, layer_end)
            for plane in range(len(model.row_nbytes))
        )
    return objects


async def write(store: Store, ranks: Iterator[ByteRank]) -> None:
    """Let the ranks of a deployment that write do it."""
    for rank in ranks:
        rank.compute(HASHES)
        if rank.keys.writes:
            names, chunks = rank.objects(HASHES)
            assert await store.write(names, chunks) == len(names)


async def read(store: Store, ranks: Iterator[ByteRank]) -> None:
    """Let all ranks of a deployment read all pages, and look at every byte."""
    for rank in ranks:
        assert await rank.read(store, HASHES) == len(HASHES), rank.keys.suffixes
        rank.check(HASHES)


@each_model
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_shapes_store_the_documented_bytes(model: Model, layout: HostLayout) -> None:
    """Of every shape each layout stores the same objects, byte for byte those of the documents, each of them once."""
    for grid in GRIDS:
        stored: dict[str, bytes] = {}
        digest = ""
        for rank in ranks_of(model, grid, FINE, layout, len(HASHES)):
            digest = rank.keys.namespace.digest
            rank.compute(HASHES)
            if rank.keys.writes:
                names, chunks = rank.objects(HASHES)
                assert not stored.keys() & set(names), f"{grid}: two ranks write one object"
                stored.update(zip(names, map(bytes, chunks), strict=True))
        assert stored == documented(model, FINE, digest), str(grid)


@pytest.mark.asyncio
@each_model
@each_grid
async def test_what_one_shape_writes_all_others_read(model: Model, grid: Grid) -> None:
    """Every rank of every shape and layout finds all of what any other shape has stored, every byte of it right."""
    layouts = itertools.cycle(LAYOUTS)
    store = MemoryStore()
    await write(store, ranks_of(model, grid, FINE, LAYOUTS[GRIDS.index(grid) % 4], len(HASHES)))
    for reader in GRIDS:
        await read(store, ranks_of(model, reader, FINE, next(layouts), len(HASHES)))


@pytest.mark.asyncio
@pytest.mark.stress
@each_model
@each_grid
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_all_pairs_of_shapes_and_layouts(model: Model, grid: Grid, layout: HostLayout) -> None:
    """Each shape in each layout writes, and each shape in each layout reads all of it."""
    store = MemoryStore()
    await write(store, ranks_of(model, grid, FINE, layout, len(HASHES)))
    for reader, other in itertools.product(GRIDS, LAYOUTS):
        await read(store, ranks_of(model, reader, FINE, other, len(HASHES)))


COARSE: dict[str, tuple[Model, Cut, list[Grid]]] = {
    "tp 1, 2 and 4": (MHA, Cut(2, 4, 8), [Grid(), Grid(2), Grid(4), Grid(4, cp=2)]),
    "stages": (GQA, Cut(4, 2, 8), [Grid(), Grid(pp=2), Grid(pp=2, cp=2)]),
    "slices": (MLA, Cut(1, 4, 2), [Grid(), Grid(8, cp=2, slices=True), Grid(cp=4, slices=True)]),
    "unlike stages": (
        Model("seven layers", heads=2, layers=7),
        Cut(1, 3, 8),
        [
            Grid(),
            Grid(2),
            Grid(pp=2, starts=(0, 3)),
            Grid(pp=3, starts=(0, 3, 6)),
            Grid(2, pp=2, starts=(0, 6)),
        ],
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("case", COARSE)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_coarser_cuts(case: str, layout: HostLayout, tmp_path: Path) -> None:
    """Cut only as fine as the fleet needs, into objects of a directory, pages are shared as well."""
    model, cut, grids = COARSE[case]
    for writer in grids:
        store = FileStore(tmp_path / str(writer))
        await write(store, ranks_of(model, writer, cut, layout, len(HASHES)))
        digest = next(ranks_of(model, writer, cut, layout, 1)).keys.namespace.digest
        assert set(await store.list_keys()) == documented(model, cut, digest).keys()
        for reader, other in itertools.product(grids, LAYOUTS):
            await read(store, ranks_of(model, reader, cut, other, len(HASHES)))
        await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
async def test_a_reader_misses_what_one_rank_has_not_stored(model: Model) -> None:
    """Where one writer's part of a page is missing, readers who need it miss the page, and the others have it."""
    store, writers = MemoryStore(), list(ranks_of(model, Grid(4, 2, 2, True), FINE, HostLayout.PAGE_FIRST, 2))
    lost = (
        writers[-1] if model.heads else writers[-4]
    )  # of the last stage and slice; of MLA the one that writes
    assert lost.keys.writes
    await write(store, iter([rank for rank in writers if rank is not lost]))
    for rank in ranks_of(model, Grid(2, 2, 2, True), FINE, HostLayout.HEAD_GROUPED, 2):
        needs_it = bool(set(rank.keys.suffixes) & set(lost.keys.suffixes))
        assert await rank.read(store, HASHES) == (0 if needs_it else len(HASHES))
        if not needs_it:
            rank.check(HASHES)
    (alone,) = ranks_of(model, Grid(), FINE, HostLayout.LAYER_FIRST, 2)
    assert await alone.read(store, HASHES) == 0


@pytest.mark.asyncio
async def test_a_wrong_row_accuses_itself() -> None:
    """Chunks that are swapped, by head, layer or tokens, are told from the right ones, and named."""
    store = MemoryStore()
    (rank,) = ranks_of(MHA, Grid(), FINE, HostLayout.LAYER_FIRST, len(HASHES))
    rank.compute(HASHES)
    names, chunks = rank.objects(HASHES)
    for other, words in ((1, "layer 2"), (2, "token 4"), (4, "head 1"), (rank.keys.num_chunks, "page 0707")):
        order = np.arange(len(names))
        order[[0, other]] = order[[other, 0]]
        store = MemoryStore()
        await store.write(names, [chunks[place] for place in order])
        (reader,) = ranks_of(MHA, Grid(), FINE, HostLayout.PAGE_FIRST, len(HASHES))
        assert await reader.read(store, HASHES) == len(HASHES)
        with pytest.raises(AssertionError, match=f"head 0, token 0, K is wanted and .*{words}"):
            reader.check(HASHES)
