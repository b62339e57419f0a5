"""A rank that closes, fails or cannot keep its word keeps no other waiting, and ends its own waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from hicache_async import CapacityError, ClosedError, ConsensusError, InvariantError, LeaseError, State
from hicache_async.config import RankLoss
from tests.behaviour.test_rank_agreement import Group, Opening, bring, open_group
from tests.flows.rig import Rig, driven, turns

__all__ = ["open_group"]  # the fixture

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


async def on_devices(group: Group, letters: str) -> None:
    """Let every rank compute a prompt and keep it."""
    leases = group.lease(letters, "warm")
    await bring(leases)
    await group.step()
    for rig, lease in zip(group.rigs, leases, strict=True):
        allocation = lease.allocate_nowait(lease.num_tokens)
        allocation.block()
        rig.compute(lease)
        lease.commit(lease.num_tokens)
        lease.release()


def forget_tree(rig: Rig) -> None:
    """Cut off all that is cached, as a copy that failed does with what was to come behind it."""
    tree = rig.ctx.tree
    for root in list(tree.roots.values()):
        for node in list(root.children.values()) if root.children else ():
            tree.detach(node)


async def ended(group: Group, works: Sequence[asyncio.Task[object]]) -> list[object]:
    """Return what each ended with, an exception as itself."""
    return await driven(asyncio.gather(*works, return_exceptions=True), group.clock, 0.2)


async def test_a_close_ends_the_waits_for_the_others(open_group: Opening) -> None:
    """Whoever waits for a step or a load of this cache hears that it is closed, and does not wait for the group."""
    group = await open_group([8, 8])
    rig = group.rigs[0]
    lease = rig.lease("ab", "one")
    waits = [asyncio.create_task(lease.load()), asyncio.create_task(rig.cache.begin_step(1))]
    await turns()
    assert not any(wait.done() for wait in waits)
    with pytest.warns(ResourceWarning, match="was not released"):
        await rig.cache.close()
    assert all(wait.done() for wait in waits)
    assert all(isinstance(wait.exception(), ClosedError) for wait in waits)
    lease.release()


@pytest.mark.parametrize("closed", [0, 1])
async def test_a_closed_cache_takes_part_in_no_step(open_group: Opening, closed: int) -> None:
    """The other ranks hear of it at their next step, and before that offer nothing that they would wait with."""
    group = await open_group([8, 8])
    await on_devices(group, "ab")
    other = group.rigs[1 - closed]
    await group.rigs[closed].cache.close()
    with other.lease("ab", "later") as lease:
        assert (await driven(lease.load(), group.clock, 0.2)).tokens == 0
    with pytest.raises(ConsensusError, match="has left its group"):
        await driven(other.cache.begin_step(), group.clock, 0.2)
    assert other.cache.state is State.NO_REUSE
    await other.cache.begin_step()


async def test_a_rank_that_cannot_give_what_it_offered_ends_the_group(open_group: Opening) -> None:
    """It raises where it was to load, and no other rank runs a step with what it has not."""
    group = await open_group([8, 8])
    await on_devices(group, "abc")
    leases = group.lease("abc", "one")
    first = asyncio.create_task(leases[1].load())
    await turns()
    forget_tree(group.rigs[1])
    loads = await ended(group, [asyncio.create_task(leases[0].load()), first])  # type: ignore[list-item]
    assert isinstance(loads[1], ConsensusError)
    steps = [asyncio.create_task(rig.cache.begin_step()) for rig in group.rigs]
    assert all(isinstance(each, ConsensusError) for each in await ended(group, steps))  # type: ignore[arg-type]
    for lease in leases:
        lease.release()


async def test_a_rank_that_fails_with_an_offer_out_ends_the_group(open_group: Opening) -> None:
    """Its own caller hears of the bug, the others of a rank that is gone."""
    group = await open_group([8, 8])
    await on_devices(group, "abc")
    leases = group.lease("abc", "one")
    first = asyncio.create_task(leases[1].load())
    await turns()
    group.rigs[1].ctx.fail(RuntimeError("a planted bug"))
    forget_tree(group.rigs[1])
    loads = await ended(group, [asyncio.create_task(leases[0].load()), first])  # type: ignore[list-item]
    assert isinstance(loads[1], InvariantError)
    with pytest.raises(ConsensusError):
        await driven(group.rigs[0].cache.begin_step(), group.clock, 0.2)
    for lease in leases:
        lease.release()


async def test_a_group_serves_one_cache(open_group: Opening) -> None:
    """A second cache on ranks that have left finds nobody to agree with, and says so."""
    group = await open_group([8, 8], on_rank_loss=RankLoss.NO_REUSE)
    await group.rigs[0].cache.close()
    with pytest.raises(ConsensusError, match="has left its group"):
        await group.ranks[0].agree(bytes(16), (1,))


async def test_a_failed_cache_gives_its_device_to_those_who_come(open_group: Opening) -> None:
    """Requests that began after the failure hold nothing of the tree, so they keep none of its pages away."""
    group = await open_group([4, 4])
    await on_devices(group, "abc")
    rig = group.rigs[0]
    rig.ctx.fail(RuntimeError("a planted bug"))
    leases = group.lease("xyz", "after")
    await bring(leases)
    try:
        assert len(leases[0].allocate_nowait(13).pages) == 4
    except CapacityError as error:
        pytest.fail(f"starved: {error}")
    finally:
        for lease in leases:
            lease.release()


async def test_what_is_cut_off_while_room_is_waited_for_is_not_offered(
    open_group: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank promises what it has when it votes, so a clear or a failed forward in between makes a miss for all."""
    group = await open_group([8, 8])
    await on_devices(group, "abc")
    loads, rig = group.rigs[1].cache._movers.loads, group.rigs[1]
    make_room = loads._make_room

    async def cut_off_meanwhile(*arguments: Any) -> None:
        await make_room(*arguments)
        forget_tree(rig)

    monkeypatch.setattr(loads, "_make_room", cut_off_meanwhile)
    leases = group.lease("abc", "one")
    assert await bring(leases) == [0, 0]
    assert [grant.loaded for grant in await group.step()] == [(lease,) for lease in leases]
    for lease in leases:
        lease.release()


async def test_a_grant_that_is_given_back_is_granted_again(open_group: Opening) -> None:
    """On one rank, while the others use theirs: all go on in step, and what entered enters once."""
    group = await open_group([8, 8])
    leases = group.lease("abc", "one")
    await bring(leases)
    grants = await group.step(3)
    grants[0].give_back()
    again = await group.rigs[0].cache.begin_step()
    assert (again.num_pages, again.loaded) == (3, (leases[0],))
    group.audit()
    assert [grant.loaded for grant in await group.step()] == [(), ()]
    for lease in leases:
        lease.release()
    assert not group.rigs[0].ctx.announcements


async def test_a_grant_given_back_has_no_request_that_has_gone(open_group: Opening) -> None:
    """Released in between, it enters no step."""
    group = await open_group([8, 8])
    leases = group.lease("abc", "one")
    await bring(leases)
    grants = await group.step()
    for lease in leases:
        lease.release()
    grants[0].give_back()
    assert (await group.rigs[0].cache.begin_step()).loaded == ()
    await group.step()


async def test_an_old_grant_cannot_be_given_back(open_group: Opening) -> None:
    """Nor one twice: the steps that follow would differ from those of the other ranks."""
    group = await open_group([8, 8])
    old = await group.step(2)
    with pytest.raises(LeaseError, match="not the last one"):
        await group.step(3)
        old[0].give_back()
    last = await group.step(1)
    last[0].give_back()
    with pytest.raises(LeaseError):
        last[0].give_back()
    assert (await group.rigs[0].cache.begin_step()).num_pages == 1
    assert [grant.num_pages for grant in await group.step(2)] == [2, 2]


async def test_a_closed_cache_says_which_loss_has_closed_it(open_group: Opening) -> None:
    """Its next step raises the loss, and whatever is called after that names it."""
    group = await open_group([8, 8], on_rank_loss=RankLoss.CLOSE)
    group.ranks[1].kill()
    await turns(200)
    cache = group.rigs.pop(0).cache
    assert cache.state is State.CLOSED
    with pytest.raises(ConsensusError, match="rank 1"):
        await cache.begin_step()
    with pytest.raises(ClosedError, match="because rank 1"):
        await cache.begin_step()
    group.rigs.clear()


async def test_a_load_that_a_mute_rank_spoiled_enters_after_a_loss(open_group: Opening) -> None:
    """Nobody is left to agree with on its step, and no load is forgotten."""
    group = await open_group([8, 8, 8])
    group.ranks[2].hold()
    *leases, third = group.lease("ab", "one")
    loads = [asyncio.create_task(lease.load()) for lease in leases]
    loadings = await ended(group, loads)  # type: ignore[arg-type]
    assert [loading.tokens for loading in loadings] == [0, 0]  # type: ignore[attr-defined]
    group.ranks[2].resume()
    third.release()
    await group.rigs[2].cache.close()
    steps = [asyncio.create_task(rig.cache.begin_step()) for rig in group.rigs[:2]]
    assert all(isinstance(each, ConsensusError) for each in await ended(group, steps))  # type: ignore[arg-type]
    for rig, lease in zip(group.rigs, leases, strict=False):
        assert (await rig.cache.begin_step()).loaded == (lease,)
        lease.release()
