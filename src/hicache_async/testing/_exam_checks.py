"""What must hold of an exam's cache: right bytes, books that close, nothing held, every page back."""

from __future__ import annotations

from collections.abc import Iterator

from ..cache import HiCache
from ..core.node import Node
from ..flows.audit import audit
from ._exam_engine import ExamEngine
from ._exam_pages import check


def check_bytes(engine: ExamEngine) -> None:
    """Compare every page that a match could find with what it should hold, and free pages with poison."""
    check_spoiled(engine)
    for node in _nodes(engine):
        for paged, copy in ((engine.kv, node.device), (engine.ctx.arena, node.host)):
            if copy.pages is not None and all(fence.passed() for fence in copy.ready):
                for page_hash, page in zip(node.hashes, copy.pages, strict=True):
                    check(paged, int(page), page_hash)


def check_spoiled(engine: ExamEngine) -> None:
    """Check that no freed page was touched."""
    for spoiled in engine.spoiled:
        spoiled.check()


def _nodes(engine: ExamEngine) -> Iterator[Node]:
    for root in engine.ctx.tree.roots.values():
        yield from (node for node in root.subtree() if node.parent is not None)


def check_closed(engine: ExamEngine) -> None:
    """Prove the books of a closed cache, whose loop may be gone, and that no freed page was touched."""
    movers = engine.cache._movers
    audit(engine.ctx, list(engine.cache._leases.values()), movers.device_room.step.own_pages())
    check_spoiled(engine)


def check_returned(engine: ExamEngine) -> None:
    """Check that nobody holds anything: no lease, no page outside free list and tree, no pin, no charge."""
    engine.cache.audit()
    if left := held_in(engine.cache):
        raise AssertionError(f"nobody should hold anything, but there are {left}; {engine.ctx.failure!r}")


def held_in(cache: HiCache, *, in_step: int = 0) -> dict[str, int]:
    """Return what somebody holds or waits for, by name; nothing that is 0.

    Args:
        in_step: device pages that the engine's step may have been granted and not used.
    """
    ctx, stats = cache._ctx, cache.stats()
    held = {
        "leases": stats.leases,
        "hops": stats.hops,
        "device pages leased": stats.device.leased - in_step,
        "device pages in hops": stats.device.in_hops,
        "host pages leased": stats.host.leased,
        "host pages in hops": stats.host.in_hops,
        "host pages charged": ctx.prefetch_pages,
        "moves": len(ctx.moves),
        "waits": len(ctx.waits),
        "votes": len(ctx.votes),
        "prefetches": len(ctx.prefetches),
        "prefetches in the queue": len(ctx.admission),
        "fetches": len(ctx.fetches),
        "announcements": len(ctx.announcements),
        "bugs": stats.counters.get("bugs", 0),
    }
    return {name: count for name, count in held.items() if count}


def check_all_free(engine: ExamEngine) -> None:
    """Check that every page of both tiers is free, and as it was spoiled."""
    check_returned(engine)
    stats = engine.cache.stats()
    for name, pages in (("device", stats.device), ("host", stats.host)):
        if pages.free != pages.capacity:
            raise AssertionError(f"{pages.capacity - pages.free} {name} pages are lost: {pages}")
    check_bytes(engine)
