"""read_memory_limits: what the machine and each cgroup above this process leave, and what is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_async.memory.host_memory import UNLIMITED, MemoryLimit, read_memory_limits
from tests.memory.machine import GIB, V1, V2, Machine

NO_LIMIT_V1 = 0x7FFF_FFFF_FFFF_F000


def left(machine: Machine) -> dict[str, int]:
    """Return what each cgroup limit leaves, by the path of its file; none may be unknown."""
    limits = read_memory_limits(machine.root)[1:]
    assert not [limit for limit in limits if limit.fault]
    return {str(Path(limit.name).relative_to(machine.root)): limit.free_bytes for limit in limits}


def machine_limit(machine: Machine) -> MemoryLimit:
    return read_memory_limits(machine.root)[0]


# The machine


def test_the_machine_has_what_is_available(tmp_path: Path) -> None:
    """Without cgroups the one limit is MemAvailable, and its name says where that stands."""
    machine = Machine(tmp_path, available_bytes=8 * GIB)
    name = f"the machine ({tmp_path}/proc/meminfo)"
    assert read_memory_limits(machine.root) == [MemoryLimit(name, 8 * GIB)]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_machine_that_does_not_say_what_is_available(tmp_path: Path, is_there: bool) -> None:
    """Without MemAvailable, or without /proc, the memory it has is the most that can be free."""
    machine = Machine(tmp_path, available_bytes=None)
    if not is_there:
        (tmp_path / "proc/meminfo").unlink()
    limit = machine_limit(machine)
    assert str(tmp_path / "proc/meminfo") in limit.fault
    assert GIB // 4 < limit.free_bytes < UNLIMITED


def test_this_machine_has_memory() -> None:
    """The real files of this machine are read, and each limit leaves a number of bytes."""
    limits = read_memory_limits()
    assert limits[0].free_bytes > 0 and not limits[0].fault
    assert all(0 <= limit.free_bytes < UNLIMITED for limit in limits)


# Where the limits are


def test_every_level_up_to_the_mount_counts(tmp_path: Path) -> None:
    """Each level with a number on it leaves its limit less its usage; "max" and no file are no limit."""
    machine = Machine(tmp_path, cgroup="0::/pod/box/app")
    machine.group("pod/box/app", limit="max", used=GIB)
    machine.group("pod/box", limit=5 * GIB, used=GIB)
    machine.group("pod", limit=4 * GIB, used=3 * GIB)
    machine.group("")
    machine.group("other", limit=1, used=1)
    machine.write("sys/fs/memory.max", "1\n")
    assert left(machine) == {f"{V2}/pod/box/memory.max": 4 * GIB, f"{V2}/pod/memory.max": GIB}


def test_memory_high_is_a_limit(tmp_path: Path) -> None:
    """Above memory.high a process crawls, so it limits as memory.max does."""
    machine = Machine(tmp_path, cgroup="0::/box")
    machine.group("box", limit=4 * GIB, high=3 * GIB, used=GIB)
    assert left(machine) == {f"{V2}/box/memory.max": 3 * GIB, f"{V2}/box/memory.high": 2 * GIB}


def test_version_1_counts_where_it_has_the_memory_controller(tmp_path: Path) -> None:
    """With both versions mounted, limits come from the one that the memory controller is in."""
    machine = Machine(
        tmp_path,
        cgroup="9:name=systemd:/x\n4:cpu,memory:/pod/box\n1:cpuset:/jail\n0::/elsewhere",
        mounts=(
            ("cgroup,cpuset", "/", f"/{V2}/cpuset"),
            ("cgroup,cpu,memory", "/", "/" + V1),
            ("cgroup2", "/", f"/{V2}/unified"),
        ),
    )
    machine.group_v1("pod/box", limit=2 * GIB, used=GIB)
    machine.group_v1("pod", limit=NO_LIMIT_V1, used=None)
    machine.group_v1("", limit=NO_LIMIT_V1, used=9 * GIB)
    machine.group_v1("jail", limit=1, used=0)
    machine.write(f"{V2}/cpuset/pod/box/memory.limit_in_bytes", "1\n")
    machine.write(f"{V2}/unified/elsewhere/cgroup.procs", "1\n")
    assert left(machine) == {f"{V1}/pod/box/memory.limit_in_bytes": GIB}


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/", "/"),
        ("/docker/abc", "/docker/abc"),  # the container sees its own cgroup at the mount
        ("/docker/abc", "/"),  # the path is the host's, the mount is the namespace's
        ("/", "/../.."),  # the mount shows what is above the namespace
        ("/../sibling", "/"),  # the process was moved out of the namespace
        ("/docker/abc", "/docker/xyz"),
    ],
)
def test_a_path_that_is_not_below_the_mount_starts_at_it(tmp_path: Path, path: str, shown: str) -> None:
    """In a container or a cgroup namespace the mount itself is the nearest level that can be seen."""
    machine = Machine(tmp_path, cgroup=f"0::{path}", mounts=(("cgroup2", shown, "/" + V2),))
    machine.group("", limit=2 * GIB, used=GIB)
    machine.write("sys/fs/sibling/memory.max", "1\n")
    assert left(machine) == {f"{V2}/memory.max": GIB}


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/docker/abc/app", "/docker/abc"),
        ("/app", "/docker/abc"),  # the path is the namespace's, what the mount shows is the host's
        ("/../abc/app", "/../abc"),
    ],
)
def test_a_path_below_what_the_mount_shows_is_found(tmp_path: Path, path: str, shown: str) -> None:
    """The cgroup is looked for where the mount shows it, not at its full path."""
    machine = Machine(tmp_path, cgroup=f"0::{path}", mounts=(("cgroup2", shown, "/" + V2),))
    machine.group("app", limit=2 * GIB, used=GIB)
    machine.group("", limit=9 * GIB, used=GIB)
    assert left(machine) == {f"{V2}/app/memory.max": GIB, f"{V2}/memory.max": 8 * GIB}


def test_a_mount_that_shows_somebody_elses_cgroup_does_not_count(tmp_path: Path) -> None:
    """Where one mount shows this process's cgroup, those that show another one are left out."""
    mounts = (("cgroup2", "/other", "/peek"), ("cgroup2", "/", "/cgroups"))
    machine = Machine(tmp_path, cgroup="0::/pod", mounts=mounts)
    machine.write("peek/memory.max", "1\n")
    machine.write("cgroups/pod/memory.max", f"{2 * GIB}\n")
    machine.write("cgroups/pod/memory.current", f"{GIB}\n")
    assert left(machine) == {"cgroups/pod/memory.max": GIB}


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path: Path) -> None:
    """Usage above the limit leaves 0 bytes, not a negative number."""
    machine = Machine(tmp_path)
    machine.group("", limit=GIB, used=2 * GIB)
    assert left(machine) == {f"{V2}/memory.max": 0}


# Page cache


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_counts_as_free(tmp_path: Path, version: int) -> None:
    """File pages, active or not, of a cgroup and those below it are not counted as used."""
    machine = Machine(tmp_path, cgroup="0::/" if version == 2 else "4:memory:/")
    if version == 2:
        file = machine.group("", limit=4 * GIB, used=3 * GIB, cache=2 * GIB)
    else:
        file = machine.group_v1("", limit=4 * GIB, used=3 * GIB, cache=GIB)
    assert left(machine) == {str(file.relative_to(tmp_path)): 3 * GIB}


@pytest.mark.parametrize("stat", [None, "", "active_file many\n", "nonsense\n"])
def test_page_cache_that_cannot_be_read_counts_as_used(tmp_path: Path, stat: str | None) -> None:
    """Without a memory.stat that says how much of it is cache, all that is used is used."""
    machine = Machine(tmp_path)
    file = machine.group("", limit=4 * GIB, used=3 * GIB, cache=2 * GIB).with_name("memory.stat")
    file.unlink() if stat is None else file.write_text(stat)
    assert left(machine) == {f"{V2}/memory.max": GIB}


def test_more_page_cache_than_usage_leaves_the_limit(tmp_path: Path) -> None:
    """The two are read one after the other and may not fit: nothing is free beyond the limit."""
    machine = Machine(tmp_path)
    machine.group("", limit=4 * GIB, used=GIB, cache=2 * GIB)
    assert left(machine) == {f"{V2}/memory.max": 4 * GIB}


@pytest.mark.parametrize(
    ("protected", "kept"), [(None, 0), (0, 0), (GIB // 2, GIB // 2), (2 * GIB, GIB), ("max", GIB)]
)
def test_page_cache_of_a_protected_cgroup_counts_as_used(
    tmp_path: Path, protected: int | str | None, kept: int
) -> None:
    """What memory.min of a cgroup protects of its cache does not go when one above reaches its limit."""
    machine = Machine(tmp_path, cgroup="0::/pod/box")
    machine.group("pod", limit=8 * GIB, used=6 * GIB, cache=3 * GIB)
    machine.group("pod/box", limit="max", used=3 * GIB, cache=2 * GIB)
    machine.group("pod/sidecar", limit="max", used=3 * GIB, cache=GIB, protected=protected)
    assert left(machine) == {f"{V2}/pod/memory.max": 5 * GIB - kept}


def test_protection_does_not_bind_the_level_itself(tmp_path: Path) -> None:
    """A cgroup that reaches its own limit loses its cache, protected or not; one above does not get it."""
    machine = Machine(tmp_path, cgroup="0::/pod/box")
    machine.group("pod", limit=8 * GIB, used=6 * GIB, cache=2 * GIB)
    machine.group("pod/box", limit=8 * GIB, used=6 * GIB, cache=2 * GIB, protected=6 * GIB)
    assert left(machine) == {f"{V2}/pod/box/memory.max": 4 * GIB, f"{V2}/pod/memory.max": 2 * GIB}


def test_protection_reaches_no_deeper_than_that_of_the_cgroups_between(tmp_path: Path) -> None:
    """A cgroup is protected as far as those above it are: alone, its memory.min keeps nothing."""
    machine = Machine(tmp_path, cgroup="0::/pod")
    machine.group("pod", limit=8 * GIB, used=6 * GIB, cache=2 * GIB)
    machine.group("pod/box", used=6 * GIB, cache=2 * GIB, protected=0)
    machine.group("pod/box/app", used=6 * GIB, cache=2 * GIB, protected=6 * GIB)
    assert left(machine) == {f"{V2}/pod/memory.max": 4 * GIB}


def test_more_protected_than_cache_is_no_usage(tmp_path: Path) -> None:
    """The two are read one after the other and may not fit: a group never uses more than it says."""
    machine = Machine(tmp_path, cgroup="0::/pod")
    machine.group("pod", limit=8 * GIB, used=6 * GIB, cache=GIB)
    machine.group("pod/box", used=6 * GIB, cache=2 * GIB, protected=6 * GIB)
    assert left(machine) == {f"{V2}/pod/memory.max": 2 * GIB}


def test_protection_that_cannot_be_read_protects_all_cache(tmp_path: Path) -> None:
    """Where it is not known what a cgroup keeps, no cache counts as free."""
    machine = Machine(tmp_path, cgroup="0::/pod")
    machine.group("pod", limit=8 * GIB, used=6 * GIB, cache=2 * GIB)
    machine.group("pod/box", used=6 * GIB, cache=GIB, protected="much")
    assert left(machine) == {f"{V2}/pod/memory.max": 2 * GIB}


def test_the_machine_does_not_get_protected_page_cache(tmp_path: Path) -> None:
    """MemAvailable counts all page cache; what the topmost cgroups protect of it is taken off."""
    host = Machine(tmp_path / "host", cgroup="0::/pods/box")
    host.group("", cache=9 * GIB)
    host.group("pods", cache=6 * GIB, protected=5 * GIB)
    host.group("pods/box", cache=6 * GIB, protected=5 * GIB)
    host.group("system", cache=GIB, protected=2 * GIB)
    assert machine_limit(host).free_bytes == 58 * GIB
    container = Machine(tmp_path / "container", cgroup="0::/")
    container.group("", limit="max", used=9 * GIB, cache=6 * GIB, protected=5 * GIB)
    container.group("app", used=9 * GIB, cache=6 * GIB)
    assert machine_limit(container).free_bytes == 59 * GIB


# What is not known


@pytest.mark.parametrize("usage", ["missing", "unreadable", "no number"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_whose_usage_is_unknown_says_so(tmp_path: Path, version: int, usage: str) -> None:
    """It leaves its whole number of bytes at the most, and names the file that could not be read."""
    machine = Machine(tmp_path, cgroup="0::/box" if version == 2 else "4:memory:/box")
    if version == 2:
        file, used = machine.group("box", limit=2 * GIB), tmp_path / V2 / "box/memory.current"
    else:
        file = machine.group_v1("box", limit=2 * GIB, used=None)
        used = tmp_path / V1 / "box/memory.usage_in_bytes"
    if usage == "unreadable":
        used.mkdir()
    elif usage == "no number":
        used.write_text("plenty\n")
    limits = read_memory_limits(machine.root)[1:]
    assert [(limit.name, limit.free_bytes) for limit in limits] == [(str(file), 2 * GIB)]
    assert str(used) in limits[0].fault


def test_the_usage_of_no_limit_does_not_matter(tmp_path: Path) -> None:
    """Where the limit is "max", or version 1's number for it, nobody asks for the usage."""
    machine = Machine(tmp_path, cgroup="0::/box\n4:memory:/box")
    machine.group("box", limit="max")
    machine.group_v1("box", limit=NO_LIMIT_V1, used=None)
    assert left(machine) == {}


def test_a_limit_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    """A limit that is there and does not tell its number could be any: it is named as not known."""
    machine = Machine(tmp_path)
    file = machine.write(f"{V2}/memory.max/x", "").parent
    limit = read_memory_limits(machine.root)[1]
    assert (limit.name, limit.free_bytes) == (str(file), UNLIMITED)
    assert str(file) in limit.fault
