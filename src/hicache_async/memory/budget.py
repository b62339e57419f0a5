"""How many host pages a cache gets, and whether there is memory for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from .._log import logger
from ..config import CacheConfig, WritePolicy
from ..errors import ConfigError
from .host_memory import MemoryLimit, read_memory_limits

_current: ContextVar[HostMemoryBudget | None] = ContextVar("host_memory_budget", default=None)


@contextmanager
def host_memory_budget(root: Path = Path("/")) -> Iterator[None]:
    """Let all caches that are opened inside share one look at the memory that is free.

    Pages of a pool count as used when they are first written, so caches that open side by side, each
    looking for itself, would take the same memory twice. Leave it when they are open::

        with host_memory_budget():
            target = await stack.enter_async_context(HiCache.open(config, kv=target_kv))
            draft = await stack.enter_async_context(HiCache.open(config, kv=draft_kv))

    Tasks, and threads of ``asyncio.to_thread``, that are started inside share it too. Inside another
    one it is that one.

    Args:
        root: where ``proc`` and ``sys`` are; tests bring their own.
    Ownership: a cache gives back what it booked when it fails to open and when it closes.
    """
    if _current.get() is not None:
        yield
        return
    token = _current.set(HostMemoryBudget(read_memory_limits(root)))
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class HostBooking:
    """The memory of one host pool, booked against what was free.

    Attributes:
        num_pages, nbytes: how large the pool is.
        rank: tp, pp and cp rank it is for.
        nbytes_on_host: what it takes together with those of the same size on the host's other ranks.
    """

    num_pages: int
    nbytes: int
    rank: tuple[int, int, int]
    nbytes_on_host: int
    _budget: HostMemoryBudget

    def give_back(self) -> None:
        """Let others have the memory; a second call does nothing. Any thread."""
        self._budget.give_back(self)


def book_host_pages(config: CacheConfig, *, page_nbytes: int, device_pages: int) -> HostBooking:
    """Compute how many host pages this rank gets, and book them; in a :func:`host_memory_budget` against that.

    ``host_bytes`` is per rank and overrides ``host_ratio``. No rank asks another: each takes it that all
    ranks of the host open pools like its own, and that they open them at about the same time.

    Args:
        page_nbytes: bytes of one page, all layers, K and V.
        device_pages: pages of the device pool.
    Raises:
        ConfigError: not one page; a pool that write_through would thrash; more than this rank's share of
            what is free; or a pool by ``host_ratio`` where it is not known how much is free.
    Ownership: the caller's, to be given back with the pool.
    """
    option, value = _size_option(config)
    num_pages = int(value * device_pages) if option == "host_ratio" else int(value) // page_nbytes
    if num_pages < 1:
        raise ConfigError(
            f"{option} is {value}, less than one page: a page takes {page_nbytes} bytes "
            f"and the device pool has {device_pages} pages; raise {option}"
        )
    if (
        config.write_policy is WritePolicy.WRITE_THROUGH
        and num_pages <= device_pages
        and not config.allow_small_host
    ):
        raise ConfigError(
            f"{option} is {value}, a host pool of {num_pages} pages, and the device pool has {device_pages}: "
            f"under write_through the host must be larger; raise {option} or set allow_small_host"
        )
    budget = _current.get() or HostMemoryBudget(read_memory_limits())
    return budget.book(config, num_pages, page_nbytes)


def _size_option(config: CacheConfig) -> tuple[str, float]:
    return (
        ("host_ratio", config.host_ratio) if config.host_bytes is None else ("host_bytes", config.host_bytes)
    )


class HostMemoryBudget:
    """What was free at one moment, and the pools that were booked against it since. Any thread.

    A rank's share is what its own pools leave of the host, less the reserve, divided by the ranks on
    the host; all pools booked here together never exceed the host's memory less the reserve.

    Args:
        limits: the machine's and those of its cgroups.
    """

    def __init__(self, limits: Sequence[MemoryLimit]) -> None:
        self._limits = limits
        self._bookings: list[HostBooking] = []
        self._lock = threading.Lock()

    def book(self, config: CacheConfig, num_pages: int, page_nbytes: int) -> HostBooking:
        """Book a pool of ``num_pages`` for the rank of ``config``.

        Raises: ConfigError: its share is less, or not known; nothing is booked.
        """
        self._check_known(config)
        num_ranks, rank = config.effective_ranks_on_host, (config.tp_rank, config.pp_rank, config.cp_rank)
        nbytes = num_pages * page_nbytes
        limit = min(self._limits, key=lambda limit: limit.free_bytes)
        with self._lock:
            booked_here = sum(booking.nbytes for booking in self._bookings)
            booked_on_host = sum(pool.nbytes_on_host for pool in self._bookings if pool.rank == rank)
            free = limit.free_bytes - config.host_reserve_bytes
            left = max(0, min((free - booked_on_host) // num_ranks, free - booked_here))
            if nbytes <= left:
                booking = HostBooking(num_pages, nbytes, rank, nbytes * num_ranks, self)
                self._bookings.append(booking)
                return booking
        option, value = _size_option(config)
        earlier = f", pools opened before take {booked_here}" if booked_here else ""
        raise ConfigError(
            f"{option} is {value}, which takes {nbytes} bytes on each of {num_ranks} ranks; "
            f"within {limit.name} {limit.free_bytes} bytes are free and host_reserve_bytes keeps "
            f"{config.host_reserve_bytes}{earlier}, which leaves {left} for each; "
            f"lower {option} or host_reserve_bytes"
        )

    def _check_known(self, config: CacheConfig) -> None:
        unknown = [limit for limit in self._limits if limit.fault]
        if not unknown:
            return
        names, faults = (
            ", ".join(limit.name for limit in unknown),
            "; ".join(limit.fault for limit in unknown),
        )
        if config.host_bytes is None:
            raise ConfigError(
                f"host_ratio is {config.host_ratio}, and how much memory is free is not known: "
                f"{names} limits it, and what is used cannot be read: {faults}; "
                "give host_bytes, or make the file readable"
            )
        logger.warning("host.usage_unreadable", limits=names, fault=faults, host_bytes=config.host_bytes)

    def give_back(self, booking: HostBooking) -> None:
        """Forget ``booking``, if it is still there."""
        with self._lock:
            if booking in self._bookings:
                self._bookings.remove(booking)
