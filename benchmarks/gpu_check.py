"""``python benchmarks/gpu_check.py``: whether a CudaDevice is right and how fast it is, on the GPU that is here.

Takes less than five minutes and one GPU. Prints a row for each thing as soon as it is known, and last one line of
JSON with all of them. Ends with 0 when everything passed, with 1 when something failed, with 2 where there is no GPU.
A goal that is missed is told, and is no failure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

if not __package__:  # started by its path, from where its neighbours would be found as modules of the system
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import _gpu_bridge, _gpu_fast, _gpu_right, _gpu_streams
from benchmarks._gpu import Gpu
from benchmarks._gpu_rows import Part, Row, Sizes, why
from hicache_async.errors import ConfigError

PARTS = (
    Part("kernel", 40, _gpu_right.kernel),
    Part("exam", 60, _gpu_right.exam),
    Part("pinning", 20, _gpu_right.pinning),
    Part("cache", 20, _gpu_right.cache),
    Part("block", 10, _gpu_streams.block),
    Part("fence", 10, _gpu_streams.fence),
    Part("long_kernel", 15, _gpu_streams.long_kernel),
    Part("copy", 55, _gpu_fast.copy),
    Part("first_layer", 10, _gpu_fast.first_layer),
    Part("bridge", 20, _gpu_bridge.bridge),
    Part("overlap", 20, _gpu_fast.overlap),
)

LIMIT_S = 285.0
"""A part that might not be over by then is not begun."""

GRACE_S = 10.0
"""How long a part that was given up may take to end, before it counts as hanging."""


def check(gpu: Gpu, sizes: Sizes, parts: Sequence[Part] = PARTS) -> list[Row]:
    """Run the parts one after the other, print their rows and return them; one that fails stops no other.

    Behind one that hangs, in a call that nothing can end, no other is begun.
    """
    rows: list[Row] = []
    begin = time.perf_counter()

    def add(row: Row) -> None:
        rows.append(row)
        print(row.as_line(), flush=True)

    for part in parts:
        start = time.perf_counter()
        if start - begin + part.budget_s > LIMIT_S:
            add(
                Row(
                    f"{part.name}.ends",
                    error="not begun: the parts before it took too long; --only runs it alone",
                )
            )
            continue
        thread = threading.Thread(target=_run, args=(part, gpu, sizes, add), name=part.name, daemon=True)
        thread.start()
        thread.join(part.budget_s + GRACE_S)
        if thread.is_alive():
            add(Row(f"{part.name}.ends", error=f"hangs, {part.budget_s:.0f} s and more; no other was begun"))
            break
        add(Row(f"{part.name}.seconds", figures={"seconds": time.perf_counter() - start}))
    return rows


def _run(part: Part, gpu: Gpu, sizes: Sizes, add: Callable[[Row], None]) -> None:
    async def run() -> None:
        try:
            async with contextlib.aclosing(part.rows(gpu, sizes)) as rows, asyncio.timeout(part.budget_s):
                async for row in rows:
                    add(row)
                    await asyncio.sleep(0)  # a part that waits for nothing is given up here
        finally:
            gpu.synchronize()  # what it still used may be given to the next one

    try:
        asyncio.run(run())
    except TimeoutError:
        add(
            Row(f"{part.name}.ends", error=f"not over after {part.budget_s:.0f} s; the rest of it is missing")
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs into the table
        add(Row(f"{part.name}.ends", error=why(error)))


def table(gpu: Gpu, rows: Sequence[Row], seconds: float) -> dict[str, object]:
    """Return all that is known, for programs."""
    return {
        "machine": gpu.describe(),
        "seconds": round(seconds, 1),
        "failed": sum(row.verdict == "failed" for row in rows),
        "goals_missed": sum(row.verdict == "goal missed" for row in rows),
        "rows": [row.as_dict() for row in rows],
    }


def main(
    arguments: Sequence[str] | None = None, *, make_gpu: Callable[[], Gpu] = Gpu, sizes: Sizes | None = None
) -> int:
    """Run what the command line chooses; returns the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--only", metavar="PART", action="append", help=f"of {names}; may be given again")
    options = parser.parse_args(arguments)
    wanted = options.only or [part.name for part in PARTS]
    if unknown := set(wanted) - {part.name for part in PARTS}:
        print(f"there is no part {', '.join(sorted(unknown))}; there are {names}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    try:
        gpu = make_gpu()
    except ConfigError as error:
        print(f"Nothing was checked: {error}.", file=sys.stderr)
        return 2
    rows = check(gpu, sizes or Sizes(), [part for part in PARTS if part.name in wanted])
    found = table(gpu, rows, time.perf_counter() - start)
    print(json.dumps(found), flush=True)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    status = main()
    if threading.active_count() > 1:  # a part hangs, and to leave as usual would wait for the GPU
        os._exit(status)
    sys.exit(status)
