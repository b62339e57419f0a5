"""What both sides do to their flows, so that it is the same, and done to the same files."""

from __future__ import annotations

import array
from pathlib import Path

from ..geometry import PAGE_NBYTES, PAGE_SIZE, prompt

NUM_REQUESTS = 15
REQUEST_TOKENS = 1024
STORE_DELAY_S = 0.005
"""What a slow store adds to every call."""

NUM_DETACHES = 3
NUM_HUNG = 2
"""Prefetches under way when a store that hangs is detached."""
HANG_S = 2.0
"""How long its reads hang."""
SETTLE_S = 0.2
"""How long after that what is missing is counted: it is missing for good."""


def requests(num_requests: int) -> list[array.array[int]]:
    """Return so many prompts of ``REQUEST_TOKENS`` tokens that share no page."""
    return [prompt(number)[:REQUEST_TOKENS] for number in range(num_requests)]


def remove_objects(directory: str, num_tokens: int) -> None:
    """Remove all files of pages below ``directory``; folders, and what a store writes for itself, stay.

    Raises: AssertionError: there is not one file for each page of ``num_tokens`` tokens.
    """
    files = [path for path in Path(directory).rglob("*") if path.is_file() and _holds_page(path)]
    assert len(files) == num_tokens // PAGE_SIZE, f"{len(files)} files hold {num_tokens} tokens"
    for path in files:
        path.unlink()


def _holds_page(path: Path) -> bool:
    return path.stat().st_size >= PAGE_NBYTES
