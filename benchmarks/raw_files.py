"""The floor of a file tier: plain system calls in a loop, one file a page, nothing checked."""

from __future__ import annotations

import atexit
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path


class RawFiles:
    """Pages in files of one new directory, each under a name that was never used before."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = str(directory)
        self._numbers = count()
        self.paths: list[str] = []

    def write(self, pages: Sequence[memoryview], *, synced: bool = False) -> None:
        """Write each page to a temporary file and rename it; when ``synced`` both last before the next one."""
        for page in pages:
            path = f"{self._directory}/{next(self._numbers):064x}"
            temp = path + ".temp"
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            written = os.write(fd, page)
            while written < page.nbytes:
                written += os.write(fd, page[written:])
            if synced:
                os.fdatasync(fd)
            os.close(fd)
            os.rename(temp, path)
            if synced:
                self._sync_directory()
            self.paths.append(path)

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(fd)
        os.close(fd)

    def read(self, into: Sequence[memoryview]) -> None:
        """Read each file into its buffer."""
        for path, page in zip(self.paths, into, strict=True):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            filled = os.readv(fd, (page,))
            while filled < page.nbytes:
                filled += os.readv(fd, (page[filled:],))
            os.close(fd)

    def exist(self) -> bool:
        """Return whether all files are there, asked one by one."""
        return all(map(os.path.exists, self.paths))


def empty_files(directory: str | os.PathLike[str], min_nbytes: int = 1) -> None:
    """Give back what the files below a directory hold that are at least so large, but do not remove them.

    ext4 never gives the inode of a file to another one within a minute or more of its removal
    (``recently_deleted``), and looks at each of those whenever a file is made: ten times the cost of making
    it, after a few thousand removals.
    """
    for folder, _, names in os.walk(directory):
        for name in names:
            if os.path.getsize(path := os.path.join(folder, name)) >= min_nbytes:
                os.truncate(path, 0)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a temporary directory whose files are emptied in the end, and removed when the process ends."""
    path = Path(tempfile.mkdtemp(prefix="hicache-bench-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    try:
        yield path
    finally:
        empty_files(path)


def buffers(num_pages: int, page_nbytes: int) -> list[memoryview]:
    """Return the pages of one block of memory that is there, not only promised, and aligned.

    The kernel copies to and from a block that begins within a cache line at half the speed.
    """
    block = memoryview(mmap.mmap(-1, num_pages * page_nbytes))
    pages = [block[at : at + page_nbytes] for at in range(0, len(block), page_nbytes)]
    for page in pages:
        page[:] = b"\1" * page_nbytes
    return pages
