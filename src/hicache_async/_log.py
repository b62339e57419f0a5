"""The logger, and the closed list of event names: one line per outcome, none per page."""

from __future__ import annotations

import structlog

EVENTS = frozenset(
    {
        "cache.opened",
        "cache.closed",
        "cache.close_abandoned",
        "cache.failed",
        "prefetch.settled",
        "prefetch.anchor_not_backed",
        "backup.dropped",
        "backup.stopped",
        "store.fault",
        "store.unwritable",
        "store.private_directory",
        "store.temp_swept",
        "lease.unreleased",
    }
)
"""Every event the library logs: dotted noun.verb."""

logger: structlog.stdlib.BoundLogger = structlog.get_logger("hicache_async")
