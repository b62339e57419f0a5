"""Options of a FileStore that can be judged without touching the disk."""

from __future__ import annotations

import grp
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from ...errors import ConfigError
from .._url import parse_flag, parse_group, parse_mode, parse_nbytes

Durability: TypeAlias = Literal["none", "batch", "each"]

URL_OPTIONS: Mapping[str, Callable[[str], object] | None] = {
    "existence_ttl_s": float,
    "num_lanes": int,
    "max_bytes": parse_nbytes,
    "min_free_bytes": parse_nbytes,
    "low_water": float,
    "durability": str,
    "read_only": parse_flag,
    "mode": parse_mode,
    "group": parse_group,
    "unnamed_temp": parse_flag,
    "threads": None,
    "monotonic": None,
}
"""What reads each option of a FileStore from a URL; None: it cannot stand there."""

_READ, _WRITE = 0o444, 0o222
_SETGID = 0o2000


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """What a FileStore was asked for, checked.

    Attributes:
        gid: group of all files and directories; -1: as the system chooses.
    Raises: ConfigError: an option that cannot work, alone or beside another.
    """

    max_bytes: int | None
    min_free_bytes: int
    low_water: float
    durability: Durability
    read_only: bool
    mode: int
    gid: int
    unnamed_temp: bool

    def __post_init__(self) -> None:
        _check_limits(self.max_bytes, self.min_free_bytes, self.low_water)
        _check_mode(self.mode, self.gid)
        _check_durability(self.durability, self.unnamed_temp)
        if self.read_only and self.limited:
            raise ConfigError(
                f"max_bytes is {self.max_bytes!r} and min_free_bytes {self.min_free_bytes!r} with read_only=True,"
                " which removes nothing; give neither, or read_only=False"
            )

    @property
    def limited(self) -> bool:
        """Whether the bytes on the disk have a limit."""
        return self.max_bytes is not None or self.min_free_bytes > 0

    @property
    def directory_mode(self) -> int:
        """The mode of directories: whoever may read objects may enter, and the group keeps what it writes."""
        enter = (self.mode & _READ) >> 2
        return self.mode | enter | (_SETGID if self.mode & 0o020 else 0)


def gid_of(group: str | int | None) -> int:
    """Return the number of ``group``; -1 for None.

    Raises: ConfigError: there is no such group, or this process may not give files to it.
    """
    if group is None:
        return -1
    if isinstance(group, bool) or not isinstance(group, str | int):
        raise ConfigError(f"group is {group!r}; give the name or the number of a group")
    try:
        gid = grp.getgrnam(group).gr_gid if isinstance(group, str) else group
    except KeyError:
        raise ConfigError(
            f"group is {group!r}, which this system does not know; give one that it does"
        ) from None
    if gid < 0:
        raise ConfigError(f"group is {group!r}; give a number >= 0")
    if os.geteuid() != 0 and gid not in (os.getegid(), *os.getgroups()):
        raise ConfigError(
            f"group is {group!r}, which this process is not in; give one of {sorted(os.getgroups())}"
        )
    return gid


def _check_limits(max_bytes: Any, min_free_bytes: Any, low_water: Any) -> None:
    if max_bytes is not None and not (_is_int(max_bytes) and max_bytes >= 1):
        raise ConfigError(f"max_bytes is {max_bytes!r}; give an integer >= 1, or None for no limit")
    if not (_is_int(min_free_bytes) and min_free_bytes >= 0):
        raise ConfigError(f"min_free_bytes is {min_free_bytes!r}; give an integer >= 0")
    if not (isinstance(low_water, int | float) and 0 < low_water <= 1):
        raise ConfigError(f"low_water is {low_water!r}; give a share of the limit, above 0 and at most 1")


def _check_mode(mode: Any, gid: int) -> None:
    if not _is_int(mode) or mode & ~0o666 or mode & 0o600 != 0o600:
        shown = oct(mode) if _is_int(mode) else repr(mode)
        raise ConfigError(
            f"mode is {shown}; give 0o600, 0o640, 0o660 or another that lets the owner read and write"
        )
    if (mode & _WRITE) << 1 & ~mode:
        raise ConfigError(f"mode is {oct(mode)}; give one that lets read whoever may write, like 0o660")
    if gid >= 0 and not mode & 0o060:
        raise ConfigError(f"mode is {oct(mode)}, which gives nothing to the group; give 0o640 or 0o660")


def _check_durability(durability: Any, unnamed_temp: Any) -> None:
    if durability not in get_args(Durability):
        raise ConfigError(f"durability is {durability!r}; give 'none', 'batch' or 'each'")
    if unnamed_temp and durability == "batch":
        raise ConfigError(
            "unnamed_temp is True with durability='batch', which would hold hundreds of files open;"
            " give 'none' or 'each', or unnamed_temp=False"
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
