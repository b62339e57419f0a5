"""Which class serves which URL scheme, and opening a store by URL."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Protocol, Self, cast, runtime_checkable

from ..abc import Store
from ..errors import ConfigError
from ._composed import TIERED, Wrapped, open_tiered, query_names, tiered_accepts

ENTRY_POINT_GROUP = "hicache_async.stores"

_BUILT_IN = {
    "null": "hicache_async.stores.null:NullStore",
    "memory": "hicache_async.stores.memory:MemoryStore",
    "file": "hicache_async.stores.file:FileStore",
    "shm": "hicache_async.stores.shm:ShmStore",
    "mmap": "hicache_async.stores.mmap:MmapStore",
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
        """Return the store behind ``url``, in the wrappers that its prefixes name.

        Raises: ConfigError: an unknown scheme, a class that cannot be imported, or a wrong option.
        """
        if (wrapped := Wrapped.of(url)) is not None:
            return wrapped.open(options, self.open, self.accepted_options)
        if url.partition(":")[0] == TIERED:
            return open_tiered(url, options, self.open, self.accepted_options)
        return cast("Store", _import(self._target_of(url)).from_url(url, **options))

    def accepted_options(self, url: str) -> frozenset[str]:
        """Return the names of the options that whatever opens ``url`` takes, and ``url`` does not give itself.

        Raises: ConfigError: as :meth:`open`.
        """
        if (wrapped := Wrapped.of(url)) is not None:
            return wrapped.accepted(self.accepted_options)
        if url.partition(":")[0] == TIERED:
            return tiered_accepts(url, self.accepted_options)
        return _option_names(_import(self._target_of(url))) - query_names(url)

    def _target_of(self, url: str) -> str:
        scheme, colon, _ = url.partition(":")
        target = self._target(scheme) if colon else None
        if target is None:
            points = (point.name for point in entry_points(group=ENTRY_POINT_GROUP))
            known = sorted({*self._targets, *points, TIERED})
            raise ConfigError(f"no store opens {url!r}; its scheme must be one of: {', '.join(known)}")
        return target

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


def _option_names(opened: type[_OpensByUrl]) -> frozenset[str]:
    # Those arguments that a class takes by keyword only: beside them stands what it is opened on.
    parameters = inspect.signature(opened).parameters.values()
    return frozenset(each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY)


# The one table of the process, as schemes are: register_store() is a start-up declaration like an entry
# point. Nothing else is kept here; an application that wants its own table makes a Registry.
_registry = Registry(_BUILT_IN)


def open_store(url: str, **options: object) -> Store:
    """Return the store behind ``url``, as ``file:///data/kv?existence_ttl_s=2``.

    Args:
        url: the scheme chooses the class; the query may hold options. Each of ``guard+``, ``zstd+``, ``fp8+``
            and ``aesgcm+`` before it puts a wrapper around the store behind it, whose options begin with its
            name, as in ``guard+zstd+file:///data/kv?guard_timeout_s=2&zstd_level=1``.
            ``tiered:?fast=URL&slow=URL`` takes two URLs, percent-encoded.
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


def accepted_options(url: str) -> frozenset[str]:
    """Return the names of the options that :func:`open_store` may still be given for ``url``.

    They are the arguments that its class, each wrapper and each tier take by keyword only, less those that
    ``url`` gives itself: so whoever offers a default cannot overrule what was written down.

    Raises: ConfigError: an unknown scheme.
    """
    return _registry.accepted_options(url)
