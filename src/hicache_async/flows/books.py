"""Books: where the tokens of one request's prompt came from."""

from __future__ import annotations

from ..core.holding import Holding
from ..types import Books
from .load import Loading
from .prefetch import Prefetch


def books_of(holding: Holding, loading: Loading, prefetch: Prefetch | None, page_tokens: int) -> Books:
    """Return the books of a request that has just loaded.

    What was fetched for it is the store's, whoever loaded it; what else this load brings is the host's, and
    the rest was on the device. What was fetched and then cut off from matching is not what was loaded.
    """
    tokens, prompt = loading.tokens, holding.length
    loaded_start = tokens - loading.loaded_tokens
    from_store = from_both = 0
    if prefetch is not None and holding.host_end is not None and holding.host_end.attached:
        for run in prefetch.brought:
            start, end = run.start * page_tokens, min(tokens, run.stop * page_tokens)
            from_store += max(0, end - start)
            from_both += max(0, end - max(start, loaded_start))
    from_host = loading.loaded_tokens - from_both
    return Books(prompt, tokens - from_store - from_host, from_host, from_store, prompt - tokens)
