"""What happens to the modelled cache by itself: time, copies, and what its stores do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hicache_async.testing.virtual_device import VirtualCopy
from tests.flows.model import look
from tests.flows.model_engine import Engine
from tests.flows.model_operator import Operator
from tests.flows.model_requests import Forward
from tests.flows.model_store import FAULTS, FOREIGN_KEY, ModelStore
from tests.flows.model_world import World, run_for


class Forces:
    """The device, the clock and the stores."""

    def __init__(self, world: World, engine: Engine, operator: Operator) -> None:
        self.world = world
        self.engine = engine
        self.operator = operator

    async def pass_time(self, seconds: float) -> None:
        """Move time on, and let everybody act who has waited for it."""
        world = self.world
        if world.threads.pending or any(store.door for store in world.stores):
            world.disturb("time that was waited")
        world.disturbances += 1
        world.rig.clock.advance(seconds)
        for _ in range(4):
            await run_for(60)
            world.rig.clock.advance(0)  # what was to be waited for since is over, too
        self.operator.check_limits()

    def end_something(self, which: int, choice: int) -> None:
        """Let one of the things that are under way move on: a copy, a forward, a thread, a call of a store."""
        world = self.world
        ends: list[Callable[[], object]] = []
        ends += [partial(self._move, copy, choice) for copy in world.rig.virtual.pending]
        ends += [partial(self._end, forward, choice) for forward in self.engine.forwards]
        ends += [partial(self._answer, store, choice) for store in world.stores if store.door]
        ends += [world.run_threads] if world.threads.pending else []
        if ends:
            ends[which % len(ends)]()

    def _move(self, copy: VirtualCopy, choice: int) -> None:
        device = self.world.rig.virtual
        if choice % 13 == 12 and self._is_next(copy):
            self._fail(copy)
        elif choice % 3 == 2:
            device.advance_all()
        else:
            device.advance(layer=choice % 2, copy=copy)

    def _is_next(self, copy: VirtualCopy) -> bool:
        # One that is not fails later than it is told to.
        same = [other for other in self.world.rig.virtual.pending if other.to_device is copy.to_device]
        return copy is same[0] and copy.is_ready()

    def _fail(self, copy: VirtualCopy) -> None:
        world, pages = self.world, copy.plan.device_pages if copy.to_device else copy.plan.host_pages
        held = look(world.rig.ctx.tree).items()
        self.engine.doubt(
            name for name, place in held if (place.device if copy.to_device else place.host) in pages
        )
        world.num_failed += 1
        world.disturb(f"failed copies {'to the device' if copy.to_device else 'to the host'}")
        copy.fail(OSError("a copy engine has failed"))

    def _end(self, forward: Forward, choice: int) -> None:
        if forward.fence is None:
            self.engine.end_stream()
        else:
            self.engine.finish_forward(forward, fails=choice % 5 == 4)

    def _answer(self, store: ModelStore, choice: int) -> None:
        how = FAULTS[choice // 3 % len(FAULTS)] if choice % 3 == 2 else ""
        if how:
            self.world.disturb("faults of a store at the door")
        store.answer(choice, how)

    # Stores

    def trouble_calls(self, verb: str, how: str) -> None:
        """Let calls of the attached store wait at the door from now on, or let the next one go wrong."""
        if (store := self.operator.attached) is None:
            return
        if how == "hold":
            store.held.add(verb)
            self.world.model.is_pristine = False
        else:
            store.faults[verb] = how
            self.world.disturb("faults of a store")

    def open_stores(self) -> None:
        """Let all calls come in."""
        for store in self.world.stores:
            store.open()

    async def put_in_store(self, which: int, namespace: int, tokens: Sequence[int]) -> None:
        """Put a prompt into a store, as another process might."""
        world = self.world
        if (store := self._clean_store(which)) is not None:
            names = world.model.note(namespace, tokens)
            world.model.written.update(names)
            objects = [memoryview(world.object_of(name, world.model.weights)) for name in names]
            assert await store.inner.write(world.rig.ctx.keys.keys(names), objects) == len(names)

    def lose_objects(self, which: int, count: int) -> None:
        """Delete some objects behind the cache's back."""
        if (store := self._clean_store(which)) is not None:
            keys = sorted(store.objects.keys() - {FOREIGN_KEY})
            for key in keys[which % (len(keys) + 1) :][:count]:
                store.remove(key)
                store.is_lossy = True
            self.world.disturb("lost objects")

    def _clean_store(self, which: int) -> ModelStore | None:
        clean = [store for store in self.world.stores if not store.is_unclean]
        return clean[which % len(clean)] if clean else None
