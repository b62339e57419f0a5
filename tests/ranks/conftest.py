"""The groups of the tests of ranks: opened by size, and closed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from tests.ranks.groups import Group, hub_group, local_group

Opener = Callable[..., Awaitable[Group]]


@pytest_asyncio.fixture
async def opened_groups() -> AsyncIterator[list[Group]]:
    """Close what was opened, and leave no task behind."""
    groups: list[Group] = []
    yield groups
    for group in groups:
        await group.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left


@pytest.fixture
def open_local(opened_groups: list[Group]) -> Opener:
    """Return what opens a group over queues."""
    return _remembering(opened_groups, local_group)


@pytest.fixture
def open_hub(opened_groups: list[Group]) -> Opener:
    """Return what opens a group over loopback connections."""
    return _remembering(opened_groups, hub_group)


@pytest.fixture(params=[local_group, hub_group], ids=["local", "hub"])
def open_group(request: pytest.FixtureRequest, opened_groups: list[Group]) -> Opener:
    """Return what opens a group, over queues and over connections."""
    return _remembering(opened_groups, request.param)


def _remembering(groups: list[Group], opener: Opener) -> Opener:
    async def open_one(size: int, **timeouts: float) -> Group:
        group = await opener(size, **timeouts)
        groups.append(group)
        return group

    return open_one
