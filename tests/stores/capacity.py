"""What the tests of limits share: a directory of objects, and a sampler of what lies in it."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

import hicache_async
from hicache_async.stores._files.quota import Quota
from hicache_async.stores._files.survey import size_on_disk
from hicache_async.stores._names import place_of
from hicache_async.stores._temp import TempFiles

OBJECT_NBYTES = 8192


class Shelf:
    """A directory as FileStore lays it out, whose objects are plain files."""

    def __init__(self, root: str | Path) -> None:
        self.directory = Path(root, "v2")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._temps = TempFiles(str(self.directory / "temp"))
        Path(self._temps.directory).mkdir(exist_ok=True)

    def quota(self, num_objects: int | None = None, **options: Any) -> Quota:
        """Open a quota; the limit in objects, or as ``max_bytes``."""
        if num_objects is not None:
            options["max_bytes"] = num_objects * OBJECT_NBYTES
        return Quota(str(self.directory), **{"max_bytes": None} | options)

    def path(self, key: str) -> Path:
        return self.directory / "objects" / place_of(key).path

    def begin(self, nbytes: int = OBJECT_NBYTES) -> Path:
        """Write a file under construction."""
        temp = Path(self._temps.new())
        temp.write_bytes(bytes(nbytes))
        return temp

    def sweep(self) -> None:
        """Remove all files under construction."""
        for path in Path(self._temps.directory).iterdir():
            path.unlink()

    def publish(self, temp: Path, key: str) -> None:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.rename(path)

    def put(self, quota: Quota, key: str, nbytes: int = OBJECT_NBYTES) -> bool:
        """Write an object as a store does: reserve, write, publish, commit."""
        if not quota.reserve(nbytes):
            return False
        self.publish(self.begin(nbytes), key)
        quota.commit(nbytes)
        return True

    def leave(self, *keys: str, nbytes: int = OBJECT_NBYTES, mtime_s: float = 1e9) -> None:
        """Let objects be there that no quota knows of, each a second younger than the one before."""
        for number, key in enumerate(keys):
            self.publish(self.begin(nbytes), key)
            os.utime(self.path(key), (mtime_s + number, mtime_s + number))

    def files(self) -> dict[tuple[int, int], int]:
        """Return the size as it counts of each file, objects and others, by inode and time of writing.

        An inode alone is used again for the next file.
        """
        found = {}
        for part in ("temp", "objects"):
            for directory, _, names in os.walk(self.directory / part):  # which passes over what has gone
                for path in (Path(directory, name) for name in names):
                    with contextlib.suppress(FileNotFoundError):
                        status = path.lstat()
                        if stat.S_ISREG(status.st_mode):
                            found[status.st_ino, status.st_mtime_ns] = size_on_disk(status.st_size)
        return found

    def nbytes(self) -> int:
        """Return how many bytes lie there; of a directory at rest."""
        return sum(self.files().values())

    def keys(self, *keys: str) -> list[str]:
        """Return which of ``keys`` are there."""
        return [key for key in keys if self.path(key).exists()]


class Sampler(threading.Thread):
    """Look again and again at how many bytes lie there at one instant, at least.

    No listing is of one instant. But a file that is in two listings, one after the other, was there between
    them, so all such files were there together.
    """

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(daemon=True)
        self._shelf = shelf
        self._ended = threading.Event()
        self.most_nbytes = 0
        self.num_samples = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        before = self._shelf.files()
        while not self._ended.is_set():
            after = self._shelf.files()
            together = before.keys() & after.keys()
            self.most_nbytes = max(self.most_nbytes, sum(min(before[file], after[file]) for file in together))
            self.num_samples += 1
            before = after


@contextlib.contextmanager
def opened(*quotas: Quota) -> Iterator[None]:
    """Close quotas in the end."""
    try:
        yield
    finally:
        for quota in quotas:
            quota.close()


PRELUDE = """
import os, random, signal, subprocess, sys, time, types
package, tests, root, *args = sys.argv[1:]
sys.path.append(tests)
sys.modules["hicache_async"] = types.ModuleType("hicache_async")  # the stores alone: they need no torch
sys.modules["hicache_async"].__path__ = [package]
from tests.stores.capacity import *

"""


def command(program: str, root: str | Path, *args: object) -> list[str]:
    """Return the command of a Python program that has this module, ``root`` and ``args``, strings, at hand."""
    package, tests = Path(hicache_async.__path__[0]), Path(__file__).parents[2]
    words = (package, tests, root, *args)
    return [sys.executable, "-W", "error", "-c", PRELUDE + program, *map(str, words)]


def start(program: str, root: str | Path, *args: object) -> subprocess.Popen[str]:
    """Start a program, see :func:`command`."""
    return subprocess.Popen(
        command(program, root, *args), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 50) -> str:
    """Return the output of a program that ends well."""
    with process:
        output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0
    return output


def run_on_small_disk(program: str, place: Path, size: str, *args: object) -> None:
    """Run a program whose root is a file system of ``size``, which nobody else sees and which ends with it."""
    place.mkdir()
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o "size=$0" tmpfs "$1" && shift && exec "$@"']
    refused = subprocess.run([*mount, size, place, "true"], capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"LIMITS ARE NOT TESTED ON A FULL DISK: a tmpfs cannot be mounted here: {refused.stderr}")
    subprocess.run([*mount, size, place, *command(program, place, *args)], check=True, timeout=55)
