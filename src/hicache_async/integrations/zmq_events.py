"""KVEventPublisher: tells cache-aware routers over ZeroMQ what a cache holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Literal, Self

from .._log import logger
from ..cache import HiCache
from ..core.tokens import TOKEN_NBYTES
from ..errors import ClosedError, ConfigError
from ..kv_events import Cleared, EventReader, Gap, KVEvent, Removed, Stored
from ._event_schema import BatchEncoder, parts_of
from ._event_sockets import EventSockets
from ._replay import ReplayBuffer

MAX_BATCH_TOKENS = 1 << 14
"""Tokens of one message: what is encoded before the loop goes on."""

NOTHING_HELD = Gap(0)


class KVEventPublisher:
    """Publishes the KV events of one cache, from entering to leaving.

    Sends AllBlocksCleared and all that is held, first and whenever events were missed; then each change; at
    the end, and when the cache is closed or has failed, AllBlocksCleared. Changes of one turn of the loop
    share a message. Nothing here waits for a subscriber.

    Args:
        cache: an open cache.
        endpoint: where the PUB socket is bound, ``tcp://`` or ``ipc://``; port ``*``: any that is free.
        replay_endpoint: the same for the ROUTER socket that sends messages again; None: there is none.
        topic: the first frame of every message.
        schema: "map" for routers of the current public schema, "array" for those of the one before.
        host_medium: the schema's word for host memory; some routers say "CPU".
        dp_rank: the data-parallel rank of this engine, part of every message.
        buffer_steps, buffer_nbytes: messages, and bytes of them, that are kept to be sent again.
        high_water_mark: messages, of at most 200 KB, that wait for one slow subscriber before it misses some.
    Raises: ConfigError: an option that cannot work; on entering: an endpoint that cannot be bound.
    Ownership: closes the sockets, never the cache.

    Attributes:
        endpoint, replay_endpoint: once entered, where the sockets are bound.
    """

    def __init__(
        self,
        cache: HiCache,
        *,
        endpoint: str = "tcp://127.0.0.1:*",
        replay_endpoint: str | None = None,
        topic: str = "",
        schema: Literal["map", "array"] = "map",
        host_medium: str = "CPU_PINNED",
        dp_rank: int = 0,
        buffer_steps: int = 10_000,
        buffer_nbytes: int = 64 << 20,
        high_water_mark: int = 2048,
    ) -> None:
        if schema not in ("map", "array"):
            raise ConfigError(f"schema is {schema!r}; it must be 'map' or 'array'")
        counts = {
            "buffer_steps": buffer_steps,
            "buffer_nbytes": buffer_nbytes,
            "high_water_mark": high_water_mark,
        }
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"{name} is {count!r}; it must be an integer >= 1")
        if isinstance(dp_rank, bool) or not isinstance(dp_rank, int) or dp_rank < 0:
            raise ConfigError(f"dp_rank is {dp_rank!r}; it must be an integer >= 0")
        words = {"endpoint": endpoint, "topic": topic, "host_medium": host_medium}
        if replay_endpoint is not None:
            words["replay_endpoint"] = replay_endpoint
        for name, word in words.items():
            if not isinstance(word, str):
                raise ConfigError(f"{name} is {word!r}; it must be a string")
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self._cache = cache
        self._encoder = BatchEncoder(schema == "map", host_medium, dp_rank)
        self._open_sockets = partial(
            EventSockets,
            topic=topic.encode(),
            replay_topic=schema == "map",
            buffer=ReplayBuffer(buffer_steps, buffer_nbytes),
            high_water_mark=high_water_mark,
            on_lost=self.republish,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._reader: EventReader | None = None
        self._sockets: EventSockets

    async def __aenter__(self) -> Self:
        if self._reader is not None:
            raise ClosedError("this publisher was entered before; make another one")
        reader = self._cache.events(snapshot=True)
        self._sockets = sockets = self._open_sockets(self.endpoint, self.replay_endpoint)
        self._reader = reader
        self.endpoint, self.replay_endpoint = sockets.endpoint, sockets.replay_endpoint
        self._start(self._publish(reader), "publish")
        if self.replay_endpoint is not None:
            self._start(sockets.answer(), "replay")
        logger.info("events.bound", endpoint=self.endpoint, replay_endpoint=self.replay_endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reader is not None
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.wait(self._tasks)
            await self._reader.aclose()
        finally:
            await self._sockets.aclose()

    def republish(self) -> None:
        """Send AllBlocksCleared and all that is held once more, for subscribers that have come late."""
        if self._reader is not None:
            self._reader.resync()

    def _start(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"hicache:events.{name}")
        task.add_done_callback(_report)
        self._tasks.append(task)

    async def _publish(self, reader: EventReader) -> None:
        try:
            async for event in reader:
                for batch in _batches(reader, event):
                    self._send(batch)
                    await asyncio.sleep(0)
        finally:
            self._send([NOTHING_HELD])

    def _send(self, batch: Sequence[KVEvent]) -> None:
        resets = any(isinstance(event, Gap) for event in batch)
        self._sockets.send(self._encoder.encode(time.time(), batch), resets=resets)


def _batches(reader: EventReader, first: KVEvent) -> Iterator[list[KVEvent]]:
    # What there is to read now, in messages of a bounded size.
    batch: list[KVEvent] = []
    num_tokens = 0
    event: KVEvent | None = first
    while event is not None:
        if isinstance(event, Cleared):
            # The public schema can only clear everything: what other prompts hold is told anew.
            reader.resync()
            event = reader.next_nowait()
            continue
        for part in parts_of(event, MAX_BATCH_TOKENS):
            batch.append(part)
            num_tokens += _num_tokens(part)
            if num_tokens >= MAX_BATCH_TOKENS:
                yield batch
                batch, num_tokens = [], 0
        event = reader.next_nowait()
    if batch:
        yield batch


def _num_tokens(event: KVEvent) -> int:
    # A removed page costs about as much as a token.
    if isinstance(event, Stored):
        return len(event.token_bytes) // TOKEN_NBYTES
    return len(event.hashes) if isinstance(event, Removed) else 1


def _report(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("events.failed", task=task.get_name(), error=repr(error), exc_info=error)
