"""KV events: a mirror that only hears them knows at any time what a match would find."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from hicache_async import (
    Cleared,
    ClosedError,
    ConfigError,
    EventReader,
    Gap,
    KVEvent,
    Removed,
    Stored,
    Tier,
    WrongLoopError,
    kv_events,
)
from hicache_async.core.hashing import HashChain, chain_seed
from hicache_async.core.tokens import token_bytes
from hicache_async.kv_events import MIN_NAMES, KVEvents
from hicache_async.stores.memory import MemoryStore
from tests.event_mirror import Mirror, held_by
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, page_hashes, tokens, turns

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


@pytest_asyncio.fixture
async def open_cache() -> AsyncIterator[Opener]:
    """Open caches; at the end every one is audited and closed."""
    opener = Opener()
    yield opener
    await opener.finish()


def all_of(reader: EventReader) -> list[KVEvent]:
    """Return all that there is to read."""
    return list(iter(reader.next_nowait, None))


def num_readers(rig: Rig) -> int:
    """Return how many readers the cache tells."""
    return rig.ctx.events.num_readers


async def serve(rig: Rig, letters: str, **options: object) -> None:
    """Serve a request with a salt or an adapter."""
    with rig.lease(letters, **options) as lease:  # type: ignore[arg-type]
        await rig.run(lease)


# What the events say


async def test_a_commit_stores_its_pages_in_both_tiers(open_cache: Opener) -> None:
    """Pages are told with their hashes, their tokens and the page before them, tier by tier."""
    rig = await open_cache()
    reader = rig.cache.events()
    await rig.serve("ab")
    await rig.serve("abc")
    first, _, second, _ = events = all_of(reader)
    assert [event.tier for event in events if isinstance(event, Stored)] == [Tier.DEVICE, Tier.HOST] * 2
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    hashes = page_hashes("abc")
    assert (first.parent_hash, list(first.hashes)) == (None, hashes[:2])
    assert (second.parent_hash, list(second.hashes)) == (hashes[1], hashes[2:])
    assert (second.page_size, second.token_ids.tolist()) == (PAGE_TOKENS, tokens("c")[:PAGE_TOKENS])
    assert (second.salt, second.adapter) == (b"", None)


async def test_token_ids_are_decoded_when_asked_for(open_cache: Opener) -> None:
    """An event shares the token bytes of the tree, and its ids are a read-only view of them."""
    rig = await open_cache()
    reader = rig.cache.events()
    await rig.serve("ab")
    event = reader.next_nowait()
    assert isinstance(event, Stored)
    node = next(iter((rig.ctx.tree.roots[b""].children or {}).values()))
    assert event.token_bytes is node.segment
    assert not event.token_ids.flags.writeable
    assert event.token_ids.dtype == np.uint32
    assert np.shares_memory(event.token_ids, event.token_ids)


async def test_a_split_makes_no_event(open_cache: Opener) -> None:
    """How the tree is cut into nodes is nobody's business: a prompt that branches tells its own pages only."""
    rig = await open_cache()
    await rig.serve("abcd")
    reader = rig.cache.events()
    await rig.serve("abxy", prefetch=False)
    told = [page for event in all_of(reader) if isinstance(event, Stored) for page in event.hashes]
    assert told == page_hashes("abxy")[2:] * 2


async def test_an_eviction_removes_from_its_tier_only(open_cache: Opener) -> None:
    """Device pages that are evicted stay known on the host."""
    rig = await open_cache()
    await rig.serve("ab")
    await rig.cache.admin.flush()
    reader = rig.cache.events()
    rig.ctx.room.plan_room(Tier.DEVICE, 16)
    assert all_of(reader) == [Removed(Tier.DEVICE, tuple(page_hashes("ab")))]


async def test_what_comes_from_the_store_is_stored_on_the_host(open_cache: Opener) -> None:
    """A prefetch tells host pages, the load that follows device pages."""
    rig = await open_cache(store=MemoryStore())
    await rig.put_in_store("abc")
    reader = rig.cache.events()
    with rig.lease("abc") as lease:
        await lease.prefetch()
        assert {event.tier for event in all_of(reader) if isinstance(event, Stored)} == {Tier.HOST}
        await lease.load()
        assert {event.tier for event in all_of(reader) if isinstance(event, Stored)} == {Tier.DEVICE}


async def test_salt_and_adapter_are_named(open_cache: Opener) -> None:
    """Pages say whose they are, whether heard of as they come or from a snapshot, and so does a clearance."""
    rig = await open_cache()
    reader = rig.cache.events()
    await serve(rig, "ab", salt=b"tenant", adapter="lora")
    await serve(rig, "ab")
    live = [event for event in all_of(reader) if isinstance(event, Stored)]
    snapshot = [event for event in all_of(rig.cache.events(snapshot=True)) if isinstance(event, Stored)]
    for told in (live, snapshot):
        assert {(event.salt, event.adapter) for event in told} == {(b"tenant", "lora"), (b"", None)}
        assert len({page for event in told for page in event.hashes}) == 4
    rig.ctx.tree.detach(rig.ctx.tree.roots[chain_seed(b"tenant", "lora")])
    assert all_of(reader) == [Cleared(b"tenant", "lora")]
    rig.ctx.tree.detach(rig.ctx.tree.roots[b""])
    assert all_of(reader) == [Cleared(b"", None)]


async def test_names_are_kept_while_they_are_needed_and_no_longer(open_cache: Opener) -> None:
    """Ever new salts do not pile up, and none that the tree or a lease uses is forgotten."""
    rig = await open_cache()
    await serve(rig, "ab", salt=b"stays")
    held = rig.lease("cd", salt=b"held")  # type: ignore[arg-type]
    for number in range(3 * MIN_NAMES):
        with rig.cache.match_prefix(f"request {number}", [1], salt=b"%d" % number):
            pass
    assert len(rig.ctx.events._names) <= 2 * MIN_NAMES
    reader = rig.cache.events(snapshot=True)
    await rig.run(held)
    held.release()
    salts = {event.salt for event in all_of(reader) if isinstance(event, Stored)}
    assert salts == {b"stays", b"held"}


async def test_a_clear_by_the_operator_is_told(open_cache: Opener) -> None:
    """Of a tier, as removals; of everything, once for each salt and adapter."""
    rig = await open_cache()
    reader = rig.cache.events()
    await serve(rig, "ab")
    await serve(rig, "ab", salt=b"tenant")
    await rig.cache.admin.flush()
    assert [type(event) for event in all_of(reader)] == [Stored] * 4
    await rig.cache.admin.clear(Tier.DEVICE)
    assert [(type(event), event.tier) for event in all_of(reader) if isinstance(event, Removed)] == [
        (Removed, Tier.DEVICE),
        (Removed, Tier.DEVICE),
    ]
    await rig.cache.admin.clear()
    assert all_of(reader) == [Cleared(b"", None), Cleared(b"tenant", None)]


# A mirror


STEPS = [*3 * ["serve"], *2 * ["evict"], "prefetch", "put", "split", "detach", "clear", "clear one", "flush"]


class Walk:
    """A random life of a cache, looked at by three readers."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.always = rig.cache.events()
        self.sometimes = rig.cache.events(snapshot=True)
        self.slow = rig.cache.events(snapshot=True, max_pending_pages=4)
        self.mirrors = {reader: Mirror() for reader in (self.always, self.sometimes, self.slow)}
        self.prompts = ["".join(self.random.choices("abc", k=self.random.randint(1, 6))) for _ in range(12)]

    async def step(self) -> None:
        """Let one thing happen."""
        rig, letters = self.rig, self.random.choice(self.prompts)
        salt = self.random.choice([b"", b"", b"tenant"])
        match self.random.choice(STEPS):
            case "serve":
                await serve(rig, letters, salt=salt)
            case "prefetch":
                with rig.lease(letters, salt=salt) as lease:  # type: ignore[arg-type]
                    await lease.prefetch()
            case "put":
                await rig.put_in_store(letters)
            case "evict":
                rig.ctx.room.plan_room(
                    self.random.choice([Tier.DEVICE, Tier.HOST]), self.random.randint(1, 12)
                )
            case "split":
                match = rig.ctx.tree.match(chain_seed(salt), token_bytes(tokens(letters)), len(letters))
                if match.local_pages:
                    rig.ctx.tree.cut(match, self.random.randint(1, match.local_pages))
            case "detach":
                self.detach(below_the_root=True)
            case "clear":
                await rig.cache.admin.clear(self.random.choice([None, Tier.DEVICE, Tier.HOST]))
            case "clear one":
                self.detach(below_the_root=False)
            case "flush":
                await rig.cache.admin.flush()

    def detach(self, *, below_the_root: bool) -> None:
        """Cut off a node, or all of a root."""
        nodes = [node for root in self.rig.ctx.tree.roots.values() for node in root.subtree()]
        nodes = [node for node in nodes if (node.parent is not None) is below_the_root]
        if nodes:
            self.rig.ctx.tree.detach(self.random.choice(nodes))

    def check(self, *readers: EventReader) -> None:
        """Compare the mirrors of ``readers`` with the tree and with what a match finds."""
        for reader in readers:
            mirror = self.mirrors[reader]
            mirror.follow(reader)
            assert mirror.held == held_by(self.rig)
            for letters in self.prompts:
                for salt in (b"", b"tenant"):
                    self.check_match(mirror, letters, salt)

    def check_match(self, mirror: Mirror, letters: str, salt: bytes) -> None:
        """Compare what a mirror and what a match find of one prompt."""
        data, hashes = token_bytes(tokens(letters)), []
        HashChain(chain_seed(salt), PAGE_TOKENS * 4).extend(hashes, data, len(letters))
        match = self.rig.ctx.tree.match(chain_seed(salt), data, len(letters))
        assert match.device_pages == mirror.local_pages(hashes, Tier.DEVICE)
        assert match.local_pages == mirror.local_pages(hashes, Tier.DEVICE, Tier.HOST)


async def walk(open_cache: Opener, seed: int, num_steps: int) -> Walk:
    """Lead a random life and compare at every step."""
    rig = await open_cache(device_pages=12, host_pages=16, store=MemoryStore())
    life = Walk(rig, seed)
    for number in range(num_steps):
        await life.step()
        life.check(life.always)
        if number % 7 == 6:
            life.check(life.sometimes, life.slow)
    await rig.cache.admin.flush()
    life.check(life.always, life.sometimes, life.slow)
    assert life.mirrors[life.always].num_gaps == 0
    assert life.mirrors[life.sometimes].num_gaps == 1
    assert life.mirrors[life.slow].num_gaps > 1
    return life


@pytest.mark.parametrize("seed", range(4))
async def test_a_mirror_knows_what_a_match_finds(open_cache: Opener, seed: int) -> None:
    """Applied to a dictionary, the events give what a match finds, at every step, after every gap."""
    await walk(open_cache, seed, 60)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(100, 106))
async def test_a_mirror_knows_what_a_match_finds_for_long(open_cache: Opener, seed: int) -> None:
    """The same, for many lives."""
    await walk(open_cache, seed, 400)


async def test_a_snapshot_is_one_state_of_the_tree(open_cache: Opener) -> None:
    """What changes while a snapshot is read is told after it: no page twice, none left out."""
    rig = await open_cache()
    for letters in ("abcd", "abxy", "mn"):
        await rig.serve(letters)
    await rig.cache.admin.flush()
    reader = rig.cache.events(snapshot=True)
    mirror = Mirror()
    for _ in range(3):
        event = reader.next_nowait()
        assert event is not None
        mirror.apply(event)
    rig.ctx.room.plan_room(Tier.DEVICE, 14)
    await rig.serve("abq")
    mirror.follow(reader)
    assert mirror.held == held_by(rig)


# Readers that are slow, or gone


async def test_nobody_listening_costs_no_event(open_cache: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reader no event is made, whatever happens."""
    made: list[type[KVEvent]] = []

    def spy_on(kind: type[KVEvent]) -> None:
        make = kind.__init__

        def spy(self: KVEvent, *args: object) -> None:
            made.append(kind)
            make(self, *args)  # type: ignore[call-arg]

        monkeypatch.setattr(kind, "__init__", spy)

    async def live(rig: Rig) -> None:
        await rig.serve("abc")
        await rig.cache.admin.flush()
        rig.ctx.room.plan_room(Tier.DEVICE, 16)
        rig.ctx.tree.detach(rig.ctx.tree.roots[b""])

    rig = await open_cache()
    for kind in (Stored, Removed, Cleared):
        spy_on(kind)
    await live(rig)
    assert made == []
    reader = rig.cache.events()
    await live(rig)
    assert made == [type(event) for event in all_of(reader)] == [Stored, Stored, Removed, Cleared]


async def test_a_slow_reader_gets_a_gap_and_no_more_memory(open_cache: Opener) -> None:
    """Beyond its bound a reader keeps nothing but the number of events that it missed."""
    rig = await open_cache()
    reader = rig.cache.events(max_pending_pages=6)
    other = rig.cache.events()
    for letters in ("ab", "cd", "ef"):
        await rig.serve(letters)
        assert reader._pending_pages == sum(map(kv_events._num_pages, reader._pending)) <= 6
    assert all_of(reader) == [Gap(6)]
    assert len(all_of(other)) == 6
    await rig.serve("gh")
    assert [type(event) for event in all_of(reader)] == [Stored, Stored]


async def test_a_reader_that_keeps_up_never_gets_a_gap(open_cache: Opener) -> None:
    """What was read makes room for as many pages again."""
    rig = await open_cache()
    reader = rig.cache.events(max_pending_pages=4)
    for letters in ("ab", "cd", "ef", "gh", "ij"):
        await rig.serve(letters)
        assert [type(event) for event in all_of(reader)] == [Stored, Stored]


async def test_an_event_larger_than_the_bound_is_a_gap(open_cache: Opener) -> None:
    """The bound holds for one event alone, and the snapshot that follows has its pages all the same."""
    rig = await open_cache()
    reader = rig.cache.events(snapshot=True, max_pending_pages=3)
    assert all_of(reader) == [Gap(0)]
    await rig.serve("abcdef")
    gap, *snapshot = all_of(reader)
    assert gap == Gap(2)
    assert {page for event in snapshot if isinstance(event, Stored) for page in event.hashes} == set(
        page_hashes("abcdef")
    )


async def test_a_gap_in_a_snapshot_begins_anew(open_cache: Opener) -> None:
    """A reader that falls behind in the middle of a snapshot gets another one."""
    rig = await open_cache()
    await rig.serve("ab")
    await rig.serve("cd")
    reader = rig.cache.events(snapshot=True, max_pending_pages=2)
    assert reader.next_nowait() == Gap(0)
    assert isinstance(reader.next_nowait(), Stored)
    await rig.serve("ef")
    assert reader.next_nowait() == Gap(2)
    mirror = Mirror()
    mirror.follow(reader)
    assert mirror.held == held_by(rig)


async def test_a_reader_can_ask_to_begin_anew(open_cache: Opener) -> None:
    """``resync`` drops what waits and tells all that is held."""
    rig = await open_cache()
    reader = rig.cache.events(snapshot=True)
    await rig.serve("ab")
    mirror = Mirror()
    mirror.follow(reader)
    await rig.serve("cd")
    reader.resync()
    mirror.follow(reader)
    assert (mirror.num_gaps, mirror.held) == (2, held_by(rig))


async def test_a_reader_that_is_dropped_is_told_no_more(open_cache: Opener) -> None:
    """The cache does not keep a reader alive: one that is broken out of or forgotten is gone."""
    rig = await open_cache()
    reader = rig.cache.events()
    assert num_readers(rig) == 1
    del reader
    gc.collect()
    assert num_readers(rig) == 0
    await rig.serve("ab")
    async for _ in rig.cache.events(snapshot=True):
        assert num_readers(rig) == 1
        break
    gc.collect()
    assert num_readers(rig) == 0


async def test_a_reader_of_a_cancelled_task_is_told_no_more(open_cache: Opener) -> None:
    """Though the task is kept, and with it the traceback of its cancel."""
    rig = await open_cache()

    async def read() -> None:
        async for _ in rig.cache.events():
            pass

    task = asyncio.create_task(read())
    await turns(3)
    assert num_readers(rig) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()
    assert num_readers(rig) == 0
    assert task.cancelled()


async def test_a_closed_reader_has_ended(open_cache: Opener) -> None:
    """``aclose`` drops what waits, ends a wait, and may be called again."""
    rig = await open_cache()
    reader = rig.cache.events()
    await rig.serve("ab")
    await reader.aclose()
    await reader.aclose()
    assert num_readers(rig) == 0
    assert [event async for event in reader] == []
    waiting_reader = rig.cache.events()
    waiting = asyncio.ensure_future(waiting_reader.__anext__())
    await turns(3)
    await waiting_reader.aclose()
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_a_cancelled_wait_loses_nothing(open_cache: Opener) -> None:
    """Who gives up waiting finds the next event later."""
    rig = await open_cache()
    reader = rig.cache.events()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(reader)
    waiting = asyncio.ensure_future(anext(reader))
    await turns(3)
    rig.ctx.events.cleared(b"")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await anext(reader) == Cleared(b"", None)


async def test_a_waiting_reader_wakes(open_cache: Opener) -> None:
    """A wait for the next event ends when there is one."""
    rig = await open_cache()
    reader = rig.cache.events()
    for letters in ("ab", "cd"):
        waiting = asyncio.ensure_future(anext(reader))
        await turns(3)
        assert not waiting.done()
        await rig.serve(letters)
        event = await waiting
        assert isinstance(event, Stored)
        assert list(event.hashes) == page_hashes(letters)
        assert len(all_of(reader)) == 1


# Ends, and what is refused


async def test_readers_end_with_the_cache(open_cache: Opener) -> None:
    """What waits is still read; then iteration ends, and a new one is refused."""
    rig = await open_cache()
    reader = rig.cache.events()
    await rig.serve("ab")
    await rig.cache.close()
    assert [type(event) async for event in reader] == [Stored, Stored]
    with pytest.raises(ClosedError):
        rig.cache.events()


async def test_readers_end_when_the_cache_fails(open_cache: Opener) -> None:
    """A cache that has failed finds nothing any more, so there is nothing to tell."""
    rig = await open_cache()
    await rig.serve("ab")
    reader = rig.cache.events(snapshot=True)
    rig.ctx.fail(RuntimeError("a bug"))
    assert [event async for event in reader] == []
    assert [event async for event in rig.cache.events(snapshot=True)] == []
    assert num_readers(rig) == 0


async def test_readers_belong_on_the_loop_of_the_cache(open_cache: Opener) -> None:
    """From another thread neither a reader is made nor an event read."""
    rig = await open_cache()
    reader = rig.cache.events()
    for call in (rig.cache.events, reader.next_nowait, reader.resync):
        with pytest.raises(WrongLoopError):
            await asyncio.to_thread(call)
    with pytest.raises(WrongLoopError):
        await asyncio.to_thread(lambda: asyncio.run(reader.aclose()))


@pytest.mark.parametrize("bound", [0, -1, 1.5, True])
async def test_a_bound_that_is_none_is_refused(open_cache: Opener, bound: int) -> None:
    """The bound of a reader is an integer of at least one page."""
    rig = await open_cache()
    with pytest.raises(ConfigError, match="max_pending_pages"):
        rig.cache.events(max_pending_pages=bound)


async def test_an_observer_alone_knows_no_names() -> None:
    """Roots that no request has named are told as plain ones."""
    events = KVEvents()
    reader = events.read({}, snapshot=False, max_pending_pages=1, check=lambda: None)
    events.cleared(b"unheard of")
    assert all_of(reader) == [Cleared(b"", None)]
