"""CodecStore: objects are compressed, quantised or encrypted before another store gets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from ..abc import Store, SupportsCodec, SupportsDelete, SupportsStat
from ..core.codecs import is_quantised
from ..core.manifest import is_manifest_key
from ..errors import ConfigError, StoreUnavailable
from ..types import ObjectStat, Stop, StopToken
from ._buffers import check_buffers
from ._codecs import Codec, Fault, Head, tag_of
from ._codecs.aesgcm import AesGcm
from ._codecs.coding import Coding, Decoded, batches
from ._codecs.fp8 import Fp8
from ._codecs.scratch import Scratch
from ._codecs.zstd import Zstd
from ._wrapping import (
    FORWARDS,
    Mixins,
    PartToken,
    Wrapping,
    able,
    checked_count,
    checked_stats,
    kind_of,
    stats_of,
    without,
)

__all__ = ["AesGcm", "Codec", "CodecStore", "Fp8", "Zstd"]

DEFAULT_SCRATCH_BYTES = 64 << 20


class _Sizes(NamedTuple):
    """Bytes of the frames to read, up to the first that cannot be read, and why that one cannot."""

    frames: list[int]
    reason: Stop | None


class _Coded(Wrapping):
    """What the parts of a codec store share."""

    _codec: Codec
    _scratch: Scratch


class CodecStore(_Coded):
    """Keep in ``inner`` not pages but what a codec makes of them.

    Manifests are stored as they are, for readers without the codec. A frame that is not of this codec (and
    this key, where it encrypts), was changed or lies under another key is a miss with ``stop.reason`` CORRUPT;
    one of this codec that was damaged is deleted too, where ``inner`` can, for a present key is not rewritten.

    ``inner`` has to be told how many bytes to read. Where the codec's frames have a fixed size that is known,
    else (zstd) each read asks ``inner.stat`` first: one call more.

    It can do beside the four methods what ``inner`` can. ``stat`` tells the bytes of pages; where only the
    frame knows these it is read.

    Args:
        inner: the store to put frames into.
        codec: Zstd(), Fp8() or AesGcm().
        num_threads: of its own, in which pages are encoded and decoded; None: the number of cores, at most 4.
        scratch_bytes: frames held at once, by all calls together; calls wait for it, by priority.
        threads: where to encode and decode instead of in threads of its own; stays the caller's.

    Attributes:
        stats: what ``inner`` counts, and of its own "{family}_pages", "{family}_page_bytes" and
            "{family}_frame_bytes" written, and misses as "{family}_foreign", "_length" and "_damaged".

    Ownership: closing it closes ``inner``. The buffers of a read are filled by own threads only; they are free
        when the read has returned, or, where it was cancelled, when ``stop`` is quiet.
    Cancellation: of a read ends it at once, after the page in hand; of a write too, which until then still
        reads that page.
    Raises: ConfigError: an option that cannot work, or an ``inner`` that cannot tell sizes for zstd, or is lossy.
    """

    def __new__(cls, inner: Store, *args: Any, **options: Any) -> CodecStore:
        """Make the kind of store that can do what ``inner`` can."""
        return object.__new__(kind_of(cls, _MIXINS, able(inner)))

    def __init__(
        self,
        inner: Store,
        codec: Codec,
        *,
        num_threads: int | None = None,
        scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
        threads: Executor | None = None,
    ) -> None:
        if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
            raise ConfigError(
                f"num_threads is {num_threads!r}; give an integer >= 1, or None for the number of cores"
            )
        if not isinstance(scratch_bytes, int) or scratch_bytes < 1:
            raise ConfigError(f"scratch_bytes is {scratch_bytes!r}; give an integer >= 1")
        if codec.frame_nbytes(0) is None and not isinstance(inner, SupportsStat):
            raise ConfigError(
                f"codec {codec.name} needs a store that can tell the sizes of its objects; a "
                f"{type(inner).__name__} lacks {SupportsStat.__name__}"
            )
        if isinstance(inner, SupportsCodec) and is_quantised(inner.codec):
            raise ConfigError(
                f"codec {codec.name} stands before {inner.codec}, which does not give back the frames of others; let "
                "the lossy one come first, as in fp8+zstd+URL"
            )
        self.inner = inner
        self._codec = codec
        self._coding = Coding(codec, num_threads, threads)
        self._scratch = Scratch(scratch_bytes)
        self._counts: Counter[str] = Counter()
        self._closed = False

    def __repr__(self) -> str:
        return f"<CodecStore {self.codec} {self.inner!r}>"

    @property
    def codec(self) -> str:
        """How objects are encoded, outermost first, as "zstd" or "aesgcm-3f2a90bc+zstd"."""
        inside = f"+{self.inner.codec}" if isinstance(self.inner, SupportsCodec) else ""
        return self._codec.name + inside

    @property
    def stats(self) -> Counter[str]:
        """What ``inner`` counts and what is counted here, by name."""
        counts = Counter(stats_of(self.inner))
        counts.update(self._counts)
        return counts

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys exist, consecutive from ``keys[0]``."""
        return await self.inner.count_prefix(keys)

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Fill buffers with decoded pages, in order, and return how many, consecutive from 0.

        Raises: StoreUnavailable: the store was closed. Else what ``inner`` raised.
        Ownership, Cancellation: see the class.
        """
        self._check_open()
        keys, into = tuple(keys), tuple(into)
        check_buffers(keys, into, writable=True)
        stop.job_started()
        try:
            sizes = await self._frame_sizes(keys, into)
            count = 0
            for batch in batches(sizes.frames):
                if stop.stopped:
                    return count
                part = slice(batch.start, batch.stop)
                good = await self._read_batch(keys[part], into[part], sizes.frames[part], stop)
                count += good
                if good < len(batch):
                    return count
            if count < len(keys) and not stop.stopped:
                stop.reason = await self._reason_of_miss(keys[count], into[count].nbytes, sizes, stop)
            return count
        finally:
            stop.job_ended()

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Encode and store pages in order and return how many, consecutive from 0.

        Raises: StoreUnavailable: the store was closed. ConfigError: a page that the codec cannot take. Else
            what ``inner`` raised.
        """
        self._check_open()
        keys, pages = tuple(keys), tuple(pages)
        check_buffers(keys, pages, writable=False)
        sizes = [
            page.nbytes if is_manifest_key(key) else self._codec.max_frame_nbytes(page.nbytes)
            for key, page in zip(keys, pages, strict=True)
        ]
        count = 0
        for batch in batches(sizes):
            part = slice(batch.start, batch.stop)
            good = await self._write_batch(keys[part], pages[part], sum(sizes[part]))
            count += good
            if good < len(batch):
                break
        return count

    async def aclose(self) -> None:
        """Close ``inner`` and let the threads go; never waits for a hung operation."""
        self._closed = True
        self._scratch.close()
        self._coding.close()
        await self.inner.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store was closed; open another one")

    async def _frame_sizes(self, keys: Sequence[str], into: Sequence[memoryview]) -> _Sizes:
        fixed = [
            buffer.nbytes if is_manifest_key(key) else self._codec.frame_nbytes(buffer.nbytes)
            for key, buffer in zip(keys, into, strict=True)
        ]
        sizes: list[int] = []
        if None not in fixed:
            return _Sizes(cast("list[int]", fixed), None)
        stats = checked_stats(await cast("SupportsStat", self.inner).stat(keys), len(keys))
        for size, stat, buffer in zip(fixed, stats, into, strict=True):
            if stat is None:
                return _Sizes(sizes, Stop.VANISHED)
            if size is None and stat.nbytes > self._codec.max_frame_nbytes(buffer.nbytes):
                self._counts[f"{self._codec.family}_{Fault.LENGTH}"] += 1
                return _Sizes(sizes, Stop.CORRUPT)
            sizes.append(stat.nbytes if size is None else size)
        return _Sizes(sizes, None)

    async def _read_batch(
        self, keys: Sequence[str], into: Sequence[memoryview], sizes: Sequence[int], stop: StopToken
    ) -> int:
        part = PartToken(stop, shares_buffers=False)
        taken = await self._scratch.take(sum(sizes), stop)
        decoded = Decoded(0, None)
        try:
            if stop.stopped:
                return 0
            frames = new_frames(sizes)
            count = checked_count(await self.inner.read(keys, frames, part), len(keys))
            if count < len(keys):
                stop.reason = part.reason
            if count:
                tokens = (stop, part)
                decoded = await self._coding.decode(keys[:count], frames[:count], into[:count], tokens)
        finally:
            give_back_when_quiet(self._scratch, taken, part)
        if decoded.fault is not None:
            stop.reason = Stop.CORRUPT
            await self._note_fault(keys[decoded.num_pages], decoded.fault)
        return decoded.num_pages

    async def _reason_of_miss(
        self, key: str, page_nbytes: int, sizes: _Sizes, stop: StopToken
    ) -> Stop | None:
        # What cannot be the frame is asked for all the same, at its largest: so the store inside learns of its
        # miss, and stops counting the key, or removes what is damaged, as it does for its own readers.
        part = PartToken(stop, shares_buffers=False)
        taken = await self._scratch.take(self._codec.max_frame_nbytes(page_nbytes), stop)
        try:
            await self.inner.read([key], new_frames([self._codec.max_frame_nbytes(page_nbytes)]), part)
        finally:
            give_back_when_quiet(self._scratch, taken, part)
        return part.reason or sizes.reason

    async def _write_batch(self, keys: Sequence[str], pages: Sequence[memoryview], nbytes: int) -> int:
        stop = StopToken()
        taken = await self._scratch.take(nbytes, stop)
        try:
            frames = await self._coding.encode(keys, pages, stop)
            count = checked_count(await self.inner.write(keys, frames), len(keys))
        finally:
            give_back_when_quiet(self._scratch, taken, stop)
        for name, number in (
            ("pages", count),
            ("page_bytes", sum(page.nbytes for page in pages[:count])),
            ("frame_bytes", sum(frame.nbytes for frame in frames[:count])),
        ):
            self._counts[f"{self._codec.family}_{name}"] += number
        return count

    async def _note_fault(self, key: str, fault: Fault) -> None:
        family = self._codec.family
        self._counts[f"{family}_{fault}"] += 1
        if fault is Fault.DAMAGED and isinstance(self.inner, SupportsDelete):
            try:
                await self.inner.delete([key])
            except Exception:  # noqa: BLE001 - of a store of others; the read has been a miss already
                self._counts[f"{family}_undeletable"] += 1


class _Stats(_Coded):
    """Tell the bytes of pages, not of frames."""

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        """Return for each key what is known of its object; None: there is none, or it cannot be one.

        Where the size of a frame does not tell that of its page the object is read.
        """
        found = checked_stats(await cast("SupportsStat", self.inner).stat(keys), len(keys))
        stats = [
            stat
            if stat is None or is_manifest_key(key)
            else self._of_page(stat, self._codec.page_nbytes(stat.nbytes))
            for key, stat in zip(keys, found, strict=True)
        ]
        if self._codec.frame_nbytes(0) is None:
            unknown = [
                item for item, key in enumerate(keys) if found[item] is not None and not is_manifest_key(key)
            ]
            await self._read_heads(keys, found, unknown, stats)
        return stats

    @staticmethod
    def _of_page(stat: ObjectStat, nbytes: int | None) -> ObjectStat | None:
        return None if nbytes is None else ObjectStat(nbytes, stat.modified_s)

    async def _read_heads(
        self,
        keys: Sequence[str],
        found: Sequence[ObjectStat | None],
        unknown: Sequence[int],
        stats: list[ObjectStat | None],
    ) -> None:
        # A frame larger than all of the scratch is none that was written here.
        items = [item for item in unknown if _nbytes(found[item]) <= self._scratch.max_bytes]
        tag = tag_of(self._codec.name)
        for batch in batches([_nbytes(found[item]) for item in items]):
            rest = items[batch.start : batch.stop]
            while rest:
                frames = await self._read_frames([keys[i] for i in rest], [_nbytes(found[i]) for i in rest])
                for item, frame in zip(rest, frames, strict=False):
                    head = Head.of(frame)
                    known = found[item]
                    if known is not None and head is not None and head.tag == tag:
                        stats[item] = ObjectStat(head.nbytes, known.modified_s)
                rest = rest[len(frames) + 1 :]  # behind the one that could not be read

    async def _read_frames(self, keys: Sequence[str], sizes: Sequence[int]) -> list[memoryview]:
        stop = StopToken()
        taken = await self._scratch.take(sum(sizes), stop)
        try:
            frames = new_frames(sizes)
            return frames[: checked_count(await self.inner.read(keys, frames, stop), len(keys))]
        finally:
            stop.stop()
            give_back_when_quiet(self._scratch, taken, stop)


_MIXINS: Mixins = {**without(FORWARDS, [SupportsCodec]), SupportsStat: _Stats}


def new_frames(sizes: Sequence[int]) -> list[memoryview]:
    """Return room for frames of these sizes, from one piece of memory that has not been touched yet."""
    whole = np.empty(sum(sizes), np.uint8).data
    frames, start = [], 0
    for size in sizes:
        frames.append(whole[start : start + size])
        start += size
    return frames


def give_back_when_quiet(scratch: Scratch, taken: int, stop: StopToken) -> None:
    """Give scratch memory back, once no thread is in it."""
    if stop.busy:
        stop.when_quiet(partial(scratch.give_back, taken))
    else:
        scratch.give_back(taken)


def _nbytes(stat: ObjectStat | None) -> int:
    return 0 if stat is None else stat.nbytes
