"""The handshake: rank 0 and another rank prove to each other that they know the group's secret.

    rank 0  challenge   16 bytes protocol, 32 nonce
    rank n  hello       32 bytes nonce, 4 rank, 4 group size, 32 proof
    rank 0  verdict      1 byte, 32 proof

A proof is HMAC-SHA256 under the secret over who speaks, both nonces and what is said. Sizes are fixed, and
nothing is done for a connection before its hello has been proved.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass

from ._connection import Refused

SECRET_NBYTES = 32
_PROTOCOL = b"hicache-ranks/1\n"
_NONCE_NBYTES = 32
_CHALLENGE = struct.Struct(f">{len(_PROTOCOL)}s{_NONCE_NBYTES}s")
_HELLO = struct.Struct(f">{_NONCE_NBYTES}sII32s")
_VERDICT = struct.Struct(">B32s")

Write = Callable[[bytes], None]


class Verdict(enum.IntEnum):
    """What rank 0 makes of a rank that has proved itself."""

    WELCOME = 0
    TAKEN = 1
    NO_SUCH_RANK = 2


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank that has proved itself."""

    rank: int
    size: int
    nonces: bytes


def hear_hello(write: Write, secret: bytes) -> Generator[int, bytes, Hello]:
    """Speak as rank 0 until the other side has said who it is.

    Raises: Refused: it does not know the secret.
    """
    nonce = secrets.token_bytes(_NONCE_NBYTES)
    write(_CHALLENGE.pack(_PROTOCOL, nonce))
    peer_nonce, rank, size, proof = _HELLO.unpack((yield _HELLO.size))
    nonces = nonce + peer_nonce
    if not hmac.compare_digest(proof, _proof(secret, b"hello", nonces, rank, size)):
        raise Refused("it does not know the secret of the group")
    return Hello(rank, size, nonces)


def verdict_bytes(secret: bytes, hello: Hello, verdict: Verdict) -> bytes:
    """Return what rank 0 answers to a hello."""
    return _VERDICT.pack(verdict, _proof(secret, b"verdict", hello.nonces, hello.rank, verdict))


def say_hello(write: Write, secret: bytes, rank: int, size: int) -> Generator[int, bytes, None]:
    """Speak as any rank but 0 until rank 0 has proved itself and said welcome.

    Raises: Refused: it is not rank 0 of this group, or it does not want this rank.
    """
    protocol, hub_nonce = _CHALLENGE.unpack((yield _CHALLENGE.size))
    if protocol != _PROTOCOL:
        raise Refused("another program, or another version of this one, answers there")
    nonces = hub_nonce + secrets.token_bytes(_NONCE_NBYTES)
    proof = _proof(secret, b"hello", nonces, rank, size)
    write(_HELLO.pack(nonces[_NONCE_NBYTES:], rank, size, proof))
    verdict, proof = _VERDICT.unpack((yield _VERDICT.size))
    if not hmac.compare_digest(proof, _proof(secret, b"verdict", nonces, rank, verdict)):
        raise Refused("it does not know the secret of the group")
    if verdict == Verdict.TAKEN:
        raise Refused(f"another process has joined as rank {rank}")
    if verdict != Verdict.WELCOME:
        raise Refused(f"there is no rank {rank} of {size} in the group of rank 0")


def _proof(secret: bytes, speaker: bytes, nonces: bytes, first: int, second: int) -> bytes:
    said = struct.pack(">II", first, second)
    return hmac.digest(secret, b"".join((_PROTOCOL, speaker, nonces, said)), "sha256")
