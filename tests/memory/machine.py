"""A machine on paper: the few files of /proc and /sys that say how much memory is free."""

from __future__ import annotations

from pathlib import Path

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
"""Where the memory controller of each cgroup version is mounted, below the root of the machine."""


class Machine:
    """Lay out what the kernel would show to this process.

    Args:
        root: an empty directory, given as the root to whoever reads.
        available_bytes: what is free on the machine; None: it does not say.
        cgroup: the lines of /proc/self/cgroup.
        mounts: kind ("cgroup2", "cgroup,memory"), which cgroup is shown, and where: /proc/self/mountinfo.
    """

    def __init__(
        self,
        root: Path,
        *,
        available_bytes: int | None = 64 * GIB,
        cgroup: str = "0::/",
        mounts: tuple[tuple[str, str, str], ...] = (),
    ) -> None:
        self.root = root
        available = "" if available_bytes is None else f"MemAvailable: {available_bytes // KIB} kB\n"
        self.write("proc/meminfo", f"MemTotal: 99999999 kB\nMemFree: 1 kB\n{available}Buffers: 5 kB\n")
        self.write("proc/self/cgroup", cgroup + "\n")
        lines = ["24 1 0:22 / / rw shared:1 - ext4 /dev/root rw\n"]
        for number, (filesystem, shown, mounted_at) in enumerate(mounts, 30):
            kind, *options = filesystem.split(",")
            super_options = ",".join(["rw", *options])
            lines.append(f"{number} 24 0:{number} {shown} {mounted_at} rw - {kind} cgroup {super_options}\n")
        if mounts:
            self.write("proc/self/mountinfo", "".join(lines))

    def write(self, path: str, content: str) -> Path:
        """Write one file and return where it is."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        return file

    def group(
        self,
        path: str,
        *,
        limit: int | str | None = None,
        used: int | str | None = None,
        cache: int = 0,
        protected: int | str | None = None,
        high: int | None = None,
    ) -> Path:
        """Add a cgroup of version 2 below its mount and return the file of its limit."""
        directory = f"{V2}/{path}".rstrip("/")
        for name, value in {
            "memory.max": limit, "memory.high": high, "memory.current": used, "memory.min": protected,
        }.items():  # fmt: skip
            if value is not None:
                self.write(f"{directory}/{name}", f"{value}\n")
        stat = f"anon 5\nfile {9 * cache}\nactive_file {cache - cache // 4}\ninactive_file {cache // 4}\n"
        self.write(f"{directory}/memory.stat", stat)
        return self.root / directory / "memory.max"

    def group_v1(self, path: str, *, limit: int, used: int | None, cache: int = 0) -> Path:
        """Add a cgroup of version 1 below its mount and return the file of its limit."""
        directory = f"{V1}/{path}".rstrip("/")
        if used is not None:
            self.write(f"{directory}/memory.usage_in_bytes", f"{used}\n")
        stat = f"active_file 7\ntotal_active_file {cache}\ninactive_file 8\ntotal_inactive_file {cache}\n"
        self.write(f"{directory}/memory.stat", stat)
        return self.write(f"{directory}/memory.limit_in_bytes", f"{limit}\n")
