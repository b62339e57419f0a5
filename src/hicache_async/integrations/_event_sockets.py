"""EventSockets: numbered messages over a ZeroMQ PUB socket, and again over a ROUTER socket for who missed some.

Frames of a message: ``[topic, sequence number, payload]``; numbers are 8 bytes, big-endian. A subscriber asks
with ``[empty, first number]`` (what a REQ socket sends for the number alone) and is answered with
``[empty, topic, number, payload]`` for each message from there on and, at the end, number -1 and no payload.
The older public form has no topic frame in answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from .._log import logger
from ..errors import ConfigError
from ._replay import ReplayBuffer

try:
    import zmq
    import zmq.asyncio
except ImportError as error:
    raise ConfigError(
        "KV events over ZeroMQ need pyzmq, which is not installed: pip install 'hicache-async[events]'"
    ) from error

REPLAYS_PER_TURN = 64
"""Messages that are sent again before the loop goes on."""

LINGER_MS = 1000
"""How long closing lets subscribers take what was sent last."""

END_OF_REPLAY = -1


class EventSockets:
    """The sockets of one publisher. Sending never waits: who is slow misses messages, and may ask again.

    Args:
        endpoint, replay_endpoint: where to bind; None: no replays.
        topic: the first frame of a message; ``replay_topic``: whether it is in answers, too.
        buffer: what can be sent again.
        high_water_mark: messages that wait for one subscriber before it misses some.
        on_lost: called when a subscriber asks for what is not in the buffer any more.
    Raises: ConfigError: an endpoint that cannot be bound; nothing is left open.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        topic: bytes,
        replay_topic: bool,
        buffer: ReplayBuffer,
        high_water_mark: int,
        on_lost: Callable[[], None],
    ) -> None:
        self._topic = topic
        self._replay_topic = [topic] if replay_topic else []
        self._end_topic = [b""] if replay_topic else []
        self._buffer = buffer
        self._on_lost = on_lost
        self._sequence = 0
        # Queues are bounded, and what does not fit is dropped: neither type of socket ever waits. That of
        # answers takes a whole one; twice as much, for what was taken out is accounted for by halves.
        self._context = zmq.Context()
        self._publishing = self._context.socket(zmq.PUB)
        self._publishing.set_hwm(high_water_mark)
        self._replaying = zmq.asyncio.Socket(self._context, zmq.ROUTER)
        self._replaying.sndhwm = 2 * (buffer.max_steps + 1)
        self.replay_endpoint = replay_endpoint
        try:
            self.endpoint = _bind(self._publishing, "endpoint", endpoint)
            if replay_endpoint is not None:
                self.replay_endpoint = _bind(self._replaying, "replay_endpoint", replay_endpoint)
        except BaseException:
            self._close_sockets(linger_ms=0)
            self._context.term()
            raise

    def send(self, payload: bytes, *, resets: bool) -> None:
        """Send one message to all who subscribe.

        Args:
            resets: whether it makes those before it unnecessary.
        """
        number = self._sequence.to_bytes(8, "big")
        self._publishing.send_multipart((self._topic, number, payload), zmq.DONTWAIT)
        if self.replay_endpoint is not None:
            self._buffer.append(self._sequence, payload, resets=resets)
        self._sequence += 1

    async def answer(self) -> None:
        """Send again what subscribers ask for; ends by a cancel."""
        while True:
            frames = await self._replaying.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("events.replay_refused", frame_nbytes=[len(frame) for frame in frames])
                continue
            identity, empty, first = frames
            await self._replay([identity, empty], int.from_bytes(first, "big"))

    async def _replay(self, address: list[bytes], first: int) -> None:
        if not self._buffer.tells_all_since(first):
            self._on_lost()
        for count, (sequence, payload) in enumerate(self._buffer.since(first), start=1):
            number = sequence.to_bytes(8, "big")
            await self._replaying.send_multipart([*address, *self._replay_topic, number, payload])
            if count % REPLAYS_PER_TURN == 0:
                await asyncio.sleep(0)
        end = END_OF_REPLAY.to_bytes(8, "big", signed=True)
        await self._replaying.send_multipart([*address, *self._end_topic, end, b""])

    async def aclose(self) -> None:
        """Close the sockets; subscribers have a moment to take what was sent last.

        Cancellation: does not wait for them any more.
        """
        self._close_sockets(linger_ms=LINGER_MS)
        await asyncio.to_thread(self._context.term)

    def _close_sockets(self, *, linger_ms: int) -> None:
        self._publishing.close(linger_ms)
        self._replaying.close(0)


def _bind(socket: zmq.Socket[Any], name: str, endpoint: str) -> str:
    if not endpoint.startswith(("tcp://", "ipc://")):
        raise ConfigError(f"{name} is {endpoint!r}; give tcp://host:port, tcp://host:* or ipc://path")
    socket.ipv6 = endpoint.startswith("tcp://[")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{name} {endpoint!r} cannot be bound: {error}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
