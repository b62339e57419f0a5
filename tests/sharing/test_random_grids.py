"""Any two legal deployments of a model, cut alike: what one has stored the other one reads, every byte right."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_async.config import HostLayout
from hicache_async.stores.memory import MemoryStore
from tests.core.world import LONG, QUICK
from tests.sharing.models import Model
from tests.sharing.ranks import Cut, Grid, ranks_of

HASHES = [bytes([number]) * 32 for number in (3, 7)]
World = tuple[Model, Cut, tuple[Grid, HostLayout], tuple[Grid, HostLayout]]


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@st.composite
def grids(draw: st.DrawFn, model: Model, cut: Cut) -> Grid:
    """Draw a deployment that is made of whole cells."""
    if model.heads:
        sizes = divisors(model.heads // cut.head_group)
        copied = [model.heads * copies for copies in (2, 3)] if cut.head_group == 1 else []
        tp = draw(st.sampled_from(sizes + copied))
    else:
        tp = draw(st.integers(1, 4))
    slices = draw(st.booleans())
    cp = draw(st.sampled_from(divisors(model.tokens // cut.token_group) if slices else [1, 2, 3]))
    edges = range(cut.layer_partition, model.layers, cut.layer_partition)
    starts = (0, *sorted(draw(st.sets(st.sampled_from(edges), max_size=3)) if edges else ()))
    return Grid(tp, len(starts), cp, slices, starts)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw a model, how it is cut, who writes and who reads."""
    heads, tokens = draw(st.integers(0, 6)), draw(st.sampled_from([1, 2, 4, 6, 8]))
    widths = st.integers(12, 20)
    row_nbytes = (draw(widths), draw(widths)) if heads else (draw(widths),)
    model = Model("drawn", heads, draw(st.integers(1, 7)), tokens, row_nbytes)
    cut = Cut(
        draw(st.sampled_from(divisors(max(1, heads)))),
        draw(st.integers(1, model.layers)),
        draw(st.sampled_from(divisors(tokens))),
    )
    layout = st.sampled_from(list(HostLayout))
    writer, reader = ((draw(grids(model, cut)), draw(layout)) for _ in range(2))
    return model, cut, writer, reader


async def share(world: World) -> None:
    """Let all ranks of one deployment write, and all of the other read."""
    model, cut, writer, reader = world
    store, written = MemoryStore(), list[str]()
    for rank in ranks_of(model, writer[0], cut, writer[1], len(HASHES)):
        rank.compute(HASHES)
        if rank.keys.writes:
            names, chunks = rank.objects(HASHES)
            assert await store.write(names, chunks) == len(names)
            written += names
    assert len(written) == len(set(written)), "two ranks write one object"
    for rank in ranks_of(model, reader[0], cut, reader[1], len(HASHES)):
        assert await rank.read(store, HASHES) == len(HASHES)
        rank.check(HASHES)


@given(worlds())
@QUICK
def test_any_two_deployments_share(world: World) -> None:
    """Whatever the heads, layers, tokens and widths, the stages and slices, the copies and layouts."""
    asyncio.run(share(world))


@pytest.mark.stress
@pytest.mark.timeout(600)
@given(worlds())
@LONG
def test_very_many_pairs_of_deployments_share(world: World) -> None:
    """The same, two thousand times."""
    asyncio.run(share(world))
