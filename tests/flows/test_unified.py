"""Pages of many chunks: a page is there only with all of them, and calls, counts, names and clears are of chunks."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import pytest
import torch

from hicache_async import CacheConfig, ConfigError, DeviceKV, HiCache, Stop
from hicache_async.assembly import _largest_object_nbytes
from hicache_async.config import IO_MODES, HostLayout
from hicache_async.core.keys import namespace_of
from hicache_async.explanation import Place
from hicache_async.stores import registry
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import HeldStore, StoreWrapper
from hicache_async.types import StopToken
from tests.flows.explaining import explained, places, says
from tests.flows.rig import (
    NUM_LAYERS,
    PAGE_NBYTES,
    Opener,
    Rig,
    make_kv,
    page_hashes,
    plain,
    prefetched,
)
from tests.flows.stores import RecordingStore
from tests.flows.test_mla import forget_here, latent_kv

pytestmark = pytest.mark.asyncio

PROMPT = "abcd"
CUT: dict[str, object] = {"key_scheme": "unified", "head_group": 1, "layer_partition": 1, "token_group": 2}
CHUNKS = 8
"""Of a page: 2 groups of heads x 2 cells of tokens x 2 layers."""


def of_layout(layout: HostLayout) -> dict[str, object]:
    """Return the options of a cache of chunks with this host layout."""
    return CUT | {"host_layout": layout, "io_mode": IO_MODES[layout][0]}


class AnsweringStore(StoreWrapper):
    """Do what the store does, but answer calls of one verb for pages by what a function makes of the answer."""

    def __init__(self, verb: str, answer: Callable[[int], object]) -> None:
        super().__init__(MemoryStore())
        self._verb, self._answer = verb, answer

    async def count_prefix(self, keys: Any) -> int:
        return self._changed("count_prefix", await super().count_prefix(keys))

    async def read(self, keys: Any, into: Any, stop: StopToken) -> int:
        return self._changed("read", await super().read(keys, into, stop))

    async def write(self, keys: Any, pages: Any) -> int:
        count = await super().write(keys, pages)
        return count if keys[0].startswith("manifest_") else self._changed("write", count)

    def _changed(self, verb: str, count: int) -> int:
        return self._answer(count) if verb == self._verb else count  # type: ignore[return-value]


class PackedStore(StoreWrapper):
    """A store whose objects are said to be packed."""

    codec = "packed"


async def lose(rig: Rig, letters: str, page: int, chunk: int) -> str:
    """Let the store lose one chunk; returns its name."""
    key = rig.ctx.keys.keys(page_hashes(letters))[page * CHUNKS + chunk]
    assert await plain(rig.store).delete([key]) == 1
    return key


# There and back


@pytest.mark.parametrize("layout", HostLayout)
async def test_pages_go_to_the_store_in_chunks_and_come_back(open_cache: Opener, layout: HostLayout) -> None:
    """Under each host layout a page is eight objects of an eighth of it, and another process hits all of them."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store, **of_layout(layout))
    await rig.serve(PROMPT)
    await rig.cache.admin.flush()
    names = rig.ctx.keys.keys(page_hashes(PROMPT))
    assert [key for keys in store.keys["write"] for key in keys] == names
    assert len(set(names)) == len(PROMPT) * CHUNKS
    assert await rig.check_stored(PROMPT) == len(PROMPT)
    again = await open_cache(store=store, **of_layout(layout))
    served = await again.serve(PROMPT)
    assert (served.books.store, served.books.computed) == (16, 1)
    again.check_local(PROMPT)
    copied = 0 if layout is HostLayout.HEAD_GROUPED else len(PROMPT)
    assert (rig.ctx.arena.num_gathered, again.ctx.arena.num_scattered) == (copied, copied)
    assert (rig.counters["backed_up_pages"], again.counters["fetched_pages"]) == (len(PROMPT), len(PROMPT))


async def test_layouts_share_one_store(open_cache: Opener) -> None:
    """What a cache of one host layout has stored, caches of all others hit, without a second object."""
    store = MemoryStore()
    for number, layout in enumerate(HostLayout):
        rig = await open_cache(store=store, **of_layout(layout))
        assert (await rig.serve(PROMPT)).books.store == (16 if number else 0)
        await rig.cache.admin.flush()
    assert len([key for key in await store.list_keys() if not key.startswith("manifest_")]) == 4 * CHUNKS


async def test_one_chunk_a_page_is_stored_without_a_copy_under_page_first(open_cache: Opener) -> None:
    """Uncut, pages of page_first and head_grouped are one object each, which is the arena's own memory."""
    for layout in (HostLayout.PAGE_FIRST, HostLayout.HEAD_GROUPED):
        rig = await open_cache(store=MemoryStore(), key_scheme="unified", host_layout=layout)
        await rig.serve(PROMPT)
        await rig.cache.admin.flush()
        assert rig.ctx.keys.keys(page_hashes(PROMPT)[:1])[0].endswith(f"_L0-{NUM_LAYERS}_H0")
        assert rig.ctx.arena.is_direct
        assert await rig.check_stored(PROMPT) == len(PROMPT)


async def test_a_call_carries_all_chunks_of_a_batch_of_pages(open_cache: Opener) -> None:
    """Batches are counted in pages: each call has two pages, that is sixteen names, and the last one the rest."""
    store = RecordingStore(MemoryStore())
    rig = await open_cache(store=store, store_batch_pages=2, **of_layout(HostLayout.HEAD_GROUPED))
    await rig.put_in_store("abcde")
    store.keys["write"].clear()
    assert (await prefetched(rig, "abcde"))[1] == 20
    for verb in ("count_prefix", "read"):
        assert [len(keys) for keys in store.keys[verb]] == [2 * CHUNKS, 2 * CHUNKS, CHUNKS]
    await rig.serve("vwxyz", prefetch=False)
    await rig.cache.admin.flush()
    assert [len(keys) for keys in store.keys["write"]] == [2 * CHUNKS, 2 * CHUNKS, CHUNKS]


# A page is all its chunks


@pytest.mark.parametrize("chunk", range(CHUNKS))
async def test_a_page_without_one_of_its_chunks_is_missing(open_cache: Opener, chunk: int) -> None:
    """Whichever chunk of page 2 is not there: two pages are found and brought, and no byte of the third."""
    rig = await open_cache(store=MemoryStore(), **CUT)
    await rig.put_in_store(PROMPT)
    await lose(rig, PROMPT, 2, chunk)
    assert await prefetched(rig, PROMPT) == (8, 8, Stop.COMPLETE)
    assert rig.where(PROMPT) == "hh"
    rig.check_local(PROMPT)


@pytest.mark.parametrize("layout", [HostLayout.HEAD_GROUPED, HostLayout.PAGE_FIRST])
@pytest.mark.parametrize("chunk", [0, 3, CHUNKS - 1])
async def test_a_chunk_that_vanishes_costs_its_page(
    open_cache: Opener, layout: HostLayout, chunk: int
) -> None:
    """Counted and gone at the read: the pages before it stay, its own is not published though most of it was read."""
    store = HeldStore(MemoryStore(), ("read",))
    rig = await open_cache(store=store, **of_layout(layout))
    await rig.put_in_store(PROMPT)
    with rig.lease(PROMPT) as lease:
        prefetch = lease.start_prefetch()
        await store.arrived(verb="read")
        await lose(rig, PROMPT, 1, chunk)
        store.open()
        result = await prefetch.settled()
    assert (result.hit_tokens, result.fetched_tokens, result.stop) == (16, 4, Stop.VANISHED)
    assert rig.where(PROMPT) == "h"
    rig.check_local(PROMPT)


async def test_what_was_written_in_part_is_made_up_for(open_cache: Opener) -> None:
    """A write that ends within a page leaves that page unstored; the next one writes it, and what is there is kept."""
    answers = iter([CHUNKS + 3])
    store = AnsweringStore("write", lambda count: next(answers, count))
    rig = await open_cache(store=store, **CUT)
    await rig.serve(PROMPT, prefetch=False)
    await rig.cache.admin.flush()
    assert (rig.counters["backed_up_pages"], rig.counters["backup_pages_failed"]) == (1, 3)
    await rig.serve(PROMPT, prefetch=False)
    await rig.cache.admin.flush()
    assert rig.counters["backed_up_pages"] == 4
    assert await rig.check_stored(PROMPT) == 4


@pytest.mark.parametrize(
    ("count", "pages"), [(0, 0), (CHUNKS - 1, 0), (CHUNKS, 1), (2 * CHUNKS + 7, 2), (np.int64(3 * CHUNKS), 3)]
)
@pytest.mark.parametrize("verb", ["count_prefix", "read"])
async def test_counts_of_chunks_are_whole_pages(
    open_cache: Opener, verb: str, count: int, pages: int
) -> None:
    """What a store vouches for is rounded down to whole pages, whatever integer it is."""
    rig = await open_cache(store=AnsweringStore(verb, lambda _: count), **of_layout(HostLayout.HEAD_GROUPED))
    await rig.put_in_store(PROMPT)
    hit, fetched, stop = await prefetched(rig, PROMPT)
    assert (hit, fetched) == (4 * pages if verb == "count_prefix" else 16, 4 * pages)
    found = Stop.COMPLETE if pages else Stop.NOT_STORED
    assert stop is (found if verb == "count_prefix" else Stop.VANISHED)
    rig.check_local(PROMPT)


@pytest.mark.parametrize("answer", [-1, 4 * CHUNKS + 1, 5 * CHUNKS, True, 1.0, None, "8"])
@pytest.mark.parametrize("verb", ["count_prefix", "read", "write"])
async def test_nonsense_stays_nonsense(open_cache: Opener, verb: str, answer: object) -> None:
    """A count that no store can mean is a fault, also where it would make a fair number of pages."""
    rig = await open_cache(store=AnsweringStore(verb, lambda _: answer), **CUT)
    if verb == "write":
        await rig.serve(PROMPT, prefetch=False)
        await rig.cache.admin.flush()
        assert rig.counters["backed_up_pages"] == 0
    else:
        await rig.put_in_store(PROMPT)
        assert (await prefetched(rig, PROMPT))[1:] == (0, Stop.STORE_FAULT)
    assert rig.counters["store_faults"] == 1


# Explaining and clearing


async def test_explain_counts_pages(open_cache: Opener) -> None:
    """A page is present with all its chunks, absent without one, and known by its first or first missing one."""
    prompt = "abcdef"
    rig = await open_cache(store=MemoryStore(), **CUT)
    await rig.put_in_store(prompt)
    await lose(rig, prompt, 2, 5)
    await lose(rig, prompt, 4, 3)  # which a prefetch does not ask for, and the list of all names tells
    explanation = await explained(rig, prompt)
    assert places(explanation)[2] == "yy-y-y"
    names = rig.ctx.keys.keys(page_hashes(prompt))
    chunks = [0, 0, 5, 0, 3, 0]
    assert [page.key for page in explanation.pages] == [
        names[page * CHUNKS + chunk] for page, chunk in enumerate(chunks)
    ]
    assert (explanation.store_tokens, explanation.prefetch_stop) == (8, Stop.COMPLETE)
    assert explanation.namespace == rig.ctx.keys.suffixes[0]
    assert says(explanation, "the store lacks page 2", "has page 3")
    assert explanation.other_namespace is None, "its own chunks are no other name"


async def test_explain_asks_where_nothing_is_listed(open_cache: Opener) -> None:
    """A store that cannot list is asked for whole pages, and says the same."""

    class Unlisted(StoreWrapper):
        pass

    rig = await open_cache(store=Unlisted(MemoryStore()), **CUT)
    await rig.put_in_store(PROMPT)
    await lose(rig, PROMPT, 1, 0)
    explanation = await explained(rig, PROMPT)
    assert places(explanation)[2] == "y-yy"
    assert {page.store for page in explanation.pages} == {Place.PRESENT, Place.ABSENT}


async def test_a_namespace_is_cleared_with_all_its_chunks(open_cache: Opener) -> None:
    """Every chunk of every rank of the namespace goes; what is cut otherwise, and what it is called, stays."""
    store = MemoryStore()
    shapes: list[tuple[dict[str, object], int]] = [
        ({}, 2),
        ({"tp_size": 2}, 1),
        ({"tp_size": 2, "tp_rank": 1}, 1),
    ]
    ours = [
        await open_cache(
            kv=make_kv(16) if heads == 2 else half_kv(), store=store, total_kv_heads=2, **CUT | options
        )
        for options, heads in shapes
    ]
    foreign = await open_cache(store=store, **CUT | {"token_group": 4})
    for rig in (*ours, foreign):
        await rig.serve(PROMPT, prefetch=False)
        await rig.cache.admin.flush()
    before = set(await store.list_keys())
    digest = ours[0].ctx.keys.namespace.digest
    assert {rig.ctx.keys.namespace.digest for rig in ours} == {digest} != {foreign.ctx.keys.namespace.digest}
    await ours[1].cache.admin.clear()
    gone = before - set(await store.list_keys())
    assert gone == {key for key in before if namespace_of(key) == digest and not key.startswith("manifest_")}
    assert len(gone) == len(PROMPT) * CHUNKS
    assert await foreign.check_stored(PROMPT) == len(PROMPT)


def half_kv() -> DeviceKV:
    """Return the tensors of one of two ranks: a head each."""
    return DeviceKV.from_layers(*([torch.zeros(16, 4, 1, 8) for _ in range(NUM_LAYERS)] for _ in "kv"))


# Who writes


async def test_a_rank_with_a_copy_reads_what_the_first_one_stores(open_cache: Opener) -> None:
    """Of two cp ranks with whole pages, and of two tp ranks with one latent, the second writes nothing and hits all."""
    for make, options in ((make_kv, {"cp_size": 2}), (latent_kv, {"tp_size": 2, "head_group": None})):
        store = MemoryStore()
        axis = next(iter(options))[:2]
        second = await open_cache(kv=make(16), store=store, **CUT | options | {f"{axis}_rank": 1})
        await second.serve(PROMPT, prefetch=False)
        await second.cache.admin.flush()
        assert [key for key in await store.list_keys() if namespace_of(key)] == []
        first = await open_cache(kv=make(16), store=store, **CUT | options | {f"{axis}_rank": 0})
        await first.serve(PROMPT, prefetch=False)
        await first.cache.admin.flush()
        await forget_here(second)
        assert (await second.serve(PROMPT)).books.store == 16


# Opening and attaching


async def test_what_narrows_sharing_is_said_once_at_open(
    open_cache: Opener, logs: list[MutableMapping[str, Any]]
) -> None:
    """Unset with two tp ranks, head_group is warned of with the numbers; once set, nothing is said."""
    await open_cache(kv=make_kv(16), key_scheme="unified", tp_size=2)
    (warning,) = [line for line in logs if line["event"] == "keys.narrow"]
    assert (warning["log_level"], warning["field"]) == ("warning", "head_group")
    assert "2 of 4 KV heads" in warning["advice"] and "set head_group to 4 /" in warning["advice"]
    logs.clear()
    await open_cache(kv=make_kv(16), key_scheme="unified", tp_size=2, head_group=2)
    await open_cache(kv=make_kv(16), tp_size=2)
    assert not [line for line in logs if line["event"] == "keys.narrow"]


async def test_a_shape_that_cannot_share_is_refused_at_open(open_cache: Opener) -> None:
    """The refusal comes before anything is taken, and another cache opens right after it."""
    with pytest.raises(
        ConfigError, match=r"^head_group is 4; it must divide the model's 2 KV heads and the 2"
    ):
        await open_cache(store=MemoryStore(), key_scheme="unified", head_group=4)
    assert (await (await open_cache(store=MemoryStore(), **CUT)).serve(PROMPT)).books.computed == 17


async def test_a_store_of_another_codec_has_names_of_its_own(open_cache: Opener) -> None:
    """At open and when it is attached: what is packed is never found under the names of what is not."""
    inner = MemoryStore()
    rig = await open_cache(store=inner, **CUT)
    await rig.serve(PROMPT, prefetch=False)
    await rig.cache.admin.flush()
    raw = rig.ctx.keys
    await rig.cache.admin.detach_store()
    await rig.cache.admin.attach_store(PackedStore(inner))
    packed = rig.ctx.keys
    assert (raw.namespace.codec, packed.namespace.codec) == ("raw", "packed")
    assert await inner.count_prefix(packed.keys(page_hashes(PROMPT))) == 0
    await rig.cache.admin.flush()
    assert await inner.count_prefix(packed.keys(page_hashes(PROMPT))) == 4 * CHUNKS
    again = await open_cache(store=PackedStore(inner), **CUT)
    assert again.ctx.keys.suffixes == packed.suffixes
    await rig.cache.admin.detach_store()
    await rig.cache.admin.attach_store(inner)
    assert rig.ctx.keys.suffixes == raw.suffixes


OFFERED: list[dict[str, object]] = []


class AskingStore(MemoryStore):
    """A store that takes options and remembers them."""

    def __init__(self, *, slot_bytes: int = 0, dtype: str = "", existence_ttl_s: float = 0.0) -> None:
        super().__init__()
        OFFERED.append({"slot_bytes": slot_bytes, "dtype": dtype, "existence_ttl_s": existence_ttl_s})

    @classmethod
    def from_url(cls, url: str, **options: Any) -> AskingStore:
        """Open it."""
        return cls(**options)


@pytest.mark.parametrize(("page_size", "slot_bytes"), [(4, 4096), (512, 512 // 2 * 8 * 4 * 2)])
async def test_a_store_by_url_is_told_of_its_objects(
    monkeypatch: pytest.MonkeyPatch, page_size: int, slot_bytes: int
) -> None:
    """It is offered the size of the largest object, never less than a manifest's, the dtype and how long to believe."""
    OFFERED.clear()
    monkeypatch.setattr(registry, "_registry", registry.Registry({"asking": f"{__name__}:AskingStore"}))
    kv = DeviceKV.from_layers(*([torch.zeros(4, page_size, 2, 8) for _ in range(NUM_LAYERS)] for _ in "kv"))
    config = CacheConfig(
        **CUT | {"token_group": page_size // 2, "page_size": page_size},  # type: ignore[arg-type]
        host_bytes=8 * kv.page_nbytes,
        host_reserve_bytes=0,
        existence_ttl_s=3.0,
    )
    async with HiCache.open(config, kv=kv, store="asking:") as cache:
        await cache.admin.detach_store()
        await cache.admin.attach_store("asking:")
    told = {"slot_bytes": slot_bytes, "dtype": "float32", "existence_ttl_s": 3.0}
    assert [told, told] == OFFERED


async def test_a_page_of_the_rig(open_cache: Opener) -> None:
    """The numbers that these tests build on."""
    rig = await open_cache(store=MemoryStore(), **CUT)
    assert rig.ctx.keys.num_chunks == CHUNKS
    assert [span.stop - span.start for span in rig.ctx.keys.spans(PAGE_NBYTES)] == [
        PAGE_NBYTES // CHUNKS
    ] * CHUNKS


async def test_all_stages_ask_for_the_same_slots() -> None:
    """The last stage has a short cell only, and may be the first to open a store of fixed slots."""
    cut = {"key_scheme": "unified", "layer_partition": 4, "total_layers": 5, "pp_size": 2, "page_size": 8}
    stages = [(4, {"pp_rank": 0}), (1, {"pp_rank": 1, "first_layer": 4})]
    asked = {
        _largest_object_nbytes(
            CacheConfig(**cut, **stage),
            DeviceKV.from_layers(*([torch.zeros(2, 8, 2, 4)] * num_layers for _ in "kv")),
        )
        for num_layers, stage in stages
    }
    assert asked == {4 * 2 * 8 * 2 * 4 * 4}
