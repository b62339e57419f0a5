"""A mirror of a cache, kept by its events alone, and the cache's own word to compare it with."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache_async import Cleared, EventReader, Gap, KVEvent, Removed, Stored, Tier
from tests.flows.rig import Rig

Held = set[tuple[bytes, Tier]]


@dataclass(slots=True)
class Mirror:
    """What a router would believe: which page is in which tier."""

    held: Held = field(default_factory=set)
    names: dict[bytes, tuple[bytes, str | None]] = field(default_factory=dict)
    num_gaps: int = 0

    def apply(self, event: KVEvent) -> None:
        """Take one event over."""
        match event:
            case Stored():
                new = {(page_hash, event.tier) for page_hash in event.hashes}
                assert not new & self.held, "stored twice"
                self.held |= new
                self.names |= dict.fromkeys(event.hashes, (event.salt, event.adapter))
            case Removed():
                old = {(page_hash, event.tier) for page_hash in event.hashes}
                assert old <= self.held, "removed, but never stored"
                self.held -= old
            case Cleared():
                name = (event.salt, event.adapter)
                self.held = {page for page in self.held if self.names[page[0]] != name}
            case Gap():
                self.num_gaps += 1
                self.held.clear()

    def follow(self, reader: EventReader) -> None:
        """Take over all that there is to read."""
        while (event := reader.next_nowait()) is not None:
            self.apply(event)

    def local_pages(self, hashes: list[bytes], *tiers: Tier) -> int:
        """Return how many pages of a prompt, from its start on, are in one of ``tiers``."""
        count = 0
        while count < len(hashes) and any((hashes[count], tier) in self.held for tier in tiers):
            count += 1
        return count


def held_by(rig: Rig) -> Held:
    """Return which page is in which tier, as the tree has it."""
    return {
        (page_hash, tier)
        for root in rig.ctx.tree.roots.values()
        for node in root.subtree()
        for tier in (Tier.DEVICE, Tier.HOST)
        if node.copy_in(tier).pages is not None
        for page_hash in node.hashes
    }
