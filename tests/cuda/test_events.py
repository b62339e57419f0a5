"""The polling bridge: every wait ends when its event has completed, and nobody asks when nothing waits."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from hicache_async.cuda._waiting import FEW_WAITERS
from hicache_async.cuda.events import NUM_TURNS, EventBridge
from hicache_async.errors import ConfigError, WrongLoopError

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]


class Event:
    """An event that the test completes, or fails."""

    def __init__(self) -> None:
        self.has_completed = False
        self.num_queries = 0
        self.error: Exception | None = None

    def query(self) -> bool:
        self.num_queries += 1
        if self.error is not None:
            raise self.error
        return self.has_completed


@pytest.fixture(params=[False, True], ids=["loop", "thread"])
def bridge(request: pytest.FixtureRequest) -> Iterator[EventBridge]:
    bridge = EventBridge(in_thread=request.param)
    yield bridge
    bridge.close()


@pytest.fixture
def loop_bridge() -> Iterator[EventBridge]:
    bridge = EventBridge()
    yield bridge
    bridge.close()


async def start(
    bridge: EventBridge, *events: Event, stream: object = None, sequence: int = 0
) -> list[asyncio.Task[None]]:
    """Wait for events, each in a task that has begun to."""
    waits = [asyncio.create_task(bridge.wait(event, stream=stream, sequence=sequence)) for event in events]
    await asyncio.sleep(0)
    return waits


async def until_idle(bridge: EventBridge) -> None:
    while bridge.is_polling:  # noqa: ASYNC110 - the thread of a bridge tells nobody that it rests
        await asyncio.sleep(0.001)


async def test_a_completed_event_is_not_waited_for(bridge: EventBridge) -> None:
    """No task switch, no timer."""
    event = Event()
    event.has_completed = True
    wait = bridge.wait(event)
    with pytest.raises(StopIteration):
        wait.send(None)
    assert (event.num_queries, bridge.num_waiting, bridge.is_polling) == (1, 0, False)


async def test_a_wait_ends_with_its_event(bridge: EventBridge) -> None:
    """Not before; and with the last one nobody asks any more."""
    events = [Event() for _ in range(5)]
    waits = [
        wait for number, event in enumerate(events) for wait in await start(bridge, event, stream=number)
    ]
    for index in random.Random(1).sample(range(5), 5):
        await asyncio.sleep(0.003)
        assert not waits[index].done()
        assert bridge.is_polling
        events[index].has_completed = True
        await waits[index]
    await until_idle(bridge)
    asked = [event.num_queries for event in events]
    await asyncio.sleep(0.005)
    assert asked == [event.num_queries for event in events]
    assert bridge.num_waiting == 0


async def test_only_the_head_of_a_stream_is_asked(bridge: EventBridge) -> None:
    """What lies behind it is asked for the first time when it has completed."""
    events = [Event() for _ in range(4)]
    waits = await start(bridge, *events)
    await asyncio.sleep(0.01)
    assert [event.num_queries for event in events[1:]] == [0, 0, 0]
    for event in events[:3]:
        event.has_completed = True
    await asyncio.gather(*waits[:3])
    await asyncio.sleep(0.005)
    assert events[1].num_queries == events[2].num_queries == 1
    assert events[3].num_queries > 1
    assert not waits[3].done()


async def test_one_stream_does_not_hold_another(bridge: EventBridge) -> None:
    """A long kernel on one stream delays no wait for another one."""
    long, short = Event(), Event()
    waits = [*await start(bridge, long, stream="compute"), *await start(bridge, short, stream="copy")]
    short.has_completed = True
    await asyncio.wait_for(waits[1], 10)
    assert not waits[0].done()


@pytest.mark.parametrize("seed", range(5))
async def test_waits_may_come_in_any_order(loop_bridge: EventBridge, seed: int) -> None:
    """Waits that begin out of the stream's order end in it."""
    rng = random.Random(seed)
    events = [Event() for _ in range(20)]
    ended: list[int] = []

    async def wait(sequence: int) -> None:
        await loop_bridge.wait(events[sequence], stream="s", sequence=sequence)
        ended.append(sequence)

    waits = [asyncio.create_task(wait(sequence)) for sequence in rng.sample(range(20), 20)]
    await asyncio.sleep(0)
    for event in events:
        event.has_completed = True
        while ended[-1:] != [events.index(event)]:  # noqa: ASYNC110 - the next one completes after this one's end
            await asyncio.sleep(0)
    await asyncio.gather(*waits)
    assert ended == list(range(20))


async def test_an_event_that_cannot_be_asked_ends_its_own_wait(bridge: EventBridge) -> None:
    """The error reaches who waits for it; those behind it go on."""
    first, second = Event(), Event()
    waits = await start(bridge, first, second)
    first.error = RuntimeError("an illegal address")
    with pytest.raises(RuntimeError, match="illegal address"):
        await waits[0]
    second.has_completed = True
    await waits[1]


async def test_an_error_at_once_is_raised_at_once(bridge: EventBridge) -> None:
    """Also where nothing had to be waited for."""
    event = Event()
    event.error = RuntimeError("an illegal address")
    with pytest.raises(RuntimeError, match="illegal address"):
        await bridge.wait(event)
    assert bridge.num_waiting == 0


async def test_cancelling_the_last_wait_ends_the_asking(bridge: EventBridge) -> None:
    """A wait that was cancelled keeps neither timer nor event."""
    event = Event()
    (wait,) = await start(bridge, event)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert bridge.num_waiting == 0
    await until_idle(bridge)
    asked, gone = event.num_queries, weakref.ref(event)
    await asyncio.sleep(0.005)
    assert event.num_queries == asked
    del event, wait
    gc.collect()
    assert gone() is None


async def test_cancelled_waits_do_not_hold_those_behind_them(bridge: EventBridge) -> None:
    """Cancelled at the head, in the middle and at the end of a queue."""
    events = [Event() for _ in range(5)]
    waits = await start(bridge, *events)
    for index in (0, 2, 4):
        waits[index].cancel()
    for index in (1, 3):
        events[index].has_completed = True
        await asyncio.wait_for(waits[index], 10)
    await asyncio.gather(*waits, return_exceptions=True)
    await until_idle(bridge)
    assert [events[index].num_queries for index in (2, 4)] == [0, 0]


async def test_waits_that_gave_up_do_not_pile_up(loop_bridge: EventBridge) -> None:
    """Behind an event that hangs, however many come and go, few are kept."""
    hung = Event()
    (wait,) = await start(loop_bridge, hung)
    gone = []
    for _ in range(500):
        event = Event()
        gone.append(weakref.ref(event))
        (given_up,) = await start(loop_bridge, event)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        del event, given_up
    gc.collect()
    assert sum(each() is not None for each in gone) <= FEW_WAITERS + 2
    hung.has_completed = True
    await wait
    assert not loop_bridge.is_polling


async def test_a_wait_cancelled_as_its_event_completes(bridge: EventBridge) -> None:
    """Whichever comes first, the counts close."""
    for _ in range(200):
        event = Event()
        (wait,) = await start(bridge, event)
        event.has_completed = True
        if random.random() < 0.5:
            await asyncio.sleep(0)
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
    await until_idle(bridge)
    assert bridge.num_waiting == 0


async def test_a_thousand_waits_are_one_timer() -> None:
    """The loop is woken once in a millisecond, not once for each; never by a timer below that."""
    loop = asyncio.get_running_loop()
    bridge, delays = EventBridge(), []
    events = [Event() for _ in range(1000)]

    class Loop:
        """The running loop, as a poller sees it."""

        def __getattr__(self, name: str) -> object:
            return getattr(loop, name)

        def call_later(self, delay_s: float, *rest: object) -> asyncio.TimerHandle:
            delays.append(delay_s)
            return loop.call_later(delay_s, *rest)  # type: ignore[arg-type]

    await bridge.wait(done())
    bridge._poller.loop = Loop()  # type: ignore[union-attr, assignment]
    waits = await start(bridge, *events)
    began = time.monotonic()
    await asyncio.sleep(0.05)
    elapsed_ms = (time.monotonic() - began) * 1000
    assert 1 <= len(delays) <= 2 * elapsed_ms + 2  # uvloop counts in whole milliseconds
    assert min(delays) >= 0.001
    assert bridge.num_queries <= len(delays) + NUM_TURNS + 1
    for event in events:
        event.has_completed = True
    await asyncio.gather(*waits)
    assert bridge.num_queries <= len(delays) + NUM_TURNS + 1 + 2 * len(events)
    assert not bridge.is_polling
    bridge.close()


def done() -> Event:
    event = Event()
    event.has_completed = True
    return event


async def test_events_that_complete_in_threads(bridge: EventBridge) -> None:
    """Hundreds of waits on several streams, whose events other threads complete in order: all end."""
    streams = [[Event() for _ in range(50)] for _ in range(4)]
    waits = [
        asyncio.create_task(bridge.wait(event, stream=number, sequence=sequence))
        for number, stream in enumerate(streams)
        for sequence, event in enumerate(stream)
    ]

    def complete(stream: list[Event]) -> None:
        for event in stream:
            event.has_completed = True
            time.sleep(random.random() * 5e-4)

    threads = [threading.Thread(target=complete, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    await asyncio.gather(*waits)
    for thread in threads:
        thread.join()
    await until_idle(bridge)


async def test_waits_go_on_after_a_close(bridge: EventBridge) -> None:
    """What an event stands for may still be going on: to end its waits would be a lie. No thread is left."""
    events = Event(), Event()
    waits = await start(bridge, *events)
    bridge.close()
    bridge.close()
    assert not any(wait.done() for wait in waits) and bridge.num_waiting == 2
    later = asyncio.create_task(bridge.wait(third := Event(), stream="other"))
    for event in (*events, third):
        event.has_completed = True
    await asyncio.gather(*waits, later)
    await until_idle(bridge)
    for thread in threading.enumerate():
        if thread.name.startswith("hicache-events"):
            thread.join(10)
            assert not thread.is_alive()


async def test_another_loop_is_refused(bridge: EventBridge) -> None:
    """A bridge belongs to the loop of its first wait."""
    await bridge.wait(done())
    with pytest.raises(WrongLoopError, match="another loop"):
        await asyncio.to_thread(asyncio.run, bridge.wait(Event()))


@pytest.mark.parametrize("timer_s", [0, 0.0005])
async def test_a_timer_that_spins_is_refused(timer_s: float) -> None:
    """Below a millisecond uvloop does not sleep at all."""
    with pytest.raises(ConfigError, match="in_thread"):
        EventBridge(timer_s=timer_s)
