"""The dtypes of K/V tensors that are tested."""

from __future__ import annotations

import torch

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
]
