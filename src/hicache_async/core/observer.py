"""TreeObserver: whoever wants to hear what the prefix tree holds."""

from __future__ import annotations

from typing import Protocol

from ..types import Tier
from .node import Node


class TreeObserver(Protocol):
    """Hears what a match can reach from now on, and what not any more. Called in the middle of a change."""

    def stored(self, tier: Tier, node: Node) -> None:
        """Hear that ``node`` has got its pages of ``tier``."""

    def removed(self, tier: Tier, node: Node) -> None:
        """Hear that a match no longer finds the pages of ``tier`` of ``node``."""

    def cleared(self, seed: bytes) -> None:
        """Hear that all prompts of one root have gone."""


class Nobody:
    """Hears nothing."""

    def stored(self, tier: Tier, node: Node) -> None:
        pass

    def removed(self, tier: Tier, node: Node) -> None:
        pass

    def cleared(self, seed: bytes) -> None:
        pass
