"""The store that is examined: how it is opened, and what is declared of it."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ...abc import Store
from ...errors import ConfigError
from ..leaks import LeakChecks

OpenStore: TypeAlias = Callable[[Path], "Store | Awaitable[Store]"]
"""Open a store in a directory, which exists and is its own; the same one again after a restart."""

OpenBounded: TypeAlias = Callable[[Path, int], "Store | Awaitable[Store]"]
"""The same for a store that keeps at most so many bytes."""


class Damage(enum.StrEnum):
    """What may become of the bytes of an object that lies on some medium."""

    FLIP_FIRST = "flip_first"
    """Another bit in the first byte."""
    FLIP_MIDDLE = "flip_middle"
    FLIP_LAST = "flip_last"
    ZEROS = "zeros"
    """All zero, of the same length, as blocks that were never written."""
    CUT = "cut"
    """The second half is missing."""
    EXTEND = "extend"
    """A byte too many."""
    EMPTY = "empty"
    DIRECTORY = "directory"
    """A directory of that name instead of a file."""
    SWAP = "swap"
    """All bytes are those of another key, as whole as they are."""


DamageObject: TypeAlias = Callable[[Path, str, Damage, str], bool]
"""Damage the object of a key in the store of a directory; the last argument is the key to swap with.

Returns False where objects of this store cannot be damaged so.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A store to be examined.

    Args:
        open: opens it; called with a directory that exists and is its own, often, and from other loops.
        open_bounded: the same with a limit in bytes of pages; None: it has none.
        damage: reaches its bytes behind its back; None: nobody can.
        discard: called with each directory that is not used any more, to clear away what lies outside of it.
        keeps: whether it keeps anything at all.
        persists: whether it is found again when it was closed and is opened in the same directory.
        shared: whether two instances in one directory see each other.
        processes: whether two processes may have it open at once.
        lossy: whether pages may come back as other bytes. The exam writes 16-bit floats of one magnitude then,
            which a quantisation gives back as they were.
        object_nbytes: sizes of the objects that are written, ascending.
        batch_nbytes: how much one call writes at most.
        rounds: how often races are run, cancels are tried and processes are killed.
        leaks: what must not be left behind.
        patience_s: how long one check may take.
    Raises: ConfigError: facts that cannot be.
    """

    open: OpenStore
    open_bounded: OpenBounded | None = None
    damage: DamageObject | None = None
    discard: Callable[[Path], None] | None = None
    keeps: bool = True
    persists: bool = False
    shared: bool = False
    processes: bool = False
    lossy: bool = False
    object_nbytes: Sequence[int] = (4096, 1 << 18)
    batch_nbytes: int = 64 << 20
    rounds: int = 1
    leaks: LeakChecks = field(default_factory=LeakChecks)
    patience_s: float = 30.0

    def __post_init__(self) -> None:
        if self.processes and not self.shared:
            raise ConfigError(
                "processes is True and shared is False; what two processes may use two instances may, too"
            )
        sizes = list(self.object_nbytes)
        if not sizes or sizes != sorted(sizes) or sizes[0] < 64:
            raise ConfigError(f"object_nbytes is {sizes}; give sizes of 64 bytes or more, ascending")
        if self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds!r}; give an integer >= 1")

    @property
    def small(self) -> int:
        """Bytes of the smallest object."""
        return self.object_nbytes[0]

    @property
    def large(self) -> int:
        """Bytes of the largest object."""
        return self.object_nbytes[-1]

    @property
    def step(self) -> int:
        """By how many bytes a wrong length is wrong: a quantisation takes whole elements only."""
        return 64 if self.lossy else 1

    async def opened(self, directory: Path) -> Store:
        """Open it in ``directory``."""
        return await _awaited(self.open(directory))

    async def opened_bounded(self, directory: Path, max_bytes: int) -> Store:
        """Open it in ``directory`` with a limit."""
        assert self.open_bounded is not None
        return await _awaited(self.open_bounded(directory, max_bytes))


async def _awaited(store: Store | Awaitable[Store]) -> Store:
    if inspect.isawaitable(store):
        return await store
    return store


def damage_file(path: Path, how: Damage, other: Path) -> bool:
    """Damage the file ``path``, which is a whole object; the file ``other`` is that of another key.

    It is a hook's whole body where each object is a file: ``return damage_file(self.path(key), how, ...)``.
    """
    content = path.read_bytes()
    match how:
        case Damage.DIRECTORY:
            path.unlink()
            path.mkdir()
        case Damage.SWAP:
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
        case _:
            path.write_bytes(damaged_bytes(content, how))
    return True


def damaged_bytes(content: bytes, how: Damage) -> bytes:
    """Return what becomes of ``content``; not for DIRECTORY and SWAP."""
    flips = {Damage.FLIP_FIRST: 0, Damage.FLIP_MIDDLE: len(content) // 2, Damage.FLIP_LAST: -1}
    if how in flips:
        flipped = bytearray(content)
        flipped[flips[how]] ^= 0x40
        return bytes(flipped)
    return {
        Damage.ZEROS: bytes(len(content)),
        Damage.CUT: content[: len(content) // 2],
        Damage.EXTEND: content + b"\0",
        Damage.EMPTY: b"",
    }[how]
