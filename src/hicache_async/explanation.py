"""Explanation: where each page of a prompt is, why a match and a prefetch end there, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from .types import State, Stop

MAX_ROWS = 24
"""Runs of pages that the text of an explanation shows; the rest is summed up."""


class Place(enum.StrEnum):
    """What is known of one page in one tier."""

    PRESENT = "yes"
    ARRIVING = "arriving"
    """Its bytes are on their way: a copy or a read runs, or the forward that writes them."""
    ABSENT = "no"
    UNKNOWN = "?"
    """Nobody was asked, or nobody could tell."""


class Keeper(enum.StrEnum):
    """Who keeps a page from being evicted."""

    LEASE = "lease"
    MOVE = "move"
    """A running copy, read, write or forward."""
    OPERATOR = "operator"
    CUT_OFF = "cut off"
    """Pages behind it that no match reaches any more, and that somebody still holds."""


class MatchStop(enum.StrEnum):
    """Why a match covers no more of a prompt."""

    WHOLE_PAGES = "whole_pages"
    LAST_TOKEN = "last_token"
    NOT_CACHED = "not_cached"
    ARRIVING = "arriving"
    BEING_COMPUTED = "being_computed"
    CUT_OFF = "cut_off"
    NO_REUSE = "no_reuse"


MATCH_REASONS = {
    MatchStop.WHOLE_PAGES: "it ends with the last whole page",
    MatchStop.LAST_TOKEN: "the last page is left out, since one token at least must be left to compute",
    MatchStop.NOT_CACHED: "the next page was never committed here, or was evicted",
    MatchStop.ARRIVING: "the next page is being read from the store for another request",
    MatchStop.BEING_COMPUTED: "the next page is being computed by another request",
    MatchStop.CUT_OFF: "the next page was cut off from matching, by a clear or after a failed forward or copy",
    MatchStop.NO_REUSE: "the cache serves without reuse",
}


@dataclass(frozen=True, slots=True)
class PageExplanation:
    """One whole page of a prompt.

    Attributes:
        index: from 0.
        start_token, end_token: which tokens of the prompt, half-open.
        key: its name in the store; of several chunks the first one's, or that of the first that is missing.
        device, host, store: whether it is there.
        marked_stored: whether this process takes it for stored, and so does not write it again.
        hits: requests that have committed it, while it is local.
        priority: the highest priority among them.
        keepers: who keeps it, or what stands on it, local.
    """

    index: int
    start_token: int
    end_token: int
    key: str
    device: Place = Place.ABSENT
    host: Place = Place.ABSENT
    store: Place = Place.UNKNOWN
    marked_stored: bool = False
    hits: int = 0
    priority: int = 0
    keepers: tuple[Keeper, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a cache knows of one prompt, at one moment. ``str()`` is a table for a terminal.

    Attributes:
        state: of the cache.
        page_size: tokens of a page.
        prompt_tokens: length of the prompt; its tokens behind the last whole page are in no page.
        namespace: what the names of all pages of this cache end in.
        device_tokens, local_tokens: what a match gives now.
        store_tokens: what a prefetch would find in the store beyond these.
        fetch_tokens: what it would bring of that, as far as it can be foreseen.
        match_stop, prefetch_stop: why they end there. A prefetch may end otherwise: with a read that goes
            wrong, with its deadline, or with what other ranks have.
        pages: all whole pages.
        store_fault: what went wrong when the store was asked; None: nothing.
        other_namespace: what the name of the first page that the store lacks ends in where it has this page
            under another name; None: not found, or the store cannot list its names.
        other_fields: what is written down in the store of the namespace that this name is in, as
            ``{"page_size": 64, ...}``; None: nothing that can be read.
        elsewhere_tokens: how many tokens of the prompt are local under another salt or adapter.
        hints: sentences that say what is in the way, and what to do; the most important one first.
    """

    state: State
    page_size: int
    prompt_tokens: int
    namespace: str
    device_tokens: int
    local_tokens: int
    store_tokens: int
    fetch_tokens: int
    match_stop: MatchStop
    prefetch_stop: Stop
    pages: tuple[PageExplanation, ...] = ()
    store_fault: str | None = None
    other_namespace: str | None = None
    other_fields: Mapping[str, object] | None = None
    elsewhere_tokens: int = 0
    hints: tuple[str, ...] = ()

    def __str__(self) -> str:
        lacking = [page for page in self.pages if page.store is Place.ABSENT]
        lines = [
            f"prompt    {self.prompt_tokens:,} tokens, {len(self.pages):,} whole pages of {self.page_size}; "
            f"the cache is {self.state}",
            f"names     <page hash>{self.namespace}",
            "",
            *(_table(self.pages) if self.pages else ()),
            *([""] if self.pages else ()),
            f"match     {self.local_tokens:,} tokens are local, {self.device_tokens:,} of them on the device: "
            f"{MATCH_REASONS[self.match_stop]}",
            f"prefetch  {self.store_tokens:,} tokens more are found, {self.fetch_tokens:,} would be brought: "
            f"{self.prefetch_stop}",
            *(f"missing   page {page.index:,} of the store: {page.key}" for page in lacking[:1]),
            *(f"hint      {hint}" for hint in self.hints),
        ]
        return "\n".join(lines)


def _table(pages: tuple[PageExplanation, ...]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [_HEAD]
    runs = [list(run) for _, run in groupby(pages, _state)]
    rows += [_row(run) for run in runs[:MAX_ROWS]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(runs) > MAX_ROWS:
        rest = sum(map(len, runs[MAX_ROWS:]))
        yield f"and {rest:,} pages more, in {len(runs) - MAX_ROWS:,} runs"


_HEAD = ("pages", "tokens", "device", "host", "store", "hits", "priority", "kept by", "")


def _state(page: PageExplanation) -> tuple[object, ...]:
    places = (page.device, page.host, page.store, page.marked_stored)
    return (*places, page.hits, page.priority, page.keepers)


def _row(run: list[PageExplanation]) -> tuple[str, ...]:
    first, last = run[0], run[-1]
    doubtful = first.marked_stored and first.store is Place.ABSENT
    return (
        _span(first.index, last.index),
        _span(first.start_token, last.end_token - 1),
        first.device,
        first.host,
        first.store,
        str(first.hits),
        str(first.priority),
        ", ".join(first.keepers) or "-",
        "taken for stored" if doubtful else "",
    )


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"
