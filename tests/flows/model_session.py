"""One modelled cache from its opening to its end: every step is checked, and in the end nothing may be left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hicache_async import StepBatch, Tier
from tests.flows.model_engine import Engine
from tests.flows.model_forces import Forces
from tests.flows.model_operator import Operator
from tests.flows.model_requests import Request
from tests.flows.model_world import World, run_for
from tests.flows.rig import PAGE_TOKENS

ROOMY: Mapping[str, object] = {
    "device_pages": 400,
    "host_pages": 400,
    "max_offloads_in_flight": 64,
    "max_backups_pending": 1024,
    "prefetch_capacity_fraction": 1.0,
}
"""Room for all that one session can bring, so that nothing may be lost, skipped or refused."""


class Session:
    """World, engine and operator of one cache.

    Args:
        pace: for how many turns of the loop others run after each step.
    """

    def __init__(
        self, options: Mapping[str, object], *, is_roomy: bool, has_store: bool, auto: bool, pace: int
    ) -> None:
        if is_roomy:
            options = {**options, **ROOMY}
        self.world = World(options, is_roomy=is_roomy, has_store=has_store, auto=auto)
        self.engine = Engine(self.world)
        self.operator = Operator(self.world, self.engine)
        self.forces = Forces(self.world, self.engine, self.operator)
        self._pace = pace
        self._is_broken = False

    def do(self, verb: Callable[[], object], num_turns: int | None = None) -> None:
        """Do one thing, let others run, and check everything."""
        try:
            self.world.step(verb, self._pace if num_turns is None else num_turns, self._check)
        except BaseException:
            self._is_broken = True
            raise

    def _check(self) -> None:
        self.world.check()
        self.engine.check()
        self.world.seen["steps"] += 1

    # What takes more than one verb

    def start(self, namespace: int, tokens: Sequence[int], whole: bool, choice: int, way: str) -> None:
        """Start a request, and perhaps its prefetch and its load at once."""
        request = self.engine.match(namespace, tokens, whole=whole, priority=choice % 3)
        if choice % 2:
            self.engine.prefetch(request, None, way)
        if choice % 5:
            self.engine.load(request, None, way, wait_pending=True, priority=choice % 3)

    def go_on(self, request: Request, choice: int, way: str) -> None:
        """Let a request do what comes next for it."""
        engine, forward = self.engine, request.forward
        if not request.has_loaded:
            if request.can_prefetch() and choice % 2:
                engine.prefetch(request, None, way)
            else:
                engine.load(request, None, way, wait_pending=True, priority=0)
        elif request.is_broken:
            engine.release(request, offload=False)
        elif not request.is_ready():
            self.world.rig.virtual.advance()
        elif request.has_to_compute():
            self._compute(request, choice)
        elif request.committed < (request.computed if forward is None else forward.end_page):
            engine.commit(request, choice)
        elif forward is not None and choice % 3 == 0:
            engine.release(request, offload=choice % 2 == 0)
        elif forward is not None and forward.fence is None:
            engine.end_stream()
        elif forward is not None:
            engine.finish_forward(forward)
        elif choice % 2:
            engine.extend(request, [0] * (choice % 9))
        else:
            engine.release(request, offload=choice % 4 == 0)

    def _compute(self, request: Request, choice: int) -> None:
        engine = self.engine
        if not engine.allocate_nowait(request, len(request.tokens)):
            engine.release(request, offload=choice % 2 == 0)
        elif request.can_compute():
            engine.begin_forward(request, on_stream=choice % 4 == 0)
            if choice % 3:
                engine.commit(request, choice)

    async def serve(
        self, namespace: int, tokens: Sequence[int], *, prefetch: bool, patience: int = 1
    ) -> bool:
        """Do all of one request as far as nothing keeps it waiting; returns whether it is over."""
        engine = self.engine
        request = engine.match(namespace, tokens, whole=False, priority=0)
        if prefetch:
            engine.prefetch(request, None, "native")
        engine.load(request, None, "native", wait_pending=True, priority=0)
        for number in range(patience):
            if number:
                self.world.run_threads()
            await run_for(60)
            engine.follow(request)
            if request.is_ready():
                break
        if not request.is_ready():
            return False
        if not engine.allocate_nowait(request, len(tokens)):
            engine.release(request, offload=False)
            return True
        if not request.can_compute():
            return False
        engine.finish_forward(engine.begin_forward(request, on_stream=False))
        request.lease.commit(len(tokens))
        engine.committed(request, len(tokens))
        engine.release(request, offload=False)
        self.world.seen["requests served in one go"] += 1
        return True

    async def step(self, one: Request, other: Request, num_pages: int, more: int) -> None:
        """Begin a step, then commit and extend in one request and release, or allocate for, another."""
        world, engine, cache = self.world, self.engine, self.world.rig.cache
        grant = await cache.begin_step(num_pages)
        assert 0 <= grant.num_pages <= num_pages and (
            not world.model.is_roomy or grant.num_pages == num_pages
        )
        assert {lease.request_id for lease in grant.loaded} <= {r.lease.request_id for r in engine.requests}
        batch = StepBatch(extend=[(one.lease, [0] * more)])
        num_tokens = one.computed * PAGE_TOKENS
        if one.forward is None and one.computed >= one.committed:
            batch.commit = [(one.lease, num_tokens)]
        total = len(other.tokens) + 2 * more
        if other is one or other.forward is not None or more % 2:
            batch.allocate = [(other.lease, total)]
        else:
            batch.release = [other.lease]
            engine.released(other)
        before = len(other.lease.pages)
        result = cache.step(batch)
        if batch.commit:
            engine.committed(one, num_tokens)
        engine.extended(one, [0] * more)
        for allocation in result.allocations:
            if allocation is None:
                engine.refused(other, total)
            else:
                engine.allocated(other, allocation, before, total)
        world.seen["steps of an engine"] += 1

    def cancel(self, which: int) -> None:
        """Cancel one of the calls that wait."""
        calls = [call for call in self.world.calls if call.name != "watch" and not call.task.done()]
        if calls:
            call = calls[which % len(calls)]
            call.cancel()
            self.world.disturb(f"cancelled {call.name}")

    # The end

    def finish(self) -> None:
        """Let everything come to its end, see that nothing is left, that the cache serves on, and close it."""
        if not self._is_broken:
            try:
                self._end()
            except BaseException:
                self.world.abandon()
                raise
        else:
            self.world.abandon()

    def _end(self) -> None:
        for number in range(60):
            self.do(lambda number=number: self._unwind(number))  # type: ignore[misc]
            if self._is_over():
                break
        else:
            raise AssertionError(f"these never end: {self.world.calls} {self.world.rig.ctx.hops.live}")
        self.do(self._check_given_back)
        self.do(self._serve_on)
        self.world.close()

    async def _unwind(self, number: int) -> None:
        world, engine = self.world, self.engine
        world.rig.virtual.auto = True
        for store in world.stores:
            store.open()
        engine.end_stream()
        for forward in list(engine.forwards):
            engine.finish_forward(forward)
        world.rig.virtual.advance_all()
        world.run_threads()
        await run_for(20)
        for request in [request for request in engine.requests if self._is_idle(request)]:
            engine.release(request, offload=False)
        await world.rig.cache.begin_step(0)  # gives back what the last step has not used
        if number > 5:
            world.disturb("ends that needed time")
            world.rig.clock.advance(6)
        await run_for(20)

    @staticmethod
    def _is_idle(request: Request) -> bool:
        return request.call is None or request.call.task.done()

    def _is_over(self) -> bool:
        # Between two writes of a path no call is live.
        rig = self.world.rig
        return not (self.engine.requests or self.world.calls or rig.ctx.hops.live) and (
            rig.cache._movers.backups.is_idle.is_set()
        )

    async def _check_given_back(self) -> None:
        rig = self.world.rig
        await run_for(60)
        stats, ctx = rig.cache.stats(), rig.ctx
        assert (stats.leases, stats.hops, stats.device.leased, stats.host.leased) == (0, 0, 0, 0)
        assert (stats.device.in_hops, stats.host.in_hops, ctx.prefetch_pages) == (0, 0, 0)
        assert not (ctx.charges or ctx.fetches or ctx.prefetches or ctx.waits or len(ctx.announcements))
        assert not ctx.tree.detached or self._detached_are_pinned()
        num_pins = len(rig.cache._movers.pins)
        assert num_pins == rig.clock.pending and (num_pins or not ctx.moves)

    def _detached_are_pinned(self) -> bool:
        # A pin keeps what was doubted until its time is over.
        kept = {node for pinned in self.world.rig.ctx.moves for node in pinned.node.path()}
        return all(node in kept or node.parent is None for node in self.world.rig.ctx.tree.detached)

    async def _serve_on(self) -> None:
        world, rig = self.world, self.world.rig
        rig.clock.advance(10_000)
        assert not rig.ctx.moves and not rig.ctx.tree.detached, "something is still held"
        store = self.operator.attached
        is_usable = store is None or not store.is_unclean
        for namespace, tokens in sorted(set(world.model.tokens.values()))[
            :: max(1, len(world.model.tokens) // 3)
        ]:
            for _ in range(2):
                is_over = await self.serve(namespace, [*tokens, 0], prefetch=is_usable, patience=40)
                assert is_over, f"{self.engine.requests} {world.calls} wait for nothing"
            await world.driven(rig.cache.admin.flush())
            if world.model.is_roomy and rig.ctx.config.write_policy != "write_back":
                names = world.model.note(namespace, tokens)
                self.operator.check_arrived(names, Tier.STORE if is_usable else Tier.HOST)
        world.seen["ends"] += 1
