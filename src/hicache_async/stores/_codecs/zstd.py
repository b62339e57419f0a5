"""Zstandard: lossless, and the size of a frame depends on the page."""

from __future__ import annotations

import importlib
from types import ModuleType

from ...errors import ConfigError
from . import Decode, Encode, Fault, Head, tag_of
from ._checked import BODY_AT, new_frame, open_frame, seal

_RAW, _COMPRESSED = 0, 1
"""Forms: a page that does not become smaller is stored as it is."""


class Zstd:
    """Compress each page by itself.

    Objects of any level can be read at any other, so the level is no part of the name.

    Args:
        level: 1 (fast) .. 22 (small).
    Raises: ConfigError: another level, or zstandard is not installed.
    """

    family = "zstd"
    name = "zstd"

    def __init__(self, level: int = 3) -> None:
        if isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= 22:
            raise ConfigError(f"level is {level!r}; give an integer 1 .. 22")
        self._level = level
        self._zstandard = _imported()
        self._tag = tag_of(self.name)

    def __repr__(self) -> str:
        return f"Zstd(level={self._level})"

    def frame_nbytes(self, nbytes: int) -> int | None:
        """Return None: it depends on the page."""
        return None

    def max_frame_nbytes(self, nbytes: int) -> int:
        """Return the size of the frame of a page that does not become smaller."""
        return BODY_AT + nbytes

    def page_nbytes(self, frame_nbytes: int) -> int | None:
        """Return None: a frame has to be read."""
        return None

    def encoder(self) -> Encode:
        """Return what compresses; its tables are made once for a batch."""
        compress = self._zstandard.ZstdCompressor(level=self._level, write_checksum=False).compress

        def encode(key: bytes, page: memoryview) -> memoryview:
            compressed = memoryview(compress(page)) if page.nbytes else page
            form, body = (_COMPRESSED, compressed) if compressed.nbytes < page.nbytes else (_RAW, page)
            frame = new_frame(body.nbytes)
            frame[BODY_AT:] = body
            return seal(frame, Head(self._tag, page.nbytes), form, key)

        return encode

    def decoder(self) -> Decode:
        """Return what decompresses into a buffer."""
        decompressor = self._zstandard.ZstdDecompressor()
        broken = self._zstandard.ZstdError

        def decode(key: bytes, frame: memoryview, into: memoryview) -> Fault | None:
            form = open_frame(frame, Head(self._tag, into.nbytes), key, into)
            if isinstance(form, Fault):
                return form
            body = frame[BODY_AT:]
            if form == _RAW and body.nbytes == into.nbytes:
                into[:] = body
                return None
            if form != _COMPRESSED:
                return Fault.DAMAGED
            try:
                with decompressor.stream_reader(body) as reader:
                    is_whole = reader.readinto(into) == into.nbytes and not reader.read(1)
            except broken:
                is_whole = False
            return None if is_whole else Fault.DAMAGED

        return decode


def _imported() -> ModuleType:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise ConfigError(
            f"codec zstd needs zstandard ({error}); pip install hicache-async[codecs]"
        ) from None
