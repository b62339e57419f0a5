"""The store exam: a good store passes all of it, and each of many broken ones is caught by the property it breaks."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_async.errors import ConfigError
from hicache_async.stores import MemoryStore
from hicache_async.testing import Candidate, StoreReport, check_store, store_exam
from hicache_async.testing.store_exam import CHECKS
from hicache_async.types import StopToken
from tests.testing.broken_stores import CAUGHT_BY, SaysItForgets
from tests.testing.shelf_store import ShelfStore, damage_shelf

pytestmark = pytest.mark.asyncio

PATIENCE_S = 2.0
UNAVAILABLE = {"catalog.the_codec_has_a_name", "catalog.a_working_store_refuses_nothing"}
"""What the shelf has not got."""


def candidate(store: type, **facts: Any) -> Candidate:
    """Return what is to be known of a store here: a shelf, or one in memory."""
    if issubclass(store, MemoryStore):
        return Candidate(
            lambda _: store(), open_bounded=lambda _, max_bytes: bounded(store, max_bytes), **facts
        )
    facts = {"persists": True, "shared": True, "processes": True} | facts
    return Candidate(store, open_bounded=store, damage=damage_shelf, **facts)


def bounded(store: type[MemoryStore], max_bytes: int) -> MemoryStore:
    """Return a store in memory, whatever its arguments are, with a limit."""
    opened = store()
    opened._max_bytes = max_bytes
    return opened


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_a_good_store_passes(check: object) -> None:
    """The shelf, which can do nearly everything, passes each check that it does not lack what is needed for."""
    if str(check) in UNAVAILABLE or "eager" in str(check):
        with pytest.raises(AssertionError, match="nothing was examined"):
            await check_store(candidate(ShelfStore), only=str(check))
    else:
        report = await check_store(candidate(ShelfStore), only=str(check))
        assert report.examined == [str(check)]


@pytest.mark.parametrize(
    ("store", "name"),
    [
        pytest.param(store, name, id=f"{store.__name__}-{name}")
        for store in CAUGHT_BY
        for name in CAUGHT_BY[store]
    ],
)
async def test_a_broken_store_is_caught(store: type, name: str) -> None:
    """A store with one fault fails the check of the property that it breaks, by name."""
    facts = {"persists": False, "shared": False, "processes": False} if store is SaysItForgets else {}
    with pytest.raises(AssertionError, match=rf"of \d+ checks 1 failed:\n  {name}: "):
        await check_store(candidate(store, patience_s=PATIENCE_S, **facts), only=name)


async def test_every_check_catches_something() -> None:
    """A check that no broken store fails might not be able to fail at all."""
    caught = {name for names in CAUGHT_BY.values() for name in names}
    assert {str(check) for check in CHECKS} - caught == {"loops.it_works_on_eager_tasks"}


# What the exam says, and where it runs


async def test_the_documented_example_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """The example in the documentation is a whole program; a small part of it passes here."""
    _, example = (store_exam.__doc__ or "").split("::\n", 1)
    code = textwrap.dedent(example.split("With pytest", 1)[0])
    shortened = code.replace("shared=True)", "shared=True), only='contiguity.a_hole'").replace(
        "asyncio.run(main())", ""
    )
    assert shortened.count("contiguity") == 1
    names: dict[str, Any] = {"__name__": __name__}
    exec(shortened, names)
    await asyncio.create_task(names["main"]())
    assert capsys.readouterr().out == "2 checks passed\n"


async def test_the_report_says_what_was_left_out() -> None:
    """What was examined is listed by name, and what was not with what it would need."""
    report = await check_store(lambda directory: MemoryStore(), only="ca")
    assert isinstance(report, StoreReport)
    assert "catalog.all_verbs_agree" in report.examined
    assert report.skipped["capacity.what_was_read_last_stays"] == "there is no hook open_bounded()"


async def test_all_failures_are_told_at_once() -> None:
    """A store with several faults is told of all of them."""

    class Bad(MemoryStore):
        async def count_prefix(self, keys: Sequence[str]) -> int:
            return len(keys)

    with pytest.raises(AssertionError) as failure:
        await check_store(lambda directory: Bad(), only="cont")
    told = str(failure.value).splitlines()
    assert (
        told[0]
        == f"of {sum(str(check).startswith('cont') for check in CHECKS)} checks {len(told) - 1} failed:"
    )
    assert len(told) > 3


async def test_a_name_that_there_is_not_is_refused() -> None:
    """A part that nobody has heard of is an error, and not an exam of nothing."""
    with pytest.raises(ConfigError, match="only is 'colour'; the names of the checks are contract."):
        await check_store(MemoryStore, only="colour")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"processes": True}, "processes"),
        ({"object_nbytes": (9, 5)}, "object_nbytes"),
        ({"rounds": 0}, "rounds"),
    ],
)
async def test_facts_that_cannot_be_are_refused(facts: dict[str, Any], field: str) -> None:
    """What is declared of a store is checked, and the message names it."""
    with pytest.raises(ConfigError, match=f"{field} is "):
        Candidate(MemoryStore, **facts)  # type: ignore[arg-type]


async def test_a_store_that_hangs_is_given_up() -> None:
    """A call that does not end fails its check after ``patience_s``, and says which task waits where."""

    class Hangs(MemoryStore):
        async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
            return await asyncio.get_running_loop().create_future()

    with pytest.raises(
        AssertionError, match=r"it hangs, or takes longer than 0.05 s: .*exam:check.* waits at .*"
    ):
        await check_store(Candidate(lambda _: Hangs(), patience_s=0.05), only="races.many_calls_at_once")


async def test_a_store_that_no_other_process_can_find_is_left_out() -> None:
    """A lambda cannot be opened in another process: the check says so instead of failing there."""
    facts = Candidate(lambda directory: ShelfStore(directory), shared=True, processes=True, persists=True)
    with pytest.raises(
        AssertionError, match=r"another process cannot find .*<lambda>: make it a class or a function"
    ):
        await check_store(facts, only="processes.processes_see_each_other")


async def test_what_lies_outside_of_the_directory_is_cleared_away() -> None:
    """Each directory that a store was opened in is told to the hook ``discard`` once it is closed."""
    opened: list[Path] = []
    discarded: list[Path] = []

    def open_in(directory: Path) -> MemoryStore:
        opened.append(directory)
        return MemoryStore()

    facts = Candidate(open_in, discard=discarded.append)
    await check_store(facts, only="cancellation.read")
    await check_store(facts, only="loops.it_works_on_asyncio")
    assert set(opened) <= set(discarded)
    assert len(set(opened)) > 5
