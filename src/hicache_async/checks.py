"""Checks of what an engine says about its requests, made before anything is done: a mistake loses nothing."""

from __future__ import annotations

import math

import numpy as np

from .abc import Fence
from .core.hashing import HashChain, hash_chain
from .core.holding import Holding
from .core.tokens import TOKEN_NBYTES, TokenKey
from .errors import ConfigError, LeaseError
from .types import Tokens

MAX_PRIORITY = (1 << 63) - 1


def checked_seconds(name: str, value: float) -> float:
    """Return ``value`` as a float.

    Raises: ConfigError: it is not a finite number of seconds > 0.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        seconds = float(value) if is_number else math.nan
    except OverflowError:  # an integer that no float can hold
        seconds = math.inf
    if not 0 < seconds < math.inf:
        shown = "too large an integer" if is_number and isinstance(value, int) and value > 0 else repr(value)
        raise ConfigError(f"{name} is {shown}; give a finite number of seconds > 0")
    return seconds


def checked_count(name: str, value: int) -> int:
    """Return ``value`` as an int.

    Raises: ConfigError: it is not an integer >= 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ConfigError(f"{name} is {value!r}; it must be an integer >= 0")
    return int(value)


def checked_prompt(
    tokens: Tokens | TokenKey, page_tokens: int, salt: bytes, adapter: str | None
) -> tuple[TokenKey, HashChain]:
    """Return the key of a prompt, and what its page hashes depend on besides.

    Raises: ConfigError: ids that are not integers in 0 .. 2**32-1, or a salt or adapter of another type.
    """
    if not isinstance(salt, bytes):
        raise ConfigError(f"salt is {salt!r}; give bytes")
    if adapter is not None and not isinstance(adapter, str):
        raise ConfigError(f"adapter is {adapter!r}; give a string or None")
    key = tokens if isinstance(tokens, TokenKey) else TokenKey(tokens)
    return key, hash_chain(salt, adapter, page_tokens * TOKEN_NBYTES)


def checked_priority(name: str, value: int) -> int:
    """Return ``value`` as an int.

    Raises: ConfigError: it is not an integer of 63 bits and a sign.
    """
    is_integer = type(value) is int or (isinstance(value, (int, np.integer)) and not isinstance(value, bool))
    if not is_integer or not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        shown = repr(value) if not is_integer else f"an integer of {int(value).bit_length()} bits"
        raise ConfigError(
            f"{name} is {shown}; it must be an integer of at most 63 bits, the higher the more worth"
        )
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
