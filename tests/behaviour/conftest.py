"""Fixtures of the behaviour tests: those of the flows."""

from __future__ import annotations

from tests.flows.conftest import logs, open_cache

__all__ = ["logs", "open_cache"]
