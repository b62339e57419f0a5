"""Snapshot: the counts of one moment, frozen."""

from __future__ import annotations

from collections.abc import Mapping

from .abc import Store, SupportsStats
from .core.pool import Owner, PagePool
from .flows.context import Context
from .types import CacheStats, State, Tier, TierStats


def snapshot(ctx: Context, state: State, num_leases: int) -> CacheStats:
    """Return what the cache holds and has done."""
    metrics = ctx.metrics
    dropped = {reason: pages * ctx.page_tokens for reason, pages in ctx.room.dropped_pages.items()}
    return CacheStats(
        state=state,
        device=_tier(ctx.device_pool, ctx.room.evicted_pages[Tier.DEVICE]),
        host=_tier(ctx.host_pool, ctx.room.evicted_pages[Tier.HOST]),
        stage_room_tokens=max(0, ctx.host_pool.capacity - ctx.device_pool.capacity) * ctx.page_tokens,
        nodes=sum(1 for root in ctx.tree.roots.values() for node in root.subtree() if node is not root),
        leases=num_leases,
        hops=len(ctx.hops.live),
        device_tokens=metrics.device,
        host_tokens=metrics.host,
        store_tokens=metrics.store,
        computed_tokens=metrics.computed,
        dropped_tokens=dropped,
        unfulfilled_tokens=dict(metrics.unfulfilled),
        counters={**metrics.counters, **_store_counters(ctx.store)},
    )


def _store_counters(store: Store | None) -> dict[str, int]:
    # What a store of others calls its stats may be anything.
    counts = store.stats if isinstance(store, SupportsStats) else None
    if not isinstance(counts, Mapping):
        return {}
    return {f"store_{name}": count for name, count in counts.items() if isinstance(count, int)}


def _tier(pool: PagePool, evicted_pages: int) -> TierStats:
    return TierStats(
        capacity=pool.capacity,
        free=pool.num_free,
        fenced=pool.num_fenced,
        leased=len(pool.owned_by(Owner.LEASE)),
        in_hops=len(pool.owned_by(Owner.HOP)),
        in_tree=len(pool.owned_by(Owner.TREE)),
        evicted_pages=evicted_pages,
    )
