"""FP8: each element in 8 bits, with one scale for each block of elements. Lossy.

    body    scales, float32 little endian, one for each block
            codes, float8_e4m3fn, one byte for each element of the page

A page is a row of elements, cut into blocks of ``block`` elements, the last one perhaps shorter. Within a block
``scale`` is the largest finite magnitude divided by 448, the largest of e4m3, and never below 2**-126.

An element x of a block comes back within ``abs(x) / 16 + scale / 1024``, and what rounding to the page's own
dtype adds: e4m3 has 3 bits of mantissa, and steps of 2**-9 below 2**-6. So 0 stays 0, and the largest
magnitude of a block keeps its value. NaN stays NaN; an infinite element becomes the largest finite magnitude
of its block, with its sign.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from ...errors import ConfigError
from . import Decode, Encode, Fault, Head, tag_of
from ._checked import BODY_AT, new_frame, open_frame, seal

ITEM_NBYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element, by dtype."""

_MAX_CODE = 448.0
_MIN_SCALE = 2.0**-126
_PARALLEL_FROM = 1 << 15
"""Elements from which torch would use threads of its own, which belong to the engine (at::internal::GRAIN_SIZE)."""


class Fp8:
    """Quantise pages of floating point elements to 8 bits: about half the bytes of bfloat16.

    Args:
        dtype: of the elements: bfloat16, float16 or float32.
        block: elements that share a scale, 16 .. 16384.
    Raises: ConfigError: another dtype or block.
    """

    family = "fp8"

    def __init__(self, dtype: str | None = None, block: int = 128) -> None:
        if dtype not in ITEM_NBYTES:
            raise ConfigError(f"dtype is {dtype!r}; give one of: {', '.join(ITEM_NBYTES)}")
        if isinstance(block, bool) or not isinstance(block, int) or not 16 <= block <= 16384:
            raise ConfigError(f"block is {block!r}; give an integer 16 .. 16384")
        self.name = f"fp8_e4m3-{dtype}-{block}"
        self._dtype = dtype
        self._item_nbytes = ITEM_NBYTES[dtype]
        self._block = block
        self._tag = tag_of(self.name)

    def __repr__(self) -> str:
        return f"Fp8(dtype={self._dtype!r}, block={self._block})"

    def frame_nbytes(self, nbytes: int) -> int | None:
        """Return the size of the frame of a page of ``nbytes``.

        Raises: ConfigError: no whole number of elements.
        """
        num_elements, rest = divmod(nbytes, self._item_nbytes)
        if rest:
            raise ConfigError(f"a page has {nbytes} bytes, no whole number of {self._dtype}; set dtype")
        return BODY_AT + 4 * self._num_blocks(num_elements) + num_elements

    def max_frame_nbytes(self, nbytes: int) -> int:
        """Return the size of the frame of a page of ``nbytes``."""
        return self.frame_nbytes(nbytes) or 0

    def page_nbytes(self, frame_nbytes: int) -> int | None:
        """Return the size of the page in a frame of this size; None: no frame has it."""
        num_blocks, rest = divmod(frame_nbytes - BODY_AT, 4 + self._block)
        if num_blocks < 0 or 0 < rest <= 4:
            return None
        return (num_blocks * self._block + max(0, rest - 4)) * self._item_nbytes

    def encoder(self) -> Encode:
        """Return what quantises."""
        quantiser = _Quantiser(self._dtype, self._block)

        def encode(key: bytes, page: memoryview) -> memoryview:
            num_elements = page.nbytes // self._item_nbytes
            frame = new_frame(self.max_frame_nbytes(page.nbytes) - BODY_AT)
            scales, codes = self._parts(frame, num_elements)
            quantiser.encode(np.frombuffer(page, np.uint8), scales, codes)
            return seal(frame, Head(self._tag, page.nbytes), 0, key)

        return encode

    def decoder(self) -> Decode:
        """Return what brings elements back."""
        quantiser = _Quantiser(self._dtype, self._block)

        def decode(key: bytes, frame: memoryview, into: memoryview) -> Fault | None:
            form = open_frame(frame, Head(self._tag, into.nbytes), key, into)
            if isinstance(form, Fault):
                return form
            if form != 0 or frame.nbytes != self.max_frame_nbytes(into.nbytes):
                return Fault.DAMAGED
            scales, codes = self._parts(frame, into.nbytes // self._item_nbytes)
            quantiser.decode(scales, codes, np.frombuffer(into, np.uint8))
            return None

        return decode

    def _num_blocks(self, num_elements: int) -> int:
        return -(-num_elements // self._block)

    def _parts(self, frame: memoryview, num_elements: int) -> tuple[Any, Any]:
        split = BODY_AT + 4 * self._num_blocks(num_elements)
        return np.frombuffer(frame[BODY_AT:split], np.uint8), np.frombuffer(frame[split:], np.uint8)


class _Quantiser:
    """Encode and decode pages in pieces that torch does in the calling thread, with tensors of its own."""

    def __init__(self, dtype: str, block: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        torch = self._torch
        self._block = block
        self._num_blocks = max(1, (_PARALLEL_FROM - 1) // block)
        size = self._num_blocks * block
        self._elements = torch.empty(size, dtype=vars(torch)[dtype])
        self._codes = torch.empty(size, dtype=torch.float8_e4m3fn)
        self._values = torch.zeros(size, dtype=torch.float32)
        self._value_row = self._values.numpy()
        self._scales = torch.empty(self._num_blocks, 1, dtype=torch.float32)
        self._table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
        self._item_nbytes = self._elements.element_size()
        # The same bytes, for numpy: what torch takes must be aligned and writable, pages need not be.
        self._element_bytes = self._elements.view(torch.uint8).numpy()
        self._code_bytes = self._codes.view(torch.uint8).numpy()
        self._scale_bytes = self._scales.view(torch.uint8).numpy().reshape(-1)

    def encode(self, page: Any, scales: Any, codes: Any) -> None:
        """Fill ``scales`` and ``codes`` from the bytes of a page; all are rows of uint8."""
        torch = self._torch
        for first, count, num_blocks in self._pieces(len(codes)):
            start, nbytes = first * self._item_nbytes, count * self._item_nbytes
            self._element_bytes[:nbytes] = page[start : start + nbytes]
            self._element_bytes[nbytes : num_blocks * self._block * self._item_nbytes] = 0
            values = self._elements[: num_blocks * self._block].float().view(num_blocks, self._block)
            magnitudes = values.abs().nan_to_num_(nan=0.0, posinf=0.0)  # of the finite elements
            scale = self._scales[:num_blocks]
            torch.clamp(magnitudes.amax(1, keepdim=True) / _MAX_CODE, min=_MIN_SCALE, out=scale)
            quotients = (values / scale).clamp_(-_MAX_CODE, _MAX_CODE)
            self._codes[: num_blocks * self._block] = quotients.view(-1).to(torch.float8_e4m3fn)
            codes[first : first + count] = self._code_bytes[:count]
            at = first // self._block * 4
            scales[at : at + num_blocks * 4] = self._scale_bytes[: num_blocks * 4]

    def decode(self, scales: Any, codes: Any, page: Any) -> None:
        """Fill the bytes of a page from ``scales`` and ``codes``; all are rows of uint8."""
        for first, count, num_blocks in self._pieces(len(codes)):
            at = first // self._block * 4
            self._scale_bytes[: num_blocks * 4] = scales[at : at + num_blocks * 4]
            values = self._values[: num_blocks * self._block].view(num_blocks, self._block)
            # By a table: torch's own conversion takes four times as long.
            np.take(self._table, codes[first : first + count], out=self._value_row[:count], mode="clip")
            values.mul_(self._scales[:num_blocks])
            self._elements[: num_blocks * self._block] = values.view(-1)
            start, nbytes = first * self._item_nbytes, count * self._item_nbytes
            page[start : start + nbytes] = self._element_bytes[:nbytes]

    def _pieces(self, num_elements: int) -> Any:
        # (first element, elements, blocks)
        size = self._num_blocks * self._block
        for first in range(0, num_elements, size):
            count = min(size, num_elements - first)
            yield first, count, -(-count // self._block)
