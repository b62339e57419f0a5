"""The operator of the modelled cache, who clears, pins and changes stores while requests run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hicache_async import ConfigError, StoreUnavailable, Tier
from hicache_async.core.tokens import token_bytes
from hicache_async.core.write_policy import MIN_COMMITS
from tests.flows.model import NAMESPACES, Pin, device_pages, local_pages, look
from tests.flows.model_engine import Engine
from tests.flows.model_store import FOREIGN_KEY, ModelStore
from tests.flows.model_world import Call, World
from tests.flows.rig import PAGE_TOKENS

MAX_STORES = 3


class Operator:
    """What ``cache.admin`` is asked for."""

    def __init__(self, world: World, engine: Engine) -> None:
        self.world = world
        self.engine = engine
        self._clearing: Call | None = None
        self._num_detaching = 0
        self._detaching: list[tuple[Call, float]] = []

    @property
    def attached(self) -> ModelStore | None:
        """The store that the cache has."""
        store = self.world.rig.cache.admin._attachment.store
        assert store is None or isinstance(store, ModelStore)
        return store

    @property
    def is_clearing(self) -> bool:
        """Whether a clear is under way."""
        return self._clearing is not None and not self._clearing.task.done()

    # Stores

    def attach(self, which: int, way: str) -> None:
        """Attach one of the stores, or an empty one; not while one is cleared."""
        world = self.world
        if self.is_clearing:
            return
        clean = [store for store in world.stores if not store.is_unclean]
        is_new = not clean or (len(clean) < MAX_STORES and which % 3 == 0)
        store = world.new_store() if is_new else clean[which % len(clean)]

        async def attaching() -> None:
            before = self.attached
            try:
                await world.rig.cache.admin.attach_store(store)
            except ConfigError:
                assert before is not None and (before is not store or before.is_unclean)
            else:
                assert self.attached is store
                store.may_enter, store.is_away = None, False
                world.seen["attached stores"] += before is None

        world.call("attach", attaching, way)

    def detach(self, way: str, *, force: bool) -> None:
        """Detach the store; from then on nobody calls it."""
        world = self.world

        async def detaching() -> None:
            store = self.attached
            if store is not None and force:
                self._suspend(store, "forced detaches")
            is_over = False
            self._num_detaching += 1
            try:
                await world.rig.cache.admin.detach_store(force=force)
                is_over = True
            finally:
                self._num_detaching -= 1
                if store is not None and self.attached is not store:
                    self._suspend(store, "detaches")
                    store.is_away = is_over and not self._num_detaching  # who waits for its calls?

        call = world.call("detach", detaching, way)
        if force:
            now_s, timeout_s = world.rig.clock.monotonic(), world.rig.ctx.config.store_timeout_s
            self._detaching.append((call, now_s + timeout_s))

    def _suspend(self, store: ModelStore, what: str) -> None:
        # Calls that were started and have not come through the door yet are under way all the same.
        if store.may_enter is None:
            hops = [hop for hop in self.world.rig.ctx.hops.live if hop.name.startswith("store.")]
            running = sum(each.num_running for each in self.world.stores)
            store.may_enter = max(0, len(hops) - running)
            self.world.seen[f"{what} under a call"] += bool(hops)
        self.world.disturb(what)

    def check_limits(self) -> None:
        """Check that no forced detach takes longer than it may; called when the time has been moved on."""
        now_s = self.world.rig.clock.monotonic()
        for call, end_s in self._detaching:
            assert call.task.done() or now_s < end_s, "a forced detach takes too long"
        self._detaching = [(call, end_s) for call, end_s in self._detaching if not call.task.done()]

    # Clearing

    def clear(self, tier: Tier | None, way: str) -> None:
        """Clear, and look at once whether anything is left; one clear at a time."""
        world, noted = self.world, []
        if self.is_clearing:
            return

        async def clearing() -> None:
            store = self.attached if tier in (None, Tier.STORE) else None
            noted.append(tier)
            self._note_clear(tier, store)
            if store is not None:
                store.is_unclean = True
            try:
                await world.rig.cache.admin.clear(tier)
                self._let_pins_go(tier)  # it may have waited for its turn, and pins were made meanwhile
            except StoreUnavailable:
                assert store is not None
                world.seen["clears that failed"] += 1
            else:
                if store is not None:
                    self._cleared(store)

        self._clearing = world.call("clear", clearing, way)
        # Behind the first step of the task, and before anybody whom it wakes.
        world.loop.call_soon(lambda: noted and self._check_cleared(tier))

    def _let_pins_go(self, tier: Tier | None) -> None:
        if tier is not Tier.STORE:
            self.world.model.pins.clear()

    def _note_clear(self, tier: Tier | None, store: ModelStore | None) -> None:
        world = self.world
        world.disturb(f"clear {tier or 'all'}")
        if store is not None:
            self._suspend(store, "stores cleared")
        if tier is Tier.STORE:
            return
        self._let_pins_go(tier)
        for request in self.engine.requests:
            request.is_cut |= request.loading is not None
        world.seen["clears under a forward"] += bool(self.engine.forwards)
        if tier is None:
            world.model.note_clear()
            for spare in world.stores:
                if spare is not self.attached:
                    self._empty(spare)

    def _empty(self, store: ModelStore) -> None:
        # With new weights a store that is not attached is emptied by hand, or thrown away if that cannot be done.
        if store.num_running:
            store.is_unclean = True
        else:
            for key in store.objects.keys() - {FOREIGN_KEY}:
                store.remove(key)
            store.oldest_weights = self.world.model.weights
            store.is_unclean = store.is_lossy = False

    def _cleared(self, store: ModelStore) -> None:
        assert set(store.objects) == {FOREIGN_KEY}, "a cleared store has something left"
        store.oldest_weights, store.is_unclean, store.is_lossy = self.world.model.weights, False, False
        if self.attached is store:
            store.may_enter = None

    def _check_cleared(self, tier: Tier | None) -> None:
        held = look(self.world.rig.ctx.tree).values()
        if tier is None:
            assert not held, "something is left after a clear"
        elif tier is Tier.DEVICE:
            assert all(place.device is None for place in held), (
                "something is left on the device after a clear"
            )
        elif tier is Tier.HOST:  # under write_back what is on the device may be on its way again at once
            is_new = [
                place.device is not None and not place.host_ready for place in held if place.host is not None
            ]
            assert all(is_new), "something is left on the host after a clear"

    # The rest

    def flush(self, tier: Tier, way: str) -> None:
        """Flush; where nothing has ever gone wrong, all that was committed has then arrived."""
        world = self.world

        async def flushing() -> None:
            wanted = self._due()
            await world.rig.cache.admin.flush(tier)
            if world.model.is_pristine:
                self.check_arrived(wanted, tier)

        world.call("flush", flushing, way)

    def _due(self) -> list[bytes]:
        # What the write policy copies to the host and from there to the store.
        model, enough = self.world.model, MIN_COMMITS.get(self.world.rig.ctx.config.write_policy)
        if enough is None or not model.is_roomy:
            return []
        return [name for name in look(self.world.rig.ctx.tree) if model.commits[name] >= enough]

    def check_arrived(self, names: Collection[bytes], tier: Tier) -> None:
        """Check that pages are on the host, and in the store if there is one that is asked for."""
        held, store = look(self.world.rig.ctx.tree), self.attached
        assert all(held[name].host is not None and held[name].host_ready for name in names), "not copied"
        if store is not None and tier is Tier.STORE and not store.is_lossy:
            keys = self.world.rig.ctx.keys.keys(list(names))
            assert all(key in store.objects for key in keys), "not stored"
        self.world.seen["pages that had to be written down"] += len(names)

    def pin(self, namespace: int, tokens: Sequence[int], ttl_s: float) -> None:
        """Pin a prefix."""
        world = self.world
        names = world.model.note(namespace, tokens)
        local = local_pages(look(world.rig.ctx.tree), names)
        salt, adapter = NAMESPACES[namespace]
        pinned = world.rig.cache.admin.pin(list(tokens), ttl_s=ttl_s, salt=salt, adapter=adapter)
        num_pages = pinned // PAGE_TOKENS
        assert pinned % PAGE_TOKENS == 0 and num_pages <= local
        if world.model.is_roomy and world.rig.ctx.config.pin_capacity_fraction == 1:
            assert num_pages == local
        if names:
            world.model.pins.pop(self._pin_key(namespace, tokens), None)
        if num_pages:
            until_s = world.rig.clock.monotonic() + ttl_s
            world.model.pins[self._pin_key(namespace, tokens)] = Pin(names[:num_pages], until_s)
            world.seen["pins"] += 1

    def unpin(self, which: int) -> None:
        """Let go of one of the pinned prefixes, if there is one."""
        pins = self.world.model.pins
        if not pins:
            return
        namespace, data = sorted(pins)[which % len(pins)]
        salt, adapter = NAMESPACES[namespace]
        tokens = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
        self.world.rig.cache.admin.unpin(tokens, salt=salt, adapter=adapter)
        del pins[namespace, data]

    @staticmethod
    def _pin_key(namespace: int, tokens: Sequence[int]) -> tuple[int, bytes]:
        return namespace, token_bytes(list(tokens[: len(tokens) // PAGE_TOKENS * PAGE_TOKENS]))

    def explain(self, namespace: int, tokens: Sequence[int], way: str) -> None:
        """Ask where a prompt is, which has to be what the dictionary says when the answer comes."""
        world, names = self.world, self.world.model.note(namespace, tokens)
        salt, adapter = NAMESPACES[namespace]

        async def explaining() -> None:
            explanation = await world.rig.cache.admin.explain(list(tokens), salt=salt, adapter=adapter)
            held = look(world.rig.ctx.tree)
            limit = names[: max(0, len(tokens) - 1) // PAGE_TOKENS]
            assert explanation.device_tokens == device_pages(held, limit) * PAGE_TOKENS
            assert explanation.local_tokens == local_pages(held, limit) * PAGE_TOKENS
            world.seen["explanations"] += 1

        world.call("explain", explaining, way)
