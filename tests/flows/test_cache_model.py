"""A whole cache against a dictionary: whatever requests, devices, stores and operators do, in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from hicache_async import PrefetchPolicy, Tier
from tests.core.world import LONG, QUICK
from tests.flows.model import NAMESPACES
from tests.flows.model_requests import Request
from tests.flows.model_session import Session
from tests.flows.model_store import FAULTS, VERBS
from tests.flows.model_world import WAYS
from tests.flows.rig import PAGE_TOKENS, page_tokens

T = TypeVar("T")

MAX_REQUESTS = 6
MAX_PAGES = 9
WHICH = st.integers(0, 99)
NAMESPACE = st.sampled_from([0, 0, 0, *range(len(NAMESPACES))])
TAIL = st.just("") | st.text("ab", max_size=5)
NUM_EXTRA = st.sampled_from([1, 1, 1, 0, 3])
WAY = st.sampled_from(WAYS)
VERB = st.sampled_from(["read", "read", "write", "write", *VERBS])
HELD = st.sampled_from([(), (), ("read",), ("read",), ("write",), VERBS])
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
    """What may happen to a cache. Each rule is one step; the session checks everything after it."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self._seen = seen
        self.session: Session

    @initialize(
        options=OPTIONS,
        is_roomy=st.sampled_from([False, False, True]),
        has_store=st.sampled_from([True, True, False]),
        auto=st.sampled_from([False, False, True]),
        pace=st.sampled_from([0, 1, 3, 60, 60]),
        cached=st.lists(TAIL, max_size=3),
        stored=st.lists(TAIL, max_size=2),
        held=HELD,
    )
    def open(
        self,
        options: dict[str, object],
        is_roomy: bool,
        has_store: bool,
        auto: bool,
        pace: int,
        cached: list[str],
        stored: list[str],
        held: Sequence[str],
    ) -> None:
        self.session = Session(options, is_roomy=is_roomy, has_store=has_store, auto=auto, pace=pace)
        self.world, self.engine = self.session.world, self.session.engine
        self.operator, self.forces = self.session.operator, self.session.forces
        self.do = self.session.do
        self.model = self.world.model
        for letters in cached:
            self.do(lambda letters=letters: self.session.serve(0, prompt(letters, 1), prefetch=False), 60)
        for letters in stored:
            self.use_store_from_elsewhere(0, 0, 0, letters, 0)
        for verb in held:
            self.do(lambda verb=verb: self.forces.trouble_calls(verb, "hold"))

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.finish()
            self._seen.update(self.world.seen)

    # Choosing

    def prompt(self, namespace: int, which: int, tail: str, num_extra: int = 0) -> list[int]:
        """Return tokens that go on from something known, or from nothing."""
        known = [(), *sorted(tokens for where, tokens in self.model.tokens.values() if where == namespace)]
        tokens = [*known[which % len(known)], *prompt(tail)]
        return [*tokens[: MAX_PAGES * PAGE_TOKENS], *[0] * num_extra]

    def requests(self, suits: Callable[[Request], bool]) -> list[Request]:
        return [request for request in self.engine.requests if suits(request)]

    # Requests, the usual way

    @rule(
        namespace=NAMESPACE,
        prefix=WHICH,
        tail=TAIL,
        extra=NUM_EXTRA,
        whole=st.booleans(),
        goes_on=WHICH,
        way=WAY,
    )
    def match(
        self, namespace: int, prefix: int, tail: str, extra: int, whole: bool, goes_on: int, way: str
    ) -> None:
        tokens = self.prompt(namespace, prefix, tail, extra)
        if len(self.engine.requests) < MAX_REQUESTS:
            self.do(lambda: self.session.start(namespace, tokens, whole, goes_on, way))

    @rule(which=WHICH, choice=WHICH, way=WAY, namespace=NAMESPACE, prefix=WHICH, tail=TAIL)
    def go_on(self, which: int, choice: int, way: str, namespace: int, prefix: int, tail: str) -> None:
        if not self.engine.requests:
            self.match(namespace, prefix, tail, 1, False, choice, way)
        else:
            request = pick(self.engine.requests, which)
            self.do(lambda: self.session.go_on(request, choice, way))

    @rule(which=WHICH, choice=WHICH, way=WAY, namespace=NAMESPACE, prefix=WHICH, tail=TAIL)
    def go_on_too(self, which: int, choice: int, way: str, namespace: int, prefix: int, tail: str) -> None:
        self.go_on(which, choice, way, namespace, prefix, tail)  # more often than anything else

    @rule(which=WHICH, choice=WHICH, way=WAY, namespace=NAMESPACE, prefix=WHICH, tail=TAIL)
    def go_on_again(self, which: int, choice: int, way: str, namespace: int, prefix: int, tail: str) -> None:
        self.go_on(which, choice, way, namespace, prefix, tail)

    @rule(namespace=NAMESPACE, prefix=WHICH, tail=TAIL, prefetch=st.booleans())
    def serve(self, namespace: int, prefix: int, tail: str, prefetch: bool) -> None:
        tokens = self.prompt(namespace, prefix, tail, 1)
        if len(self.engine.requests) < MAX_REQUESTS:
            self.do(lambda: self.session.serve(namespace, tokens, prefetch=prefetch))

    # Requests, and what else they may do

    @precondition(lambda self: self.requests(Request.can_prefetch))
    @rule(which=WHICH, policy=st.sampled_from(POLICIES), way=WAY)
    def prefetch(self, which: int, policy: PrefetchPolicy, way: str) -> None:
        request = pick(self.requests(Request.can_prefetch), which)
        self.do(lambda: self.engine.prefetch(request, policy, way))

    @precondition(lambda self: self.requests(Request.has_prefetch))
    @rule(which=WHICH)
    def stop_prefetch(self, which: int) -> None:
        request = pick(self.requests(Request.has_prefetch), which)
        self.do(lambda: self.engine.stop_prefetch(request))

    @precondition(lambda self: self.requests(Request.can_load))
    @rule(which=WHICH, total=st.sampled_from([0, 8, 40]), way=WAY, wait=st.booleans(), priority=WHICH)
    def load(self, which: int, total: int, way: str, wait: bool, priority: int) -> None:
        request = pick(self.requests(Request.can_load), which)
        self.do(lambda: self.engine.load(request, total, way, wait_pending=wait, priority=priority % 3))

    @precondition(lambda self: self.requests(Request.is_ready))
    @rule(which=WHICH, more=st.sampled_from([0, 0, 0, 3, 12]), way=st.sampled_from([*WAYS, "now"]))
    def allocate(self, which: int, more: int, way: str) -> None:
        request = pick(self.requests(Request.is_ready), which)
        total = len(request.tokens) + more
        if way == "now":
            self.do(lambda: self.engine.allocate_nowait(request, total))
        else:
            self.do(lambda: self.engine.allocate(request, total, way))

    @precondition(lambda self: self.requests(Request.is_ready))
    @rule(which=WHICH, how_far=WHICH)
    def discard(self, which: int, how_far: int) -> None:
        request = pick(self.requests(Request.is_ready), which)
        self.do(lambda: self.engine.discard(request, how_far))

    @precondition(lambda self: self.engine.requests)
    @rule(which=WHICH, offload=st.booleans())
    def release(self, which: int, offload: bool) -> None:
        request = pick(self.engine.requests, which)
        self.do(lambda: self.engine.release(request, offload=offload))

    @precondition(lambda self: self.requests(Request.is_ready))
    @rule(first=WHICH, second=WHICH, num_pages=st.integers(0, 6), more=st.integers(0, 9))
    def step(self, first: int, second: int, num_pages: int, more: int) -> None:
        ready = self.requests(Request.is_ready)
        one, other = pick(ready, first), pick(ready, second)
        self.do(lambda: self.session.step(one, other, num_pages, more))

    @precondition(lambda self: self.world.calls)
    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        self.do(lambda: self.session.cancel(which))

    # What happens by itself

    @rule(which=WHICH, choice=WHICH)
    def something_ends(self, which: int, choice: int) -> None:
        self.do(lambda: self.forces.end_something(which, choice))

    @rule(which=WHICH, choice=WHICH)
    def something_else_ends(self, which: int, choice: int) -> None:
        self.something_ends(which, choice)

    @rule(num_turns=st.sampled_from([1, 2, 5, 60]))
    def run(self, num_turns: int) -> None:
        self.do(lambda: None, num_turns)

    @rule(seconds=st.sampled_from([0.01, 0.1, 1, 6, 6]))
    def pass_time(self, seconds: float) -> None:
        self.do(lambda: self.forces.pass_time(seconds))

    # The store

    @precondition(lambda self: self.operator.attached)
    @rule(verb=VERB, how=st.sampled_from(["hold", "hold", "hold", *FAULTS]))
    def trouble_calls(self, verb: str, how: str) -> None:
        self.do(lambda: self.forces.trouble_calls(verb, how))

    @precondition(lambda self: any(store.held for store in self.world.stores))
    @rule()
    def hold_no_more(self) -> None:
        self.do(self.forces.open_stores)

    @rule(which=WHICH, namespace=NAMESPACE, prefix=WHICH, tail=TAIL, lose=st.integers(0, 3))
    def use_store_from_elsewhere(self, which: int, namespace: int, prefix: int, tail: str, lose: int) -> None:
        tokens = self.prompt(namespace, prefix, tail)
        if lose % 2:
            self.do(lambda: self.forces.lose_objects(which, lose))
        else:
            self.do(lambda: self.forces.put_in_store(which, namespace, tokens))

    # The operator

    @rule(which=WHICH, way=WAY, how=st.sampled_from(["attach", "detach", "force"]))
    def change_store(self, which: int, way: str, how: str) -> None:
        if self.operator.attached is None or how == "attach":
            self.do(lambda: self.operator.attach(which, way))
        else:
            self.do(lambda: self.operator.detach(way, force=how == "force"))

    @rule(tier=st.sampled_from([None, *Tier]), way=WAY)
    def clear(self, tier: Tier | None, way: str) -> None:
        self.do(lambda: self.operator.clear(tier, way))

    @rule(flushed=st.sampled_from([None, Tier.HOST, Tier.STORE]), namespace=NAMESPACE, prefix=WHICH, way=WAY)
    def flush_or_explain(self, flushed: Tier | None, namespace: int, prefix: int, way: str) -> None:
        tokens = self.prompt(namespace, prefix, "a", 1)
        if flushed is None:
            self.do(lambda: self.operator.explain(namespace, tokens, way))
        else:
            self.do(lambda: self.operator.flush(flushed, way))

    @rule(namespace=NAMESPACE, prefix=WHICH, tail=TAIL, ttl_s=st.sampled_from([0, 0.5, 5, 60]))
    def pin_or_unpin(self, namespace: int, prefix: int, tail: str, ttl_s: float) -> None:
        tokens = self.prompt(namespace, prefix, tail)
        if ttl_s:
            self.do(lambda: self.operator.pin(namespace, tokens, ttl_s))
        else:
            self.do(lambda: self.operator.unpin(prefix))


def prompt(letters: str, num_extra: int = 0) -> list[int]:
    """Return the tokens of a page for each letter, and some more."""
    return [*(token for letter in letters for token in page_tokens(letter)), *[0] * num_extra]


def pick(choices: Sequence[T], which: int) -> T:
    """Return one of ``choices``."""
    return choices[which % len(choices)]


def check_against_a_dictionary(logs: list[object], how: settings) -> None:
    """Run the machine, and see that it did not pass by finding nothing."""
    seen: Counter[str] = Counter()

    def machine() -> CacheMachine:
        logs.clear()  # errors that were logged keep the caches that they came from
        return CacheMachine(seen)

    run_machine(machine, settings=how)
    for what in ("committed pages that had to be found", "device pages checked", "matched pages"):
        assert seen[what], f"never seen: {what}"


def test_cache_agrees_with_a_dictionary(logs: list[object]) -> None:
    """Whatever happens, a cache finds what a dictionary says, with the right bytes, and loses nothing but for room."""
    check_against_a_dictionary(logs, QUICK)


@pytest.mark.stress
@pytest.mark.parametrize("part", range(8))
def test_cache_agrees_with_a_dictionary_for_long(logs: list[object], part: int) -> None:
    """So it does in two thousand lives."""
    check_against_a_dictionary(logs, LONG)
