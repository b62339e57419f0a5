"""What the command prints: text for people or JSON for programs, and progress for who watches a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Protocol

import msgspec


class Progress(Protocol):
    """A bar that fills."""

    def update(self, n: int) -> object:
        """Count ``n`` more."""
        ...


class Output:
    """Print results to standard output, and everything else to standard error.

    Args:
        as_json: print JSON instead of text.
        shows_progress: show bars, where standard error is a terminal.
    """

    def __init__(self, *, as_json: bool, shows_progress: bool = True) -> None:
        self._as_json = as_json
        self._shows_progress = shows_progress and sys.stderr.isatty()

    def document(self, value: Mapping[str, object], text: Iterable[str]) -> None:
        """Print a result: as one JSON document, or as lines of text."""
        if self._as_json:
            self._write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
            return
        for line in text:
            self._write(line)

    def line(self, value: Mapping[str, object], text: str) -> None:
        """Print one of many results: as a JSON document on a line of its own, or as a line of text."""
        self._write(msgspec.json.encode(value).decode() if self._as_json else text)

    def note(self, text: str) -> None:
        """Tell the user something that is no result."""
        sys.stderr.write(f"hicache: {text}\n")

    @contextmanager
    def progress(self, what: str, total: int, unit: str) -> Iterator[Progress]:
        """Show a bar until the block ends.

        Args:
            unit: what is counted, as " objects"; "B" for bytes.
        """
        from tqdm import tqdm  # here, since most calls show no bar

        with tqdm(
            desc=what,
            total=total,
            unit=unit,
            unit_scale=unit == "B",
            unit_divisor=1024,
            leave=False,
            file=sys.stderr,
            disable=not self._shows_progress,
        ) as bar:
            yield bar

    def _write(self, line: str) -> None:
        # A model_id may hold what the terminal's encoding has not; a name of half a character is not fatal.
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def nbytes_text(nbytes: int | None) -> str:
    """Return a size for people, in binary units: ``1.5 MiB``."""
    if nbytes is None:
        return "? bytes"
    size, unit = float(nbytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024 or unit == "PiB":
            break
        size /= 1024
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"


def time_text(seconds: float | None) -> str:
    """Return a time since 1970 for people, in UTC, to the second."""
    if seconds is None:
        return "?"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def counted(count: int | None, noun: str) -> str:
    """Return ``1 object``, ``2,000 objects``."""
    if count is None:
        return f"? {noun}s"
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def table(rows: Sequence[Sequence[str]], indent: str = "") -> Iterator[str]:
    """Yield ``rows`` with their columns in line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield (indent + "  ".join(cells)).rstrip()
