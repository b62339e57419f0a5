"""Four processes: the same results everywhere, and what a stopped, a slow and a dead one cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SIZE = 4
WORKER = Path(__file__).with_name("worker.py")
GROUP_TIMEOUT_S = 2.0
TIMEOUTS = {"consensus_timeout_s": 0.3, "ticket_timeout_s": 10.0, "group_timeout_s": GROUP_TIMEOUT_S}
SLACK_S = 3.0
"""What a busy machine may add."""

Line = dict[str, Any]


class Process:
    """One rank."""

    def __init__(self, rank: int, folder: Path, work: str, options: Line) -> None:
        command = [sys.executable, "-W", "error", str(WORKER), str(rank), str(SIZE), str(folder), work]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.popen = subprocess.Popen(
            [*command, json.dumps(options)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self, event: str) -> Line:
        """Return its next line about ``event``; lines before it are passed over."""
        assert self.popen.stdout is not None
        for text in self.popen.stdout:
            line: Line = json.loads(text)
            if line["event"] == event:
                return line
        raise AssertionError(f"the process ended without {event}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        os.kill(self.popen.pid, number)

    def stop(self) -> None:
        """Tell it to leave."""
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def end(self) -> int:
        """Return its exit status."""
        status = self.popen.wait(20)
        self.close()
        return status

    def close(self) -> None:
        """End it if it has not ended."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


Starter = Callable[..., list[Process]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Return what starts a group of processes, each with options of its own, and waits until it is joined."""
    started: list[Process] = []

    def start_group(work: str, options: Callable[[int], Line], config: Line | None = None) -> list[Process]:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        group = [
            Process(rank, folder, work, {"config": config or TIMEOUTS, **options(rank)})
            for rank in range(SIZE)
        ]
        started.extend(group)
        for process in group:
            process.line("joined")
        return group

    yield start_group
    for process in started:
        process.close()


def silent(victim: int) -> Callable[[int], Line]:
    """Return options of a stream in which one rank votes no more after a while."""
    return lambda rank: {"silent_from": 20} if rank == victim else {}


def check_same(reports: list[Line]) -> None:
    """Check that what settled above zero on one settled so on all, and nothing otherwise than on another."""
    longest = max(len(report["results"]) for report in reports)
    for number in range(longest):
        heard = {tuple(report["results"][number : number + 1]) for report in reports}
        assert len(heard - {()}) == 1
        assert len(heard) == 1 or heard == {(), (0,)}


def check_schedule(group: list[Process], num_tickets: int) -> None:
    reports = [process.line("report") for process in group]
    for process in group:
        process.stop()
    assert [process.end() for process in group] == [0] * SIZE
    for number in map(str, range(num_tickets)):
        lowest = min(report["votes"][number] for report in reports)
        assert [report["results"][number] for report in reports] == [lowest] * SIZE


PATIENT = {"consensus_timeout_s": 10.0, "ticket_timeout_s": 30.0, "group_timeout_s": 30.0}


def test_all_agree_whatever_their_order(start: Starter) -> None:
    """Each of 200 tickets is the lowest vote on every rank, with delays, another order each, and waits given up."""
    options = {"seed": 1, "num_tickets": 200, "num_callers": 200}
    check_schedule(start("schedule", lambda rank: options, PATIENT), 200)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(25))
def test_all_agree_on_many_schedules(start: Starter, seed: int) -> None:
    """As above, for a thousand tickets and other numbers of callers."""
    options = {"seed": seed, "num_tickets": 1000, "num_callers": 1000}
    check_schedule(start("schedule", lambda rank: options, PATIENT), 1000)


def test_a_rank_that_is_stopped_for_a_while_costs_misses(start: Starter) -> None:
    """Others settle at zeros without it; when it goes on it reads these, and all have values again."""
    group = start("stream", lambda rank: {})
    for process in group:
        process.line("values")
    group[2].signal(signal.SIGSTOP)
    for rank in (0, 1, 3):
        group[rank].line("zeros")
    group[2].signal(signal.SIGCONT)
    group[2].line("zeros")
    for process in group:
        process.line("values")
    for process in group:
        process.stop()
    reports = [process.line("report") for process in group]
    assert [process.end() for process in group] == [0] * SIZE
    assert {report["error"] for report in reports} == {None}
    shortest = min(len(report["results"]) for report in reports)
    for number in range(shortest):
        assert len({report["results"][number] for report in reports}) == 1


def test_a_slow_rank_is_waited_for(start: Starter) -> None:
    """A rank that votes two seconds late, and answers meanwhile, costs nobody a miss, and nobody the group."""
    group = start("stream", lambda rank: {"num_tickets": 10, "late_s": 2.0 if rank == 1 else 0.0})
    for report in [process.line("report") for process in group]:
        assert (report["error"], report["results"]) == (None, [5] * 10)
    assert [process.end() for process in group] == [0] * SIZE


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_stopped_for_ever_is_lost(start: Starter, victim: int) -> None:
    """Every survivor raises within the group timeout, and says who answered nothing."""
    group = start("stream", silent(victim))
    group[victim].line("silent")
    survivors = [process for process in group if process is not group[victim]]
    stopped_s = time.monotonic()
    group[victim].signal(signal.SIGSTOP)
    reports = [process.line("report") for process in survivors]
    for report in reports:
        assert f"rank {victim}" in report["error"]
        assert "answered nothing for" in report["error"] or "rank 0" not in report["error"]
        assert report["at_s"] - stopped_s < GROUP_TIMEOUT_S + SLACK_S
        assert report["results"][:20] == [5] * 20
        assert not any(report["results"][20:])
    check_same(reports)
    assert [process.end() for process in survivors] == [0] * 3


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_lost_at_once(start: Starter, victim: int) -> None:
    """Every survivor raises, long before anybody could be taken for mute, and nothing more settles above zero."""
    group = start("stream", silent(victim), PATIENT)
    group[victim].line("silent")
    survivors = [process for process in group if process is not group[victim]]
    killed_s = time.monotonic()
    group[victim].signal(signal.SIGKILL)
    reports = [process.line("report") for process in survivors]
    for report in reports:
        assert f"rank {victim}" in report["error"]
        assert "exited" in report["error"]
        assert report["at_s"] - killed_s < SLACK_S
        assert report["results"] == [5] * 20
    assert [process.end() for process in survivors] == [0] * 3


def kill_in_a_storm(start: Starter, victim: int, delay_s: float) -> None:
    group = start("stream", lambda rank: {}, PATIENT)
    for process in group:
        process.line("values")
    time.sleep(delay_s)
    group[victim].signal(signal.SIGKILL)
    survivors = [process for process in group if process is not group[victim]]
    reports = [process.line("report") for process in survivors]
    assert all("exited" in report["error"] for report in reports)
    check_same(reports)
    assert [process.end() for process in survivors] == [0] * 3


def test_whenever_a_rank_is_killed_survivors_know_the_same(start: Starter) -> None:
    """What settled above zero before a rank died did so on every survivor."""
    kill_in_a_storm(start, 3, 0.05)


@pytest.mark.stress
@pytest.mark.parametrize("number", range(20))
def test_whenever_one_of_many_is_killed_survivors_know_the_same(start: Starter, number: int) -> None:
    """As above, at other moments."""
    kill_in_a_storm(start, 1 + number % 3, 0.01 + 0.0037 * number)
