"""MmapStore: objects in one preallocated file, whose table is mapped."""

from __future__ import annotations

import os
from concurrent.futures import Executor
from typing import Self

from ..errors import ConfigError
from ._slots.store import SlotStore, wanted_segment
from ._url import parse_mode, parse_nbytes, url_options, url_path


class MmapStore(SlotStore):
    """Keep objects in one file of fixed slots, found again after a restart; see :class:`SlotStore`.

    Only the table is mapped. Payloads are read and written by system calls, so that a medium that fails, or a
    file that is cut within them, makes a miss and not a SIGBUS. A file that is cut within its table makes every
    call raise StoreUnavailable: each page looks at the size first. In the moments between that look and the
    access a cut, or a medium that fails to give the table, still ends the process by a SIGBUS.

    Nothing is synced: after a crash of the machine what had not reached the medium is found to be damaged, and
    free. The file is there until it is removed.

    Args:
        path: the file, made when first used; its directory must exist. On a local disk: locks and
            mappings are not shared over a network.
        max_bytes: size of the file; None: as it is.
        slot_bytes: what the largest object takes, rounded up to 4096; a file that exists may have larger
            slots. None: as it is.
        mode: 0o600, or 0o660 and 0o666 to share it with other users.
        num_lanes, threads: see :class:`SlotStore`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        slot_bytes: int | None = None,
        mode: int = 0o600,
        num_lanes: int | None = None,
        threads: Executor | None = None,
    ) -> None:
        if not os.fspath(path):
            raise ConfigError("path is empty; give the path of a file")
        wanted = wanted_segment(
            os.path.realpath(path),
            max_bytes,
            slot_bytes,
            mode,
            map_slots=False,
            remedy="remove the file or choose another path",
        )
        super().__init__(wanted, num_lanes, threads)

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        """Open ``mmap:///absolute/path?max_bytes=100GiB&slot_bytes=2MiB``; a file that exists needs neither."""
        path = url_path(url)
        if not path.startswith("/"):
            raise ConfigError(f"store URL {url!r} has the path {path!r}; write mmap:///absolute/path")
        parsers = {
            "max_bytes": parse_nbytes,
            "slot_bytes": parse_nbytes,
            "mode": parse_mode,
            "num_lanes": int,
            "threads": None,
        }
        return cls(path, **url_options(url, options, parsers))  # type: ignore[arg-type]
