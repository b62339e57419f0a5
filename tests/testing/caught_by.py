"""Which check must catch which broken store."""

from __future__ import annotations

from collections.abc import Callable

CAUGHT_BY: dict[type, list[str]] = {}
"""Broken store to the names of the checks that must fail."""


def caught_by(*names: str) -> Callable[[type], type]:
    def note(store: type) -> type:
        CAUGHT_BY[store] = list(names)
        return store

    return note
