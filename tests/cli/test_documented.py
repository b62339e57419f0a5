"""docs/tools.md shows what the command prints: each of its examples is run here.

After a change of the output ``python -m tests.cli.test_documented`` writes the document anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

import pytest
import structlog

from hicache_async.cli import main
from tests.cli.stores import fill, keys_of, names, path_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "tools.md"
PART = re.compile(
    r"^<!-- file: (?P<file>\S+) -->\n```\w+\n(?P<content>.*?)^```$"
    r"|^<!-- damage: (?P<damage>\S+) -->$"
    r"|^```console\n\$ hicache (?P<arguments>[^\n]*)\n(?P<output>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
THEN = 1_767_323_045
"""2026-01-02 03:04:05 UTC, when all objects were last used."""


def documented(text: str, directory: Path) -> str:
    """Return ``text`` with the outputs of its examples as they are now, run in ``directory``."""
    fill(
        f"file://{directory}/kv",
        (names(), 5),
        (names(page_size=16, fingerprint="v2"), 3),
        (names(page_size=16), 3),
    )
    age(directory)

    def part(match: re.Match[str]) -> str:
        if match["file"]:
            (directory / match["file"]).write_text(match["content"])
        elif match["damage"]:
            path = path_of(directory / match["damage"], keys_of(names(), 1)[0])
            path.write_bytes(path.read_bytes()[:-1])
        else:
            return f"```console\n$ hicache {match['arguments']}\n{output_of(match['arguments'])}```"
        age(directory)
        return match[0]

    return PART.sub(part, text)


def age(directory: Path) -> None:
    """Let all objects have been used at the same time."""
    for path in directory.rglob("*.kv"):
        os.utime(path, (THEN, THEN))


def output_of(arguments: str) -> str:
    """Return what the command prints, errors included, and its exit status unless that is 0."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main(shlex.split(arguments))
    return printed.getvalue() + (f"(exit status {status})\n" if status else "")


def test_examples_print_what_they_are_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example of the document, run in order, prints just that."""
    monkeypatch.chdir(tmp_path)
    text = DOCUMENT.read_text()
    try:
        assert documented(text, tmp_path) == text
    finally:
        structlog.reset_defaults()


def test_every_verb_has_an_example() -> None:
    """No verb of the command goes without."""
    verbs = {
        match["arguments"].split()[0] for match in PART.finditer(DOCUMENT.read_text()) if match["arguments"]
    }
    assert verbs == {"ls", "stat", "verify", "gc", "rm", "cp", "doctor"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        DOCUMENT.write_text(documented(DOCUMENT.read_text(), Path(directory)))
