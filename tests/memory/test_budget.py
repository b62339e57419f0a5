"""host_pages: how the options become a page count, and what is refused; and where free memory is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hicache_async.config import CacheConfig
from hicache_async.errors import ConfigError
from hicache_async.memory.budget import available_host_bytes, host_pages

GIB = 1 << 30
CONFIG = CacheConfig(host_reserve_bytes=GIB)


def pages(config: CacheConfig, *, ranks: int = 1, free: int = 100 * GIB, device_pages: int = 100) -> int:
    return host_pages(
        config,
        page_nbytes=1 << 20,
        device_pages=device_pages,
        ranks_on_host=ranks,
        available_bytes=lambda: free,
    )


def test_ratio_counts_device_pages() -> None:
    """Without host_bytes the pool is a multiple of the device's pages."""
    assert pages(CONFIG) == 200
    assert pages(dataclasses.replace(CONFIG, host_ratio=0.5)) == 50


def test_bytes_override_the_ratio() -> None:
    """host_bytes is per rank, rounded down to pages, and the ratio no longer counts."""
    config = dataclasses.replace(CONFIG, host_bytes=(7 << 20) + 5, host_ratio=50.0)
    assert pages(config) == 7
    assert pages(config, ranks=8) == 7


def test_reserve_is_subtracted_before_dividing() -> None:
    """With 9 GiB free, 1 GiB kept and 8 ranks each gets 1 GiB, to the byte."""
    config = dataclasses.replace(CONFIG, host_bytes=GIB)
    assert pages(config, ranks=8, free=9 * GIB) == 1024
    with pytest.raises(ConfigError):
        pages(config, ranks=8, free=9 * GIB - 1)


def test_too_little_names_free_reserve_and_field() -> None:
    """The refusal names what was asked for, what is free, what is kept, and the option to lower."""
    with pytest.raises(ConfigError) as caught:
        pages(dataclasses.replace(CONFIG, host_bytes=5 * GIB), ranks=2, free=6 * GIB)
    message = str(caught.value)
    for part in ("host_bytes", f"{5 * GIB}", f"{6 * GIB}", "host_reserve_bytes", f"{GIB}", f"{5 * GIB // 2}"):
        assert part in message
    with pytest.raises(ConfigError, match=r"host_ratio is 2\.0"):
        pages(CONFIG, free=GIB + (100 << 20))


def test_reserve_above_free_leaves_nothing() -> None:
    """A machine with less free than the reserve leaves 0, not a negative number."""
    with pytest.raises(ConfigError, match="leaves 0 for each"):
        pages(CONFIG, free=GIB // 2)


def test_less_than_a_page_is_refused() -> None:
    """A pool of no page is refused with the size of a page."""
    with pytest.raises(ConfigError, match=r"host_bytes is 1048575, less than one page.* 1048576 bytes"):
        pages(dataclasses.replace(CONFIG, host_bytes=(1 << 20) - 1))
    with pytest.raises(ConfigError, match=r"host_ratio is 0.001.*100 pages"):
        pages(dataclasses.replace(CONFIG, host_ratio=0.001))


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_write_through_needs_a_larger_host(ratio: float) -> None:
    """Under write_through a host pool not above the device pool is refused with both, unless allowed."""
    config = dataclasses.replace(CONFIG, host_ratio=ratio, write_policy="write_through")
    expected = int(100 * ratio)
    with pytest.raises(
        ConfigError, match=f"host pool of {expected} pages.*device pool has 100.*allow_small_host"
    ):
        pages(config)
    assert pages(dataclasses.replace(config, allow_small_host=True)) == expected
    assert pages(dataclasses.replace(config, host_ratio=1.01)) == 101
    for other in ("write_back", "write_through_selective"):
        assert pages(dataclasses.replace(config, write_policy=other)) == expected


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Lay out a small /proc and /sys with 8 GiB available."""
    for path, content in {
        "proc/meminfo": f"MemTotal:  9999 kB\nMemFree: 1 kB\nMemAvailable:  {8 * GIB // 1024} kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    """Where no cgroup says anything, MemAvailable is what is available."""
    assert available_host_bytes(machine(tmp_path, "0::/\n", {})) == 8 * GIB


def test_cgroup_v2_bounds(tmp_path: Path) -> None:
    """The tightest limit above the process counts, less its usage, file cache not counted as used."""
    cgroup = "sys/fs/cgroup"
    files = {
        f"{cgroup}/pod/box/memory.max": "max\n",
        f"{cgroup}/pod/box/memory.current": f"{GIB}\n",
        f"{cgroup}/pod/memory.max": f"{4 * GIB}\n",
        f"{cgroup}/pod/memory.current": f"{3 * GIB}\n",
        f"{cgroup}/pod/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
    }
    assert available_host_bytes(machine(tmp_path, "0::/pod/box\n", files)) == 3 * GIB


def test_cgroup_v1_bounds(tmp_path: Path) -> None:
    """A version 1 limit counts too, also where the process's path does not exist in its own view."""
    cgroup = "sys/fs/cgroup/memory"
    files = {
        f"{cgroup}/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{cgroup}/memory.usage_in_bytes": f"{GIB}\n",
        f"{cgroup}/memory.stat": "cache 9\n",
    }
    assert available_host_bytes(machine(tmp_path, "4:cpu,memory:/docker/abc\n0::/\n", files)) == GIB


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path: Path) -> None:
    """Usage above the limit leaves 0 bytes."""
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": f"{2 * GIB}\n"}
    assert available_host_bytes(machine(tmp_path, "0::/\n", files)) == 0


def test_this_machine_has_memory() -> None:
    """The real files of this machine are read without error."""
    assert available_host_bytes() > 0
