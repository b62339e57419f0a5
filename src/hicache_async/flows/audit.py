"""Audit: every page in one place, every pin and charge accounted for by a live lease or move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

from ..core.audit import check_anchors, check_capacity, check_owner, check_pins, check_tree, tree_pages
from ..core.holding import Holding
from ..core.node import Node
from ..core.pool import NO_PAGES, Owner
from ..errors import InvariantError
from ..types import Pages, State, Tier
from .context import Context


def audit(ctx: Context, holdings: Collection[Holding], step_pages: Pages) -> None:
    """Prove the books of an open cache.

    Args:
        holdings: all live ones.
        step_pages: device pages granted to the current step and not used yet.
    Raises: InvariantError: something is held twice, by nobody, or counted wrong.
    """
    for pool in (ctx.device_pool, ctx.host_pool):
        check_capacity(pool)
    leased = [holding.table.own_pages() for holding in holdings] + [step_pages]
    check_owner(ctx.device_pool, Owner.LEASE, np.concatenate(leased))
    check_owner(ctx.device_pool, Owner.HOP, _concatenated(ctx.device_pool.settling()))
    check_owner(ctx.host_pool, Owner.LEASE, NO_PAGES)
    fetching = [charge.unread for charge in ctx.charges] + list(ctx.hop_pages.values())
    check_owner(ctx.host_pool, Owner.HOP, _concatenated(fetching))
    if ctx.state is State.FAILED:
        return  # the tree is not to be trusted any more; nothing is taken from it
    for tier, pool in ((Tier.DEVICE, ctx.device_pool), (Tier.HOST, ctx.host_pool)):
        check_owner(pool, Owner.TREE, tree_pages(ctx.tree, tier))
    check_tree(ctx.tree, write_through=not ctx.is_write_back)
    check_pins(ctx.tree, _expected_pins(ctx, holdings))
    check_anchors(ctx.tree, Counter(pinned.node for pinned in ctx.moves if not pinned.tiers))
    _check_quota(ctx)


def _expected_pins(ctx: Context, holdings: Collection[Holding]) -> dict[Tier, Counter[Node]]:
    pins: dict[Tier, Counter[Node]] = {Tier.DEVICE: Counter(), Tier.HOST: Counter()}
    for holding in holdings:
        if holding.device_end is not None:
            pins[Tier.DEVICE][holding.device_end] += 1
        if holding.host_end is not None:
            pins[Tier.HOST][holding.host_end] += 1
    for pinned in ctx.moves:
        for tier in pinned.tiers:
            pins[tier][pinned.node] += 1
    return pins


def _check_quota(ctx: Context) -> None:
    charged = sum(charge.num_pages for charge in ctx.charges)
    if charged != ctx.prefetch_pages:
        raise InvariantError(
            f"{ctx.prefetch_pages} host pages are booked to prefetches, {charged} are charged"
        )
    for charge in ctx.charges:
        if not charge.is_reading and charge.holders <= 0:
            raise InvariantError(f"{charge.num_pages} host pages are charged to a prefetch that is over")


def _concatenated(pages: Collection[Pages]) -> Pages:
    return np.concatenate(list(pages)) if pages else NO_PAGES
