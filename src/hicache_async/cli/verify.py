"""``hicache verify``: reads and checks every object of a store."""

from __future__ import annotations

import asyncio
from argparse import Namespace as Options
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ..abc import Store
from ..core.codecs import codec_of
from ..core.keys import namespace_of
from ..core.manifest import MANIFEST_NBYTES, is_manifest_key
from ..stores.catalog import read_manifests
from ..types import Stop, StopToken
from ._inventory import KEYS_A_BATCH, batches, keys_of, stat_all
from ._look import MAX_OBJECT_NBYTES, REMOVED, Look, is_believed, look, num_damages
from ._opening import deleting_of, listing_of, opened, stating_of
from ._output import Output, Progress, counted, nbytes_text
from ._problem import FINE, FOUND

READ_NBYTES = 32 << 20
"""What one read brings at most, but for a single larger object; each job holds as much."""

Run = list[tuple[str, int]]
"""Keys, and the sizes of their objects, that one read brings."""

UNKNOWN = "unknown"
"""The codec of objects in a namespace without a manifest."""


@dataclass(slots=True)
class Checked:
    """What a pass over a store has found.

    Attributes:
        suspects: keys that were not read, or read and not believed, and whether a buffer of their size was found
            to be damaged; each is looked at once more, alone.
        sizes: of the good objects, by namespace.
    """

    num_objects: int = 0
    nbytes: int = 0
    suspects: dict[str, bool] = field(default_factory=dict)
    sizes: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def usual_nbytes(self, key: str) -> int | None:
        """Return the size that most good objects beside ``key`` have; None: there are none."""
        found = self.sizes[namespace_of(key)].most_common(1)
        return MANIFEST_NBYTES if is_manifest_key(key) else found[0][0] if found else None


class _Codecs:
    """Which objects a store can check: those that were written through its codec.

    Args:
        written: the codec of each namespace whose manifest says it.
    """

    def __init__(self, own: str, written: Mapping[str, str]) -> None:
        self._own = own
        self._written = written
        self.skipped: Counter[str] = Counter()

    def checked(self, keys: Sequence[str]) -> list[str]:
        """Return those of ``keys`` that are not of another codec, and count the others."""
        codecs = [self._own if is_manifest_key(key) else self._written.get(namespace_of(key)) for key in keys]
        self.skipped.update(codec for codec in codecs if codec is not None and codec != self._own)
        return [key for key, codec in zip(keys, codecs, strict=True) if codec in (self._own, None)]

    def skips(self, key: str, found: Look) -> bool:
        """Return whether an object may be good through a codec that is not known, and count it then."""
        if is_manifest_key(key) or namespace_of(key) in self._written or not found.is_unclear:
            return False
        self.skipped[UNKNOWN] += 1
        return True


async def run(options: Options, output: Output) -> int:
    """Check the store; returns the exit status."""
    digests = [] if options.namespace is None else [options.namespace]
    async with opened(options.store, read_only=True) as store:
        listing = listing_of(store, "verify lists the keys of a store")
        stating_of(store, "verify needs to know how large objects are")
        if options.delete:
            deleting_of(store, "verify --delete deletes objects")
        keys = await keys_of(listing, digests)
        codecs = await _codecs(store, keys)
        checked = await _check_all(store, codecs.checked(keys), options.jobs, output)
        bad = await _look_again(store, checked, codecs)
    num_deleted = await _delete(options.store, bad) if options.delete and bad else 0
    document = {
        "store": options.store,
        "objects": checked.num_objects,
        "nbytes": checked.nbytes,
        "bad": [{"key": key, "reason": found.fault} for key, found in bad.items()],
        "deleted": num_deleted,
        "skipped": dict(sorted(codecs.skipped.items())),
    }
    output.document(document, _text(checked, bad, codecs.skipped, num_deleted if options.delete else None))
    return FOUND if bad else FINE


async def _codecs(store: Store, keys: Sequence[str]) -> _Codecs:
    manifests = await read_manifests(store, sorted({namespace_of(key) for key in keys} - {""}))
    written = {digest: str(manifest.fields.get("codec")) for digest, manifest in manifests.items()}
    return _Codecs(codec_of(store), written)


async def _look_again(store: Store, checked: Checked, codecs: _Codecs) -> dict[str, Look]:
    bad: dict[str, Look] = {}
    for key, was_corrupt in sorted(checked.suspects.items()):
        usual_nbytes = checked.usual_nbytes(key)
        found = await look(store, key, usual_nbytes=usual_nbytes, was_corrupt=was_corrupt)
        if found.fault is None:
            continue
        if codecs.skips(key, found):
            checked.num_objects -= 1
        else:
            bad[key] = found
    return bad


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
        async with aclosing(_runs(store, keys, checked)) as runs:
            try:
                async with asyncio.TaskGroup() as jobs:
                    for _ in range(num_jobs):
                        jobs.create_task(work(runs, bar))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
    return checked


async def _runs(store: Store, keys: Sequence[str], checked: Checked) -> AsyncGenerator[Run]:
    for batch in batches(keys, KEYS_A_BATCH):
        num_damages_before = num_damages(store)
        stats = await stat_all(store, batch)
        # A codec reads to tell a size, and the store inside may remove what is found to be damaged then.
        has_damage = num_damages(store) > num_damages_before
        found, nbytes = Run(), 0
        for key, stat in zip(batch, stats, strict=True):
            if stat is None or stat.nbytes > MAX_OBJECT_NBYTES:
                checked.suspects[key] = stat is None and has_damage
                checked.num_objects += 1
                continue
            size = max(1, stat.nbytes)
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
        stop = StopToken()
        count = await store.read(keys[place:], buffers[place:], stop)
        for key, buffer in zip(keys[place : place + count], buffers[place:], strict=False):
            checked.nbytes += buffer.nbytes
            if not is_believed(key, buffer):
                checked.suspects[key] = False
            elif not is_manifest_key(key):
                checked.sizes[namespace_of(key)][buffer.nbytes] += 1
        for key in keys[place + count : place + count + 1]:
            checked.suspects[key] = stop.reason is Stop.CORRUPT
        place += count + 1
    checked.num_objects += len(run)


async def _delete(name: str, bad: Mapping[str, Look]) -> int:
    # Each is read again by a store that may write: what is good by now, since somebody stored it anew, stays. One
    # that may be good for others is not even read, for such a store may remove it.
    num_deleted = 0
    async with opened(name, read_only=False, limited=False) as store:
        deleting = deleting_of(store, "verify --delete deletes objects")
        for key in (key for key, found in bad.items() if found.is_damage):
            found = await look(store, key)
            if found.is_damage:
                await deleting.delete([key])
            num_deleted += found.is_damage or found.fault == REMOVED
    return num_deleted


def _text(
    checked: Checked, bad: Mapping[str, Look], skipped: Mapping[str, int], num_deleted: int | None
) -> Iterator[str]:
    found = counted(len(bad), "bad object") if bad else "all good"
    yield f"{counted(checked.num_objects, 'object')} checked, {nbytes_text(checked.nbytes)} read: {found}"
    for reason in sorted({str(each.fault) for each in bad.values()}):
        keys = [key for key, each in bad.items() if each.fault == reason]
        yield f"{reason}: {counted(len(keys), 'object')}"
        yield from (f"    {key}" for key in keys)
    for codec, count in sorted(skipped.items()):
        how = "of a codec that is not known" if codec == UNKNOWN else f"of codec {codec}"
        yield f"skipped: {counted(count, 'object')} {how}; open the store as the cache that wrote them to check those"
    yield from _what_was_done(bad, num_deleted)


def _what_was_done(bad: Mapping[str, Look], num_deleted: int | None) -> Iterator[str]:
    num_removed = sum(found.fault == REMOVED for found in bad.values())
    if bad and num_deleted is not None:
        yield f"{counted(num_deleted, 'bad object')} deleted"
        if num_deleted + num_removed < len(bad):
            yield "what may be good for others, or cannot be read at all, was left; hicache rm and gc delete it"
    elif len(bad) > num_removed:
        yield "nothing was changed: a cache takes a bad object for a missing one; --delete removes what is damaged"
