"""Explain: why a prompt hits as far as it does, looked up without leaving a trace in this process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from ..abc import Store
from ..core.hashing import HashChain
from ..core.holding import Holding
from ..core.keys import namespace_of
from ..core.manifest import Manifest
from ..core.node import Node, TierCopy
from ..core.tokens import TokenKey
from ..core.walk import Match, common_nbytes, pages_off_device
from ..explanation import Explanation, Keeper, MatchStop, PageExplanation, Place
from ..types import Stop
from .context import Context, Pinned
from .forecast import foresee_fetch
from .gates import Share, is_worth_fetching, outcome, refusal_to_ask
from .hints import hints
from .survey import Survey

ReadManifest: TypeAlias = Callable[[Store, str], Awaitable[Manifest | None]]
"""What returns the manifest of a namespace by its digest; None: there is none that can be read."""


async def explain(
    ctx: Context,
    key: TokenKey,
    chain: HashChain,
    read_manifest: ReadManifest,
    *,
    operator_pins: Collection[Pinned] = (),
) -> Explanation:
    """Say where each page of a prompt is, and why a match or a prefetch would end there now.

    In this process nothing changes: no page is taken or pinned, nothing counts as used or as a hit. The
    store is asked what a prefetch would ask, and some 30 questions more, or for its names where it can
    list them. It may take that for a use, and a listing of millions of names may take its time.

    Args:
        key, chain: the prompt, and what its page hashes depend on besides.
        read_manifest: asked for the namespace under which the store has what this cache lacks.
        operator_pins: what an operator keeps, to tell it from what moves keep.
    Raises: ClosedError: the cache was closed. Nothing for the store, each of whose answers is waited for
        ``store_timeout_s`` at most.
    Cancellation: ends the questions, too.
    """
    holding = Holding(ctx.tree, ctx.device_pool, key.fork(), len(key), chain, whole=False)
    prompt = _Prompt(ctx, holding, holding.hashes(holding.num_pages))
    survey = Survey(ctx, ctx.store if ctx.reuses else None, prompt.hashes)
    marked = prompt.marked_pages()
    manifest: Manifest | None = None
    if survey.store is not None and prompt.hashes:
        start_page = prompt.match().local_pages
        if refusal_to_ask(ctx, holding.limit_pages - start_page) is None:
            await survey.look(start_page, holding.limit_pages)
        await survey.complete()
        digest = namespace_of(_other_namespace(prompt, survey) or "")
        if digest and survey.fault is None and survey.is_current:
            manifest = await read_manifest(survey.store, digest)
        ctx.check_open()
        survey.written = prompt.marked_pages() - marked
    return _describe(prompt, survey, manifest, operator_pins)


def _other_namespace(prompt: _Prompt, survey: Survey) -> str | None:
    lacking = next((page for page in range(len(prompt.hashes)) if survey.is_stored(page) is False), None)
    return None if lacking is None else survey.other_namespace(lacking)


@dataclass(slots=True)
class _Prompt:
    """A prompt, and what this process knows of it now."""

    ctx: Context
    holding: Holding
    hashes: Sequence[bytes]

    def match(self) -> Match:
        """Return what a match would."""
        return self._look(self.holding.limit_pages, self.holding.chain.seed)

    def whole(self) -> Match:
        """Return how far all whole pages are cached, that which a match leaves out included."""
        return self._look(self.holding.num_pages, self.holding.chain.seed)

    def elsewhere_pages(self) -> int:
        """Return how far the prompt is cached under another salt or adapter."""
        others = [seed for seed in self.ctx.tree.roots if seed != self.holding.chain.seed]
        found = (self._look(self.holding.num_pages, seed).local_pages for seed in others)
        return max(found, default=0)

    def _look(self, num_pages: int, seed: bytes) -> Match:
        # As a match, but nothing counts as used; in a tree that is not to be trusted nothing is looked up.
        tree, data = self.ctx.tree, self.holding.key.data
        step = tree.page_nbytes
        offset, stop = 0, num_pages * step
        root = node = (self.ctx.reuses and tree.roots.get(seed)) or Node(None, seed, [])
        path: list[Node] = []
        tail_pages = 0
        while offset < stop and node.children:
            child = node.children.get(bytes(data[offset : offset + step]))
            if child is None:
                break
            tail_pages = common_nbytes(child.segment, data, offset, stop) // step
            path.append(child)
            offset += tail_pages * step
            if tail_pages < child.num_pages:
                break
            node = child
        local_pages = offset // step
        return Match(root, path, local_pages - pages_off_device(path, tail_pages), local_pages, tail_pages)

    def nodes(self) -> list[Node | None]:
        """Return the node of each whole page; None: it is not local."""
        whole = self.whole()
        local = [node for node in whole.path for _ in node.hashes][: whole.local_pages]
        return [*local, *[None] * (len(self.hashes) - len(local))]

    def marked_pages(self) -> set[int]:
        """Return the pages that this process takes for stored."""
        epoch = self.ctx.tree.store_epoch
        return {page for page, node in enumerate(self.nodes()) if node is not None and node.stored == epoch}

    def pages_being_read(self) -> set[int]:
        """Return the pages that running reads are bringing to the host."""
        return {
            page
            for fetch in self.ctx.fetches.values()
            for page in range(fetch.attached_page, fetch.start_page + fetch.num_shared(self.hashes))
        }

    def match_stop(self) -> MatchStop:
        """Return why a match covers no more."""
        ctx, holding, page = self.ctx, self.holding, self.match().local_pages
        if not ctx.reuses:
            return MatchStop.NO_REUSE
        if page == holding.limit_pages:
            return MatchStop.LAST_TOKEN if page < holding.num_pages else MatchStop.WHOLE_PAGES
        if page in self.pages_being_read():
            return MatchStop.ARRIVING
        if ctx.announcements.pending(None, self.hashes[page : page + 1]):
            return MatchStop.BEING_COMPUTED
        if any(self.hashes[page] in node.hashes for node in ctx.tree.detached):
            return MatchStop.CUT_OFF
        return MatchStop.NOT_CACHED


def _describe(
    prompt: _Prompt, survey: Survey, manifest: Manifest | None, operator_pins: Collection[Pinned]
) -> Explanation:
    # Sync: what is said of this process held at one moment.
    ctx = prompt.ctx
    match = prompt.match()
    hit_pages, share = _foresee_prefetch(prompt, match, survey)
    pages = _pages(prompt, survey, operator_pins)
    other = _other_namespace(prompt, survey)
    is_its = manifest is not None and manifest.digest == namespace_of(other or "")
    explanation = Explanation(
        state=ctx.state,
        page_size=ctx.page_tokens,
        prompt_tokens=prompt.holding.length,
        namespace=ctx.keys.suffix,
        device_tokens=match.device_pages * ctx.page_tokens,
        local_tokens=match.local_pages * ctx.page_tokens,
        store_tokens=hit_pages * ctx.page_tokens,
        fetch_tokens=share.num_pages * ctx.page_tokens,
        match_stop=prompt.match_stop(),
        prefetch_stop=share.stop,
        pages=pages,
        store_fault=survey.fault,
        other_namespace=other,
        other_fields=manifest.fields if manifest is not None and is_its else None,
        elsewhere_tokens=prompt.elsewhere_pages() * ctx.page_tokens,
    )
    return dataclasses.replace(explanation, hints=hints(ctx, explanation, survey))


def _foresee_prefetch(prompt: _Prompt, match: Match, survey: Survey) -> tuple[int, Share]:
    # The steps of a prefetch, by the same gates: how many pages it would find, and bring.
    ctx, start_page, end_page = prompt.ctx, match.local_pages, prompt.holding.limit_pages
    refusal = refusal_to_ask(ctx, end_page - start_page)
    if refusal is not None:
        return 0, Share(0, refusal)
    if survey.is_current:
        hit, cut = survey.found(start_page, end_page)
    else:  # of a store that was attached or cleared meanwhile nothing is known
        hit, cut = 0, Stop.STORE_FAULT
    if not is_worth_fetching(ctx.config, hit) or cut is Stop.DEADLINE:
        return hit, Share(0, outcome(hit, cut, None))
    share = foresee_fetch(ctx, match, prompt.hashes, start_page + hit)
    brought = range(start_page, start_page + share.num_pages)
    stale = next((page for page in brought if survey.is_stale(page)), None)
    if stale is not None:
        share = Share(stale - start_page, Stop.VANISHED)
    return hit, Share(share.num_pages, outcome(hit, cut, share.stop))


# Page by page


def _pages(prompt: _Prompt, survey: Survey, operator_pins: Collection[Pinned]) -> tuple[PageExplanation, ...]:
    ctx = prompt.ctx
    nodes, keys, num_chunks = prompt.nodes(), ctx.keys.keys(prompt.hashes), ctx.keys.num_chunks
    keepers = _keepers(ctx, prompt.whole().path, operator_pins)
    being_read = prompt.pages_being_read()
    pages: list[PageExplanation] = []
    for index, node in enumerate(nodes):
        stored = survey.is_stored(index)
        missing = survey.missing_chunks(index) if stored is False else None
        chunk = missing[0] if missing else 0
        page = PageExplanation(
            index=index,
            start_token=index * ctx.page_tokens,
            end_token=(index + 1) * ctx.page_tokens,
            key=keys[index * num_chunks + chunk],
            store=_STORE_PLACES[stored],
        )
        if node is not None:
            page = dataclasses.replace(
                page,
                device=_place(node.device),
                host=_place(node.host),
                marked_stored=node.stored == ctx.tree.store_epoch,
                hits=node.hits,
                priority=node.priority if node.hits else 0,
                keepers=keepers[node],
            )
        elif not ctx.reuses:
            page = dataclasses.replace(page, device=Place.UNKNOWN, host=Place.UNKNOWN)
        elif index in being_read:
            page = dataclasses.replace(page, host=Place.ARRIVING)
        pages.append(page)
    return tuple(pages)


_STORE_PLACES = {True: Place.PRESENT, False: Place.ABSENT, None: Place.UNKNOWN}


def _place(copy: TierCopy) -> Place:
    if copy.pages is None:
        return Place.ABSENT
    return Place.PRESENT if copy.is_ready() else Place.ARRIVING


def _keepers(
    ctx: Context, path: Sequence[Node], operator_pins: Collection[Pinned]
) -> dict[Node, tuple[Keeper, ...]]:
    # A pin keeps its node and all above it; most of those that keep a prefix are pins behind it.
    operators = Counter(pinned.node for pinned in operator_pins)
    moves = Counter(pinned.node for pinned in ctx.moves) - operators
    pins = Counter(pinned.node for pinned in ctx.moves for _ in pinned.tiers)
    kept: dict[Node, set[Keeper]] = {node: set() for node in path}
    for node in path[0].subtree() if path else ():
        above, keepers = node, _keepers_at(node, pins[node], moves[node], operators[node])
        while keepers and above not in kept and above.parent is not None:
            above = above.parent
        if keepers:
            kept[above] |= keepers
    for below, above in pairwise(reversed(path)):
        kept[above] |= kept[below]
    return {node: tuple(sorted(keepers)) for node, keepers in kept.items()}


def _keepers_at(node: Node, num_pins: int, num_moves: int, num_operators: int) -> set[Keeper]:
    is_kept_by = {
        Keeper.LEASE: node.device.pins + node.host.pins > num_pins,
        Keeper.MOVE: num_moves > 0,
        Keeper.OPERATOR: num_operators > 0,
        Keeper.CUT_OFF: node.detached_children > 0,
    }
    return {keeper for keeper, keeps in is_kept_by.items() if keeps}
