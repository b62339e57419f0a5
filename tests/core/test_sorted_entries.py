"""SortedEntries: what a sorted list would say, whatever was added and removed."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_async.core.node import Node
from hicache_async.core.sorted_entries import Entry, SortedEntries

NODE = Node(None, b"", [])
MOVES = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove", "after"]), st.integers(0, 9)), max_size=120
)


def walk(entries: SortedEntries) -> list[Entry]:
    """Return all entries, one after the other."""
    found: list[Entry] = []
    while (entry := entries.after(found[-1] if found else None)) is not None:
        found.append(entry)
    return found


@given(moves=MOVES)
@settings(max_examples=200, deadline=None)
def test_it_is_a_sorted_list(moves: list[tuple[str, int]]) -> None:
    """Entries, some of one key, are found in order, and so is what stands behind one that is not there."""
    entries = SortedEntries(block_length=4)
    model: list[Entry] = []
    for number, (move, value) in enumerate(moves):
        entry = (value, number, NODE)
        if move == "add":
            insort(model, entry)
            entries.add(entry)
        elif move == "remove" and model:
            entries.remove(model.pop(value % len(model)))
        else:
            behind = model[bisect_right(model, entry) :]
            assert entries.after(entry) is (behind[0] if behind else None)
        assert walk(entries) == model
        assert [block[-1] for block in entries._blocks] == entries._lasts
        assert all(0 < len(block) <= 4 for block in entries._blocks)
    assert entries.after(None) is (model[0] if model else None)


def test_blocks_stay_short() -> None:
    """However entries come, no block grows beyond its length, so that no shift does."""
    for order in (range(1000), range(999, -1, -1)):
        entries = SortedEntries(block_length=16)
        for key in order:
            entries.add((key, key, NODE))
        assert max(len(block) for block in entries._blocks) <= 16
        assert len(entries._blocks) <= 1000 / 8
        assert [entry[0] for entry in walk(entries)] == list(range(1000))


@pytest.mark.parametrize("order", [1, -1])
def test_entries_of_no_order_can_be_removed(order: int) -> None:
    """An entry whose key is not even equal to itself is found by what it is."""
    keys: list[Any] = [3.0, float("nan"), 1.0, float("nan"), 2.0, float("nan")]
    added: list[Entry] = [(key, number, NODE) for number, key in enumerate(keys)]
    entries = SortedEntries(block_length=2)
    for entry in added:
        entries.add(entry)
    for entry in added[::order]:
        entries.remove(entry)
        left = {number for block in entries._blocks for _, number, _ in block}
        assert entry[1] not in left and len(left) == sum(map(len, entries._blocks))
    assert entries.after(None) is None
