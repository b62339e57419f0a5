"""Store URLs: their path, and options from the query and from the call, checked by name and type."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..errors import ConfigError

Parsers = Mapping[str, Callable[[str], object] | None]
"""Option name to what reads it from a query; None: it cannot be written in a URL."""

_NBYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(?:([KMGT])(i)?B)?")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


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


def parse_nbytes(text: str) -> int:
    """Read a number of bytes: plain, or with KB, MB, GB or TB for powers of 1000, KiB to TiB for powers of 1024.

    Raises: ValueError: anything else, a fraction of a byte, or a negative number.
    """
    matched = _NBYTES.fullmatch(text.strip())
    if matched is None:
        raise ValueError(f"{text!r} is not a number of bytes")
    number, letter, binary = matched[1], matched[2], matched[3]
    scaled = Decimal(number) * (1024 if binary else 1000) ** (" KMGT".index(letter or " "))
    if scaled != int(scaled):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(scaled)


def parse_flag(text: str) -> bool:
    """Read "true" or "1", "false" or "0". Raises: ValueError: anything else."""
    if text.lower() not in _FLAGS:
        raise ValueError(f"{text!r} is not true or false")
    return _FLAGS[text.lower()]


def parse_mode(text: str) -> int:
    """Read permission bits in octal, as 640 or 0o640. Raises: ValueError: anything else."""
    return int(text, 8)


def parse_group(text: str) -> str | int:
    """Read the name or the number of a group."""
    return int(text) if text.isdecimal() else text


def _parse(url: str, name: str, text: str, parser: Callable[[str], object] | None) -> object:
    if parser is None:
        raise ConfigError(f"{name!r} cannot stand in the store URL {url!r}; pass it as an argument")
    try:
        return parser(text)
    except ValueError:
        wanted = _WANTED.get(parser, "a value that it can have")
        raise ConfigError(f"{name} is {text!r} in store URL {url!r}; give {wanted}") from None


_WANTED: Mapping[Callable[[str], object], str] = {
    int: "an integer",
    float: "a number",
    parse_nbytes: "bytes, plain or with KB, MB, GB, TB, KiB, MiB, GiB or TiB",
    parse_flag: "true or false",
    parse_mode: "permissions in octal, like 640",
}


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from None
