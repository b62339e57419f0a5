"""Unified names: the same bytes of a model have the same name whoever stores them, and what might not is refused."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_async.config import CacheConfig
from hicache_async.core.grid import Grid, PageCells, grid_of, narrow_fields, page_cells
from hicache_async.core.keys import KeyNames, key_names, namespace_of
from hicache_async.errors import NamespaceError
from tests.core.shapes import Shape
from tests.core.world import QUICK

HASHES = [bytes(32), bytes(range(32))]
LAYERS, TOKENS, HEADS = 8, 16, 8
GOLDEN_KEY = bytes(32).hex() + "_ukv1-292514b10714f9a8_L0-4_H0_T0-8"


def config_of(**options: Any) -> CacheConfig:
    return CacheConfig(**{"key_scheme": "unified", "page_size": TOKENS} | options)


def names(shape: Shape, **options: Any) -> KeyNames:
    return key_names(config_of(**options), shape)


def coordinates(keys: KeyNames) -> list[str]:
    """Return what the names of a page go on with behind the digest."""
    return [suffix.removeprefix(f"_{keys.namespace.digest}_") for suffix in keys.suffixes]


# The form of a name

FORMS: dict[str, tuple[Shape, dict[str, int], list[str]]] = {
    "alone": (Shape(8, 16, 8), {}, ["L0-8_H0"]),
    "two groups": (Shape(8, 16, 8), {"head_group": 4}, ["L0-8_H0", "L0-8_H1"]),
    "tp": (Shape(8, 16, 2), {"tp_size": 4, "tp_rank": 3}, ["L0-8_H3"]),
    "tp, finer": (Shape(8, 16, 2), {"tp_size": 4, "tp_rank": 3, "head_group": 1}, ["L0-8_H6", "L0-8_H7"]),
    "tp, by the lcm": (Shape(8, 16, 2), {"tp_size": 4, "tp_rank": 3, "tp_lcm_size": 8}, ["L0-8_H6", "L0-8_H7"]),
    "pp": (Shape(4, 16, 8), {"pp_size": 2, "pp_rank": 1, "total_layers": 8, "first_layer": 4}, ["L4-8_H0"]),
    "layers of unlike stages": (
        Shape(5, 16, 8),
        {"pp_size": 2, "pp_rank": 1, "total_layers": 9, "first_layer": 4, "layer_partition": 2},
        ["L4-6_H0", "L6-8_H0", "L8-9_H0"],
    ),
    "cp slice": (Shape(8, 8, 8), {"cp_size": 2, "cp_rank": 1}, ["L0-8_H0_T8-16"]),
    "cp copy": (Shape(8, 16, 8), {"cp_size": 2, "cp_rank": 1}, ["L0-8_H0"]),
    "tokens": (Shape(8, 16, 8), {"token_group": 8}, ["L0-8_H0_T0-8", "L0-8_H0_T8-16"]),
    "copies of heads": (Shape(8, 16, 1), {"tp_size": 8, "tp_rank": 5, "total_kv_heads": 4}, ["L0-8_H2"]),
    "mla": (Shape(8, 16, 1, (64,), is_mla=True), {"tp_size": 4, "tp_rank": 3}, ["L0-8"]),
    "mla, all axes": (
        Shape(4, 8, 1, (64,), is_mla=True),
        {"cp_size": 2, "cp_rank": 1, "pp_size": 2, "total_layers": 8, "layer_partition": 2, "token_group": 4},
        ["L0-2_T8-12", "L2-4_T8-12", "L0-2_T12-16", "L2-4_T12-16"],
    ),
    "all axes": (
        Shape(4, 8, 2),
        {
            "tp_size": 4, "tp_rank": 1, "pp_size": 2, "pp_rank": 1, "total_layers": 8, "first_layer": 4, "cp_size": 2,
            "head_group": 1, "layer_partition": 2, "token_group": 4,
        },
        [f"L{a}-{a + 2}_H{h}_T{t}-{t + 4}" for h in (2, 3) for t in (0, 4) for a in (4, 6)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_name_forms(case: str) -> None:
    """A name says which layers, head group and tokens a chunk holds; head groups and whole pages are not said twice."""
    shape, options, expected = FORMS[case]
    keys = names(shape, **options)
    assert coordinates(keys) == expected
    page = HASHES[1].hex() + "_" + keys.namespace.digest + "_"
    assert keys.keys(HASHES)[keys.num_chunks :] == [page + tail for tail in expected]
    assert {namespace_of(key) for key in keys.keys(HASHES)} == {keys.namespace.digest}


def test_golden_name() -> None:
    """The name of a chunk never changes: stores of any age are found by it."""
    options = {"model_id": "org/model", "fingerprint": "rev-1", "head_group": 4}
    keys = names(Shape(8, 16, 8), **options, layer_partition=4, token_group=8)
    assert keys.keys(HASHES)[0] == GOLDEN_KEY
    assert msgspec.to_builtins(keys.namespace) == {
        "schema_version": 1,
        "model_id": "org/model",
        "fingerprint": "rev-1",
        "dtype": "bfloat16",
        "page_size": 16,
        "rank_replicated": False,
        "total_kv_heads": 8,
        "head_group": 4,
        "layer_partition": 4,
        "object_layout": "group_cell_layer_kv_token:8+8;layers=8;token_group=8",
        "codec": "raw",
    }


CUT = {"head_group": 2, "layer_partition": 4, "token_group": 8}
OTHERS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "model_id": (Shape(8, 16, 8), {"model_id": "other"}),
    "fingerprint": (Shape(8, 16, 8), {"fingerprint": "other"}),
    "dtype": (Shape(8, 16, 8, dtype="float16"), {}),
    "page_size": (Shape(8, 32, 8), {"page_size": 32}),
    "rank_replicated": (Shape(8, 16, 1, (16,), is_mla=True), {"head_group": None}),
    "total_kv_heads": (Shape(8, 16, 4), {}),
    "head_group": (Shape(8, 16, 8), {"head_group": 4}),
    "layer_partition": (Shape(8, 16, 8), {"layer_partition": 2}),
    "token_group": (Shape(8, 16, 8), {"token_group": 4}),
    "total_layers": (Shape(12, 16, 8), {}),
    "widths": (Shape(8, 16, 8, (12, 4)), {}),
    "widths, swapped": (Shape(8, 16, 8, (4, 12)), {}),
    "key_scheme": (Shape(8, 16, 8), {"key_scheme": "rank_suffix", **dict.fromkeys(CUT)}),
}


def test_what_differs_has_no_name_in_common() -> None:
    """Whatever makes bytes differ, or cuts them otherwise, is in the digest; how many ranks there are is not."""
    ours = names(Shape(8, 16, 8), **CUT)
    digests = {
        case: names(shape, **CUT | options).namespace.digest for case, (shape, options) in OTHERS.items()
    }
    assert len({ours.namespace.digest, *digests.values()}) == 1 + len(OTHERS)
    for size in (1, 2, 4):
        grid = {"tp_size": size, "pp_size": 2, "total_layers": 8, "cp_size": 2}
        assert names(Shape(4, 8, 8 // size), **CUT | grid).namespace == ours.namespace
        assert names(Shape(4, 16, 8 // size), **CUT | grid).namespace == ours.namespace


# Who holds what


def ranks_of(
    tp: int, pp: int, cp: int, *, heads: int, slices: bool, **options: Any
) -> Iterator[tuple[CacheConfig, Shape]]:
    """Yield every rank of a deployment of one model; ``heads`` 0 is MLA."""
    shape = Shape(
        LAYERS // pp,
        TOKENS // cp if slices else TOKENS,
        max(1, heads // tp),
        (8, 8) if heads else (32,),
        is_mla=not heads,
    )
    for tp_rank, pp_rank, cp_rank in itertools.product(range(tp), range(pp), range(cp)):
        grid = {
            "tp_size": tp,
            "tp_rank": tp_rank,
            "pp_size": pp,
            "pp_rank": pp_rank,
            "cp_size": cp,
            "cp_rank": cp_rank,
            "first_layer": LAYERS // pp * pp_rank,
        }
        yield config_of(**grid, total_layers=LAYERS, total_kv_heads=heads or None, **options), shape


SHAPES = [
    (tp, pp, cp, slices)
    for tp in (1, 2, 4, 8)
    for pp in (1, 2)
    for cp in (1, 2)
    for slices in ((False, True)[:cp])
]


@pytest.mark.parametrize(("tp", "pp", "cp", "slices"), SHAPES)
@pytest.mark.parametrize("heads", [8, 4, 2, 1, 0], ids=["mha", "gqa 4", "gqa 2", "mqa", "mla"])
def test_each_chunk_of_a_model_has_one_name_and_one_writer(
    heads: int, tp: int, pp: int, cp: int, slices: bool
) -> None:
    """At every shape the ranks together name the same chunks, each is written by one of them, and by none twice."""
    cut = {"head_group": 1 if heads else None, "layer_partition": 2, "token_group": 8}
    held: set[str] = set()
    written: Counter[str] = Counter()
    for config, shape in ranks_of(tp, pp, cp, heads=heads, slices=slices, **cut):
        keys = key_names(config, shape)
        assert len(set(keys.suffixes)) == keys.num_chunks
        held.update(keys.suffixes)
        written.update(keys.suffixes if keys.writes else ())
    alone = key_names(*next(ranks_of(1, 1, 1, heads=heads, slices=False, **cut)))
    assert held == set(alone.suffixes) and len(held) == 4 * 2 * max(1, heads)
    assert written == Counter(dict.fromkeys(held, 1))


def test_a_large_rank_holds_what_small_ones_do() -> None:
    """What a tp 2 rank names is exactly what two tp 4 ranks name, a stage's is that of two half stages."""
    cut = {"head_group": 2, "layer_partition": 2}
    small = [
        set(key_names(*rank).suffixes) for rank in ranks_of(4, 2, 1, heads=8, slices=False, **cut)
    ]  # tp rank outermost, then pp rank
    large = [set(key_names(*rank).suffixes) for rank in ranks_of(2, 1, 1, heads=8, slices=False, **cut)]
    assert large == [set().union(*small[:4]), set().union(*small[4:])]
    assert sum(map(len, small)) == sum(map(len, large))


@pytest.mark.parametrize("copies", [2, 4, 8])
def test_neighbours_hold_copies_of_one_head(copies: int) -> None:
    """Of 8 ranks that share few heads neighbours hold the same one, and the first of them writes it."""
    heads = 8 // copies
    ranks = list(ranks_of(8, 1, 1, heads=heads, slices=False))
    assert [grid_of(*rank).heads.start for rank in ranks] == [rank // copies for rank in range(8)]
    assert [key_names(*rank).writes for rank in ranks] == [rank % copies == 0 for rank in range(8)]


def test_copies_of_whole_pages_are_written_by_the_first_cp_rank() -> None:
    """Of cp ranks that hold whole pages the first writes, of those that hold slices each does."""
    for slices, writers in ((False, [True, False]), (True, [True, True])):
        ranks = ranks_of(1, 1, 2, heads=8, slices=slices)
        assert [key_names(*rank).writes for rank in ranks] == writers


def test_the_fleet_of_the_documents_shares() -> None:
    """The example of docs/sharing.md: one namespace and the same chunks at tp 4, tp 2 x pp 2, and tp 8 in slices."""
    cut = {
        "tp_lcm_size": 8,
        "total_kv_heads": 8,
        "layer_partition": 16,
        "total_layers": 32,
        "token_group": 32,
    }
    found = []
    for tp, pp, cp in ((4, 1, 1), (2, 2, 1), (8, 1, 2)):
        shape = Shape(32 // pp, 64 // cp, 8 // tp, (128, 128))
        ranks = [
            names(
                shape,
                page_size=64,
                tp_size=tp,
                tp_rank=i,
                pp_size=pp,
                pp_rank=j,
                first_layer=32 // pp * j,
                cp_size=cp,
                cp_rank=k,
                **cut,
            )
            for i, j, k in itertools.product(range(tp), range(pp), range(cp))
        ]
        found.append({suffix for keys in ranks for suffix in keys.suffixes})
        assert narrow_fields(config_of(page_size=64, tp_size=tp, pp_size=pp, cp_size=cp, **cut), shape) == {}
        page_nbytes = shape.num_layers * shape.page_size * shape.kv_heads * 256 * 2
        assert {span.stop - span.start for keys in ranks for span in keys.spans(page_nbytes)} == {256 << 10}
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 8 * 2 * 2


# Where the bytes of a chunk are


@st.composite
def grids(draw: st.DrawFn) -> tuple[CacheConfig, Shape]:
    """Draw one rank of any deployment that is legal."""

    def divisor(number: int) -> int:
        return draw(st.sampled_from([each for each in range(1, number + 1) if number % each == 0]))

    heads, tokens = draw(st.integers(0, 12)), draw(st.integers(1, 24))
    cp = divisor(tokens)
    slices = cp > 1 and draw(st.booleans())
    local_tokens = tokens // cp if slices else tokens
    if heads:
        copies = draw(st.integers(1, 3))
        tp = heads * copies if copies > 1 else divisor(heads)
        local_heads = max(1, heads // tp)
        head_options = {"total_kv_heads": heads, "head_group": divisor(local_heads)}
    else:
        tp, local_heads, head_options = draw(st.integers(1, 4)), 1, {}
    partition = draw(st.integers(1, 5))
    edges = sorted(draw(st.sets(st.integers(1, 6), max_size=3)))
    total = (edges[-1] if edges else 0) * partition + draw(st.integers(1, 2 * partition))
    starts = [0, *(edge * partition for edge in edges)]
    pp_rank = draw(st.integers(0, len(starts) - 1))
    first, end = starts[pp_rank], [*starts[1:], total][pp_rank]
    config = config_of(
        page_size=tokens, tp_size=tp, tp_rank=draw(st.integers(0, tp - 1)),
        cp_size=cp, cp_rank=draw(st.integers(0, cp - 1)), pp_size=len(starts), pp_rank=pp_rank,
        first_layer=first, total_layers=total, layer_partition=partition, token_group=divisor(local_tokens),
        **head_options,
    )  # fmt: skip
    widths = (draw(st.integers(1, 8)), draw(st.integers(1, 8)))
    shape = Shape(end - first, local_tokens, local_heads, widths if heads else widths[:1], is_mla=not heads)
    return config, shape


@given(grids())
@QUICK
def test_chunks_tile_a_page(rank: tuple[CacheConfig, Shape]) -> None:
    """In any legal grid a rank's chunks follow each other through its page, each as long as what it holds."""
    config, shape = rank
    row_nbytes = sum(shape.head_dims)  # of one token, layer and head
    grid, keys = grid_of(config, shape), key_names(config, shape)
    page_nbytes = shape.num_layers * shape.page_size * shape.kv_heads * row_nbytes
    spans = keys.spans(page_nbytes)
    assert len(spans) == keys.num_chunks
    assert [0, *(span.stop for span in spans)] == [*(span.start for span in spans), page_nbytes]
    for cell, span in zip(grid.cells(), spans, strict=True):
        heads = grid.head_group or 1
        assert span.stop - span.start == len(cell.layers) * len(cell.tokens) * heads * row_nbytes
    assert page_cells(config, shape) == grid.page_cells == _counted(grid)


def _counted(grid: Grid) -> PageCells:
    cells = list(grid.cells())
    return PageCells(len({cell.head_group for cell in cells}), len({cell.tokens for cell in cells}))


@given(grids())
@QUICK
def test_names_say_what_they_hold(rank: tuple[CacheConfig, Shape]) -> None:
    """In any legal grid the names of a rank, read back, are its box of the model: all of it, and once."""
    config, shape = rank
    grid, keys = grid_of(config, shape), key_names(config, shape)
    found: list[tuple[int, int, int]] = []
    for tail in coordinates(keys):
        match = re.fullmatch(r"L(\d+)-(\d+)(?:_H(\d+))?(?:_T(\d+)-(\d+))?", tail)
        assert match is not None, tail
        layer, layer_end, group, token, token_end = (
            None if each is None else int(each) for each in match.groups()
        )
        assert (group is None) == shape.is_mla
        assert (token is None) == (grid.token_group == config.page_size)
        tokens = range(config.page_size) if token is None else range(token, token_end)  # type: ignore[arg-type]
        heads = [-1] if group is None else range(group * grid.head_group, (group + 1) * grid.head_group)
        found += itertools.product(range(layer, layer_end), heads, tokens)  # type: ignore[arg-type]
    held = itertools.product(grid.layers, grid.heads or [-1], grid.tokens)
    assert Counter(found) == Counter(held)


# What is refused


REFUSED: dict[str, tuple[Shape, dict[str, Any], str]] = {
    "group of no whole rank": (
        Shape(8, 16, 2), {"tp_size": 4, "head_group": 4},
        "head_group is 4; it must divide the model's 8 KV heads and the 2 of this rank: set it to 8 / the least",
    ),
    "group of no whole model": (Shape(8, 16, 6), {"head_group": 4}, "head_group is 4; it must divide the model's 6"),
    "lcm beyond the heads": (
        Shape(8, 16, 1), {"tp_size": 4, "total_kv_heads": 4, "tp_lcm_size": 8},
        "tp_lcm_size is 8 and does not divide the model's 4 KV heads; set head_group instead, to 1 where a tp size",
    ),
    "lcm and group disagree": (
        Shape(8, 16, 2), {"tp_size": 4, "tp_lcm_size": 8, "head_group": 2},
        "head_group is 2, and tp_lcm_size 8 makes it 1; set one of the two",
    ),
    "one head, unsaid": (
        Shape(8, 16, 1), {"tp_size": 4},
        "total_kv_heads is not set, and kv has 1 KV head on each of 4 tp ranks: .* set total_kv_heads",
    ),
    "heads do not add up": (
        Shape(8, 16, 2), {"tp_size": 4, "total_kv_heads": 4},
        "total_kv_heads is 4, and kv has 2 on each of tp_size 4 ranks, 8 in all; set it to 8",
    ),
    "copies of no whole number": (
        Shape(8, 16, 1), {"tp_size": 4, "total_kv_heads": 3},
        "total_kv_heads is 3, and kv has 1 .* to a divisor of 4",
    ),
    "more heads than ranks hold": (Shape(8, 16, 1), {"tp_size": 4, "total_kv_heads": 8}, "total_kv_heads is 8, and"),
    "mla with heads": (
        Shape(8, 16, 1, (32,), is_mla=True), {"tp_size": 4, "total_kv_heads": 4},
        "total_kv_heads is 4, and kv is MLA: .* leave total_kv_heads unset",
    ),
    "mla with groups": (Shape(8, 16, 1, (32,), is_mla=True), {"head_group": 1}, "head_group is 1, and kv is MLA"),
    "mla with lcm": (Shape(8, 16, 1, (32,), is_mla=True), {"tp_lcm_size": 4}, "tp_lcm_size is 4, and kv is MLA"),
    "stages, unsaid": (
        Shape(4, 16, 8), {"pp_size": 2},
        "total_layers is not set, and with pp_size 2 the 4 layers of this stage .* set total_layers",
    ),
    "a stage that does not say where": (
        Shape(4, 16, 8), {"pp_size": 2, "pp_rank": 1, "total_layers": 8},
        "first_layer is not set, and this is stage 1 of pp_size 2; set first_layer to",
    ),
    "no stages, other layers": (
        Shape(8, 16, 8), {"total_layers": 9}, "first_layer is 0, .* holds layers 0 .. 7 of total_layers 9"
    ),
    "the first stage begins late": (
        Shape(4, 16, 8), {"pp_size": 2, "total_layers": 8, "first_layer": 2},
        r"first_layer is 2, so that stage 0 of pp_size 2 holds layers 2 \.\. 5 of total_layers 8; the first stage must",
    ),
    "the last stage ends early": (
        Shape(3, 16, 8), {"pp_size": 2, "pp_rank": 1, "total_layers": 8, "first_layer": 4},
        r"first_layer is 4, so that stage 1 of pp_size 2 holds layers 4 \.\. 6 .* the last one end at 7",
    ),
    "beyond the model": (
        Shape(4, 16, 8), {"pp_size": 2, "pp_rank": 1, "total_layers": 8, "first_layer": 6}, "first_layer is 6",
    ),
    "no room for the stage before": (
        Shape(7, 16, 8), {"pp_size": 3, "pp_rank": 1, "total_layers": 8, "first_layer": 0}, "first_layer is 0",
    ),
    "no room for the stage behind": (
        Shape(6, 16, 8), {"pp_size": 3, "pp_rank": 1, "total_layers": 8, "first_layer": 2}, "first_layer is 2",
    ),
    "range begins off the grid": (
        Shape(4, 16, 8), {"pp_size": 2, "pp_rank": 1, "total_layers": 8, "first_layer": 4, "layer_partition": 3},
        r"layer_partition is 3, and this stage holds layers 4 \.\. 7, whose edge 4 is no multiple of it; set layer_p",
    ),
    "range ends off the grid": (
        Shape(4, 16, 8), {"pp_size": 2, "total_layers": 8, "layer_partition": 3}, "layer_partition is 3, .* edge 4 is",
    ),
    "unlike stages of no common part": (
        Shape(4, 16, 8), {"pp_size": 2, "pp_rank": 1, "total_layers": 9, "first_layer": 5},
        r"layer_partition is 4 \(unset: the layers of this stage\), and this stage holds layers 5",
    ),
    "tokens cut no page": (
        Shape(8, 16, 8), {"token_group": 5},
        "token_group is 5; it must divide page_size 16 and the 16 tokens of a page on this rank: set it to 16 /",
    ),
    "tokens cut no slice": (Shape(8, 8, 8), {"cp_size": 2, "token_group": 16}, "token_group is 16; .* and the 8 tok"),
    "neither slice nor copy": (
        Shape(8, 4, 8), {"cp_size": 2},
        "page_size is 16 in the config and 4 in kv, with cp_size 2; .* set page_size to 8",
    ),
    "another page": (Shape(8, 4, 8), {}, "page_size is 16 in the config and 4 in kv; make them equal"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused(case: str) -> None:
    """Each shape that does not tile the model, or may mean two things, raises with the values and what to set."""
    shape, options, message = REFUSED[case]
    with pytest.raises(NamespaceError, match="^" + message):
        names(shape, **options)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (Shape(8, 4, 8), {"cp_size": 2}, "page_size is 16 in the config and 4 in kv, with cp_size 2"),
        (Shape(8, 4, 8), {}, "page_size is 16 in the config and 4 in kv; make them equal"),
        (Shape(8, 16, 2), {"tp_size": 4, "total_kv_heads": 4}, "total_kv_heads is 4, and kv has 2"),
        (Shape(8, 16, 1, (32,), is_mla=True), {"total_kv_heads": 4}, "total_kv_heads is 4, and kv is MLA"),
        (
            Shape(8, 16, 8),
            {"host_layout": "head_grouped", "head_group": 3},
            "head_group is 3; it must divide",
        ),
    ],
)
def test_rank_suffix_refuses_what_cannot_be(shape: Shape, options: dict[str, Any], message: str) -> None:
    """What makes no sense without sharing either is refused under rank_suffix, too."""
    with pytest.raises(NamespaceError, match=message):
        names(shape, **options, key_scheme="rank_suffix")


# What shares less than it could


@pytest.mark.parametrize(
    ("shape", "options", "fields"),
    [
        (Shape(8, 16, 8), {}, {}),
        (
            Shape(8, 16, 2),
            {"tp_size": 4},
            {"head_group": "2 of 8 KV heads and are shared only at tp_size 4; set he"},
        ),
        (Shape(8, 16, 2), {"tp_size": 4, "head_group": 2}, {}),
        (Shape(8, 16, 2), {"tp_size": 4, "tp_lcm_size": 4}, {}),
        (Shape(8, 16, 1, (32,), is_mla=True), {"tp_size": 4}, {}),
        (
            Shape(4, 16, 8),
            {"pp_size": 2, "total_layers": 8},
            {"layer_partition": "4 of 8 layers and are shared only at pp_size 2; set layer_partition"},
        ),
        (Shape(4, 16, 8), {"pp_size": 2, "total_layers": 8, "layer_partition": 4}, {}),
        (Shape(8, 16, 8), {"cp_size": 2}, {}),
        (Shape(8, 8, 8), {"cp_size": 2, "token_group": 8}, {}),
        (
            Shape(4, 8, 2),
            {"tp_size": 4, "pp_size": 2, "total_layers": 8, "cp_size": 2},
            {
                "head_group": "8 / the least common",
                "layer_partition": "4 of 8",
                "token_group": "8 of 16 tokens",
            },
        ),
        (Shape(4, 8, 2), {"tp_size": 4, "pp_size": 2, "cp_size": 2, "key_scheme": "rank_suffix"}, {}),
    ],
)
def test_what_is_left_unset_and_narrows_sharing(
    shape: Shape, options: dict[str, Any], fields: dict[str, str]
) -> None:
    """For each option that is unset and matters at this shape there is one advice, with the numbers; else none."""
    found = narrow_fields(config_of(**options), shape)
    assert found.keys() == fields.keys()
    assert all(words in found[name] for name, words in fields.items())
