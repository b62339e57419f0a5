"""Quota: what lies in a directory never exceeds the limits, and the books say what lies there."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from hicache_async.core.manifest import manifest_key
from hicache_async.stores._files import quota as _quota
from hicache_async.stores._files import survey as _survey
from hicache_async.stores._files.quota import PAUSE_S
from hicache_async.testing.manual import ManualClock
from tests.stores.capacity import OBJECT_NBYTES, Sampler, Shelf, opened

KEYS = [f"key{number}" for number in range(100)]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


class Counter:
    num_calls = 0

    def __call__(self, survey: _survey.Survey) -> None:
        self.num_calls += 1


def after_survey(monkeypatch: pytest.MonkeyPatch, action: Callable[[_survey.Survey], None]) -> None:
    """Do something between a survey and what follows from it."""

    class WatchedSurvey(_survey.Survey):
        @classmethod
        def of(cls, objects: str, temp: str) -> _survey.Survey:
            survey = _survey.Survey.of(objects, temp)
            action(survey)
            return survey

    monkeypatch.setattr(_quota, "Survey", WatchedSurvey)


def count_surveys(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    after_survey(monkeypatch, counter)
    return counter


# -- the limit


def test_a_hundred_objects_through_room_for_ten(shelf: Shelf) -> None:
    """There are never more than 10 at any sample, and those that are read again and again survive."""
    quota = shelf.quota(10)
    dice = random.Random(3)
    loved = KEYS[:3]
    with opened(quota), Sampler(shelf) as sampler:
        for number, key in enumerate(KEYS):
            assert shelf.put(quota, key)
            os.utime(shelf.path(key), (number, number))
            for read in {dice.choice(loved), *loved[: dice.randrange(4)]} if number > 3 else loved:
                if shelf.path(read).exists():
                    os.utime(shelf.path(read), (number + 0.5, number + 0.5))
        assert shelf.nbytes() == sum(quota.usage())
    assert sampler.num_samples > 10
    assert sampler.most_nbytes <= 10 * OBJECT_NBYTES
    assert shelf.keys(*loved) == loved
    assert 8 <= len(shelf.keys(*KEYS)) <= 10


def test_threads_share_one_limit(shelf: Shelf) -> None:
    """Four threads that write at once exceed the limit at no sample, and the books are right afterwards."""
    quota = shelf.quota(10)
    granted: list[bool] = []

    def write(first: int) -> None:
        granted.extend(shelf.put(quota, key) for key in KEYS[first::4])

    with opened(quota), Sampler(shelf) as sampler:
        threads = [threading.Thread(target=write, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(quota.usage()) == shelf.nbytes()
    assert len(granted) == 100
    assert granted.count(True) > 50
    assert sampler.most_nbytes <= 10 * OBJECT_NBYTES


def test_a_file_counts_as_whole_blocks(shelf: Shelf) -> None:
    """A file of one byte more than a block counts as two blocks, reserved or not."""
    quota = shelf.quota(max_bytes=16384)
    with opened(quota):
        assert shelf.put(quota, "a", 4097)
        assert quota.usage() == (8192, 0)
        assert shelf.put(quota, "b", 4097)
        assert quota.reserve(1)
        assert shelf.keys("a", "b") == ["b"]
        quota.abort(1)
        assert sum(quota.usage()) == 8192


def test_no_limit_refuses_nothing_and_keeps_the_books(shelf: Shelf) -> None:
    """Without limits everything is granted, and a process that has one knows of it."""
    shelf.leave("old")
    unlimited = shelf.quota()
    limited = shelf.quota(3)
    with opened(unlimited, limited):
        for key in KEYS[:8]:
            assert shelf.put(unlimited, key)
        assert unlimited.trim() == 0
        assert shelf.put(limited, "new")
        assert shelf.nbytes() <= 3 * OBJECT_NBYTES


def test_each_keeps_to_its_own_limit(shelf: Shelf) -> None:
    """Of two with different limits each evicts down to its own when it writes."""
    small, large = shelf.quota(4), shelf.quota(8)
    with opened(small, large):
        for key in KEYS[:20]:
            assert shelf.put(large, key)
        assert shelf.nbytes() > 6 * OBJECT_NBYTES
        assert shelf.put(small, "a")
        assert shelf.nbytes() <= 4 * OBJECT_NBYTES
        assert shelf.put(large, "b")
        assert shelf.keys("a", "b") == ["a", "b"]
        assert sum(large.usage()) == shelf.nbytes()


def test_an_oversize_object_stops_nothing(shelf: Shelf) -> None:
    """What is larger than the limit is refused, nothing is evicted for it, and others are written."""
    quota = shelf.quota(4)
    with opened(quota):
        for key in KEYS[:4]:
            assert shelf.put(quota, key)
        assert not shelf.put(quota, "huge", 4 * OBJECT_NBYTES + 1)
        assert shelf.keys(*KEYS[:4]) == KEYS[:4]
        assert shelf.put(quota, "a")
        assert shelf.put(quota, "all", 4 * OBJECT_NBYTES)
        assert shelf.nbytes() == 4 * OBJECT_NBYTES


@pytest.mark.parametrize(
    ("nbytes", "num_left"),
    [(15, 55), (10, 60), (9, 60), (69, 1), (70, 0), (71, 60)],
)
def test_reservations_are_not_freeable(shelf: Shelf, nbytes: int, num_left: int) -> None:
    """With 60 % data and 30 % in flight exactly the shortfall is evicted, or nothing where it would not help."""
    shelf.leave(*KEYS[:60], nbytes=4096)
    quota = shelf.quota(max_bytes=100 * 4096, low_water=0.85)
    with opened(quota):
        assert quota.reserve(30 * 4096)
        assert quota.reserve(nbytes * 4096) is (nbytes <= 70)
        assert shelf.keys(*KEYS) == KEYS[60 - num_left : 60]
        assert quota.usage() == (num_left * 4096, (30 + (nbytes if nbytes <= 70 else 0)) * 4096)


def test_an_eviction_goes_down_to_the_low_water(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing a hundred objects into a full directory takes one survey per tenth of the limit."""
    surveys = count_surveys(monkeypatch)
    shelf.leave(*KEYS, nbytes=4096)
    quota = shelf.quota(max_bytes=100 * 4096, low_water=0.9)
    with opened(quota):
        assert quota.trim() == 0
        assert shelf.put(quota, "new", 4096)
        assert shelf.keys(*KEYS) == KEYS[10:]
        for number in range(99):
            assert shelf.put(quota, f"new{number}", 4096)
    assert 10 <= surveys.num_calls <= 12


def test_abort_gives_the_room_back(shelf: Shelf) -> None:
    """A reservation that was given up is room for others, here and in other processes."""
    quota, other = shelf.quota(4), shelf.quota(4)
    with opened(quota, other):
        assert quota.reserve(3 * OBJECT_NBYTES)
        assert not other.reserve(2 * OBJECT_NBYTES)
        quota.abort(3 * OBJECT_NBYTES)
        assert other.reserve(4 * OBJECT_NBYTES)
        other.abort(4 * OBJECT_NBYTES)
        assert quota.usage() == (0, 0)


# -- what goes first


def test_the_oldest_go_first_over_all_namespaces(shelf: Shelf) -> None:
    """Whatever namespace an object is in, the longest untouched goes."""
    names = [f"{number:x}_ukv1-{number % 3:016x}_m_0_1" for number in range(9)]
    mixed = [name for pair in zip(names, KEYS[:9], strict=True) for name in pair]
    shelf.leave(*mixed)
    quota = shelf.quota(18, low_water=0.5)
    with opened(quota):
        assert shelf.put(quota, "new")
        assert shelf.keys(*mixed) == mixed[9:]


def test_an_object_touched_meanwhile_is_spared(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that was read between the survey and its eviction stays; the next oldest goes instead."""
    shelf.leave(*KEYS[:10])

    def touch(survey: _survey.Survey) -> None:
        os.utime(shelf.path(KEYS[0]))

    after_survey(monkeypatch, touch)
    quota = shelf.quota(10)
    with opened(quota):
        assert shelf.put(quota, "new")
        assert shelf.keys(*KEYS) == [KEYS[0], *KEYS[2:10]]
        assert sum(quota.usage()) == shelf.nbytes()


def test_the_callback_hears_which_keys_have_gone(shelf: Shelf) -> None:
    """It is told every evicted key, and none that stays or has no name that tells."""
    gone: list[str] = []
    shelf.leave(*KEYS[:5], "A/b", "x" * 500)
    quota = shelf.quota(7, low_water=1 / 7, on_evicted=gone.extend)
    with opened(quota):
        assert shelf.put(quota, "new")
        assert sorted(gone) == sorted([*KEYS[:5], "A/b"])
        assert shelf.keys("x" * 500, "new") == ["x" * 500, "new"]
        assert shelf.put(quota, "all", 7 * OBJECT_NBYTES)
        assert sorted(gone) == sorted([*KEYS[:5], "A/b", "new"])


def test_manifests_are_counted_and_stay(shelf: Shelf) -> None:
    """The oldest object of all is not evicted where it says what a namespace is."""
    manifest = manifest_key("ukv1-0123456789abcdef")
    shelf.leave(manifest, *KEYS[:3])
    quota = shelf.quota(4)
    with opened(quota):
        assert shelf.put(quota, "new", 3 * OBJECT_NBYTES)
        assert shelf.keys(manifest, *KEYS, "new") == [manifest, "new"]
        assert not shelf.put(quota, "huge", 4 * OBJECT_NBYTES)
        assert sum(quota.usage()) <= 4 * OBJECT_NBYTES


def test_foreign_files_are_not_counted_and_not_evicted(shelf: Shelf) -> None:
    """A file, directory or link that no key of ours is named like is left alone wherever it lies."""
    shelf.leave("a")
    ours = shelf.path("a")
    objects = shelf.directory / "objects"
    foreign = [
        ours.with_name("notes.txt"),
        ours.with_name("b.kv"),  # of another shard
        ours.with_name("A.kv"),
        ours.with_name("%61.kv"),
        ours.with_name("~12.kv"),
        objects / "_" / "README",
        objects / "README",
        objects / "models" / ours.parent.name / "a.kv",
        objects / "_" / "zz" / "a.kv",
        objects / "_" / ours.parent.name / "deeper" / "a.kv",
        objects / "ukv1-0123456789abcdef" / ours.parent.name / "a.kv",  # not of that namespace
        objects / "models" / ours.parent.name / f"~{0:064x}.kv",
        shelf.directory / "elsewhere" / ours.parent.name / f"~{0:064x}.kv",
        shelf.directory / "notes.kv",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(OBJECT_NBYTES))
        os.utime(path, (1, 1))
    shelf.path("link").parent.mkdir(parents=True)
    shelf.path("link").symlink_to(foreign[0])
    shelf.path("directory.").mkdir(parents=True)
    (objects / "ukv1-00000000000000ff").symlink_to(shelf.directory / "elsewhere")
    quota = shelf.quota(2)
    with opened(quota):
        assert quota.trim() == 0
        assert quota.usage() == (OBJECT_NBYTES, 0)
        for key in KEYS[:6]:
            assert shelf.put(quota, key)
        assert shelf.put(quota, "all", 2 * OBJECT_NBYTES)
    assert all(path.stat().st_size == OBJECT_NBYTES for path in foreign)
    assert shelf.path("link").is_symlink()
    assert shelf.path("directory.").is_dir()
    assert shelf.keys("a", *KEYS) == []


# -- files that do not go


def refuse_unlink(monkeypatch: pytest.MonkeyPatch, refused: Callable[[str], bool]) -> list[str]:
    """Let unlink raise EPERM for some paths; returns what was tried."""
    unlink, tried = os.unlink, []

    def refusing_unlink(path: str) -> None:
        if refused(path):
            tried.append(path)
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refusing_unlink)
    return tried


def test_an_undeletable_file_stops_nothing(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the oldest cannot be removed the next ones go, the write is admitted, one line is logged."""
    shelf.leave(*KEYS[:10])
    tried = refuse_unlink(monkeypatch, lambda path: "key0.kv" in path)
    quota = shelf.quota(10)
    with opened(quota), capture_logs() as logs, Sampler(shelf) as sampler:
        for key in KEYS[10:30]:
            assert shelf.put(quota, key)
        assert shelf.keys(KEYS[0]) == KEYS[:1]
        assert sum(quota.usage()) == shelf.nbytes()
    assert tried
    assert sampler.most_nbytes <= 10 * OBJECT_NBYTES
    assert [line["event"] for line in logs] == ["store.undeletable"]
    assert "key0.kv" in logs[0]["error"]


def test_where_nothing_can_be_deleted_the_write_is_refused(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused after one try per file, without a survey for each further write, until a pause is over."""
    shelf.leave(*KEYS[:10])
    clock = ManualClock()
    surveys = count_surveys(monkeypatch)
    quota = shelf.quota(10, monotonic=clock.monotonic)
    with opened(quota):
        with monkeypatch.context() as patch:
            tried = refuse_unlink(patch, lambda path: True)
            assert not any(shelf.put(quota, f"new{number}") for number in range(50))
            assert len(tried) == 10
            assert surveys.num_calls == 1
        assert not shelf.put(quota, "new")
        clock.advance(PAUSE_S)
        assert shelf.put(quota, "new")
        assert surveys.num_calls == 2
        assert shelf.nbytes() <= 10 * OBJECT_NBYTES


def test_a_pause_does_not_refuse_what_fits(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pass in vain a write goes on as soon as there is room, however it came about."""
    clock = ManualClock()
    shelf.leave(*KEYS[:10])
    quota = shelf.quota(10, monotonic=clock.monotonic)
    with opened(quota):
        with monkeypatch.context() as patch:
            refuse_unlink(patch, lambda path: True)
            assert not shelf.put(quota, "new")
        quota.release(OBJECT_NBYTES)
        shelf.path(KEYS[5]).unlink()
        quota.removed(OBJECT_NBYTES)
        assert shelf.put(quota, "new")


# -- books and disk


def test_what_is_on_disk_counts_after_a_restart(shelf: Shelf) -> None:
    """With 8 of 10 there, 5 more leave at most 10, the oldest have gone, and foreign files are not counted."""
    first = shelf.quota(10)
    with opened(first):
        for number, key in enumerate(KEYS[:8]):
            assert shelf.put(first, key)
            os.utime(shelf.path(key), (1e9 - number, 1e9 - number))
    foreign = shelf.path(KEYS[0]).with_name("foreign.bin")
    foreign.write_bytes(bytes(20 * OBJECT_NBYTES))
    again = shelf.quota(10, low_water=1.0)
    with opened(again), Sampler(shelf) as sampler:
        for key in KEYS[8:13]:
            assert shelf.put(again, key)
        assert sum(again.usage()) == 10 * OBJECT_NBYTES
    assert shelf.keys(*KEYS) == [*KEYS[:5], *KEYS[8:13]]
    assert sampler.most_nbytes <= 30 * OBJECT_NBYTES
    assert foreign.stat().st_size == 20 * OBJECT_NBYTES


def test_an_object_evicted_before_its_commit_is_on_no_books(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others evict what was published and not yet committed, books and disk agree in the end."""
    quota, other = shelf.quota(4), shelf.quota(4, low_water=0.01)
    with opened(quota, other):
        assert quota.reserve(OBJECT_NBYTES)
        temp = shelf.begin()
        assert shelf.put(other, "a", 3 * OBJECT_NBYTES)
        assert shelf.put(other, "b", 3 * OBJECT_NBYTES)
        assert temp.exists()
        shelf.publish(temp, "k")
        os.utime(shelf.path("k"), (1, 1))
        assert shelf.put(other, "c")
        assert shelf.keys("k", "b", "c") == ["c"]
        quota.commit(OBJECT_NBYTES)
        assert sum(quota.usage()) == shelf.nbytes() == OBJECT_NBYTES
        assert other.usage() == quota.usage()


def test_files_under_construction_are_not_evicted(shelf: Shelf) -> None:
    """A write that is held keeps its file through any eviction, and its key's old object is evictable."""
    quota = shelf.quota(4)
    with opened(quota):
        assert shelf.put(quota, "k")
        assert quota.reserve(OBJECT_NBYTES)
        temp = shelf.begin()
        assert shelf.put(quota, "a", 3 * OBJECT_NBYTES)
        assert shelf.keys("k", "a") == ["a"]
        shelf.publish(temp, "k")
        quota.commit(OBJECT_NBYTES)
        assert sum(quota.usage()) == shelf.nbytes() == 4 * OBJECT_NBYTES


def test_removed_objects_are_off_the_books(shelf: Shelf) -> None:
    """A removal that was announced counts from when it is done, one that was not done counts nothing."""
    quota = shelf.quota(4)
    with opened(quota):
        for key in KEYS[:4]:
            assert shelf.put(quota, key)
        quota.release(OBJECT_NBYTES)
        assert sum(quota.usage()) == 4 * OBJECT_NBYTES
        shelf.path(KEYS[3]).unlink()
        quota.removed(OBJECT_NBYTES)
        quota.release(OBJECT_NBYTES)
        quota.kept(OBJECT_NBYTES)
        assert sum(quota.usage()) == shelf.nbytes() == 3 * OBJECT_NBYTES
        assert shelf.put(quota, KEYS[3])
        assert shelf.keys(*KEYS[:4]) == KEYS[:4]


def test_a_survey_knows_of_removals_that_are_under_way(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object removed while others survey the disk is not taken off the books twice."""
    shelf.leave(*KEYS[:8])
    quota, other = shelf.quota(10), shelf.quota(10)

    def remove(survey: _survey.Survey) -> None:
        quota.removed(OBJECT_NBYTES)

    with opened(quota, other):
        assert quota.trim() == 0
        quota.release(OBJECT_NBYTES)
        shelf.path(KEYS[0]).unlink()
        assert other.trim() == 0
        quota.removed(OBJECT_NBYTES)
        assert other.usage() == (shelf.nbytes(), 0)
        quota.release(OBJECT_NBYTES)
        shelf.path(KEYS[1]).unlink()
        after_survey(monkeypatch, remove)
        assert other.trim() == 0
        assert other.usage() == (shelf.nbytes(), 0)


def test_two_evictors_do_not_count_a_removal_twice(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another process evicts the same objects at the same time, each goes once from disk and books."""
    shelf.leave(*KEYS[:10])
    quota, other = shelf.quota(10), shelf.quota(10)
    with opened(quota, other):
        assert other.trim() == 0

        def evict_too(survey: _survey.Survey) -> None:
            monkeypatch.undo()
            assert shelf.put(other, "b")

        after_survey(monkeypatch, evict_too)
        assert shelf.put(quota, "a")
        assert shelf.keys("a", "b", *KEYS) == ["a", "b", *KEYS[2:10]]
        assert sum(quota.usage()) == shelf.nbytes() == 10 * OBJECT_NBYTES


def test_every_pass_corrects_the_books(shelf: Shelf) -> None:
    """What somebody else has added or removed without a word is known after the next survey."""
    quota = shelf.quota(10)
    with opened(quota):
        for key in KEYS[:6]:
            assert shelf.put(quota, key)
        for key in KEYS[:3]:
            shelf.path(key).unlink()
        assert sum(quota.usage()) == 6 * OBJECT_NBYTES
        assert quota.trim() == 0
        assert sum(quota.usage()) == 3 * OBJECT_NBYTES
        shelf.leave(*KEYS[20:40])
        assert quota.trim() == (23 - 9) * OBJECT_NBYTES
        assert sum(quota.usage()) == shelf.nbytes() == 9 * OBJECT_NBYTES


def test_a_survey_with_a_hole_takes_nothing_off_the_books(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that cannot be listed does not pass for an empty one."""
    quota = shelf.quota(10)
    scandir = os.scandir

    def failing_scandir(path: str | Path) -> object:
        if str(path).startswith(str(shelf.path(KEYS[3]).parent)):
            raise OSError(5, "Input/output error", path)
        return scandir(path)

    with opened(quota):
        for key in KEYS[:10]:
            assert shelf.put(quota, key)
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", failing_scandir)
            assert shelf.put(quota, "new")
            assert sum(quota.usage()) == 10 * OBJECT_NBYTES
        assert shelf.nbytes() == 10 * OBJECT_NBYTES
    clock = ManualClock()
    again = shelf.quota(10, monotonic=clock.monotonic)
    with opened(again):
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", failing_scandir)
            with pytest.raises(OSError, match="Input/output error"):
                again.reserve(1)
            assert not again.reserve(1), "looked again at once"
        clock.advance(PAUSE_S)
        assert shelf.put(again, "newer")
        assert shelf.nbytes() <= 10 * OBJECT_NBYTES


def test_a_ledger_that_fails_at_any_moment_costs_nothing(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever access to the ledger fails, afterwards nothing is reserved, leaving or above the limit."""
    clock = ManualClock()
    quota = shelf.quota(10, low_water=0.5, monotonic=clock.monotonic)
    pwrite, countdown, num_failures = os.pwrite, 0, 0

    def failing_pwrite(*args: Any) -> int:
        nonlocal countdown, num_failures
        countdown -= 1
        if countdown == 0:
            num_failures += 1
            raise OSError(5, "Input/output error")
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", failing_pwrite)
    with opened(quota):
        for num_objects in (3, 10):  # the next one fits, or others have to go
            for moment in range(1, 7):
                clock.advance(PAUSE_S)
                for key in KEYS[:num_objects]:
                    assert shelf.path(key).exists() or shelf.put(quota, key)
                countdown = moment
                try:
                    shelf.put(quota, f"new{moment}")
                except OSError as error:
                    assert error.errno == 5
                countdown = 0
                quota.trim()
                assert quota.usage() == (shelf.nbytes(), 0)
                assert shelf.nbytes() <= 10 * OBJECT_NBYTES
                assert (quota._reserved, quota._leaving) == (0, 0)
    assert num_failures >= 5


def test_a_closed_quota_leaves_with_its_last_reservation(shelf: Shelf) -> None:
    """What is under way at close may end, and is on the books until then."""
    quota, other = shelf.quota(4), shelf.quota(4)
    with opened(other):
        assert quota.reserve(OBJECT_NBYTES)
        assert quota.reserve(OBJECT_NBYTES)
        quota.close()
        assert other.usage() == (0, 2 * OBJECT_NBYTES)
        quota.abort(OBJECT_NBYTES)
        assert quota._ledger.joined
        shelf.publish(shelf.begin(), "a")
        quota.commit(OBJECT_NBYTES)
        assert not quota._ledger.joined
        assert other.usage() == (OBJECT_NBYTES, 0)


def test_an_unused_quota_makes_no_file(shelf: Shelf) -> None:
    """Opening and closing touch nothing."""
    shelf.quota(4).close()
    assert not (shelf.directory / "quota").exists()


# -- the trim


def test_a_lowered_limit_announces_its_trim(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first file goes one line tells how much goes, and what is left."""
    first = shelf.quota(10)
    with opened(first):
        for number, key in enumerate(KEYS[:10]):
            assert shelf.put(first, key)
            os.utime(shelf.path(key), (number, number))
    unlink, left_at_line = os.unlink, []

    def watched_unlink(path: str) -> None:
        left_at_line.append(len(logs))
        unlink(path)

    monkeypatch.setattr(os, "unlink", watched_unlink)
    lower = shelf.quota(5, low_water=0.8)
    with opened(lower), capture_logs() as logs:
        assert lower.trim() == 6 * OBJECT_NBYTES
        assert lower.trim() == 0
    assert left_at_line == [1] * 6
    assert shelf.keys(*KEYS) == KEYS[6:10]
    (line,) = logs
    assert line == {
        "event": "store.trimming",
        "log_level": "warning",
        "directory": str(shelf.directory),
        "limit_bytes": 5 * OBJECT_NBYTES,
        "num_bytes": 6 * OBJECT_NBYTES,
        "num_objects": 6,
        "old_bytes": 10 * OBJECT_NBYTES,
        "new_bytes": 4 * OBJECT_NBYTES,
        "old_objects": 10,
        "new_objects": 4,
    }


def test_the_first_write_under_a_lowered_limit_announces_too(shelf: Shelf) -> None:
    """Without a trim at open the first write logs the same, and no write after it."""
    shelf.leave(*KEYS[:10])
    quota = shelf.quota(5)
    with opened(quota), capture_logs() as logs:
        for number in range(20):
            assert shelf.put(quota, f"new{number}")
    assert [line["event"] for line in logs] == ["store.trimming"]


# -- free space


class Disk:
    """A file system that has other users, and blocks as large as a small object."""

    def __init__(self, shelf: Shelf, size: int) -> None:
        self._shelf = shelf
        self.size = size
        self.others = 0

    def statvfs(self, path: str) -> os.statvfs_result:
        free = (self.size - self.others - self._shelf.nbytes()) // 4096
        return os.statvfs_result((4096, 4096, self.size // 4096, free, free, 0, 0, 0, 0, 255))


def test_free_space_is_kept(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without a limit of its own, a directory leaves min_free_bytes on its file system."""
    disk = Disk(shelf, 40 * OBJECT_NBYTES)
    monkeypatch.setattr(os, "statvfs", disk.statvfs)
    quota = shelf.quota(min_free_bytes=20 * OBJECT_NBYTES)
    with opened(quota):
        for key in KEYS[:40]:
            assert shelf.put(quota, key)
            assert shelf.nbytes() <= 20 * OBJECT_NBYTES
        assert shelf.nbytes() >= 14 * OBJECT_NBYTES
        disk.others = 10 * OBJECT_NBYTES
        assert shelf.put(quota, "a")
        assert shelf.nbytes() <= 10 * OBJECT_NBYTES
        disk.others = 25 * OBJECT_NBYTES
        left = shelf.nbytes()
        assert not shelf.put(quota, "b")
        assert shelf.nbytes() == left, "evicted what could not help"


def test_reservations_count_against_free_space(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being written, here or elsewhere, is not free."""
    disk = Disk(shelf, 42 * OBJECT_NBYTES)
    monkeypatch.setattr(os, "statvfs", disk.statvfs)
    quota, other = (shelf.quota(min_free_bytes=20 * OBJECT_NBYTES) for _ in range(2))
    with opened(quota, other):
        assert quota.reserve(15 * OBJECT_NBYTES)
        assert other.reserve(5 * OBJECT_NBYTES)
        assert not other.reserve(OBJECT_NBYTES)
        quota.abort(15 * OBJECT_NBYTES)
        assert other.reserve(OBJECT_NBYTES)
        other.abort(6 * OBJECT_NBYTES)


def test_space_that_is_freed_late_is_not_evicted_for_again(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that frees space later, one pass removes what it must and refused writes nothing."""
    shelf.leave(*KEYS[:20])
    clock = ManualClock()
    status = Disk(shelf, 40 * OBJECT_NBYTES).statvfs("")
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    quota = shelf.quota(min_free_bytes=20 * OBJECT_NBYTES, monotonic=clock.monotonic)
    with opened(quota):
        assert not any(shelf.put(quota, f"new{number}") for number in range(30))
        assert len(shelf.keys(*KEYS[:20])) >= 14
