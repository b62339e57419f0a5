"""Connection: a TCP connection that runs a conversation.

A conversation is a generator: it yields how many bytes it needs next and is sent exactly these. So what
is said stands in one place, top to bottom, and bytes are acted upon in the moment they arrive: none is left
in a buffer when the other side dies right behind it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Generator
from typing import cast

from ._frames import BadFrame, Cause, Frame, encode

Conversation = Generator[int, bytes, None]

MAX_UNREAD_NBYTES = 4 << 20
"""What may wait to be sent to one rank; who reads so little for so long is lost, and not waited for."""


class Refused(Exception):
    """The other side is not who it should be, or does not want this one."""


class Connection(asyncio.Protocol):
    """One end of a connection, a :class:`~hicache_async.ranks._roles.Link`. Nothing in it waits.

    Args:
        loop: where it lives.
        on_made: called when it is connected; it begins a conversation.

    Attributes:
        closed: resolves to None when nothing of it is left.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_made: Callable[[Connection], None]) -> None:
        self.closed: asyncio.Future[None] = loop.create_future()
        self._on_made = on_made
        self._on_end: Callable[[Cause], None] = lambda cause: None
        self._transport: asyncio.Transport | None = None
        self._conversation: Conversation | None = None
        self._num_wanted = 0
        self._buffer = bytearray()
        self._cause = Cause.EXITED

    def begin(self, conversation: Conversation, on_end: Callable[[Cause], None]) -> None:
        """Start a conversation; an earlier one has returned, or calls this and returns.

        Args:
            conversation: it may raise Refused or BadFrame, which cuts the connection.
            on_end: called when the connection has ended, with the reason.
        """
        self._on_end = on_end
        self._num_wanted = next(conversation)
        self._conversation = conversation

    def send(self, frame: Frame) -> None:
        """Queue a frame; one that has ended takes it and does nothing."""
        self.write(encode(frame))

    def write(self, data: bytes) -> None:
        """Queue bytes; who lets too many of them lie is cut off."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(data)
        if transport.get_write_buffer_size() > MAX_UNREAD_NBYTES:
            self._cut(Cause.NOT_READING)

    def close(self) -> None:
        """End it when what was written has gone out."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport over. Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop is none by class
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._on_made(self)

    def data_received(self, data: bytes) -> None:
        """Let the conversation go on. Called by the loop."""
        self._buffer += data
        while (conversation := self._conversation) is not None and len(self._buffer) >= self._num_wanted:
            chunk = bytes(self._buffer[: self._num_wanted])
            del self._buffer[: self._num_wanted]
            self._go_on(conversation, chunk)
        if self._buffer and self._conversation is None:  # it speaks out of turn
            self._cut(Cause.DISAGREES)

    def _go_on(self, conversation: Conversation, chunk: bytes) -> None:
        num_wanted = 0
        try:
            num_wanted = conversation.send(chunk)
            over = False
        except StopIteration:
            over = True
        except (BadFrame, Refused):
            self._cut(Cause.DISAGREES)
        if self._conversation is conversation:  # and has not begun another, or been cut
            self._num_wanted = num_wanted
            self._conversation = None if over else conversation

    def connection_lost(self, error: Exception | None) -> None:
        """Tell of the end. Called by the loop, once."""
        self._conversation = None
        self._on_end(self._cause)
        if not self.closed.done():
            self.closed.set_result(None)

    def _cut(self, cause: Cause) -> None:
        self._cause = cause
        self._conversation = None
        self._buffer.clear()
        self.abort()
