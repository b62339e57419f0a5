"""The table of a segment: what is believed of a record, who may change it, and what a death leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from hicache_async.errors import StoreUnavailable
from hicache_async.stores._slots import segment as _segment
from hicache_async.stores._slots.index import SlotIndex
from hicache_async.stores._slots.segment import HOLDER, RECORD_NBYTES, Wanted, open_segment
from hicache_async.stores._slots.slots import Slots
from hicache_async.stores._slots.table import SlotTable, State, state_of
from hicache_async.stores._temp import UNSEEN_MAX_AGE_S

CHECKSUM = bytes(range(16))


def wanted(directory: Path, num_slots: int = 8) -> Wanted:
    return Wanted(str(directory / "segment"), 40_000 + num_slots * 4700, 4096, 0o600, True, "remove it")


@pytest.fixture
def table(tmp_path: Path) -> SlotTable:
    """A table whose slots are all free."""
    return SlotTable(open_segment(wanted(tmp_path)))


def publish(table: SlotTable, slot: int, key: bytes) -> None:
    with table.changing() as changes:
        changes.publish(slot, key, 100, CHECKSUM)


def test_what_a_slot_becomes(table: SlotTable) -> None:
    """Free, being written by this process, ready with its key, and free again."""
    assert table.slots_in(State.FREE) == list(range(table.num_slots))
    with table.changing() as changes:
        word = changes.reserve(3)
    entry = table.entry(3)
    assert entry is not None
    assert (entry.word, state_of(entry.word), entry.owner) == (word, State.WRITING, table.owner)
    publish(table, 3, b"key")
    entry = table.entry(3)
    assert entry is not None
    assert (state_of(entry.word), entry.nbytes, entry.checksum) == (State.READY, 100, CHECKSUM)
    assert table.key_of(3, entry) == "key"
    assert table.slots_in(State.READY) == [3]
    with table.changing() as changes:
        changes.free(3)
    assert table.slots_in(State.FREE) == list(range(table.num_slots))


def test_each_change_has_a_number_of_its_own(table: SlotTable) -> None:
    """Slots are found by the change that made them so, and a slot that is the same again has another word."""
    before = table.num_changes
    publish(table, 1, b"a")
    word = table.words[1]
    publish(table, 5, b"b")
    publish(table, 1, b"a")
    assert table.num_changes == before + 3
    assert table.changed_since(before) == [1, 5]
    assert table.changed_since(before + 2) == [1]
    assert table.changed_since(before + 3) == []
    assert table.words[1] != word


@pytest.mark.parametrize("at", [0, 7, 8, 23, 24, 32, 60, 64, 70, 511])
def test_a_record_is_believed_whole_or_not_at_all(table: SlotTable, at: int) -> None:
    """One flipped bit anywhere in it, and there is no entry."""
    publish(table, 2, b"key" * 150)
    table._records[2 * RECORD_NBYTES + at] ^= 1
    assert table.entry(2) is None
    table._records[2 * RECORD_NBYTES + at] ^= 1
    assert table.entry(2) is not None


def test_a_record_belongs_to_its_word(table: SlotTable) -> None:
    """An older or newer word, and another slot's, make a good record no entry."""
    publish(table, 2, b"a")
    old_word = table.words[2]
    old_record = bytes(table._records[2 * RECORD_NBYTES : 3 * RECORD_NBYTES])
    publish(table, 2, b"b")
    new_word = table.words[2]
    table.words[2] = old_word
    assert table.entry(2) is None
    table.words[2] = new_word
    assert table.entry(2) is not None
    table.set_record(2, old_record)
    assert table.entry(2) is None


def test_the_lock_excludes_threads_and_tables(table: SlotTable, tmp_path: Path) -> None:
    """While one changes the table another waits, in the same process too, on its own or the same table."""
    order: list[str] = []
    waiting = threading.Event()

    def change(other: SlotTable) -> None:
        waiting.set()
        with other.changing():
            order.append("second")

    for other in (table, SlotTable(open_segment(wanted(tmp_path)))):
        order.clear()
        waiting.clear()
        thread = threading.Thread(target=change, args=(other,))
        with table.changing():
            thread.start()
            assert waiting.wait(30)
            order.append("first")
        thread.join(30)
        assert order == ["first", "second"]


def test_an_error_inside_lets_the_lock_go(table: SlotTable) -> None:
    """What was changed before it counts, and the next holder is told of nothing."""
    before = table.num_changes
    with pytest.raises(ZeroDivisionError):
        with table.changing() as changes:
            changes.reserve(1)
            raise ZeroDivisionError
    with table.changing() as changes:
        assert not changes.torn
    assert table.changed_since(before) == [1]


def test_least_recently_used_first(table: SlotTable) -> None:
    """Ready slots come in the order of their stamps, those of the future before all others."""
    for slot, stamp in ((4, 400), (1, 100), (6, 600), (3, 300), (2, time.time_ns() * 2)):
        publish(table, slot, b"key%d" % slot)
        table._stamps[slot] = stamp
    with table.changing() as changes:
        changes.reserve(0)
    assert [slot for _, slot in table.least_recently_used(10)] == [2, 1, 3, 4, 6]
    assert table.least_recently_used(3)[1:] == [(100, 1), (300, 3)]


def test_who_is_taken_for_dead(table: SlotTable) -> None:
    """A process of another boot or that has ended is; a live one and a fresh one out of sight are not."""
    with table.changing() as changes:
        changes.reserve(0)
    ours = table.owner
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        theirs = ours._replace(pid=child.pid, start=start)
        assert not table.is_abandoned(0, ours)
        assert not table.is_abandoned(0, theirs)
        assert table.is_abandoned(0, theirs._replace(start=start + 1))
        assert table.is_abandoned(0, theirs._replace(boot=ours.boot ^ 1))
        unseen = theirs._replace(pid_namespace=ours.pid_namespace ^ 1)
        assert not table.is_abandoned(0, unseen)
        table._stamps[0] -= int(UNSEEN_MAX_AGE_S * 1e9) + 1
        assert table.is_abandoned(0, unseen)
    finally:
        child.communicate(b"\n")
    assert table.is_abandoned(0, theirs)


DIE_INSIDE = """
import os, signal, sys, types
package, path = sys.argv[1:3]
sys.modules["hicache_async"] = types.ModuleType("hicache_async")
sys.modules["hicache_async"].__path__ = [package]
from hicache_async.stores._slots.segment import Wanted, open_segment
from hicache_async.stores._slots.table import SlotTable
table = SlotTable(open_segment(Wanted(path, None, None, 0o600, True, "")))
with table.changing() as changes:
    changes.publish(0, b"whole", 10, bytes(16))
    changes.reserve(1)
    table.set_record(2, b"torn".ljust(512))
    print("inside", flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))
print("after", flush=True)
"""


def die_inside(directory: Path, kind_of_signal: str) -> subprocess.Popen[str]:
    """Start a process that stops, or ends, while it holds the lock."""
    package = str(Path(_segment.__file__).parents[2])
    command = [sys.executable, "-c", DIE_INSIDE, package, wanted(directory).path, kind_of_signal]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "inside\n"
    return process


def test_a_death_inside_lets_the_lock_go_and_is_noticed(table: SlotTable, tmp_path: Path) -> None:
    """The next holder is told, takes a number that no slot has, and finds each slot whole or none."""
    publish(table, 2, b"to be torn")
    publish(table, 7, b"bystander")
    count = table.num_changes
    with die_inside(tmp_path, "SIGKILL") as process:
        process.wait(30)
    assert table.num_changes == count
    with table.changing() as changes:
        assert changes.torn
        assert changes.number > table.words[0] >> 2 > count
    assert table.entry(2) is None
    with table.changing() as changes:
        assert not changes.torn
    index = SlotIndex(table)
    index.rebuild()
    assert index.slots == {"whole": 0, "bystander": 7}
    assert index.writing == {1}
    assert index.damaged == {2}


def test_slots_are_whole_again_after_a_death_inside(table: SlotTable, tmp_path: Path) -> None:
    """The first to write afterwards gets back what the dead one held or tore, and loses nothing else."""
    slots = Slots(open_segment(wanted(tmp_path)), counts := Counter())
    page = memoryview(b"x" * 100)
    keys = [f"key{number}" for number in range(3)]
    assert slots.write([(key, page) for key in keys], keys, lambda: False).num_pages == 3
    with die_inside(tmp_path, "SIGKILL") as process:
        process.wait(30)
    torn = slots.index.key_in(2)
    assert slots.write([("new", page)], ["new"], lambda: False).num_pages == 1
    index = slots.index
    assert "new" in index.slots
    assert not index.writing
    assert not index.damaged
    assert len(index.free) + len(index.slots) == table.num_slots
    assert counts == {"abandoned": 1, "damaged": 1 if torn else 0} or counts == {"abandoned": 1}


def test_a_holder_that_was_stopped_is_named(
    table: SlotTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it too long gets an error that says which process it is; it goes on where it was."""
    monkeypatch.setattr(_segment, "LOCK_TIMEOUT_S", 0.2)
    with die_inside(tmp_path, "SIGSTOP") as process:
        with pytest.raises(
            StoreUnavailable, match=rf"locked for 0.2 s by process {process.pid}; it is stopped"
        ):
            with table.changing():
                pass
        assert table._header[HOLDER] == process.pid
        process.send_signal(signal.SIGCONT)
        assert process.stdout
        assert process.stdout.readline() == "after\n"
        process.wait(30)
    with table.changing() as changes:
        assert not changes.torn
    assert table.slots_in(State.READY) == [0]


def test_drafts_that_could_not_be_published_are_freed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the lock cannot be had to publish, the slots are this process's until somebody needs room."""
    slots = Slots(open_segment(wanted(tmp_path)), Counter())
    page = memoryview(b"x" * 100)

    def refuse(*_: object) -> None:
        raise StoreUnavailable("locked")

    reserve = slots._reserve

    def reserve_then_refuse(*args: object) -> object:
        drafts = reserve(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(slots, "_changing", refuse)
        return drafts

    monkeypatch.setattr(slots, "_reserve", reserve_then_refuse)
    with pytest.raises(StoreUnavailable):
        slots.write([("a", page), ("b", page)], [], lambda: False)
    monkeypatch.undo()
    assert len(slots.index.writing) == 2
    num_slots = len(slots.index.free) + 2
    keys = [f"key{number}" for number in range(num_slots)]
    assert slots.write([(key, page) for key in keys], keys, lambda: False).num_pages == num_slots
    assert not slots.index.writing


# -- the index


def test_two_records_of_one_key(table: SlotTable) -> None:
    """The newer one is the key's, the other is damaged, in whatever order they are seen."""
    publish(table, 5, b"key")
    publish(table, 1, b"key")
    for first in (1, 5):
        index = SlotIndex(table)
        index.note([first])
        index.rebuild()
        assert index.slots == {"key": 1}
        assert index.damaged == {5}
        assert index.key_in(5) is None


def test_a_key_that_moved_while_nobody_looked(table: SlotTable) -> None:
    """Its new slot is found though its old one, which holds another key by now, is looked at later."""
    publish(table, 5, b"key")
    index = SlotIndex(table)
    index.rebuild()
    publish(table, 1, b"key")
    publish(table, 5, b"other")
    index.refresh()
    assert index.slots == {"key": 1, "other": 5}
    assert not index.damaged


def test_an_index_follows_what_others_change(table: SlotTable, tmp_path: Path) -> None:
    """A refresh finds what is new, changed and gone, and does not look when nothing has changed."""
    index = SlotIndex(SlotTable(open_segment(wanted(tmp_path))))
    index.refresh()
    assert index.current
    publish(table, 1, b"a")
    publish(table, 2, b"b")
    assert not index.current
    assert index.slots == {}
    index.refresh()
    assert index.slots == {"a": 1, "b": 2}
    publish(table, 1, b"c")
    with table.changing() as changes:
        changes.free(2)
        changes.reserve(3)
    index.refresh()
    assert index.current
    assert (index.slots, index.writing) == ({"c": 1}, {3})
    assert index.free == set(range(table.num_slots)) - {1, 3}


def test_a_key_that_stays_is_never_out_of_sight(table: SlotTable) -> None:
    """While a slot is looked at again its key is found, as a lookup does not wait for the index."""
    publish(table, 1, b"key")
    index = SlotIndex(table)
    index.rebuild()

    class Watched(dict[str, int]):
        def __delitem__(self, key: str) -> None:
            raise AssertionError(f"{key} was out of sight")

    index.slots = Watched(index.slots)
    index.note([1])
    index.rebuild()
    assert index.slots == {"key": 1}
