"""``hicache verify``: reads and checks every object of a store."""

from __future__ import annotations

import asyncio
from argparse import Namespace as Options
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ..abc import Store, SupportsStats
from ..core.keys import namespace_of
from ..core.manifest import MANIFEST_NBYTES, decode, is_manifest_key
from ..stores._files.object import Fault
from ..types import Stop, StopToken
from ._inventory import KEYS_A_BATCH, batches, keys_of, stat_all
from ._opening import deleting_of, listing_of, opened, stating_of
from ._output import Output, Progress, counted, nbytes_text
from ._problem import FINE, FOUND

READ_NBYTES = 32 << 20
"""What one read brings at most, but for a single larger object; each job holds as much."""

Run = list[tuple[str, int]]
"""Keys, and the sizes of their objects, that one read brings."""


@dataclass(slots=True)
class Checked:
    """What a pass over a store has found.

    Attributes:
        suspects: keys that were not read, or read and not believed; each is looked at once more, alone.
        sizes: of the good objects, by namespace.
    """

    num_objects: int = 0
    nbytes: int = 0
    suspects: list[str] = field(default_factory=list)
    sizes: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def usual_nbytes(self, key: str) -> int | None:
        """Return the size that most good objects beside ``key`` have; None: there are none."""
        found = self.sizes[namespace_of(key)].most_common(1)
        return MANIFEST_NBYTES if is_manifest_key(key) else found[0][0] if found else None


async def run(options: Options, output: Output) -> int:
    """Check the store; returns the exit status."""
    digests = [] if options.namespace is None else [options.namespace]
    async with opened(options.store, read_only=True) as store:
        listing = listing_of(store, "verify lists the keys of a store")
        stating_of(store, "verify needs to know how large objects are")
        if options.delete:
            deleting_of(store, "verify --delete deletes objects")
        checked = await _check_all(store, await keys_of(listing, digests), options.jobs, output)
        found = {
            key: await _fault_of(store, key, checked.usual_nbytes(key)) for key in sorted(checked.suspects)
        }
    bad = {key: fault for key, fault in found.items() if fault is not None}
    num_deleted = await _delete(options.store, bad) if options.delete and bad else 0
    document = {
        "store": options.store,
        "objects": checked.num_objects,
        "nbytes": checked.nbytes,
        "bad": [{"key": key, "reason": reason} for key, reason in bad.items()],
        "deleted": num_deleted,
    }
    output.document(document, _text(checked, bad, num_deleted, deletes=options.delete))
    return FOUND if bad else FINE


async def _check_all(store: Store, keys: Sequence[str], num_jobs: int, output: Output) -> Checked:
    checked = Checked()
    turn = asyncio.Lock()

    async def work(runs: AsyncIterator[Run], bar: Progress) -> None:
        # All jobs take from one generator, which asks for sizes as it goes, so memory stays bounded.
        while True:
            async with turn:
                keys_and_sizes = await anext(runs, None)
            if keys_and_sizes is None:
                return
            await _check(store, keys_and_sizes, checked)
            bar.update(len(keys_and_sizes))

    with output.progress("checking", len(keys), " objects") as bar:
        async with aclosing(_runs(store, keys)) as runs:
            try:
                async with asyncio.TaskGroup() as jobs:
                    for _ in range(num_jobs):
                        jobs.create_task(work(runs, bar))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
    return checked


async def _runs(store: Store, keys: Sequence[str]) -> AsyncGenerator[Run]:
    for batch in batches(keys, KEYS_A_BATCH):
        found, nbytes = Run(), 0
        for key, stat in zip(batch, await stat_all(store, batch), strict=True):
            # What has no size cannot be an object; reading it says why.
            size = 1 if stat is None else max(1, stat.nbytes)
            if found and nbytes + size > READ_NBYTES:
                yield found
                found, nbytes = [], 0
            found.append((key, size))
            nbytes += size
        yield found


async def _check(store: Store, run: Run, checked: Checked) -> None:
    buffers = [memoryview(bytearray(size)) for _, size in run]
    keys = [key for key, _ in run]
    place = 0
    while place < len(keys):
        count = await store.read(keys[place:], buffers[place:], StopToken())
        for key, buffer in zip(keys[place : place + count], buffers[place:], strict=False):
            checked.nbytes += buffer.nbytes
            if not _is_believed(key, buffer):
                checked.suspects.append(key)
            elif not is_manifest_key(key):
                checked.sizes[namespace_of(key)][buffer.nbytes] += 1
        checked.suspects += keys[place + count : place + count + 1]
        place += count + 1
    checked.num_objects += len(keys)


def _is_believed(key: str, payload: memoryview) -> bool:
    return not is_manifest_key(key) or decode(namespace_of(key), payload) is not None


async def _fault_of(store: Store, key: str, usual_nbytes: int | None = None) -> str | None:
    """Return what is wrong with one object, as the store counts it; None: nothing, or it is gone by now.

    To be called while nothing else reads from ``store``.

    Args:
        usual_nbytes: what an object of a wrong length should have had, to tell how it is wrong.
    """
    (stat,) = await stat_all(store, [key])
    nbytes = 1 if stat is None else stat.nbytes
    fault = await _read_alone(store, key, nbytes)
    if fault in (None, Fault.MISSING) or (stat is None and fault == Stop.VANISHED):
        return None
    if usual_nbytes not in (None, nbytes):
        fault = await _read_alone(store, key, usual_nbytes) or fault
    return fault


async def _read_alone(store: Store, key: str, nbytes: int) -> str | None:
    buffer, before, stop = memoryview(bytearray(max(1, nbytes))), _counts(store), StopToken()
    if await store.read([key], [buffer], stop) == 1:
        return None if _is_believed(key, buffer) else "manifest"
    after = _counts(store)
    risen = [str(fault) for fault in Fault if after.get(fault, 0) > before.get(fault, 0)]
    return risen[0] if risen else str(stop.reason or "unreadable")


def _counts(store: Store) -> dict[str, int]:
    return dict(store.stats) if isinstance(store, SupportsStats) else {}


async def _delete(name: str, bad: Mapping[str, str]) -> int:
    # Each is read again by a store that may write: what is good by now, since somebody stored it anew, stays.
    num_deleted = 0
    async with opened(name, read_only=False) as store:
        deleting = deleting_of(store, "verify --delete deletes objects")
        for key in bad:
            if await _fault_of(store, key) is not None:
                await deleting.delete([key])
                num_deleted += 1
    return num_deleted


def _text(checked: Checked, bad: Mapping[str, str], num_deleted: int, *, deletes: bool) -> Iterator[str]:
    found = counted(len(bad), "bad object") if bad else "all good"
    yield f"{counted(checked.num_objects, 'object')} checked, {nbytes_text(checked.nbytes)} read: {found}"
    for reason in sorted(set(bad.values())):
        keys = [key for key, each in bad.items() if each == reason]
        yield f"{reason}: {counted(len(keys), 'object')}"
        yield from (f"    {key}" for key in keys)
    if bad and deletes:
        yield f"{counted(num_deleted, 'bad object')} deleted"
    elif bad:
        yield "nothing was changed: a cache takes a bad object for a missing one; --delete removes them"
