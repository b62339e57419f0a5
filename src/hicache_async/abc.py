"""The seams: what a store, a device, a rank group, a clock and a page pool must do.

Stores see bytes only. Devices see planes of bytes, one per (layer, K or V). Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .config import IoMode
from .errors import ConsensusError
from .types import ObjectStat, Pages, Stop, StopToken

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Fence(Protocol):
    """A point in the order of device work."""

    def passed(self) -> bool:
        """Return whether everything before this point has been done. Never blocks; any thread."""
        ...

    def block(self, stream: object | None = None) -> None:
        """Order ``stream`` behind this point; without streams the calling thread waits.

        Raises: what failed, where the device can tell.
        """
        ...


class HostFence(Fence, Protocol):
    """A fence that a host thread sets, for a forward that runs in a thread."""

    def set(self) -> None:
        """Declare the work done. Any thread; later calls do nothing."""
        ...

    def fail(self, error: BaseException) -> None:
        """Declare the work failed: what it should have written is not to be trusted."""
        ...


class PagedBytes(Protocol):
    """The bytes of one tier as planes: for each layer K and V (MLA: one), each (num_pages, nbytes).

    A plane may have more axes behind the page where its bytes lie apart; flattened these are the same nbytes,
    in the order (token, head, dim).
    """

    num_layers: int
    num_pages: int

    def planes(self, layer: int) -> Sequence[torch.Tensor]:
        """Return the uint8 planes of ``layer``, each of shape (num_pages, plane_nbytes) or cut finer, not copied."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Which pages move between a device and a host arena; both id arrays have the same length.

    Attributes:
        io_mode: how a device that can do both moves them; every layout takes ``kernel``.
    """

    kv: PagedBytes
    arena: PagedBytes
    device_pages: Pages
    host_pages: Pages
    io_mode: IoMode = IoMode.KERNEL


class Device(Protocol):
    """Moves pages between device and host, and makes fences."""

    async def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor of ``nbytes``, page-locked where possible; off the loop, in chunks."""
        ...

    def fence(self, stream: object | None = None) -> Fence:
        """Return a fence behind what was queued so far; None: on the engine's compute stream."""
        ...

    def host_to_device(self, plan: CopyPlan, after: Sequence[Fence]) -> Sequence[Fence]:
        """Queue the copy behind ``after``; returns one fence per layer, in layer order.

        Copies of one direction keep the order of submit among those that find nothing open in ``after``. One that
        has to wait may be passed: what touches its pages later has to name its fence.
        """
        ...

    def device_to_host(self, plan: CopyPlan, after: Sequence[Fence]) -> Fence:
        """Queue the copy behind ``after``; returns one fence for all of it. Orders: as :meth:`host_to_device`."""
        ...

    async def wait(self, fence: Fence) -> None:
        """Return when ``fence`` has passed.

        Raises: what failed. Cancellation: ends the wait only, never the copy.
        """
        ...

    async def aclose(self) -> None:
        """Let go of streams and threads; never waits for a hung copy."""
        ...


@runtime_checkable
class SupportsRecording(Protocol):
    """A device that queues its copies from a thread: no stream can be ordered behind a fence before it is recorded."""

    async def recorded(self, fences: Sequence[Fence]) -> None:
        """Return when all of ``fences`` are recorded, or have failed; then ``block`` waits in no thread.

        Cancellation: ends the wait only.
        """
        ...


@runtime_checkable
class SupportsPreparation(Protocol):
    """A device that has to get ready for the tensors of an engine, or may be unable to copy them."""

    async def prepare(self, kv: PagedBytes, io_mode: IoMode) -> None:
        """Get ready to copy pages of ``kv`` in ``io_mode``, off the loop. Called when a cache opens.

        Raises: ConfigError: it cannot, and what to do.
        """
        ...


class Store(Protocol):
    """Keeps objects of bytes under string keys. It never sees a tensor, a page id or a token.

    Any method may raise; the cache turns that into a shorter prefix. All run on the cache's loop.
    """

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys exist, consecutive from ``keys[0]``."""
        ...

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Fill buffers whole, in order, and return how many, consecutive from 0.

        Only verified bytes count. Between pages look at ``stop.stopped``. When this returns,
        nothing of it touches a buffer any more; a store with threads says more through ``stop``. Where
        it knows why it came back short it may set ``stop.reason``.
        """
        ...

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Store pages in order and return how many, consecutive from 0.

        An object is visible only when complete. A key that is present is touched, not rewritten.
        When this returns, nothing of it reads a page any more.
        """
        ...

    async def aclose(self) -> None:
        """Let go of everything; never waits for a hung operation."""
        ...


@runtime_checkable
class SupportsDelete(Protocol):
    """A store that can delete objects."""

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete the keys that exist; returns how many did."""
        ...


@runtime_checkable
class SupportsListing(Protocol):
    """A store that can list its keys."""

    async def list_keys(self) -> Sequence[str]:
        """Return the keys of all complete objects, in no particular order."""
        ...


@runtime_checkable
class SupportsStat(Protocol):
    """A store that knows how large its objects are without reading them."""

    async def stat(self, keys: Sequence[str]) -> Sequence[ObjectStat | None]:
        """Return for each key what is known of its object; None: there is none, or it cannot be one."""
        ...


@runtime_checkable
class SupportsNamespaces(Protocol):
    """A store that knows which namespaces it holds objects of without listing all keys."""

    async def list_namespaces(self) -> Sequence[str]:
        """Return the namespace digests (see ``core.keys.namespace_of``) of its objects, in order of name."""
        ...


@runtime_checkable
class SupportsSweep(Protocol):
    """A store that can be rid of what nobody can use any more."""

    async def sweep(self) -> Mapping[str, int]:
        """Remove what dead writers left behind and trim to the store's limits; returns counts by name."""
        ...


@runtime_checkable
class SupportsCodec(Protocol):
    """A store whose objects are not the bytes it was given: compressed, quantised or encrypted."""

    @property
    def codec(self) -> str:
        """How objects are encoded, outermost first, as "zstd" or "aesgcm-3f2a90bc"; part of the namespace."""
        ...


@runtime_checkable
class SupportsRefusal(Protocol):
    """A store that knows of itself that it is no use asking now, as a guard with an open breaker does.

    While it refuses the cache asks and writes nothing, and what would have been written is made up for.
    Neither method waits or raises.
    """

    def refusal(self) -> Stop | None:
        """Return why nothing should be asked of it now; None: it may be asked."""
        ...

    def why_refused(self) -> str:
        """Say for a human, in a clause, why, since when and until when."""
        ...


@runtime_checkable
class SupportsStats(Protocol):
    """A store that counts what it does."""

    @property
    def stats(self) -> Mapping[str, int]:
        """Counts by name; the cache's stats show each as ``store_`` and its name."""
        ...


class Ranks(Protocol):
    """A group of processes that agree on outcomes by element-wise MIN. All of it on the cache's loop.

    Two orders hold on every rank, and the cache builds on them: votes are counted in the order in which
    this rank cast them, and results are delivered in the order in which the group settled them; a caller
    of :meth:`agree` goes on before the caller of any ticket that settled later does.
    """

    rank: int
    size: int

    def cast(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> None:
        """Vote without waiting. The first vote of this rank for a ticket counts, later ones do nothing.

        Args:
            ticket: 16 bytes, the same on every rank.
            vote: 1 to 8 integers, 0 .. 2**63-1, as many on every rank. Zeros alone settle the ticket at
                once; so does, at zeros, a rank that has not voted and is mute, or has left.
            patient: a mute rank is waited for until it answers or is lost; the same on every rank.
        Never raises for the group's state: a lost group takes votes and does nothing with them.
        """
        ...

    async def agree(self, ticket: bytes, vote: Sequence[int], *, patient: bool = False) -> Sequence[int]:
        """Cast ``vote`` before the first suspension, and return the element-wise MIN of all ranks' votes.

        Raises: ConsensusError: a rank was lost, or this one has left. Cancellation: ends the wait; the vote stands.
        """
        ...

    def when_lost(self, callback: Callable[[ConsensusError], None]) -> None:
        """Call ``callback`` once a rank is lost, before any waiter hears of it; at once if one has been."""
        ...

    async def aclose(self) -> None:
        """Leave the group: the others count it as voting zeros from then on; without rank 0 all is zeros."""
        ...


class TimerHandle(Protocol):
    """A timer that can be cancelled."""

    def cancel(self) -> None:
        """Stop the timer; does nothing when it has fired."""
        ...


class Clock(Protocol):
    """Where deadlines come from; a test brings its own."""

    def monotonic(self) -> float:
        """Return seconds since some fixed point."""
        ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` on the loop after ``delay_s``."""
        ...


class DevicePool(Protocol):
    """The free device pages, where the engine keeps its own book of them.

    The cache calls it on its loop only, and is then the only one to call it.
    """

    capacity: int

    def take(self, num_pages: int) -> Pages:
        """Take exactly ``num_pages`` free pages out; raises CapacityError and takes none otherwise."""
        ...

    def give_back(self, pages: Pages) -> None:
        """Put pages back."""
        ...

    def num_free(self) -> int:
        """Return how many pages can be taken."""
        ...
