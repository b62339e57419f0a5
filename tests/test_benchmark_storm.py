"""The storm of cancels that is measured: it leaves nothing, and its record says so."""

from __future__ import annotations

import json

import pytest

from benchmarks import storm
from benchmarks.__main__ import as_row
from benchmarks.harness import counted
from hicache_async import PrefixLease


def test_what_else_was_found_is_a_field_of_its_own() -> None:
    """A record's further fields stand beside the others in JSON, and behind them in the table."""
    record = counted("family.name", {}, 1, 2, floor_name="the floor", unit="ms", fields={"pages_left": 7})
    assert json.loads(json.dumps(record.as_dict()))["pages_left"] == 7
    assert "fields" not in record.as_dict()
    assert as_row(record).endswith("the floor  pages_left=7")


@pytest.mark.asyncio
async def test_a_storm_leaves_nothing() -> None:
    """After a quick one no page, file or task is left, and each cancel was followed until it was quiet."""
    (record,) = [record async for record in storm.records(True)]
    assert record.name == "cancel.storm"
    fields = record.as_dict()
    assert fields["cancels"] >= 40  # type: ignore[operator]
    assert (fields["pages_left"], fields["files_left"], fields["tasks_left"]) == (0, 0, 0)
    assert 0 < fields["quiet_p50_s"] <= fields["quiet_p99_s"] < 30  # type: ignore[operator]


@pytest.mark.asyncio
async def test_a_storm_sees_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that keeps its lease leaves pages, which the record counts."""
    kept: list[PrefixLease] = []
    leave = PrefixLease.__exit__

    def keep_the_first(lease: PrefixLease, *error: object) -> None:
        if kept or not lease.pages.size:
            leave(lease, *error)  # type: ignore[arg-type]
        else:
            kept.append(lease)

    monkeypatch.setattr(PrefixLease, "__exit__", keep_the_first)
    with pytest.warns(ResourceWarning, match="was not released"):
        (record,) = [record async for record in storm.records(True)]
    assert record.as_dict()["pages_left"]
