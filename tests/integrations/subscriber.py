"""A router's side of the public schema, written against its description alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from hicache_async import Tier
from hicache_async.integrations.zmq_events import KVEventPublisher
from tests.event_mirror import Held

RECEIVE_TIMEOUT_S = 20.0
MEDIA = {"GPU": Tier.DEVICE, "CPU_PINNED": Tier.HOST}


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Blocks that follow one another are found in ``medium``."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Blocks are not found in ``medium`` any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """No block is found any more."""


class Batch(msgspec.Struct, array_like=True):
    """One message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def block_hash(page_hash: bytes) -> int:
    """Return the first 16 hex digits of a page hash as a signed integer of 64 bits."""
    number = int(page_hash.hex()[:16], 16)
    return number - (1 << 64) if number >= 1 << 63 else number


def public(held: Held) -> set[tuple[int, Tier]]:
    """Return which block is in which tier, by the hashes of the schema."""
    return {(block_hash(page_hash), tier) for page_hash, tier in held}


@dataclass(slots=True)
class Subscriber:
    """Follows one publisher: what it has heard, and what it therefore believes to be held."""

    held: set[tuple[int, Tier]] = field(default_factory=set)
    batches: list[Batch] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    live: zmq.asyncio.Socket = field(init=False)
    replays: zmq.asyncio.Socket = field(init=False)

    def __enter__(self) -> Self:
        self.live = self.context.socket(zmq.SUB)
        self.live.subscribe(b"")
        self.replays = self.context.socket(zmq.DEALER)
        return self

    def __exit__(self, *exc: object) -> None:
        self.context.destroy(linger=0)

    async def connect(self, publisher: KVEventPublisher) -> None:
        """Subscribe, and hear something. A PUB socket does not say when it has noticed a subscriber."""
        self.live.connect(publisher.endpoint)
        while not await self.live.poll(20):
            publisher.republish()

    async def until(self, held: Held) -> None:
        """Listen until this is what is believed to be held."""
        while self.held != public(held) or not self.numbers:
            await self.receive()

    async def receive(self) -> list[bytes]:
        """Take one live message in; returns its frames."""
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            frames = await self.live.recv_multipart()
        self.take(frames[-2], frames[-1])
        return frames

    async def replay(self, endpoint: str | None, first: int) -> list[list[bytes]]:
        """Ask for all messages from ``first`` on; returns the frames of each, without the end marker."""
        assert endpoint is not None
        self.replays.connect(endpoint)
        await self.replays.send_multipart([b"", first.to_bytes(8, "big")])
        answers: list[list[bytes]] = []
        while True:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                empty, *frames = await self.replays.recv_multipart()
            assert empty == b""
            if not frames[-1]:
                assert int.from_bytes(frames[-2], "big", signed=True) == -1
                return answers
            answers.append(frames)

    def take(self, number: bytes, payload: bytes) -> None:
        """Take one message over."""
        self.numbers.append(int.from_bytes(number, "big"))
        batch = msgspec.msgpack.decode(payload, type=Batch)
        self.batches.append(batch)
        for event in batch.events:
            self.apply(event)

    def apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        """Take one event over."""
        match event:
            case BlockStored():
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                new = {(block, MEDIA[event.medium or ""]) for block in event.block_hashes}
                assert not new & self.held
                self.held |= new
            case BlockRemoved():
                old = {(block, MEDIA[event.medium or ""]) for block in event.block_hashes}
                assert old <= self.held
                self.held -= old
            case AllBlocksCleared():
                self.held.clear()

    def events(self) -> list[Any]:
        """Return all events heard so far."""
        return [event for batch in self.batches for event in batch.events]
