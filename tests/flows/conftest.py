"""Fixtures of the flow tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.flows.rig import Opener


@pytest_asyncio.fixture
async def open_cache() -> AsyncIterator[Opener]:
    """Open caches; at the end every one is audited, open or not yet closed."""
    opener = Opener()
    yield opener
    await opener.finish()
