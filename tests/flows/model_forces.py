"""What happens to the modelled cache by itself: time, copies, and what its stores do."""

from __future__ import annotations

from collections.abc import Sequence

from tests.flows.model import look
from tests.flows.model_engine import Engine
from tests.flows.model_operator import Operator
from tests.flows.model_store import FOREIGN_KEY, ModelStore
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
        await run_for(60)
        self.operator.check_limits()

    def move_device(self, how_far: str, which: int) -> None:
        """Move a layer of some copy, all of one, or everything."""
        device = self.world.rig.virtual
        copies = device.pending
        if how_far == "all":
            device.advance_all()
        elif how_far == "copy":
            device.advance(layer=1, copy=copies[which % len(copies)])
        else:
            device.advance(copy=copies[which % len(copies)])

    def fail_copy(self, which: int) -> None:
        """Let what a copy has not moved yet fail."""
        world, copies = self.world, self.world.rig.virtual.pending
        copy = copies[which % len(copies)]
        pages = copy.plan.device_pages if copy.to_device else copy.plan.host_pages
        held = look(world.rig.ctx.tree).items()
        self.engine.doubt(
            name for name, place in held if (place.device if copy.to_device else place.host) in pages
        )
        world.num_failed += 1
        world.disturb(f"failed copies {'to the device' if copy.to_device else 'to the host'}")
        copy.fail(OSError("a copy engine has failed"))

    # Stores

    @property
    def clean_stores(self) -> list[ModelStore]:
        """Stores that objects may be put into, and taken from."""
        return [store for store in self.world.stores if not store.is_unclean]

    def hold_calls(self, verb: str) -> None:
        """Let calls of the attached store wait at the door from now on."""
        if (store := self.operator.attached) is not None:
            store.held.add(verb)
            self.world.model.is_pristine = False

    def break_next_call(self, verb: str, how: str) -> None:
        """Let the next call of the attached store go wrong."""
        if (store := self.operator.attached) is not None:
            store.faults[verb] = how
            self.world.disturb("faults of a store")

    def answer(self, store: ModelStore, which: int, how: str) -> None:
        """Let a call at the door go on."""
        if how:
            self.world.disturb("faults of a store at the door")
        self.world.seen["answers of a store that had been let go"] += store.is_away
        store.answer(which, how)

    def open_stores(self) -> None:
        """Let all calls come in."""
        for store in self.world.stores:
            store.open()

    async def put_in_store(self, store: ModelStore, namespace: int, tokens: Sequence[int]) -> None:
        """Put a prompt into a store, as another process might."""
        world = self.world
        names = world.model.note(namespace, tokens)
        world.model.written.update(names)
        objects = [memoryview(world.object_of(name, world.model.weights)) for name in names]
        assert await store.inner.write(world.rig.ctx.keys.keys(names), objects) == len(names)

    def lose_objects(self, store: ModelStore, which: int, count: int) -> None:
        """Delete some objects behind the cache's back."""
        keys = sorted(store.objects.keys() - {FOREIGN_KEY})
        for key in keys[which % (len(keys) + 1) :][:count]:
            store.remove(key)
            store.is_lossy = True
        self.world.disturb("lost objects")
