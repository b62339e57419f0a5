"""SoloRanks: a group of one, whose every vote is agreed at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import ConsensusError


class SoloRanks:
    """The ranks of an engine that runs in one process."""

    rank: int = 0
    size: int = 1

    def cast(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> None:
        """Do nothing: nobody else waits for it."""

    async def agree(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> Sequence[int]:
        """Return ``vote``, without giving up the loop."""
        return tuple(vote)

    def when_lost(self, callback: Callable[[ConsensusError], None]) -> None:
        """Do nothing: there is nobody to lose."""

    async def aclose(self) -> None:
        """Do nothing: there is nobody to leave."""
