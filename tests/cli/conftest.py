"""Fixtures of the tests of the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog

from hicache_async.cli import main
from tests.cli.stores import PlainStore


class Ended(NamedTuple):
    """How the command has ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it has printed, as one document."""
        return json.loads(self.out)


Hicache = Callable[..., Ended]


@pytest.fixture
def hicache(capsys: pytest.CaptureFixture[str]) -> Iterator[Hicache]:
    """Run the command in this process."""

    def call(*arguments: str | Path) -> Ended:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Ended(status, captured.out, captured.err)

    yield call
    structlog.reset_defaults()
    PlainStore._by_url.clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the directory of a file store that is not there yet."""
    return tmp_path / "kv"
