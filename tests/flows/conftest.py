"""Fixtures of the flow tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import Any

import pytest
import pytest_asyncio
import structlog
from structlog.testing import capture_logs

from tests.flows.rig import Opener


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """Collect what is logged, rather than print it: a traceback with the locals of a cache takes seconds."""
    with capture_logs() as entries:
        yield entries
    structlog.reset_defaults()


@pytest_asyncio.fixture
async def open_cache() -> AsyncIterator[Opener]:
    """Open caches; at the end every one is audited, open or not yet closed."""
    opener = Opener()
    yield opener
    await opener.finish()
