"""Ledger: books that several owners keep in one file, whoever dies, and whatever happens to the file."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_async.stores._files import ledger as _ledger
from hicache_async.stores._files.ledger import Books, Ledger, Member, Totals
from tests.stores.pages import num_open_files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quota"


@pytest.fixture
def ledgers(path: Path) -> Iterator[list[Ledger]]:
    """Three members, each of which has reserved 1, 2, 3 bytes."""
    members = [Ledger(str(path), 0o600) for _ in range(3)]
    for number, ledger in enumerate(members, start=1):
        with ledger.locked() as (_, mine):
            mine.reserved = number
    yield members
    for ledger in members:
        ledger.leave()


def books_of(ledger: Ledger) -> Books:
    with ledger.locked() as (books, _):
        return books


# -- members


def test_each_member_sees_all(ledgers: list[Ledger]) -> None:
    """What one writes the others read, and each has a part of its own."""
    with ledgers[0].locked() as (books, mine):
        books.settled = True
        books.add(100)
        books.remove(30)
        assert mine.reserved == 1
    with ledgers[2].locked() as (books, mine):
        assert (books.settled, books.committed, books.totals) == (True, 70, Totals(100, 30))
        assert (books.reserved, mine.reserved) == (6, 3)


def test_what_raises_is_not_written(ledgers: list[Ledger]) -> None:
    """An error inside the lock leaves the books as they were, and the lock free."""
    with pytest.raises(RuntimeError, match="in between"):
        with ledgers[0].locked() as (books, _):
            books.add(100)
            raise RuntimeError("in between")
    assert books_of(ledgers[1]).committed == 0


def test_who_leaves_makes_place(ledgers: list[Ledger], path: Path) -> None:
    """The part of a member that left is the next one's, and what it had reserved is committed."""
    ledgers[1].leave()
    assert books_of(ledgers[0]).reserved == 6
    ledger = Ledger(str(path), 0o600)
    books = books_of(ledger)
    assert (books.committed, books.reserved, len(books.members)) == (2, 4, 3)
    ledger.leave()


def test_the_dead_are_buried(ledgers: list[Ledger]) -> None:
    """What a dead member had reserved counts as committed, and what was leaving as still there."""
    with ledgers[2].locked() as (books, mine):
        books.add(10)
        mine.leaving = 5
    ledgers[2].leave()
    with ledgers[0].locked() as (books, _):
        ledgers[0].bury(books)
        assert (books.committed, books.reserved, books.leaving) == (13, 3, 0)
        ledgers[0].bury(books)
        assert books.committed == 13


def test_who_is_alone_believes_nothing(ledgers: list[Ledger], path: Path) -> None:
    """After all others have gone the books begin anew; while one is there they are believed."""
    with ledgers[0].locked() as (books, _):
        books.settled = True
        books.add(100)
    ledger = Ledger(str(path), 0o600)
    assert books_of(ledger).settled
    for member in (*ledgers, ledger):
        member.leave()
    assert books_of(ledger) == Books(members=[Member()])
    ledger.leave()


def test_no_more_members_than_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One member too many is told so, and leaves no descriptor open."""
    monkeypatch.setattr(_ledger, "MAX_MEMBERS", 2)
    members = [Ledger(str(path), 0o600) for _ in range(3)]
    for ledger in members[:2]:
        books_of(ledger)
    num_files = num_open_files()
    with pytest.raises(OSError, match="2 stores have it open"):
        books_of(members[2])
    assert num_open_files() == num_files
    members[0].leave()
    books_of(members[2])
    for ledger in members[1:]:
        ledger.leave()


def test_a_forgotten_ledger_leaves_by_itself(ledgers: list[Ledger], path: Path) -> None:
    """One that nobody has a reference to any more lets go of its file, and of its part."""
    num_files = num_open_files()
    ledger = Ledger(str(path), 0o600)
    with ledger.locked() as (_, mine):
        mine.reserved = 50
    assert num_open_files() == num_files + 1
    del ledger, mine
    gc.collect()
    assert num_open_files() == num_files
    with ledgers[0].locked() as (books, _):
        ledgers[0].bury(books)
        assert books.reserved == 6


HOLD = """
import os, sys, types
sys.modules["hicache_async"] = types.ModuleType("hicache_async")  # the ledger alone: it needs no torch
sys.modules["hicache_async"].__path__ = [sys.argv[1]]
from hicache_async.stores._files.ledger import Ledger
ledger = Ledger(sys.argv[2], 0o600)
with ledger.locked() as (books, mine):
    mine.reserved = 1000
    print("held", flush=True)
    if sys.argv[3] == "inside":
        sys.stdin.read()
"""

WAIT = "sys.stdin.read()\n"


def hold(path: Path, where: str, program: str = WAIT) -> subprocess.Popen[str]:
    """Start a process that joins, and then waits inside its critical section, or behind it."""
    package = str(Path(_ledger.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD + program, package, str(path), where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_a_killed_process_is_dead_at_once(ledgers: list[Ledger], path: Path) -> None:
    """The kernel tells that a process was killed, even before anybody has collected it."""
    with hold(path, "behind") as process:
        books_of(ledgers[1])
        with ledgers[1].locked() as (books, _):
            ledgers[1].bury(books)
            assert (books.committed, books.reserved) == (0, 1006)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not collected
        with ledgers[1].locked() as (books, _):
            ledgers[1].bury(books)
            assert (books.committed, books.reserved) == (1000, 6)


def test_a_process_killed_inside_lets_the_others_in(ledgers: list[Ledger], path: Path) -> None:
    """A lock dies with its holder, and what the holder had not written is not there."""
    with hold(path, "inside") as process:
        process.kill()
        process.wait()
        assert books_of(ledgers[0]).reserved == 6


def test_a_process_that_hangs_inside_hangs_nobody_else(
    ledgers: list[Ledger], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who cannot get the lock in time is told by a TimeoutError, and gets it when it is free."""
    monkeypatch.setattr(_ledger, "_LOCK_TIMEOUT_S", 0.01)
    num_files = num_open_files()
    with hold(path, "inside") as process:
        with pytest.raises(TimeoutError, match="by a process that hangs"):
            books_of(ledgers[0])
        process.kill()
        process.wait()
    books_of(ledgers[0])
    assert num_open_files() == num_files


# -- the file


def test_the_file_has_the_mode_it_is_given(path: Path) -> None:
    """Whatever the umask is, a shared ledger can be written by the group."""
    old = os.umask(0o077)
    try:
        ledger = Ledger(str(path), 0o660)
        books_of(ledger)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    ledger.leave()


@pytest.mark.parametrize("kind", ["empty", "torn", "version", "foreign", "longer"])
def test_a_damaged_ledger_is_unsettled(ledgers: list[Ledger], path: Path, kind: str) -> None:
    """Whatever the file has become, members go on with books that must be settled first."""
    with ledgers[0].locked() as (books, _):
        books.settled = True
        books.add(100)
    content = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "torn": content[:30] + b"\0" * (len(content) - 30),
            "version": content.replace(b"HiCaQt\0\1", b"HiCaQt\0\2"),
            "foreign": b"\x89PNG" * 100,
            "longer": content + b"rest",
        }[kind]
    )
    with ledgers[2].locked() as (books, mine):
        assert (books.settled, books.committed) == ((True, 100) if kind == "longer" else (False, 0))
        mine.reserved = 3
    assert books_of(ledgers[0]).members[2].reserved == 3


def test_every_flipped_bit_is_found() -> None:
    """One bit changed anywhere makes the books unsettled."""
    content = Books(True, 70, 100, 30, [Member(1, 2), Member(3)]).encode()
    assert Books.decode(content) == Books(True, 70, 100, 30, [Member(1, 2), Member(3)])
    for offset in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[offset] ^= 1 << bit
            assert Books.decode(bytes(damaged)) == Books(), f"byte {offset}, bit {bit}"
    for nbytes in range(len(content)):
        assert Books.decode(content[:nbytes]) == Books()


def test_a_removed_ledger_is_noticed(ledgers: list[Ledger], path: Path) -> None:
    """After somebody removed the file all members meet again in a new one, each with its own part."""
    path.unlink()
    for number, ledger in enumerate(ledgers, start=1):
        with ledger.locked() as (books, mine):
            assert not books.settled
            mine.reserved = number
    assert books_of(ledgers[0]).reserved == 6


def test_a_ledger_removed_while_it_is_locked_is_not_used(ledgers: list[Ledger], path: Path) -> None:
    """Who gets the lock of a file that is no longer there goes on to the one that is."""

    class LateLedger(Ledger):
        def _wait_for_lock(self, fd: int) -> None:
            if path.stat().st_ino == inode:
                path.unlink()
            super()._wait_for_lock(fd)

    inode = path.stat().st_ino
    ledger = LateLedger(str(path), 0o600)
    num_files = num_open_files()
    with ledger.locked() as (_, mine):
        mine.reserved = 7
    assert num_open_files() == num_files + 1
    assert books_of(ledgers[0]).reserved == 7
    ledger.leave()


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_another_thing_in_its_place_is_refused(path: Path, kind: str) -> None:
    """What is no regular file is an OSError at once, and left alone."""
    {"directory": path.mkdir, "fifo": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("x")}[kind]()
    num_files = num_open_files()
    with pytest.raises(OSError):
        books_of(Ledger(str(path), 0o600))
    assert num_open_files() == num_files
    assert path.is_symlink() or path.exists()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """Without its directory it raises, and works once there is one."""
    ledger = Ledger(str(tmp_path / "v2" / "quota"), 0o600)
    with pytest.raises(FileNotFoundError):
        books_of(ledger)
    (tmp_path / "v2").mkdir()
    books_of(ledger)
    ledger.leave()


def test_a_failed_write_is_no_membership(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who could not write down that the books begin anew does not believe them the next time."""
    path.write_bytes(Books(True, 10**9, 0, 0, [Member(5)]).encode())
    ledger = Ledger(str(path), 0o600)
    num_files = num_open_files()
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "pwrite", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(OSError, match="No space left"):
            with ledger.locked() as (_, mine):
                mine.reserved = 1
    assert num_open_files() == num_files
    assert not ledger.joined
    assert books_of(ledger) == Books(members=[Member()])
    ledger.leave()


def test_programs_do_not_inherit_locks(ledgers: list[Ledger]) -> None:
    """A child process that runs another program keeps no membership alive, whatever it inherits."""
    command = [sys.executable, "-c", "print(); input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    with child:
        assert child.stdout
        child.stdout.readline()
        ledgers[2].leave()
        with ledgers[0].locked() as (books, _):
            ledgers[0].bury(books)
            assert books.reserved == 3
        child.kill()


FORK = """
inside, outside = os.pipe(), os.pipe()
with ledger.locked():
    child = os.fork()
    if child == 0:
        if sys.argv[3] == "stays":
            os.read(inside[0], 1)
        sys.exit()  # with all finalizers
if sys.argv[3] == "ends":
    os.waitpid(child, 0)
print("forked", flush=True)
sys.stdin.readline()
if sys.argv[3] == "stays":
    ledger.leave()
print("left", flush=True)
sys.stdin.readline()
os.write(inside[1], b"x")
"""


@pytest.mark.parametrize("child", ["ends", "stays"])
def test_a_forked_child_is_no_member(ledgers: list[Ledger], path: Path, child: str) -> None:
    """A child forked at the worst moment keeps nobody out, and its end is not its parent's."""
    with hold(path, child, FORK) as process:
        assert process.stdin
        assert process.stdout
        for line, reserved in (("forked", 1006), ("left", 1006 if child == "ends" else 6)):
            assert process.stdout.readline() == f"{line}\n"
            with ledgers[0].locked() as (books, _):
                ledgers[0].bury(books)
                assert books.reserved == reserved
            process.stdin.write("go on\n")
            process.stdin.flush()
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_file_system_without_locks_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be locked that is said, and nothing is left open."""

    def refuse(*args: object) -> None:
        raise OSError(37, "No locks available")

    num_files = num_open_files()
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(OSError, match="No locks available"):
        books_of(Ledger(str(path), 0o600))
    assert num_open_files() == num_files


# -- books against a disk that goes on


def test_unsettled_books_become_what_may_be_there() -> None:
    """Books that say nothing yet take the most that a survey allows, whatever is under way."""
    books = Books(members=[Member(reserved=50, leaving=7)])
    books.reconcile(100, 20, Totals(0, 0))
    assert (books.settled, books.committed) == (True, 127)


@pytest.mark.parametrize(("written", "right"), [(0, 78), (80, 80), (128, 128), (200, 128)])
def test_settled_books_are_moved_into_what_may_be_there(written: int, right: int) -> None:
    """What a survey proves to be wrong is corrected, by no more than it proves."""
    books = Books(True, written, members=[Member(reserved=3), Member(reserved=2, leaving=7)])
    before = books.totals
    books.add(11)
    books.remove(10)
    books.committed = written
    books.reconcile(100, 10, before)
    assert books.committed == right


class Fleet:
    """Members at work on one disk, one step of one of them at a time, and surveys in between.

    A byte is an object or a temporary file; ``finished`` by shard, as a survey meets one shard after the other.
    """

    NUM_SHARDS = 4

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.books = Books(settled=True, members=[Member() for _ in range(3)])
        self.finished = [0] * self.NUM_SHARDS
        self.temps = 0
        self.published = [0, 0, 0]  # and not committed
        self.removed = [0, 0, 0]  # and not booked

    def step(self) -> None:
        """Let one member do one thing."""
        number = self.dice.randrange(3)
        member, shard = self.books.members[number], self.dice.randrange(self.NUM_SHARDS)
        in_hand = member.reserved - self.published[number]
        match self.dice.randrange(7):
            case 0:
                member.reserved += 1
                self.temps += 1
            case 1 if in_hand:  # publish
                self.temps -= 1
                self.finished[shard] += 1
                self.published[number] += 1
            case 2 if self.published[number]:  # commit
                self.books.add(1)
                member.reserved -= 1
                self.published[number] -= 1
            case 3 if in_hand:  # abort
                self.temps -= 1
                member.reserved -= 1
            case 4 if member.leaving < 2:
                member.leaving += 1
            case 5 if member.leaving > self.removed[number] and self.finished[shard]:
                self.finished[shard] -= 1
                self.removed[number] += 1
            case 6 if self.removed[number]:
                self.books.remove(1)
                member.leaving -= 1
                self.removed[number] -= 1
        self.check()

    def survey(self, num_steps: int) -> None:
        """Survey while the others do so many things."""
        steps = sorted(self.dice.randrange(self.NUM_SHARDS + 2) for _ in range(num_steps))
        before, surveyed, unfinished = self.books.totals, 0, 0
        for moment in range(self.NUM_SHARDS + 2):
            for _ in range(steps.count(moment)):
                self.step()
            if moment == 0:
                unfinished = self.temps
            elif moment <= self.NUM_SHARDS:
                surveyed += self.finished[moment - 1]
        self.books.reconcile(surveyed, unfinished, before)
        self.check()

    def die(self) -> None:
        """Let a member die where it is; its temporary files may stay, where nobody can tell that it is dead."""
        number = self.dice.randrange(3)
        member = self.books.members[number]
        if self.dice.random() < 0.5:
            self.temps -= member.reserved - self.published[number]
        self.books.add(member.reserved)
        member.reserved = member.leaving = self.published[number] = self.removed[number] = 0

    def check(self) -> None:
        on_disk = sum(self.finished) + self.temps
        assert on_disk <= self.books.committed + self.books.reserved


@pytest.mark.parametrize("seed", range(20))
def test_books_never_fall_below_the_disk(seed: int) -> None:
    """Whatever is written, removed, evicted and surveyed at once, and whoever dies: the books are not too low."""
    fleet = Fleet(seed)
    for _ in range(300):
        for _ in range(fleet.dice.randrange(5)):
            fleet.step()
        fleet.survey(fleet.dice.randrange(60))
        if fleet.dice.random() < 0.1:
            fleet.die()


@pytest.mark.parametrize("seed", range(20))
def test_a_quiet_survey_puts_the_books_right(seed: int) -> None:
    """Once nothing is under way, one survey makes the books what lies on the disk, whatever was wrong."""
    fleet = Fleet(seed)
    for _ in range(100):
        fleet.step()
        if fleet.dice.random() < 0.1:
            fleet.die()
    for member in fleet.books.members:
        member.reserved = member.leaving = 0
    fleet.temps = 0
    for wrong in (0, 50, -50):
        fleet.books.committed += wrong
        fleet.survey(0)
        assert fleet.books.committed == sum(fleet.finished)
