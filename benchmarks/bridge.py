"""What it costs to wait for events of a device, beside one timer of a millisecond for each wait.

The events complete by the clock: what is measured is the waiting, not a device.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import uvloop

from hicache_async.cuda.events import EventBridge

from .harness import Benchmark, Param, Record, counted

OUTSTANDING = (1, 100, 1000)
NUM_STREAMS = 2
MEAN_S = 0.005
"""Mean seconds from the wait to the completion."""
SLEEP_S = 0.001

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class ClockEvent:
    """Completes at a time of the clock."""

    __slots__ = ("completes_s",)

    def __init__(self, completes_s: float) -> None:
        self.completes_s = completes_s

    def query(self) -> bool:
        """Return whether the time has come."""
        return time.perf_counter() >= self.completes_s


@dataclass(frozen=True, slots=True)
class Costs:
    """What waiting has cost.

    Attributes:
        cpu_s: seconds of a core for each wait.
        late_s: median seconds from a completion to the end of its wait.
        worst_lag_s: how late the loop came to a timer at worst.
    """

    cpu_s: float
    late_s: float
    worst_lag_s: float


async def costs(bridge: EventBridge | None, num_outstanding: int, seconds: float) -> Costs:
    """Keep so many waits outstanding for some seconds, each for the next event of its stream.

    Args:
        bridge: through which they wait; None: each sleeps a millisecond between two queries.
    """
    rng = random.Random(1)
    end_s = time.perf_counter() + seconds
    lasts, sequences = [0.0] * NUM_STREAMS, [0] * NUM_STREAMS
    late_s: list[float] = []
    lags_s = [0.0]

    async def waits(stream: int) -> None:
        while (now := time.perf_counter()) < end_s:
            lasts[stream] = max(lasts[stream], now + rng.uniform(0.0002, 2 * MEAN_S))
            sequences[stream] += 1
            event = ClockEvent(lasts[stream])
            if bridge is None:
                while not event.query():  # noqa: ASYNC110 - the floor that is measured
                    await asyncio.sleep(SLEEP_S)
            else:
                await bridge.wait(event, stream=stream, sequence=sequences[stream])
            late_s.append(time.perf_counter() - event.completes_s)

    async def ticks() -> None:
        while (now := time.perf_counter()) < end_s:
            await asyncio.sleep(SLEEP_S)
            lags_s.append(time.perf_counter() - now - SLEEP_S)

    cpu_s = time.process_time()
    await asyncio.gather(ticks(), *(waits(index % NUM_STREAMS) for index in range(num_outstanding)))
    cpu_s = time.process_time() - cpu_s
    if bridge is not None:
        bridge.close()
    return Costs(cpu_s / max(1, len(late_s)), statistics.median(late_s or [0.0]), max(lags_s))


async def idle_looks(bridge: EventBridge, seconds: float) -> int:
    """Return how often an event is asked, or is about to be, while nothing waits any more."""
    event = ClockEvent(time.perf_counter() + 2 * SLEEP_S)
    await bridge.wait(event)
    asked = bridge.num_queries
    is_polling = bridge.is_polling and not await _comes_to_rest(bridge)
    await asyncio.sleep(seconds)
    return bridge.num_queries - asked + is_polling


async def _comes_to_rest(bridge: EventBridge) -> bool:
    await asyncio.sleep(10 * SLEEP_S)  # a thread sees a moment later that nothing waits
    return not bridge.is_polling


async def records(quick: bool) -> AsyncIterator[Record]:
    """Measure each number of outstanding waits on each loop; in threads, for loops of their own."""
    for loop in LOOPS:
        for num_outstanding in OUTSTANDING:
            for mode in ("loop", "thread"):
                for record in await asyncio.to_thread(_measure, loop, num_outstanding, mode, quick):
                    yield record
        for mode in ("loop", "thread"):
            yield await asyncio.to_thread(_measure_idle, loop, mode, quick)


def _measure(loop: str, num_outstanding: int, mode: str, quick: bool) -> list[Record]:
    seconds, rounds = (0.05, 1) if quick else (0.6, 5)

    def run(bridge: EventBridge | None, num_waits: int) -> Costs:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            return runner.run(costs(bridge, num_waits, seconds))

    ours, sleeps, idle = [], [], []
    for _ in range(rounds):
        ours.append(run(EventBridge(in_thread=mode == "thread"), num_outstanding))
        sleeps.append(run(None, num_outstanding))
        idle.append(run(None, 0).worst_lag_s)
    params = {"outstanding": num_outstanding, "loop": loop, "mode": mode}
    lag_s = statistics.median(each.worst_lag_s for each in ours) - statistics.median(idle)
    return [
        counted(
            f"bridge.{name}",
            dict(params),
            statistics.median(getattr(each, field) for each in ours) * 1e6,
            statistics.median(getattr(each, field) for each in sleeps) * 1e6,
            floor_name="a 1 ms sleep for each wait",
            unit="us",
            fields=fields,
        )
        for name, field, fields in (
            ("cpu", "cpu_s", {}),
            ("latency", "late_s", {"lag_over_baseline_ms": lag_s * 1000}),
        )
    ]


def _measure_idle(loop: str, mode: str, quick: bool) -> Record:
    seconds = 0.05 if quick else 1.0
    bridge = EventBridge(in_thread=mode == "thread")
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        num_looks = runner.run(idle_looks(bridge, seconds))
    bridge.close()
    floor = seconds / SLEEP_S
    params: dict[str, Param] = {"loop": loop, "mode": mode}
    return counted(
        "bridge.idle_timers", params, num_looks, floor, floor_name="a timer of 1 ms", unit="timers"
    )


BENCHMARKS = [Benchmark("bridge", records)]
