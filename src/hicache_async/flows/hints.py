"""Hints: what is in the way of a hit, and what to do about it, in sentences for a human."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile

from ..abc import SupportsRefusal
from ..config import KeyScheme, WritePolicy
from ..core.keys import Namespace, namespace_of
from ..core.manifest import Manifest, manifest_of
from ..core.sharing import differences
from ..core.write_policy import MIN_COMMITS
from ..explanation import Explanation, MatchStop, PageExplanation, Place
from ..types import Stop
from .context import Context
from .gates import quota_pages
from .survey import Survey


def hints(ctx: Context, explained: Explanation, survey: Survey) -> tuple[str, ...]:
    """Return what is in the way of a longer hit, the most important first; nothing where all is well."""
    if not ctx.reuses:
        why = "a rank was lost" if ctx.failure is None else f"it has failed, {ctx.failure!r}"
        return (f"the cache serves without reuse, since {why}: see to that, and open a new one",)
    return (
        *_of_stop(ctx, explained, survey),
        *_of_room(ctx, explained.prefetch_stop),
        *_of_match(explained),
        *_of_absence(ctx, explained, survey),
    )


def _of_stop(ctx: Context, explained: Explanation, survey: Survey) -> Iterator[str]:
    config, stop = ctx.config, explained.prefetch_stop
    if not survey.is_current:
        yield "the store was attached, detached or cleared while this was asked: ask again"
    elif explained.store_fault is not None:
        yield f"the store failed, {explained.store_fault}: see to the store; store.fault in the log has more"
    if stop is Stop.DETACHED:
        yield "no store is attached, or it is being cleared, or was in part only: await admin.attach_store()"
    elif stop is Stop.BELOW_THRESHOLD:
        num_tokens = explained.store_tokens or _missing_tokens(explained)
        where = "in the store" if explained.store_tokens else "missing"
        threshold = config.effective_prefetch_threshold_tokens
        yield (
            f"{num_tokens:,} tokens are {where}, fewer than are worth fetching, {threshold:,}: "
            "lower prefetch_threshold_tokens"
        )
    elif stop is survey.refusal and isinstance(survey.store, SupportsRefusal):
        yield f"the store is not asked, {_why_refused(survey.store)}: see to the store"
    elif stop is Stop.DEADLINE:
        yield (
            "the store answers more slowly than a prefetch waits: raise prefetch_timeout_base_s and "
            "prefetch_timeout_cap_s, or see to the store"
        )
    elif stop is Stop.VANISHED:
        yield (
            f"page {_first_stale(explained, survey):,} is counted by the store and not listed: its existence "
            f"answer is stale; it was deleted since, lower existence_ttl_s ({config.existence_ttl_s:g} s)"
        )


def _why_refused(store: SupportsRefusal) -> str:
    try:
        return store.why_refused()
    except Exception as error:  # noqa: BLE001 - of a store made by others
        return f"and why_refused() raised {error!r}"


def _of_room(ctx: Context, stop: Stop) -> Iterator[str]:
    if stop is Stop.RATE_LIMITED:
        yield (
            f"prefetches hold {ctx.prefetch_pages:,} host pages, and may hold "
            f"{ctx.prefetch_pages + quota_pages(ctx):,} of {ctx.host_pool.capacity:,}: raise "
            "prefetch_capacity_fraction, enlarge the host pool, or load and release sooner"
        )
    elif stop is Stop.NO_HOST_ROOM:
        yield (
            f"of {ctx.host_pool.capacity:,} host pages too few can be freed, the rest is pinned, read or "
            "written: enlarge the host pool (host_ratio, host_bytes)"
        )
    elif stop is Stop.ANCHOR_NOT_BACKED:
        yield (
            "the tokens before are on the device only, and no copy of them to the host can be made now: there "
            "is no host room, too many copies run, or a forward still writes them; try again, or enlarge "
            "the host pool (host_ratio, host_bytes)"
        )


def _of_absence(ctx: Context, explained: Explanation, survey: Survey) -> Iterator[str]:
    # What the store is known not to have, and what lies behind it.
    pages = explained.pages
    first = next((page for page in pages if page.store is Place.ABSENT), None)
    if first is None:
        return
    if explained.other_namespace is not None:
        yield (
            f"page {first.index:,} is stored under another name, which ends in {explained.other_namespace} and "
            f"not in {_suffix_of(first.key)}: {_difference(ctx.keys.namespace, explained)}"
        )
    hole = list(takewhile(lambda page: page.store is Place.ABSENT, pages[first.index :]))
    later = next((page for page in pages[first.index :] if page.store is Place.PRESENT), None)
    if later is not None:
        yield (
            f"a hole: the store lacks {_named(hole)} and has page {later.index:,}, and nothing behind a hole is "
            "found. It has evicted what it lacks, or never got it: write_back keeps the head of a prompt on the "
            "device"
        )
    yield from _of_chunks(ctx, first, survey)
    if not ctx.keys.writes:
        yield _who_writes(ctx)
    elif ctx.store is not None:
        yield from _of_writing(ctx, pages)
    if not survey.lists_names and survey.fault is None:
        yield "this store has not listed its names, so whether it has the pages under others is not known"


def _of_chunks(ctx: Context, page: PageExplanation, survey: Survey) -> Iterator[str]:
    num_chunks, missing = ctx.keys.num_chunks, survey.missing_chunks(page.index)
    if missing is None and num_chunks > 1:
        yield f"of page {page.index:,} at least one of {num_chunks:,} chunks is missing; which, is not known"
    elif missing and len(missing) < num_chunks:
        yield (
            f"of page {page.index:,} the store lacks {len(missing):,} of {num_chunks:,} chunks, first {page.key}, and "
            "a page is there only with all of them"
        )


def _who_writes(ctx: Context) -> str:
    # Which rank does is in the grid: of those that hold the same the first.
    config, kv = ctx.config, ctx.kv
    reasons = []
    tp_writer = cp_writer = 0
    if kv.is_mla:
        reasons += ["the KV of MLA is the same on all tp ranks"] if config.tp_rank else []
    else:
        copies = kv.kv_heads * config.tp_size // ctx.keys.namespace.total_kv_heads
        tp_writer = config.tp_rank - config.tp_rank % copies
        reasons += [f"{copies} tp ranks hold copies of the same heads"] if tp_writer != config.tp_rank else []
    if kv.page_size == config.page_size and config.key_scheme is KeyScheme.UNIFIED:
        reasons += ["each cp rank holds whole pages, all the same"] if config.cp_rank else []
    else:
        cp_writer = config.cp_rank
    return (
        f"this rank never writes (tp_rank {config.tp_rank}, cp_rank {config.cp_rank}): "
        f"{' and '.join(reasons)}, so another rank holds the same chunks and writes them: tp_rank {tp_writer}, "
        f"cp_rank {cp_writer} of this stage; see whether that one runs and writes"
    )


def _of_writing(ctx: Context, pages: Sequence[PageExplanation]) -> Iterator[str]:
    # Each reason once, for the first run of pages that it holds for.
    told = set()
    for reason, run in groupby(pages, lambda page: _why_unwritten(ctx, page)):
        if reason is not None and reason not in told:
            told.add(reason)
            yield f"the store lacks {_named(list(run))}, {reason}"


def _why_unwritten(ctx: Context, page: PageExplanation) -> str | None:
    policy = ctx.config.write_policy
    commits = MIN_COMMITS.get(policy, 0)
    if page.store is not Place.ABSENT:
        return None
    if not {page.device, page.host} & {Place.PRESENT, Place.ARRIVING}:
        return (
            "which are not here either: nobody has stored these very tokens for this model_id, fingerprint, "
            "dtype, page size and rank grid, or the store has evicted them"
            + (f"; {policy} stores at commit {commits}" if commits > 1 else "")
        )
    if page.marked_stored:
        return (
            "here and stored before: it has lost them since, by eviction or a hand from outside; "
            "detach_store() and attach_store() have them written again"
        )
    if page.host is Place.ABSENT and page.hits < commits:
        return (
            f"here and not stored yet: {policy} stores at commit {commits}, and commits so far are "
            f"{page.hits}; serve the prompt again, or take write_through"
        )
    if page.host is Place.ABSENT and policy is WritePolicy.WRITE_BACK:
        return (
            "on the device and not stored yet: write_back stores what the device evicts; take write_through "
            "to store at commit"
        )
    return (
        "here and not stored yet: a copy or a write is due, or has failed; await admin.flush(), and look for "
        "backup.stopped in the log"
    )


def _of_match(explained: Explanation) -> Iterator[str]:
    if explained.elsewhere_tokens > explained.local_tokens:
        yield (
            f"the first {explained.elsewhere_tokens:,} tokens are local under another salt or adapter: prompts "
            "share pages only with the same ones"
        )
    if explained.match_stop is MatchStop.ARRIVING:
        yield "another request is reading the next pages from the store: a prefetch waits for them"
    elif explained.match_stop is MatchStop.BEING_COMPUTED:
        yield "another request is computing the next pages: load() waits for them"
    elif explained.match_stop is MatchStop.CUT_OFF:
        yield "what comes next was cut off: it is held until its requests are released, and never matched again"


def _missing_tokens(explained: Explanation) -> int:
    # What a prefetch asks for: whole pages, less what must be left to compute.
    limit_pages = max(0, explained.prompt_tokens - 1) // explained.page_size
    return limit_pages * explained.page_size - explained.local_tokens


def _first_stale(explained: Explanation, survey: Survey) -> int:
    return next((page.index for page in explained.pages if survey.is_stale(page.index)), 0)


def _suffix_of(key: str) -> str:
    _, line, suffix = key.partition("_")  # behind the page's hash
    return line + suffix


def _named(run: Sequence[PageExplanation]) -> str:
    first, last = run[0].index, run[-1].index
    return f"page {first:,}" if first == last else f"pages {first:,}-{last:,}"


def _difference(namespace: Namespace, explained: Explanation) -> str:
    mine, other = explained.namespace, explained.other_namespace or ""
    digest = namespace_of(other)
    if not digest:
        return "it was written by something else"
    if digest == namespace.digest:
        return _place_in_grid(other)
    if explained.other_fields is None:
        return _guess(mine, other)
    found = differences(manifest_of(namespace), Manifest(digest, dict(explained.other_fields)))
    return "; ".join(f"{difference}: {difference.advice}" for difference in found)


def _place_in_grid(other: str) -> str:
    if _CHUNK.fullmatch(other):
        return (
            "it is another part of the same page (layers L, head group H, tokens T); see whether the rank that "
            "stores this part runs and writes"
        )
    return (
        "it is of another place or size of the rank grid (tp, pp, cp); make them equal where they are to share, "
        "or take key_scheme unified on both sides"
    )


def _guess(mine: str, other: str) -> str:
    # Nothing is written down: names end in _{digest}_{model}[_{ranks} ...] or _{digest}_{chunk}, and in the digest
    # is all that makes bytes differ.
    if bool(_CHUNK.fullmatch(mine)) != bool(_CHUNK.fullmatch(other)):
        return "another key_scheme; make them equal where they are to share"
    model, *ranks = mine.split("_")[2:] or [""]
    other_model, *other_ranks = other.split("_")[2:] or [""]
    if _CHUNK.fullmatch(mine):
        return f"another model_id, {_IN_DIGEST} or head_group; make them equal where they are to share"
    different = ["another model_id" if other_model != model else f"another {_IN_DIGEST}"]
    if other_ranks != ranks:
        different.append("another place or size of the rank grid (tp, pp, cp)")
    return f"{', and '.join(different)}; make them equal where they are to share"


_IN_DIGEST = "fingerprint, dtype, number of layers or KV heads, or host_layout"
_CHUNK = re.compile(r"_ukv[0-9]+-[0-9a-f]{16}_L[0-9]+-[0-9]+(_H[0-9]+)?(_T[0-9]+-[0-9]+)?")
"""What the names of the unified key scheme end in."""
