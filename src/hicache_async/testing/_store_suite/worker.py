"""Another process with the candidate's store open, which does what it is told, line by line.

It runs as ``python -m hicache_async.testing._store_suite.worker``. The first line on its standard input says what
to open, each further one is a call, each answer is a line on its standard output; all of it is JSON. It ends when
its input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from .candidate import Candidate
from .exam import CheckedStore, Exam
from .origin import Origin


@dataclass(frozen=True, slots=True)
class Errand:
    """What a process is to open.

    Attributes:
        origin: of what opens the store.
        directory: where.
        small, lossy: as in the candidate.
    """

    origin: Origin
    directory: str
    small: int
    lossy: bool

    def encode(self) -> str:
        """Return it as a line."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, line: str) -> Errand:
        """Return what :meth:`encode` made a line of."""
        fields = json.loads(line)
        origin = fields.pop("origin")
        origin["names"] = tuple(origin["names"])
        return cls(Origin(**origin), **fields)


async def _serve(lines: IO[str], answers: IO[str]) -> None:
    errand = Errand.decode(await asyncio.to_thread(lines.readline))
    candidate = Candidate(errand.origin.load(), object_nbytes=(errand.small,), lossy=errand.lossy)
    exam = Exam(candidate, Path(errand.directory))
    await exam.start()
    try:
        print(json.dumps({"answer": "open"}), file=answers, flush=True)
        while line := await asyncio.to_thread(lines.readline):
            print(json.dumps(await _answer(exam.store, json.loads(line))), file=answers, flush=True)
    finally:
        await exam.finish()


async def _answer(store: CheckedStore, call: dict[str, Any]) -> dict[str, object]:
    verbs = {"count": store.count, "read": store.read, "write": store.write, "delete": store.delete}
    try:
        return {"answer": await verbs[call["verb"]](call["keys"], *call["sizes"])}
    except Exception as error:  # noqa: BLE001 - it is raised in the process that asked
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the store prints is no answer
    asyncio.run(_serve(sys.stdin, answers))


if __name__ == "__main__":
    main()
    # Not left to the interpreter, which waits for a thread that may sit in a dead file system.
    sys.stderr.flush()
    if threading.active_count() > 1:
        os._exit(0)
