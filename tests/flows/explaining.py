"""What the tests of explanations share."""

from __future__ import annotations

from hicache_async.explanation import Explanation, Place
from hicache_async.types import Tokens
from tests.flows.rig import Rig, tokens

LETTERS = {Place.PRESENT: "y", Place.ABSENT: "-", Place.ARRIVING: "~", Place.UNKNOWN: "?"}


async def explained(
    rig: Rig, prompt: str | Tokens, salt: bytes = b"", adapter: str | None = None
) -> Explanation:
    """Explain a prompt of letters, and one token more, or of tokens."""
    ids = tokens(prompt) if isinstance(prompt, str) else prompt
    return await rig.cache.admin.explain(ids, salt=salt, adapter=adapter)


def places(explanation: Explanation) -> tuple[str, str, str]:
    """Return where the pages are on device, host and store, one letter for each page."""
    return (
        "".join(LETTERS[page.device] for page in explanation.pages),
        "".join(LETTERS[page.host] for page in explanation.pages),
        "".join(LETTERS[page.store] for page in explanation.pages),
    )


def says(explanation: Explanation, *words: str) -> bool:
    """Return whether one of the hints has all of ``words``, and the text shows that hint."""
    return any(all(word in hint for word in words) and hint in str(explanation) for hint in explanation.hints)
