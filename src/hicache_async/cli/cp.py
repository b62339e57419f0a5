"""``hicache cp``: copies the objects of one store to another, and can be run again to go on."""

from __future__ import annotations

from argparse import Namespace as Options
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..abc import Store
from ..core.codecs import codec_of
from ..core.manifest import is_manifest_key
from ..types import Stop, StopToken
from ._inventory import batches, keys_of, stat_all
from ._look import MAX_OBJECT_NBYTES, look
from ._opening import listing_of, opened, stating_of
from ._output import Output, counted, nbytes_text
from ._problem import FINE, FOUND

KEYS_A_BATCH = 64
MAX_TRIES = 3
COPY_NBYTES = 64 << 20
"""What is held in memory at most, but for a single larger object."""


@dataclass(slots=True)
class Copied:
    """What became of the objects.

    Attributes:
        num_present: those that were there already.
        num_gone: those that have left the source meanwhile, as they do from one in use.
        unreadable: keys that are bad in the source.
        refused: keys that the target did not take.
    """

    num_copied: int = 0
    nbytes: int = 0
    num_present: int = 0
    num_gone: int = 0
    unreadable: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


async def run(options: Options, output: Output) -> int:
    """Copy; returns the exit status."""
    async with (
        opened(options.source, read_only=True) as source,
        opened(options.target, read_only=False, must_exist=False) as target,
    ):
        listing = listing_of(source, "cp lists the keys of its source")
        stating_of(source, "cp needs to know how large objects are")
        _note_codecs(source, target, output)
        # Manifests first, so that those who find half of a copy know what it is.
        keys = sorted(await keys_of(listing, options.namespace), key=lambda key: not is_manifest_key(key))
        copied = Copied()
        with output.progress("copying", len(keys), " objects") as bar:
            for batch in batches(keys, KEYS_A_BATCH):
                missing = await _missing(target, batch)
                copied.num_present += len(batch) - len(missing)
                # What was replaced while it was read is good now.
                for _ in range(MAX_TRIES):
                    missing = await _copy(source, target, missing, copied)
                copied.unreadable += missing
                bar.update(len(batch))
                if copied.refused:
                    break
    return _report(options, copied, len(keys), output)


async def _missing(target: Store, keys: Sequence[str]) -> list[str]:
    missing: list[str] = []
    place = 0
    while place < len(keys):
        place += await target.count_prefix(keys[place:])
        missing += keys[place : place + 1]
        place += 1
    return missing


async def _copy(source: Store, target: Store, keys: Sequence[str], copied: Copied) -> list[str]:
    """Copy objects; returns the keys of those that could not be read and are good now."""
    stats = await stat_all(source, keys)
    sizes = {key: stat.nbytes for key, stat in zip(keys, stats, strict=True) if stat is not None}
    waiting = [key for key, nbytes in sizes.items() if nbytes <= MAX_OBJECT_NBYTES]
    suspects = {key: False for key in keys if key not in waiting}
    while waiting and not copied.refused:
        run, nbytes = waiting[:1], sizes[waiting[0]]
        for key in waiting[1:]:
            nbytes += sizes[key]
            if nbytes > COPY_NBYTES:
                break
            run.append(key)
        pages = [memoryview(bytearray(sizes[key])) for key in run]
        stop = StopToken()
        num_read = await source.read(run, pages, stop)
        num_written = await target.write(run[:num_read], pages[:num_read]) if num_read else 0
        copied.num_copied += num_written
        copied.nbytes += sum(page.nbytes for page in pages[:num_written])
        copied.refused += run[num_written:num_read]
        suspects.update((key, stop.reason is Stop.CORRUPT) for key in run[num_read : num_read + 1])
        waiting = waiting[min(num_read + 1, len(run)) :]
    return await _good_ones(source, suspects, copied)


async def _good_ones(source: Store, suspects: dict[str, bool], copied: Copied) -> list[str]:
    good: list[str] = []
    for key, was_corrupt in suspects.items():
        found = await look(source, key, was_corrupt=was_corrupt)
        if found.fault is not None:
            copied.unreadable.append(key)
        elif found.is_gone:
            copied.num_gone += 1
        else:
            good.append(key)
    return good


def _note_codecs(source: Store, target: Store, output: Output) -> None:
    # The codec is part of the namespace, and so of every key.
    codecs = [codec_of(source), codec_of(target)]
    if codecs[0] != codecs[1]:
        output.note(
            f"the source has codec {codecs[0]} and the target {codecs[1]}: objects keep their names, under which "
            f"only a cache that opens the target as {codecs[0]} looks for them"
        )


def _report(options: Options, copied: Copied, num_keys: int, output: Output) -> int:
    num_settled = copied.num_copied + copied.num_present + copied.num_gone + len(copied.unreadable)
    num_left = num_keys - num_settled
    document = {
        "source": options.source,
        "target": options.target,
        "objects": num_keys,
        "copied": copied.num_copied,
        "nbytes": copied.nbytes,
        "present": copied.num_present,
        "gone": copied.num_gone,
        "unreadable": copied.unreadable,
        "left": num_left,
    }
    gone = f"{copied.num_gone:,} gone meanwhile, " if copied.num_gone else ""
    lines = [
        f"{counted(num_keys, 'object')}: {copied.num_copied:,} copied ({nbytes_text(copied.nbytes)}), "
        f"{copied.num_present:,} were there, {gone}{len(copied.unreadable):,} unreadable, {num_left:,} left"
    ]
    lines += [f"unreadable: {key}" for key in copied.unreadable]
    output.document(document, lines)
    if num_left:
        output.note(
            "the target takes no more: give it room (its max_bytes, the disk) and run this again to go on"
        )
    if copied.unreadable:
        output.note("what is unreadable was not copied; hicache verify says what is wrong with it")
    return FOUND if num_left or copied.unreadable else FINE
