"""KV events over ZeroMQ: a router that hears them knows what the cache holds, whenever it comes."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator, MutableMapping
from pathlib import Path
from subprocess import run
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import structlog
import zmq
from structlog.testing import capture_logs

from hicache_async import ClosedError, ConfigError, Tier
from hicache_async.core.hashing import chain_seed
from hicache_async.integrations import _event_sockets, zmq_events
from hicache_async.integrations._event_sockets import EventSockets
from hicache_async.integrations._replay import ReplayBuffer
from hicache_async.integrations.zmq_events import KVEventPublisher
from hicache_async.stores.memory import MemoryStore
from tests.event_mirror import held_by
from tests.flows.rig import Opener, Rig, page_hashes, turns
from tests.integrations.subscriber import AllBlocksCleared, BlockStored, Subscriber, block_hash, public

LOOPBACK = "tcp://127.0.0.1:*"


def has_ipv6_loopback() -> bool:
    """Whether this machine has an IPv6 address of its own."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """Collect what is logged."""
    with capture_logs() as entries:
        yield entries
    structlog.reset_defaults()


@pytest_asyncio.fixture
async def open_cache() -> AsyncIterator[Opener]:
    """Open caches; at the end every one is audited and closed."""
    opener = Opener()
    yield opener
    await opener.finish()


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    """A router that is not connected yet."""
    with Subscriber() as made:
        yield made


async def evicted(rig: Rig) -> None:
    """Evict all of the device in one step, node by node."""
    await rig.cache.admin.flush()
    rig.ctx.room.plan_room(Tier.DEVICE, rig.ctx.device_pool.capacity)


# What a router knows


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_a_router_knows_what_the_cache_holds(open_cache: Opener, subscriber: Subscriber) -> None:
    """Whatever happens to the cache, its router believes what the tree has, in both tiers."""
    rig = await open_cache(device_pages=12, host_pages=16, store=MemoryStore())
    await rig.serve("abcd")
    async with KVEventPublisher(rig.cache, dp_rank=2, topic="kv") as publisher:
        await subscriber.connect(publisher)
        await subscriber.until(held_by(rig))
        for letters in ("abxy", "mnopqr", "ab", "stuvwx", "abcd"):
            await rig.serve(letters)
            await subscriber.until(held_by(rig))
        await evicted(rig)
        await subscriber.until(held_by(rig))
        root = rig.ctx.tree.roots[b""]
        rig.ctx.tree.detach(next(node for node in root.subtree() if node.parent is not None))
        await subscriber.until(held_by(rig))
    assert {batch.data_parallel_rank for batch in subscriber.batches} == {2}
    assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[-1] + 1))


@pytest.mark.asyncio
async def test_a_late_router_learns_all_from_a_replay(open_cache: Opener, subscriber: Subscriber) -> None:
    """Asked from number 0 on, the publisher sends again all that it has sent, with topic and end marker."""
    rig = await open_cache()
    async with KVEventPublisher(rig.cache, replay_endpoint=LOOPBACK, topic="kv") as publisher:
        for letters in ("ab", "abcd", "xy"):
            await rig.serve(letters)
            await turns(3)
        answers = await subscriber.replay(publisher.replay_endpoint, 0)
        assert {topic for topic, _, _ in answers} == {b"kv"}
        for _, number, payload in answers:
            subscriber.take(number, payload)
        await subscriber.until(held_by(rig))
        assert subscriber.numbers == list(range(len(answers)))
        assert await subscriber.replay(publisher.replay_endpoint, len(answers)) == []


@pytest.mark.asyncio
async def test_a_router_asks_for_what_it_has_missed(open_cache: Opener, subscriber: Subscriber) -> None:
    """A replay begins where it is told to, with the very messages that were sent live."""
    rig = await open_cache()
    async with KVEventPublisher(rig.cache, replay_endpoint=LOOPBACK) as publisher:
        await subscriber.connect(publisher)
        await subscriber.until(held_by(rig))
        live: list[list[bytes]] = []
        for letters in ("ab", "cd", "ef"):
            await rig.serve(letters)
            live.append(await subscriber.receive())
        first = int.from_bytes(live[1][1], "big")
        assert await subscriber.replay(publisher.replay_endpoint, first) == live[1:]


@pytest.mark.asyncio
async def test_what_cannot_be_replayed_any_more_is_told_anew(
    open_cache: Opener, subscriber: Subscriber
) -> None:
    """A router that asks for messages that are gone hears what is held now, like everybody else."""
    rig = await open_cache()
    async with KVEventPublisher(rig.cache, replay_endpoint=LOOPBACK, buffer_steps=2) as publisher:
        await subscriber.connect(publisher)
        for letters in ("ab", "cd", "ef"):
            await rig.serve(letters)
            await turns(3)
        await subscriber.until(held_by(rig))
        subscriber.held.clear()
        num_heard = len(subscriber.batches)
        assert len(await subscriber.replay(publisher.replay_endpoint, 0)) == 2
        await subscriber.until(held_by(rig))
        (told_anew,) = subscriber.batches[num_heard:]
        assert told_anew.events[0] == AllBlocksCleared()
        num_answers = len(await subscriber.replay(publisher.replay_endpoint, 0))
        await turns()
        assert (num_answers, await subscriber.live.poll(0)) == (2, 0)


@pytest.mark.asyncio
async def test_an_earlier_form_for_earlier_routers(open_cache: Opener, subscriber: Subscriber) -> None:
    """schema="array" sends positional events, and replays without the topic."""
    rig = await open_cache()
    await rig.serve("a")
    async with KVEventPublisher(rig.cache, schema="array", replay_endpoint=LOOPBACK) as publisher:
        await turns(3)
        ((number, payload),) = await subscriber.replay(publisher.replay_endpoint, 0)
    assert number == bytes(8)
    _, (cleared, on_device, on_host), rank = msgspec.msgpack.decode(payload)
    assert (cleared, on_device[0], on_host[6], rank) == (["AllBlocksCleared"], "BlockStored", "CPU_PINNED", 0)


# What a message holds


@pytest.mark.asyncio
async def test_pages_that_continue_share_an_event(open_cache: Opener, subscriber: Subscriber) -> None:
    """Nodes along one prompt become one event, and what is told in one turn of the loop one message."""
    rig = await open_cache()
    for letters in ("ab", "abcd", "abcdef"):
        await rig.serve(letters)
    async with KVEventPublisher(rig.cache, replay_endpoint=LOOPBACK) as publisher:
        await turns(3)
        ((_, number, payload),) = await subscriber.replay(publisher.replay_endpoint, 0)
    subscriber.take(number, payload)
    blocks = [block_hash(page_hash) for page_hash in page_hashes("abcdef")]
    cleared, on_device, on_host = subscriber.events()
    assert cleared == AllBlocksCleared()
    assert (on_device.medium, on_device.block_hashes) == ("GPU", blocks)
    assert (on_host.medium, on_host.block_hashes) == ("CPU_PINNED", blocks)


@pytest.mark.asyncio
async def test_much_at_once_becomes_several_messages(
    open_cache: Opener, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is bounded in tokens, so that the loop is never held up for long."""
    monkeypatch.setattr(zmq_events, "MAX_BATCH_TOKENS", 8)
    rig = await open_cache()
    await rig.serve("abcdefg")
    async with KVEventPublisher(rig.cache, replay_endpoint=LOOPBACK) as publisher:
        await turns()
        for _, number, payload in await subscriber.replay(publisher.replay_endpoint, 0):
            subscriber.take(number, payload)
        stored = [event for event in subscriber.events() if isinstance(event, BlockStored)]
        assert max(len(event.token_ids) for event in stored) == 8
        await subscriber.until(held_by(rig))


@pytest.mark.asyncio
async def test_a_gap_of_its_own_is_told_as_a_new_beginning(
    open_cache: Opener, subscriber: Subscriber
) -> None:
    """A publisher that was kept from reading for too long clears everything and tells what is held."""
    rig = await open_cache()
    async with KVEventPublisher(rig.cache) as publisher:
        await subscriber.connect(publisher)
        for letters in ("ab", "cd", "ef"):
            await rig.serve(letters)
        await subscriber.until(held_by(rig))
        num_heard = len(subscriber.batches)
        assert publisher._reader is not None
        publisher._reader._max_pending_pages = 3
        await evicted(rig)
        await subscriber.until(held_by(rig))
    assert subscriber.batches[num_heard].events[0] == AllBlocksCleared()


@pytest.mark.asyncio
async def test_what_one_salt_clears_leaves_the_others(open_cache: Opener, subscriber: Subscriber) -> None:
    """The schema can only clear everything: what other prompts hold is told again."""
    rig = await open_cache()
    await rig.serve("ab")
    with rig.lease("ab", salt=b"tenant") as lease:  # type: ignore[arg-type]
        await rig.run(lease)
    await rig.cache.admin.flush()
    async with KVEventPublisher(rig.cache) as publisher:
        await subscriber.connect(publisher)
        await subscriber.until(held_by(rig))
        rig.ctx.tree.detach(rig.ctx.tree.roots[chain_seed(b"tenant")])
        assert len(held_by(rig)) == 4
        await subscriber.until(held_by(rig))


# Beginnings and ends


@pytest.mark.asyncio
@pytest.mark.every_loop
async def test_the_last_word_clears_everything(open_cache: Opener, subscriber: Subscriber) -> None:
    """Who leaves says so, for nobody tells changes any more."""
    rig = await open_cache()
    await rig.serve("ab")
    async with KVEventPublisher(rig.cache) as publisher:
        await subscriber.connect(publisher)
        await subscriber.until(held_by(rig))
    await subscriber.until(set())
    assert rig.ctx.events.num_readers == 0
    assert subscriber.events()[-1] == AllBlocksCleared()


@pytest.mark.asyncio
async def test_closing_lets_routers_take_what_was_sent(
    subscriber: Subscriber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that are still on their way when the sockets are closed arrive."""
    monkeypatch.setattr(_event_sockets, "LINGER_MS", 20_000)
    subscriber.live.rcvhwm = 10_000
    sockets = EventSockets(
        f"ipc://{tmp_path}/events",
        None,
        topic=b"",
        replay_topic=True,
        buffer=ReplayBuffer(1, 1),
        high_water_mark=10_000,
        on_lost=lambda: None,
    )
    subscriber.live.connect(sockets.endpoint)
    while not await subscriber.live.poll(20):
        sockets.send(b"are you there", resets=False)
    for _ in range(5000):
        sockets.send(b"on its way" * 200, resets=False)
    sockets.send(b"last word", resets=False)
    await sockets.aclose()
    payload = b""
    while payload != b"last word":
        async with asyncio.timeout(20):
            _, _, payload = await subscriber.live.recv_multipart()


@pytest.mark.asyncio
async def test_a_closed_cache_holds_nothing(open_cache: Opener, subscriber: Subscriber) -> None:
    """When the cache is closed inside, routers hear it, and replays are still answered."""
    rig = await open_cache()
    await rig.serve("ab")
    async with KVEventPublisher(rig.cache, replay_endpoint=LOOPBACK) as publisher:
        await subscriber.connect(publisher)
        await subscriber.until(held_by(rig))
        await rig.cache.close()
        await subscriber.until(set())
        assert await subscriber.replay(publisher.replay_endpoint, 0)
        publisher.republish()
        await turns()
    with pytest.raises(ClosedError):
        async with KVEventPublisher(rig.cache):
            pass


@pytest.mark.asyncio
async def test_a_router_that_does_not_read_holds_nobody_up(
    open_cache: Opener, subscriber: Subscriber, tmp_path: Path
) -> None:
    """Beyond its high-water mark a subscriber misses messages, and gets them from a replay."""
    rig = await open_cache()
    subscriber.live.rcvhwm = 1
    async with KVEventPublisher(
        rig.cache,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=LOOPBACK,
        topic="large" * 1000,
        high_water_mark=1,
    ) as publisher:
        await subscriber.connect(publisher)
        for _ in range(300):
            publisher.republish()
            await turns(3)
        await rig.serve("ab")
        await turns(3)
        while await subscriber.live.poll(50):
            await subscriber.receive()
        num_live = len(subscriber.numbers)
        answers = await subscriber.replay(publisher.replay_endpoint, 0)
        assert num_live < 200 < 300 < len(answers)
        for _, number, payload in answers:
            subscriber.take(number, payload)
        assert subscriber.held == public(held_by(rig))


@pytest.mark.asyncio
async def test_sockets_of_the_file_system(open_cache: Opener, subscriber: Subscriber, tmp_path: Path) -> None:
    """Endpoints may be paths."""
    rig = await open_cache()
    await rig.serve("ab")
    async with KVEventPublisher(
        rig.cache, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replays"
    ) as publisher:
        await subscriber.connect(publisher)
        await subscriber.until(held_by(rig))
        assert await subscriber.replay(publisher.replay_endpoint, 0)


@pytest.mark.asyncio
@pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6 here")
async def test_ipv6(open_cache: Opener, subscriber: Subscriber) -> None:
    """An address in brackets is one of IPv6."""
    rig = await open_cache()
    await rig.serve("ab")
    subscriber.live.ipv6 = True
    async with KVEventPublisher(rig.cache, endpoint="tcp://[::1]:*") as publisher:
        await subscriber.connect(publisher)
        await subscriber.until(held_by(rig))


@pytest.mark.asyncio
async def test_nothing_but_loopback_is_bound_unasked(open_cache: Opener) -> None:
    """The default endpoint is a free port of this machine for this machine, and there are no replays."""
    rig = await open_cache()
    async with KVEventPublisher(rig.cache) as first, KVEventPublisher(rig.cache) as second:
        for publisher in (first, second):
            assert publisher.endpoint.startswith("tcp://127.0.0.1:")
            assert publisher.replay_endpoint is None
        assert first.endpoint != second.endpoint


@pytest.mark.asyncio
async def test_a_nonsense_request_is_not_answered(
    open_cache: Opener, subscriber: Subscriber, logs: list[MutableMapping[str, Any]]
) -> None:
    """Frames that are no request are logged, and the next one is served."""
    rig = await open_cache()
    async with KVEventPublisher(rig.cache, replay_endpoint=LOOPBACK) as publisher:
        subscriber.replays.connect(publisher.replay_endpoint)
        await subscriber.replays.send_multipart([b"", b"now"])
        await subscriber.replays.send_multipart([bytes(8)])
        await turns(3)
        assert await subscriber.replay(publisher.replay_endpoint, 0)
    refused = [entry["frame_nbytes"][1:] for entry in logs if entry["event"] == "events.replay_refused"]
    assert refused == [[0, 3], [8]]


@pytest.mark.asyncio
async def test_a_bug_of_the_publisher_is_not_the_caches(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch, logs: list[MutableMapping[str, Any]]
) -> None:
    """It is logged; the cache serves on, and leaving works."""
    rig = await open_cache()
    async with KVEventPublisher(rig.cache):
        await turns(3)
        monkeypatch.setattr(zmq_events, "parts_of", None)
        await rig.serve("ab")
        await turns(3)
        assert rig.ctx.events.num_readers == 1
    await rig.serve("abc")
    assert [entry["task"] for entry in logs if entry["event"] == "events.failed"] == [
        "hicache:events.publish"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": "json"}, "schema is 'json'"),
        ({"buffer_steps": 0}, "buffer_steps is 0"),
        ({"buffer_nbytes": 0}, "buffer_nbytes is 0"),
        ({"high_water_mark": -1}, "high_water_mark is -1"),
        ({"endpoint": "inproc://events"}, "endpoint is 'inproc://events'"),
        ({"endpoint": "tcp://127.0.0.1"}, "endpoint 'tcp://127.0.0.1' cannot be bound"),
        ({"replay_endpoint": "udp://127.0.0.1:1"}, "replay_endpoint is 'udp://127.0.0.1:1'"),
    ],
)
@pytest.mark.asyncio
async def test_options_that_cannot_work_are_refused(
    open_cache: Opener, options: dict[str, Any], message: str
) -> None:
    """The error names the option and its value; nothing is left behind."""
    rig = await open_cache()
    with pytest.raises(ConfigError) as refusal:
        async with KVEventPublisher(rig.cache, **options):
            pass
    assert str(refusal.value).startswith(message)
    del refusal
    assert rig.ctx.events.num_readers == 0


@pytest.mark.asyncio
async def test_an_endpoint_in_use_is_refused_and_none_is_left_bound(open_cache: Opener) -> None:
    """If the second endpoint cannot be bound, the first is free again."""
    rig = await open_cache()
    async with KVEventPublisher(rig.cache) as first:
        with zmq.Context() as context, context.socket(zmq.PUB) as probe:
            port = probe.bind_to_random_port("tcp://127.0.0.1")
        free = f"tcp://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match="replay_endpoint .* cannot be bound"):
            async with KVEventPublisher(rig.cache, endpoint=free, replay_endpoint=first.endpoint):
                pass
        async with KVEventPublisher(rig.cache, endpoint=free) as second:
            assert second.endpoint == free


@pytest.mark.asyncio
async def test_a_publisher_is_entered_once(open_cache: Opener) -> None:
    """Its sequence numbers begin once."""
    rig = await open_cache()
    async with KVEventPublisher(rig.cache) as publisher:
        pass
    with pytest.raises(ClosedError, match="make another one"):
        async with publisher:
            pass


@pytest.mark.asyncio
async def test_leaving_may_be_cancelled(open_cache: Opener) -> None:
    """A cancel while leaving does not wait for subscribers, and closes the sockets all the same."""
    rig = await open_cache()
    publisher = KVEventPublisher(rig.cache)

    async def publish() -> None:
        async with publisher:
            await asyncio.Event().wait()

    task = asyncio.create_task(publish())
    await turns(3)
    task.cancel()
    await turns(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns()
    assert publisher._sockets._publishing.closed


def test_without_pyzmq_the_error_says_what_to_install() -> None:
    """The import of the publisher alone needs pyzmq."""
    script = (
        "import sys; sys.modules['zmq'] = None\n"
        "import hicache_async\n"
        "from hicache_async import ConfigError, HiCache\n"
        "try:\n"
        "    import hicache_async.integrations.zmq_events\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'hicache-async[events]'" in done.stdout
