"""How many host pages a cache gets, and whether the machine has room for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ..config import CacheConfig, WritePolicy
from ..errors import ConfigError

# Where each cgroup version mounts the memory controller, and what its files are called.
_CGROUP_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = (
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes this process could still take: what the machine has, bounded by its cgroups.

    Args:
        root: where ``proc`` and ``sys`` are; tests bring their own.
    """
    return max(0, min([_machine_bytes(root), *_cgroup_bytes(root)]))


def host_pages(
    config: CacheConfig,
    *,
    page_nbytes: int,
    device_pages: int,
    ranks_on_host: int = 1,
    available_bytes: Callable[[], int] = available_host_bytes,
) -> int:
    """Compute how many host pages one rank gets.

    ``host_bytes`` is per rank and overrides ``host_ratio``. The reserve is the machine's, so it is
    taken off before what is left is divided among the ranks.

    Args:
        page_nbytes: bytes of one page, all layers, K and V.
        device_pages: pages of the device pool.
        ranks_on_host: how many ranks of this machine take a pool of this size.
        available_bytes: how much memory is free.
    Raises:
        ConfigError: not one page; more than is free; or a pool that write_through would thrash.
    """
    if config.host_bytes is not None:
        field, value, num_pages = "host_bytes", str(config.host_bytes), config.host_bytes // page_nbytes
    else:
        field, value, num_pages = "host_ratio", str(config.host_ratio), int(config.host_ratio * device_pages)
    if num_pages < 1:
        raise ConfigError(
            f"{field} is {value}, less than one page: a page takes {page_nbytes} bytes "
            f"and the device pool has {device_pages} pages; raise {field}"
        )
    free, reserve = available_bytes(), config.host_reserve_bytes
    left = max(0, free - reserve) // ranks_on_host
    if num_pages * page_nbytes > left:
        raise ConfigError(
            f"{field} is {value}, which takes {num_pages * page_nbytes} bytes on each of "
            f"{ranks_on_host} ranks; {free} bytes are free and host_reserve_bytes keeps {reserve}, "
            f"which leaves {left} for each; lower {field} or host_reserve_bytes"
        )
    if (
        config.write_policy is WritePolicy.WRITE_THROUGH
        and num_pages <= device_pages
        and not config.allow_small_host
    ):
        raise ConfigError(
            f"{field} is {value}, a host pool of {num_pages} pages, and the device pool has {device_pages}: "
            f"under write_through the host must be larger; raise {field} or set allow_small_host"
        )
    return num_pages


def _machine_bytes(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """Yield what each memory limit above this process leaves; none where nothing can be read."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, limit_name, usage_name, cache_name = _CGROUP_V2
        elif "memory" in controllers.split(","):
            mount, limit_name, usage_name, cache_name = _CGROUP_V1
        else:
            continue
        top = root / mount
        group = top / path.lstrip("/")
        for directory in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            limit, usage = _read(directory / limit_name), _read(directory / usage_name)
            if limit.isdigit() and usage.isdigit():
                # Cached file pages that nobody uses count as usage but go as soon as memory is asked for.
                stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines())
                yield int(limit) - int(usage) + int(stat.get(cache_name, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
