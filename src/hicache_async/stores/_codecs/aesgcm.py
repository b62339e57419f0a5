"""AES-256 in Galois/Counter Mode: nobody without the key reads an object, changes it, or moves it to another key.

    offset 0     head: magic, tag (of the codec with the id of its key), bytes of the page
          24     nonce, 12 random bytes
          36     4 zeros
          40     ciphertext, as long as the page, and the tag of 16 bytes

The head and the store's key are authenticated with the page. With random nonces of 96 bits one key is good for
2**32 objects (NIST SP 800-38D, section 8.3): then the chance that two of them share a nonce is below 2**-32.
Names and sizes of objects are not hidden.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib
import os
from typing import Any

import numpy as np

from ...errors import ConfigError
from . import HEAD_NBYTES, Decode, Encode, Fault, Head, tag_of

DEFAULT_KEY_ENV = "HICACHE_AESGCM_KEY"
_KEY_NBYTES = 32
_NONCE_NBYTES = 12
_BODY_AT = HEAD_NBYTES + _NONCE_NBYTES + 4
_OVERHEAD = _BODY_AT + 16
_MAKE_ONE = """make one by: python -c "import secrets; print(secrets.token_hex(32))\""""


class AesGcm:
    """Encrypt and authenticate each page by itself.

    Args:
        key_env: the environment variable with the key: 32 bytes in hex or base64. It is read here, once.
    Raises: ConfigError: there is no such key, or cryptography is not installed.
    """

    family = "aesgcm"

    def __init__(self, key_env: str = DEFAULT_KEY_ENV) -> None:
        key = _key_from(key_env)
        ciphers, self._invalid_tag = _imported()
        key_id = hashlib.sha256(b"hicache_async aesgcm key id\0" + key).hexdigest()[:8]
        self.name = f"aesgcm-{key_id}"
        self._cipher = ciphers.AESGCM(key)
        self._tag = tag_of(self.name)

    def __repr__(self) -> str:
        return f"<AesGcm {self.name}>"

    def frame_nbytes(self, nbytes: int) -> int | None:
        """Return the size of the frame of a page of ``nbytes``."""
        return nbytes + _OVERHEAD

    def max_frame_nbytes(self, nbytes: int) -> int:
        """Return the size of the frame of a page of ``nbytes``."""
        return nbytes + _OVERHEAD

    def page_nbytes(self, frame_nbytes: int) -> int | None:
        """Return the size of the page in a frame of this size; None: it is too small for one."""
        return frame_nbytes - _OVERHEAD if frame_nbytes >= _OVERHEAD else None

    def encoder(self) -> Encode:
        """Return what encrypts."""

        def encode(key: bytes, page: memoryview) -> memoryview:
            head = Head(self._tag, page.nbytes).pack()
            nonce = os.urandom(_NONCE_NBYTES)
            frame = np.empty(page.nbytes + _OVERHEAD, np.uint8).data
            frame[:_BODY_AT] = head + nonce + bytes(4)
            self._cipher.encrypt_into(nonce, page, head + key, frame[_BODY_AT:])
            return frame

        return encode

    def decoder(self) -> Decode:
        """Return what decrypts into a buffer."""

        def decode(key: bytes, frame: memoryview, into: memoryview) -> Fault | None:
            expected = Head(self._tag, into.nbytes)
            if (fault := expected.fault_in(frame, into)) is not None:
                return fault
            if frame.nbytes != into.nbytes + _OVERHEAD or any(frame[HEAD_NBYTES + _NONCE_NBYTES : _BODY_AT]):
                return Fault.DAMAGED
            nonce = bytes(frame[HEAD_NBYTES : HEAD_NBYTES + _NONCE_NBYTES])
            try:
                self._cipher.decrypt_into(nonce, frame[_BODY_AT:], expected.pack() + key, into)
            except self._invalid_tag:
                return Fault.DAMAGED
            return None

        return decode


def _key_from(key_env: str) -> bytes:
    # No message here repeats any part of the value.
    text = os.environ.get(key_env, "").strip() if key_env else ""
    if not text:
        raise ConfigError(f"environment variable {key_env!r} holds no key of 32 bytes; {_MAKE_ONE}")
    key = _decoded(text)
    if key is None or len(key) != _KEY_NBYTES:
        found = "neither hex nor base64" if key is None else f"a key of {len(key)} bytes"
        raise ConfigError(f"environment variable {key_env!r} holds {found}, expected 32 bytes; {_MAKE_ONE}")
    return key


def _decoded(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text)
    except ValueError:
        pass
    try:
        return base64.b64decode(
            text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True
        )
    except (binascii.Error, ValueError):
        return None


def _imported() -> tuple[Any, type[Exception]]:
    try:
        ciphers = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
        errors = importlib.import_module("cryptography.exceptions")
    except ImportError as error:
        raise ConfigError(
            f"codec aesgcm needs cryptography ({error}); pip install hicache-async[codecs]"
        ) from None
    return ciphers, errors.InvalidTag
