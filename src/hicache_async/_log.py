"""The logger, and the closed list of event names: one line per outcome, none per page.

Levels, processors and output are the application's, by ``structlog.configure``. An application that
has not configured structlog hears warnings and errors only.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

EVENTS = frozenset(
    {
        "backup.stopped",
        "cache.close_abandoned",
        "cache.cleared",
        "cache.closed",
        "cache.failed",
        "cache.opened",
        "clear.incomplete",
        "copy.failed",
        "device.copies_running",
        "device.unpin_failed",
        "eviction.policy_failed",
        "events.bound",
        "events.failed",
        "events.replay_refused",
        "host.usage_unreadable",
        "keys.narrow",
        "prefetch.anchor_not_backed",
        "prefetch.settled",
        "ranks.lost",
        "ranks.none",
        "runner.close_abandoned",
        "runner.failed",
        "runner.post_failed",
        "runner.posts_abandoned",
        "runner.undo_failed",
        "store.attached",
        "store.breaker_closed",
        "store.breaker_half_open",
        "store.breaker_opened",
        "store.detached",
        "store.fault",
        "store.full",
        "store.other_namespaces",
        "store.private_directory",
        "store.temp_swept",
        "store.unnamed_temp_refused",
        "store.trimming",
        "store.undeletable",
        "store.unwritable",
    }
)
"""Every event the library logs: dotted noun.verb."""

_QUIET = structlog.make_filtering_bound_logger(logging.WARNING)


def _bind(wrapped: object, processors: Any, context: Any) -> Any:
    wrapper: Any = structlog.get_config()["wrapper_class"] if structlog.is_configured() else _QUIET
    return wrapper(wrapped, processors=processors, context=context)


logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
    None,
    wrapper_class=_bind,  # type: ignore[arg-type] # called when a line is logged, so the choice is made then
)
