"""Lossy stores: what comes from one never passes for what was computed."""

from __future__ import annotations

import pytest

from hicache_async import ConfigError
from hicache_async.core.codecs import check_dtype, is_lossless
from hicache_async.stores import CodecStore, Fp8, MemoryStore, Zstd
from tests.flows.rig import Opener, prefetched


@pytest.mark.parametrize(
    ("codec", "lossless"),
    [
        ("raw", True), ("zstd", True), ("aesgcm-3f2a90bc+zstd", True), ("zstd|raw", True),
        ("fp8_e4m3-bfloat16-128", False), ("fp8_e4m3-float32-128+zstd", False), ("of somebody else", False),
    ],
)  # fmt: skip
def test_which_codecs_are_lossless(codec: str, lossless: bool) -> None:
    """Those that are known to be; of any other it is not believed."""
    assert is_lossless(codec) is lossless


def test_elements_of_another_dtype_are_refused() -> None:
    """A codec that quantises float16 is none for bfloat16, and the message says what to give."""
    check_dtype("fp8_e4m3-bfloat16-128+zstd", "bfloat16")
    with pytest.raises(
        ConfigError, match=r"quantises float16, and the KV is bfloat16; give fp8_dtype=bfloat16"
    ):
        check_dtype("zstd|fp8_e4m3-float16-128", "bfloat16")


@pytest.mark.asyncio
async def test_a_cache_of_another_dtype_does_not_open(open_cache: Opener) -> None:
    """Its pages would come back as other numbers, without a word."""
    with pytest.raises(ConfigError, match="give fp8_dtype=float32"):
        await open_cache(store=CodecStore(MemoryStore(), Fp8("float16")))


@pytest.mark.asyncio
@pytest.mark.parametrize("outer", [Zstd(), Fp8("float32")], ids=["zstd", "fp8"])
async def test_a_lossy_codec_stands_outermost(outer: object) -> None:
    """It does not give back the frames of another one."""
    inner = CodecStore(MemoryStore(), Fp8("float32"))
    with pytest.raises(ConfigError, match=r"let the lossy one come first, as in fp8\+zstd\+URL"):
        CodecStore(inner, outer)  # type: ignore[arg-type]
    await inner.aclose()


@pytest.mark.asyncio
async def test_pages_of_a_lossy_store_go_to_no_exact_one(open_cache: Opener) -> None:
    """With such pages here another codec is refused and nothing changes; a clear makes it possible."""
    shared, exact = MemoryStore(), MemoryStore()
    first = await open_cache(store=CodecStore(shared, Fp8("float32")))
    await first.serve("abcd", prefetch=False)
    await first.cache.admin.flush()
    rig = await open_cache(store=CodecStore(shared, Fp8("float32")))
    found = await prefetched(rig, "abcd")
    assert found[1] > 0
    await rig.cache.admin.detach_store()
    with pytest.raises(
        ConfigError, match=r"pages here from a store with fp8_e4m3-float32-128.*clear\(\) first"
    ):
        await rig.cache.admin.attach_store(exact)
    assert await exact.list_keys() == ()
    await rig.cache.admin.clear()
    await rig.cache.admin.attach_store(exact)
    await rig.serve("efgh", prefetch=False)
    await rig.cache.admin.flush()
    assert len(await exact.list_keys()) > 1
