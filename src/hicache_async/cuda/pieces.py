"""Pieces: pages of one plane as few contiguous copies, none of them across two registrations of pinned memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch

from ..errors import InvariantError
from ..memory.layout import PageRun


def copy_runs(
    copy: Callable[[torch.Tensor, torch.Tensor], None],
    source: torch.Tensor,
    target: torch.Tensor,
    runs: Sequence[PageRun],
    cuts: Sequence[int],
) -> None:
    """Copy runs of pages of one plane, each run at once where it is one piece of memory on both sides.

    Args:
        copy: called as ``copy(target, source)`` with contiguous uint8 of one dimension.
        source, target: uint8, (num_pages, plane_nbytes), a page contiguous.
        cuts: addresses that no piece may lie across, ascending.

    Raises:
        InvariantError: a plane is cut finer, which takes a kernel.
    """
    if source.dim() != 2 or target.dim() != 2:
        raise InvariantError(
            f"planes of {source.dim()} and {target.dim()} axes; io_mode direct copies whole planes"
        )
    nbytes = source.shape[1]
    is_joined = source.stride(0) == target.stride(0) == nbytes
    for run in runs:
        if is_joined:
            pieces = [(run.source, run.target, run.num_pages)]
        else:
            pieces = [(run.source + i, run.target + i, 1) for i in range(run.num_pages)]
        for source_page, target_page, num_pages in pieces:
            taken = source[source_page : source_page + num_pages].view(-1)
            given = target[target_page : target_page + num_pages].view(-1)
            _copy_between_cuts(copy, given, taken, cuts)


def _copy_between_cuts(
    copy: Callable[[torch.Tensor, torch.Tensor], None],
    given: torch.Tensor,
    taken: torch.Tensor,
    cuts: Sequence[int],
) -> None:
    nbytes = given.numel()
    ends = {nbytes}
    for memory in (given, taken) if cuts else ():
        start = memory.data_ptr()
        ends.update(cut - start for cut in cuts[bisect_right(cuts, start) :] if cut < start + nbytes)
    if len(ends) == 1:
        copy(given, taken)
        return
    first = 0
    for end in sorted(ends):
        copy(given[first:end], taken[first:end])
        first = end
