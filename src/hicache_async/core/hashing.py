"""Page hashes: a chained sha256, the same in every process and on every machine."""

from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import dataclass

from ..errors import InvariantError

DIGEST_NBYTES = 32


def chain_seed(salt: bytes = b"", adapter: str | None = None) -> bytes:
    """Return what stands before the first page of a prompt.

    Args:
        salt: isolates a tenant; empty: none.
        adapter: isolates a fine-tuned adapter; None and "" differ.
    Returns: b"" when there is neither, so that plain prompts hash as sha256 of their tokens alone;
        else a digest of both parts with tagged lengths, so that no two pairs run together, over a number
        of bytes that no run of token ids has, so that no prompt without a salt has it as a page hash.
    """
    if not salt and adapter is None:
        return b""
    name = adapter.encode("utf-8", "surrogatepass") if adapter is not None else b""
    parts = struct.pack("<cQ", b"s", len(salt)) + salt
    parts += struct.pack("<cQ", b"-" if adapter is None else b"a", len(name)) + name
    if len(parts) % 4 == 0:
        parts += b"."
    return hashlib.sha256(parts).digest()


@functools.lru_cache(maxsize=1 << 8)
def hash_chain(salt: bytes, adapter: str | None, page_nbytes: int) -> HashChain:
    """Return what the page hashes of a prompt depend on besides its tokens.

    A tenant's prompts get the same object again, so that it costs nothing to see that two chains are equal.
    """
    return HashChain(chain_seed(salt, adapter), page_nbytes)


@dataclass(frozen=True, slots=True)
class HashChain:
    """What a run of page hashes depends on besides the tokens."""

    seed: bytes
    page_nbytes: int
    """Bytes of the token ids of one page: page_size x 4."""

    def extend(self, hashes: list[bytes], data: bytes | bytearray, num_pages: int) -> None:
        """Append the hashes of pages ``len(hashes) .. num_pages`` of ``data``: h_i = sha256(h_{i-1} || ids).

        Args:
            hashes: the chain so far, from page 0; grown in place.
            data: token ids as little-endian uint32.
            num_pages: where to stop.
        Raises: InvariantError: ``data`` has fewer whole pages; nothing is appended.
        """
        previous = hashes[-1] if hashes else self.seed
        step = self.page_nbytes
        if num_pages * step > len(data):
            raise InvariantError(f"{num_pages} pages to hash in {len(data)} bytes of {step} bytes a page")
        sha256 = hashlib.sha256
        for start in range(len(hashes) * step, num_pages * step, step):
            previous = sha256(previous + data[start : start + step]).digest()
            hashes.append(previous)
