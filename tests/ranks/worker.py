"""One rank in a process of its own: a program that joins, votes as it is told, and prints what it heard.

Arguments: rank, size, the folder of the rendezvous, what to do, and its options as JSON. Each line it prints
is JSON; the last one is its report.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from hicache_async.config import CacheConfig
from hicache_async.errors import ConsensusError
from hicache_async.ranks.hub import HubRanks


class Folder:
    """A rendezvous of files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _file(self, key: str) -> Path:
        return self._path / key.replace("/", "-")

    def set(self, key: str, value: str) -> None:
        """Keep ``value``, whole from the first moment on."""
        new = self._file(f"{key}.new")
        new.write_text(value)
        os.replace(new, self._file(key))

    def get(self, key: str) -> bytes:
        """Return what is kept; waits for it."""
        while not self._file(key).exists():
            time.sleep(0.005)
        return self._file(key).read_bytes()


def say(**words: object) -> None:
    """Print one line."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


async def schedule(ranks: HubRanks, seed: int, num_tickets: int, num_callers: int) -> dict[str, Any]:
    """Ask for every ticket once, in an order of this rank's own, with delays, and give up some waits."""
    rng = random.Random(seed * 1000 + ranks.rank)
    votes = {number: rng.choice([0, *range(1, 50)]) for number in range(num_tickets)}
    results: dict[int, int] = {}
    numbers = list(votes)
    rng.shuffle(numbers)
    free = asyncio.Semaphore(num_callers)

    async def call(number: int) -> None:
        ticket = number.to_bytes(16, "big")
        async with free:
            await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.25:
                try:
                    async with asyncio.timeout(rng.random() * 0.005):
                        await ranks.agree(ticket, (votes[number],))
                except TimeoutError:
                    pass
            else:
                ranks.cast(ticket, (votes[number],))
        (results[number],) = await ranks.agree(ticket, (votes[number],))

    await asyncio.gather(*map(call, numbers))
    return {"votes": votes, "results": results}


async def stream(
    ranks: HubRanks, num_tickets: int | None = None, silent_from: int | None = None, late_s: float = 0.0
) -> dict[str, Any]:
    """Agree on one ticket after another until the group is lost or a line comes in; say when luck turns.

    Args:
        num_tickets: how many at most.
        silent_from: this rank votes on no ticket from this one on, but lives.
        late_s: it votes so late on the sixth.
    """
    stop = asyncio.Event()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    told = loop.create_task(reader.readline())
    told.add_done_callback(lambda task: stop.set())
    results: list[int] = []
    luck = None
    try:
        while not stop.is_set():
            number = len(results)
            if number == num_tickets:
                break
            if number == silent_from:
                say(event="silent")
                await stop.wait()
                break
            if number == 5:
                await asyncio.sleep(late_s)
            (result,) = await ranks.agree(number.to_bytes(16, "big"), (5 + ranks.rank,))
            results.append(result)
            if luck != bool(result):
                luck = bool(result)
                say(event="values" if luck else "zeros", number=number)
            await asyncio.sleep(0.002)
        return {"results": results, "error": None}
    except ConsensusError as error:
        return {"results": results, "error": str(error), "at_s": time.monotonic()}
    finally:
        told.cancel()
        transport.close()


async def main(rank: int, size: int, folder: Path, work: str, options: dict[str, Any]) -> None:
    """Join, work, report and leave."""
    config = CacheConfig(tp_rank=rank, tp_size=size, **options.pop("config"))
    ranks = await HubRanks.join(config, Folder(folder))
    say(event="joined")
    report = await {"schedule": schedule, "stream": stream}[work](ranks, **options)
    say(event="report", **report)
    if work == "schedule":
        sys.stdin.readline()  # until all have reported: whoever leaves votes zeros
    await ranks.aclose()


if __name__ == "__main__":
    assert "torch" not in sys.modules
    _, rank, size, folder, work, options = sys.argv
    asyncio.run(main(int(rank), int(size), Path(folder), work, json.loads(options)))
