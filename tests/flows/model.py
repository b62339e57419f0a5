"""The model of a cache: a dictionary from prefix to where it is, and the bytes that each page has to hold.

A page is known by its name, a hash that is chained here from the tokens alone. Its bytes follow from the name and
from the number of the weights, which rises whenever everything is cleared: what was computed with old weights
accuses itself wherever it turns up.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hicache_async import CacheStats
from hicache_async.abc import PagedBytes
from hicache_async.core.hashing import chain_seed
from hicache_async.core.node import Node
from hicache_async.core.tokens import token_bytes
from hicache_async.core.tree import PrefixTree
from hicache_async.testing.golden import check_page, golden_plane
from hicache_async.types import Tokens
from tests.flows.rig import NUM_LAYERS, PAGE_NBYTES, PAGE_TOKENS

NAMESPACES: tuple[tuple[bytes, str | None], ...] = ((b"", None), (b"tenant", None), (b"", "lora"))
"""Salt and adapter of the requests."""

_SEEDS = [chain_seed(salt, adapter) for salt, adapter in NAMESPACES]
_PLANES = 2 * NUM_LAYERS
_PAGE_KEY_NBYTES = 4 * PAGE_TOKENS


@lru_cache(1 << 16)
def _next_name(above: bytes, page: bytes) -> bytes:
    return hashlib.sha256(above + page).digest()


def page_names(namespace: int, tokens: Tokens) -> list[bytes]:
    """Return the name of each whole page of a prompt."""
    data, name, names = token_bytes(tokens), _SEEDS[namespace], []
    for start in range(0, len(data) - _PAGE_KEY_NBYTES + 1, _PAGE_KEY_NBYTES):
        name = _next_name(name, data[start : start + _PAGE_KEY_NBYTES])
        names.append(name)
    return names


@lru_cache(1 << 16)
def identity(name: bytes, weights: int) -> bytes:
    """Return what the bytes of a page follow from."""
    return hashlib.sha256(b"%d:" % weights + name).digest()


@lru_cache(1 << 12)
def golden(page_identity: bytes) -> NDArray[np.uint8]:
    """Return the bytes of a page, [planes, bytes of a plane]."""
    nbytes = PAGE_NBYTES // _PLANES
    return np.stack([golden_plane(page_identity, n // 2, n % 2, nbytes) for n in range(_PLANES)])


class PageBytes:
    """The bytes of one tier, many pages at once."""

    def __init__(self, paged: PagedBytes) -> None:
        self._paged = paged
        layers = range(paged.num_layers)
        self._planes = [plane.numpy() for layer in layers for plane in paged.planes(layer)]

    def write(self, page: int, page_identity: bytes) -> None:
        """Give a page the bytes of an identity."""
        for plane, row in zip(self._planes, golden(page_identity), strict=True):
            plane[page] = row

    def check(self, pages: Sequence[int], identities: Sequence[bytes], layer: int | None = None) -> None:
        """Raise AssertionError unless each page has the bytes of its identity, in one layer or all."""
        if not pages:
            return
        rows = np.stack([golden(each) for each in identities], axis=1)
        for number, plane in enumerate(self._planes):
            if layer in (None, number // 2) and not np.array_equal(plane[pages], rows[number]):
                for page, each in zip(pages, identities, strict=True):
                    check_page(self._paged, page, each)
                raise AssertionError(f"pages {pages} hold something else")


@dataclass(frozen=True, slots=True)
class Held:
    """Where one page is: its number in each tier that holds it, and whether its bytes are there."""

    device: int | None
    host: int | None
    device_ready: bool
    host_ready: bool


Dictionary = dict[bytes, Held]


def look(tree: PrefixTree) -> Dictionary:
    """Return what a match can reach, each page by the name that follows from the tokens on its path."""
    found: Dictionary = {}
    for seed, root in tree.roots.items():
        stack: list[tuple[Node, bytes]] = [(root, seed)]
        while stack:
            node, name = stack.pop()
            below = (node.children or {}).values()
            stack += [(child, _add_pages(found, child, name)) for child in below]
    return found


def _add_pages(found: Dictionary, node: Node, name: bytes) -> bytes:
    device, host = node.device, node.host
    for page in range(node.num_pages):
        name = _next_name(name, node.segment[page * _PAGE_KEY_NBYTES : (page + 1) * _PAGE_KEY_NBYTES])
        assert node.hashes[page] == name, f"{node!r} has a wrong hash"
        assert name not in found, f"{node!r} is twice in the tree"
        found[name] = Held(
            None if device.pages is None else int(device.pages[page]),
            None if host.pages is None else int(host.pages[page]),
            device.is_ready(),
            host.is_ready(),
        )
    return name


def local_pages(held: Dictionary, names: Sequence[bytes]) -> int:
    """Return how many pages of a prompt are on device or host, from the first on."""
    return next((count for count, name in enumerate(names) if name not in held), len(names))


def device_pages(held: Dictionary, names: Sequence[bytes]) -> int:
    """Return how many pages of a prompt are on the device, from the first on."""
    where = (held.get(name) for name in names)
    ends = (count for count, place in enumerate(where) if place is None or place.device is None)
    return next(ends, len(names))


def counts_of(stats: CacheStats) -> Counter[str]:
    """Return everything that only ever rises, flat."""
    counts = Counter({f"counter {name}": count for name, count in stats.counters.items()})
    counts.update({f"dropped {reason}": count for reason, count in stats.dropped_tokens.items()})
    counts.update({f"unfulfilled {stop}": count for stop, count in stats.unfulfilled_tokens.items()})
    for tier in ("device", "host", "store", "computed"):
        counts[f"{tier} tokens"] = getattr(stats, f"{tier}_tokens")
    counts["device evicted"] = stats.device.evicted_pages
    counts["host evicted"] = stats.host.evicted_pages
    return counts


@dataclass(slots=True)
class Pin:
    """What an operator keeps, until a time on the cache's clock."""

    names: list[bytes]
    until_s: float


@dataclass(slots=True)
class Model:
    """What a cache may hold, and must.

    Attributes:
        is_roomy: no tier is ever full, so nothing may leave by itself.
        weights: how often everything was cleared.
        held: what was cached after the last step.
        tokens: of every page ever seen, with its namespace.
        committed: pages that were committed in this step.
        arrived: pages that were read from a store since everything was cleared.
        written: pages that may be in a store: put there, or ever committed.
        commits: by how many requests each page was committed.
        pins: by namespace and tokens.
        unfulfilled: tokens that the prefetches which are over asked for and did not get.
        booked: tokens by where they came from, over all requests that have loaded.
        is_pristine: nothing was cleared, detached or faulty so far, and nobody was kept waiting.
    """

    is_roomy: bool
    weights: int = 0
    held: Dictionary = field(default_factory=dict)
    tokens: dict[bytes, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    committed: set[bytes] = field(default_factory=set)
    arrived: set[bytes] = field(default_factory=set)
    written: set[bytes] = field(default_factory=set)
    commits: Counter[bytes] = field(default_factory=Counter)
    pins: dict[tuple[int, bytes], Pin] = field(default_factory=dict)
    unfulfilled: int = 0
    booked: Counter[str] = field(default_factory=Counter)
    is_pristine: bool = True
    _counts: Counter[str] = field(default_factory=Counter)
    _may_lose_pins: bool = False

    def note(self, namespace: int, tokens: Sequence[int]) -> list[bytes]:
        """Remember the pages of a prompt and return their names."""
        names = page_names(namespace, tokens)
        for count, name in enumerate(names, 1):
            self.tokens.setdefault(name, (namespace, tuple(tokens[: count * PAGE_TOKENS])))
        return names

    def note_commit(self, names: Collection[bytes]) -> None:
        """Let pages appear in this step, and in a store from now on."""
        self.committed.update(names)
        self.written.update(names)

    def note_clear(self) -> None:
        """Let everything of before be wrong from now on."""
        self.weights += 1
        self.arrived.clear()
        self.commits.clear()

    def follow(self, held: Dictionary, stats: CacheStats) -> int:
        """Take over what is cached now, if it follows from before; returns how many pages had to stay, and did."""
        counts = counts_of(stats)
        assert not self._counts - counts, f"these counts fell: {self._counts - counts}"
        rise = counts - self._counts
        for name in held.keys() - self.held.keys():
            assert name in self.committed or name in self.arrived, "a page from nowhere"
        vanished = len(self.held.keys() - held.keys())
        assert vanished <= _pages_that_left(rise), f"{vanished} pages left, and only {rise} was counted"
        num_stayed = 0
        if self.is_roomy:
            assert not counts["device evicted"] and not counts["host evicted"], "evicted without need"
            num_stayed = len(self.held) - vanished
        self._may_lose_pins = rise["counter doubted_pages"] + rise["dropped cleared"] > 0
        self.held, self._counts = held, counts
        self.committed.clear()
        return num_stayed

    def check_pins(self, now_s: float) -> int:
        """Check that what an operator has pinned is there; returns how many pages that is.

        A pin goes with its pages when these were cleared or doubted, in the step that was followed last.
        """
        for key, pin in list(self.pins.items()):
            is_there = all(name in self.held for name in pin.names)
            if pin.until_s <= now_s or (self._may_lose_pins and not is_there):
                del self.pins[key]
            else:
                assert is_there, "a pinned page has gone"
        return sum(len(pin.names) for pin in self.pins.values())


def _pages_that_left(rise: Counter[str]) -> int:
    dropped = sum(count for name, count in rise.items() if name.startswith("dropped "))
    return dropped // PAGE_TOKENS + rise["counter doubted_pages"]
