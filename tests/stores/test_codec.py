"""A codec store keeps frames: what comes back is what was written, or within its bound, or a miss with a reason."""

from __future__ import annotations

import asyncio
import base64
import os
import random
from collections.abc import Sequence

import pytest

from hicache_async.abc import SupportsStat
from hicache_async.errors import ConfigError
from hicache_async.stores import MemoryStore
from hicache_async.stores.codec import AesGcm, CodecStore, Fp8, Zstd
from hicache_async.stores.tiered import TieredStore
from hicache_async.testing.faults import StoreWrapper
from hicache_async.testing.manual import ManualThreads
from hicache_async.types import Stop, StopToken
from tests.stores.pages import CountingThreads, page_of, read, until, write
from tests.stores.wrappers import CODECS, KEY_ENV, LOSSLESS, Deleting, Telling, key_in_environment

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]
__all__ = ["key_in_environment"]


class Frames(MemoryStore):
    """A store whose objects the test may change."""

    def change(self, key: str, frame: bytes) -> None:
        self._objects[key] = frame
        self._used_s[key] = 1.0

    def frame(self, key: str) -> bytes:
        return self._objects[key]


async def read_reason(store: CodecStore, key: str, nbytes: int = 1000) -> Stop | None:
    """Read one object that must be a miss, and return why."""
    stop = StopToken()
    assert await store.read([key], [memoryview(bytearray(nbytes))], stop) == 0
    return stop.reason


# Names and sizes


async def test_a_store_says_how_it_encodes() -> None:
    """Outermost first; one key always has one name, another key another."""
    inner = CodecStore(MemoryStore(), Zstd(level=9))
    assert inner.codec == "zstd"
    assert CodecStore(MemoryStore(), Fp8("float16", block=64)).codec == "fp8_e4m3-float16-64"
    outer = CodecStore(inner, AesGcm(KEY_ENV))
    assert outer.codec == CodecStore(MemoryStore(), AesGcm(KEY_ENV)).codec + "+zstd"
    os.environ[KEY_ENV] = os.urandom(32).hex()
    assert CodecStore(inner, AesGcm(KEY_ENV)).codec != outer.codec


@pytest.mark.parametrize("name", CODECS)
async def test_sizes_are_those_of_pages(name: str) -> None:
    """stat() tells what was written, not what is stored; what cannot be an object of the codec is none."""
    frames = Frames()
    store = CodecStore(frames, CODECS[name]())
    assert isinstance(store, SupportsStat)
    sizes = [0, 2, 256, 1000, 65536]
    for nbytes in sizes:
        await store.write([f"page {nbytes}"], [memoryview(bytes(nbytes))])
    frames.change("foreign", b"short")
    stats = await store.stat([*(f"page {nbytes}" for nbytes in sizes), "foreign", "absent"])
    assert [stat and stat.nbytes for stat in stats] == [*sizes, None, None]
    assert stats[3] is not None and stats[3].modified_s > 0
    assert store._scratch.used_nbytes == 0


async def test_sizes_of_many_objects_with_holes() -> None:
    """Where frames are read for it, one that is gone by then costs no neighbour, and one too large is not read."""

    class Losing(Telling):
        async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
            for item, key in enumerate(keys):
                if key in ("3", "7") or await self.inner.read([key], into[item : item + 1], stop) == 0:
                    return item
            return len(keys)

    memory = MemoryStore()
    store = CodecStore(Losing(memory), Zstd(), scratch_bytes=10_000)
    keys = [str(number) for number in range(10)]
    await write(store, *keys)
    await write(memory, "huge", nbytes=10_001)
    assert isinstance(store, SupportsStat)
    stats = await store.stat([*keys, "huge"])
    assert [key for key, stat in zip([*keys, "huge"], stats, strict=True) if stat is None] == [
        "3",
        "7",
        "huge",
    ]


async def test_only_a_codec_of_varying_size_asks_for_sizes() -> None:
    """One stat for each read of zstd, however many batches, and none for the others."""
    for name in CODECS:
        inner = Telling(MemoryStore())
        store = CodecStore(inner, CODECS[name]())
        keys = [f"page {number}" for number in range(300)]
        await store.write(keys, [memoryview(bytes(64))] * 300)
        assert await store.read(keys, [memoryview(bytearray(64)) for _ in keys], StopToken()) == 300
        assert (
            inner.calls == {"write": 2, "read": 2, "stat": 1} if name == "zstd" else {"write": 2, "read": 2}
        )
        await store.aclose()


async def test_a_hop_for_each_batch() -> None:
    """600 pages are encoded and decoded in 3 jobs each, of at most 256 pages."""
    threads = CountingThreads()
    store = CodecStore(MemoryStore(), AesGcm(KEY_ENV), threads=threads)
    keys = [f"page {number}" for number in range(600)]
    await write(store, *keys)
    assert threads.num_jobs == 3
    assert await read(store, *keys) == 600
    assert threads.num_jobs == 6
    await store.aclose()
    assert threads.submit(int).result() == 0  # they stay their owner's
    threads.shutdown()


async def test_pages_that_do_not_compress_are_stored_as_they_are() -> None:
    """A frame is never larger than its page and the head; one that compresses is smaller."""
    frames = Frames()
    store = CodecStore(frames, Zstd())
    noise, zeros = os.urandom(4096), bytes(4096)
    await store.write(["noise", "zeros"], [memoryview(noise), memoryview(zeros)])
    assert len(frames.frame("noise")) == 48 + 4096 and frames.frame("noise").endswith(noise)
    assert len(frames.frame("zeros")) < 100
    assert store.stats["zstd_page_bytes"] == 8192
    assert store.stats["zstd_frame_bytes"] == frames.nbytes


async def test_manifests_are_stored_as_they_are() -> None:
    """Beside encoded pages in one call, and read back by who has another codec."""
    memory = MemoryStore()
    store = CodecStore(memory, AesGcm(KEY_ENV))
    assert await write(store, "a", "manifest_ukv1-0123456789abcdef", "b") == 3
    assert await read(store, "a", "manifest_ukv1-0123456789abcdef", "b") == 3
    other = CodecStore(memory, Zstd())
    assert await read(other, "manifest_ukv1-0123456789abcdef") == 1
    stats = await other.stat(["manifest_ukv1-0123456789abcdef"])  # type: ignore[attr-defined]
    assert stats[0].nbytes == 1000
    assert await read(memory, "manifest_ukv1-0123456789abcdef") == 1


@pytest.mark.parametrize("order", ["aesgcm zstd", "zstd aesgcm", "zstd zstd", "aesgcm aesgcm"])
async def test_codecs_nest(order: str) -> None:
    """In either order, with one stat more where the outer one needs it."""
    outer, inner = order.split()
    store = CodecStore(CodecStore(MemoryStore(), CODECS[inner]()), CODECS[outer]())
    assert await write(store, "a", "b", "c") == 3
    assert await read(store, "a", "b", "c") == 3
    stats = await store.stat(["b"])  # type: ignore[attr-defined]
    assert stats[0].nbytes == 1000
    await store.aclose()


async def test_a_codec_around_tiers() -> None:
    """Frames are read from whichever tier has them, their sizes too."""
    fast, slow = MemoryStore(), MemoryStore()
    await write(CodecStore(fast, Zstd()), "a", "c")
    await write(CodecStore(slow, Zstd()), "b", "c", "d")
    store = CodecStore(TieredStore(fast, slow), Zstd())
    assert await store.count_prefix(["a", "b", "c", "d"]) == 4
    assert await read(store, "a", "b", "c", "d") == 4
    await store.aclose()


# What is not what was written


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("shape", ["noise", "zeros"])
async def test_every_change_of_a_frame_is_a_miss(name: str, shape: str) -> None:
    """Whichever bit is flipped, whatever is cut off or added: no byte is served, and the reason is CORRUPT."""
    frames = Frames()
    store = CodecStore(frames, CODECS[name]())
    page = os.urandom(300) if shape == "noise" else bytes(300)
    await store.write(["a"], [memoryview(page)])
    frame = frames.frame("a")
    chosen = random.Random(1)
    changed = [frame[: chosen.randrange(len(frame))] for _ in range(10)] + [frame + b"x", b""]
    for at in {*range(60), *(chosen.randrange(len(frame)) for _ in range(60)), len(frame) - 1}:
        if at < len(frame):
            flipped = bytearray(frame)
            flipped[at] ^= 1 << chosen.randrange(8)
            changed.append(bytes(flipped))
    for each in changed:
        frames.change("a", each)
        reason = await read_reason(store, "a", 300)
        assert reason in (Stop.CORRUPT, Stop.VANISHED if len(each) != len(frame) else None)
    frames.change("a", frame)
    assert await store.read(["a"], [memoryview(bytearray(300))], StopToken()) == 1
    await store.aclose()


@pytest.mark.parametrize("name", CODECS)
async def test_an_object_under_another_key_is_a_miss(name: str) -> None:
    """Two objects that have changed places are found out, and cost no neighbour before them."""
    frames = Frames()
    store = CodecStore(frames, CODECS[name]())
    await store.write(["x", "a", "b"], [memoryview(bytes(1000))] * 3)
    a, b = frames.frame("a"), frames.frame("b")
    frames.change("a", b)
    frames.change("b", a)
    stop = StopToken()
    assert await store.read(["x", "a", "b"], [memoryview(bytearray(1000)) for _ in "xab"], stop) == 1
    assert stop.reason is Stop.CORRUPT
    assert store.stats[f"{CODECS[name]().family}_damaged"] == 1
    await store.aclose()


async def test_a_damaged_object_makes_room_for_a_good_one() -> None:
    """It is deleted, so that the next write is not taken for one of a key that is present."""
    frames = Frames()
    store = CodecStore(frames, AesGcm(KEY_ENV))
    await write(store, "a")
    frame = frames.frame("a")
    frames.change("a", frame[:-1] + bytes([frame[-1] ^ 1]))
    assert await read_reason(store, "a") is Stop.CORRUPT
    assert await frames.count_prefix(["a"]) == 0
    assert await write(store, "a") == 1
    assert await read(store, "a") == 1


async def test_objects_of_another_codec_or_key_are_left_alone() -> None:
    """They are a miss, counted as foreign, and stay for whoever can read them."""
    frames = Frames()
    store = CodecStore(frames, AesGcm(KEY_ENV))
    await write(store, "a")
    os.environ[KEY_ENV] = os.urandom(32).hex()
    other = CodecStore(frames, AesGcm(KEY_ENV))
    assert await read_reason(other, "a") is Stop.CORRUPT
    assert other.stats["aesgcm_foreign"] == 1
    plain = CodecStore(frames, Zstd())
    assert await read_reason(plain, "a", 2000) is Stop.CORRUPT
    assert await read(store, "a") == 1
    await write(frames, "raw", nbytes=2000)
    assert await read_reason(plain, "raw", 2000) is Stop.CORRUPT
    assert await frames.count_prefix(["raw"]) == 1
    for each in (store, other, plain):
        await each.aclose()


async def test_a_damaged_object_that_cannot_be_deleted_is_a_miss_all_the_same() -> None:
    """The read ends as if it could."""

    class Undeletable(Deleting):
        async def delete(self, keys: Sequence[str]) -> int:
            raise OSError("read-only")

    frames = Frames()
    await write(CodecStore(frames, AesGcm(KEY_ENV)), "a")
    frame = frames.frame("a")
    frames.change("a", frame[:-1] + bytes([frame[-1] ^ 1]))
    store = CodecStore(Undeletable(frames), AesGcm(KEY_ENV))
    assert await read_reason(store, "a") is Stop.CORRUPT
    assert (store.stats["aesgcm_damaged"], store.stats["aesgcm_undeletable"]) == (1, 1)
    await store.aclose()


async def test_what_cannot_be_a_frame_is_a_miss_of_the_store_inside_too() -> None:
    """One too large, or gone since it was counted, is asked for once, so that the store inside counts it no more."""
    Sizes.seen.clear()
    inner = Telling(Sizes(MemoryStore()))
    await write(inner, "large", nbytes=100_000)
    store = CodecStore(inner, Zstd())
    await write(store, "a")
    assert await read_reason(store, "large") is Stop.VANISHED  # as the store inside says
    assert await read_reason(store, "gone") is Stop.VANISHED
    assert await read(store, "a", "gone") == 1
    assert Sizes.seen == [1048, 1048, len(page_of("a")) + 48, 1048]
    silent = CodecStore(Telling(Silent(MemoryStore())), Zstd())
    await write(silent, "large", nbytes=100_000)
    assert await read_reason(silent, "large") is Stop.CORRUPT
    assert await read_reason(silent, "gone") is Stop.VANISHED
    assert silent.stats["zstd_length"] == 1 and silent._scratch.used_nbytes == 0


class Sizes(StoreWrapper):
    """Remember the sizes of all buffers."""

    seen: list[int] = []  # noqa: RUF012 - one test looks at it

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        self.seen += [buffer.nbytes for buffer in into]
        return await self.inner.read(keys, into, stop)


class Silent(StoreWrapper):
    """Never say why."""

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        return await self.inner.read(keys, into, StopToken())


# Scratch memory


async def test_scratch_memory_is_bounded() -> None:
    """Calls wait for it, the more urgent first, and a single page larger than all of it is still done."""
    threads = ManualThreads()
    memory = MemoryStore()
    async_writer = CodecStore(memory, AesGcm(KEY_ENV))
    await write(async_writer, *"abcd", nbytes=10_000)
    inner = Recording(memory)
    store = CodecStore(inner, AesGcm(KEY_ENV), threads=threads, scratch_bytes=11_000)
    stops = [StopToken(priority) for priority in (0, 0, 1, 2)]
    calls = [
        asyncio.ensure_future(store.read([key], [memoryview(bytearray(10_000))], stop))
        for key, stop in zip("abcd", stops, strict=True)
    ]
    for number in range(1, 5):
        await until(lambda: threads.pending == 1)
        assert len(inner.keys) == number
        threads.run_all()
        await until(lambda: sum(call.done() for call in calls) == number)  # noqa: B023 - used at once
    assert inner.keys == ["a", "d", "c", "b"]
    assert await asyncio.gather(*calls) == [1, 1, 1, 1]
    large = asyncio.ensure_future(write(store, "large", nbytes=50_000))
    await until(lambda: threads.pending == 1)
    assert store._scratch.used_nbytes == 11_000
    threads.run_all()
    assert await large == 1
    assert store._scratch.used_nbytes == 0


class Recording(StoreWrapper):
    """Remember which keys were read."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.keys: list[str] = []

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        self.keys += keys
        return await self.inner.read(keys, into, stop)


# Options


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Zstd(0), r"level is 0; give an integer 1 \.\. 22"),
        (lambda: Fp8("int8"), "dtype is 'int8'; give one of: bfloat16, float16, float32"),
        (lambda: Fp8(None), "dtype is None; give one of"),
        (lambda: Fp8("float16", block=8), r"block is 8; give an integer 16 \.\. 16384"),
        (lambda: CodecStore(MemoryStore(), Zstd(), num_threads=0), "num_threads is 0; give an integer"),
        (lambda: CodecStore(MemoryStore(), Zstd(), scratch_bytes=0), "scratch_bytes is 0; give an integer"),
    ],
)
async def test_an_option_that_cannot_work_is_refused(make: object, complaint: str) -> None:
    """By name, value and what would be right."""
    with pytest.raises(ConfigError, match=complaint):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (None, r"'HICACHE_TEST_KEY' holds no key of 32 bytes; make one by: python -c .*token_hex\(32\)"),
        ("  ", "holds no key of 32 bytes; make one by"),
        ("c0ffee" * 5, "holds a key of 15 bytes, expected 32 bytes; make one by"),
        ("!secret!" * 8, "holds neither hex nor base64, expected 32 bytes"),
    ],
)
async def test_a_key_that_cannot_work_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, value: str | None, complaint: str
) -> None:
    """The message says which variable, what it should hold and how to make one; never what it holds."""
    if value is None:
        monkeypatch.delenv(KEY_ENV)
    else:
        monkeypatch.setenv(KEY_ENV, value)
    with pytest.raises(ConfigError, match=complaint) as caught:
        AesGcm(KEY_ENV)
    assert value is None or not value.strip() or value[:6] not in str(caught.value)


async def test_a_key_may_be_hex_or_base64_and_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both name the same key, in upper or lower case and with the URL's alphabet too; no repr shows it."""
    key = b"\xfb\xff" + os.urandom(30)
    texts = [
        key.hex(),
        key.hex().upper(),
        base64.b64encode(key).decode(),
        base64.urlsafe_b64encode(key).decode(),
    ]
    names = set()
    for text in [*texts, texts[3].rstrip("=")]:
        monkeypatch.setenv(KEY_ENV, text)
        codec = AesGcm(KEY_ENV)
        names.add(codec.name)
        shown = f"{codec!r} {CodecStore(MemoryStore(), codec)!r}"
        assert not any(each[:8] in shown for each in texts)
    assert len(names) == 1


async def test_a_page_of_broken_elements_is_a_mistake_of_the_caller() -> None:
    """A page that is no whole number of elements is refused, before anything is stored."""
    store = CodecStore(MemoryStore(), Fp8("float32"))
    with pytest.raises(ConfigError, match="a page has 1001 bytes, no whole number of float32"):
        await store.write(["a"], [memoryview(page_of("a", 1001))])
    with pytest.raises(ConfigError, match="1001 bytes"):
        await store.read(["a"], [memoryview(bytearray(1001))], StopToken())
