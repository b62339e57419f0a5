"""How much memory this process could still take: what the machine has free, and what each cgroup leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 62
"""No limit: cgroup v2 says "max", v1 the largest number of whole pages, which is above this."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit above this process.

    Attributes:
        name: the machine, or the file of the cgroup that sets it.
        free_bytes: what it leaves; where ``fault`` is set, the most that it can leave.
        fault: why what it leaves is not known, with the name of the file; "" when it is known.
    """

    name: str
    free_bytes: int
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _Controller:
    """Where one cgroup version mounts its memory controller, and what the files there are called."""

    filesystem: str
    mount: str
    limits: tuple[str, ...]
    usage: str
    page_cache: tuple[str, ...]
    protection: str


# memory.high kills nobody, but slows down without end whoever stays above it, as pages of a pool do.
_V2 = _Controller(
    "cgroup2", "/sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current",
    ("active_file", "inactive_file"), "memory.min",
)  # fmt: skip
_V1 = _Controller(
    "cgroup", "/sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"), "",
)  # fmt: skip


def read_memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Read what limits the memory of this process: the machine, and its cgroups up to the mount.

    Page cache that goes when memory is asked for counts as free; what ``memory.min`` of a cgroup
    protects of it counts as used at every level above that one, whose reclaim spares it.

    Args:
        root: where ``proc`` and ``sys`` are; tests bring their own.
    Returns: the machine's limit, then those of cgroups that have a number on them.
    """
    limits: list[MemoryLimit] = []
    protected_bytes = 0
    for controller, group, top in _cgroups(root):
        for level in (group, *(above for above in group.parents if above.is_relative_to(top))):
            limits += _limits_of(level, controller)
        protected_bytes = max(protected_bytes, _protected_from_machine(top, controller))
    return [_machine_limit(root, protected_bytes), *limits]


def _machine_limit(root: Path, protected_bytes: int) -> MemoryLimit:
    path = root / "proc/meminfo"
    name, fault = f"the machine ({path})", f"{path} has no MemAvailable"
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return MemoryLimit(name, max(0, int(line.split()[1]) * 1024 - protected_bytes))
    except OSError as error:
        fault = str(error)
    return MemoryLimit(name, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), fault)


def _cgroups(root: Path) -> Iterator[tuple[_Controller, Path, Path]]:
    """Yield each memory controller over this process, its cgroup's directory, and where that is mounted."""
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        controller = _V2 if not names else _V1 if "memory" in names.split(",") else None
        if controller is None:
            continue
        group, mounts = PurePosixPath("/", path), _mounts(root, controller)
        for shown, top in [mount for mount in mounts if group.is_relative_to(mount[0])] or mounts:
            # In a cgroup namespace the path may not be below what the mount shows: it starts at the mount then.
            inside = group.relative_to(shown if group.is_relative_to(shown) else "/")
            yield controller, top if ".." in inside.parts else top / inside, top


def _mounts(root: Path, controller: _Controller) -> list[tuple[PurePosixPath, Path]]:
    """Return which cgroup each mount of a controller shows at its top, and where it is mounted."""
    mounts = []
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, source = line.partition(" - ")
        filesystem, _, options = source.split(" ", 2)
        if filesystem == controller.filesystem and (controller is _V2 or "memory" in options.split(",")):
            shown, mounted_at = mount.split(" ")[3:5]
            mounts.append((PurePosixPath(shown), root / mounted_at.lstrip("/")))
    return mounts or [(PurePosixPath("/"), root / controller.mount.lstrip("/"))]


def _limits_of(level: Path, controller: _Controller) -> Iterator[MemoryLimit]:
    for path in (level / name for name in controller.limits):
        try:
            limit_bytes = _read_number(path)
        except (FileNotFoundError, NotADirectoryError):  # as at the top of the hierarchy
            continue
        except OSError as error:
            yield MemoryLimit(str(path), UNLIMITED, str(error))
            continue
        if limit_bytes >= UNLIMITED:
            continue
        try:
            used_bytes = _read_number(level / controller.usage)
        except OSError as error:
            yield MemoryLimit(str(path), limit_bytes, str(error))
        else:
            used_bytes -= min(used_bytes, _reclaimable_bytes(level, controller))
            yield MemoryLimit(str(path), max(0, limit_bytes - used_bytes))


def _reclaimable_bytes(level: Path, controller: _Controller) -> int:
    """Return the page cache that goes when ``level`` reaches its limit; 0 where that is not known."""
    try:
        return max(0, _page_cache_bytes(level, controller) - _protected_below(level, controller))
    except (OSError, ValueError):
        return 0


def _protected_from_machine(top: Path, controller: _Controller) -> int:
    """Return how much page cache the machine counts as free and its reclaim spares, as far as is known."""
    try:
        # The topmost cgroup of all has no protection of its own; that of a container or a namespace has.
        return _protected_bytes(top, controller) or _protected_below(top, controller)
    except (OSError, ValueError):
        return 0


def _protected_below(level: Path, controller: _Controller) -> int:
    """Return how much page cache the cgroups right below ``level`` keep from its reclaim.

    No cgroup is protected beyond what those between it and ``level`` are, so these bound the deeper
    ones (``memory.min`` in the kernel's cgroup-v2.rst).
    """
    return sum(_protected_bytes(group, controller) for group in level.iterdir() if group.is_dir())


def _protected_bytes(group: Path, controller: _Controller) -> int:
    path = group / controller.protection
    protection = _read_number(path) if controller.protection and path.exists() else 0
    return min(protection, _page_cache_bytes(group, controller)) if protection else 0


def _page_cache_bytes(group: Path, controller: _Controller) -> int:
    # File pages of a cgroup and all below it, as MemAvailable counts them; shared memory is not among them.
    stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
    return sum(int(stat.get(name, 0)) for name in controller.page_cache)


def _read_number(path: Path) -> int:
    text = path.read_text().strip()
    if text == "max":
        return UNLIMITED
    if not text.isdecimal():
        raise OSError(errno.EINVAL, f"{text[:40]!r} is not a number", str(path))
    return int(text)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
