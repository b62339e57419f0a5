"""Write policies: after how many commits a page is copied to the host."""

from __future__ import annotations

from ..config import WritePolicy

MIN_COMMITS = {WritePolicy.WRITE_THROUGH: 1, WritePolicy.WRITE_THROUGH_SELECTIVE: 2}
"""Commits after which a page is copied to the host; under write_back it is copied ahead of eviction."""

ENOUGH_COMMITS = max(MIN_COMMITS.values())
"""What a page counts as that is to be copied whatever the policy."""
