"""The code of the README runs: a newcomer types it in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import run_program

README = Path(__file__).parents[1] / "README.md"
MARKED = re.compile(r"^<!-- test -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(text: str) -> list[str]:
    """Return the Python code blocks that stand right behind a line ``<!-- test -->``."""
    return MARKED.findall(text)


BLOCKS = blocks_of(README.read_text()) if README.exists() else []


def test_there_is_code_to_run() -> None:
    """The README has marked code, and every mark has code behind it."""
    assert BLOCKS, "README.md has no python block behind a line <!-- test -->"
    assert README.read_text().count("<!-- test -->") == len(BLOCKS)


def test_marked_blocks_only() -> None:
    """A block counts when the mark is the line before it, and no other does."""
    code = "```python\n{}\n```\n"
    text = code.format("one") + "\n<!-- test -->\n" + code.format("two\nlines") + "<!-- test -->\ntext\n"
    assert blocks_of(text + code.format("three")) == ["two\nlines\n"]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[0][:40])
def test_blocks(block: str, tmp_path: Path) -> None:
    """A marked block is a whole program, without warnings."""
    script = tmp_path / "readme.py"
    script.write_text(block)
    done = run_program(script, tmp_path)
    assert done.returncode == 0, done.stderr
