"""A rank that closes, fails or cannot keep its word keeps no other waiting, and ends its own waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from hicache_async import CapacityError, ClosedError, ConsensusError, InvariantError, State
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
