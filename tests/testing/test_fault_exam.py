"""The fault exam: it tells its story once for each call and fault, and names each way of getting a fault wrong."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_async import ConfigError, HiCache, PrefixLease
from hicache_async.core.pool import Owner
from hicache_async.flows import backup, fetch
from hicache_async.flows.attachment import Attachment
from hicache_async.stores import MemoryStore
from hicache_async.testing import fault_exam
from hicache_async.testing._exam_store import FAULTS
from hicache_async.testing.cancel_exam import check_cancellation
from hicache_async.testing.fault_exam import check_store_faults
from hicache_async.types import StopToken
from tests.flows.conftest import logs

__all__ = ["logs"]


def memory(directory: Path) -> MemoryStore:
    """Return a store that needs no directory."""
    return MemoryStore()


def test_the_documented_example_passes() -> None:
    """The example in the documentation is a whole test; a small share of it passes here."""
    _, example = (fault_exam.__doc__ or "").split("::\n", 1)
    code = textwrap.dedent(example.split("Whatever happens", 1)[0])
    names: dict[str, Any] = {"__name__": __name__}
    exec(code.replace("(FileStore)", "(FileStore, share=0.01)"), names)
    names["test_store_faults"]()


def test_every_call_goes_wrong_in_every_way() -> None:
    """There are as many stories as calls and faults, and each kind of call is among those that go wrong."""
    told: list[tuple[str, int]] = []

    class Told(fault_exam._Story):
        async def tell(self) -> None:
            await super().tell()
            told.append((self.verb, self._at))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_exam, "_Story", Told)
        report = check_store_faults(memory, faults=["raises OSError"])
    assert report.faults == report.calls == len(told) - 1
    assert [at for _, at in told[1:]] != sorted(at for _, at in told[1:])  # in no order
    assert {verb for verb, _ in told[1:]} == {"count_prefix", "read", "write", "list_keys", "delete"}


def test_a_store_that_cannot_be_cleared_is_examined_all_the_same() -> None:
    """What can list and delete nothing is not asked to."""

    class Plain:
        """The four methods that every store has."""

        def __init__(self) -> None:
            inner = MemoryStore()
            self.count_prefix, self.read, self.write = inner.count_prefix, inner.read, inner.write
            self.aclose = inner.aclose

    report = check_store_faults(lambda directory: Plain(), faults=["raises OSError"], share=0.1)
    assert report.calls > 10


# What gets it wrong


class Careless(MemoryStore):
    """Vouches for pages that it has not read."""

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        await super().read(keys[:-1], into[:-1], stop)
        return len(keys)


def test_a_store_that_vouches_for_what_it_has_not_read_fails() -> None:
    """Bytes that are not the right ones are found when the first request reads them."""
    with pytest.raises(AssertionError, match=r"no fault at all, while serving 'abcd': .*should hold page"):
        check_store_faults(lambda directory: Careless(), share=0.0)


def believed(ctx: Any, hop: Any, limit: int) -> int | None:
    """Believe whatever a store answers."""
    return hop.result if hop.error is None else None


def test_a_cache_that_believes_every_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that cannot be true, and is believed, breaks the cache or its bytes."""
    monkeypatch.setattr(fetch, "checked_count", believed)
    with pytest.raises(AssertionError, match=r"call \d+ \(read\) answers a string, while .*: "):
        check_store_faults(memory, faults=["answers a string"], patience_s=1.0)


def test_a_cache_that_lets_an_error_out_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store raises, and a request hears of, is told with the call that raised it."""
    prefetch = PrefixLease.prefetch

    async def complaining(lease: PrefixLease, *args: Any) -> Any:
        result = await prefetch(lease, *args)
        if result.stop == "store_fault":
            raise RuntimeError("the store has failed")
        return result

    monkeypatch.setattr(PrefixLease, "prefetch", complaining)
    with pytest.raises(
        AssertionError, match=r"call \d+ \((count_prefix|read)\) raises OSError, while serving .*has failed"
    ):
        check_store_faults(memory, faults=["raises OSError"])


def test_a_cache_that_keeps_a_page_after_a_fault_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that nobody has and nobody can take is found by the audit after the next thing that is done."""
    fault_of = fetch.checked_count

    def leaking(ctx: Any, hop: Any, limit: int) -> int | None:
        count = fault_of(ctx, hop, limit)
        if count is None:
            ctx.host_pool.take(1, Owner.HOP, fenced=False)
        return count

    monkeypatch.setattr(fetch, "checked_count", leaking)
    with pytest.raises(AssertionError, match=r"call \d+ \(read\) .*: host: \d+ pages are booked to hop"):
        check_store_faults(memory, faults=["raises KeyError"])


def test_a_cache_that_waits_for_ever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs, and is waited for without a limit, is told as such."""

    async def ended(self: Attachment, *args: Any) -> bool:
        await asyncio.sleep(3600)
        return True

    monkeypatch.setattr(Attachment, "_ended", ended)
    with pytest.raises(AssertionError, match="while clearing all: it hangs"):
        check_store_faults(memory, share=0.0, patience_s=0.3)


def test_what_is_not_made_up_for_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was not written because of a fault, and is never written later, is missed at the end."""
    is_due = backup.Backups.is_due

    def give_up(self: backup.Backups, node: Any) -> bool:
        return not self._ctx.metrics.counters["backup_pages_failed"] and is_due(self, node)

    monkeypatch.setattr(backup.Backups, "is_due", give_up)
    with pytest.raises(
        AssertionError, match=r"\(write\) answers 0, while .*: of the \d pages .* the store has only"
    ):
        check_store_faults(memory, faults=["answers 0"], patience_s=1.0)


def test_a_close_that_leaves_a_task_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that outlives its cache is left behind, whether there was a fault or not."""
    opened = HiCache._open

    async def open_and_start(cache: HiCache) -> None:
        await opened(cache)
        cache._left_behind = asyncio.get_running_loop().create_task(asyncio.sleep(3600), name="left")  # type: ignore[attr-defined]

    monkeypatch.setattr(HiCache, "_open", open_and_start)
    with pytest.raises(AssertionError, match="no fault at all, while closing: left behind.*(\n.*)*left"):
        check_store_faults(memory, share=0.0, patience_s=0.3)


def test_a_fault_that_there_is_not_is_refused() -> None:
    """The message names those that there are."""
    with pytest.raises(ConfigError, match="faults has .'sulks'.; there are raises RuntimeError, "):
        check_store_faults(memory, faults=["sulks"])


def test_faults_are_named() -> None:
    """Raising, short, lying and hanging are all among the faults."""
    kinds = {name.split()[0] for name in FAULTS}
    assert kinds == {"raises", "answers", "hangs"}
    assert {
        "answers the half",
        "answers -1",
        "answers one more",
        "answers None",
        "answers nan",
    } <= FAULTS.keys()


class OnlyFour:
    """A store of four methods that keeps its objects as files, and makes no directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def count_prefix(self, keys: Sequence[str]) -> int:
        return next((at for at, key in enumerate(keys) if not (self._directory / key).exists()), len(keys))

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        for at, (key, view) in enumerate(zip(keys, into, strict=True)):
            if stop.stopped or not (self._directory / key).exists():
                return at
            view[:] = (self._directory / key).read_bytes()
        return len(keys)

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        for key, page in zip(keys, pages, strict=True):
            (self._directory / key).write_bytes(page)
        return len(keys)

    async def aclose(self) -> None:
        pass


def test_a_store_of_four_methods_passes_both_exams() -> None:
    """As the README describes one, in the directory that it is given."""
    assert check_store_faults(OnlyFour, share=0.05, seed=1).faults
    assert check_cancellation(OnlyFour, only="Admin", share=0.1, seed=1).cancels
