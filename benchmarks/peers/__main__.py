"""Runs each side in its own environment, in turn, and prints how the times compare.

A side is a module of this folder, ``{family}_ours`` or ``{family}_{peer}``. It is called with the names
of the records wanted and prints ``{"name", "seconds": [...]}`` for each, with a list of its own for whatever
else was counted. It runs in a fresh process every time, so that neither side keeps a lucky heap or an
unlucky core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..harness import UNITS, rounded
from .samples import Series

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROCESS_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Suite:
    """Records that one process of each side measures.

    Attributes:
        peer: the other side; its records begin with this name.
        family: which modules measure them.
        records: their names without the peer's, and their units.
    """

    peer: str
    family: str
    records: dict[str, str]

    def chosen(self, prefix: str) -> list[str]:
        """Return the records whose full names begin with ``prefix``."""
        return [record for record in self.records if f"{self.peer}.{record}".startswith(prefix)]


SUITES = [
    Suite(
        "sglang",
        "flow",
        {
            "flow.prefetch8192": "ms",
            "flow.backup8192": "ms",
            "flow.concurrent15": "ms",
            "flow.concurrent15_5ms": "ms",
            "flow.detach_hung": "ms",
        },
    ),
    Suite(
        "sglang",
        "tree",
        {
            "tree.match.nodes1": "us",
            "tree.match.nodes16": "us",
            "tree.match.nodes512": "us",
            "tree.pin.nodes512": "us",
            "tree.evict1of2000": "us",
        },
    ),
    Suite(
        "lmcache",
        "files",
        {
            "fs.read": "ms",
            "fs.write": "ms",
            "fs.lookup512": "ms",
            "fs_native.read": "ms",
            "fs_native.write": "ms",
        },
    ),
]


def prepare(directory: Path, side: str) -> None:
    """Install what ``side`` needs, where it is missing."""
    subprocess.run([HERE / "prepare.sh", directory, side], check=True)


def run_side(directory: Path, family: str, side: str, records: Sequence[str]) -> dict[str, Series]:
    """Run one process of one side and return what it measured, by record."""
    module = f"benchmarks.peers.{family}_{side}"
    python = str(directory / side / "bin" / "python")
    command = [python, "-W", "ignore", "-m", module, *records]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{module} failed:\n{done.stderr}{done.stdout}")
    lines = map(json.loads, done.stdout.splitlines())
    return {line.pop("name"): line for line in lines}


def compare(
    directory: Path, suite: Suite, records: Sequence[str], rounds: int
) -> Iterator[dict[str, object]]:
    """Let both sides run in turn and yield a comparison of the medians for each record.

    Of what is counted it is the most that was found after any sample.
    """
    sides = ("ours", suite.peer)
    for side in sides:
        prepare(directory, side)
    measured: dict[tuple[str, str], Series] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for side in sides:
            for record, series in run_side(directory, suite.family, side, records).items():
                for what, more in series.items():
                    measured[side, record][what] += more
    for record in records:
        unit = suite.records[record]
        both = [measured[side, record] for side in sides]
        ours, theirs = (statistics.median(series["seconds"]) for series in both)
        yield {
            "name": f"{suite.peer}.{record}",
            "ours": rounded(ours * UNITS[unit]),
            "theirs": rounded(theirs * UNITS[unit]),
            "unit": unit,
            "ratio": rounded(ours / theirs),
            **_counts(*both),
            "samples": len(both[0]["seconds"]),
            "load": rounded(os.getloadavg()[0]),
        }


def _counts(ours: Series, theirs: Series) -> dict[str, float]:
    sides = {"ours": ours, "theirs": theirs}
    return {f"{side}_{what}": max(sides[side][what]) for what in ours if what != "seconds" for side in sides}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line chooses; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/peers/run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the environments are, or are made")
    parser.add_argument("--only", metavar="PREFIX", default="", help="run the records whose names begin so")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each side")
    options = parser.parse_args(arguments)
    chosen = [(suite, records) for suite in SUITES if (records := suite.chosen(options.only))]
    if not chosen:
        names = ", ".join(f"{suite.peer}.{record}" for suite in SUITES for record in suite.records)
        print(f"no record's name begins with {options.only!r}; there are: {names}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as scratch:
        os.environ["TMPDIR"] = scratch  # of the sides: their files are removed after the last of them
        for suite, records in chosen:
            for line in compare(options.directory, suite, records, options.rounds):
                print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
