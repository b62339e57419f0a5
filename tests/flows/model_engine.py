"""The engine of the modelled cache: requests, each in a small state of its own, and the forwards that run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hicache_async import Allocation, CapacityError, LeaseError, Loading, PrefetchPolicy, Stop
from hicache_async._fence import engine_fence_in
from tests.flows.model import NAMESPACES, device_pages, identity, local_pages, look
from tests.flows.model_requests import Forward, ForwardError, Request
from tests.flows.model_world import World
from tests.flows.rig import NUM_LAYERS, PAGE_TOKENS


class Engine:
    """All requests of one cache."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requests: list[Request] = []
        self.forwards: list[Forward] = []
        self.num_begun = 0
        self._served = 0

    # From match to load

    def match(self, namespace: int, tokens: Sequence[int], *, whole: bool, priority: int) -> Request:
        """Start a request; what it finds is what the dictionary says."""
        model = self.world.model
        names = model.note(namespace, tokens)
        salt, adapter = NAMESPACES[namespace]
        self._served += 1
        lease = self.world.rig.cache.match_prefix(
            f"request {self._served % 5}",  # as if it had been preempted and came back
            list(tokens),
            salt=salt,
            adapter=adapter,
            priority=priority,
            output_priority=priority // 2,
            whole=whole,
        )
        limit = lease._holding.limit_pages
        assert limit == max(0, len(tokens) - (not whole)) // PAGE_TOKENS
        held = look(self.world.rig.ctx.tree)
        assert lease.device_tokens == device_pages(held, names[:limit]) * PAGE_TOKENS
        assert lease.local_tokens == local_pages(held, names[:limit]) * PAGE_TOKENS
        self.world.seen["matched pages"] += lease.local_tokens // PAGE_TOKENS
        request = Request(lease, namespace, list(tokens), names)
        self.requests.append(request)
        return request

    def prefetch(self, request: Request, policy: PrefetchPolicy | None, way: str) -> None:
        """Start a prefetch, and somebody who waits for its end whatever becomes of the caller."""
        prefetch, world = request.lease.prefetch, self.world

        async def prefetching() -> None:
            try:
                await prefetch(policy)
            except LeaseError:
                assert request.is_released

        request.prefetch_step = world.step_number
        request.prefetch_call = world.call("prefetch", prefetching, way)
        world.call("watch", lambda: self._watch(request))

    def stop_prefetch(self, request: Request) -> None:
        """End a prefetch early."""
        assert request.lease._prefetch is not None
        stopped = request.lease._prefetch.stop()
        assert stopped == request.lease._prefetch.fetched_pages * PAGE_TOKENS
        self.world.disturb("stopped prefetches")

    async def _watch(self, request: Request) -> None:
        world, prefetch = self.world, request.lease._prefetch
        if prefetch is None:
            return
        limit, trouble = request.lease._holding.limit_pages, world.trouble
        stored = self._stored_pages(request, limit)
        num_begun = self.num_begun - len(self.forwards)  # a forward may keep the anchor from the host
        result = await prefetch.settled()
        missing = max(0, limit - prefetch.start_page) * PAGE_TOKENS
        assert 0 <= result.fetched_tokens <= result.hit_tokens <= missing
        # By the time its turn came, others may have brought or computed what was missing.
        assert result.stop is Stop.NOTHING_MISSING or missing > 0
        assert result.stop is not Stop.NOTHING_MISSING or result.hit_tokens == 0
        assert result.stop is not Stop.COMPLETE or result.hit_tokens > 0
        world.model.unfulfilled += missing - result.fetched_tokens
        world.seen[f"prefetch {result.stop}"] += 1
        is_leaving = any(call.name == "detach" for call in world.calls)
        if trouble == world.trouble and world.model.is_roomy and not is_leaving:
            threshold = world.rig.ctx.config.effective_prefetch_threshold_tokens
            found = (stored - prefetch.start_page) * PAGE_TOKENS if missing >= threshold else 0
            assert result.hit_tokens >= found, "the store has more"
            if result.hit_tokens >= threshold and self.num_begun == num_begun:
                hit_pages = prefetch.start_page + result.hit_tokens // PAGE_TOKENS
                assert local_pages(look(world.rig.ctx.tree), request.names) >= hit_pages, (
                    "not all was brought"
                )
            world.seen["prefetches that had to find"] += found > 0

    def _stored_pages(self, request: Request, limit: int) -> int:
        """Return how far a prompt is local or stored now."""
        ctx = self.world.rig.ctx
        objects = getattr(ctx.store, "objects", {})
        local = local_pages(look(ctx.tree), request.names[:limit])
        keys = ctx.keys.keys(request.names[local:limit])
        return local + next((count for count, key in enumerate(keys) if key not in objects), len(keys))

    def load(
        self, request: Request, total: int | None, way: str, *, wait_pending: bool, priority: int
    ) -> None:
        """Start to load."""

        async def loading() -> None:
            try:
                loading = await request.lease.load(total, wait_pending=wait_pending, priority=priority)
            except LeaseError:
                assert request.is_released
            else:
                self._loaded(request, loading, len(request.tokens) if total is None else total)

        request.has_loaded = True
        request.call = self.world.call("load", loading, way)

    def _loaded(self, request: Request, loading: Loading, total: int) -> None:
        # In the same turn of the loop in which the load was submitted.
        world, rig, lease = self.world, self.world.rig, request.lease
        held = look(rig.ctx.tree)
        pages = loading.tokens // PAGE_TOKENS
        names = request.names[: lease._holding.limit_pages]
        assert loading.pages.tolist() == [held[name].device for name in names[:pages]] == lease.pages.tolist()
        left_out = (local_pages(held, names) - pages) * PAGE_TOKENS
        assert 0 <= loading.reserved_tokens <= max(0, total - loading.tokens)
        if world.model.is_roomy:
            assert left_out == 0 or left_out < rig.ctx.config.effective_load_threshold_tokens
            assert loading.reserved_tokens == max(0, total - loading.tokens)
            world.seen["loads that had to find all"] += pages > 0
        self._check_books(request, loading)
        request.loading, request.weights, request.is_cut = loading, world.model.weights, False
        request.guaranteed_tokens = loading.tokens + loading.reserved_tokens
        request.computed = request.committed = pages
        world.seen["loaded pages"] += loading.loaded_tokens // PAGE_TOKENS

    def _check_books(self, request: Request, loading: Loading) -> None:
        books, prefetch = request.lease.books, request.lease._prefetch
        assert books.prompt == len(request.tokens)
        assert books.prompt - books.computed == loading.tokens == books.device + books.host + books.store
        num_loaded = loading.tokens // PAGE_TOKENS
        brought = [page for run in prefetch.brought for page in run] if prefetch is not None else []
        brought = [page for page in brought if page < num_loaded]
        for page in brought:
            assert self.world.has_arrived(request.names[page], request.prefetch_step), (
                "credited to the store, and not from it"
            )
        if brought and not books.store:  # cut off from matching, and come again from elsewhere
            assert not self.world.model.is_pristine
            brought = []
        assert books.store == len(brought) * PAGE_TOKENS
        num_device = num_loaded - loading.loaded_tokens // PAGE_TOKENS
        assert books.device == (num_device - sum(page < num_device for page in brought)) * PAGE_TOKENS
        booked = self.world.model.booked
        for tier in ("device", "host", "store", "computed"):
            booked[tier] += getattr(books, tier)
        self.world.seen["tokens from the store"] += books.store

    # Computing

    def allocate_nowait(self, request: Request, total: int) -> bool:
        """Take pages at once; returns whether there were any."""
        before = len(request.lease.pages)
        try:
            allocation = request.lease.allocate_nowait(total)
        except CapacityError:
            self.refused(request, total)
            return False
        self.allocated(request, allocation, before, total)
        return True

    def allocate(self, request: Request, total: int, way: str) -> None:
        """Start to wait for pages."""

        async def allocating() -> None:
            before = len(request.lease.pages)
            try:
                allocation = await request.lease.allocate(total)
            except CapacityError:
                self.refused(request, total)
            except LeaseError:
                assert request.is_released
            else:
                self.allocated(request, allocation, before, total)

        request.call = self.world.call("allocate", allocating, way)

    def refused(self, request: Request, total: int) -> None:
        """Check that pages were refused for a reason."""
        assert not self.world.model.is_roomy
        assert total > request.guaranteed_tokens, "what load had promised was refused"
        self.world.seen["refused allocations"] += 1

    def allocated(self, request: Request, allocation: Allocation, before: int, total: int) -> None:
        """Take over pages that were granted."""
        pages = request.lease.pages
        assert len(pages) == max(before, -(-total // PAGE_TOKENS))
        assert allocation.pages.tolist() == pages[before:].tolist()
        if allocation.after is not None:
            assert engine_fence_in(allocation.after) is None, "pages that wait for another forward"
            request.after.append(allocation.after)
            self.world.seen["pages behind a fence"] += 1

    def begin_forward(self, request: Request, *, on_stream: bool) -> Forward:
        """Start a forward over all tokens: the pages that it will write are scribbled over at once."""
        world, weights = self.world, request.weights
        pages = request.lease.pages.tolist()
        start, end_page = request.computed, len(request.tokens) // PAGE_TOKENS
        if on_stream:
            world.rig.virtual.begin_compute()
        own = pages[start : -(-len(request.tokens) // PAGE_TOKENS)]
        forward = Forward(
            None if on_stream else world.rig.cache.host_fence(),
            {page: identity(request.names[n], weights) for n, page in enumerate(pages[:start])},
            {page: identity(b"scribble %d" % n, self._served) for n, page in enumerate(own)},
            {
                page: identity(name, weights)
                for page, name in zip(pages[start:], request.names[start:end_page], strict=False)
            },
            end_page,
        )
        for page, scribble in forward.writes.items():
            world.device_bytes.write(page, scribble)
        request.forward = forward
        request.after.clear()
        self.forwards.append(forward)
        self.num_begun += 1
        return forward

    def finish_forward(self, forward: Forward, *, fails: bool = False) -> None:
        """Let a forward write what it has computed, or leave the scribble, and end."""
        world = self.world
        self.check_forward(forward)
        if not fails:
            for page, page_identity in forward.results.items():
                world.device_bytes.write(page, page_identity)
        self.forwards.remove(forward)
        for request in self.requests:
            if request.forward is forward:
                request.forward = None
                request.is_broken |= fails
                request.computed = max(request.computed, forward.end_page)
        if fails:
            world.num_failed += 1
            world.disturb("failed forwards")
            self.doubt(forward.committed)
        if forward.fence is None:
            return
        if fails:
            forward.fence.fail(ForwardError())
        else:
            forward.fence.set()

    def doubt(self, names: Iterable[bytes]) -> None:
        """Let pages be cut off, with all that stands on them, as soon as the cache hears of it."""
        self.world.doubtful.update(dict.fromkeys(names, self.world.step_number))
        for request in self.requests:
            request.is_cut |= self.world.is_doubtful(request.names[: request.committed])

    def end_stream(self) -> None:
        """End what runs on the device's own stream."""
        for forward in [forward for forward in self.forwards if forward.fence is None]:
            self.finish_forward(forward)
        while self.world.rig.virtual.end_compute():
            pass

    def check_forward(self, forward: Forward) -> None:
        """Check that nobody has touched what a forward reads, or writes."""
        pages = {**forward.reads, **forward.writes}
        self.world.device_bytes.check(list(pages), list(pages.values()))

    def commit(self, request: Request, which: int) -> None:
        """Commit up to some page that is computed, or that the running forward computes."""
        forward = request.forward
        end = request.computed if forward is None else max(request.computed, forward.end_page)
        first = request.committed
        num_tokens = (first + which % (max(0, end - first) + 1)) * PAGE_TOKENS
        most = min(len(request.tokens), len(request.lease.pages) * PAGE_TOKENS)
        num_tokens = min(num_tokens + which % PAGE_TOKENS, most)
        committed = request.lease.commit(num_tokens, after=None if forward is None else forward.fence)
        self.committed(request, num_tokens)
        assert committed == request.committed * PAGE_TOKENS

    def committed(self, request: Request, num_tokens: int) -> None:
        """Take over a commit that has just been made."""
        model, start = self.world.model, request.committed
        request.committed = max(start, num_tokens // PAGE_TOKENS)
        names = request.names[: request.committed]
        new = names[start:]
        if request.forward is not None:
            request.forward.committed.update(new)
        request.is_cut |= self.world.is_doubtful(names)
        if request.weights == model.weights:
            model.note_commit(new)
        elif new:
            self.world.seen["pages committed behind a clear"] += len(new)
        if not request.is_cut:
            assert device_pages(look(self.world.rig.ctx.tree), names) == len(names), "a commit was lost"
            model.commits.update(names[request.credited :])
            request.credited = len(names)
            self.world.seen["committed pages that had to be found"] += len(new)

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        """Append tokens."""
        request.lease.extend(list(tokens))
        self.extended(request, tokens)

    def extended(self, request: Request, tokens: Sequence[int]) -> None:
        """Take over tokens that were appended."""
        request.tokens += tokens
        request.names = self.world.model.note(request.namespace, request.tokens)

    def discard(self, request: Request, which: int) -> None:
        """Forget some tokens that are not committed."""
        first = request.committed * PAGE_TOKENS
        from_token = first + which % (len(request.tokens) - first + 2)
        forward = request.forward
        request.lease.discard(from_token, after=None if forward is None else forward.fence)
        self.world.seen["discards under a forward"] += forward is not None
        del request.tokens[from_token:]
        request.names = self.world.model.note(request.namespace, request.tokens)
        request.computed = min(request.computed, len(request.names))
        request.guaranteed_tokens = len(request.lease.pages) * PAGE_TOKENS
        if forward is not None:
            forward.end_page = min(forward.end_page, len(request.names))

    def release(self, request: Request, *, offload: bool) -> None:
        """Give a request's pages back, perhaps under its forward."""
        forward = request.forward
        self.released(request)
        request.lease.release(after=None if forward is None else forward.fence, offload=offload)
        held = look(self.world.rig.ctx.tree)
        places = [held.get(name) for name in request.names[: request.committed]]
        if offload and self.world.model.is_roomy and not request.is_cut and request.loading is not None:
            assert all(place is not None for place in places)
            if all(place is not None and place.device_ready for place in places):
                assert all(place is not None and place.host is not None for place in places)
                self.world.seen["preempted pages that had to be copied"] += len(places)

    def released(self, request: Request) -> None:
        """Forget a request whose lease is released in this step."""
        self.world.seen["releases under a forward"] += request.forward is not None
        if request.lease._prefetch is not None or request.call is not None:
            self.world.disturbances += 1
        request.is_released = True
        self.requests.remove(request)

    # Checking

    def check(self) -> None:
        """Check every request, and the bytes of all that is on the device."""
        model = self.world.model
        pages: dict[int, bytes] = {}
        for name, place in model.held.items():
            if place.device is not None and place.device_ready:
                pages[place.device] = identity(name, model.weights)
        for request in self.requests:
            self.follow(request)
            if request.loading is not None and not request.is_cut:
                names = request.names[: request.committed]
                assert device_pages(model.held, names) == len(names), "a lease lost its pages"
            if request.is_usable and not request.is_broken:
                computed = zip(request.lease.pages.tolist(), request.names[: request.computed], strict=False)
                pages.update((page, identity(name, request.weights)) for page, name in computed)
        self.world.device_bytes.check(list(pages), list(pages.values()))
        for forward in self.forwards:
            self.check_forward(forward)
        for copy in self.world.rig.virtual.pending:
            waits = [fence for fence in copy.after if engine_fence_in(fence) is not None]
            assert not waits, f"{copy!r} waits for a forward, and all copies behind it"
        self.world.seen["device pages checked"] += len(pages)

    def follow(self, request: Request) -> None:
        """Take note of what a request has been waiting for."""
        if request.prefetch_call is not None and request.prefetch_call.task.done():
            request.prefetch_call = None
        if request.call is not None and request.call.task.done():
            request.call = None
            request.is_broken |= request.loading is None
        if request.loading is not None and not request.is_usable and not request.is_broken:
            self._watch_layers(request, request.loading)

    def _watch_layers(self, request: Request, loading: Loading) -> None:
        pages = loading.pages.tolist()
        identities = [identity(name, request.weights) for name in request.names[: len(pages)]]
        for layer in _passed_layers(loading):
            try:
                loading.block(layer)
            except Exception:  # noqa: BLE001 - whatever the device was told to raise
                assert self.world.num_failed, "a load failed for no reason"
                self.world.seen["loads that failed"] += 1
                request.is_broken = request.is_cut = True
                return
            self.world.device_bytes.check(pages, identities, layer)
            self.world.seen["layers seen before the last"] += bool(pages) and not loading.done
        request.is_usable = loading.done


def _passed_layers(loading: Loading) -> Iterator[int]:
    """Yield the layers that may be used: blocking on another one would never end here."""
    for layer in range(NUM_LAYERS):
        if all(fences[layer if len(fences) > 1 else 0].passed() for fences in loading._fences):
            yield layer
