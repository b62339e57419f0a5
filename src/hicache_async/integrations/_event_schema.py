"""The public schema of KV events, as msgpack: what cache-aware routers read.

A message is ``[timestamp, events, data_parallel_rank]``. An event is a map with its name under ``type``, or in
the form that was public before an array of the same values in the same order:

    BlockStored         block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name
    BlockRemoved        block_hashes, medium
    AllBlocksCleared

A block is a page; its hash is the first 8 bytes of the page hash as a signed big-endian integer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from ..core.tokens import TOKEN_NBYTES
from ..kv_events import KVEvent, Removed, Stored
from ..types import Tier


def parts_of(event: KVEvent, max_tokens: int) -> Iterator[KVEvent]:
    """Yield ``event``, a long :class:`Stored` in parts of about ``max_tokens`` that continue one another."""
    if not isinstance(event, Stored) or len(event.token_bytes) <= max_tokens * TOKEN_NBYTES:
        yield event
        return
    page_nbytes = event.page_size * TOKEN_NBYTES
    max_pages = max(1, max_tokens // event.page_size)
    parent_hash = event.parent_hash
    for start in range(0, len(event.hashes), max_pages):
        end = start + max_pages
        hashes = event.hashes[start:end]
        token_bytes = event.token_bytes[start * page_nbytes : end * page_nbytes]
        yield replace(event, hashes=hashes, parent_hash=parent_hash, token_bytes=token_bytes)
        parent_hash = hashes[-1]


def runs_of(events: Iterable[KVEvent]) -> list[list[KVEvent]]:
    """Return ``events`` with those together that one public event can tell."""
    runs: list[list[KVEvent]] = []
    for event in events:
        if runs and _continues(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return runs


def _continues(last: KVEvent, event: KVEvent) -> bool:
    if isinstance(last, Stored) and isinstance(event, Stored):
        # A page hash covers salt and adapter, so that these are the same too.
        return last.tier is event.tier and last.hashes[-1] == event.parent_hash
    if isinstance(last, Removed) and isinstance(event, Removed):
        return last.tier is event.tier
    return False


@dataclass(frozen=True, slots=True)
class BatchEncoder:
    """Encodes batches of events for one publisher.

    Args:
        as_maps: whether an event is a map; False: an array.
        host_medium: what the schema calls the host tier.
        dp_rank: the data-parallel rank of the engine.
    """

    as_maps: bool
    host_medium: str
    dp_rank: int
    _encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)

    def encode(self, timestamp_s: float, events: Sequence[KVEvent]) -> bytes:
        """Return the payload of one message; a :class:`Gap` is told as AllBlocksCleared."""
        public = [self._public(run) for run in runs_of(events)]
        return self._encoder.encode([timestamp_s, public, self.dp_rank])

    def _public(self, run: Sequence[KVEvent]) -> dict[str, object] | list[object]:
        fields: dict[str, object]
        if stored := [event for event in run if isinstance(event, Stored)]:
            fields = self._stored(stored)
        elif removed := [event for event in run if isinstance(event, Removed)]:
            hashes = [_block_hash(page_hash) for event in removed for page_hash in event.hashes]
            fields = {"type": "BlockRemoved", "block_hashes": hashes, "medium": self._medium(removed[0].tier)}
        else:
            fields = {"type": "AllBlocksCleared"}
        return fields if self.as_maps else list(fields.values())

    def _stored(self, run: Sequence[Stored]) -> dict[str, object]:
        first = run[0]
        tokens = np.frombuffer(b"".join(event.token_bytes for event in run), dtype="<u4")
        fields: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": [_block_hash(page_hash) for event in run for page_hash in event.hashes],
            "parent_block_hash": None if first.parent_hash is None else _block_hash(first.parent_hash),
            "token_ids": tokens.tolist(),
            "block_size": first.page_size,
            "lora_id": None,
            "medium": self._medium(first.tier),
            "lora_name": first.adapter,
        }
        if first.salt and self.as_maps:
            fields["cache_salt"] = first.salt.decode("utf-8", "backslashreplace")
        return fields

    def _medium(self, tier: Tier) -> str:
        return "GPU" if tier is Tier.DEVICE else self.host_medium


def _block_hash(page_hash: bytes) -> int:
    return int.from_bytes(page_hash[:8], "big", signed=True)
