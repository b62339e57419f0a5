"""Codecs: what the name of a store's codec tells those who use it."""

from __future__ import annotations

import re

from ..abc import Store, SupportsCodec
from ..errors import ConfigError

RAW = "raw"
"""The codec of a store that keeps the bytes that it is given."""

_LOSSLESS = re.compile(r"raw|zstd|aesgcm-[0-9a-f]{8}")
_QUANTISED = re.compile(r"fp8_[a-z0-9]+-(?P<dtype>[a-z0-9_]+)-[0-9]+")


def codec_of(store: Store | None) -> str:
    """Return how ``store`` encodes objects; RAW: it keeps the bytes that it is given."""
    return store.codec if isinstance(store, SupportsCodec) else RAW


def is_lossless(codec: str) -> bool:
    """Return whether what is read is what was written; of a codec that is not known here it is not believed."""
    return all(_LOSSLESS.fullmatch(part) for part in _parts(codec))


def is_quantised(codec: str) -> bool:
    """Return whether ``codec`` is known to give back other bytes than were written."""
    return any(_QUANTISED.fullmatch(part) for part in _parts(codec))


def check_dtype(codec: str, dtype: str) -> None:
    """Raise ConfigError where ``codec`` takes pages of ``dtype`` for elements of another dtype."""
    for part in _parts(codec):
        found = _QUANTISED.fullmatch(part)
        if found is not None and found["dtype"] != dtype:
            raise ConfigError(
                f"the store's codec {part} quantises {found['dtype']}, and the KV is {dtype}; give fp8_dtype={dtype}, "
                "or leave it out of the URL"
            )


def _parts(codec: str) -> list[str]:
    return re.split(r"[+|]", codec)
