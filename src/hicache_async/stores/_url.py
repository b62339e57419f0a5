"""Store URLs: their path, and options from the query and from the call, checked by name and type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..errors import ConfigError

Parsers = Mapping[str, Callable[[str], object] | None]
"""Option name to what reads it from a query; None: it cannot be written in a URL."""


def url_path(url: str) -> str:
    """Return the decoded path of ``url``.

    Raises: ConfigError: the URL names a host.
    """
    parts = _split(url)
    if parts.netloc:
        raise ConfigError(
            f"store URL {url!r} names a host, {parts.netloc!r}; write {parts.scheme}:///absolute/path"
        )
    return unquote(parts.path)


def url_options(url: str, options: Mapping[str, object], parsers: Parsers) -> dict[str, object]:
    """Return the options of the query and of ``options``, which win.

    Raises: ConfigError: an option that is not in ``parsers``, or a text that is not of its type.
    """
    query = parse_qsl(_split(url).query, keep_blank_values=True)
    for name in (*dict(query), *options):
        if name not in parsers:
            valid = ", ".join(sorted(parsers)) or "none"
            raise ConfigError(f"{name!r} is not an option of store {url!r}; the options are: {valid}")
    return {name: _parse(url, name, text, parsers[name]) for name, text in query} | dict(options)


def _parse(url: str, name: str, text: str, parser: Callable[[str], object] | None) -> object:
    if parser is None:
        raise ConfigError(f"{name!r} cannot stand in the store URL {url!r}; pass it as an argument")
    try:
        return parser(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r} in store URL {url!r}; give {_article(parser)}") from None


def _article(parser: Callable[[str], object]) -> str:
    return "an integer" if parser is int else "a number"


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from None
