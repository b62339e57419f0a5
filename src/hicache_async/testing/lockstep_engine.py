"""An engine over several ranks, as a serving framework writes it: every rank runs the same batch in each step.

Each rank has one. A request reaches the ranks at moments of their own; its task matches, prefetches and loads.
The loop admits what a step's grant names and nothing else, computes from the agreed length, allocates within
what was agreed, and preempts the youngest when there is no room. A client that hangs up is heard of between two
steps, the same ones on every rank, as after a broadcast. In its forward a request reads all of its pages so far
and writes the next ones; a page holds bytes of its own on each rank, so a foreign byte says whose it is.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..cache import HiCache
from ..config import PrefetchMode
from ..errors import ConsensusError
from ..lease import Allocation, Loading, PrefixLease
from ..step import StepBatch, StepGrant
from ._exam_engine import PAGE_TOKENS, prompt
from .golden import check_page, fill_page
from .lockstep_script import LockstepRequest, Luck, Pause

MAX_STEPS = 3000
"""A run of more steps makes no progress."""

CHUNK_TOKENS = 2 * PAGE_TOKENS
STEPS_PUT_BACK = 2
"""How long a request stays away whose prefix another one computes."""

SPARE_PAGES = 3
"""What a step asks for beyond the needs of those who run: for those who enter in it."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank did in one step.

    Attributes:
        num_pages: granted.
        loaded: the loads that entered, in order: request, attempt and tokens.
        batch: whom the forward ran for: request, tokens computed before, tokens after, pages held.
    """

    num_pages: int
    loaded: tuple[tuple[str, int, int], ...]
    batch: tuple[tuple[str, int, int, int], ...]


@dataclass(slots=True)
class LockstepRecord:
    """What one rank did.

    Attributes:
        loads: request and attempt, to the tokens that its load returned.
        foreign: what was read and was another page's, or another rank's.
        preempted, put_back, gone: how often.
        lost: what a ConsensusError said, if one ended the run.
    """

    rank: int
    steps: list[Step] = field(default_factory=list)
    loads: dict[tuple[str, int], int] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    preempted: int = 0
    put_back: int = 0
    gone: int = 0
    finished: int = 0
    lost: str | None = None


@dataclass(slots=True, eq=False)
class _Running:
    request: LockstepRequest
    attempt: int
    lease: PrefixLease
    loading: Loading
    computed: int
    after: Allocation | None = None

    @property
    def next_stop(self) -> int:
        return min(self.computed + CHUNK_TOKENS, self.lease.num_tokens)

    @property
    def decoded(self) -> int:
        return self.lease.num_tokens - self.request.prompt_tokens


class LockstepEngine:
    """One rank's engine over its cache.

    Args:
        luck: of this rank; its script says what all ranks do.
        pause: how this rank waits.
        on_step: called with the number of each step that is over.
    Attributes:
        record: filled as it runs.
    """

    def __init__(
        self,
        cache: HiCache,
        luck: Luck,
        pause: Pause,
        *,
        on_step: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._cache = cache
        self._luck = luck
        self._pause = pause
        self._on_step = on_step
        self._requests = {request.name: request for request in luck.script.requests}
        self._age = {name: age for age, name in enumerate(self._requests)}
        self._attempts: dict[str, int] = {}
        self._bringing: dict[str, asyncio.Task[None]] = {}
        self._handed: dict[PrefixLease, _Running] = {}
        self._running: list[_Running] = []
        self._leaving: list[_Running] = []
        """Finished, or gone: released in the step that begins next."""
        self._put_back: dict[str, int] = {}
        """Requests whose prefix others compute, to the step at which they come back."""
        self._preempted: list[str] = []
        """Until those who went on have made room: otherwise all of them would take it from each other for ever."""
        self._over: set[str] = set()
        self.record = LockstepRecord(luck.rank)

    @property
    def step_number(self) -> int:
        """Steps done."""
        return len(self.record.steps)

    async def run(self) -> LockstepRecord:
        """Serve the script to its end.

        Raises: AssertionError: no end comes in sight.
        Cancellation: releases everything.
        """
        arriving = asyncio.create_task(self._arrive(), name="lockstep:arrivals")
        try:
            while len(self._over) < len(self._requests):
                assert self.step_number < MAX_STEPS, f"{self._unfinished()} do not end in {MAX_STEPS} steps"
                self._raise_failures()
                await self._step()
        except ConsensusError as error:
            self.record.lost = str(error)
        finally:
            arriving.cancel()
            self._release_all()
            await asyncio.wait([arriving, *self._bringing.values()])
        self._raise_failures()
        return self.record

    def _unfinished(self) -> list[str]:
        return [name for name in self._requests if name not in self._over]

    def _release_all(self) -> None:
        for task in self._bringing.values():
            task.cancel()
        for each in (*self._running, *self._leaving, *self._handed.values()):
            each.lease.release()
        self._running.clear()
        self._handed.clear()

    def _raise_failures(self) -> None:
        for task in self._bringing.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    # A request's own task

    async def _arrive(self) -> None:
        for moment, request in self._luck.arrivals():
            await self._pause(moment)
            if request.name not in self._over:
                self._bring(request)

    def _bring(self, request: LockstepRequest) -> None:
        attempt = self._attempts[request.name] = self._attempts.get(request.name, 0) + 1
        task = asyncio.create_task(self._fetch(request, attempt), name=f"lockstep:{request.name}")
        self._bringing[request.name] = task

    async def _fetch(self, request: LockstepRequest, attempt: int) -> None:
        lease = self._cache.match_prefix(request.name, prompt(request.letters))
        with lease:
            try:
                if request.prefetches:
                    await self._prefetch(lease, request)
                loading = await lease.load(request.room_tokens)
            except ConsensusError:
                return  # the engine hears of it in its next step
            self.record.loads[request.name, attempt] = loading.tokens
            running = _Running(request, attempt, lease.keep(), loading, loading.tokens)
            self._handed[lease] = running

    async def _prefetch(self, lease: PrefixLease, request: LockstepRequest) -> None:
        policy, luck = request.policy, self._luck
        if policy is None or policy.mode is not PrefetchMode.BEST_EFFORT:
            await lease.prefetch(policy)
            return
        prefetch = lease.start_prefetch(policy)
        await self._pause(luck.moment(20))
        prefetch.stop()

    # The loop

    async def _step(self) -> None:
        cache, number = self._cache, self.step_number + 1
        finished = self._finish()
        self._leaving = [*finished, *self._hang_up(number)]
        self._come_back(number, has_room=bool(self._leaving) or not self._running)
        grant = await cache.begin_step(self._wanted_pages())
        computed = [(each.lease, each.computed) for each in (*self._running, *finished)]
        loaded = self._admit(grant)
        batch = self._running
        result = cache.step(
            StepBatch(
                commit=computed,
                extend=[(each.lease, tokens) for each in batch if (tokens := self._decode(each))],
                release=[each.lease for each in self._leaving],
                allocate=[(each.lease, self._goal(each)) for each in batch],
            )
        )
        self._leaving = []
        batch = self._place(batch, result.allocations, number)
        self.record.steps.append(
            Step(
                grant.num_pages,
                loaded,
                tuple(
                    (each.request.name, each.computed, each.next_stop, len(each.lease.pages))
                    for each in batch
                ),
            )
        )
        await self._forward(batch)
        self._on_step(number)

    def _finish(self) -> list[_Running]:
        done = [
            each
            for each in self._running
            if each.computed == each.lease.num_tokens and each.decoded == each.request.output_tokens
        ]
        self._running = [each for each in self._running if each not in done]
        self._over |= {each.request.name for each in done}
        self.record.finished += len(done)
        return done

    def _hang_up(self, number: int) -> list[_Running]:
        # Whatever has become of the request on this rank: it may not even have arrived.
        gone = {request.name for request in self._requests.values() if request.gone_at == number} - self._over
        self._over |= gone
        self.record.gone += len(gone)
        for name in gone:
            self._put_back.pop(name, None)
            if (task := self._bringing.get(name)) is not None:
                task.cancel()
        self._preempted = [name for name in self._preempted if name not in gone]
        for lease, each in list(self._handed.items()):
            if each.request.name in gone:
                del self._handed[lease]
                lease.release()
        dropped = [each for each in self._running if each.request.name in gone]
        self._running = [each for each in self._running if each not in dropped]
        return dropped

    def _come_back(self, number: int, *, has_room: bool) -> None:
        back = [name for name, when in self._put_back.items() if when <= number]
        for name in back:
            del self._put_back[name]
        if has_room and self._preempted:
            self._preempted.sort(key=self._age.__getitem__)
            back.append(self._preempted.pop(0))
        for name in back:
            self._bring(self._requests[name])

    def _wanted_pages(self) -> int:
        needs = (
            -(-(each.next_stop + CHUNK_TOKENS) // PAGE_TOKENS) - len(each.lease.pages)
            for each in self._running
        )
        return sum(max(0, need) for need in needs) + SPARE_PAGES

    def _admit(self, grant: StepGrant) -> tuple[tuple[str, int, int], ...]:
        loaded: list[tuple[str, int, int]] = []
        for lease in grant.loaded:
            each = self._handed.pop(lease)
            loaded.append((each.request.name, each.attempt, each.loading.tokens))
            if lease.pending_tokens:  # another computes it: look again when that has been committed
                self.record.put_back += 1
                self._leaving.append(each)
                self._put_back[each.request.name] = self.step_number + 1 + STEPS_PUT_BACK
            else:
                self._running.append(each)
        return tuple(loaded)

    def _decode(self, each: _Running) -> list[int]:
        if each.computed < each.lease.num_tokens:
            return []
        left = each.request.output_tokens - each.decoded
        return [1_000_000 + self._age[each.request.name] * 100 + each.decoded] if left else []

    def _goal(self, each: _Running) -> int:
        decodes = 1 if self._decode(each) else 0
        return min(each.computed + CHUNK_TOKENS, each.lease.num_tokens + decodes)

    def _place(
        self, asked: Sequence[_Running], allocations: Sequence[Allocation | None], number: int
    ) -> list[_Running]:
        batch: list[_Running] = []
        starved = False
        for each, allocation in zip(asked, allocations, strict=True):
            each.after = allocation
            starved |= allocation is None
            if allocation is not None:
                batch.append(each)
        if starved:
            victim = max(self._running, key=lambda each: self._age[each.request.name])
            self._running = [each for each in self._running if each is not victim]
            batch = [each for each in batch if each is not victim]
            victim.lease.release(offload=number % 2 == 0)
            self._preempted.append(victim.request.name)
            self.record.preempted += 1
        return batch

    async def _forward(self, batch: Sequence[_Running]) -> None:
        ctx = self._cache._ctx
        await self._pause(self._luck.moment(2))
        for each in batch:
            await each.loading.finished()
            if each.after is not None and each.after.after is not None:
                await ctx.device.wait(each.after.after)
            self._compute(each)
        await self._pause(0)

    def _compute(self, each: _Running) -> None:
        kv, stop, pages = self._cache._ctx.kv, each.next_stop, each.lease.pages
        hashes = each.lease._holding.hashes(stop // PAGE_TOKENS)
        try:
            for page in range(each.computed // PAGE_TOKENS):
                check_page(kv, int(pages[page]), rank_hash(hashes[page], self._luck.rank))
        except AssertionError as error:
            self.record.foreign.append(f"{each.request.name}, {each.computed} tokens computed: {error}")
        for page in range(each.computed // PAGE_TOKENS, stop // PAGE_TOKENS):
            fill_page(kv, int(pages[page]), rank_hash(hashes[page], self._luck.rank))
        each.computed = stop


def rank_hash(page_hash: bytes, rank: int) -> bytes:
    """Return what names the bytes of a page on one rank."""
    return hashlib.blake2b(page_hash, digest_size=16, salt=rank.to_bytes(4, "little")).digest()
