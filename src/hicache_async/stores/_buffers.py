"""What a store accepts as the bytes of a page."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError


def check_buffers(keys: Sequence[str], buffers: Sequence[memoryview], *, writable: bool) -> None:
    """Check that there is one plain buffer for each key.

    Raises: ConfigError: another number of buffers, or one that is not a contiguous row of bytes.
    """
    if len(keys) != len(buffers):
        raise ConfigError(f"{len(keys)} keys and {len(buffers)} buffers; give one buffer for each key")
    wanted = "contiguous, writable bytes" if writable else "contiguous bytes"
    for index, buffer in enumerate(buffers):
        plain = buffer.ndim == 1 and buffer.itemsize == 1 and buffer.c_contiguous
        if not plain or (writable and buffer.readonly):
            raise ConfigError(
                f"buffer {index} has shape {buffer.shape}, strides {buffer.strides}, format {buffer.format!r}"
                f" and readonly {buffer.readonly}; give {wanted} in one dimension"
            )
