"""TokenKey: the token ids of one request as bytes, with the page hashes found so far."""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..types import Tokens
from .hashing import HashChain

TOKEN_NBYTES = 4
MAX_TOKEN = (1 << 32) - 1
_UINT32, _INT32 = np.dtype("<u4"), np.dtype("<i4")


def token_bytes(tokens: Tokens) -> bytes:
    """Return token ids as little-endian uint32.

    Args:
        tokens: one dimension; a list or tuple of ints, an integer array, or a CPU tensor.
    Raises: ConfigError: an id that is not an integer in 0 .. 2**32-1, naming its position.
    """
    return bytes(_token_buffer(tokens))


def _token_buffer(tokens: Tokens) -> bytes | memoryview:
    # Of an array in the right form its own memory, so that whoever wants the bytes copies them once.
    if isinstance(tokens, (list, tuple, range)):
        try:
            return struct.pack(f"<{len(tokens)}I", *tokens)
        except struct.error:
            raise _refusal(tokens) from None
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:  # what tensors that NumPy cannot view raise
        raise ConfigError(
            f"tokens cannot be read as an array; give integers in host memory: {error}"
        ) from error
    if array.ndim != 1:
        raise ConfigError(f"tokens have shape {array.shape}; give one dimension")
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise ConfigError(f"tokens have dtype {array.dtype}; give integers")
    array = np.ascontiguousarray(array)
    if array.dtype != _UINT32:
        # Seen as unsigned a negative id is above all others, so that one look finds it.
        unsigned = array.view(_UINT32 if array.dtype == _INT32 else array.dtype.str.replace("i", "u"))
        highest = MAX_TOKEN if array.dtype.kind == "u" else min(MAX_TOKEN, (1 << array.itemsize * 8 - 1) - 1)
        if int(unsigned.max()) > highest:
            raise _refusal(array.tolist())
        array = unsigned if unsigned.dtype == _UINT32 else unsigned.astype(_UINT32)
    return array.data.cast("B")


def _refusal(tokens: Iterable[Any]) -> ConfigError:
    for position, token in enumerate(tokens):
        try:
            is_token = 0 <= operator.index(token) <= MAX_TOKEN
        except TypeError:
            is_token = False
        if not is_token:
            return ConfigError(f"token {position} is {token!r}; token ids are integers in 0 .. 2**32-1")
    return ConfigError("token ids must be integers in 0 .. 2**32-1")


class TokenKey:
    """The token ids of a request: append-only, built once, extended turn by turn.

    A key remembers the page hashes computed for it, so keep it for the life of a conversation.
    Leases that share a key each remember their own length.
    """

    __slots__ = ("_chain", "_hashes", "data")

    def __init__(self, tokens: Tokens = ()) -> None:
        self.data = bytearray(_token_buffer(tokens))
        self._chain: HashChain | None = None
        self._hashes: list[bytes] = []

    def __len__(self) -> int:
        return len(self.data) // TOKEN_NBYTES

    def __repr__(self) -> str:
        return f"<TokenKey of {len(self)} tokens>"

    def extend(self, tokens: Tokens) -> None:
        """Append token ids.

        Raises: ConfigError: as :func:`token_bytes`; nothing is appended.
        """
        self.data += _token_buffer(tokens)

    def fork(self) -> TokenKey:
        """Return an independent copy, for parallel samples of one prompt."""
        return self.truncated(len(self))

    def truncated(self, num_tokens: int) -> TokenKey:
        """Return an independent copy of the first ``num_tokens``, hashes included."""
        copy = TokenKey()
        copy.data = self.data[: num_tokens * TOKEN_NBYTES]
        copy._chain = self._chain
        if self._chain is not None:
            copy._hashes = self._hashes[: len(copy.data) // self._chain.page_nbytes]
        return copy

    def page_hashes(self, chain: HashChain, num_pages: int) -> list[bytes]:
        """Return the chained hashes of the first ``num_pages`` or more pages; do not change the list."""
        if chain is not self._chain and chain != self._chain:
            self._chain, self._hashes = chain, []
        if len(self._hashes) < num_pages:
            chain.extend(self._hashes, self.data, num_pages)
        return self._hashes

    def num_hashed(self, chain: HashChain) -> int:
        """Return how many pages have their hash already."""
        return len(self._hashes) if chain is self._chain or chain == self._chain else 0

    def adopt_hashes(self, chain: HashChain, hashes: Sequence[bytes]) -> None:
        """Take over hashes that the tree knows already, from page 0."""
        if chain is not self._chain and chain != self._chain:
            self._chain, self._hashes = chain, []
        self._hashes.extend(hashes[len(self._hashes) :])
