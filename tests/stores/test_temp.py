"""Files under construction: a dead writer's are swept, a live writer's are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_async.stores._temp import UNSEEN_MAX_AGE_S, TempFiles, Writer


@pytest.fixture
def temps(tmp_path: Path) -> TempFiles:
    return TempFiles(str(tmp_path))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        yield process
        process.kill()


def leave(temps: TempFiles, **changes: object) -> Path:
    """Leave a file as another writer would, that differs from this process in ``changes``."""
    writer = Writer.current()._replace(**changes)  # type: ignore[arg-type]
    path = Path(temps.directory, ".".join(map(str, writer)) + ".0123abcd.0")
    path.write_bytes(b"half")
    return path


def test_names_are_unique(temps: TempFiles, tmp_path: Path) -> None:
    """Two stores of one process, and one store twice, never make the same name."""
    other = TempFiles(str(tmp_path))
    assert len({temps.new(), temps.new(), other.new(), other.new()}) == 4


def test_a_live_writers_file_stays(temps: TempFiles, sleeper: subprocess.Popen[bytes]) -> None:
    """Files of this process and of another that runs are left alone."""
    mine = Path(temps.new())
    mine.write_bytes(b"half")
    start = int(Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19])
    theirs = leave(temps, pid=sleeper.pid, start=start)
    assert temps.sweep() == 0
    assert mine.exists()
    assert theirs.exists()


def test_a_dead_writers_file_goes(temps: TempFiles, sleeper: subprocess.Popen[bytes]) -> None:
    """The file goes when its writer has died, even while nobody has collected the dead."""
    start = int(Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19])
    path = leave(temps, pid=sleeper.pid, start=start)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, and not collected
    assert temps.sweep() == 1
    assert not path.exists()
    path = leave(temps, pid=sleeper.pid, start=start)
    sleeper.wait()
    assert temps.sweep() == 1
    assert not path.exists()


def test_a_pid_used_again_does_not_keep_a_file(temps: TempFiles) -> None:
    """A process that started at another time is another process."""
    path = leave(temps, start=Writer.current().start - 1)
    assert temps.sweep() == 1
    assert not path.exists()


@pytest.mark.parametrize("elsewhere", [{"boot": "another"}, {"pid_namespace": "1"}])
def test_a_writer_out_of_sight_is_judged_by_age(temps: TempFiles, elsewhere: dict[str, str]) -> None:
    """A writer on another machine or in another container may live: only an old file goes."""
    path = leave(temps, pid=2**22 + 1, **elsewhere)
    assert temps.sweep() == 0
    old = path.stat().st_mtime - UNSEEN_MAX_AGE_S - 1
    os.utime(path, (old, old))
    assert temps.sweep() == 1
    assert not path.exists()


def test_a_foreign_file_stays(temps: TempFiles) -> None:
    """What does not have the name of a file under construction is not touched, nor is a directory."""
    names = ["notes.txt", "a.b.c.d.e.f", "a.b.1.2.e", ".hidden"]
    for name in names:
        Path(temps.directory, name).write_bytes(b"")
    Path(leave(temps, start=1)).unlink()
    directory = Path(temps.directory, "none.none.1.1.0123abcd.0")
    directory.mkdir()
    assert temps.sweep() == 0
    assert sorted(os.listdir(temps.directory)) == sorted([*names, directory.name])


def test_a_directory_that_is_not_there_is_swept_clean() -> None:
    """Nothing to sweep is nothing swept."""
    assert TempFiles("/nowhere/at/all").sweep() == 0
