"""``hicache cp``: copies the objects of one store to another, and can be run again to go on."""

from __future__ import annotations

from argparse import Namespace as Options
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..abc import Store, SupportsCodec
from ..types import StopToken
from ._inventory import batches, keys_of
from ._opening import listing_of, opened, stating_of
from ._output import Output, counted, nbytes_text
from ._problem import FINE, FOUND

KEYS_A_BATCH = 64
COPY_NBYTES = 64 << 20
"""What is held in memory at most, but for a single larger object."""


@dataclass(slots=True)
class Copied:
    """What became of the objects.

    Attributes:
        num_present: those that were there already.
        unreadable: keys that are bad in the source, or gone.
        refused: keys that the target did not take.
    """

    num_copied: int = 0
    nbytes: int = 0
    num_present: int = 0
    unreadable: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


async def run(options: Options, output: Output) -> int:
    """Copy; returns the exit status."""
    async with (
        opened(options.source, read_only=True) as source,
        opened(options.target, read_only=False, must_exist=False) as target,
    ):
        listing = listing_of(source, "cp lists the keys of its source")
        stating = stating_of(source, "cp needs to know how large objects are")
        _note_codecs(source, target, output)
        keys = await keys_of(listing, options.namespace)
        copied = Copied()
        with output.progress("copying", len(keys), " objects") as bar:
            for batch in batches(keys, KEYS_A_BATCH):
                missing = await _missing(target, batch)
                copied.num_present += len(batch) - len(missing)
                stats = await stating.stat(missing)
                sizes = {
                    key: stat.nbytes for key, stat in zip(missing, stats, strict=True) if stat is not None
                }
                copied.unreadable += [key for key in missing if key not in sizes]
                await _copy(source, target, sizes, copied)
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


async def _copy(source: Store, target: Store, sizes: dict[str, int], copied: Copied) -> None:
    waiting = list(sizes)
    while waiting and not copied.refused:
        run, nbytes = waiting[:1], sizes[waiting[0]]
        for key in waiting[1:]:
            nbytes += sizes[key]
            if nbytes > COPY_NBYTES:
                break
            run.append(key)
        pages = [memoryview(bytearray(sizes[key])) for key in run]
        num_read = await source.read(run, pages, StopToken())
        num_written = await target.write(run[:num_read], pages[:num_read]) if num_read else 0
        copied.num_copied += num_written
        copied.nbytes += sum(page.nbytes for page in pages[:num_written])
        copied.refused += run[num_written:num_read]
        copied.unreadable += run[num_read : num_read + 1]
        waiting = waiting[min(num_read + 1, len(run)) :]


def _note_codecs(source: Store, target: Store, output: Output) -> None:
    # The codec is part of the namespace, and so of every key.
    codecs = [store.codec if isinstance(store, SupportsCodec) else "raw" for store in (source, target)]
    if codecs[0] != codecs[1]:
        output.note(
            f"the source has codec {codecs[0]} and the target {codecs[1]}: objects keep their names, under which "
            f"only a cache that opens the target as {codecs[0]} looks for them"
        )


def _report(options: Options, copied: Copied, num_keys: int, output: Output) -> int:
    num_left = num_keys - copied.num_copied - copied.num_present - len(copied.unreadable)
    document = {
        "source": options.source,
        "target": options.target,
        "objects": num_keys,
        "copied": copied.num_copied,
        "nbytes": copied.nbytes,
        "present": copied.num_present,
        "unreadable": copied.unreadable,
        "left": num_left,
    }
    lines = [
        f"{counted(num_keys, 'object')}: {copied.num_copied:,} copied ({nbytes_text(copied.nbytes)}), "
        f"{copied.num_present:,} were there, {len(copied.unreadable):,} unreadable, {num_left:,} left"
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
