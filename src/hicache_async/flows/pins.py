"""Pins: prefixes that an operator keeps for a time, whatever the policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..abc import TimerHandle
from ..core.hashing import HashChain
from ..core.node import Node
from ..core.tokens import TokenKey
from ..core.write_policy import ENOUGH_COMMITS
from ..types import Tier
from .context import Context, Pinned
from .offload import Offloads


@dataclass(slots=True, eq=False)
class _Pin:
    end: Node
    kept: list[Pinned]
    timer: TimerHandle


class Pins:
    """Keeps pinned prefixes in at least one tier until their time is over.

    A pinned prefix is brought to the host at once, so that it does not keep device pages from requests. All
    pins together keep at most ``pin_capacity_fraction`` of the host's pages, and as much of the device's
    where the host has no room: the rest is always left to requests.
    """

    def __init__(self, ctx: Context, offloads: Offloads) -> None:
        self._ctx = ctx
        self._offloads = offloads
        self._pins: dict[tuple[HashChain, bytes], _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def kept(self) -> list[Pinned]:
        """What all pins keep."""
        return [kept for pin in self._pins.values() for kept in pin.kept]

    def pin(self, key: TokenKey, chain: HashChain, ttl_s: float) -> int:
        """Keep what is local of the whole pages of ``key``, anew for ``ttl_s``; returns how many tokens that is."""
        ctx = self._ctx
        name = self._name(key, chain)
        if name is None or not ctx.reuses:
            return 0
        self.drop_detached()
        self._drop(name)
        match = ctx.tree.match(chain.seed, key.data, len(key) // ctx.page_tokens)
        if not match.local_pages:
            return 0
        end = ctx.tree.cut(match, match.local_pages)
        for above in end.path():
            above.hits = max(above.hits, ENOUGH_COMMITS)
        held = ctx.anchor(end)  # making room on the host must not take what is about to be kept
        try:
            self._offloads.offload_path(end, min_hits=0)
            num_pages, last = self._fitting(end)
            if last is not None:
                timer = ctx.clock.call_later(ttl_s, lambda: self._drop(name))
                self._pins[name] = _Pin(last, self._keep(last), timer)
        finally:
            ctx.unpin(held)
        return num_pages * ctx.page_tokens

    def unpin(self, key: TokenKey, chain: HashChain) -> None:
        """Let go of what :meth:`pin` keeps for the same tokens; does nothing when there is none."""
        name = self._name(key, chain)
        if name is not None:
            self._drop(name)

    def drop_detached(self) -> None:
        """Let go of what no match can reach any more."""
        for name, pin in list(self._pins.items()):
            if not pin.end.attached:
                self._drop(name)

    def drop_all(self) -> None:
        """Let go of everything."""
        for name in list(self._pins):
            self._drop(name)

    def _name(self, key: TokenKey, chain: HashChain) -> tuple[HashChain, bytes] | None:
        num_pages = len(key.data) // chain.page_nbytes
        return (chain, key.page_hashes(chain, num_pages)[num_pages - 1]) if num_pages else None

    def _drop(self, name: tuple[HashChain, bytes]) -> None:
        pin = self._pins.pop(name, None)
        if pin is not None:
            pin.timer.cancel()
            for kept in pin.kept:
                self._ctx.unpin(kept)

    def _keep(self, last: Node) -> list[Pinned]:
        # What is on the host stays there: kept on the device alone it would take room from requests.
        path = last.path()
        host_ends = [
            node
            for node, below in zip(path, [*path[1:], None], strict=True)
            if node.host.pages is not None and (below is None or below.host.pages is None)
        ]
        return [self._ctx.anchor(last), *(self._ctx.pin(node, Tier.HOST) for node in host_ends)]

    def _fitting(self, end: Node) -> tuple[int, Node | None]:
        # The longest first part of the path that the capacity for pins still takes.
        ctx = self._ctx
        others = {node for pin in self._pins.values() for node in pin.end.path()}
        share = ctx.config.pin_capacity_fraction
        room = int(share * ctx.host_pool.capacity) - _num_pages(others)
        device_room = int(share * ctx.device_pool.capacity) - _num_pages(_device_only(others))
        num_pages, last = 0, None
        for node in end.path():
            if node not in others:
                fits = min(room, device_room if node.host.pages is None else room, node.num_pages)
                if fits <= 0:
                    break
                if fits < node.num_pages:
                    return num_pages + fits, ctx.tree.split(node, fits)
                room -= fits
                device_room -= fits if node.host.pages is None else 0
            num_pages, last = num_pages + node.num_pages, node
        return num_pages, last


def _device_only(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.host.pages is None]


def _num_pages(nodes: Iterable[Node]) -> int:
    return sum(node.num_pages for node in nodes)
