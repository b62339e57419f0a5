"""A whole cache against a dictionary: whatever requests, devices, stores and operators do, in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from hicache_async import PrefetchPolicy, StepBatch, Tier
from hicache_async.testing.golden import fill_page  # noqa: F401
from tests.core.world import LONG, QUICK
from tests.flows.model import NAMESPACES, identity
from tests.flows.model_requests import Forward, Request
from tests.flows.model_session import Session
from tests.flows.model_store import FAULTS, VERBS
from tests.flows.model_world import WAYS
from tests.flows.rig import PAGE_TOKENS, page_tokens

MAX_REQUESTS = 6
MAX_PAGES = 9
WHICH = st.integers(0, 99)
NAMESPACE = st.sampled_from([0, 0, 0, *range(len(NAMESPACES))])
TAIL = st.text("ab", max_size=5)
NUM_EXTRA = st.sampled_from([1, 1, 1, 0, 3])
WAY = st.sampled_from(WAYS)
VERB = st.sampled_from(VERBS)
EVICTION = st.sampled_from(["lru", "lfu", "slru", "fifo", "priority"])
POLICIES = [PrefetchPolicy.best_effort(), PrefetchPolicy.wait_complete(), PrefetchPolicy.timeout(0.5)]

OPTIONS = st.fixed_dictionaries(
    {
        "device_pages": st.integers(4, 16),
        "host_pages": st.integers(3, 24),
        "write_policy": st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        "device_eviction_policy": EVICTION,
        "host_eviction_policy": EVICTION,
        "host_layout": st.sampled_from(["page_first", "page_first", "layer_first"]),
        "store_batch_pages": st.sampled_from([1, 2, 3, 128]),
        "write_back_low_water": st.sampled_from([0.0, 0.1, 0.5]),
        "pin_capacity_fraction": st.sampled_from([0.25, 0.5, 1.0]),
        "prefetch_capacity_fraction": st.sampled_from([0.3, 1.0]),
        "prefetch_threshold_tokens": st.sampled_from([0, 0, 8]),
        "prefetch_overflow": st.sampled_from(["shrink", "shrink", "refuse"]),
        "load_threshold_tokens": st.sampled_from([None, 0, 8]),
        "max_loads_in_flight": st.sampled_from([1, 3]),
        "max_offloads_in_flight": st.sampled_from([1, 64]),
        "max_backups_pending": st.sampled_from([1, 1024]),
    }
)


class CacheMachine(RuleBasedStateMachine):
    """What may happen to a cache. Each rule is one step; :class:`Session` checks everything after it."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self._seen = seen
        self.session: Session

    @initialize(
        options=OPTIONS,
        is_roomy=st.sampled_from([True, False, False]),
        has_store=st.sampled_from([True, True, False]),
        auto=st.booleans(),
        pace=st.sampled_from([0, 1, 3, 30, 30]),
    )
    def open(
        self, options: dict[str, object], is_roomy: bool, has_store: bool, auto: bool, pace: int
    ) -> None:
        self.session = Session(options, is_roomy=is_roomy, has_store=has_store, auto=auto, pace=pace)
        self.world, self.engine = self.session.world, self.session.engine
        self.operator, self.forces = self.session.operator, self.session.forces
        self.do = self.session.do
        self.model = self.world.model

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.finish()
            self._seen.update(self.world.seen)

    # Choosing

    def prompt(self, namespace: int, which: int, tail: str, num_extra: int = 0) -> list[int]:
        """Return tokens that go on from something known, or from nothing."""
        known = [(), *sorted(tokens for name, tokens in self.model.tokens.values() if name == namespace)]
        start = known[which % len(known)]
        tokens = [*start, *(token for letter in tail for token in page_tokens(letter))]
        return [*tokens[: MAX_PAGES * PAGE_TOKENS], *[0] * num_extra]

    def requests(self, suits: Callable[[Request], bool]) -> list[Request]:
        return [request for request in self.engine.requests if suits(request)]

    def host_forwards(self) -> list[Forward]:
        return [forward for forward in self.engine.forwards if forward.fence is not None]

    # Requests, up to their load

    @precondition(lambda self: len(self.engine.requests) < MAX_REQUESTS)
    @rule(
        namespace=NAMESPACE,
        which=WHICH,
        tail=TAIL,
        extra=NUM_EXTRA,
        whole=st.booleans(),
        priority=st.integers(0, 2),
        goes_on=st.sampled_from(["", "prefetch", "load", "load", "both"]),
        way=WAY,
    )
    def match(
        self,
        namespace: int,
        which: int,
        tail: str,
        extra: int,
        whole: bool,
        priority: int,
        goes_on: str,
        way: str,
    ) -> None:
        tokens = self.prompt(namespace, which, tail, extra)

        def matching() -> None:
            request = self.engine.match(namespace, tokens, whole=whole, priority=priority)
            if goes_on in ("prefetch", "both"):
                self.engine.prefetch(request, None, way)
            if goes_on in ("load", "both"):
                self.engine.load(request, None, way, wait_pending=True, priority=priority)

        self.do(matching)

    @precondition(lambda self: self.requests(can_prefetch))
    @rule(which=WHICH, policy=st.sampled_from(POLICIES), way=WAY)
    def prefetch(self, which: int, policy: PrefetchPolicy, way: str) -> None:
        request = pick(self.requests(can_prefetch), which)
        self.do(lambda: self.engine.prefetch(request, policy, way))

    @precondition(lambda self: self.requests(has_prefetch))
    @rule(which=WHICH)
    def stop_prefetch(self, which: int) -> None:
        request = pick(self.requests(has_prefetch), which)
        self.do(lambda: self.engine.stop_prefetch(request))

    @precondition(lambda self: self.requests(can_load))
    @rule(
        which=WHICH,
        total=st.sampled_from([None, None, 0, 8, 40]),
        way=WAY,
        wait=st.booleans(),
        priority=WHICH,
    )
    def load(self, which: int, total: int | None, way: str, wait: bool, priority: int) -> None:
        request = pick(self.requests(can_load), which)
        options = {"wait_pending": wait, "priority": priority % 3}
        self.do(lambda: self.engine.load(request, total, way, **options))  # type: ignore[arg-type]

    @precondition(lambda self: len(self.engine.requests) < MAX_REQUESTS)
    @rule(namespace=NAMESPACE, which=WHICH, tail=TAIL, prefetch=st.booleans())
    def serve(self, namespace: int, which: int, tail: str, prefetch: bool) -> None:
        tokens = self.prompt(namespace, which, tail, 1)
        self.do(lambda: self.session.serve(namespace, tokens, prefetch=prefetch))

    # Requests that compute

    @precondition(lambda self: self.requests(can_allocate))
    @rule(which=WHICH, more=st.sampled_from([0, 0, 0, 3, 12]), way=st.sampled_from([*WAYS, "now", "now"]))
    def allocate(self, which: int, more: int, way: str) -> None:
        request = pick(self.requests(can_allocate), which)
        total = len(request.tokens) + more
        if way == "now":
            self.do(lambda: self.engine.allocate_nowait(request, total))
        else:
            self.do(lambda: self.engine.allocate(request, total, way))

    @precondition(lambda self: self.requests(has_to_compute))
    @rule(which=WHICH, on_stream=st.booleans(), commit=WHICH)
    def begin_forward(self, which: int, on_stream: bool, commit: int) -> None:
        request = pick(self.requests(has_to_compute), which)

        def begin() -> None:
            if not self.engine.allocate_nowait(request, len(request.tokens)):
                self.engine.release(request, offload=bool(commit % 2))
            elif request.can_compute:
                self.engine.begin_forward(request, on_stream=on_stream)
                if commit % 3:
                    self.engine.commit(request, commit)

        self.do(begin)

    @precondition(lambda self: self.host_forwards())
    @rule(which=WHICH, fails=st.sampled_from([False, False, False, True]))
    def finish_forward(self, which: int, fails: bool) -> None:
        forward = pick(self.host_forwards(), which)
        self.do(lambda: self.engine.finish_forward(forward, fails=fails))

    @precondition(lambda self: len(self.host_forwards()) < len(self.engine.forwards))
    @rule()
    def end_stream(self) -> None:
        self.do(self.engine.end_stream)

    @precondition(lambda self: self.requests(is_ready))
    @rule(which=WHICH, how_far=WHICH)
    def commit(self, which: int, how_far: int) -> None:
        request = pick(self.requests(is_ready), which)
        self.do(lambda: self.engine.commit(request, how_far))

    @precondition(lambda self: self.requests(is_ready))
    @rule(which=WHICH, tail=st.text("ab", max_size=2), more=st.integers(0, 5))
    def extend(self, which: int, tail: str, more: int) -> None:
        request = pick(self.requests(is_ready), which)
        tokens = [*(token for letter in tail for token in page_tokens(letter)), *[0] * more]
        self.do(lambda: self.engine.extend(request, tokens))

    @precondition(lambda self: self.requests(is_ready))
    @rule(which=WHICH, how_far=WHICH)
    def discard(self, which: int, how_far: int) -> None:
        request = pick(self.requests(is_ready), which)
        self.do(lambda: self.engine.discard(request, how_far))

    @precondition(lambda self: self.engine.requests)
    @rule(which=WHICH, offload=st.booleans())
    def release(self, which: int, offload: bool) -> None:
        request = pick(self.engine.requests, which)
        self.do(lambda: self.engine.release(request, offload=offload))

    @precondition(lambda self: self.requests(is_ready))
    @rule(first=WHICH, second=WHICH, num_pages=st.integers(0, 6), more=st.integers(0, 9))
    def step(self, first: int, second: int, num_pages: int, more: int) -> None:
        ready = self.requests(is_ready)
        one, other = pick(ready, first), pick(ready, second)
        self.do(lambda: self.session.step(one, other, num_pages, more))

    @precondition(lambda self: self.world.calls)
    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        self.do(lambda: self.session.cancel(which))

    # What happens by itself

    @rule(num_turns=st.sampled_from([1, 2, 5, 60]))
    def run(self, num_turns: int) -> None:
        self.do(lambda: None, num_turns)

    @rule(seconds=st.sampled_from([0.01, 0.1, 1, 6]))
    def pass_time(self, seconds: float) -> None:
        self.do(lambda: self.forces.pass_time(seconds))

    @precondition(lambda self: self.world.rig.virtual.pending)
    @rule(how_far=st.sampled_from(["layer", "layer", "copy", "all"]), which=WHICH)
    def move_device(self, how_far: str, which: int) -> None:
        self.do(lambda: self.forces.move_device(how_far, which))

    @precondition(lambda self: self.world.rig.virtual.pending)
    @rule(which=WHICH)
    def fail_copy(self, which: int) -> None:
        self.do(lambda: self.forces.fail_copy(which))

    @precondition(lambda self: self.world.threads.pending)
    @rule()
    def run_threads(self) -> None:
        self.do(self.world.run_threads)

    # The store

    @precondition(lambda self: self.operator.attached)
    @rule(verb=VERB)
    def hold_calls(self, verb: str) -> None:
        self.do(lambda: self.forces.hold_calls(verb))

    @precondition(lambda self: any(store.door for store in self.world.stores))
    @rule(which=WHICH, how=st.sampled_from(["", "", *FAULTS]))
    def answer_call(self, which: int, how: str) -> None:
        store = pick([store for store in self.world.stores if store.door], which)
        self.do(lambda: self.forces.answer(store, which, how))

    @precondition(lambda self: any(store.held for store in self.world.stores))
    @rule()
    def hold_no_more(self) -> None:
        self.do(self.forces.open_stores)

    @precondition(lambda self: self.operator.attached)
    @rule(verb=VERB, how=st.sampled_from(FAULTS))
    def break_next_call(self, verb: str, how: str) -> None:
        self.do(lambda: self.forces.break_next_call(verb, how))

    @precondition(lambda self: self.forces.clean_stores)
    @rule(which=WHICH, namespace=NAMESPACE, prefix=WHICH, tail=TAIL)
    def put_in_store(self, which: int, namespace: int, prefix: int, tail: str) -> None:
        store, tokens = pick(self.forces.clean_stores, which), self.prompt(namespace, prefix, tail)
        self.do(lambda: self.forces.put_in_store(store, namespace, tokens))

    @precondition(lambda self: self.forces.clean_stores)
    @rule(which=WHICH, count=st.integers(1, 4))
    def lose_objects(self, which: int, count: int) -> None:
        store = pick(self.forces.clean_stores, which)
        self.do(lambda: self.forces.lose_objects(store, which, count))

    # The operator

    @precondition(lambda self: not self.operator.is_clearing)
    @rule(which=WHICH, way=WAY)
    def attach(self, which: int, way: str) -> None:
        self.do(lambda: self.operator.attach(which, way))

    @precondition(lambda self: self.operator.attached)
    @rule(force=st.booleans(), way=WAY)
    def detach(self, force: bool, way: str) -> None:
        self.do(lambda: self.operator.detach(way, force=force))

    @precondition(lambda self: not self.operator.is_clearing)
    @rule(tier=st.sampled_from([None, *Tier]), way=WAY)
    def clear(self, tier: Tier | None, way: str) -> None:
        self.do(lambda: self.operator.clear(tier, way))

    @rule(tier=st.sampled_from([Tier.HOST, Tier.STORE]), way=WAY)
    def flush(self, tier: Tier, way: str) -> None:
        self.do(lambda: self.operator.flush(tier, way))

    @rule(namespace=NAMESPACE, which=WHICH, tail=TAIL, ttl_s=st.sampled_from([0.5, 5, 60]))
    def pin(self, namespace: int, which: int, tail: str, ttl_s: float) -> None:
        tokens = self.prompt(namespace, which, tail)
        self.do(lambda: self.operator.pin(namespace, tokens, ttl_s))

    @precondition(lambda self: self.model.pins)
    @rule(which=WHICH)
    def unpin(self, which: int) -> None:
        self.do(lambda: self.operator.unpin(which))

    @rule(namespace=NAMESPACE, which=WHICH, tail=TAIL, way=WAY)
    def explain(self, namespace: int, which: int, tail: str, way: str) -> None:
        tokens = self.prompt(namespace, which, tail, 1)
        self.do(lambda: self.operator.explain(namespace, tokens, way))


def pick(choices, which):
    return choices[which % len(choices)]


def can_prefetch(request: Request) -> bool:
    return not request.has_loaded and request.prefetch_call is None and request.lease._prefetch is None


def has_prefetch(request: Request) -> bool:
    return request.lease._prefetch is not None


def can_load(request: Request) -> bool:
    return not request.has_loaded


def is_ready(request: Request) -> bool:
    return request.is_ready


def can_allocate(request: Request) -> bool:
    return request.is_ready


def has_to_compute(request: Request) -> bool:
    return (
        request.is_ready and request.forward is None and len(request.tokens) > request.computed * PAGE_TOKENS
    )


def test_cache_agrees_with_a_dictionary(logs: list[object]) -> None:
    """Whatever happens, a cache finds what a dictionary says, with the right bytes, and loses nothing but for room."""
    seen: Counter[str] = Counter()
    run_machine(lambda: CacheMachine(seen), settings=QUICK)
    print(seen)
