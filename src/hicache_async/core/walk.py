"""Walking down the tree: how far its nodes and the tokens of a prompt are the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .node import Node
from .tokens import TOKEN_NBYTES

LONG_NBYTES = 8 << 10
"""A segment from here on is compared by itself: copying it into a run would take longer than that saves."""


@dataclass(slots=True)
class Match:
    """How far a prompt is cached: on the device, and on device or host, both from the root on.

    ``path`` are the nodes walked through; of the last one only ``tail_pages`` pages match.
    """

    root: Node
    path: list[Node]
    device_pages: int
    local_pages: int
    tail_pages: int


def walk_down(
    root: Node, data: bytes | bytearray, num_pages: int, page_nbytes: int
) -> tuple[list[Node], int, int]:
    """Follow the first ``num_pages`` of ``data`` down from ``root``, as far as there are nodes.

    Returns: the nodes; how many pages match; how many of these are in the last node.
    """
    node, path = root, list[Node]()
    offset, stop = 0, num_pages * page_nbytes
    while offset < stop and node.children:
        child = node.only_child or node.children.get(bytes(data[offset : offset + page_nbytes]))
        if child is None:
            break
        segment = child.segment
        if child.only_child is None or len(segment) >= LONG_NBYTES:
            if data.startswith(segment, offset, stop):
                path.append(child)
                offset += len(segment)
                node = child
                continue
            run = [child]
        else:
            run, segment = run_from(child, (stop - offset) // page_nbytes)
            if data.startswith(segment, offset, stop):
                path += run
                offset += len(segment)
                node = run[-1]
                continue
        if common := common_nbytes(segment, data, offset, stop) // page_nbytes:
            tail = shorten(run, common)
            return path + run, offset // page_nbytes + common, tail
        break
    return path, offset // page_nbytes, path[-1].num_pages if path else 0


def run_from(child: Node, num_pages: int) -> tuple[list[Node], bytes]:
    """Return ``child`` and the nodes below it while there is no choice, and the token bytes of them all.

    To compare such a run in one piece costs a fraction of one comparison for each node.

    Args:
        num_pages: how many pages are of interest; a node has at least one.
    """
    run: list[Node] = []
    below: Node | None = child
    for _ in range(num_pages):
        if below is None:
            break
        run.append(below)
        below = below.only_child
    return run, b"".join([node.segment for node in run])


def common_nbytes(segment: bytes, data: bytes | bytearray, start: int, stop: int) -> int:
    """Return how many bytes of whole tokens ``segment`` and ``data[start:stop]`` begin with alike."""
    count = min(len(segment), stop - start) // TOKEN_NBYTES
    mine = np.frombuffer(segment, np.uint32, count)
    differs = mine != np.frombuffer(data, np.uint32, count, start)
    first = int(differs.argmax())
    return (first if differs[first] else count) * TOKEN_NBYTES


def shorten(run: list[Node], num_pages: int) -> int:
    """Cut ``run`` behind its page ``num_pages``; returns how many of them are in its last node."""
    for count, node in enumerate(run, 1):
        if num_pages <= node.num_pages:
            del run[count:]
            break
        num_pages -= node.num_pages
    return num_pages


def pages_off_device(path: list[Node], tail_pages: int) -> int:
    """Return how many pages of a match are not on the device, which holds a first part of every path.

    Args:
        tail_pages: how many pages of the last node match.
    """
    missing = 0
    for node in reversed(path):
        if node.device.pages is not None:
            break
        missing += node.num_pages if missing else tail_pages
    return missing
