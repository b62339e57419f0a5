"""``python -m benchmarks``: prints one record a line, as a table for people or as JSON for programs."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence

import structlog
import torch

from . import bridge, codec, copies, file, flow, inflight, slots, storm, tree
from .harness import Benchmark, Record, choose

BENCHMARKS: list[Benchmark] = [
    *tree.BENCHMARKS,
    *bridge.BENCHMARKS,
    *copies.BENCHMARKS,
    *file.BENCHMARKS,
    *slots.BENCHMARKS,
    *codec.BENCHMARKS,
    *flow.BENCHMARKS,
    *inflight.BENCHMARKS,
    *storm.BENCHMARKS,
]

ROW = "{:<16} {:<24} {:>10} {:>10} {:<4} {:>7} {:>7}  {}"
HEADER = ROW.format("name", "params", "value", "floor", "unit", "ratio", "spread", "floor is")


def as_row(record: Record) -> str:
    """Return a record as a line under ``HEADER``."""
    fields = record.as_dict()
    params = " ".join(f"{name}={value}" for name, value in record.params.items())
    return ROW.format(
        record.name, params, fields["value"], fields["floor"], record.unit, f"{record.ratio:.2f}x",
        f"{record.spread:.0%}", record.floor_name,
    ) + "".join(f"  {name}={fields[name]}" for name in record.fields)  # fmt: skip


async def run(benchmarks: Sequence[Benchmark], *, as_json: bool, quick: bool) -> None:
    """Run the benchmarks one after the other and print each record as soon as it is known."""
    if not as_json:
        print(
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}",
            flush=True,
        )
        print(HEADER, flush=True)
    for benchmark in benchmarks:
        async for record in benchmark.records(quick):
            print(json.dumps(record.as_dict()) if as_json else as_row(record), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line chooses; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument(
        "--only", metavar="PREFIX", default="", help="run the benchmarks whose names begin so"
    )
    parser.add_argument("--quick", action="store_true", help="show that it works; the figures mean nothing")
    options = parser.parse_args(arguments)
    chosen = choose(BENCHMARKS, options.only)
    if not chosen:
        names = ", ".join(benchmark.name for benchmark in BENCHMARKS)
        print(f"no benchmark's name begins with {options.only!r}; there are: {names}", file=sys.stderr)
        return 2
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)  # a second thread spins at its barrier, on a core that a neighbour wants
    asyncio.run(run(chosen, as_json=options.format == "json", quick=options.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
