"""What every device does with a plan: check it before anything moves, and on host memory move it with numpy."""

from __future__ import annotations

from collections.abc import Sequence

from ..abc import CopyPlan, PagedBytes
from ..errors import InvariantError
from .layout import PageRun, alike


def check_plan(plan: CopyPlan) -> None:
    """Raise InvariantError unless the page ids pair up and lie within their tiers.

    numpy cuts a slice beyond the end short without a word, so a wrong id would copy nothing.
    """
    if len(plan.device_pages) != len(plan.host_pages):
        raise InvariantError(f"{len(plan.device_pages)} device pages for {len(plan.host_pages)} host pages")
    for tier, pages, num_pages in (
        ("device", plan.device_pages, plan.kv.num_pages),
        ("host", plan.host_pages, plan.arena.num_pages),
    ):
        if len(pages) and (int(pages.min()) < 0 or int(pages.max()) >= num_pages):
            raise InvariantError(
                f"{tier} pages {pages.min()} .. {pages.max()} are not in 0 .. {num_pages - 1}"
            )


def copy_layer(source: PagedBytes, target: PagedBytes, layer: int, runs: Sequence[PageRun]) -> None:
    """Copy the pages of ``runs`` in every plane of one layer; both sides in host memory."""
    for source_plane, target_plane in zip(source.planes(layer), target.planes(layer), strict=True):
        taken, given = alike(source_plane.numpy(), target_plane.numpy())
        for start, to, num_pages in runs:
            if num_pages == 1:  # half the cost of two slices, and most runs of a fragmented pool are this
                given[to] = taken[start]
            else:
                given[to : to + num_pages] = taken[start : start + num_pages]
