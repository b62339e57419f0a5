"""Which class serves which URL scheme, and opening a store by URL."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol, Self, cast, runtime_checkable
from urllib.parse import parse_qsl, urlencode

from ..abc import Store
from ..errors import ConfigError
from ._url import url_options
from .guard import GuardedStore

ENTRY_POINT_GROUP = "hicache_async.stores"

_BUILT_IN = {
    "null": "hicache_async.stores.null:NullStore",
    "memory": "hicache_async.stores.memory:MemoryStore",
    "file": "hicache_async.stores.file:FileStore",
}
_GUARD = "guard+"
_GUARD_OPTIONS: dict[str, Callable[[str], object] | None] = {
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
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")  # RFC 3986, lower case
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@runtime_checkable
class _OpensByUrl(Protocol):
    @classmethod
    def from_url(cls, url: str, **options: object) -> Self: ...


class Registry:
    """URL schemes and the classes behind them, named "module:Class" and imported when first opened."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = dict(targets)

    def register(self, scheme: str, target: str) -> None:
        """Let ``target`` open URLs of ``scheme``; saying the same again is fine.

        Raises: ConfigError: a name that cannot work, or a scheme that another class has.
        """
        if not _SCHEME.fullmatch(scheme):
            raise ConfigError(f"scheme is {scheme!r}; it must match {_SCHEME.pattern}")
        if not _TARGET.fullmatch(target):
            raise ConfigError(f"target is {target!r}; it must be 'module:Class'")
        taken = self._targets.setdefault(scheme, target)
        if taken != target:
            raise ConfigError(f"scheme {scheme!r} is taken by {taken}; choose another for {target}")

    def open(self, url: str, **options: object) -> Store:
        """Return the store behind ``url``, for ``guard+`` and a URL inside a :class:`GuardedStore`.

        Raises: ConfigError: an unknown scheme, a class that cannot be imported, or a wrong option.
        """
        if url.startswith(_GUARD):
            return self._open_guarded(url, options)
        scheme, colon, _ = url.partition(":")
        target = self._target(scheme) if colon else None
        if target is None:
            known = sorted({*self._targets, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})
            raise ConfigError(f"no store opens {url!r}; its scheme must be one of: {', '.join(known)}")
        return cast("Store", _import(target).from_url(url, **options))

    def _open_guarded(self, url: str, options: Mapping[str, object]) -> Store:
        # Options that begin with guard_ are the guard's, all others those of the store inside.
        head, _, query = url.partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        ours = urlencode([pair for pair in pairs if pair[0].startswith("guard_")])
        rest = urlencode([pair for pair in pairs if not pair[0].startswith("guard_")])
        given = {name: value for name, value in options.items() if name.startswith("guard_")}
        inner_options = {name: value for name, value in options.items() if name not in given}
        known: dict[str, Any] = url_options(f"{head}?{ours}", given, _GUARD_OPTIONS)
        inner = self.open(head.removeprefix(_GUARD) + (f"?{rest}" if rest else ""), **inner_options)
        return GuardedStore(inner, **{name.removeprefix("guard_"): value for name, value in known.items()})

    def _target(self, scheme: str) -> str | None:
        if scheme in self._targets:
            return self._targets[scheme]
        points = tuple(entry_points(group=ENTRY_POINT_GROUP, name=scheme))
        return points[0].value if points else None


def _import(target: str) -> type[_OpensByUrl]:
    module_name, _, path = target.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for name in path.split("."):
            found = vars(found)[name]
    except ImportError as error:
        raise ConfigError(f"store {target} cannot be imported: {error}") from error
    except KeyError:
        raise ConfigError(f"module {module_name} has no {path}") from None
    if not isinstance(found, type) or not issubclass(found, _OpensByUrl):
        raise ConfigError(f"{target} must be a class with a classmethod from_url(url, **options)")
    return found


# The one table of the process, as schemes are: register_store() is a start-up declaration like an entry
# point. Nothing else is kept here; an application that wants its own table makes a Registry.
_registry = Registry(_BUILT_IN)


def open_store(url: str, **options: object) -> Store:
    """Return the store behind ``url``, as ``file:///data/kv?existence_ttl_s=2``.

    Args:
        url: the scheme chooses the class; the query may hold options. ``guard+`` before it puts a
            :class:`GuardedStore` around the store; its options begin with ``guard_``, as in
            ``guard+file:///data/kv?guard_timeout_s=2``.
        options: further options of that class; they win over the query.

    Raises: ConfigError: an unknown scheme or option.
    Ownership: the caller closes the store.
    """
    return _registry.open(url, **options)


def register_store(scheme: str, target: str) -> None:
    """Let the class ``target``, "module:Class", open URLs of ``scheme``.

    The class needs a classmethod ``from_url(url, **options)``. It is imported when first opened.
    A package declares the same by an entry point of the group ``hicache_async.stores``.

    Raises: ConfigError: a name that cannot work, or a scheme that another class has.
    """
    _registry.register(scheme, target)
