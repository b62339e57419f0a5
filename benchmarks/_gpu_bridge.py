"""The part of gpu_check that measures how late the end of a kernel is noticed, and what looking for it costs."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np

from hicache_async.cuda import EventBridge
from hicache_async.cuda.runtime import Stream

from ._gpu import Gpu
from ._gpu_rows import Row, Sizes


async def bridge(gpu: Gpu, sizes: Sizes) -> AsyncIterator[Row]:
    """From the end of a kernel to that of its wait, and what waiting costs; beside a sleep of 1 ms for each."""
    for num_waiting in (1, 100):
        for mode in ("loop", "thread", "sleep"):
            bridge = None if mode == "sleep" else EventBridge(in_thread=mode == "thread")
            try:
                late_s, _, _ = await _watch(gpu, bridge, num_waiting, sizes.bridge_s, observes=True)
                _, cpu_s, num_waits = await _watch(gpu, bridge, num_waiting, sizes.bridge_s, observes=False)
            finally:
                if bridge is not None:
                    bridge.close()
            figures = {
                "late_us": statistics.median(late_s) * 1e6,
                "late_p99_us": float(np.percentile(late_s, 99)) * 1e6,
                "cpu_us_per_wait": cpu_s / num_waits * 1e6,
            }
            yield Row("bridge.wait", {"waiting": num_waiting, "mode": mode}, figures)


async def _watch(
    gpu: Gpu, bridge: EventBridge | None, num_waiting: int, seconds: float, *, observes: bool
) -> tuple[list[float], float, int]:
    """Wait for kernels, so many at once, for some seconds.

    Args:
        bridge: through which; None: each wait sleeps a millisecond between two looks.
        observes: whether a thread looks when they really end, which costs a core.
    Returns: how late each wait ended, where that was observed; seconds of a core; the number of waits.
    """
    stream, num_waits, cpu_s = gpu.runtime.new_stream(), 0, 0.0
    late_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while not num_waits or time.perf_counter() < end_s:
        events = []
        for _ in range(num_waiting):
            gpu.stay_busy(stream, max(0.003 / num_waiting, 1e-4))
            events.append(gpu.runtime.record(stream))
        ended_s, waited_s = [0.0] * num_waiting, [0.0] * num_waiting

        def observe(events: Sequence[object] = events, ended_s: list[float] = ended_s) -> None:
            for index, event in enumerate(events):
                gpu.wait(event)
                ended_s[index] = time.perf_counter()

        async def wait(
            index: int, sequence: int, events: list[object] = events, waited_s: list[float] = waited_s
        ) -> None:
            await _passed(bridge, stream, sequence, events[index])
            waited_s[index] = time.perf_counter()

        observer = threading.Thread(target=observe, daemon=True)
        if observes:
            observer.start()
        start_s = time.process_time()
        await asyncio.gather(*(wait(index, num_waits + index) for index in range(num_waiting)))
        cpu_s += time.process_time() - start_s
        num_waits += num_waiting
        if observes:
            observer.join()
            late_s += [max(0.0, late - end) for late, end in zip(waited_s, ended_s, strict=True)]
    return late_s, cpu_s, num_waits


async def _passed(bridge: EventBridge | None, stream: Stream, sequence: int, event: object) -> None:
    if bridge is not None:
        await bridge.wait(event, stream=stream, sequence=sequence)  # type: ignore[arg-type]
        return
    while not event.query():  # type: ignore[attr-defined]  # noqa: ASYNC110 - the floor that is measured
        await asyncio.sleep(0.001)


__all__ = ["bridge"]
