"""URLs that compose stores: wrappers as prefixes, ``zstd+guard+file:///x``, and ``tiered:?fast=...&slow=...``.

Options of a wrapper begin with its name, as ``zstd_level``; all others go to the store inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from ..abc import Store
from ..core.manifest import MANIFEST_NBYTES
from ..errors import ConfigError
from ._url import Parsers, parse_nbytes, url_options
from .codec import AesGcm, Codec, CodecStore, Fp8, Zstd
from .guard import GuardedStore
from .tiered import TieredStore

Options = Mapping[str, object]


class Wrapper(NamedTuple):
    """One prefix of a URL.

    Attributes:
        options: full name of each option to what reads it.
        codec: takes its own out of options without prefix, and makes the codec; None: it is the guard.
        offered: option of the store inside that the wrapper may take too, unless its own, the value, is given.
    """

    options: Parsers
    codec: Callable[[dict[str, Any]], Codec] | None = None
    offered: Mapping[str, str] = MappingProxyType({})


def _codec(
    family: str, make: Callable[..., Codec], own: Parsers, offered: Mapping[str, str] = MappingProxyType({})
) -> Wrapper:
    common: Parsers = {"num_threads": int, "scratch_bytes": parse_nbytes, "threads": None}
    options = {f"{family}_{name}": parser for name, parser in {**own, **common}.items()}
    return Wrapper(
        options,
        lambda given: make(**{name: given.pop(name) for name in own if name in given}),
        {name: f"{family}_{option}" for name, option in offered.items()},
    )


WRAPPERS: Mapping[str, Wrapper] = {
    "guard": Wrapper(
        {
            "guard_timeout_s": float,
            "guard_lookup_timeout_s": float,
            "guard_max_attempts": int,
            "guard_backoff_s": float,
            "guard_max_failures": int,
            "guard_cooldown_s": float,
            "guard_max_cooldown_s": float,
            "guard_clock": None,
            "guard_draw": None,
        }
    ),
    "zstd": _codec("zstd", Zstd, {"level": int}),
    "fp8": _codec("fp8", Fp8, {"dtype": str, "block": int}, {"dtype": "dtype"}),
    "aesgcm": _codec("aesgcm", AesGcm, {"key_env": str}),
}
"""By prefix, without the plus."""

TIERED = "tiered"
_TIER_URLS = ("fast", "slow")
_TIER_OPTIONS: Parsers = {
    "fast": str,
    "slow": str,
    "fast_timeout_s": float,
    "fast_lookup_timeout_s": float,
    "fill_bytes": parse_nbytes,
    "clock": None,
}

Accepted = Callable[[str], frozenset[str]]
Open = Callable[..., Store]


class Wrapped(NamedTuple):
    """A URL that begins with a wrapper, taken apart.

    Attributes:
        own_url: with the wrapper's part of the query.
        inner_url: without it and without the prefix.
    """

    name: str
    own_url: str
    inner_url: str

    @classmethod
    def of(cls, url: str) -> Wrapped | None:
        """Take ``url`` apart; None: it begins with no wrapper."""
        name, plus, rest = url.partition("+")
        if not plus or name not in WRAPPERS:
            return None
        head, _, query = rest.partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        ours = urlencode([pair for pair in pairs if pair[0].startswith(f"{name}_")])
        theirs = urlencode([pair for pair in pairs if not pair[0].startswith(f"{name}_")])
        return cls(name, f"{name}+{head}?{ours}", head + (f"?{theirs}" if theirs else ""))

    def accepted(self, of_inner: Accepted) -> frozenset[str]:
        """Return the options that the URL leaves open."""
        wrapper, said = WRAPPERS[self.name], query_names(self.own_url)
        offered = {name for name, own in wrapper.offered.items() if own not in said}
        return frozenset(wrapper.options) - said | offered | of_inner(self.inner_url)

    def open(self, options: Options, open_inner: Open, of_inner: Accepted) -> Store:
        """Open the store inside and put the wrapper around it."""
        wrapper, said = WRAPPERS[self.name], query_names(self.own_url)
        own = {name: value for name, value in options.items() if name.startswith(f"{self.name}_")}
        rest = {name: value for name, value in options.items() if name not in own}
        for name, own_name in wrapper.offered.items():
            if name in rest:
                value = rest[name] if name in of_inner(self.inner_url) else rest.pop(name)
                if own_name not in said:
                    own.setdefault(own_name, value)
        known = url_options(self.own_url, own, wrapper.options)
        given: dict[str, Any] = {name.removeprefix(f"{self.name}_"): known[name] for name in known}
        if wrapper.codec is None:
            return GuardedStore(open_inner(self.inner_url, **rest), **given)
        codec = wrapper.codec(given)
        if isinstance(slot_nbytes := rest.get("slot_bytes"), int):
            # Of a page; the store inside gets its frame, or a manifest, which is stored as it is.
            rest["slot_bytes"] = max(codec.max_frame_nbytes(slot_nbytes), MANIFEST_NBYTES)
        return CodecStore(open_inner(self.inner_url, **rest), codec, **given)


def open_tiered(url: str, options: Options, open_inner: Open, of_inner: Accepted) -> Store:
    """Open ``tiered:?fast=URL&slow=URL``, both percent-encoded; options go to each tier that takes them.

    Raises: ConfigError: a tier without a URL, or an option that nothing takes.
    """
    urls = tier_urls(url)
    accepted = {name: of_inner(urls[name]) for name in _TIER_URLS}
    own = {
        name: value
        for name, value in options.items()
        if not any(name in names for names in accepted.values())
    }
    known = url_options(url, own, _TIER_OPTIONS)
    tiers = [
        open_inner(urls[name], **{key: options[key] for key in options if key in accepted[name]})
        for name in _TIER_URLS
    ]
    rest: dict[str, Any] = {name: value for name, value in known.items() if name not in _TIER_URLS}
    return TieredStore(*tiers, **rest)


def tiered_accepts(url: str, of_inner: Accepted) -> frozenset[str]:
    """Return the options that ``url`` leaves open, of the tiers too."""
    own = frozenset(_TIER_OPTIONS) - query_names(url)
    return own.union(*(of_inner(inner) for inner in tier_urls(url).values())) - set(_TIER_URLS)


def tier_urls(url: str) -> Mapping[str, str]:
    """Return the URLs of the tiers.

    Raises: ConfigError: one is missing.
    """
    query = dict(parse_qsl(url.partition("?")[2], keep_blank_values=True))
    for name in _TIER_URLS:
        if not query.get(name):
            raise ConfigError(
                f"store URL {url!r} has no {name}; write tiered:?fast=memory%3A&slow=file%3A///data/kv"
            )
    return {name: query[name] for name in _TIER_URLS}


def query_names(url: str) -> frozenset[str]:
    """Return the names of the options that ``url`` says itself."""
    return frozenset(name for name, _ in parse_qsl(url.partition("?")[2], keep_blank_values=True))
