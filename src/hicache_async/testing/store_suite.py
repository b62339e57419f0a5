"""StoreSuite: the store exam as a class of tests. A store of one's own adopts it by inheriting::

    from hicache_async.testing import StoreSuite


    class TestMyStore(StoreSuite):
        persists = True
        shared = True

        async def open(self, directory):
            return MyStore(directory)

Each property is a test, as ``TestMyStore::test_store[contiguity.a_hole_ends_the_count]``. One that needs what the
store has not got is skipped, and says what that is. Without pytest, see ``store_exam``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ..abc import Store
from ._store_suite.checks import Check, Missing
from .leaks import LeakChecks
from .store_exam import CHECKS, Candidate, Damage, examine


class StoreSuite:
    """The exam of one store; see :class:`~hicache_async.testing.store_exam.Candidate` for what is declared.

    Attributes:
        keeps: whether it keeps anything at all.
        persists: whether it is found again when it was closed and is opened in the same directory.
        shared: whether two instances in one directory see each other.
        processes: whether two processes may have it open at once.
        lossy: whether pages may come back as other bytes.
        object_nbytes: sizes of the objects that are written, ascending.
        batch_nbytes: how much one call writes at most.
        rounds: how often races are run, cancels are tried and processes are killed; more for a long form.
        leaks: what must not be left behind.
        patience_s: how long one check may take.
    """

    keeps: bool = True
    persists: bool = False
    shared: bool = False
    processes: bool = False
    lossy: bool = False
    object_nbytes: Sequence[int] = (4096, 1 << 18)
    batch_nbytes: int = 64 << 20
    rounds: int = 1
    leaks: LeakChecks = LeakChecks()
    patience_s: float = 30.0

    async def open(self, directory: Path) -> Store:
        """Open the store in ``directory``, which exists and is its own.

        It is called often, for the same directory, too, and from loops and processes that the exam makes.
        """
        raise NotImplementedError(f"{type(self).__name__} needs: async def open(self, directory) -> Store")

    async def open_bounded(self, directory: Path, max_bytes: int) -> Store:
        """Override to have the limit examined: open the store so that it keeps at most ``max_bytes`` of pages."""
        raise NotImplementedError

    def damage(self, directory: Path, key: str, how: Damage, other: str) -> bool:
        """Override to have bad bytes examined: damage the object of ``key``; ``other`` is the key to swap with.

        Returns False where it cannot be damaged so; ``damage_file`` does all of it to a file.
        """
        raise NotImplementedError

    def discard(self, directory: Path) -> None:
        """Override to clear away what a store in ``directory``, closed by now, has left outside of it."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize("check", CHECKS, ids=str)
    async def test_store(self, check: Check, tmp_path: Path, store_tally: Tally) -> None:
        """One property holds."""
        store_tally.begin()
        try:
            await examine(check, self._candidate(), tmp_path)
        except Missing as missing:
            pytest.skip(str(missing))
        except pytest.skip.Exception:
            raise
        except BaseException:
            store_tally.examined()
            raise
        store_tally.examined()

    @pytest.fixture(scope="class")
    @classmethod
    def store_tally(cls) -> Iterator[Tally]:
        """At the end say whether anything was examined."""
        tally = Tally()
        yield tally
        tally.check(cls.__name__)

    def _candidate(self) -> Candidate:
        suite = type(self)
        return Candidate(
            self.open,
            open_bounded=None if suite.open_bounded is StoreSuite.open_bounded else self.open_bounded,
            damage=None if suite.damage is StoreSuite.damage else self.damage,
            discard=None if suite.discard is StoreSuite.discard else self.discard,
            keeps=self.keeps,
            persists=self.persists,
            shared=self.shared,
            processes=self.processes,
            lossy=self.lossy,
            object_nbytes=self.object_nbytes,
            batch_nbytes=self.batch_nbytes,
            rounds=self.rounds,
            leaks=self.leaks,
            patience_s=self.patience_s,
        )


class Tally:
    """Counts the checks of one class: where all of them were skipped nothing is known of the store."""

    def __init__(self) -> None:
        self._num_begun = 0
        self._num_examined = 0

    def begin(self) -> None:
        """Count a check that is begun."""
        self._num_begun += 1

    def examined(self) -> None:
        """Count one that was not skipped."""
        self._num_examined += 1

    def check(self, name: str) -> None:
        """Fail where the whole exam was begun, and all of it skipped."""
        if self._num_begun >= len(CHECKS) and not self._num_examined:
            pytest.fail(f"{name} examined nothing: all {self._num_begun} checks were skipped", pytrace=False)
