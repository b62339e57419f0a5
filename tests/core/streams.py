"""Streams whose work ends when the test says so, and fences on them that count how often they are asked."""

from __future__ import annotations

from collections import Counter

from hicache_async._fence import OrderedFence


class Streams:
    """Any number of streams.

    Attributes:
        ended: for each stream the number of fences, from sequence 0 on, that have passed.
        failed: places whose fences have passed before their turn, because what they stand for failed.
        asked: how often the fences of each stream were asked.
    """

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.failed: set[tuple[str, int]] = set()
        self.asked: Counter[str] = Counter()

    def fence(self, stream: str, sequence: int) -> StreamFence:
        """Return a fence at that place; where there is one already, another of the same meaning."""
        return StreamFence(self, stream, sequence)


class StreamFence(OrderedFence):
    """A fence that passes in its turn, or before it if it fails."""

    stream: str

    def __init__(self, streams: Streams, stream: str, sequence: int) -> None:
        super().__init__(stream, sequence)
        self.streams = streams

    def __repr__(self) -> str:
        return f"<StreamFence {self.stream} {self.sequence} {'open' if self.is_open else 'passed'}>"

    @property
    def is_open(self) -> bool:
        """Whether it has not passed; does not count as a question."""
        has_failed = (self.stream, self.sequence) in self.streams.failed
        return self.streams.ended[self.stream] <= self.sequence and not has_failed

    def fail(self) -> None:
        """Let it pass out of turn."""
        self.streams.failed.add((self.stream, self.sequence))

    def passed(self) -> bool:
        self.streams.asked[self.stream] += 1
        return not self.is_open

    def block(self, stream: object | None = None) -> None:
        assert not self.is_open, "nobody blocks on a fence here"
