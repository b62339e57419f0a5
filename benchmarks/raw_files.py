"""The floor of a file tier: plain system calls in a loop, one file a page, nothing checked."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path


class RawFiles:
    """Pages in files of one directory, each under a name that was never used before."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = str(directory)
        self._numbers = count()
        self.paths: list[str] = []

    def write(self, pages: Sequence[memoryview]) -> None:
        """Write each page to a temporary file and rename it."""
        for page in pages:
            path = f"{self._directory}/{next(self._numbers):064x}"
            temp = path + ".temp"
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            written = os.write(fd, page)
            while written < page.nbytes:
                written += os.write(fd, page[written:])
            os.close(fd)
            os.rename(temp, path)
            self.paths.append(path)

    def read(self, into: Sequence[memoryview]) -> None:
        """Read each file into its buffer."""
        for path, page in zip(self.paths, into, strict=True):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            filled = os.readv(fd, (page,))
            while filled < page.nbytes:
                filled += os.readv(fd, (page[filled:],))
            os.close(fd)

    def clear(self) -> None:
        """Delete the files."""
        for path in self.paths:
            os.unlink(path)
        self.paths.clear()


def buffers(num_pages: int, page_nbytes: int) -> list[memoryview]:
    """Return the pages of one block of memory that is there, not only promised, and aligned.

    The kernel copies to and from a block that begins within a cache line at half the speed.
    """
    block = memoryview(mmap.mmap(-1, num_pages * page_nbytes))
    pages = [block[at : at + page_nbytes] for at in range(0, len(block), page_nbytes)]
    for page in pages:
        page[:] = b"\1" * page_nbytes
    return pages
