"""ReplayBuffer: the last messages of a publisher, for subscribers that missed some."""

from __future__ import annotations

from collections import deque


class ReplayBuffer:
    """Messages by their sequence number, bounded in number and in bytes; the newest is always kept.

    Args:
        max_steps, max_nbytes: how many messages, and bytes of them, are kept.
    """

    def __init__(self, max_steps: int, max_nbytes: int) -> None:
        self.max_steps = max_steps
        self._max_nbytes = max_nbytes
        self._messages: deque[tuple[int, bytes]] = deque()
        self._nbytes = 0
        self._last_reset = -1

    def __len__(self) -> int:
        return len(self._messages)

    def append(self, sequence: int, payload: bytes, *, resets: bool) -> None:
        """Keep one message.

        Args:
            resets: whether it makes those before it unnecessary.
        """
        self._messages.append((sequence, payload))
        self._nbytes += len(payload)
        if resets:
            self._last_reset = sequence
        while len(self) > 1 and (len(self) > self.max_steps or self._nbytes > self._max_nbytes):
            _, dropped = self._messages.popleft()
            self._nbytes -= len(dropped)

    def since(self, sequence: int) -> list[tuple[int, bytes]]:
        """Return the messages from ``sequence`` on, as far back as there are any."""
        return [message for message in self._messages if message[0] >= sequence]

    def tells_all_since(self, sequence: int) -> bool:
        """Whether who knows all before ``sequence`` knows all with the messages from there on."""
        oldest = self._messages[0][0] if self._messages else 0
        return oldest <= max(sequence, self._last_reset)
