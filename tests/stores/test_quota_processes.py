"""Quota among processes, on disks that are full, and in directories that may not be written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.capacity import OBJECT_NBYTES, Sampler, Shelf, finish, opened, run_on_small_disk, start

LIMIT = 20

WRITE = """
shelf = Shelf(root)
name, seconds, options = args[0], float(args[1]), eval(args[2])
dice = random.Random(name)
quota = shelf.quota(**options)
quota.trim()
print("ready", flush=True)
sys.stdin.readline()
end, counts, keys = time.monotonic() + seconds, [0, 0], []
while time.monotonic() < end:
    key = f"{name}-{dice.randrange(1000)}"
    if shelf.path(key).exists():
        os.utime(shelf.path(key)) if shelf.path(key).exists() else None
        continue
    counts[shelf.put(quota, key, dice.choice([1, 4096, 8192, 8193, 20000]))] += 1
quota.close()
print(*counts)
"""


def write_together(root: Path, seconds: float, options: str) -> list[tuple[int, int]]:
    """Let three processes write; returns how many writes of each were refused and how many granted."""
    writers = [start(WRITE, root, number, seconds, options) for number in range(3)]
    for writer in writers:
        assert writer.stdout
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("go\n")
        writer.stdin.flush()
    counts = [finish(writer).split() for writer in writers]
    return [(int(refused), int(granted)) for refused, granted in counts]


def share_a_limit(root: Path, seconds: float) -> None:
    shelf = Shelf(root)
    quota = shelf.quota(LIMIT)
    with opened(quota):
        assert quota.reserve(1)
        quota.abort(1)
        with Sampler(shelf) as sampler:
            counts = write_together(root, seconds, f"dict(num_objects={LIMIT})")
        assert all(granted > 20 for _, granted in counts), counts
        assert sampler.num_samples > 10
        assert LIMIT // 2 * OBJECT_NBYTES < sampler.most_nbytes <= LIMIT * OBJECT_NBYTES
        assert quota.usage() == (shelf.nbytes(), 0)


def test_three_processes_share_one_limit(tmp_path: Path) -> None:
    """While three write at once no sample exceeds the limit, and the books are the disk afterwards."""
    share_a_limit(tmp_path, 1)


@pytest.mark.stress
def test_three_processes_share_one_limit_for_long(tmp_path: Path) -> None:
    """While three write for a while no sample exceeds the limit, and the books are the disk afterwards."""
    share_a_limit(tmp_path, 30)


SAMPLE = """
options, seconds = args[0], float(args[1])
shelf = Shelf(root)
quota = shelf.quota(**eval(options))
assert quota.reserve(1)  # now there is a ledger
quota.abort(1)
before = os.statvfs(root)
writers = [subprocess.Popen(command(WRITE, root, number, seconds, options), stdin=-1, stdout=-1, text=True)
           for number in range(3)]
for writer in writers:
    writer.stdout.readline()
for writer in writers:
    writer.stdin.write("go\\n")
    writer.stdin.flush()
most, num_samples = 0, 0
while any(writer.poll() is None for writer in writers):
    most, num_samples = max(most, before.f_bfree - os.statvfs(root).f_bfree), num_samples + 1
assert num_samples > 1000
granted = [int(finish(writer).split()[1]) for writer in writers]
assert all(each > 20 for each in granted), granted
limit = int(args[2])
assert limit // 2 < most * 4096 <= limit, (most * 4096, limit)
assert quota.usage() == (shelf.nbytes(), 0)
quota.close()
"""


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ("dict(max_bytes=200 * 4096)", 200 * 4096),
        ("dict(max_bytes=200 * 4096, low_water=0.5)", 200 * 4096),
        ("dict(min_free_bytes=848 * 4096)", 175 * 4096),
    ],
)
def test_the_kernel_never_counts_more(tmp_path: Path, options: str, limit: int) -> None:
    """Three processes write at once, and the file system itself never counts more than the limit."""
    run_on_small_disk(f"WRITE = '''{WRITE}'''\n{SAMPLE}", tmp_path / "disk", "4m", options, 1, limit)


# -- death


HOLD = """
quota = Shelf(root).quota(int(args[0]))
assert quota.reserve(int(args[1]))
print("held", flush=True)
sys.stdin.read()
"""


def hold_and_kill(shelf: Shelf, num_objects: int, nbytes: int) -> None:
    """Let a process die that has reserved ``nbytes``."""
    with start(HOLD, shelf.directory.parent, num_objects, nbytes) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        process.kill()


def test_what_a_killed_process_had_reserved_is_given_back(tmp_path: Path) -> None:
    """The next one to open has all the room, without evicting for the dead."""
    shelf = Shelf(tmp_path)
    shelf.leave("a", "b")
    hold_and_kill(shelf, 10, 8 * OBJECT_NBYTES)
    quota = shelf.quota(10)
    with opened(quota):
        assert quota.reserve(8 * OBJECT_NBYTES)
        assert shelf.keys("a", "b") == ["a", "b"]
        assert quota.usage() == (2 * OBJECT_NBYTES, 8 * OBJECT_NBYTES)
        quota.abort(8 * OBJECT_NBYTES)


def test_the_dead_refuse_nothing(tmp_path: Path) -> None:
    """What does not fit beside a dead process's reservation is granted to those who survive it."""
    shelf = Shelf(tmp_path)
    quota = shelf.quota(10)
    with opened(quota):
        assert shelf.put(quota, "a")
        hold_and_kill(shelf, 10, 9 * OBJECT_NBYTES)
        assert quota.reserve(9 * OBJECT_NBYTES)
        assert shelf.keys("a") == ["a"]
        quota.abort(9 * OBJECT_NBYTES)


def test_the_survivors_get_what_the_dead_had_reserved(tmp_path: Path) -> None:
    """Another process at work finds out by itself, when it needs the room."""
    shelf = Shelf(tmp_path)
    quota = shelf.quota(10)
    with opened(quota):
        assert shelf.put(quota, "a")
        hold_and_kill(shelf, 10, 8 * OBJECT_NBYTES)
        for number in range(9):
            assert shelf.put(quota, f"new{number}")
        assert shelf.keys("a") == ["a"]
        assert sum(quota.usage()) == shelf.nbytes() == 10 * OBJECT_NBYTES


# -- full disks

FULL = """
shelf = Shelf(root)
filler = open(f"{root}/filler", "wb")
def fill():
    try:
        while True:
            os.write(filler.fileno(), bytes(4096))
    except OSError as error:
        assert error.errno == 28, error
"""

NO_SPACE = """
quota = shelf.quota(max_bytes=100 << 20)
assert shelf.put(quota, "a")
fill()
for number in range(5):
    assert quota.reserve(OBJECT_NBYTES)
    try:
        shelf.begin()
    except OSError as error:
        assert error.errno == 28, error
    else:
        raise AssertionError("there was space")
    shelf.sweep()
    quota.abort(OBJECT_NBYTES)
assert quota.usage() == (OBJECT_NBYTES, 0) and shelf.nbytes() == OBJECT_NBYTES
os.truncate(f"{root}/filler", 0)
assert shelf.put(quota, "b")
assert quota.usage() == (2 * OBJECT_NBYTES, 0)
quota.close()
"""


def test_a_full_disk_costs_a_write_and_no_room(tmp_path: Path) -> None:
    """Where the disk is full although the limit is not reached, failed writes leave the books right."""
    run_on_small_disk(FULL + NO_SPACE, tmp_path / "disk", "1m")


FULL_WITHOUT_LEDGER = """
shelf.leave(*(f"key{number}" for number in range(100)))
fill()
quota = shelf.quota(min_free_bytes=100 * 4096)
assert shelf.put(quota, "new")
assert os.statvfs(root).f_bavail >= 100
assert shelf.keys("new", "key0", "key40", "key70") == ["new", "key70"]
assert quota.usage() == (shelf.nbytes(), 0)
quota.close()
"""


def test_a_disk_that_is_full_at_open_is_emptied(tmp_path: Path) -> None:
    """Where there is not even room for the ledger, objects make room for it, and then for the limit."""
    run_on_small_disk(FULL + FULL_WITHOUT_LEDGER, tmp_path / "disk", "2m")


# -- other users


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user can reach, as pytest's own are not."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


FORBIDDEN = """
os.setgid(65534)
os.setuid(65534)
quota = Shelf(root).quota(10)
for call in (lambda: quota.reserve(1), quota.trim, quota.usage):
    try:
        call()
    except PermissionError as error:
        assert root in str(error), error
    else:
        raise AssertionError("a forbidden ledger was written")
quota.removed(1)
quota.abort(1)
quota.close()
assert len(os.listdir("/proc/self/fd")) <= 4
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("with_ledger", [False, True])
def test_a_forbidden_directory_is_an_error(shared: Path, with_ledger: bool) -> None:
    """Where the ledger may not be written each reservation raises at once, and closing does not."""
    shelf = Shelf(shared)
    if with_ledger:
        quota = shelf.quota(10)
        assert quota.reserve(1)
        quota.abort(1)
        quota.close()
    finish(start(FORBIDDEN, shared))


GROUP = """
os.setgroups([])
os.setgid(65534)
os.setuid(int(args[0]))
quota = Shelf(root).quota(4, mode=0o660)
print(quota.reserve(2 * OBJECT_NBYTES), flush=True)
sys.stdin.read()
quota.abort(2 * OBJECT_NBYTES)
quota.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_users_of_one_group_share_a_limit(shared: Path) -> None:
    """With mode 0660 processes of several users keep one ledger, whoever made it."""
    shelf = Shelf(shared)
    for directory in (shelf.directory, shelf.directory / "temp"):
        os.chown(directory, -1, 65534)
        directory.chmod(0o2770)
    users = [start(GROUP, shared, user) for user in (1001, 1002, 1003)]
    answers = []
    for user in users:
        assert user.stdout
        answers.append(user.stdout.readline())
    assert sorted(answers) == ["False\n", "True\n", "True\n"]
    for user in users:
        finish(user)
    assert (shelf.directory / "quota").stat().st_gid == 65534
