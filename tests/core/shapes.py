"""Shapes: what keys depend on of an engine's tensors, without the tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The tensors of one rank; ``kv_heads`` is 1 for MLA."""

    num_layers: int = 4
    page_size: int = 8
    kv_heads: int = 2
    head_dims: tuple[int, ...] = (8, 8)
    is_mla: bool = False
    dtype: str = "bfloat16"

    def with_(self, **changes: object) -> Shape:
        """Return the same with changes."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
