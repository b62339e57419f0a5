"""Names of files under construction that tell who writes them, so that a dead writer's can be removed."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from pathlib import Path
from typing import NamedTuple

UNSEEN_MAX_AGE_S = 3600.0
"""A writer that cannot be seen from here, on another machine or in another container, is thought dead
when its file is older; a live one would only fail to publish one object."""


class Writer(NamedTuple):
    """A process, for ever: its pid alone is used again, by another process, container or boot."""

    boot: str
    pid_namespace: str
    pid: int
    start: int

    @classmethod
    def current(cls) -> Writer:
        """Return this process."""
        boot = _read_text("/proc/sys/kernel/random/boot_id").strip().replace("-", "")
        pid = os.getpid()
        return cls(boot or "none", _pid_namespace(), pid, _start_of(pid) or 0)


class TempFiles:
    """Make names in one directory, and sweep out what dead writers left there.

    Args:
        directory: only files under construction live here.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._writer = Writer.current()
        self._start_token = secrets.token_hex(4)  # two stores of one process share everything else
        self._counter = itertools.count()

    def new(self) -> str:
        """Return a path that nobody else uses, in any process. Any thread."""
        number = next(self._counter)
        return f"{self.directory}/{'.'.join(map(str, self._writer))}.{self._start_token}.{number}"

    def sweep(self) -> int:
        """Remove the files of dead writers; returns how many. Never raises."""
        num_removed = 0
        with contextlib.suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                writer = _writer_of(entry.name)
                if writer is not None and self._is_dead(writer, entry):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                        num_removed += 1
        return num_removed

    def _is_dead(self, writer: Writer, entry: os.DirEntry[str]) -> bool:
        if writer[:2] == self._writer[:2]:
            return not is_alive(writer)
        try:
            return time.time() - entry.stat(follow_symlinks=False).st_mtime > UNSEEN_MAX_AGE_S
        except OSError:
            return False


def _writer_of(name: str) -> Writer | None:
    parts = name.split(".")
    if len(parts) != 6 or not (parts[2].isdecimal() and parts[3].isdecimal()):
        return None  # not one of ours: left alone
    return Writer(parts[0], parts[1], int(parts[2]), int(parts[3]))


def is_alive(writer: Writer) -> bool:
    """Return whether a process of this boot and pid namespace runs."""
    start = _start_of(writer.pid)
    if start is not None:
        return start == writer.start
    try:
        os.kill(writer.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # another user's, whose /proc is hidden
    return _read_text(f"/proc/{writer.pid}/stat") == ""  # alive and not to be seen; else a zombie


def _start_of(pid: int) -> int | None:
    """Return when a running process started, in clock ticks since boot; None: not running or not seen.

    /proc/PID/stat, proc_pid_stat(5): field 3 is the state, field 22 the start; field 2, the name in
    parentheses, may contain anything.
    """
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return None if len(fields) < 20 or fields[0] in "ZX" else int(fields[19])


def _pid_namespace() -> str:
    try:
        return "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid"))) or "none"
    except OSError:
        return "none"


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
