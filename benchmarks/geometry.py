"""The KV of the model that flows are measured with: a page of 512 KiB, a prompt of 64 MiB.

Nothing but the standard library is needed to import this, so that a peer's side can do it too.
"""

from __future__ import annotations

import array

PAGE_SIZE = 64
NUM_LAYERS = 4
KV_HEADS = 8
HEAD_DIM = 64
DTYPE = "float16"
DTYPE_NBYTES = 2
PAGE_NBYTES = PAGE_SIZE * NUM_LAYERS * 2 * KV_HEADS * HEAD_DIM * DTYPE_NBYTES

PROMPT_TOKENS = 8192
PROMPT_PAGES = PROMPT_TOKENS // PAGE_SIZE


def prompt(number: int) -> array.array[int]:
    """Return the token ids of a prompt that shares no page with those of other numbers."""
    first = number * PROMPT_TOKENS
    return array.array("q", range(first, first + PROMPT_TOKENS))
