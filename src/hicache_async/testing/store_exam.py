"""The store exam: everything that a cache asks of a store, checked property by property.

It takes a store, and what is to be known of it::

    import asyncio

    from hicache_async.stores import FileStore
    from hicache_async.testing import Candidate, check_store


    async def main() -> None:
        print(await check_store(Candidate(FileStore, persists=True, shared=True)))


    asyncio.run(main())

With pytest, inherit from :class:`~hicache_async.testing.store_suite.StoreSuite`, where each property is a test.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from ._store_suite.candidate import Candidate, Damage, OpenStore, damage_file
from ._store_suite.checks import Missing
from ._store_suite.run import CHECKS, examine

__all__ = ["CHECKS", "Candidate", "Damage", "StoreReport", "check_store", "damage_file", "examine"]


@dataclass(slots=True)
class StoreReport:
    """What was examined.

    Attributes:
        examined: names of the checks that were done.
        skipped: names of those that were not, and which fact, hook or capability each needs.
        failed: names of those that found something, and what.
    """

    examined: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{len(self.examined)} checks passed" + _listed("; left out", self.skipped)


async def check_store(candidate: Candidate | OpenStore, *, only: str = "") -> StoreReport:
    """Examine a store on the running loop, and in threads and processes of its own.

    Args:
        candidate: how it is opened, and what is declared of it; a function that opens it: nothing else is declared.
        only: the beginning of the names of the checks that are done, as "capacity."; "": all.
    Returns: what was examined, and what was left out for which reason.
    Raises: AssertionError: names every property that does not hold, or says that nothing could be examined.
        ConfigError: no check is named so.
    """
    if not isinstance(candidate, Candidate):
        candidate = Candidate(candidate)
    chosen = [check for check in CHECKS if str(check).startswith(only)]
    if not chosen:
        raise ConfigError(f"only is {only!r}; the names of the checks are {', '.join(map(str, CHECKS))}")
    report = StoreReport()
    for check in chosen:
        with tempfile.TemporaryDirectory(prefix="hicache-exam-") as directory:
            try:
                await examine(check, candidate, Path(directory))
            except Missing as missing:
                report.skipped[str(check)] = str(missing)
            except AssertionError as error:
                report.failed[str(check)] = str(error)
            else:
                report.examined.append(str(check))
    if report.failed:
        raise AssertionError(
            f"of {len(chosen)} checks {len(report.failed)} failed" + _listed("", report.failed)
        )
    if not report.examined:
        raise AssertionError("nothing was examined" + _listed("", report.skipped))
    return report


def _listed(title: str, reasons: Mapping[str, str]) -> str:
    return (
        f"{title}:\n" + "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
        if reasons
        else ""
    )
