"""A close look at one object: whether it is good, gone, or bad, and how, while others may change the store."""

from __future__ import annotations

from typing import Final, NamedTuple

from ..abc import Store
from ..core.keys import namespace_of
from ..core.manifest import decode, is_manifest_key
from ..stores._codecs import Fault as FrameFault
from ..stores._files.object import Fault
from ..stores._slots.slots import SlotFault
from ..stores._wrapping import stats_of
from ..types import ObjectStat, Stop, StopToken
from ._inventory import stat_all

MAX_OBJECT_NBYTES = 1 << 30
"""What is larger is not read, for it has to be held in memory."""
MANIFEST_FAULT: Final = "manifest"
REMOVED: Final = "damaged, and removed by the store"
TOO_LARGE: Final = "too large to read"
_MAX_LOOKS = 4

DAMAGES = (
    *(Fault.CHECKSUM, Fault.SHORT, Fault.LONG, Fault.EMPTY, Fault.WRONG_KEY),
    *(SlotFault.ENTRY, FrameFault.DAMAGED),
)
"""Faults of an object that nobody can read."""
_UNCLEAR = (Fault.FOREIGN, FrameFault.LENGTH, Fault.SIZE)
"""What may be a good object of who reads it in another way: of another version, codec or size."""
_COUNTED = (*DAMAGES, *_UNCLEAR, Fault.NOT_A_FILE, Fault.UNREADABLE, Fault.MISSING)
"""What tells most first, where several stores, one in the other, count one read."""


class Look(NamedTuple):
    """What an object was found to be.

    Attributes:
        fault: what is wrong, as the store counts it; None: nothing.
        is_gone: there is no such object.
    """

    fault: str | None
    is_gone: bool = False

    @property
    def is_damage(self) -> bool:
        """Whether nobody can read it, so that nothing is lost with it."""
        return self.fault in (*DAMAGES, MANIFEST_FAULT)

    @property
    def is_unclear(self) -> bool:
        """Whether it may be good for who reads it in another way."""
        return self.fault in _UNCLEAR


async def look(store: Store, key: str, *, usual_nbytes: int | None = None, was_corrupt: bool = False) -> Look:
    """Return what is with one object, which is looked at again while it changes.

    To be called while nothing else reads from ``store``: its counts tell what is wrong.

    Args:
        usual_nbytes: what an object of a wrong length should have had, to tell how it is wrong.
        was_corrupt: a read has found it damaged before, so where it is gone the store has removed it.
    """
    fault: str | None = None
    for _ in range(_MAX_LOOKS):
        (before,) = await stat_all(store, [key])
        fault, is_corrupt = await _fault_of(store, key, before, usual_nbytes)
        if fault is None:
            return Look(None)
        (after,) = await stat_all(store, [key])
        was_corrupt |= is_corrupt
        if after is None and (before is not None or _is_miss(fault)):
            return Look(REMOVED if was_corrupt else None, is_gone=True)
        if _nbytes_of(before) == _nbytes_of(after) and not _is_miss(fault):
            break
    return Look(fault)


async def _fault_of(
    store: Store, key: str, stat: ObjectStat | None, usual_nbytes: int | None
) -> tuple[str | None, bool]:
    """Return what is wrong, and whether a buffer of the right size has found it damaged."""
    nbytes = 1 if stat is None else max(1, stat.nbytes)
    if nbytes > MAX_OBJECT_NBYTES:
        return f"{TOO_LARGE}: {nbytes:,} bytes", False
    fault, reason = await _read(store, key, nbytes)
    is_corrupt = stat is not None and reason is Stop.CORRUPT and fault not in _UNCLEAR
    if fault is None or fault == Fault.FOREIGN or usual_nbytes in (None, nbytes) or _is_miss(fault):
        return fault, is_corrupt
    again, reason = await _read(store, key, usual_nbytes)
    if again is None or (again in DAMAGES and again != fault):
        return again, is_corrupt or again is not None
    return fault, is_corrupt


async def _read(store: Store, key: str, nbytes: int) -> tuple[str | None, Stop | None]:
    buffer, before, stop = memoryview(bytearray(nbytes)), stats_of(store), StopToken()
    if await store.read([key], [buffer], stop) == 1:
        return (None if is_believed(key, buffer) else MANIFEST_FAULT), None
    after = stats_of(store)
    risen = [name for name, count in after.items() if count > before.get(name, 0)]
    for fault in _COUNTED:
        if any(_is_count_of(name, fault) for name in risen):
            return str(fault), stop.reason
    return str(stop.reason or "unreadable"), stop.reason


def num_damages(store: Store) -> int:
    """Return how many damaged objects ``store`` has found since it was opened, as far as it counts them."""
    counts = stats_of(store).items()
    return sum(count for name, count in counts if any(_is_count_of(name, fault) for fault in DAMAGES))


def _is_count_of(name: str, fault: str) -> bool:
    return name == fault or name.endswith(f"_{fault}")  # of a wrapper or a tier with its name before it


def is_believed(key: str, payload: memoryview) -> bool:
    """Return whether ``payload``, which was read right, is what ``key`` says, as far as one can tell."""
    return not is_manifest_key(key) or decode(namespace_of(key), payload) is not None


def _is_miss(fault: str) -> bool:
    return fault in (Fault.MISSING, Stop.VANISHED, SlotFault.REPLACED)


def _nbytes_of(stat: ObjectStat | None) -> int | None:
    return None if stat is None else stat.nbytes
