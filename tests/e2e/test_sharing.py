"""Deployments of different shapes share one directory: real processes, whole caches, ranks that agree."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_async.config import HostLayout
from tests.sharing.models import GQA, MHA, MLA, Model
from tests.sharing.ranks import Cut, Grid

NUM_PROCESSES = 4
PROMPTS = [1, 2]
HIT = 3 * MHA.tokens
"""Tokens of a prompt that are whole pages."""


class Processes:
    """As many processes as the largest deployment has ranks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        command = [sys.executable, "-W", "error", "-m", "tests.e2e.sharing_worker", str(directory)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._num_jobs = 0
        self._all = [
            subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(NUM_PROCESSES)
        ]

    def serve(self, model: Model, grid: Grid, cut: Cut, layout: HostLayout) -> list[dict[str, Any]]:
        """Let the ranks of one deployment serve all prompts; returns what each says."""
        self._num_jobs += 1
        size = grid.tp * grid.pp * grid.cp
        job = {
            "model": model.name, "grid": dataclasses.asdict(grid), "cut": dataclasses.asdict(cut),
            "layout": layout.value, "prompts": PROMPTS, "name": f"group{self._num_jobs}",
        }  # fmt: skip
        for rank, process in enumerate(self._all[:size]):
            assert process.stdin is not None
            process.stdin.write(json.dumps(job | {"rank": rank}) + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._all[:size]]

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # the rest is the log
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"the process ended with {process.wait()}")

    def close(self) -> None:
        """End all of them."""
        for process in self._all:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._all:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the objects are."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def processes(directory: Path) -> Iterator[Processes]:
    """Start the processes once: most of what they cost is to begin."""
    started = Processes(directory)
    yield started
    started.close()


# model, how it is cut, who writes in which layout, and who reads in which
CASES: dict[str, tuple[Model, Cut, list[tuple[Grid, HostLayout]]]] = {
    "mha": (
        MHA,
        Cut(2, 2, 8),
        [
            (Grid(4), HostLayout.HEAD_GROUPED),
            (Grid(2, 2), HostLayout.LAYER_FIRST),
            (Grid(), HostLayout.PAGE_FIRST),
        ],
    ),
    "gqa with copies, and slices": (
        GQA,
        Cut(1, 4, 4),
        [
            (Grid(2, 1, 2, True), HostLayout.PAGE_FIRST_DIRECT),
            (Grid(4), HostLayout.PAGE_FIRST),
            (Grid(1, 1, 2), HostLayout.HEAD_GROUPED),
        ],
    ),
    "mla": (
        MLA,
        Cut(1, 2, 4),
        [
            (Grid(2, 2), HostLayout.PAGE_FIRST),
            (Grid(2, 1, 2, True), HostLayout.HEAD_GROUPED),
            (Grid(), HostLayout.LAYER_FIRST),
        ],
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_other_shapes_read_it_all_back(processes: Processes, directory: Path, case: str) -> None:
    """The first deployment computes and stores; every rank of the others has each page from the store, and right."""
    model, cut, deployments = CASES[case]
    num_cells = model.heads // cut.head_group or 1
    num_cells *= model.layers // cut.layer_partition * (model.tokens // cut.token_group)
    before = num_objects(directory)
    for number, (grid, layout) in enumerate(deployments):
        said = processes.serve(model, grid, cut, layout)
        expected = HIT if number else 0
        assert [answer["store"] for answer in said] == [[expected] * len(PROMPTS)] * len(said), str(grid)
        assert num_objects(directory) - before == len(PROMPTS) * 3 * num_cells, f"{grid} has stored it again"


def num_objects(directory: Path) -> int:
    """Return how many pages, or chunks of pages, lie in the store."""
    return sum(1 for path in directory.rglob("*.kv") if path.name[64:65] == "_")
