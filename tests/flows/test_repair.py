"""Repair: what a fault kept from a tier is made up for by the next commit or hit, from the first hole on."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_async import PrefixLease, WritePolicy
from hicache_async.core.write_policy import MIN_COMMITS
from hicache_async.stores.memory import MemoryStore
from hicache_async.testing.faults import FlakyStore
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, page_hashes, turns
from tests.flows.stores import FaultAt, RecordingStore, page_keys

pytestmark = pytest.mark.asyncio

LETTERS = "abcdef"
COMMITS = {policy: MIN_COMMITS.get(policy, 1) for policy in WritePolicy}
"""How many bring a prompt down; under write_back with a mark that keeps all of the device copied."""

each_policy = pytest.mark.parametrize("policy", list(WritePolicy))
each_page = pytest.mark.parametrize("failing_page", range(1, len(LETTERS) + 1))


async def opened(open_cache: Opener, policy: WritePolicy, **options: Any) -> tuple[Rig, RecordingStore]:
    """Open a cache that brings down what is committed COMMITS times."""
    recording = RecordingStore(MemoryStore())
    options = {"store": recording, "write_back_low_water": 1.0, "store_batch_pages": 1, **options}
    return await open_cache(write_policy=policy, **options), recording


async def commit(rig: Rig, letters: str, num_commits: int = 1) -> None:
    """Serve a prompt so often, without asking the store."""
    for _ in range(num_commits):
        await rig.serve(letters, prefetch=False)
        await rig.cache.admin.flush()
        rig.cache.audit()


async def with_a_hole(open_cache: Opener, policy: WritePolicy, failing_page: int) -> Rig:
    """Commit LETTERS to a store that refuses one page once; what comes below it is not written."""
    store = FaultAt(MemoryStore(), "write", failing_page, "raise")
    rig, _ = await opened(open_cache, policy, store=store)
    await commit(rig, LETTERS, COMMITS[policy])
    assert rig.where(LETTERS) == "b" * len(LETTERS)
    assert await rig.check_stored(LETTERS) == failing_page - 1 == len(await page_keys(store.inner))
    return rig


@pytest.mark.parametrize("repair", ["commit", "hit"])
@each_page
@each_policy
async def test_one_failed_write_is_made_up_for(
    open_cache: Opener, policy: WritePolicy, failing_page: int, repair: str
) -> None:
    """Whichever page was refused, after the next commit or hit another process restores the whole prompt."""
    rig = await with_a_hole(open_cache, policy, failing_page)
    if repair == "commit":
        await commit(rig, LETTERS)
    else:
        with rig.lease(LETTERS) as lease:
            await lease.load()
        await rig.cache.admin.flush()
    assert await rig.check_stored(LETTERS) == len(LETTERS)
    again = await open_cache.restart(rig, write_policy=policy)
    assert (await again.serve(LETTERS)).books.store == len(LETTERS) * PAGE_TOKENS


@each_page
@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE])
async def test_the_same_request_makes_up_for_a_failed_write(
    open_cache: Opener, policy: WritePolicy, failing_page: int
) -> None:
    """A request that goes on has its own pages written that were refused, when it commits the next ones."""
    store = FaultAt(MemoryStore(), "write", failing_page, "raise")
    rig, _ = await opened(open_cache, policy, store=store)
    await commit(rig, LETTERS, COMMITS[policy] - 1)
    with rig.lease(LETTERS) as lease:
        await rig.run(lease, prefetch=False)
        await rig.cache.admin.flush()
        assert await rig.check_stored(LETTERS) == failing_page - 1
        lease.extend([1] * PAGE_TOKENS)
        lease.allocate_nowait(lease.num_tokens)
        lease.commit(lease.num_tokens)
        await rig.cache.admin.flush()
        assert await rig.check_stored(LETTERS) == len(LETTERS)


@each_page
@pytest.mark.parametrize("policy", list(WritePolicy))
async def test_a_clean_close_makes_up_for_a_failed_write(
    open_cache: Opener, policy: WritePolicy, failing_page: int
) -> None:
    """With no commit or hit before it, closing writes what is still missing to a store that works again."""
    rig = await with_a_hole(open_cache, policy, failing_page)
    again = await open_cache.restart(rig, write_policy=policy)
    assert await again.check_stored(LETTERS) == len(LETTERS)


async def with_a_missed_copy(
    open_cache: Opener, policy: WritePolicy, letters: str
) -> tuple[Rig, RecordingStore]:
    """Commit a prompt when no copy could be begun, so that only the device has it."""
    rig, recording = await opened(open_cache, policy, max_offloads_in_flight=1)
    await commit(rig, "xy", COMMITS[policy] - 1)
    await commit(rig, letters, COMMITS[policy] - 1)
    rig.virtual.auto = False
    leases: list[PrefixLease] = []
    for each in ("xy", letters):
        lease = rig.lease(each)
        leases.append(lease)
        loading = await lease.load(wait_pending=False)
        lease.allocate_nowait(lease.num_tokens)
        rig.compute(lease, start=loading.tokens)
        lease.commit(lease.num_tokens)
    assert (rig.where("xy"), rig.where(letters)) == ("bb", "d" * len(letters))
    assert rig.counters["offloads_skipped_queue_full"] == 1
    rig.virtual.auto = True
    rig.virtual.advance_all()
    for lease in leases:
        lease.release()
    await turns()
    await rig.cache.admin.flush()
    assert rig.where(letters) == "d" * len(letters)
    return rig, recording


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE])
async def test_a_missed_copy_is_made_up_for_before_what_lies_below(
    open_cache: Opener, policy: WritePolicy
) -> None:
    """A commit through pages that only the device has brings these down first, then its own, to host and store."""
    rig, recording = await with_a_missed_copy(open_cache, policy, "ab")
    recording.keys["write"].clear()
    rig.virtual.auto = False
    with rig.lease("abcdef") as lease:
        await lease.load()
        lease.allocate_nowait(lease.num_tokens)
        rig.compute(lease, start=8)
        lease.commit(lease.num_tokens)
        copied = [page for copy in rig.virtual.pending for page in copy.plan.device_pages.tolist()]
        assert copied == lease.pages[: len(copied)].tolist()
    rig.virtual.auto = True
    rig.virtual.advance_all()
    await turns()
    await rig.cache.admin.flush()
    await commit(rig, "abcdef", COMMITS[policy] - 1)
    assert rig.where("abcdef") == "bbbbbb"
    assert await rig.check_stored("abcdef") == 6
    assert written(recording) == in_order(rig, "abcdef")


async def test_under_write_back_the_head_goes_before_its_tail(open_cache: Opener) -> None:
    """A tail on the host below pages that only the device has is stored after these, in the order of the prompt."""
    rig, recording = await opened(
        open_cache, WritePolicy.WRITE_BACK, device_pages=8, write_back_low_water=0.0
    )
    await commit(rig, "abcdef")
    with rig.lease("wxyz") as other:
        await other.load(total_tokens=16)
        assert rig.where("abcdef") == "ddddhh"
    await rig.cache.admin.flush()
    assert rig.where("abcdef") == "bbbbhh"
    assert await rig.check_stored("abcdef") == 6
    assert written(recording) == in_order(rig, "abcdef")


async def test_pages_on_both_sides_of_what_is_stored(open_cache: Opener) -> None:
    """Of a path whose middle came from the store the head and the tail are written, each page once, the head first."""
    recording = RecordingStore(MemoryStore())
    store = FlakyStore(recording, "write", error=OSError("at the commit, and again at the hit"), at={1, 2})
    rig = await open_cache(store=store, write_policy="write_through")
    await commit(rig, "ab")
    await rig.put_in_store("abcd", [2, 3])
    assert (await rig.serve("abcdef")).books.store == 8
    await rig.cache.admin.flush()
    assert await rig.check_stored("abcdef") == 6
    keys = in_order(rig, "abcdef")
    assert written(recording) == keys[:2] + keys[4:]


def written(recording: RecordingStore) -> list[str]:
    """Return the keys that were written, in order."""
    return [key for keys in recording.keys["write"] for key in keys]


def in_order(rig: Rig, letters: str) -> list[str]:
    """Return the keys of a prompt from its first page on."""
    return rig.ctx.keys.keys(page_hashes(letters))
