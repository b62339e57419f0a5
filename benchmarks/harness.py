"""Harness: times a candidate and its floor in turn, and says how many times the floor the candidate takes."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

UNITS = {"us": 1e6, "ms": 1e3, "s": 1.0}
"""How many of each unit are a second."""

Sample = Callable[[], Awaitable[float]]
"""Does its work and returns the seconds that one piece of it took. What is not timed happens around that."""

Param = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of output.

    Attributes:
        name: of the benchmark; with ``params`` it names the record.
        value, floor: medians over all rounds, in ``unit``.
        ratio: value / floor.
        spread: distance between the quartiles of the ratios of single rounds, over ``ratio``; a large
            one says that the machine was busy.
        load: processes that wanted a core, averaged over the last minute, this one included.
        fields: what else was found, each a field of its own in JSON.
    """

    name: str
    params: dict[str, Param]
    value: float
    unit: str
    floor: float
    floor_name: str
    ratio: float
    spread: float
    rounds: int
    load: float
    fields: dict[str, float] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return the fields in order, numbers rounded to four digits that mean something."""
        fields = dataclasses.asdict(self)
        fields |= fields.pop("fields")
        return {name: rounded(value) if isinstance(value, float) else value for name, value in fields.items()}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What can be chosen by name.

    Attributes:
        records: yields the records of that name; True asks for a run that shows it works and no more.
    """

    name: str
    records: Callable[[bool], AsyncIterator[Record]]


def choose(benchmarks: Sequence[Benchmark], prefix: str) -> list[Benchmark]:
    """Return the benchmarks whose names begin with ``prefix``."""
    return [benchmark for benchmark in benchmarks if benchmark.name.startswith(prefix)]


def timed(work: Callable[[], object], *, repeats: int = 1, pieces: int = 1) -> Sample:
    """Return a sample that calls ``work`` so often and gives the mean seconds of one piece of a call."""

    async def sample() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start) / (repeats * pieces)

    return sample


def timed_async(work: Callable[[], Awaitable[object]], *, pieces: int = 1) -> Sample:
    """Return a sample that awaits ``work`` once and gives the mean seconds of one piece of it."""

    async def sample() -> float:
        start = time.perf_counter()
        await work()
        return (time.perf_counter() - start) / pieces

    return sample


def prepared(prepare: Callable[[], T], work: Callable[[T], Awaitable[object]]) -> Sample:
    """Return a sample that awaits ``work`` with what ``prepare`` has made for it, which is not timed."""

    async def sample() -> float:
        material = prepare()
        start = time.perf_counter()
        await work(material)
        return time.perf_counter() - start

    return sample


def undone(sample: Sample, undo: Callable[[], Awaitable[object]]) -> Sample:
    """Return ``sample`` with ``undo`` after it, which is not timed."""

    async def sample_and_undo() -> float:
        seconds = await sample()
        await undo()
        return seconds

    return sample_and_undo


def repeated(sample: Sample, times: int) -> Sample:
    """Return a sample that takes ``sample`` so often and gives the mean."""

    async def samples() -> float:
        return statistics.fmean([await sample() for _ in range(times)])

    return samples


async def interleave(
    candidate: Sample, floor: Sample, rounds: int, *, warmups: int = 1
) -> list[tuple[float, float]]:
    """Sample candidate and floor in turn, A B A B, and return the pairs behind the first ``warmups``."""
    pairs = []
    for _ in range(warmups + rounds):
        seconds = await candidate()
        pairs.append((seconds, await floor()))
    return pairs[warmups:]


async def measure(
    name: str,
    params: dict[str, Param],
    candidate: Sample,
    floor: Sample,
    *,
    floor_name: str,
    unit: str,
    rounds: int,
) -> Record:
    """Interleave a candidate with its floor and return the record."""
    pairs = await interleave(candidate, floor, rounds)
    value = statistics.median(seconds for seconds, _ in pairs)
    base = statistics.median(seconds for _, seconds in pairs)
    ratio = value / base
    return Record(
        name=name,
        params=params,
        value=value * UNITS[unit],
        unit=unit,
        floor=base * UNITS[unit],
        floor_name=floor_name,
        ratio=ratio,
        spread=_quartile_distance([seconds / other for seconds, other in pairs]) / ratio,
        rounds=rounds,
        load=os.getloadavg()[0],
    )


def counted(
    name: str,
    params: dict[str, Param],
    value: float,
    floor: float,
    *,
    floor_name: str,
    unit: str,
    fields: dict[str, float] | None = None,
) -> Record:
    """Return the record of what is not sampled in rounds: counted, or timed as it happened."""
    return Record(
        name=name,
        params=params,
        value=value,
        unit=unit,
        floor=floor,
        floor_name=floor_name,
        ratio=value / floor,
        spread=0.0,
        rounds=1,
        load=os.getloadavg()[0],
        fields=fields or {},
    )


def rounded(value: float) -> float:
    """Return ``value`` with four significant digits."""
    return float(f"{value:.4g}")


def _quartile_distance(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
