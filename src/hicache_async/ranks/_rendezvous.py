"""Where rank 0 tells the others how to reach it: a store of torch.distributed, whose calls block."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from .._threads import DaemonThreads
from ..errors import ConfigError, ConsensusError

T = TypeVar("T")

WITHDRAWN = "withdrawn"
"""What stands where an address was, once the group is complete or has failed."""


class Rendezvous(Protocol):
    """A ``torch.distributed.Store``, or whatever keeps strings for all ranks as it does."""

    def set(self, key: str, value: str, /) -> object:
        """Keep ``value`` under ``key``, in place of what was there."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return what is kept under ``key``, as bytes; may block until something is, and may raise."""
        ...


class Announcement(msgspec.Struct, frozen=True):
    """Where rank 0 listens, what proves that one belongs to the group, and how large that is."""

    host: str
    port: int
    secret: bytes
    size: int


class RendezvousError(ConsensusError):
    """The rendezvous raised, or holds nothing that can be used."""


class Board:
    """The place of one group in a rendezvous.

    Ownership: whoever makes it closes it; a call that still blocks is left behind in a daemon thread.
    """

    def __init__(self, rendezvous: Rendezvous, name: str) -> None:
        self._rendezvous = rendezvous
        self._key = f"{name}/rank0"
        self._threads = DaemonThreads(1, "hicache-ranks")
        self._loop = asyncio.get_running_loop()

    async def announce(self, announcement: Announcement) -> None:
        """Put an announcement there, in place of any other."""
        await self._call(self._rendezvous.set, self._key, msgspec.json.encode(announcement).decode())

    async def withdraw(self, announcement: Announcement) -> None:
        """Take one's announcement away again, and the secret with it.

        Raises: ConsensusError: another one is there.
        """
        if await self.read() != announcement:
            raise ConsensusError(
                f"another rank 0 has announced itself under {self._key!r} meanwhile: give each group a name "
                "of its own, and a restarted one another name for as long as processes of the old one live"
            )
        await self._call(self._rendezvous.set, self._key, WITHDRAWN)

    async def read(self) -> Announcement:
        """Return what is announced, or raise RendezvousError."""
        value = await self._call(self._rendezvous.get, self._key)
        try:
            return msgspec.json.decode(value, type=Announcement)
        except (msgspec.MsgspecError, TypeError):
            raise RendezvousError(f"no rank 0 has announced itself under {self._key!r}") from None

    def close(self) -> None:
        """Make no more calls."""
        self._threads.shutdown()

    async def address(self, host: str) -> str:
        """Return the one address that ``host`` stands for.

        Raises: ConfigError: see :func:`checked_address`.
        """
        return await self._loop.run_in_executor(self._threads, checked_address, host)

    async def _call(self, call: Callable[..., T], *args: str) -> T:
        try:
            return await self._loop.run_in_executor(self._threads, call, *args)
        except Exception as error:  # whatever a store of the user's raises
            raise RendezvousError(f"the rendezvous failed at {self._key!r}: {error}") from error


_ADVICE = (
    "give 127.0.0.1 for ranks on one machine, or the address of the one interface that links the machines"
)


def checked_address(host: str) -> str:
    """Return the one address that a name stands for; asks the resolver, so not on the loop.

    Raises: ConfigError: it names all interfaces, several machines, or nothing.
    """
    if not isinstance(host, str) or host in ("", "*"):
        raise _not_one_interface(host)
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} cannot be resolved: {error}; {_ADVICE}") from None
    address = str(found[0][4][0])
    number = ipaddress.ip_address(address.partition("%")[0])
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    number = mapped or number
    if number.is_unspecified or number.is_multicast or str(number) == "255.255.255.255":
        raise _not_one_interface(host)
    return address


def _not_one_interface(host: object) -> ConfigError:
    return ConfigError(f"host is {host!r}, which is no address of one interface; {_ADVICE}")
