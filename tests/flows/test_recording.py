"""Recording: no load returns, and enters no step, before a stream can be ordered behind every layer of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from hicache_async import ClosedError, ConsensusError, LeaseError, Loading, PrefixLease, State
from hicache_async.testing.virtual_device import NotReadyError
from tests.behaviour.test_rank_agreement import ROOMY, Opening, bring, open_group
from tests.flows.rig import NUM_LAYERS, PAGE_TOKENS, Opener, Rig, driven, on_host, page_tokens, turns
from tests.flows.test_cancellation import CANCELS, Cancel, check_all_given_back

pytestmark = pytest.mark.asyncio

__all__ = ["open_group"]  # a fixture

Holding = Callable[..., Awaitable[Rig]]


@pytest_asyncio.fixture
async def open_held(open_cache: Opener) -> AsyncIterator[Holding]:
    """Open caches whose host holds prompts, on devices that move and record when told; let them go at the end."""
    rigs: list[Rig] = []

    async def opening(*prompts: str, **options: object) -> Rig:
        rig = await on_host(open_cache, *prompts, **options)
        rig.virtual.holds_recording = True
        rigs.append(rig)
        return rig

    yield opening
    for rig in rigs:
        rig.virtual.let_go()


def started(work: Awaitable[Loading]) -> asyncio.Task[Loading]:
    """Begin to load."""
    return asyncio.ensure_future(work)  # type: ignore[return-value]


async def held_back(lease: PrefixLease) -> asyncio.Task[Loading]:
    """Begin a load that copies, and see that it does not return."""
    loading = started(lease.load())
    await turns()
    assert not loading.done()
    return loading


async def check_serves(rig: Rig, letters: str, cached: int) -> None:
    """Let the device do as it likes, and serve a prompt of which so many tokens are on the device already."""
    rig.virtual.let_go()
    await rig.cache.begin_step(0)  # gives back what the last step has not used
    served = await rig.serve(letters, prefetch=False)
    assert served.books.device == cached
    await rig.cache.admin.flush()
    rig.check_local(letters)
    await check_all_given_back(rig)


# When load() returns


async def test_a_load_returns_when_every_layer_is_recorded(open_held: Holding) -> None:
    """Not one layer earlier; then none of them is an order behind nothing, and nothing has moved before."""
    rig = await open_held("abc")
    with rig.lease("abc") as lease:
        loads = await held_back(lease)
        for _ in range(NUM_LAYERS):
            assert not loads.done()
            assert rig.virtual.record(1) == 1
            await turns()
        loading = loads.result()
        for layer in range(NUM_LAYERS):
            with pytest.raises(NotReadyError):
                loading.block(layer)
            rig.virtual.advance()
            loading.block(layer)
        rig.check(lease, 12)


async def test_nothing_moves_before_it_is_recorded(open_held: Holding) -> None:
    """A device told to move moves what is recorded, and the load is whole all the same."""
    rig = await open_held("abc")
    with rig.lease("abc") as lease:
        loads = await held_back(lease)
        assert rig.virtual.advance_all() == 0
        rig.virtual.record(1)
        assert rig.virtual.advance_all() == 1
        rig.virtual.record()
        await (await loads).ready(0)
        assert rig.virtual.advance_all() == NUM_LAYERS - 1
        await loads.result().finished()
        rig.check(lease, 12)


@pytest.mark.parametrize("letters", ["abcd", "ab", "abxy"])
async def test_who_stands_on_anothers_load_waits_for_it(open_held: Holding, letters: str) -> None:
    """A load that copies nothing itself returns when what it stands on is recorded."""
    rig = await open_held("abcd")
    with rig.lease("abcd") as first, rig.lease(letters) as second:
        loads = [await held_back(first), await held_back(second)]
        assert rig.virtual.num_submitted == 1
        rig.virtual.record(NUM_LAYERS - 1)
        await turns()
        assert not any(load.done() for load in loads)
        rig.virtual.record()
        await turns()
        for load in loads:
            with pytest.raises(NotReadyError):
                load.result().block(NUM_LAYERS - 1)
        rig.virtual.advance_all()
        assert loads[1].result().loaded_tokens == 0
        rig.check(second, loads[1].result().tokens)


async def test_who_stands_on_anothers_load_and_copies_waits_for_both(open_held: Holding) -> None:
    """The first half of a prefix being recorded is not enough for the whole of it."""
    rig = await open_held("abcd")
    with rig.lease("ab") as first, rig.lease("abcd") as second:
        loads = [await held_back(first), await held_back(second)]
        rig.virtual.record(NUM_LAYERS)
        await turns()
        assert [load.done() for load in loads] == [True, False]
        rig.virtual.record()
        assert (await loads[1]).loaded_tokens == 8


async def test_a_load_that_copies_nothing_does_not_wait(open_held: Holding) -> None:
    """A cold prompt and a prefix that is there return while the loads of others wait."""
    rig = await open_held("ab", "cd")
    with rig.lease("ab") as there:
        loads = await held_back(there)
        rig.virtual.record()
        rig.virtual.advance_all()
        await loads
        await turns()
        with rig.lease("cd") as other, rig.lease("ab") as hit, rig.lease("xy") as cold:
            waiting = await held_back(other)
            assert [(await lease.load()).tokens for lease in (hit, cold)] == [8, 0]
            rig.virtual.record()
            await waiting


async def test_a_lease_released_while_its_load_waits(open_held: Holding) -> None:
    """Its load says so when it is recorded; the pages are the tree's by then, and nothing is lost."""
    rig = await open_held("abc")
    lease = rig.lease("abc")
    loads = await held_back(lease)
    lease.release()
    rig.cache.audit()
    rig.virtual.record()
    await turns()
    with pytest.raises(LeaseError):
        loads.result()
    assert rig.cache.stats().host_tokens == 0, "nobody was served"
    rig.virtual.advance_all()
    await turns()
    await check_serves(rig, "abc", 12)


# Cancelled while it waits


@pytest.mark.parametrize("cancel", CANCELS)
@pytest.mark.parametrize("num_turns", [*range(6), 60])
async def test_a_load_cancelled_while_it_waits(open_held: Holding, cancel: Cancel, num_turns: int) -> None:
    """Its copy goes on and is of use to the next; the pages come back at release, and no slot is lost."""
    rig = await open_held("abc", max_loads_in_flight=1)
    lease = rig.lease("abc")
    assert await cancel(lease.load, num_turns)
    rig.cache.audit()
    lease.release()
    rig.cache.audit()
    num_submitted = rig.virtual.num_submitted
    assert num_submitted == 1 or num_turns < 3
    await check_serves(rig, "abc", 12 * num_submitted)


@pytest.mark.parametrize("cancel", CANCELS)
async def test_one_of_two_is_cancelled(open_held: Holding, cancel: Cancel) -> None:
    """The other goes on waiting for the same copy, and returns when it is recorded."""
    rig = await open_held("abc")
    lease, other = rig.lease("abc"), rig.lease("abc")
    waiting = [await held_back(other)]
    assert await cancel(lease.load, 60)
    lease.release()
    await turns()
    assert not waiting[0].done()
    rig.virtual.record()
    loading = await waiting[0]
    rig.virtual.advance_all()
    await loading.finished()
    rig.check(other, 12)
    other.release()
    await check_serves(rig, "abc", 12)


async def test_close_ends_the_wait(open_held: Holding) -> None:
    """A load that waits to be recorded, and a step that waits for that load, raise ClosedError."""
    rig = await open_held("abc", close_timeout_s=0.05)
    lease = rig.lease("abc")
    loads = await held_back(lease)
    steps = asyncio.ensure_future(rig.cache.begin_step(0))
    await turns()
    with pytest.warns(ResourceWarning, match="not released"):
        await rig.cache.close()
    for waiting in (steps, loads):
        with pytest.raises(ClosedError):
            waiting.result()
    await rig.device.aclose()
    lease.release()


# A copy that fails


@pytest.mark.parametrize("num_recorded", [0, 1, NUM_LAYERS])
async def test_a_copy_that_fails_before_it_is_recorded(open_held: Holding, num_recorded: int) -> None:
    """The load returns, whoever waits for its bytes hears of it, and the next request computes them."""
    rig = await open_held("abcd")
    with rig.lease("abcd") as lease, rig.lease("ab") as second:
        loads = [await held_back(lease), await held_back(second)]
        rig.virtual.record(num_recorded)
        rig.virtual.pending[0].fail(OSError("the bus is on fire"))
        await turns()
        assert all(load.done() for load in loads)
        for load in loads:
            for layer in range(NUM_LAYERS):
                with pytest.raises(OSError, match="on fire"):
                    load.result().block(layer)
                with pytest.raises(OSError, match="on fire"):
                    await load.result().ready(layer)
        rig.cache.audit()
        assert rig.where("abcd") == ""
        with rig.lease("abcd") as later:
            assert later.local_tokens == 0
    await check_serves(rig, "abcd", 0)


async def test_a_copy_that_fails_behind_its_first_layer(open_held: Holding) -> None:
    """What has moved is usable, the rest is not, and none of it is matched again."""
    rig = await open_held("abcd")
    rig.virtual.fail_next(OSError("the bus is on fire"), layer=1)
    with rig.lease("abcd") as lease:
        loads = await held_back(lease)
        rig.virtual.record()
        loading = await loads
        assert rig.virtual.advance_all() == 1
        await loading.ready(0)
        with pytest.raises(OSError, match="on fire"):
            await loading.ready(1)
        await turns()
        assert rig.where("abcd") == ""
        assert rig.counters["failed_copies"] == 1
    await check_serves(rig, "abcd", 0)


async def test_a_copy_behind_another_fails(open_held: Holding) -> None:
    """The load before it is whole, and who stands on both hears of the failure."""
    rig = await open_held("abcd")
    with rig.lease("ab") as first, rig.lease("abcd") as second:
        loads = [await held_back(first), await held_back(second)]
        rig.virtual.pending[1].fail(OSError("the bus is on fire"))
        await turns()
        assert not any(load.done() for load in loads)
        rig.virtual.record()
        rig.virtual.advance_all()
        await (await loads[0]).finished()
        rig.check(first, 8)
        with pytest.raises(OSError, match="on fire"):
            await (await loads[1]).finished()
        await turns()
        assert rig.where("abcd") == "bb"
    await check_serves(rig, "abcd", 8)


# Steps


async def test_no_step_hands_out_what_has_not_returned(open_held: Holding) -> None:
    """begin_step() waits for the load, and then hands it out, with the pages asked for."""
    rig = await open_held("abc")
    with rig.lease("abc") as lease:
        loads = await held_back(lease)
        steps = asyncio.ensure_future(rig.cache.begin_step(2))
        await turns()
        assert not steps.done()
        rig.virtual.record(1)
        await turns()
        assert not steps.done()
        rig.virtual.record()
        await turns()
        assert loads.done() and steps.done()
        assert (steps.result().num_pages, steps.result().loaded) == (2, (lease,))
        assert (await rig.cache.begin_step(0)).loaded == ()


@pytest.mark.parametrize("cancel", CANCELS)
async def test_a_step_goes_on_without_a_load_that_was_cancelled(open_held: Holding, cancel: Cancel) -> None:
    """It waits for nobody who has gone; a request that was released does not enter."""
    rig = await open_held("abc")
    lease = rig.lease("abc")
    steps: list[asyncio.Task[object]] = []

    async def load_and_release() -> None:
        with lease:
            loads = started(lease.load())
            steps.append(asyncio.create_task(begun(rig)))
            await loads

    assert await cancel(load_and_release, 60)
    await turns()
    assert steps[0].done() and steps[0].result() == (2, ())
    await check_serves(rig, "abc", 12)


@pytest.mark.parametrize("cancel", CANCELS)
async def test_a_step_does_not_wait_for_the_release_of_a_load_that_was_cancelled(
    open_held: Holding, cancel: Cancel
) -> None:
    """A step goes on once nobody waits for the load any more, though the lease is still held."""
    rig = await open_held("abc")
    with rig.lease("abc") as lease:
        assert await cancel(lease.load, 60)
        steps = asyncio.create_task(begun(rig))
        await turns()
        assert steps.result()[0] == 2
    await check_serves(rig, "abc", 12)


async def begun(rig: Rig) -> tuple[int, tuple[PrefixLease, ...]]:
    """Begin a step, and return what it grants."""
    grant = await rig.cache.begin_step(2)
    return grant.num_pages, tuple(grant.loaded)


async def test_a_step_goes_on_without_a_lease_that_was_released(open_held: Holding) -> None:
    """Released by its owner while its load still waits, a request enters no step and holds up none."""
    rig = await open_held("abc", "xyz")
    lease, other = rig.lease("abc"), rig.lease("xyz")
    loads = [await held_back(lease), await held_back(other)]
    steps = asyncio.create_task(begun(rig))
    await turns()
    lease.release()
    await turns()
    assert not steps.done()  # for the other one
    other.release()
    await turns()
    assert steps.done() and steps.result() == (2, ())
    rig.virtual.record()
    await asyncio.wait(loads)
    await check_serves(rig, "abc", 12)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("cancel", CANCELS)
async def test_a_step_cancelled_while_it_waits(open_held: Holding, cancel: Cancel, times: int) -> None:
    """The next call gets what this one would have got, and it waits for the load as well."""
    rig = await open_held("abc", "xyz")
    with rig.lease("abc") as lease, rig.lease("xyz") as other:
        loads = [await held_back(lease), await held_back(other)]
        for _ in range(times):
            assert await cancel(lambda: begun(rig), 20)
        assert not any(load.done() for load in loads)
        steps = asyncio.create_task(begun(rig))
        await turns()
        assert not steps.done()
        rig.virtual.record()
        assert await steps == (2, (lease, other))
        assert rig.cache._movers.steps.number == 1
        await asyncio.gather(*loads)


async def test_two_wait_for_one_step_and_one_is_cancelled(open_held: Holding) -> None:
    """A load that is awaited by a step is not ended with the step's caller."""
    rig = await open_held("abc")
    with rig.lease("abc") as lease:
        loads = await held_back(lease)
        steps = asyncio.create_task(begun(rig))
        await turns()
        steps.cancel()
        await turns()
        assert not loads.done()
        rig.virtual.record()
        rig.virtual.advance_all()
        await (await loads).finished()
        rig.check(lease, 12)
        assert await begun(rig) == (2, (lease,))


async def test_a_cache_that_fails_while_a_step_waits(open_held: Holding) -> None:
    """The loop goes on, and the step returns once the load has."""
    rig = await open_held("abc")
    with rig.lease("abc") as lease:
        loads = await held_back(lease)
        steps = asyncio.create_task(begun(rig))
        await turns()
        rig.ctx.fail(RuntimeError("a bug"))
        await turns()
        rig.virtual.record()
        await turns()
        assert loads.done()
        assert steps.result() == (2, (lease,))
        assert rig.cache.state is State.FAILED


# Ranks


@pytest.mark.parametrize("late", [0, 1])
async def test_one_rank_records_later(open_group: Opening, late: int) -> None:
    """Both get the same grant, each once its own load has returned."""
    group = await open_group([ROOMY, ROOMY])
    await group.fill("abc", [3, 3])
    group.rigs[late].virtual.holds_recording = True
    leases = group.lease("abc", "request")
    loads = [asyncio.ensure_future(bring([lease])) for lease in leases]
    await driven(asyncio.wait({loads[1 - late]}), group.clock, 0.1)
    steps = [asyncio.create_task(begun(rig)) for rig in group.rigs]
    await turns(200)
    assert (loads[late].done(), steps[late].done()) == (False, False)
    group.rigs[late].virtual.let_go()
    grants = await driven(asyncio.gather(*steps), group.clock, 0.1)
    assert grants == [(2, (lease,)) for lease in leases]
    for rig, lease, load in zip(group.rigs, leases, loads, strict=True):
        assert load.result() == [3 * PAGE_TOKENS]
        rig.check(lease, 3 * PAGE_TOKENS)
        lease.release()


async def test_a_step_ends_with_the_loss_of_a_rank(open_group: Opening) -> None:
    """A rank that waits for its own load while the other is lost hears of that when the load has returned."""
    group = await open_group([ROOMY, ROOMY])
    await group.fill("abc", [3, 3])
    group.rigs[1].virtual.holds_recording = True
    leases = group.lease("abc", "request")
    loads = [asyncio.ensure_future(bring([lease])) for lease in leases]
    await driven(asyncio.wait({loads[0]}), group.clock, 0.1)
    steps = [asyncio.create_task(begun(rig)) for rig in group.rigs]
    await turns(200)
    assert not steps[1].done()
    group.ranks[0].kill()
    await turns(200)
    group.rigs[1].virtual.let_go()
    await turns(200)
    with pytest.raises(ConsensusError):
        steps[1].result()
    for lease in leases:
        lease.release()
    await asyncio.gather(*loads, *steps, return_exceptions=True)


async def test_a_request_cancelled_on_every_rank_holds_up_no_step(open_group: Opening) -> None:
    """While both wait for their recordings the engine gives the request up everywhere: both steps are empty."""
    group = await open_group([ROOMY, ROOMY])
    await group.fill("abc", [3, 3])
    for rig in group.rigs:
        rig.virtual.holds_recording = True
    leases = group.lease("abc", "request")
    loads = [asyncio.ensure_future(bring([lease])) for lease in leases]
    await turns(200)
    steps = [asyncio.create_task(begun(rig)) for rig in group.rigs]
    await turns(200)
    assert not any(each.done() for each in (*loads, *steps))
    for lease, load in zip(leases, loads, strict=True):
        load.cancel()
        lease.release()
    assert await driven(asyncio.gather(*steps), group.clock, 0.1) == [(2, ())] * 2
    for rig in group.rigs:
        rig.virtual.let_go()
    await turns()


async def test_one_load_a_lease_while_it_waits(open_held: Holding) -> None:
    """A load that has not returned is the lease's one load already, and what it holds can be used and extended."""
    rig = await open_held("abc")
    with rig.lease("abc") as lease:
        loads = await held_back(lease)
        with pytest.raises(LeaseError, match="one load a lease"):
            await lease.load()
        lease.extend(page_tokens("d"))
        rig.virtual.let_go()
        assert (await loads).tokens == 12
