"""NullStore keeps nothing."""

from __future__ import annotations

import pytest

from hicache_async.errors import ConfigError
from hicache_async.stores import NullStore, open_store
from hicache_async.types import StopToken

pytestmark = pytest.mark.asyncio


async def test_nothing_is_ever_there() -> None:
    """Every verb returns 0, before and after a write, and no buffer is touched."""
    store = NullStore()
    buffer = bytearray(b"before")
    for _ in range(2):
        assert await store.count_prefix(["a"]) == 0
        assert await store.read(["a"], [memoryview(buffer)], StopToken()) == 0
        assert await store.write(["a"], [memoryview(b"page")]) == 0
    assert buffer == b"before"
    await store.aclose()


async def test_it_opens_by_url() -> None:
    """null: opens one, and takes no option."""
    assert isinstance(open_store("null:"), NullStore)
    with pytest.raises(ConfigError, match="'size' is not an option.*options are: none"):
        open_store("null:?size=1")
