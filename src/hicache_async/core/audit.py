"""Proofs over the tree: counters recomputed from the nodes, and pages each in one place."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from ..errors import InvariantError
from ..types import Pages, Residency, Tier
from .node import Node, pages_of
from .pool import Owner, PagePool
from .tree import TIERS, PrefixTree


def check_tree(tree: PrefixTree, *, write_through: bool) -> None:
    """Raise InvariantError unless every node is linked, counted and ordered as the tree promises."""
    cut_off = _cut_off(tree)
    for seed, root in tree.roots.items():
        if root.segment != seed or root.parent is not None or not (root.children or root.is_held):
            raise InvariantError(f"root {seed.hex()!r} is empty or misfiled")
        for node in root.subtree():
            _check_children(tree, node, cut_off[node])
            if node is not root:
                _check_pages(tree, node)
                _check_place(node, write_through=write_through)
                _check_queued(tree, node)
    for node in tree.detached:
        if node.attached or not (node.is_held or node.children or node.residency is not Residency.GHOST):
            raise InvariantError(f"{node!r} is among the detached nodes for no reason")
        _check_children(tree, node, cut_off[node])
        if node.parent is not None:
            _check_pages(tree, node)


def _cut_off(tree: PrefixTree) -> dict[Node, list[Node]]:
    # Detached nodes that stand on a node and are not among its children.
    found: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in tree.detached:
        if node.parent is not None and not node.is_linked:
            found[node.parent].append(node)
    return found


def _check_children(tree: PrefixTree, node: Node, cut_off: list[Node]) -> None:
    children = node.children or {}
    if node.detached_children != len(cut_off):
        raise InvariantError(f"{node!r} counts {node.detached_children} detached children, has {cut_off}")
    for page, child in children.items():
        if child.parent is not node or child.segment[: tree.page_nbytes] != page:
            raise InvariantError(f"{child!r} is misfiled below {node!r}")
    if node.only_child is not (next(iter(children.values())) if len(children) == 1 else None):
        raise InvariantError(
            f"{node!r} with {len(children)} children has {node.only_child!r} as the only one"
        )
    for tier in TIERS:
        below = sum(child.copy_in(tier).pages is not None for child in (*children.values(), *cut_off))
        if below != node.copy_in(tier).children:
            raise InvariantError(
                f"{node!r} counts {node.copy_in(tier).children} children on {tier}, has {below}"
            )


def _check_pages(tree: PrefixTree, node: Node) -> None:
    if len(node.segment) != node.num_pages * tree.page_nbytes or not node.num_pages:
        raise InvariantError(f"{node!r} has {len(node.segment)} bytes of tokens")
    for tier in TIERS:
        copy = node.copy_in(tier)
        if copy.pages is not None and len(copy.pages) != node.num_pages:
            raise InvariantError(f"{node!r} has {len(copy.pages)} pages on {tier}")
        if copy.pins < 0 or (copy.pins and copy.pages is None):
            raise InvariantError(
                f"{node!r} is pinned {copy.pins} times on {tier}, its pages are {copy.pages}"
            )


def _check_place(node: Node, *, write_through: bool) -> None:
    parent = node.parent
    assert parent is not None
    if not node.attached or node.residency is Residency.GHOST:
        raise InvariantError(f"{node!r} can be reached and holds nothing")
    if parent.parent is None:
        return
    if node.used > parent.used:
        raise InvariantError(f"{node!r} was used after {parent!r} above it")
    if node.device.pages is not None and parent.device.pages is None:
        raise InvariantError(f"{node!r} is on the device, {parent!r} above it is not")
    if write_through and node.host.pages is not None and parent.host.pages is None:
        raise InvariantError(f"{node!r} is on the host, {parent!r} above it is not")


def _check_queued(tree: PrefixTree, node: Node) -> None:
    for tier, queue in tree.queues.items():
        if queue.is_evictable(node) and node not in queue:
            raise InvariantError(f"{node!r} may lose {tier} and nobody would ever ask it to")


def tree_pages(tree: PrefixTree, tier: Tier) -> Pages:
    """Return the page ids of ``tier`` that nodes hold, detached ones included, in no order."""
    return pages_of(_all_nodes(tree), tier)


def _all_nodes(tree: PrefixTree) -> list[Node]:
    return [node for root in tree.roots.values() for node in root.subtree()] + list(tree.detached)


def check_anchors(tree: PrefixTree, expected: Counter[Node]) -> None:
    """Raise InvariantError unless the anchors on every node are those that moves and operators hold."""
    found = Counter({node: node.anchors for node in _all_nodes(tree) if node.anchors})
    if found != expected:
        raise InvariantError(f"anchors are {found}, and should be {expected}")


def check_pins(tree: PrefixTree, expected: dict[Tier, Counter[Node]]) -> None:
    """Raise InvariantError unless the pins on every node are those that leases and moves hold."""
    nodes = _all_nodes(tree)
    for tier in TIERS:
        found = Counter({node: node.copy_in(tier).pins for node in nodes if node.copy_in(tier).pins})
        if found != expected[tier]:
            wrong = [node for node in found | expected[tier] if found[node] != expected[tier][node]]
            raise InvariantError(
                f"pins on {tier} do not match the leases and moves: "
                + ", ".join(
                    f"{node!r} has {found[node]}, should have {expected[tier][node]}" for node in wrong[:4]
                )
            )


def check_owner(pool: PagePool, owner: Owner, pages: Pages) -> None:
    """Raise InvariantError unless ``pages`` are exactly what ``owner`` holds of ``pool``, each once."""
    booked = pool.owned_by(owner)
    actual = np.sort(pages)
    if len(booked) != len(actual) or (booked != actual).any():
        missing = np.setdiff1d(booked, actual)[:8].tolist()
        extra = np.setdiff1d(actual, booked)[:8].tolist()
        raise InvariantError(
            f"{pool.name}: {len(booked)} pages are booked to {owner.name.lower()}, {len(actual)} found; "
            f"booked and not found {missing}, found and not booked {extra}"
        )


def check_capacity(pool: PagePool) -> None:
    """Raise InvariantError unless free + leased + in hops + in tree == capacity."""
    held = {owner: len(pool.owned_by(owner)) for owner in (Owner.LEASE, Owner.HOP, Owner.TREE)}
    if pool.num_free + sum(held.values()) != pool.capacity:
        raise InvariantError(f"{pool.name}: {pool.num_free} free and {held} do not add up to {pool.capacity}")
