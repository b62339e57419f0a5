"""Phase: how far a prefetch has come."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where a prefetch stands. It holds an admission slot while it looks, and its fetch holds one."""

    QUEUED_TO_LOOK = enum.auto()
    LOOKING = enum.auto()
    AGREEING = enum.auto()
    QUEUED_TO_FETCH = enum.auto()
    FETCHING = enum.auto()
    ENDED = enum.auto()
