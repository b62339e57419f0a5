"""Checks of what an engine says about its requests, made before anything is done: a mistake loses nothing."""

from __future__ import annotations

import numpy as np

from .abc import Fence
from .core.holding import Holding
from .errors import ConfigError, LeaseError


def checked_count(name: str, value: int) -> int:
    """Return ``value`` as an int.

    Raises: ConfigError: it is not an integer >= 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ConfigError(f"{name} is {value!r}; it must be an integer >= 0")
    return int(value)


def check_fence(after: Fence | None) -> None:
    """Raise ConfigError for what is neither a fence nor None."""
    if after is not None and not isinstance(after, Fence):
        raise ConfigError(f"after is {after!r}; give a fence of the cache, such as host_fence(), or None")


def check_live(lease: object, holding: Holding) -> None:
    """Raise LeaseError after release."""
    if holding.released:
        raise LeaseError(f"{lease!r} was released; take a new lease with match_prefix()")


def check_loaded(lease: object, holding: Holding) -> None:
    """Raise LeaseError before load."""
    if not holding.loaded:
        raise LeaseError(f"{lease!r}: call load() first, even when nothing is cached")


def check_commit(lease: object, holding: Holding, num_tokens: int) -> int:
    """Return how many whole pages ``num_tokens`` are.

    Raises: LeaseError: before load; more than the request knows, or holds pages for.
    """
    check_loaded(lease, holding)
    num_tokens = checked_count("num_tokens", num_tokens)
    page_tokens = holding.page_tokens
    held_tokens = len(holding.table) * page_tokens
    if num_tokens > min(holding.length, held_tokens):
        raise LeaseError(
            f"commit of {num_tokens} tokens: the lease knows {holding.length} (extend adds) and holds pages "
            f"for {held_tokens} (load and allocate add)"
        )
    return num_tokens // page_tokens


def check_discard(lease: object, holding: Holding, from_token: int, committed_pages: int) -> int:
    """Return ``from_token``.

    Raises: LeaseError: before load; below what is committed.
    """
    check_loaded(lease, holding)
    from_token = checked_count("from_token", from_token)
    committed = committed_pages * holding.page_tokens
    if from_token < committed:
        raise LeaseError(f"discard from token {from_token}: {committed} tokens are committed and immutable")
    return from_token
