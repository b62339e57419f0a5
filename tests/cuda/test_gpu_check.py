"""gpu_check where no GPU is: each of its parts runs to its end on a stand-in, and finds the fault it is there for."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import _gpu, gpu_check
from benchmarks._gpu import Gpu
from benchmarks._gpu_fast import _copy_row
from benchmarks._gpu_rows import Part, Row, Sizes
from benchmarks.harness import counted
from hicache_async.abc import CopyPlan, Fence
from hicache_async.cuda import CudaDevice
from hicache_async.cuda.fences import CudaFence
from hicache_async.testing._device_fences import FENCE_CHECKS
from hicache_async.testing.device_exam import CHECKS
from tests.cuda.fake_gpu import FakeGpu, PinningCuda

ROOT = Path(__file__).parents[2]

NEVER_S = 30.0
"""A kernel of so long ends when all streams are waited for, not before."""

TINY = Sizes(
    num_layers=2,
    head_dim=8,
    pages=((2, 1), (2, 2)),
    copied_nbytes=4096,
    pin_nbytes=4096,
    far_nbytes=101,
    rounds=1,
    long_s=NEVER_S,
    delay_s=NEVER_S,
    pause_s=0.02,
    bridge_s=0.01,
)


def parts(*names: str) -> list[Part]:
    return [part for part in gpu_check.PARTS if part.name in names]


def errors(rows: Sequence[Row]) -> dict[str, str]:
    return {row.name: row.error for row in rows if row.verdict == "failed"}


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    yield gpu
    gpu.cuda.end()


def test_the_stand_in_is_asked_what_a_gpu_is() -> None:
    """It has the methods and parameters of the real one, and no more."""

    def methods(of: type) -> dict[str, list[str]]:
        functions = inspect.getmembers(of, inspect.isfunction)
        return {name: list(inspect.signature(one).parameters) for name, one in functions if name[0] != "_"}

    assert methods(FakeGpu) == methods(Gpu)


def test_torch_has_what_a_gpu_is_asked_with() -> None:
    """Each name of torch.cuda that is used is one."""
    tree = ast.parse(Path(_gpu.__file__).read_text())
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {name.removeprefix("torch.cuda.") for name in used if name.startswith("torch.cuda.")}
    names = {name.split("(")[0].split(".")[0] for name in names}
    assert {"Event", "stream", "synchronize", "_sleep"} <= names
    assert not [name for name in names if not hasattr(torch.cuda, name)]


# Everything passes


def test_every_part_runs_to_its_end(gpu: FakeGpu, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line is a table of all rows, each of which was printed before; nothing was asked wrongly of CUDA."""
    assert gpu_check.main([], make_gpu=lambda: gpu, sizes=TINY) == 0  # type: ignore[arg-type, return-value]
    lines = capsys.readouterr().out.splitlines()
    table = json.loads(lines[-1])
    assert table["machine"] == gpu.describe() and table["failed"] == 0
    rows: list[dict[str, Any]] = table["rows"]
    assert not [row for row in rows if "error" in row]
    assert all(value >= 0 for row in rows for value in row["figures"].values())
    assert [row["name"] for row in rows if row["name"].endswith(".seconds")] == [
        f"{part.name}.seconds" for part in gpu_check.PARTS
    ]
    names = {row["name"] for row in rows}
    printed = [
        line for line in lines[:-1] if line[12:].split(" ")[0] in names
    ]  # a log may stand between them
    for row, line in zip(rows, printed, strict=True):
        assert line.startswith(row["verdict"]) and row["name"] in line
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["name"]] = counts.get(row["name"], 0) + 1
    assert {name: count for name, count in counts.items() if not name.startswith("exam.")} == {
        "kernel.equals_torch": 4 * 5,
        "kernel.far": 2,
        "pinning.pins": 1,
        "pinning.refusal_leaves_no_error": 1,
        "pinning.close_unpins": 1,
        "pinning.copies_across_registrations": 5,
        "cache.there_and_back": 5 * 2,
        "block.from_a_thread": 2,
        "fence.of_the_compute_stream": 1,
        "fence.of_a_side_stream": 1,
        "long_kernel.delays_no_load": 2,
        "long_kernel.delays_no_offload": 2,
        "copy.h2d": 2 * (5 + 2),
        "copy.d2h": 2 * (5 + 2),
        "first_layer.load": 2,
        "bridge.wait": 2 * 3,
        "overlap.matmul": 2 * 2,
        **{f"{part.name}.seconds": 1 for part in gpu_check.PARTS if part.name != "exam"},
    }
    fences = {check.__name__ for check in FENCE_CHECKS}
    assert {name: counts[f"exam.{name}"] for name in CHECKS} == {
        name: 1 + (name in fences) for name in CHECKS
    }
    assert not gpu.cuda.registered, "memory is left pinned"


def test_it_takes_less_than_five_minutes() -> None:
    """All budgets together leave time to begin, and pages are measured below, at and above 1 MiB."""
    assert sum(part.budget_s for part in gpu_check.PARTS) <= gpu_check.LIMIT_S <= 290 - gpu_check.GRACE_S / 2
    sizes = Sizes()
    layer_nbytes = [2 * tokens * heads * sizes.head_dim * 2 for tokens, heads in sizes.pages]
    assert [sizes.num_layers * nbytes >> 10 for nbytes in layer_nbytes] == [256, 1024, 8192]


def test_only_some_parts_are_run(gpu: FakeGpu, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are named, once each; a name that is none is refused with those that are."""
    asked = ["--only", "fence", "--only", "fence"]
    assert gpu_check.main(asked, make_gpu=lambda: gpu, sizes=TINY) == 0  # type: ignore[arg-type, return-value]
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["name"].split(".")[0] for row in rows} == {"fence"}
    assert gpu_check.main(["--only", "speed"]) == 2
    assert "speed" in (said := capsys.readouterr().err) and "long_kernel" in said


# A part fails


async def breaks(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    yield Row("broken.first")
    raise ValueError("out of order")


async def works(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    yield Row("works.first", figures={"ms": 1.5})


async def waits(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    yield Row("slow.first")
    await asyncio.get_running_loop().create_future()


def test_a_part_that_raises_is_told_and_stops_no_other(
    gpu: FakeGpu, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows stay, its error is one more, and the status is 1."""
    monkeypatch.setattr(gpu_check, "PARTS", (Part("broken", 5, breaks), Part("works", 5, works)))
    assert gpu_check.main([], make_gpu=lambda: gpu) == 1  # type: ignore[arg-type, return-value]
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert table["failed"] == 1
    assert [(row["name"], row["verdict"]) for row in table["rows"]] == [
        ("broken.first", "passed"),
        ("broken.ends", "failed"),
        ("broken.seconds", "measured"),
        ("works.first", "measured"),
        ("works.seconds", "measured"),
    ]
    assert table["rows"][1]["error"] == "ValueError: out of order"


def test_a_part_beyond_its_budget_is_given_up(gpu: FakeGpu) -> None:
    """What it had found stays, and the next one runs."""
    rows = gpu_check.check(gpu, TINY, [Part("slow", 0.05, waits), Part("works", 5, works)])  # type: ignore[arg-type]
    assert [row.name for row in rows] == [
        "slow.first", "slow.ends", "slow.seconds", "works.first", "works.seconds",
    ]  # fmt: skip
    assert list(errors(rows)) == ["slow.ends"] and "not over after" in errors(rows)["slow.ends"]


def test_behind_a_part_that_hangs_nothing_is_begun(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that never comes back is told of, and the table is printed all the same."""
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.05)
    end = threading.Event()

    async def hangs(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
        yield Row("hung.first")
        end.wait()

    rows = gpu_check.check(gpu, TINY, [Part("hung", 0.05, hangs), Part("works", 5, works)])  # type: ignore[arg-type]
    end.set()
    assert [row.name for row in rows[:2]] == ["hung.first", "hung.ends"]
    assert "hangs" in errors(rows[:2])["hung.ends"]
    assert not [row for row in rows if row.name.startswith("works")]


def test_a_part_for_which_no_time_is_left_is_not_begun(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and a shorter one is run all the same."""
    monkeypatch.setattr(gpu_check, "LIMIT_S", 8)
    rows = gpu_check.check(gpu, TINY, [Part("long", 9, works), Part("works", 5, works)])  # type: ignore[arg-type]
    assert [row.name for row in rows] == ["long.ends", "works.first", "works.seconds"]
    assert "not begun" in errors(rows)["long.ends"]


def test_a_missed_goal_is_told_and_fails_nothing() -> None:
    """From 1 MiB on 0.9 of one contiguous copy is the goal; below there is none."""

    def verdict(value_s: float, page_nbytes: int) -> str:
        record = counted("h2d", {}, value_s, 1.0, floor_name="one pinned copy", unit="s")
        return _copy_row("h2d", {}, 1 << 30, record, page_nbytes).verdict

    assert verdict(1.2, 1 << 20) == "goal missed"
    assert verdict(1.1, 1 << 20) == "goal met"
    assert verdict(1.2, 1 << 19) == "measured"


# A fault is found


class FenceOnTheCurrentStream(CudaDevice):
    def fence(self, stream: Any = None) -> CudaFence:
        current = getattr(self._runtime._current, "stream", None)  # type: ignore[attr-defined]
        return super().fence(current if stream is None else stream)


class FenceOnTheComputeStreamOnly(CudaDevice):
    def fence(self, stream: Any = None) -> CudaFence:
        return super().fence(None)


class LoadsWaitForTheComputeStream(CudaDevice):
    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[CudaFence]:
        return super().host_to_device(plan, [*after, self.fence()])


class OffloadsWaitForTheComputeStream(CudaDevice):
    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> CudaFence:
        return super().device_to_host(plan, [*after, self.fence()])


class OffloadsWaitForNobody(CudaDevice):
    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> CudaFence:
        return super().device_to_host(plan, ())


class WithFences(CudaDevice):
    """A device with fences of another kind."""

    fence_class: type[CudaFence]

    def _fence(self, *args: Any) -> CudaFence:
        fence = super()._fence(*args)
        fence.__class__ = self.fence_class
        return fence


class BlockDoesNothing(WithFences):
    class fence_class(CudaFence):
        __slots__ = ()

        def block(self, stream: object | None = None) -> None:
            pass


class BlockWaitsInTheThread(WithFences):
    class fence_class(CudaFence):
        __slots__ = ()

        def block(self, stream: object | None = None) -> None:
            while not self.passed():
                time.sleep(0.001)


class StaysPinned(CudaDevice):
    async def aclose(self) -> None:
        self._pinned.abandon()
        await super().aclose()


class LeavesErrors(PinningCuda):
    leaves_errors = True


class DropsTheLastPage(PinningCuda):
    def copy_pages(self, *args: torch.Tensor) -> None:
        source, target, source_pages, target_pages = args
        super().copy_pages(source, target, source_pages[:-1], target_pages[:-1])


class DropsTheLastByte(PinningCuda):
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(target[:-1], source[:-1])


IMPATIENT = {"long_s": 0.5, "delay_s": 0.5}
"""Kernels end by themselves: the fault is to wait for them."""

FAULTS: list[tuple[str, type, dict[str, float], str]] = [
    ("fence", FenceOnTheCurrentStream, {}, "passed before what its stream"),
    ("fence", FenceOnTheComputeStreamOnly, IMPATIENT, "passed before what its stream"),
    ("long_kernel", LoadsWaitForTheComputeStream, IMPATIENT, "a load ended only when"),
    ("long_kernel", OffloadsWaitForTheComputeStream, IMPATIENT, "an offload ended only when"),
    ("block", BlockDoesNothing, {}, "should hold page 0c0c"),
    ("block", BlockWaitsInTheThread, IMPATIENT, "it waited in the thread"),
    ("cache", BlockDoesNothing, {}, "should hold page"),
    ("pinning", StaysPinned, {}, "is pinned still"),
    ("pinning", LeavesErrors, {}, "already mapped"),
    ("pinning", DropsTheLastByte, {}, "should hold page"),
    ("kernel", DropsTheLastPage, {}, "bytes differ from what torch copies"),
    ("copy", DropsTheLastPage, {}, "other bytes have arrived"),
    ("exam", OffloadsWaitForNobody, {}, "before the fence"),
]


@pytest.mark.parametrize(
    ("name", "fault", "changes", "said"),
    FAULTS,
    ids=[f"{name}-{fault.__name__}" for name, fault, *_ in FAULTS],
)
def test_a_fault_is_found_by_the_part_made_for_it(
    name: str, fault: type, changes: dict[str, float], said: str
) -> None:
    """A device or a CUDA with one thing wrong fails that part, in words that say what."""
    is_device = issubclass(fault, CudaDevice)
    gpu = FakeGpu(device_class=fault) if is_device else FakeGpu(fault())
    sizes = Sizes(**{name: getattr(TINY, name) for name in Sizes.__slots__} | changes)  # type: ignore[arg-type]
    rows = gpu_check.check(gpu, sizes, parts(name))  # type: ignore[arg-type]
    assert any(said in error for error in errors(rows).values()), errors(rows)


# Without a GPU


@pytest.mark.parametrize("command", [["benchmarks/gpu_check.py"], ["-m", "benchmarks.gpu_check"]])
def test_without_a_gpu_it_says_what_to_do(command: list[str]) -> None:
    """In one sentence, and with a status of its own; started by its path or as a module."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("Nothing was checked: ") and "check nvidia-smi" in line
