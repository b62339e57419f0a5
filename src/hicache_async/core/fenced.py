"""FencedPages: free pages that the device may still touch, each with one number for every stream it waits for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from .._fence import OrderedFence, parts
from ..abc import Fence
from ..types import Pages

_NO_PAGES: Pages = np.empty(0, dtype=np.int64)
_NO_TAG = int(np.iinfo(np.int64).min)
_sequence_of = itemgetter(0)


class FencedPages:
    """Free pages in the order in which they were freed, each here until the fences before it have passed.

    For each stream a page carries one number, the highest sequence that it waits for. A fence without a
    place on a stream is a stream of its own. Nothing is kept of a stream that no page waits for, so what
    this takes is bounded by the pages and the open fences, however many streams there have been.

    Attributes:
        num_pages: how many are here.
    Ownership: the pages are free; none may be added that is here.
    """

    __slots__ = ("_pages", "_start", "_streams", "num_pages")

    def __init__(self) -> None:
        # Pages and, of each stream, their tags lie in the same places, from _start on. Behind the last page
        # there are no tags.
        self._pages = _NO_PAGES
        self._start = 0
        self._streams: dict[object, _Stream] = {}
        self.num_pages = 0

    @property
    def _here(self) -> slice:
        return slice(self._start, self._start + self.num_pages)

    def add(self, pages: Pages, fence: Fence) -> None:
        """Put ``pages`` last, to wait for all that ``fence`` combines.

        No fence is asked: what has passed meanwhile is noticed by the next :meth:`drain`, as anything else.
        """
        if not len(pages):
            return
        if self._here.stop + len(pages) > len(self._pages):
            self._make_room(len(pages))
        added = slice(self._here.stop, self._here.stop + len(pages))
        self._pages[added] = pages
        self.num_pages += len(pages)
        for part in parts(fence):
            name: object = part
            sequence = 0
            if isinstance(part, OrderedFence):
                name, sequence, part = part.stream, part.sequence, part.ordering()
            if (stream := self._streams.get(name)) is None:
                stream = self._streams[name] = _Stream(len(self._pages))
            stream.tag(added, sequence, part)

    def drain(self) -> Pages:
        """Take out the pages whose fences have all passed, wherever they stand, in the order of their freeing.

        Of each stream it asks the fences that have passed and one more, and while none has, that is all.
        """
        if not sum(stream.forget_passed() for stream in self._streams.values()):
            return _NO_PAGES
        here, pages = self._here, self._pages[self._here]
        self._forget_streams()
        if not self._streams:
            self._start = self.num_pages = 0
            return pages.copy()
        waits = np.zeros(len(pages), dtype=np.bool_)
        for stream in self._streams.values():
            waits |= stream.waiting(here)
        self._pages = pages[waits]
        self._start, self.num_pages = 0, len(self._pages)
        for stream in self._streams.values():
            stream.keep(waits, here)
        self._forget_streams()
        return pages[~waits]

    def oldest(self, num_pages: int) -> tuple[Pages, list[Fence]]:
        """Return the 1 .. :attr:`num_pages` pages freed longest ago, and the open fences they wait for.

        The pages stay here. Of each stream there is at most one fence, the last.
        """
        first = slice(self._start, self._start + num_pages)
        needed = [stream.needed_by(first) for stream in self._streams.values()]
        return self._pages[first].copy(), [fence for fence in needed if fence is not None]

    def drop_oldest(self, num_pages: int) -> None:
        """Take out the ``num_pages`` pages freed longest ago."""
        self._start += num_pages
        self.num_pages -= num_pages
        self._forget_streams()
        if not self.num_pages:
            self._start = 0

    def _forget_streams(self) -> None:
        unneeded = [name for name, stream in self._streams.items() if not stream.is_needed(self._start)]
        for name in unneeded:
            del self._streams[name]

    def _make_room(self, num_pages: int) -> None:
        here, room = self._here, 2 * (self.num_pages + num_pages)  # by a share: pages are seldom moved
        self._pages = _moved_to_front(self._pages[here], room)
        for stream in self._streams.values():
            stream.make_room(room, here)
        self._start = 0


class _Stream:
    """One stream: which pages wait for it, and for which of its fences.

    Args:
        room: how many places there are for pages.
    """

    __slots__ = ("_end", "_fences", "_tags")

    def __init__(self, room: int) -> None:
        self._tags = np.full(room, _NO_TAG, dtype=np.int64)
        self._end = 0  # behind the last tag
        self._fences: list[tuple[int, Fence]] = []  # ascending; those not known to have passed

    def is_needed(self, start: int) -> bool:
        """Return whether a page from place ``start`` on waits for it."""
        return self._end > start and bool(self._fences)

    def tag(self, added: slice, sequence: int, fence: Fence) -> None:
        """Let the pages that come last wait for ``fence``, whose place on this stream is ``sequence``."""
        at = bisect_left(self._fences, sequence, key=_sequence_of)
        if at == len(self._fences) or self._fences[at][0] != sequence:
            self._fences.insert(at, (sequence, fence))
        if self._end == added.stop:  # a second fence of this stream, and they are all tagged alike
            sequence = max(sequence, int(self._tags[added.start]))
        self._tags[added] = sequence
        self._end = added.stop

    def forget_passed(self) -> int:
        """Drop the fences that have passed, and return how many.

        Only from the lowest on. A fence may be over before one below it, if what it stands for failed
        without being started; those below count all the same, for a page that waits for both carries
        the higher number alone.
        """
        num_passed = 0
        for _, fence in self._fences:
            if not fence.passed():
                break
            num_passed += 1
        del self._fences[:num_passed]
        return num_passed

    def waiting(self, here: slice) -> NDArray[np.bool_]:
        """Return which pages wait for an open fence. There is one."""
        return self._tags[here] >= self._fences[0][0]

    def needed_by(self, pages: slice) -> Fence | None:
        """Return the last open fence that one of ``pages`` waits for; None: they wait for none."""
        at = bisect_right(self._fences, np.maximum.reduce(self._tags[pages]), key=_sequence_of)
        while at and self._fences[at - 1][1].passed():  # the first is open, unless it failed early
            at -= 1
        return self._fences[at - 1][1] if at else None

    def keep(self, kept: NDArray[np.bool_], here: slice) -> None:
        """Keep the tags of those pages, from place 0 on."""
        self._tags = self._tags[here][kept]
        tagged = np.flatnonzero(self._tags != _NO_TAG)
        self._end = int(tagged[-1]) + 1 if len(tagged) else 0

    def make_room(self, room: int, here: slice) -> None:
        """Move the tags to places 0 on, of ``room``."""
        self._tags = _moved_to_front(self._tags[here], room)
        self._end -= here.start


def _moved_to_front(values: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    moved = np.full(room, _NO_TAG, dtype=np.int64)
    moved[: len(values)] = values
    return moved
