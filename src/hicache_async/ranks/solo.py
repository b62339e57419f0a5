"""SoloRanks: a group of one, whose every vote is agreed at once."""

from __future__ import annotations

from collections.abc import Sequence


class SoloRanks:
    """The ranks of an engine that runs in one process."""

    rank: int = 0
    size: int = 1

    async def agree(self, ticket: bytes, vote: Sequence[int]) -> Sequence[int]:
        """Return ``vote``, without giving up the loop."""
        return tuple(vote)

    async def aclose(self) -> None:
        """Do nothing: there is nobody to leave."""
