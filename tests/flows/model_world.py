"""The world around a modelled cache: its loop, its clock, its device, and the calls that wait for something."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import anyio

from hicache_async import EventReader, State, Tier
from hicache_async.core.pool import FreeList
from hicache_async.testing.golden import page_object
from hicache_async.testing.manual import ManualThreads
from hicache_async.testing.virtual_device import VirtualDevice
from tests.event_mirror import Mirror
from tests.flows.model import Model, PageBytes, identity, look
from tests.flows.model_store import FOREIGN_KEY, ModelStore
from tests.flows.rig import Opener, PoisoningFreeList, Rig, turns

WAYS = ("native", "twice", "scope", "timeout")
"""How a call is cancelled."""

HEARD_AFTER_STEPS = 8
"""Each step is a turn of the loop at least, and so many pass until the cache acts upon what has happened."""

Work = Callable[[], Awaitable[object]]


async def run_for(num_turns: int) -> None:
    """As :func:`turns`, but return at once when nothing is left to run."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    for _ in range(num_turns):
        await asyncio.sleep(0)
        if not ready:
            return


class Call:
    """One coroutine of the API in a task of its own, that may be cancelled in one of four ways."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, work: Work, way: str) -> None:
        self.name = name
        self.is_cancelled = False
        self._loop = loop
        self._work = work
        self._way = way
        self._scope: anyio.CancelScope | None = None
        self._limit: asyncio.Timeout | None = None
        self.task = loop.create_task(self._run(), name=f"call:{name}")

    def __repr__(self) -> str:
        return f"<Call {self.name} {'over' if self.task.done() else 'waiting'}>"

    async def _run(self) -> None:
        if self._way == "scope":
            with anyio.CancelScope() as self._scope:
                await self._work()
        elif self._way == "timeout":
            async with asyncio.timeout(None) as self._limit:
                await self._work()
        else:
            await self._work()

    def cancel(self) -> None:
        """Cancel what waits."""
        self.is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()
        elif self._limit is not None:
            self._limit.reschedule(self._loop.time())
        else:
            self.task.cancel()
            if self._way == "twice":
                self._loop.call_soon(self.task.cancel)

    def check(self) -> None:
        """Raise what the call should not have raised."""
        if self.task.cancelled():
            assert self.is_cancelled, f"{self!r} was cancelled by nobody"
        elif (error := self.task.exception()) is not None and not (
            isinstance(error, TimeoutError) and self.is_cancelled
        ):
            raise error


class World:
    """One open cache on a loop of its own, and all that moves it.

    Attributes:
        calls: those that wait.
        stores: those that are attached, or may be.
        step_number: rises with every step.
        disturbances: rises whenever something might end a prefetch early.
        num_failed: forwards and copies that went wrong.
        seen: what was reached, and how many things were checked, by name.
    """

    def __init__(self, options: Mapping[str, object], *, is_roomy: bool, has_store: bool, auto: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda loop, context: self._strays.append(context))
        self._strays: list[dict[str, Any]] = []
        self.model = Model(is_roomy)
        self.threads = ManualThreads()
        self.calls: list[Call] = []
        self.stores: list[ModelStore] = []
        self.step_number = self.disturbances = self.num_failed = 0
        self.seen: Counter[str] = Counter()
        self.doubtful: dict[bytes, int] = {}
        """In which step the bytes of a page became doubtful."""
        self._arrivals: dict[bytes, int] = {}
        """In which step each page came from a store."""
        self.rig: Rig
        self.device_bytes: PageBytes
        self.host_bytes: PageBytes
        self._reader: EventReader
        self._mirror = Mirror()
        self.loop.run_until_complete(self._open(options, has_store, VirtualDevice(auto=auto)))

    async def _open(self, options: Mapping[str, object], has_store: bool, device: VirtualDevice) -> None:
        store = self.new_store() if has_store else None
        self.rig = await Opener()(store=store, device=device, threads=self.threads, **options)  # type: ignore[arg-type]
        ctx = self.rig.ctx
        if store is not None:
            store.may_enter = None
        arena = ctx.arena
        ctx.host_pool._free_list = PoisoningFreeList(arena, ctx.host_pool.capacity)  # type: ignore[arg-type]
        assert isinstance(ctx.host_pool._free_list, FreeList)
        self.device_bytes, self.host_bytes = PageBytes(self.rig.kv), PageBytes(arena)
        self._reader = self.rig.cache.events()

    def new_store(self) -> ModelStore:
        """Return an empty store, with an object of somebody else in it."""
        store = ModelStore(self.model.weights, self._note_arrivals)
        store.put(FOREIGN_KEY, b"somebody else's")
        self.stores.append(store)
        return store

    def _note_arrivals(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._arrivals[name] = self.step_number
            self.model.arrived.add(name)

    def has_arrived(self, name: bytes, since_step: int) -> bool:
        """Return whether a store has brought a page since a step, or was about to be heard of then."""
        if not self.rig.ctx.arena.is_direct:  # a thread may have taken its time
            since_step = 0
        return self._arrivals.get(name, -1) >= since_step - HEARD_AFTER_STEPS

    def is_doubtful(self, names: Iterable[bytes]) -> bool:
        """Return whether the cache may cut off one of these pages, of which it has yet to hear."""
        since = self.step_number - HEARD_AFTER_STEPS
        return any(self.doubtful.get(name, since - 1) >= since for name in names)

    # Moving

    def step(self, verb: Callable[[], object], num_turns: int, check: Callable[[], None]) -> None:
        """Do one thing on the loop, let others run for some turns, and check everything."""
        self.step_number += 1

        async def stepping() -> None:
            more = verb()
            if isinstance(more, Awaitable):
                await more
            await run_for(num_turns)
            check()

        self.loop.run_until_complete(stepping())

    def call(self, name: str, work: Work, way: str = "native") -> Call:
        """Start a coroutine of the API."""
        call = Call(self.loop, name, work, way)
        self.calls.append(call)
        return call

    def disturb(self, what: str) -> None:
        """Count something that may end a prefetch early, or make a copy or a write fail."""
        self.seen[what] += 1
        self.disturbances += 1
        self.model.is_pristine = False

    async def driven(self, work: Awaitable[object]) -> None:
        """Wait for something while threads do what they have to."""
        waiting = asyncio.ensure_future(work)
        for _ in range(1000):
            self.run_threads()
            await run_for(20)
            if waiting.done():
                waiting.result()
                return
        raise AssertionError(f"{work!r} never ends")

    @property
    def trouble(self) -> int:
        """How much has happened so far that may end a prefetch early."""
        return self.disturbances + sum(store.num_faults for store in self.stores)

    def run_threads(self) -> None:
        """Let the threads do all they have."""
        self.seen["thread jobs"] += self.threads.run_all()

    # Checking

    def check(self) -> None:
        """Check all that does not depend on a request."""
        rig, model = self.rig, self.model
        assert not self._strays, self._strays
        assert rig.cache.state is State.OPEN, rig.ctx.failure
        rig.cache.audit()
        held = look(rig.ctx.tree)
        self.seen["pages that had to stay"] += model.follow(held, rig.cache.stats())
        self.seen["pinned pages checked"] += model.check_pins(rig.clock.monotonic())
        self._check_events()
        self._check_host()
        for store in self.stores:
            self._check_store(store)
        over = [call for call in self.calls if call.task.done()]
        self.calls = [call for call in self.calls if call not in over]
        for call in over:
            call.check()
        self._check_counts()

    def _check_counts(self) -> None:
        stats, booked = self.rig.cache.stats(), self.model.booked
        for tier in ("device", "host", "store", "computed"):
            assert getattr(stats, f"{tier}_tokens") == booked[tier], f"the books of {tier} do not add up"
        if not any(call.name == "watch" for call in self.calls):
            assert sum(stats.unfulfilled_tokens.values()) == self.model.unfulfilled

    def _check_events(self) -> None:
        self._mirror.follow(self._reader)
        held = self.model.held.items()
        on_device = {(name, Tier.DEVICE) for name, place in held if place.device is not None}
        on_host = {(name, Tier.HOST) for name, place in held if place.host is not None}
        assert self._mirror.held == on_device | on_host, "the events tell something else"

    def _check_host(self) -> None:
        weights = self.model.weights
        there = {name: place.host for name, place in self.model.held.items() if place.host_ready}
        pages = {identity(name, weights): page for name, page in there.items() if page is not None}
        self.host_bytes.check(list(pages.values()), list(pages))

    def _check_store(self, store: ModelStore) -> None:
        assert not store.violations, store.violations
        assert FOREIGN_KEY in store.objects, "an object of somebody else was deleted"
        ctx = self.rig.ctx
        for key, data in store.objects.items():
            if store.checked.get(key) is data or key == FOREIGN_KEY:
                continue
            name = bytes.fromhex(key[:64])
            assert ctx.keys.keys([name]) == [key], f"{key} is no name of this cache"
            assert name in self.model.written, f"{key} was never committed"
            weights = range(self.model.weights, store.oldest_weights - 1, -1)
            assert any(data == self.object_of(name, each) for each in weights), f"{key} has other bytes"
            store.checked[key] = data
            self.seen["stored objects checked"] += 1

    def object_of(self, name: bytes, weights: int) -> bytes:
        """Return the bytes of a page as a store keeps them."""
        return page_object(self.rig.kv, identity(name, weights), self.rig.ctx.arena.layout)

    # Ending

    def abandon(self) -> None:
        """Let go of a world in which something went wrong."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.set_exception_handler(lambda loop, context: None)
        self.loop.run_until_complete(turns(50))
        self.threads.shutdown()
        self.loop.close()

    def close(self) -> None:
        """Close the cache and check that nothing of it is left: no task, no timer, no hop."""
        rig = self.rig
        self.seen["calls that ended when the store was gone"] += sum(store.num_late for store in self.stores)

        async def close() -> None:
            await self.driven(rig.cache.close())
            await turns(5)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"these tasks outlived the cache: {left}"

        self.loop.run_until_complete(close())
        assert rig.clock.pending == 0, "a timer outlived the cache"
        left = [*rig.ctx.hops.live, *rig.ctx.charges, *rig.ctx.moves]
        assert not left, f"these outlived the cache: {left}"
        self.threads.shutdown()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
