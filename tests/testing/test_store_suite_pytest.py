"""StoreSuite under pytest: the example adopts it, what it finds is named, and an exam of nothing fails."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from hicache_async.testing.store_exam import CHECKS

pytest_plugins = ["pytester"]

EXAMPLE = Path(__file__).parents[2] / "examples" / "testing_your_store"
INI = """
[pytest]
asyncio_mode = strict
asyncio_default_fixture_loop_scope = function
addopts = --strict-markers --strict-config --import-mode=importlib
filterwarnings = error
"""


def run(pytester: pytest.Pytester, *args: str) -> tuple[dict[str, int], str]:
    """Run the tests that are there; returns how many had which outcome, and all that was printed."""
    pytester._monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rsfE", *args)
    return result.parseoutcomes(), result.stdout.str()


def test_the_example_passes_and_adopts_the_exam_in_15_lines(pytester: pytest.Pytester) -> None:
    """The store of the example passes all that it can be asked; what it lacks is said where a check is skipped."""
    adoption = (EXAMPLE / "test_folder_store.py").read_text().partition("class ")[2].strip()
    assert len(adoption.splitlines()) <= 15
    shutil.copytree(EXAMPLE, pytester.path, dirs_exist_ok=True)
    outcomes, printed = run(pytester)
    assert set(outcomes) == {"passed", "skipped"}, printed
    assert sum(outcomes.values()) == len(CHECKS)
    assert outcomes["passed"] > 50
    reasons = {
        "there is no hook open_bounded()",
        "it has no delete(): see abc.SupportsDelete",
        "processes is False",
    }
    assert all(reason in printed for reason in reasons), printed


def test_a_store_that_verifies_nothing_fails_by_name(pytester: pytest.Pytester) -> None:
    """Where the example's store verifies no checksum the tests of bad bytes fail, each with what was wrong."""
    shutil.copytree(EXAMPLE, pytester.path, dirs_exist_ok=True)
    store = pytester.path / "folder_store.py"
    code = store.read_text()
    store.write_text(code.replace("== _checksum(key, page)", "!= b''"))
    assert store.read_text() != code
    outcomes, printed = run(pytester, "-k", "damage or contiguity")
    assert outcomes["failed"] >= 4, printed
    assert "FAILED test_folder_store.py::TestFolderStore::test_store[damage.flip_last_is_a_miss]" in printed
    assert "AssertionError: read vouches for a page that is wrong from byte 4095 of 4096 on" in printed
    assert "contiguity" not in "".join(line for line in printed.splitlines() if line.startswith("FAILED"))


SUITES = """
import pytest
from hicache_async.stores import NullStore
from hicache_async.testing import StoreSuite

class TestUnreachable(StoreSuite):
    async def open(self, directory):
        pytest.skip("there is no server")

class TestNull(StoreSuite):
    keeps = False

    async def open(self, directory):
        return NullStore()

class TestForgotten(StoreSuite):
    pass
"""


def test_an_exam_of_nothing_fails(pytester: pytest.Pytester) -> None:
    """A suite all of whose checks were skipped fails, in strict mode and by its path; one with a few is fine."""
    pytester.makeini(INI)
    pytester.makepyfile(test_stores=SUITES)
    outcomes, printed = run(pytester, "-k", "Unreachable")
    assert outcomes["errors"] == 1 and outcomes["skipped"] == len(CHECKS), printed
    assert f"TestUnreachable examined nothing: all {len(CHECKS)} checks were skipped" in printed
    outcomes, printed = run(pytester, "-k", "Null")
    assert set(outcomes) == {"passed", "skipped", "deselected"}, printed
    outcomes, printed = run(pytester, "-k", "Forgotten and contract")
    assert "passed" not in outcomes and outcomes["failed"] > 2, printed
    assert "TestForgotten needs: async def open(self, directory) -> Store" in printed
