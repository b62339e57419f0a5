"""Bad bytes: an object that was damaged is a miss, costs no neighbour, and is healed by writing it again."""

from __future__ import annotations

from ...errors import StoreUnavailable
from .candidate import Damage
from .checks import Check, Missing
from .exam import CheckedStore, Exam
from .pages import expect, page_keys


def _check_of(how: Damage) -> Check:
    async def examine(exam: Exam) -> None:
        for nbytes in exam.candidate.object_nbytes:
            for instance in ("the same instance", "an instance opened afterwards"):
                await _Damaged(exam, how, nbytes, instance).examine()

    return Check("damage", f"{how.value}_is_a_miss", examine, ("keeps", "damage"))


CHECKS = tuple(_check_of(how) for how in Damage)


class _Damaged:
    """Three objects, the second of which is damaged."""

    def __init__(self, exam: Exam, how: Damage, nbytes: int, instance: str) -> None:
        self._exam = exam
        self._how = how
        self._nbytes = nbytes
        self._instance = instance
        self._keys = page_keys(4, f"{nbytes} {instance}")

    async def examine(self) -> None:
        """Damage it, look for it, and write it again."""
        first, damaged, third, other = self._keys
        store = self._exam.store
        await store.write_all(self._keys, self._nbytes)
        await store.read_all(self._keys, self._nbytes)
        await self._damage(damaged, other)
        if self._instance != "the same instance" and self._exam.candidate.persists:
            store = await self._exam.reopen()
        await self._check_miss(store, first, damaged, third)
        await self._check_healed(store, first, damaged, third)
        if self._how is Damage.SWAP:
            expect(
                await store.read([other], self._nbytes) == 0,
                self._said("its bytes under the other key are read"),
            )

    async def _damage(self, key: str, other: str) -> None:
        assert self._exam.candidate.damage is not None
        if not self._exam.candidate.damage(self._exam.directory, key, self._how, other):
            raise Missing(f"its hook damage() cannot do {self._how.value}")

    async def _check_miss(self, store: CheckedStore, first: str, damaged: str, third: str) -> None:
        count = await store.read([first, damaged, third], self._nbytes)
        expect(
            count == 1,
            self._said(f"of three objects read counts {count}, and should count the one before it"),
        )
        expect(await store.read([damaged], self._nbytes) == 0, self._said("it is read by itself"))
        await store.read_all([third, first], self._nbytes)
        expect(
            await store.count([damaged]) == 0, self._said("it was missed, and count_prefix still counts it")
        )
        expect(await store.count([first, third]) == 2, self._said("its neighbours are not counted any more"))

    async def _check_healed(self, store: CheckedStore, first: str, damaged: str, third: str) -> None:
        keys = [first, damaged, third]
        try:
            count = await store.write(keys, self._nbytes)
        except StoreUnavailable:
            count = 0
        if count < 3 and self._how is Damage.DIRECTORY:
            return  # it says so, and no more can be asked of it
        expect(count == 3, self._said(f"writing it again stores {count} of 3 objects"))
        expect(await store.count(keys) == 3, self._said("it was written again, and is not counted"))
        await store.read_all(keys, self._nbytes)

    def _said(self, complaint: str) -> str:
        return f"{self._how.value}, {self._nbytes} bytes, {self._instance}: {complaint}"
