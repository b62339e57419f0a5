"""How a group comes to be: who is let in, what old addresses do, what strangers cannot do, and who is missed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from hicache_async.errors import ConfigError, ConsensusError
from hicache_async.ranks import _gathering
from hicache_async.ranks._connection import Connection, Conversation
from hicache_async.ranks._handshake import say_hello
from hicache_async.ranks._rendezvous import WITHDRAWN, Announcement, Rendezvous
from hicache_async.ranks.hub import HubRanks
from tests.ranks.groups import Group, Shelf, config_of, ticket_of

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

KEY = "hicache/rank0"


def join(rank: int, size: int, shelf: Rendezvous, **options: object) -> asyncio.Task[HubRanks]:
    """Start to join."""
    joining = HubRanks.join(config_of(rank, size), shelf, **options)  # type: ignore[arg-type]
    return asyncio.get_running_loop().create_task(joining)


async def announced(shelf: Shelf) -> Announcement:
    """Return what rank 0 announces, as soon as it does."""
    while True:
        value = shelf.values.get(KEY, b"")
        if value.startswith(b"{"):
            return msgspec.json.decode(value, type=Announcement)
        await asyncio.sleep(0.001)


async def agree_and_leave(*joining: asyncio.Task[HubRanks]) -> None:
    """Check that those who join make a group, and end it."""
    group = Group(await asyncio.gather(*joining))
    size = len(joining)
    assert await group.agree(1, *((rank + 3,) for rank in range(size))) == [(3,)] * size
    await group.close()


def dialled(announcement: Announcement) -> socket.socket:
    """Return a stranger's connection to rank 0."""
    return socket.create_connection((announcement.host, announcement.port), timeout=20)


async def hung_up(connection: socket.socket) -> None:
    """Return when rank 0 has ended a stranger's connection."""

    def read() -> None:
        try:
            while connection.recv(4096):
                pass
        except ConnectionError:
            pass

    await asyncio.to_thread(read)
    connection.close()


def one_store(make: Callable[[], dist.Store]) -> list[Rendezvous]:
    """Return a store that three ranks of one process share."""
    return [make()] * 3


def tcp_stores(prefix: str | None = None) -> list[Rendezvous]:
    """Return three clients of one server, as three processes have them."""
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [master, *(dist.TCPStore("127.0.0.1", master.port) for _ in range(2))]
    return [dist.PrefixStore(prefix, store) if prefix else store for store in stores]


@pytest.mark.parametrize("kind", ["tcp", "prefix", "file", "hash"])
async def test_any_store_of_torch_will_do(kind: str, tmp_path: Path) -> None:
    """Ranks meet through each, the others waiting there for rank 0."""
    stores = {
        "tcp": tcp_stores,
        "prefix": lambda: tcp_stores("engine 7"),
        "file": lambda: [dist.FileStore(str(tmp_path / "store"), 3) for _ in range(3)],
        "hash": lambda: one_store(dist.HashStore),
    }[kind]()
    joining = [join(rank, 3, stores[rank]) for rank in (2, 1)]
    await asyncio.sleep(0)
    await agree_and_leave(join(0, 3, stores[0]), *reversed(joining))


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "0", "0x0", "::ffff:0.0.0.0", "*", "224.0.0.1", "255.255.255.255", None]
)
async def test_only_one_interface_is_listened_on(host: str) -> None:
    """Whatever means every interface, or nothing, is refused with advice, before anything is announced."""
    shelf = Shelf()
    with pytest.raises(ConfigError, match="host .*give 127.0.0.1 for ranks on one machine, or the address"):
        await join(0, 2, shelf, host=host)
    assert shelf.values == {}


async def test_the_secret_does_not_outlive_the_joining() -> None:
    """Rank 0 listens on loopback and announces it; once all are in, the address, the secret and the port are gone."""
    shelf = Shelf()
    joining = [join(0, 2, shelf)]
    announcement = await announced(shelf)
    assert announcement.host == "127.0.0.1"
    assert len(announcement.secret) == 32
    joining.append(join(1, 2, shelf))
    group = Group(await asyncio.gather(*joining))
    assert shelf.values == {KEY: WITHDRAWN.encode()}
    with pytest.raises(ConnectionRefusedError):
        dialled(announcement)
    await group.close()


async def test_groups_of_other_names_do_not_meet() -> None:
    """Two groups form at once through one rendezvous."""
    shelf = Shelf()
    await asyncio.gather(
        agree_and_leave(*(join(rank, 2, shelf, name="blue") for rank in range(2))),
        agree_and_leave(*(join(rank, 3, shelf, name="green") for rank in range(3))),
    )


async def test_one_group_after_another_under_one_name() -> None:
    """A later group does not stumble over what an earlier one left, though its ranks come first."""
    shelf = Shelf()
    await agree_and_leave(*(join(rank, 2, shelf) for rank in range(2)))
    early = join(1, 2, shelf)
    await asyncio.sleep(0.01)
    await agree_and_leave(join(0, 2, shelf), early)


async def test_the_missing_are_named() -> None:
    """Rank 0 says who did not come, and those who came hear it from rank 0."""
    shelf = Shelf()
    joining = [join(0, 4, shelf, timeout_s=0.3), join(2, 4, shelf)]
    with pytest.raises(ConsensusError, match="ranks 1, 3 did not come within 0.3 s, of a group of 4"):
        await joining[0]
    with pytest.raises(ConsensusError, match="ranks 1, 3 did not come"):
        await joining[1]


@pytest.mark.parametrize("value", [WITHDRAWN, '{"host": 5}', ""])
async def test_a_rank_0_that_is_not_there_is_told_of(value: str) -> None:
    """The error says who waited, how long, and that nothing usable was found."""
    shelf = Shelf()
    shelf.set(KEY, value)
    with pytest.raises(
        ConsensusError, match="rank 1 could not join its group within 0.2 s: no rank 0 has announced"
    ):
        await join(1, 2, shelf, timeout_s=0.2)


async def test_a_rendezvous_that_blocks_is_left_alone() -> None:
    """A question that is never answered keeps nobody beyond the limit."""
    shelf = Shelf()
    with pytest.raises(
        ConsensusError, match="the rendezvous does not answer, or rank 0 has not announced itself"
    ):
        await join(1, 2, shelf, timeout_s=0.1)
    shelf.set(KEY, WITHDRAWN)  # lets the thread end that still asks


async def test_a_rendezvous_that_fails_is_told_of() -> None:
    """Rank 0 fails with it; another rank asks again until its time is over, and then says why."""

    class Broken(Shelf):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("store is down")

        def get(self, key: str) -> bytes:
            raise RuntimeError("store is down")

    for rank in range(2):
        with pytest.raises(ConsensusError, match="the rendezvous failed at 'hicache/rank0': store is down"):
            await join(rank, 2, Broken(), timeout_s=0.2)


async def old_port(answer: bytes | None) -> tuple[int, asyncio.Server | None]:
    """Return a port where nobody listens, or another program does that says ``answer``."""
    if answer is None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            return unused.getsockname()[1], None

    class Other(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.write(answer)  # type: ignore[attr-defined]

    server = await asyncio.get_running_loop().create_server(Other, "127.0.0.1", 0)
    return server.sockets[0].getsockname()[1], server


@pytest.mark.parametrize("answer", [None, b"", b"220 mail.example.org ESMTP ready".ljust(200)])
async def test_an_old_address_is_left_for_a_new_one(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody listens any more, or another program does, a rank looks again until rank 0 has come."""
    monkeypatch.setattr("hicache_async.ranks._search.HANDSHAKE_TIMEOUT_S", 0.1)
    shelf = Shelf()
    port, server = await old_port(answer)
    shelf.set(KEY, msgspec.json.encode(Announcement("127.0.0.1", port, bytes(32), 2)).decode())
    early = join(1, 2, shelf)
    await asyncio.sleep(0.05)
    await agree_and_leave(join(0, 2, shelf), early)
    if server:
        server.close()


async def test_a_rank_0_that_was_replaced_gives_up() -> None:
    """A later group that takes the name while an earlier one is still forming ends the earlier one, with advice."""
    shelf = Shelf()
    old = join(0, 2, shelf)
    announcement = await announced(shelf)
    replaced = shelf.values[KEY]
    shelf.set(KEY, msgspec.json.encode(Announcement("127.0.0.1", 1, bytes(32), 2)).decode())

    class Stale(Shelf):
        def get(self, key: str) -> bytes:
            return replaced

    late = join(1, 2, Stale(), timeout_s=5.0)
    with pytest.raises(ConsensusError, match="another rank 0 has announced itself .* a name of its own"):
        await old
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    with pytest.raises(ConnectionRefusedError):
        dialled(announcement)


async def test_a_wrong_secret_is_refused() -> None:
    """Who does not know the secret is no rank, whatever it calls itself, and nothing it says is counted."""
    shelf = Shelf()
    joining = join(0, 2, shelf)
    announcement = await announced(shelf)
    wrong = Shelf()
    forged = msgspec.structs.replace(announcement, secret=bytes(32))
    wrong.set(KEY, msgspec.json.encode(forged).decode())
    with pytest.raises(ConsensusError, match="rank 1 could not join .* ended the connection"):
        await join(1, 2, wrong, timeout_s=0.3)
    assert not joining.done()
    await agree_and_leave(joining, join(1, 2, shelf))


async def test_a_vote_before_the_handshake_is_no_vote() -> None:
    """Frames of somebody who has proved nothing end the connection, and reach no ballot."""
    shelf = Shelf()
    joining = join(0, 2, shelf)
    stranger = dialled(await announced(shelf))
    stranger.sendall((b"\x01" + ticket_of(1) + b"\x01" + bytes(8)) * 20)
    await hung_up(stranger)
    await agree_and_leave(joining, join(1, 2, shelf))


@asynccontextmanager
async def strangers(
    announcement: Announcement, count: int, says: bytes
) -> AsyncIterator[list[socket.socket]]:
    """Connect ``count`` strangers that say something and stay."""
    connections = [await asyncio.to_thread(dialled, announcement) for _ in range(count)]
    for connection in connections:
        try:
            connection.setblocking(False)
            connection.send(says)
        except OSError:
            pass  # it was hung up on already
    yield connections
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(
    "says", [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 200_000], ids=["nothing", "little", "much"]
)
async def test_strangers_disturb_nobody(says: bytes) -> None:
    """More of them than there are places, silent or loud, keep no rank from joining; then all are hung up on."""
    shelf = Shelf()
    joining = [join(0, 3, shelf)]
    announcement = await announced(shelf)
    async with strangers(announcement, _gathering.MAX_STRANGERS + 20, says) as connections:
        joining += [join(rank, 3, shelf) for rank in (1, 2)]
        await agree_and_leave(*joining)
        for connection in connections:
            connection.setblocking(True)
            await hung_up(connection)


async def test_strangers_have_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many takes the place of the one that has been silent for longest, while the group still waits."""
    monkeypatch.setattr(_gathering, "MAX_STRANGERS", 3)
    shelf = Shelf()
    joining = join(0, 2, shelf)
    async with strangers(await announced(shelf), 5, b"") as connections:
        for connection in connections[:2]:
            connection.setblocking(True)
            await hung_up(connection)
        for connection in connections[2:]:
            assert connection.recv(100)  # the challenge, and no end behind it
            with pytest.raises(BlockingIOError):
                connection.recv(100)
        assert not joining.done()
        await agree_and_leave(joining, join(1, 2, shelf))


async def test_a_rank_that_speaks_before_the_group_exists_is_cut_off() -> None:
    """Its place is free again, and nothing that it said is kept for later."""
    shelf = Shelf()
    joining = join(0, 3, shelf)
    announcement = await announced(shelf)

    def hasty(connection: Connection) -> Conversation:
        yield from say_hello(connection.write, announcement.secret, 1, 3)
        connection.write(bytes(5))

    loop = asyncio.get_running_loop()
    connection = Connection(loop, lambda link: link.begin(hasty(link), lambda cause: None))
    await loop.create_connection(lambda: connection, announcement.host, announcement.port)
    await connection.closed
    await agree_and_leave(joining, *(join(rank, 3, shelf) for rank in (1, 2)))


async def test_a_silent_stranger_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has not proved itself in time loses its place, while the group still waits."""
    monkeypatch.setattr(_gathering, "HANDSHAKE_TIMEOUT_S", 0.05)
    shelf = Shelf()
    joining = join(0, 2, shelf)
    await hung_up(dialled(await announced(shelf)))
    assert not joining.done()
    await agree_and_leave(joining, join(1, 2, shelf))


async def test_a_rank_that_is_there_twice() -> None:
    """The second is refused and told why; the group forms with the first."""
    shelf = Shelf()
    joining = [join(0, 3, shelf), join(1, 3, shelf)]
    await announced(shelf)
    with pytest.raises(ConsensusError, match="another process has joined as rank 1"):
        await join(1, 3, shelf, timeout_s=1.5)
    await agree_and_leave(*joining, join(2, 3, shelf))


async def test_a_rank_of_another_size_is_refused() -> None:
    """A group of two has no rank of a group of three, and both sides' errors say so."""
    shelf = Shelf()
    joining = join(0, 2, shelf)
    with pytest.raises(ConsensusError, match="there is no rank 1 of 3 in the group of rank 0"):
        await join(1, 3, shelf, timeout_s=0.3)
    await agree_and_leave(joining, join(1, 2, shelf))


async def test_a_rank_that_dies_while_joining_may_come_again() -> None:
    """Rank 0 waits for its successor."""
    shelf = Shelf()
    joining = [join(0, 3, shelf), join(1, 3, shelf)]
    await announced(shelf)
    await asyncio.sleep(0.05)
    joining[1].cancel()
    await asyncio.gather(joining[1], return_exceptions=True)
    await agree_and_leave(joining[0], join(1, 3, shelf), join(2, 3, shelf))


@pytest.mark.parametrize("rank", [0, 1])
async def test_joining_can_be_cancelled_at_any_moment(rank: int) -> None:
    """Whenever it is cancelled nothing is left open, and the group forms without a trace of it."""
    for number in range(0, 40, 3):
        shelf = Shelf()
        joining = {each: join(each, 2, shelf) for each in range(2) if each == rank or number % 2}
        for _ in range(number):
            await asyncio.sleep(0.0005)
        joining[rank].cancel()
        (ended,) = await asyncio.gather(joining[rank], return_exceptions=True)
        if isinstance(ended, HubRanks):
            await ended.aclose()
        for task in joining.values():
            task.cancel()
            (other,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(other, HubRanks):
                await other.aclose()
        shelf.set(KEY, WITHDRAWN)
        await agree_and_leave(*(join(each, 2, shelf) for each in range(2)))
