"""Values of options in a URL: sizes, flags, modes and groups."""

from __future__ import annotations

import pytest

from hicache_async.stores._url import parse_flag, parse_group, parse_mode, parse_nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("200GB", 200 * 10**9),
        ("1.5GiB", 3 << 29),
        ("2 TiB", 2 << 40),
        ("0.001MB", 1000),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    """A size is a number of bytes, with a power of 1000 or of 1024 behind it."""
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "-1", "1e9", "1K", "1Gi", "1 GiBs", "0.5", "0.0001KB", "inf", "0x10", "٣"]
)
def test_what_is_no_size(text: str) -> None:
    """Anything else is no size, nor is a fraction of a byte."""
    with pytest.raises(ValueError, match="bytes"):
        parse_nbytes(text)


def test_flags_modes_and_groups() -> None:
    """Flags are words or digits, modes are octal, and a group is a number where it looks like one."""
    assert [parse_flag(text) for text in ("true", "1", "False", "0")] == [True, True, False, False]
    assert parse_mode("640") == parse_mode("0o640") == 0o640
    assert (parse_group("12"), parse_group("staff")) == (12, "staff")
    with pytest.raises(ValueError, match="true or false"):
        parse_flag("yes please")
