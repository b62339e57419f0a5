"""The floor of a file tier: plain system calls in a loop, one file a page, nothing checked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path


class RawFiles:
    """Pages in files of one directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = str(directory)
        self._numbers = count()

    def new_paths(self, num_files: int) -> list[str]:
        """Return so many paths that were never used."""
        return [f"{self._directory}/{number:064x}" for number in self._take(num_files)]

    def _take(self, num_files: int) -> Iterator[int]:
        return (next(self._numbers) for _ in range(num_files))

    def write(self, paths: Sequence[str], pages: Sequence[memoryview]) -> None:
        """Write each page to a temporary file and rename it."""
        for path, page in zip(paths, pages, strict=True):
            temp = path + ".temp"
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            written = 0
            while written < page.nbytes:
                written += os.write(fd, page[written:])
            os.close(fd)
            os.rename(temp, path)

    def read(self, paths: Sequence[str], into: Sequence[memoryview]) -> None:
        """Read each file into its buffer."""
        for path, page in zip(paths, into, strict=True):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            filled = 0
            while filled < page.nbytes:
                filled += os.readv(fd, (page[filled:],))
            os.close(fd)

    def remove(self, paths: Iterable[str]) -> None:
        """Delete the files."""
        for path in paths:
            os.unlink(path)


def buffers(num_pages: int, page_nbytes: int, fill: int) -> list[memoryview]:
    """Return the pages of one block of memory that is there, not only promised."""
    block = memoryview(bytearray([fill]) * (num_pages * page_nbytes))
    return [block[at : at + page_nbytes] for at in range(0, len(block), page_nbytes)]
