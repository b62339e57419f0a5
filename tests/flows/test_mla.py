"""Pages on a grid of ranks: replicated latents are written once and read by all, other shards each by their own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hicache_async import Books, DeviceKV, Stop, Tier
from hicache_async.abc import Store
from hicache_async.explanation import MatchStop
from hicache_async.stores.file import FileStore
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.golden import check_page, fill_page, page_object
from hicache_async.types import Tokens
from tests.flows.explaining import explained, places, says
from tests.flows.rig import NUM_LAYERS, PAGE_TOKENS, Opener, Rig, driven, make_kv, page_hashes, tokens
from tests.flows.stores import RecordingStore, page_keys

pytestmark = pytest.mark.asyncio

PROMPT = "abcd"
LATENT_DIM = 12
PAGE_FIRST_DIRECT = {"host_layout": "page_first_direct", "io_mode": "direct"}
LAYOUTS = [{"host_layout": "layer_first"}, {"host_layout": "page_first"}, PAGE_FIRST_DIRECT]


def latent_kv(num_pages: int = 16, *, dtype: torch.dtype = torch.float32) -> DeviceKV:
    """Return the tensors of a model with MLA: per layer one latent a token, and no V."""
    shape = (num_pages, PAGE_TOKENS, LATENT_DIM)
    return DeviceKV.from_layers([torch.zeros(shape, dtype=dtype) for _ in range(NUM_LAYERS)])


def uneven_kv(num_pages: int = 16, *, dtype: torch.dtype = torch.float32) -> DeviceKV:
    """Return the tensors of a model with heads whose K is wider than its V."""
    k, v = (
        [torch.zeros((num_pages, PAGE_TOKENS, 2, dim), dtype=dtype) for _ in range(NUM_LAYERS)]
        for dim in (24, 16)
    )
    return DeviceKV.from_layers(k, v)


class Shared:
    """A store that several caches share, as the store of each sees it.

    Attributes:
        views: what each cache has asked for.
    """

    def __init__(self, open_view: Callable[[], Store]) -> None:
        self._open_view = open_view
        self.views: list[RecordingStore] = []

    def view(self) -> RecordingStore:
        """Return the store for one more cache."""
        self.views.append(RecordingStore(self._open_view()))
        return self.views[-1]

    async def names(self) -> set[str]:
        """Return the names of all pages."""
        return set(await page_keys(self.views[0].inner))

    async def aclose(self) -> None:
        """Close what each cache was given."""
        for view in self.views:
            await view.aclose()


def shared_store(kind: str, tmp_path: Path) -> Shared:
    """Return one MemoryStore for all, or for each its own FileStore of one directory."""
    memory = MemoryStore()
    return Shared(lambda: memory) if kind == "memory" else Shared(lambda: FileStore(tmp_path))


def written(view: RecordingStore) -> list[str]:
    """Return the names that a cache has written, in order."""
    return [key for keys in view.keys["write"] for key in keys]


async def serve(
    rig: Rig, prompt: str | Tokens, owner: object, *, salt: bytes = b"", adapter: str | None = None
) -> Books:
    """Serve one request whose pages hold bytes that only ``owner`` has; returns where they came from."""
    ids = tokens(prompt) if isinstance(prompt, str) else prompt
    with rig.cache.match_prefix("request", ids, salt=salt, adapter=adapter) as lease:
        await lease.prefetch()
        loading = await lease.load()
        await loading.finished()
        lease.allocate_nowait(lease.num_tokens).block()
        hashes = lease._holding.hashes(lease._holding.num_pages)
        content = [hashlib.sha256(page_hash + repr(owner).encode()).digest() for page_hash in hashes]
        for number, (page, page_content) in enumerate(zip(lease.pages, content, strict=False)):
            if number >= len(loading.pages):
                fill_page(rig.kv, int(page), page_content)
            check_page(rig.kv, int(page), page_content)
        lease.commit(lease.num_tokens)
    await rig.cache.admin.flush()
    return lease.books


async def forget_here(rig: Rig) -> None:
    """Leave a prompt in the store only."""
    for tier in (Tier.DEVICE, Tier.HOST):
        await rig.cache.admin.clear(tier)
    assert not rig.ctx.tree.roots


# One latent, many ranks


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["host_layout"])
@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_replicated_latents_are_written_by_one_rank_and_read_by_all(
    open_cache: Opener, tmp_path: Path, kind: str, layout: dict[str, str]
) -> None:
    """Of four ranks the first writes one object a page, under a name without tp, and each reads the right bytes."""
    shared = shared_store(kind, tmp_path)
    ranks = [
        await open_cache(kv=latent_kv(), store=shared.view(), tp_rank=rank, tp_size=4, **layout)
        for rank in range(4)
    ]
    for rig in reversed(ranks):  # whoever comes first
        assert (await serve(rig, PROMPT, "latent")).computed == 17
    suffix = ranks[0].ctx.keys.suffix
    assert suffix.endswith("_model") and {rig.ctx.keys.suffix for rig in ranks} == {suffix}
    expected = [page_hash.hex() + suffix for page_hash in page_hashes(PROMPT)]
    assert [written(view) for view in shared.views] == [expected, [], [], []]
    assert await shared.names() == set(expected)
    for rig in ranks:
        await forget_here(rig)
        assert (await serve(rig, PROMPT, "latent")).store == 16
    assert [view.calls["write"] for view in shared.views[1:]] == [0, 0, 0]
    assert written(shared.views[0]) == expected, "what was read was written again"
    await shared.aclose()


async def test_latents_are_shared_by_groups_of_any_size(open_cache: Opener, tmp_path: Path) -> None:
    """Whatever tp_size wrote them, replicated pages are found at every other; those of heads are not."""
    for make, hit in ((latent_kv, 16), (make_kv, 0)):
        shared = shared_store("file", tmp_path)
        for number, (rank, size) in enumerate(((0, 4), (0, 1), (1, 2), (7, 8))):
            rig = await open_cache(kv=make(16), store=shared.view(), tp_rank=rank, tp_size=size)
            shard = "latent" if hit else (rank, size)
            assert (await serve(rig, PROMPT, shard)).store == (hit if number else 0), (make, rank, size)
        await shared.aclose()


async def test_latents_are_shared_by_every_host_layout(open_cache: Opener) -> None:
    """Of one plane every order of layers and planes is the same bytes, so one cache's pages serve the others."""
    store = MemoryStore()
    for number, layout in enumerate(LAYOUTS):
        rig = await open_cache(kv=latent_kv(), store=store, **layout)
        assert (await serve(rig, PROMPT, "latent")).store == (16 if number else 0)


async def test_each_shard_of_a_grid_has_one_writer_and_its_own_bytes(
    open_cache: Opener, tmp_path: Path
) -> None:
    """Over tp 2 x pp 2 x cp 2 the first tp rank of each pp and cp shard writes; all of a shard read just that."""
    shared = shared_store("file", tmp_path)
    grid = [(tp, pp, cp) for tp in range(2) for pp in range(2) for cp in range(2)]
    ranks = {
        (tp, pp, cp): await open_cache(
            kv=latent_kv(),
            store=shared.view(),
            tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2, cp_rank=cp, cp_size=2, first_layer=4 * pp,
        )
        for tp, pp, cp in grid
    }  # fmt: skip
    for (_, pp, cp), rig in reversed(ranks.items()):  # those that write come last
        assert (await serve(rig, PROMPT, (pp, cp))).computed == 17, "the pages of another shard were found"
    names = {place: set(written(view)) for place, view in zip(grid, shared.views, strict=True)}
    assert [len(names[place]) for place in grid] == [4, 4, 4, 4, 0, 0, 0, 0]
    assert len(await shared.names()) == 16, "two shards share a name"
    for (_, pp, cp), rig in ranks.items():
        await forget_here(rig)
        assert (await serve(rig, PROMPT, (pp, cp))).store == 16
    await shared.aclose()


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_ranks_with_heads_of_their_own_all_write(open_cache: Opener, tmp_path: Path, kind: str) -> None:
    """With heads split over two ranks each writes and reads its own half, under its own names."""
    shared = shared_store(kind, tmp_path)
    ranks = [await open_cache(store=shared.view(), tp_rank=rank, tp_size=2) for rank in range(2)]
    for number, rig in enumerate(ranks):
        assert (await serve(rig, PROMPT, number)).store == 0, "a rank has found the other one's half"
    names = [written(view) for view in shared.views]
    assert [len(keys) for keys in names] == [4, 4]
    assert len(await shared.names()) == 8
    assert {key.split("_")[-2:] == [str(rank), "2"] for rank in range(2) for key in names[rank]} == {True}
    for number, rig in enumerate(ranks):
        await forget_here(rig)
        assert (await serve(rig, PROMPT, number)).store == 16
    await shared.aclose()


# A rank that never writes


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
async def test_a_rank_that_never_writes_can_be_flushed_changed_and_closed(
    open_cache: Opener, policy: str
) -> None:
    """Under each policy it waits for no write, whatever is asked of it, and none of its calls is one."""
    stores = [RecordingStore(MemoryStore()) for _ in range(2)]
    rig = await open_cache(
        kv=latent_kv(6), host_pages=5, store=stores[0], tp_rank=1, tp_size=2, write_policy=policy
    )

    async def use() -> None:
        await rig.push_out(5)
        with rig.lease("preempted") as lease:
            await rig.run(lease, prefetch=False) if len("preempted") < 6 else await lease.load()
            lease.release(offload=True)
        for tier in (Tier.HOST, Tier.STORE):
            await rig.cache.admin.flush(tier)
        rig.cache.audit()

    async def use_and_change() -> None:
        await use()
        await rig.cache.admin.detach_store()
        await use()
        await rig.cache.admin.attach_store(stores[1])
        await use()
        await rig.cache.admin.detach_store(force=True)
        await rig.cache.admin.attach_store(stores[0])
        await use()
        await rig.cache.close()

    await driven(use_and_change(), rig.clock)
    assert [store.calls["write"] for store in stores] == [0, 0]
    assert rig.counters["offloaded_pages"] > 20
    assert not rig.counters.keys() & {"backed_up_pages", "backups_stopped_at_hole"}


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
async def test_what_a_rank_that_never_writes_evicts_is_not_called_unstored(
    open_cache: Opener, policy: str
) -> None:
    """It cannot know what rank 0 has stored, so it counts what leaves its host as evicted, and not as lost."""
    rig = await open_cache(
        kv=latent_kv(4), host_pages=4, store=MemoryStore(), tp_rank=1, tp_size=2, write_policy=policy
    )
    await rig.push_out(6)
    await driven(rig.cache.admin.flush(), rig.clock)
    dropped = rig.cache.stats().dropped_tokens
    assert dropped["host_eviction"] >= 20
    assert "host_eviction_unstored" not in dropped


async def test_a_rank_that_never_writes_explains_what_the_writer_has_stored(open_cache: Opener) -> None:
    """What rank 0 has not stored yet is said to be its to store, not late here; once it has, nothing is amiss."""
    store = MemoryStore()
    writer, reader = [
        await open_cache(kv=latent_kv(), store=store, tp_rank=rank, tp_size=2) for rank in range(2)
    ]
    await serve(reader, PROMPT, "latent")
    before = await explained(reader, PROMPT)
    assert places(before) == ("yyyy", "yyyy", "----")
    assert says(before, "this rank never writes", "tp_rank 1", "writes them: tp_rank 0")
    assert not says(before, "a write is due") and not says(before, "flush()")
    await serve(writer, PROMPT, "latent")
    after = await explained(reader, PROMPT)
    assert (places(after)[2], after.hints) == ("yyyy", ())
    await forget_here(reader)
    gone = await explained(reader, PROMPT)
    assert (gone.match_stop, gone.prefetch_stop, gone.fetch_tokens) == (
        MatchStop.NOT_CACHED, Stop.COMPLETE, 16,
    )  # fmt: skip


async def test_a_rank_that_never_writes_reads_behind_what_it_has_computed(open_cache: Opener) -> None:
    """It continues a prefix of its own with pages that rank 0 stored, and keeps both right."""
    store = MemoryStore()
    writer, reader = [
        await open_cache(kv=latent_kv(), store=store, tp_rank=rank, tp_size=2) for rank in range(2)
    ]
    await serve(reader, PROMPT[:2], "latent")
    await serve(writer, PROMPT, "latent")
    books = await serve(reader, PROMPT, "latent")
    assert (books.device, books.store, books.computed) == (8, 8, 1)
    reader.cache.audit()


# The bytes of a page


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["host_layout"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8], ids=str
)
@pytest.mark.parametrize(
    ("make", "token_numbers"), [(latent_kv, LATENT_DIM), (uneven_kv, 2 * 24 + 2 * 16)], ids=["mla", "wide k"]
)
async def test_objects_of_each_dtype_and_layout_come_back_as_they_were(
    open_cache: Opener,
    tmp_path: Path,
    layout: dict[str, str],
    dtype: torch.dtype,
    make: Callable[..., DeviceKV],
    token_numbers: int,
) -> None:
    """An object is layers x tokens x numbers a token x their size, in the documented order, and so it comes back."""
    store = RecordingStore(FileStore(tmp_path))
    rig = await open_cache(kv=make(dtype=dtype), store=store, **layout)
    assert rig.kv.page_nbytes == NUM_LAYERS * PAGE_TOKENS * token_numbers * dtype.itemsize
    await rig.serve(PROMPT, prefetch=False)
    await rig.cache.admin.flush()
    for key, page_hash in zip(written(store), page_hashes(PROMPT), strict=True):
        (path,) = tmp_path.rglob(f"{key[:64]}*")
        payload = path.read_bytes()[-rig.kv.page_nbytes :]
        assert payload == page_object(rig.kv, page_hash, rig.ctx.arena.layout)
    await rig.cache.close()
    again = await open_cache(kv=make(dtype=dtype), store=store, **layout)
    assert (await again.serve(PROMPT)).books.store == 16
    again.check_local(PROMPT)
    copied = 4 if layout["host_layout"] == "layer_first" else 0
    assert (rig.ctx.arena.num_gathered, again.ctx.arena.num_scattered) == (copied, copied)
    await again.cache.close()
    await store.aclose()
