"""ShmStore: objects in shared memory, for the processes of one machine."""

from __future__ import annotations

import os
import re
from concurrent.futures import Executor
from typing import Self

from ..errors import ConfigError
from ._slots.segment import is_segment
from ._slots.store import SlotStore, wanted_segment
from ._url import parse_mode, parse_nbytes, url_options, url_path

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_DIRECTORY = "/dev/shm"


class ShmStore(SlotStore):
    """Keep objects in a segment of POSIX shared memory; for the rest see :class:`SlotStore`.

    The segment is the file ``{directory}/hicache-{name}``. It outlives the processes that use it, and is
    there until :meth:`unlink` or a restart of the machine; its memory is taken from the moment it is made.

    Args:
        name: of the segment: letters, digits, ``_``, ``-`` and ``.``.
        max_bytes: memory that it takes, table included; None: as it is.
        slot_bytes: what the largest object takes, rounded up to 4096; a segment that exists may have larger
            slots. None: as it is.
        directory: where shared memory is.
        mode: 0o600, or 0o660 and 0o666 to share it with other users.
        num_lanes, threads: see :class:`SlotStore`.
    """

    def __init__(
        self,
        name: str,
        *,
        max_bytes: int | None = None,
        slot_bytes: int | None = None,
        directory: str | os.PathLike[str] = _DIRECTORY,
        mode: int = 0o600,
        num_lanes: int | None = None,
        threads: Executor | None = None,
    ) -> None:
        path = _path(name, directory)
        wanted = wanted_segment(
            path,
            max_bytes,
            slot_bytes,
            mode,
            map_slots=True,
            remedy=f"remove it with ShmStore.unlink({name!r}) or choose another name",
        )
        super().__init__(wanted, num_lanes, threads)

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        """Open ``shm:name?max_bytes=8GiB&slot_bytes=2MiB``; a segment that exists needs neither."""
        parsers = {
            "max_bytes": parse_nbytes,
            "slot_bytes": parse_nbytes,
            "directory": str,
            "mode": parse_mode,
            "num_lanes": int,
            "threads": None,
        }
        return cls(url_path(url), **url_options(url, options, parsers))  # type: ignore[arg-type]

    @classmethod
    def unlink(cls, name: str, *, directory: str | os.PathLike[str] = _DIRECTORY) -> bool:
        """Remove a segment; returns whether there was one. Stores that have it open keep it until they close.

        Raises: ConfigError: something else has its name. OSError: the system refuses.
        """
        path = _path(name, directory)
        try:
            if not is_segment(path):
                raise ConfigError(f"{path} is something else, not a segment; remove it yourself")
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True


def _path(name: str, directory: str | os.PathLike[str]) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name is {name!r}; it must match {_NAME.pattern}, as in shm:kv?max_bytes=8GiB")
    return os.path.join(os.path.abspath(directory), f"hicache-{name}")
