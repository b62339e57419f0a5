"""The numbered examples run as they are, from anywhere, and end with what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program

EXAMPLES = Path(__file__).parents[1] / "examples"
LAST_LINES = {
    "01_match_and_commit.py": "again: 96 of 100 tokens cached, 4 computed",
    "02_own_store.py": "restarted: 960 of 1000 tokens from the store, 40 computed",
    "03_why_no_hits.py": "hit rate since: 0.96",
    "04_kv_events.py": "to green, which has 192 of 200 tokens; the engines: {'blue': 0, 'green': 192}",
    "05_ranks.py": "again: computed from token 128 on rank 0, from token 128 on rank 1",
    "06_sync_engine.py": "384 of 580 prompt tokens were cached",
    "07_doctor.py": "with what the doctor said: 192 of 200 tokens from the store",
}


def test_every_numbered_example_is_run_here() -> None:
    """An example that is added is tested, too."""
    assert {path.name for path in EXAMPLES.glob("[0-9]*.py")} == LAST_LINES.keys()


@pytest.mark.parametrize(("name", "last_line"), LAST_LINES.items())
def test_examples(name: str, last_line: str, tmp_path: Path) -> None:
    """A newcomer who runs an example sees no warning, and the hit in its last line."""
    done = run_program(EXAMPLES / name, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == last_line
