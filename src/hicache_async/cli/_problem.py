"""How the command ends: its exit statuses, and the error that carries one."""

from __future__ import annotations

from typing import Final

FINE: Final = 0
FOUND: Final = 1
"""A problem was found: bad objects, nothing to share, something left undone."""
UNUSABLE: Final = 2
"""Wrong usage, or a store that cannot be opened, asked, or used for this."""
INTERRUPTED: Final = 130
NO_READER: Final = 141


class Problem(Exception):
    """What the user is told, in one sentence that says what to do.

    Attributes:
        status: the exit status.
    """

    def __init__(self, message: str, status: int = UNUSABLE) -> None:
        super().__init__(message)
        self.status = status
