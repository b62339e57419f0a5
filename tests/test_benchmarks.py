"""The benchmark harness: it takes turns, reports medians, chooses by name, and runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import codec, file, slots
from benchmarks.geometry import PAGE_NBYTES, PAGE_SIZE
from benchmarks.harness import (
    Benchmark,
    Sample,
    choose,
    counted,
    interleave,
    measure,
    prepared,
    repeated,
    timed,
    timed_async,
    undone,
)
from benchmarks.objects import Objects
from benchmarks.peers import __main__ as peers
from benchmarks.peers import files_ours, files_sides, flow_ours
from benchmarks.peers.flow_sides import remove_objects
from benchmarks.peers.samples import Series
from benchmarks.peers.tree_sides import NUM_SAMPLES
from benchmarks.raw_files import RawFiles, buffers, empty_files
from benchmarks.trees import CHAIN, Leaves
from hicache_async.stores import MemoryStore

ROOT = Path(__file__).parents[1]
FIELDS = ["name", "params", "value", "unit", "floor", "floor_name", "ratio"]
TREE_RECORDS = (
    ["tree.match"] * 4 + ["tree.match_list", "tree.hash"] + ["tree.evict"] * 2 + ["tree.leaf_nbytes"]
)


def scripted(name: str, seconds: Sequence[float], calls: list[str]) -> Sample:
    """Return a sample that gives these seconds in turn and writes down that it was called."""
    values = iter(seconds)

    async def sample() -> float:
        calls.append(name)
        return next(values)

    return sample


@pytest.mark.asyncio
async def test_candidate_and_floor_take_turns() -> None:
    """Samples alternate, A B A B, and what the warm-ups gave is left out."""
    calls: list[str] = []
    pairs = await interleave(
        scripted("a", [9, 1, 2], calls), scripted("b", [8, 3, 4], calls), rounds=2, warmups=1
    )
    assert calls == ["a", "b"] * 3
    assert pairs == [(1, 3), (2, 4)]


@pytest.mark.asyncio
async def test_a_record_has_medians_in_its_unit_and_their_ratio() -> None:
    """Value and floor are medians, neither means nor warm-ups, and the ratio is of these."""
    record = await measure(
        "family.name",
        {"size": 64},
        scripted("a", [900, 0.001, 0.006, 0.1], []),
        scripted("b", [800, 0.002, 0.004, 0.003], []),
        floor_name="the floor",
        unit="ms",
        rounds=3,
    )
    fields = record.as_dict()
    assert list(fields)[: len(FIELDS)] == FIELDS
    assert [fields[name] for name in FIELDS] == [
        "family.name",
        {"size": 64},
        6.0,
        "ms",
        3.0,
        "the floor",
        2.0,
    ]
    assert json.loads(json.dumps(fields)) == fields


@pytest.mark.asyncio
async def test_samples_count_calls_and_undo_what_they_did() -> None:
    """A sample does its work as often as said, and what undoes it comes after each."""
    calls: list[str] = []

    async def work() -> None:
        calls.append("work")

    async def undo() -> None:
        calls.append("undo")

    await undone(timed(lambda: calls.append("sync"), repeats=3), undo)()
    await undone(timed_async(work, pieces=2), undo)()
    assert calls == ["sync", "sync", "sync", "undo", "work", "undo"]


@pytest.mark.asyncio
async def test_a_prepared_sample_makes_its_material_anew() -> None:
    """Each sample works on what was prepared for it, and preparing comes before."""
    calls: list[str] = []
    numbers = iter("12")

    def prepare() -> str:
        calls.append("prepare")
        return next(numbers)

    async def work(number: str) -> None:
        calls.append(number)

    sample = prepared(prepare, work)
    assert await sample() >= 0 and await sample() >= 0
    assert calls == ["prepare", "1", "prepare", "2"]


@pytest.mark.asyncio
async def test_a_repeated_sample_gives_the_mean() -> None:
    """A sample is taken as often as said, and the mean of all of them counts."""
    calls: list[str] = []
    assert await repeated(scripted("a", [1, 2, 6], calls), 3)() == 3
    assert calls == ["a"] * 3


def test_what_is_counted_is_a_record_like_any_other() -> None:
    """A record that was not timed has the same fields and the ratio of its value to its floor."""
    fields = counted("family.nbytes", {"leaves": 4}, 512, 1024, floor_name="the floor", unit="B").as_dict()
    assert list(fields)[: len(FIELDS)] == FIELDS
    assert (fields["value"], fields["floor"], fields["ratio"], fields["unit"]) == (512, 1024, 0.5, "B")


def test_leaves_fill_the_device_and_the_oldest_one_goes() -> None:
    """What is timed as one eviction lets one leaf go, the one that was used longest ago."""
    leaves = Leaves(4)
    leaves.fill()

    def resident() -> list[bytes]:
        return list(leaves.tree.root(CHAIN.seed).children or {})

    before = resident()
    leaves.evict()
    assert resident() == before[1:]
    leaves.grow()
    assert resident()[:-1] == before[1:] and len(resident()) == 4


def test_only_chooses_by_the_beginning_of_the_name() -> None:
    """A prefix picks all names that begin with it, the empty one every name."""
    benchmarks = [
        Benchmark(name, command.BENCHMARKS[0].records) for name in ("tree.match", "tree.hash", "file.read")
    ]
    assert [one.name for one in choose(benchmarks, "tree.")] == ["tree.match", "tree.hash"]
    assert choose(benchmarks, "") == benchmarks
    assert choose(benchmarks, "match") == []


@pytest.mark.parametrize("main", [command.main, lambda options: peers.main(["unused", *options])])
def test_a_prefix_of_nothing_is_an_error(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """When nothing matches the exit status is not 0, and the message names what there is."""
    assert main(["--only", "nothing"]) != 0
    shown = capsys.readouterr()
    assert shown.out == "" and "'nothing'" in shown.err


def run_module(module: str, *options: str) -> list[dict[str, Any]]:
    """Run a module of the benchmarks and return its standard output, one JSON object a line."""
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_quick_run_prints_one_json_object_a_line() -> None:
    """The command prints every record of the tree, and nothing else, on standard output."""
    records = run_module("benchmarks", "--quick", "--only", "tree", "--format", "json")
    assert [record["name"] for record in records] == TREE_RECORDS
    assert [record["params"]["nodes"] for record in records[:4]] == [1, 8, 16, 512]
    for record in records:
        assert set(FIELDS) <= record.keys()
        assert record["value"] > 0 and record["floor"] > 0 and record["ratio"] > 0


STORE_RECORDS = {
    "file.read": [{"size": size} for size in file.SIZES],
    "file.write": [
        *({"size": size} for size in file.SIZES),
        {"size": 65536, "max_bytes": str(1 << 40)},
        {"size": 65536, "unnamed_temp": "True"},
    ],
    "file.write_durable": [
        {"mode": mode, "size": size} for size in file.DURABLE_SIZES for mode in ("none", "batch", "each")
    ],
    "file.exists512": [{"indexed": "yes", "size": 4096}, {"indexed": "no", "size": 4096}],
    "slots.read": [{"store": store, "size": size} for store in ("shm", "mmap") for size in slots.SIZES],
    "slots.write": [{"store": store, "size": size} for store in ("shm", "mmap") for size in slots.SIZES],
    "codec.read": [{"codec": name, "size": codec.SIZE} for name in ("zstd", "aesgcm")],
    "codec.write": [{"codec": name, "size": codec.SIZE} for name in ("zstd", "aesgcm")],
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", STORE_RECORDS)
async def test_each_store_is_measured_with_each_option(name: str) -> None:
    """A benchmark of a store has a record for each set of params, with a time of its own and a floor."""
    (benchmark,) = (one for one in command.BENCHMARKS if one.name == name)
    records = [record async for record in benchmark.records(True)]
    params = [{key: record.params[key] for key in record.params if key != "objects"} for record in records]
    assert params == STORE_RECORDS[name]
    assert all(record.value > 0 and record.floor > 0 for record in records)


@pytest.mark.asyncio
async def test_batches_are_compared_with_objects_synced_one_by_one() -> None:
    """The ratio of writes that are synced by the batch is to the same writes synced each, those to system calls."""
    floors = {record.params["mode"]: record.floor_name async for record in file.write_durable_records(True)}
    assert floors == {"none": "mode=each", "batch": "mode=each", "each": "the same calls, raw"}


def test_a_raw_write_is_synced_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor of a durable write syncs each file before it has its name, and then the directory."""
    calls: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: calls.append("file"))
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(f"directory of {len(os.listdir(fd))}"))
    raw = RawFiles(tmp_path / "raw")
    raw.write(buffers(2, 4096), synced=True)
    assert calls == ["file", "directory of 1", "file", "directory of 2"]
    raw.write(buffers(1, 4096))
    assert len(calls) == 4


def test_files_of_a_size_are_emptied_and_stay(tmp_path: Path) -> None:
    """What is written again and again does not fill the disk, and no file is removed for that."""
    small, large = tmp_path / "small", tmp_path / "folder" / "large"
    large.parent.mkdir()
    small.write_bytes(bytes(7))
    large.write_bytes(bytes(8))
    empty_files(tmp_path, min_nbytes=8)
    assert (small.stat().st_size, large.stat().st_size) == (7, 0)
    empty_files(tmp_path)
    assert small.stat().st_size == 0


@pytest.mark.asyncio
async def test_keys_are_looked_up_as_new_strings() -> None:
    """Each lookup hashes its keys like a request that has just made them."""
    objects = Objects(MemoryStore(), 64, 3)
    await objects.write()
    keys = objects.new_keys()
    assert keys == objects.keys
    assert not any(new is key for new, key in zip(keys, objects.keys, strict=True))


def test_prefetches_in_flight_are_weighed() -> None:
    """Each count has its record, with time, memory and lateness of the loop; memory stays bounded for each request."""
    records = run_module("benchmarks", "--quick", "--only", "inflight", "--format", "json")
    assert [(record["name"], record["params"]["count"]) for record in records] == [
        ("inflight.prefetch", 100),
        ("inflight.prefetch", 1000),
    ]
    for record in records:
        assert record["loop_cpu_us"] == record["value"] > 0 and record["lag_ms"] >= 0
    assert 0 < records[1]["heap_bytes"] < 2048


def test_our_side_of_the_tree_measures_what_its_suite_names() -> None:
    """Each record of the tree beside others comes back from our side, with all of its samples."""
    (suite,) = (suite for suite in peers.SUITES if suite.family == "tree")
    lines = run_module("benchmarks.peers.tree_ours", *suite.records)
    assert [line["name"] for line in lines] == list(suite.records)
    for line in lines:
        assert len(line["seconds"]) == NUM_SAMPLES and min(line["seconds"]) > 0


def test_peers_alternate_and_are_compared_by_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round runs one process of each side; the ratio is ours over theirs, and of counts the most is told."""
    calls: list[str] = []
    measured: dict[str, Iterator[Series]] = {
        "ours": iter([{"seconds": [1.0, 2.0], "leaked": [0, 2]}, {"seconds": [3.0], "leaked": [1]}]),
        "theirs": iter([{"seconds": [4.0], "leaked": [7]}, {"seconds": [4.0, 8.0], "leaked": [9, 8]}]),
    }

    def run_side(directory: Path, family: str, side: str, records: Sequence[str]) -> dict[str, Series]:
        calls.append(side)
        return {"flow.x": next(measured[side])}

    monkeypatch.setattr(peers, "prepare", lambda directory, side: calls.append(f"prepare {side}"))
    monkeypatch.setattr(peers, "run_side", run_side)
    suite = peers.Suite("theirs", "flow", {"flow.x": "ms"})
    (line,) = peers.compare(Path("unused"), suite, ["flow.x"], rounds=2)
    assert calls == ["prepare ours", "prepare theirs", "ours", "theirs", "ours", "theirs"]
    assert (line["name"], line["ours"], line["theirs"], line["ratio"]) == (
        "theirs.flow.x",
        2000.0,
        4000.0,
        0.5,
    )
    assert (line["ours_leaked"], line["theirs_leaked"]) == (2, 9)


def test_a_record_without_counts_tells_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a record that is only timed no count is told."""
    monkeypatch.setattr(peers, "prepare", lambda directory, side: None)
    monkeypatch.setattr(peers, "run_side", lambda *args: {"flow.x": {"seconds": [1.0]}})
    (line,) = peers.compare(Path("unused"), peers.Suite("theirs", "flow", {"flow.x": "s"}), ["flow.x"], 1)
    assert list(line) == ["name", "ours", "theirs", "unit", "ratio", "samples", "load"]


def test_our_side_of_the_flows_has_what_its_suite_names() -> None:
    """The records of the flows beside others are those of our side, in order."""
    (suite,) = (suite for suite in peers.SUITES if suite.family == "flow")
    assert list(suite.records) == list(flow_ours.RECORDS)


@pytest.mark.asyncio
@pytest.mark.parametrize("record", flow_ours.RECORDS)
async def test_our_side_of_the_flows_measures(record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record of the flows does its work in some time, for every sample, and leaks nothing."""
    for name, value in {"NUM_SAMPLES": 1, "NUM_DETACHES": 1, "HANG_S": 0.01, "SETTLE_S": 0.0}.items():
        monkeypatch.setattr(flow_ours, name, value)
    series = await flow_ours.RECORDS[record]()
    assert len(series["seconds"]) == 1 and series["seconds"][0] > 0
    assert series.get("leaked", [0]) == [0]


@pytest.fixture
def few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files beside others: two of them, in one sample, where the test removes them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("NUM_PAGES", "NUM_LOOKUPS"):
        monkeypatch.setattr(files_sides, name, 2)
    monkeypatch.setattr(files_sides, "NUM_SAMPLES", 1)


@pytest.mark.usefixtures("few_files")
def test_our_side_of_the_files_measures_what_its_suite_names() -> None:
    """Each record of the files beside others has its samples, of bytes that were verified."""
    (suite,) = (suite for suite in peers.SUITES if suite.family == "files")
    for record in suite.records:
        series = files_ours.RECORDS[record]()
        assert list(series) == ["seconds"] and len(series["seconds"]) == 1 and series["seconds"][0] > 0


@pytest.mark.usefixtures("few_files")
def test_a_side_that_reads_other_bytes_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a side reads is compared with what it has written."""

    async def read_nothing(self: files_ours.Ours, batch: int) -> None:
        pass

    monkeypatch.setattr(files_ours.Ours, "read", read_nothing)
    with pytest.raises(AssertionError, match="is not what was written"):
        files_ours.RECORDS["fs.read"]()


def test_objects_are_removed_once_they_are_counted(tmp_path: Path) -> None:
    """Files of pages go, others and folders stay; a number of files that is not that of the pages is an error."""
    (tmp_path / "folder").mkdir()
    page, manifest = tmp_path / "folder" / "page", tmp_path / "folder" / "manifest"
    page.touch()
    manifest.touch()
    os.truncate(page, PAGE_NBYTES)
    with pytest.raises(AssertionError, match="1 files"):
        remove_objects(str(tmp_path), 2 * PAGE_SIZE)
    remove_objects(str(tmp_path), PAGE_SIZE)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "folder", manifest]
