"""Models whose every number accuses itself: what a token's KV is follows from page, layer, head, token, K or V."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_IDENTITY = np.dtype(
    [("page", "<u4"), ("layer", "<u2"), ("head", "<u2"), ("token", "<u2"), ("plane", "u1"), ("mark", "u1")]
)
_MARK = 0xA7


@dataclass(frozen=True)
class Model:
    """The KV of one model, without ranks.

    Attributes:
        heads: KV heads; MLA: 0, and one latent for all.
        tokens: of a page.
        row_nbytes: bytes of one head of one token, in K and in V; MLA: in the latent. At least 12.
    """

    name: str
    heads: int
    layers: int = 4
    tokens: int = 8
    row_nbytes: tuple[int, ...] = (20, 16)

    @property
    def is_mla(self) -> bool:
        """Whether there is one plane for all heads."""
        return not self.heads

    def plane(self, page_hash: bytes, plane: int) -> Bytes:
        """Return K or V of one page of the whole model, (layers, tokens, heads, bytes); read only."""
        return _plane(self, page_hash, plane)


MHA = Model("mha", heads=8)
GQA = Model("gqa", heads=4)
MLA = Model("mla", heads=0, row_nbytes=(40,))
MODELS = [MHA, GQA, MLA]


@functools.lru_cache(maxsize=256)
def _plane(model: Model, page_hash: bytes, plane: int) -> Bytes:
    shape = (model.layers, model.tokens, max(1, model.heads))
    row_nbytes = model.row_nbytes[plane]
    identity = np.zeros(shape, _IDENTITY)
    layer, token, head = np.indices(shape)
    identity["page"] = int.from_bytes(page_hash[:4], "little")
    identity["layer"], identity["token"], identity["head"] = layer, token, head
    identity["plane"], identity["mark"] = plane, _MARK
    seed = np.random.default_rng([*page_hash[:8], plane])
    content = seed.integers(0, 256, (*shape, row_nbytes), np.uint8)
    content[..., : _IDENTITY.itemsize] = identity.view(np.uint8).reshape(*shape, _IDENTITY.itemsize)
    content.flags.writeable = False
    return content


def whose(row: Bytes) -> str:
    """Say what a row that is found where another one should be holds."""
    if len(set(row.tolist())) == 1:
        return f"nothing but {row[0]:#04x}"
    found = row[: _IDENTITY.itemsize].copy().view(_IDENTITY)[0]
    if found["mark"] != _MARK:
        return f"no whole row: {row.tobytes().hex()}"
    return (
        f"page {int(found['page']).to_bytes(4, 'little').hex()}, layer {found['layer']}, head {found['head']}, "
        f"token {found['token']}, {'KV'[found['plane']]}"
    )
