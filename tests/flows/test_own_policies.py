"""Eviction policies of users that go wrong: the cache goes on by last use, and no request hears of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache_async import State
from hicache_async.eviction import Candidate
from tests.flows.rig import Opener
from tests.flows.test_close import Logs, events

pytestmark = pytest.mark.asyncio


class Failing:
    """Do something wrong from the ``first``-th call on."""

    def __init__(self, first: int, wrong: Callable[[Candidate], object]) -> None:
        self._left = first
        self._wrong = wrong

    def key(self, candidate: Candidate) -> object:
        """Return a key, or not."""
        self._left -= 1
        return candidate.used if self._left > 0 else self._wrong(candidate)


def boom(candidate: Candidate) -> object:
    """Raise."""
    raise ValueError(f"boom at {candidate!r}")


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("wrong", [boom, lambda candidate: "b" + str(candidate.used), lambda candidate: None])
@pytest.mark.parametrize("first", [1, 2, 3, 6, 9, 12, 15, 24, 30, 60])
async def test_a_policy_that_fails_is_replaced(
    open_cache: Opener, logs: Logs, policy: str, wrong: Callable[[Candidate], object], first: int
) -> None:
    """Whenever a key raises, or has no order, every request is served and every page is in its place."""
    rig = await open_cache(
        device_pages=8,
        host_pages=12,
        write_policy=policy,
        device_eviction_policy=Failing(first, wrong),
        host_eviction_policy=Failing(first, wrong),
    )
    for number in range(12):
        await rig.serve(chr(ord("A") + number % 7) + "xyz", prefetch=False)
        rig.cache.audit()
    assert rig.cache.state is State.OPEN
    assert len(events(logs, "eviction.policy_failed")) <= 2
    await rig.cache.admin.explain([1, 2, 3])


async def test_the_log_says_so(open_cache: Opener, logs: Logs) -> None:
    """One line names the tier and what the policy raised."""
    rig = await open_cache(device_pages=8, device_eviction_policy=Failing(1, boom))
    await rig.serve("abc")
    (line,) = events(logs, "eviction.policy_failed")
    assert line["tier"] == "device" and "boom" in line["error"]
