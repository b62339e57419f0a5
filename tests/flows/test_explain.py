"""Why a prompt hits as far as it does: one scenario for each cause, and what an explanation leaves behind, nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from hicache_async import ClosedError, DeviceKV, State, Stop, Tier
from hicache_async.abc import Store
from hicache_async.explanation import MAX_ROWS, Explanation, Keeper, MatchStop, Place
from hicache_async.flows.survey import MAX_QUESTIONS
from hicache_async.stores.file import FileStore
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore, HangingStore, HeldStore, StoreWrapper
from tests.flows.causes import PROMPT, SCENARIOS, prefetch_now
from tests.flows.explaining import explained, places, says
from tests.flows.rig import (
    NUM_LAYERS,
    PAGE_TOKENS,
    Opener,
    driven,
    page_hashes,
    page_tokens,
    prefetched,
    tokens,
    turns,
)
from tests.flows.stores import page_keys

pytestmark = pytest.mark.asyncio

NOT_FORESEEN = {Stop.STOPPED, Stop.CORRUPT}
"""What only the prefetch itself can meet."""
WORDS: dict[Stop, tuple[str, ...]] = {
    Stop.NOT_STORED: ("hole", "page 0", "has page 1"),
    Stop.BELOW_THRESHOLD: ("8 tokens are in the store", "prefetch_threshold_tokens"),
    Stop.RATE_LIMITED: ("4 host pages", "6 of 12", "prefetch_capacity_fraction"),
    Stop.NO_HOST_ROOM: ("of 6 host pages", "host_ratio"),
    Stop.DEADLINE: ("prefetch_timeout_base_s",),
    Stop.VANISHED: ("page 1", "stale", "existence_ttl_s"),
    Stop.STORE_FAULT: ("the store failed", "count_prefix", "OSError('no such host')"),
    Stop.ANCHOR_NOT_BACKED: ("on the device only", "host room"),
    Stop.DETACHED: ("no store is attached", "attach_store"),
}


class Unlisted(StoreWrapper):
    """Do what the store does, but list nothing."""


async def filled(open_cache: Opener, store: Store, letters: str, **options: object) -> None:
    """Let another cache fill ``store``."""
    rig = await open_cache(store=store, **options)  # type: ignore[arg-type]
    await rig.serve(letters, prefetch=False)
    await rig.cache.admin.flush()


# Each cause


@pytest.mark.parametrize("stop", [stop for stop in SCENARIOS if stop not in NOT_FORESEEN])
async def test_the_prefetch_ends_as_foreseen(open_cache: Opener, stop: Stop) -> None:
    """For each reason the explanation names it, says what to do, and the prefetch right after agrees."""
    async with SCENARIOS[stop](open_cache) as rig:
        explanation = await driven(explained(rig, PROMPT), rig.clock, 0.5)
        foreseen = (explanation.store_tokens, explanation.fetch_tokens, explanation.prefetch_stop)
        assert foreseen == await prefetch_now(rig)
        assert explanation.prefetch_stop is stop
        if stop in WORDS:
            assert says(explanation, *WORDS[stop])
        else:
            assert explanation.hints == ()


async def test_all_is_well(open_cache: Opener) -> None:
    """Where each page is, its name, its hits: nothing is in the way, and no hint is given."""
    rig = await open_cache(store=MemoryStore())
    await rig.put_in_store("abcdef")
    await rig.serve("ab", prefetch=False)
    await rig.cache.admin.flush()
    await rig.serve("abcd")
    explanation = await explained(rig, "abcdef")
    assert places(explanation) == ("yyyy--", "yyyy--", "yyyyyy")
    assert (explanation.device_tokens, explanation.local_tokens, explanation.store_tokens) == (16, 16, 8)
    assert (explanation.prefetch_stop, explanation.match_stop) == (Stop.COMPLETE, MatchStop.NOT_CACHED)
    assert [page.hits for page in explanation.pages] == [2, 2, 1, 1, 0, 0]
    assert [page.marked_stored for page in explanation.pages] == [True] * 4 + [False] * 2
    assert [page.key for page in explanation.pages] == rig.ctx.keys.keys(page_hashes("abcdef"))
    assert [(page.start_token, page.end_token) for page in explanation.pages[:2]] == [(0, 4), (4, 8)]
    assert explanation.hints == ()


async def test_a_hole_at_the_head_that_the_store_evicted(open_cache: Opener) -> None:
    """A store full of tails serves nothing: the missing pages and the first present one are named."""
    rig = await open_cache(store=MemoryStore())
    await rig.put_in_store("abcdefgh", [3, 4, 6, 7])
    explanation = await explained(rig, "abcdefgh")
    assert places(explanation) == ("--------", "--------", "---yy-yy")
    assert (explanation.store_tokens, explanation.prefetch_stop) == (0, Stop.NOT_STORED)
    assert says(explanation, "hole", "pages 0-2", "has page 3", "evicted")


async def test_a_hole_at_the_head_that_write_back_kept_on_the_device(open_cache: Opener) -> None:
    """Pages that only the device has are in the way of other processes, and the write policy is named."""
    rig = await open_cache(store=MemoryStore(), write_policy="write_back")
    await rig.serve("ab", prefetch=False)
    await rig.put_in_store("abcd", [2, 3])
    explanation = await explained(rig, "abcd")
    assert places(explanation) == ("yy--", "----", "--yy")
    assert says(explanation, "hole", "pages 0-1", "has page 2", "write_back")
    assert says(explanation, "on the device and not stored yet", "write_through")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("model_id", "other", ('model_id is "model" here and "other" there', 'set model_id = "other"')),
        ("fingerprint", "v2", ('fingerprint is "" here and "v2" there', 'set fingerprint = "v2"')),
        (
            "host_layout",
            "page_first_direct",
            ('set host_layout = "page_first_direct" and io_mode = "direct"',),
        ),
    ],
)
async def test_another_namespace(open_cache: Opener, option: str, value: str, words: Sequence[str]) -> None:
    """The same page under another name is found where the store lists its names, and the difference is named."""
    store = MemoryStore()
    io_mode = {"io_mode": "direct"} if option == "host_layout" else {}
    await filled(open_cache, store, "abcd", **{option: value, **io_mode})
    rig = await open_cache(store=store)
    explanation = await explained(rig, "abcd")
    assert explanation.prefetch_stop is Stop.NOT_STORED
    assert explanation.other_namespace == (await page_keys(store))[0][64:] != explanation.namespace
    assert says(explanation, "another name", explanation.other_namespace, explanation.namespace, *words)


async def test_another_rank(open_cache: Opener) -> None:
    """A page of another rank of the same grid is not taken for another model's."""
    store = MemoryStore()
    await filled(open_cache, store, "abcd", tp_rank=1, tp_size=2)
    rig = await open_cache(store=store, tp_rank=0, tp_size=2)
    explanation = await explained(rig, "abcd")
    assert explanation.other_namespace is not None
    assert explanation.other_namespace.endswith("_1_2")
    assert says(explanation, "rank grid")


async def test_names_of_others_are_not_mistaken(open_cache: Opener) -> None:
    """Objects of others in the same store, whatever they are called, neither hide a page nor stand for one."""
    store = MemoryStore()
    rig = await open_cache(store=store)
    first, second = (page_hash.hex() for page_hash in page_hashes("ab"))
    await store.write(["", "x", first, second + "_x", second + "_old_one"], [memoryview(b"0")] * 5)
    explanation = await explained(rig, "ab")
    assert places(explanation) == ("--", "--", "--")
    assert explanation.other_namespace == ""
    assert says(explanation, "something else")


async def test_a_rank_that_never_writes(open_cache: Opener) -> None:
    """Of the ranks that hold the same latents only the first writes, and the others say so."""
    shape = (8, PAGE_TOKENS, 8)
    kv = DeviceKV.from_layers([torch.zeros(shape) for _ in range(NUM_LAYERS)], page_size=PAGE_TOKENS)
    rig = await open_cache(store=MemoryStore(), kv=kv, tp_rank=1, tp_size=2)
    words = ("tp_rank 1", "the KV of MLA", "another rank holds the same chunks and writes them: tp_rank 0")
    assert says(await explained(rig, "ab"), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"tp_rank": 3, "tp_size": 4, "total_kv_heads": 2},
            ("2 tp ranks hold copies of the same heads", "tp_rank 2, cp_rank 0"),
        ),
        ({"cp_rank": 1, "cp_size": 2}, ("each cp rank holds whole pages", "tp_rank 0, cp_rank 0")),
    ],
)
async def test_a_rank_that_holds_copies(
    open_cache: Opener, options: dict[str, object], words: Sequence[str]
) -> None:
    """Which other rank writes, and why, is said without a word of MLA where there is none."""
    heads = 1 if "tp_size" in options else 2
    shape = (8, PAGE_TOKENS, heads, 8)
    sides = [[torch.zeros(shape) for _ in range(NUM_LAYERS)] for _ in range(2)]
    kv = DeviceKV.from_layers(*sides)
    rig = await open_cache(store=MemoryStore(), kv=kv, key_scheme="unified", **options)  # type: ignore[arg-type]
    explanation = await explained(rig, "ab")
    assert says(explanation, "never writes", *words)
    assert not says(explanation, "MLA")


@pytest.mark.parametrize("lists", [True, False])
async def test_a_page_that_lacks_one_chunk(open_cache: Opener, lists: bool) -> None:
    """The object named is the one that is missing where the store lists its names, else how many it may be."""
    inner = MemoryStore()
    store = inner if lists else Unlisted(inner)
    options: dict[str, object] = {"key_scheme": "unified", "layer_partition": 1}
    await filled(open_cache, store, "abcd", **options)
    rig = await open_cache(store=store, **options)  # type: ignore[arg-type]
    first, second = rig.ctx.keys.keys(page_hashes("abcd"))[2:4]
    await inner.delete([second])
    explanation = await explained(rig, "abcd")
    assert places(explanation)[2][1] == "-"
    assert explanation.pages[1].key == (second if lists else first)
    if lists:
        assert says(explanation, "lacks 1 of 2 chunks", second)
    else:
        assert says(explanation, "at least one of 2 chunks")


async def test_selective_stores_at_the_second_commit(open_cache: Opener) -> None:
    """After one commit of two, the policy and the number are named; after two there is nothing to say."""
    rig = await open_cache(store=MemoryStore(), write_policy="write_through_selective")
    assert says(await explained(rig, "ab"), "nobody has stored", "selective stores at commit 2")
    await rig.serve("ab", prefetch=False)
    explanation = await explained(rig, "ab")
    assert places(explanation) == ("yy", "--", "--")
    assert explanation.prefetch_stop is Stop.NOTHING_MISSING
    assert says(explanation, "pages 0-1", "commits so far are 1", "stores at commit 2")
    await rig.serve("ab", prefetch=False)
    await rig.cache.admin.flush()
    explanation = await explained(rig, "ab")
    assert places(explanation) == ("yy", "yy", "yy")
    assert explanation.hints == ()


async def test_not_written_yet(open_cache: Opener) -> None:
    """A page on the host whose write is due, or failed, is said to be; flush and the log are where to look."""
    store = FlakyStore(MemoryStore(), "write", error=OSError("full"), at=None)
    rig = await open_cache(store=store)
    await rig.serve("ab", prefetch=False)
    await rig.cache.admin.flush()
    explanation = await explained(rig, "ab")
    assert places(explanation) == ("yy", "yy", "--")
    assert says(explanation, "pages 0-1", "not stored yet", "flush()", "backup.stopped")


async def test_stored_and_lost_since(open_cache: Opener) -> None:
    """Pages that this process takes for stored and the store no longer has are told apart from unwritten ones."""
    store = MemoryStore()
    rig = await open_cache(store=store)
    await rig.serve("ab", prefetch=False)
    await rig.cache.admin.flush()
    await store.delete(await store.list_keys())
    explanation = await explained(rig, "ab")
    assert all(page.marked_stored for page in explanation.pages)
    assert says(explanation, "pages 0-1", "lost them since", "detach_store() and attach_store()")
    assert "taken for stored" in str(explanation)


async def test_another_salt_or_adapter(open_cache: Opener) -> None:
    """The same tokens under another salt or adapter are found, and neither is ever shown."""
    rig = await open_cache(store=MemoryStore())
    with rig.cache.match_prefix("tenant", tokens("abc"), salt=b"secret", adapter="mine") as lease:
        await rig.run(lease)
        for salt, adapter in ((b"", None), (b"secret", None), (b"", "mine")):
            explanation = await explained(rig, "abcd", salt, adapter)
            assert explanation.elsewhere_tokens == 12
            assert (explanation.local_tokens, explanation.prefetch_stop) == (0, Stop.NOT_STORED)
            assert says(explanation, "12 tokens", "another salt or adapter")
            assert "secret" not in str(explanation)
        explanation = await explained(rig, "abcd", b"secret", "mine")
        assert (explanation.local_tokens, explanation.elsewhere_tokens) == (12, 0)
        assert not says(explanation, "salt")


async def test_a_stale_answer_of_the_file_store(open_cache: Opener, tmp_path: Path) -> None:
    """A file that was deleted behind a store's back is counted, not listed, and missed by the prefetch."""
    store = FileStore(tmp_path, existence_ttl_s=3600)
    rig = await open_cache(store=store)
    await rig.serve("abcd", prefetch=False)
    await rig.cache.admin.flush()
    for tier in (Tier.DEVICE, Tier.HOST):
        await rig.cache.admin.clear(tier)
    (gone,) = (path for path in tmp_path.rglob("*") if path.name.startswith(page_hashes("abc")[2].hex()))
    gone.unlink()
    explanation = await explained(rig, "abcd")
    assert places(explanation) == ("----", "----", "yy-y")
    assert (explanation.store_tokens, explanation.fetch_tokens) == (16, 8)
    assert says(explanation, "page 2", "stale", "existence_ttl_s")
    assert await prefetched(rig, "abcd") == (16, 8, explanation.prefetch_stop) == (16, 8, Stop.VANISHED)
    await store.aclose()


async def test_a_store_that_hangs_is_named(open_cache: Opener) -> None:
    """A question without an answer ends after store_timeout_s, and is the last; nothing of it stays."""
    store = HangingStore(MemoryStore(), "count_prefix")
    rig = await open_cache(store=store, prefetch_policy="wait_complete")
    explanation = await driven(explained(rig, "abcd"), rig.clock, 1.0)
    assert rig.clock.monotonic() <= rig.ctx.config.store_timeout_s + 1
    assert store.calls["count_prefix"] == 1
    assert explanation.prefetch_stop is Stop.STORE_FAULT
    assert places(explanation)[2] == "????"
    assert says(explanation, "no answer in 5 s", "store_timeout_s")
    store.release()
    await turns()
    assert rig.cache.stats().hops == 0


async def test_a_store_slower_than_the_deadline(open_cache: Opener) -> None:
    """An answer that comes after the deadline of a prefetch is shown, and the prefetch would end before it."""
    store = HeldStore(MemoryStore(), {"count_prefix"})
    rig = await open_cache(store=store, prefetch_timeout_base_s=1, prefetch_timeout_per_ki_token_s=0)
    await rig.put_in_store("abcd")
    explaining = asyncio.create_task(explained(rig, "abcd"))
    await store.arrived()
    rig.clock.advance(2.0)
    store.open()
    explanation = await explaining
    assert (explanation.store_tokens, explanation.prefetch_stop) == (0, Stop.DEADLINE)
    assert places(explanation)[2] == "yyyy"
    assert says(explanation, "prefetch_timeout_cap_s")


@pytest.mark.parametrize("answer", [-1, 99, None, 1.5, "2", True])
async def test_a_store_that_answers_nonsense(open_cache: Opener, answer: object) -> None:
    """What is no count is a fault, here as in the prefetch, and is shown."""

    class Nonsense(MemoryStore):
        async def count_prefix(self, keys: Sequence[str]) -> int:
            return answer  # type: ignore[return-value]

        async def list_keys(self) -> Sequence[str]:
            return answer  # type: ignore[return-value]

    rig = await open_cache(store=Nonsense())
    explanation = await explained(rig, "abcd")
    assert explanation.prefetch_stop is Stop.STORE_FAULT
    assert says(explanation, repr(answer))
    assert rig.ctx.metrics.counters["bugs"] == 0


async def test_a_listing_that_fails_costs_nothing_else(open_cache: Opener) -> None:
    """A store that cannot list after all is asked page by page, and is not called faulty for it."""

    class Broken(MemoryStore):
        async def list_keys(self) -> Sequence[str]:
            raise OSError("permission denied")

    rig = await open_cache(store=Broken())
    await rig.put_in_store("abcdef", [1, 3, 4])
    explanation = await explained(rig, "abcdef")
    assert places(explanation)[2] == "-y-yy-"
    assert explanation.store_fault is None
    assert says(explanation, "has not listed its names")


# Why a match ends


async def test_one_token_is_left_to_compute(open_cache: Opener) -> None:
    """Of a prompt of whole pages the last one is left out, however cached it is; with one token more it is not."""
    rig = await open_cache(store=MemoryStore())
    await rig.serve("abc", prefetch=False)
    whole = await explained(rig, tokens("abc")[:-1])
    assert (whole.local_tokens, whole.match_stop) == (8, MatchStop.LAST_TOKEN)
    assert places(whole)[0] == "yyy"
    assert "left to compute" in str(whole)
    longer = await explained(rig, "abc")
    assert (longer.local_tokens, longer.match_stop) == (12, MatchStop.WHOLE_PAGES)
    assert (whole.prefetch_stop, longer.prefetch_stop) == (Stop.NOTHING_MISSING,) * 2


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5])
async def test_short_prompts(open_cache: Opener, num_tokens: int) -> None:
    """Nothing, less than a page, and one page: the store is not asked for what no match may use."""
    store = Unlisted(MemoryStore())
    rig = await open_cache(store=store)
    explanation = await explained(rig, [*page_tokens("a"), 0] if num_tokens == 5 else [7] * num_tokens)
    stop = MatchStop.LAST_TOKEN if num_tokens == 4 else MatchStop.WHOLE_PAGES
    assert len(explanation.pages) == num_tokens // 4
    if num_tokens < 5:
        assert (explanation.match_stop, explanation.prefetch_stop) == (stop, Stop.NOTHING_MISSING)
    else:
        assert (explanation.match_stop, explanation.prefetch_stop) == (MatchStop.NOT_CACHED, Stop.NOT_STORED)
    assert store.calls["count_prefix"] == num_tokens // 4
    assert str(explanation).count("\n") >= 3


async def test_pages_on_their_way_from_the_store(open_cache: Opener) -> None:
    """What another request is reading is arriving; a prefetch waits for that, free of charge, and brings the rest."""
    store = HeldStore(MemoryStore(), {"read"})
    rig = await open_cache(store=store, host_pages=8, prefetch_capacity_fraction=0.75)
    await rig.put_in_store("abcdef")
    with rig.lease("abcdXY") as lease:
        lease.start_prefetch()
        await store.arrived()
        explanation = await explained(rig, "abcdef")
        assert explanation.match_stop is MatchStop.ARRIVING
        assert places(explanation) == ("------", "~~~~--", "yyyyyy")
        assert (explanation.store_tokens, explanation.fetch_tokens) == (24, 24)
        assert says(explanation, "reading")
        other = await explained(rig, "aXcdef")
        assert places(other)[1] == "~-----"
        waiting = asyncio.create_task(prefetched(rig, "abcdef"))
        await turns()
        store.open()
        assert await waiting == (24, 24, explanation.prefetch_stop) == (24, 24, Stop.COMPLETE)


async def test_pages_that_another_request_computes(open_cache: Opener) -> None:
    """What another lease has announced is said to be computed."""
    rig = await open_cache(store=MemoryStore())
    with rig.lease("abcd") as lease:
        await lease.load()
        explanation = await explained(rig, "abcdef")
        assert explanation.match_stop is MatchStop.BEING_COMPUTED
        assert says(explanation, "another request is computing")


async def test_bytes_on_their_way(open_cache: Opener) -> None:
    """Pages behind a forward, and behind a copy, are arriving in the tier that they are still to reach."""
    rig = await open_cache(store=MemoryStore())
    rig.virtual.auto = False
    forward = rig.cache.host_fence()
    with rig.lease("ab") as lease:
        await lease.load()
        await lease.allocate(9)
        rig.compute(lease)
        lease.commit(9, after=forward)
        assert places(await explained(rig, "ab"))[:2] == ("~~", "--")
        forward.set()
        await turns()
        explanation = await explained(rig, "ab")
        assert places(explanation)[:2] == ("yy", "~~")
        assert explanation.pages[0].keepers == (Keeper.LEASE, Keeper.MOVE)
        rig.virtual.advance_all()
        await turns()


async def test_what_was_cut_off(open_cache: Opener) -> None:
    """Pages that a clear has cut off while a request holds them are told from those never seen."""
    rig = await open_cache(store=MemoryStore())
    with rig.lease("abcd") as lease:
        await rig.run(lease)
        await rig.cache.admin.clear(Tier.DEVICE)
        await rig.cache.admin.clear(Tier.HOST)
        explanation = await explained(rig, "abcd")
        assert (explanation.local_tokens, explanation.match_stop) == (0, MatchStop.CUT_OFF)
        assert says(explanation, "cut off")


async def test_who_keeps_a_page(open_cache: Opener) -> None:
    """Each page names who keeps it, or what stands on it: requests, moves, operators."""
    store = HeldStore(MemoryStore(), {"write"})
    rig = await open_cache(store=store)
    await rig.serve("abcd", prefetch=False)
    await store.arrived()
    assert [page.keepers for page in (await explained(rig, "abcd")).pages] == [(Keeper.MOVE,)] * 4
    store.open()
    await rig.cache.admin.flush()
    assert [page.keepers for page in (await explained(rig, "abcd")).pages] == [()] * 4
    rig.cache.admin.pin(tokens("abc"), ttl_s=60)
    with rig.lease("abXY") as lease:
        await rig.run(lease)
        await rig.cache.admin.flush()
        keepers = [page.keepers for page in (await explained(rig, "abcd")).pages]
    both = (Keeper.LEASE, Keeper.OPERATOR)
    assert keepers == [both, both, (Keeper.OPERATOR,), ()]
    rig.cache.admin.unpin(tokens("abc"))


@pytest.mark.parametrize(("failure", "words"), [(RuntimeError("a bug"), "a bug"), (None, "a rank was lost")])
async def test_without_reuse(open_cache: Opener, failure: Exception | None, words: str) -> None:
    """A cache that serves without reuse says why; nothing is looked up in its tree, nor asked of its store."""
    store = Unlisted(MemoryStore())
    rig = await open_cache(store=store)
    await rig.serve("abcd", prefetch=False)
    await rig.cache.admin.flush()
    if failure is not None:
        rig.ctx.fail(failure)
    else:
        rig.ctx.state = State.NO_REUSE
    explanation = await explained(rig, "abcd")
    assert (explanation.match_stop, explanation.prefetch_stop) == (MatchStop.NO_REUSE, Stop.DETACHED)
    assert (explanation.local_tokens, places(explanation)) == (0, ("????", "????", "????"))
    assert says(explanation, "serves without reuse", words)
    assert len(explanation.hints) == 1
    assert store.calls["count_prefix"] == 0


async def test_a_store_that_goes_meanwhile(open_cache: Opener) -> None:
    """A store that was detached while it was asked is not asked on, and its answers are not believed."""
    store = HeldStore(MemoryStore(), {"count_prefix"})
    rig = await open_cache(store=store, store_batch_pages=2)
    await rig.put_in_store("abcd")
    explaining = asyncio.create_task(explained(rig, "abcd"))
    await store.arrived()
    detaching = asyncio.create_task(rig.cache.admin.detach_store(force=True))
    await turns()
    store.open()
    explanation = await explaining
    await detaching
    assert (explanation.store_tokens, explanation.prefetch_stop) == (0, Stop.DETACHED)
    assert says(explanation, "ask again")
    assert store.calls["count_prefix"] == 1


# What it costs, and what it leaves


async def test_the_questions_are_bounded(open_cache: Opener) -> None:
    """Of a store that lists nothing a few dozen questions are asked, and what they do not reach is unknown."""
    store = Unlisted(MemoryStore())
    rig = await open_cache(store=store, host_pages=8)
    letters = "".join(chr(0x100 + i) for i in range(400))
    await rig.put_in_store(letters, range(100, 400))
    explanation = await explained(rig, letters)
    assert store.calls["count_prefix"] <= MAX_QUESTIONS + 1
    found = places(explanation)[2]
    assert found[200:] == "y" * 200  # far behind the hole
    assert found[:2] == "--"
    assert set(found[:100]) == {"-", "?"}
    assert says(explanation, "hole")


async def test_a_listing_answers_for_all(open_cache: Opener) -> None:
    """A store that lists its names is asked what a prefetch asks, and for its names, once."""

    class Counting(MemoryStore):
        calls: list[int]

        async def count_prefix(self, keys: Sequence[str]) -> int:
            self.calls.append(len(keys))
            return await super().count_prefix(keys)

    store = Counting()
    store.calls = []
    rig = await open_cache(store=store, host_pages=8)
    letters = "".join(chr(0x100 + i) for i in range(400))
    await rig.put_in_store(letters, range(0, 400, 2))
    explanation = await explained(rig, letters)
    assert store.calls == [128]
    assert places(explanation)[2] == "y-" * 200
    assert rig.counters["store_calls_list_keys"] == 1


async def test_it_leaves_no_trace(open_cache: Opener) -> None:
    """No page, pin, tick, hit or count of a request changes, and what is evicted next is what it was before."""

    async def evicted_first(*, explain: bool) -> tuple[str, str]:
        rig = await open_cache(store=MemoryStore(), device_pages=4, host_pages=6)
        for letters in ("ab", "cd", "ef"):
            await rig.serve(letters, prefetch=False)
        await rig.cache.admin.flush()
        if explain:
            nodes = [node for root in rig.ctx.tree.roots.values() for node in root.subtree()]
            before = rig.cache.stats(), [(node.used, node.hits, node.priority) for node in nodes]
            for letters in ("ab", "abXY", "zz"):
                await explained(rig, letters)
                rig.cache.audit()
            after = rig.cache.stats(), [(node.used, node.hits, node.priority) for node in nodes]
            asked = {"store_calls_count_prefix", "store_calls_list_keys"}
            kept = [
                {name: n for name, n in stats.counters.items() if name not in asked}
                for stats in (before[0], after[0])
            ]
            assert kept[0] == kept[1]
            assert dataclasses.replace(after[0], counters=before[0].counters) == before[0]
            assert before[1] == after[1]
        await rig.serve("gh", prefetch=False)
        return rig.where("ab"), rig.where("cd")

    assert await evicted_first(explain=True) == await evicted_first(explain=False) == ("", "hh")


async def test_a_key_of_the_caller_is_not_touched(open_cache: Opener) -> None:
    """A TokenKey is explained as it is, and keeps the hashes it has."""
    rig = await open_cache(store=MemoryStore())
    with rig.lease("abcd") as lease:
        await rig.run(lease)
        chain = lease._holding.chain
        hashed = lease.key.num_hashed(chain)
        assert (await explained(rig, lease.key, b"salt")).local_tokens == 0  # type: ignore[arg-type]
        assert (await explained(rig, lease.key)).local_tokens == 16  # type: ignore[arg-type]
        assert lease.key.num_hashed(chain) == hashed


async def test_it_may_be_cancelled(open_cache: Opener) -> None:
    """Cancelling an explanation ends its question, and leaves no hop, pin or page behind."""
    store = HeldStore(MemoryStore(), {"count_prefix"})
    rig = await open_cache(store=store)
    explaining = asyncio.create_task(explained(rig, "abcd"))
    await store.arrived()
    explaining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await explaining
    await turns()
    assert rig.cache.stats().hops == 0
    rig.cache.audit()


async def test_a_cache_that_closes_meanwhile(open_cache: Opener) -> None:
    """An explanation that a close overtakes raises ClosedError once its question is answered."""
    store = HeldStore(MemoryStore(), {"count_prefix"})
    rig = await open_cache(store=store)
    explaining = asyncio.create_task(explained(rig, "abcd"))
    await store.arrived()
    closing = asyncio.create_task(rig.cache.close())
    await turns()
    store.open()
    with pytest.raises(ClosedError):
        await explaining
    await closing


# What it looks like


async def test_it_is_short(open_cache: Opener) -> None:
    """Pages of equal state are one row, so that 512 pages fit a screen; it ends with the verdict and the hints."""
    rig = await open_cache(store=MemoryStore(), device_pages=600, host_pages=700)
    letters = "".join(chr(0x100 + i) for i in range(512))
    await rig.put_in_store(letters, range(0, 500))
    await rig.serve(letters[:128], prefetch=False)
    await rig.cache.admin.flush()
    text = str(await explained(rig, letters))
    assert len(text.splitlines()) <= 12
    assert [line.split()[:2] for line in text.splitlines() if line.startswith(("0-", "128-", "500-"))] == [
        ["0-127", "0-511"],
        ["128-499", "512-1,999"],
        ["500-511", "2,000-2,047"],
    ]
    assert text.splitlines()[-1].startswith("hint")
    assert "1,488 tokens more are found, 1,488 would be brought: complete" in text
    assert max(map(len, text.splitlines())) < 500


async def test_a_patchwork_is_cut(open_cache: Opener) -> None:
    """Where every page differs from the next the table ends, and says how much it leaves out."""
    rig = await open_cache(store=MemoryStore())
    letters = "".join(chr(0x100 + i) for i in range(400))
    await rig.put_in_store(letters, range(0, 400, 2))
    text = str(await explained(rig, letters))
    assert len(text.splitlines()) <= MAX_ROWS + 12
    assert f"and {400 - MAX_ROWS} pages more, in {400 - MAX_ROWS} runs" in text


async def test_it_can_be_sent(open_cache: Opener) -> None:
    """An explanation is frozen and goes through JSON unchanged, by msgspec and by the standard library."""
    rig = await open_cache(store=MemoryStore())
    await rig.serve("ab", prefetch=False)
    explanation = await explained(rig, "abcd")
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.hints = ()  # type: ignore[misc]
    assert msgspec.json.decode(msgspec.json.encode(explanation), type=Explanation) == explanation
    plain = json.loads(json.dumps(dataclasses.asdict(explanation)))
    assert plain["pages"][0]["device"] == Place.PRESENT
    assert plain["prefetch_stop"] == "not_stored"
