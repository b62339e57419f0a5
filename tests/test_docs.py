"""The tables of the documentation are those of the code, and every reference leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hicache_async import WritePolicy
from hicache_async.core.write_policy_tables import TERMS, TIERS, Awaited, Holders, Row

DOCS = Path(__file__).parents[1] / "docs"
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def load_generator() -> ModuleType:
    """Return docs/generate.py, which is a program and in no package."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load_generator()


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the generator work on a copy of the documentation."""
    folder = tmp_path / "docs"
    shutil.copytree(DOCS, folder)
    monkeypatch.setattr(generator, "DOCS", folder)
    return folder


def test_every_table_is_up_to_date() -> None:
    """What python docs/generate.py would write is there already."""
    assert generator.generate(DOCS, check=True) == []
    assert generator.main(["--check"]) == 0


def change(row: Row[object], cell: object) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what changes one cell of a row in the code."""
    return lambda monkeypatch: monkeypatch.setitem(row, WritePolicy.WRITE_BACK, cell)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "apply"),
    [
        *(("write-policy-tiers", change(row, Holders(host_if_larger=True))) for row in TIERS.values()),
        *(("write-policy-terms", change(row, Awaited.NONE)) for row in TERMS.values()),
    ],
)
def test_a_changed_cell_is_noticed_and_written(
    copied: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    table: str,
    apply: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """When one cell of the code changes the check names the table and changes nothing; a run puts it right."""
    path = copied / "write-policies.md"
    before = path.read_text()
    apply(monkeypatch)
    assert generator.main(["--check"]) == 1
    expected = f"write-policies.md: {table} is out of date; run python docs/generate.py\n"
    assert capsys.readouterr().err == expected
    assert path.read_text() == before
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    changed = set(path.read_text().splitlines()) - set(before.splitlines())
    assert len(changed) == 1


def test_what_was_written_by_hand_stays(copied: Path) -> None:
    """Only what stands between the marks of a table is replaced, and files without a table are left alone."""
    original = {path.name: path.read_bytes() for path in copied.glob("*.md")}
    path = copied / "write-policies.md"
    path.write_text(re.sub(r"^\| .*\n", "", path.read_text(), flags=re.MULTILINE))
    assert path.read_bytes() != original[path.name]
    untouched = copied / "other.md"
    untouched.write_text("no table\n")
    mtime_ns = untouched.stat().st_mtime_ns
    assert generator.main([]) == 0
    assert path.read_bytes() == original[path.name]
    assert untouched.stat().st_mtime_ns == mtime_ns


@pytest.mark.parametrize("name", list(generator.TABLES))
def test_a_place_that_is_gone_or_misspelt_is_noticed(
    copied: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A table that stands nowhere, and a place for one that does not exist, fail with and without --check."""
    path = copied / "write-policies.md"
    path.write_text(path.read_text().replace(f"table: {name} ", "table: nonsense "))
    for arguments in ([], ["--check"]):
        assert generator.main(arguments) == 1
        error = capsys.readouterr().err
        assert f"there is no table nonsense; there are {', '.join(generator.TABLES)}" in error
        assert f"no file has a place for the table {name}" in error


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    """Whatever a document refers to in this repository is there."""
    assert [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()] == []
