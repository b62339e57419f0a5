"""NullStore: no L3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from ..types import StopToken
from ._url import url_options


class NullStore:
    """Keep nothing: every lookup finds 0, every write stores 0. A cache treats it as no store at all."""

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        """Open ``null:``; it has no options."""
        url_options(url, options, {})
        return cls()

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return 0."""
        return 0

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Return 0 and touch no buffer."""
        return 0

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Return 0: nothing was stored."""
        return 0

    async def aclose(self) -> None:
        """Do nothing."""
