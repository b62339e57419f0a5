"""The shape of the package: imports point down, the core is pure, files and classes stay small."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hicache_async

ROOT = Path(hicache_async.__file__).parent
NAME = ROOT.name
MODULES = sorted(ROOT.rglob("*.py"))

LAYERS = [  # from the bottom up; a module may import from its own row and from the rows before it
    ["errors"],
    ["types"],
    ["eviction", "explanation"],
    ["config"],
    ["abc"],
    ["_hop", "_fence", "_progress", "_copy_queue", "_threads", "_clock", "_log"],
    ["core"],
    ["memory"],
    ["stores", "device", "cuda", "ranks"],
    ["metrics", "kv_events"],
    ["flows"],
    ["checks", "lease", "step", "admin", "assembly", "stats"],
    ["cache", "runner"],
    ["cli", "integrations", "testing"],
]
LEVEL = {unit: level for level, row in enumerate(LAYERS) for unit in row}
STRANGERS = {"stores", "device", "cuda", "ranks"}
"""Units of one row that never import each other."""


def unit_of(path: Path) -> str:
    """Return the first name below the package: ``core`` for core/tree.py, ``_hop`` for _hop.py."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports_of(path: Path, *, at_run_time: bool = False) -> Iterator[str]:
    """Yield the full dotted name of everything that a module imports, wherever in it or when loaded."""
    package = [NAME, *path.relative_to(ROOT).parent.parts]
    tree = ast.parse(path.read_text())
    for node in tree.body if at_run_time else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, node.module] if node.module else base)
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def units_imported_by(path: Path) -> set[str]:
    """Return the units of this package that a module imports."""
    return {name.split(".")[1] for name in imports_of(path) if name.startswith(NAME + ".")}


def outsiders_imported_by(path: Path, *, at_run_time: bool = False) -> set[str]:
    """Return the top-level packages that a module imports."""
    return {name.split(".")[0] for name in imports_of(path, at_run_time=at_run_time)}


def each_module(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


@each_module([path for path in MODULES if path != ROOT / "__init__.py"])
def test_imports_point_down(path: Path) -> None:
    """A module imports from its own row or from rows below, and never from a stranger."""
    unit = unit_of(path)
    assert unit in LEVEL, f"{path} belongs to no layer: name it in LAYERS"
    for other in units_imported_by(path) - {unit}:
        level = LEVEL.get(other, len(LAYERS) - 1)  # a name of the package itself is for the last row only
        assert level <= LEVEL[unit], f"{path}: {unit} imports {other}, which lies above it"
        assert not {unit, other} <= STRANGERS, f"{path}: {unit} and {other} must not know each other"


@each_module([path for path in MODULES if unit_of(path) == "core"])
def test_core_is_sync_and_knows_no_tensor(path: Path) -> None:
    """No module of core imports torch, asyncio or anyio, not even for its types."""
    assert not outsiders_imported_by(path) & {"torch", "asyncio", "anyio"}


@each_module([path for path in MODULES if unit_of(path) in {"errors", "types", "config", "abc"}])
def test_nouns_and_seams_load_nothing_heavy(path: Path) -> None:
    """Below the core torch is named for types only, and asyncio not at all."""
    light = {*sys.stdlib_module_names, NAME, "numpy"} - {"asyncio"}
    assert outsiders_imported_by(path) <= light | {"torch"}
    assert outsiders_imported_by(path, at_run_time=True) <= light


@each_module([path for path in MODULES if unit_of(path) != "cuda"])
def test_only_cuda_names_torch_cuda(path: Path) -> None:
    """No module outside cuda/ uses or imports ``torch.cuda``."""
    tree = ast.parse(path.read_text())
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = attributes | set(imports_of(path))
    assert not [name for name in names if name == "torch.cuda" or name.startswith("torch.cuda.")]


@each_module(MODULES)
def test_files_and_classes_stay_small(path: Path) -> None:
    """A file has under 400 lines, a class at most 15 public methods."""
    text = path.read_text()
    assert len(text.splitlines()) < 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = [
                child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            public = [name for name in methods if not name.startswith("_")]
            assert len(public) <= 15, f"{node.name}: {public}"
