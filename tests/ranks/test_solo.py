"""SoloRanks: a vote of one."""

from __future__ import annotations

import pytest

from hicache_async.ranks.solo import SoloRanks


def test_agree_is_the_vote_and_gives_up_no_turn() -> None:
    """A vote comes back as given, without one suspension of the coroutine."""
    agreement = SoloRanks().agree(b"ticket", [7, 0, -1])
    with pytest.raises(StopIteration) as ended:
        agreement.send(None)
    assert list(ended.value.value) == [7, 0, -1]


@pytest.mark.asyncio
async def test_a_group_of_one() -> None:
    """It is rank 0 of 1, and leaving may be repeated."""
    ranks = SoloRanks()
    assert (ranks.rank, ranks.size) == (0, 1)
    await ranks.aclose()
    await ranks.aclose()
