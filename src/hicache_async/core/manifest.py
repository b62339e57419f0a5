"""Manifests: what a namespace is, written down in the store once, for those who find only its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec

from ..errors import ConfigError
from .keys import Namespace

MANIFEST_NBYTES: Final = 4096
"""Payload of every manifest, so that whoever reads one knows the size of the buffer."""

_PREFIX: Final = "manifest_"


class Manifest(msgspec.Struct, frozen=True):
    """The fields of one namespace, as its first writer knew them.

    Attributes:
        digest: the short name of the namespace.
        fields: those of :class:`Namespace`, and any that a later version of this library has added.
    """

    digest: str
    fields: dict[str, object]

    @property
    def model_id(self) -> str | None:
        """Whose KV it is; None: it does not say."""
        value = self.fields.get("model_id")
        return value if isinstance(value, str) else None


def manifest_key(digest: str) -> str:
    """Return the name of the object that holds the manifest of the namespace ``digest``."""
    return _PREFIX + digest


def is_manifest_key(key: str) -> bool:
    """Return whether ``key`` names a manifest rather than a page."""
    return key.startswith(_PREFIX)


def manifest_of(namespace: Namespace) -> Manifest:
    """Return the manifest of ``namespace``, without writing or reading one."""
    return Manifest(namespace.digest, msgspec.to_builtins(namespace))


def encode(namespace: Namespace) -> bytes:
    """Return the manifest of ``namespace`` as an object: JSON, padded by spaces to ``MANIFEST_NBYTES``.

    Raises: ConfigError: the fields do not fit, which takes a model_id or fingerprint of thousands of letters.
    """
    text = msgspec.json.encode(namespace)
    if len(text) > MANIFEST_NBYTES:
        raise ConfigError(
            f"the fields of namespace {namespace.digest} take {len(text)} bytes and a manifest holds "
            f"{MANIFEST_NBYTES}; shorten model_id ({len(namespace.model_id)} letters) or fingerprint "
            f"({len(namespace.fingerprint)})"
        )
    return text.ljust(MANIFEST_NBYTES)


def decode(digest: str, data: bytes | bytearray | memoryview) -> Manifest | None:
    """Return the manifest in ``data``; None: it is none, or not that of ``digest``. Never raises.

    The digest is computed anew from the fields, also from those that this version does not know, so a manifest
    that was damaged, edited or put under another name is not believed.
    """
    try:
        fields = msgspec.json.decode(bytes(data), type=dict[str, object])
        is_right = _hash_of(fields) == digest.partition("-")[2]
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return None
    return Manifest(digest, fields) if is_right else None


def _hash_of(fields: Mapping[str, object]) -> str:
    # As Namespace.digest; what stands before the hash is the format's version, which a later one may change.
    packed = msgspec.msgpack.encode(fields, order="sorted")
    return hashlib.sha256(packed).hexdigest()[:16]
