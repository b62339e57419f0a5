"""What is measured: the KV of a model with pages of 512 KiB, and the token ids of prompts.

Nothing but the standard library is needed to import this, so that a peer's side can do it too.
"""

from __future__ import annotations

import array
import random

PAGE_SIZE = 64
NUM_LAYERS = 4
KV_HEADS = 8
HEAD_DIM = 64
DTYPE = "float16"
DTYPE_NBYTES = 2
PAGE_NBYTES = PAGE_SIZE * NUM_LAYERS * 2 * KV_HEADS * HEAD_DIM * DTYPE_NBYTES

PROMPT_TOKENS = 8192
PROMPT_PAGES = PROMPT_TOKENS // PAGE_SIZE

LONG_PROMPT_TOKENS = 32_768
LONG_PROMPT_PAGES = LONG_PROMPT_TOKENS // PAGE_SIZE
VOCABULARY = 1 << 17


def prompt(number: int) -> array.array[int]:
    """Return the token ids of a prompt that shares no page with those of other numbers."""
    first = number * PROMPT_TOKENS
    return array.array("q", range(first, first + PROMPT_TOKENS))


def long_prompt() -> array.array[int]:
    """Return the token ids of the prompt that trees are measured with, the same ones in every process."""
    return array.array("q", random.Random(1).choices(range(VOCABULARY), k=LONG_PROMPT_TOKENS))


def page(number: int) -> array.array[int]:
    """Return the token ids of a prompt of one page that is no other number's."""
    return array.array("q", range(number * PAGE_SIZE, (number + 1) * PAGE_SIZE))
