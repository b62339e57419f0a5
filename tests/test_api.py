"""The public names: they exist and take these arguments. Whoever changes one breaks an engine."""

from __future__ import annotations

import inspect
from inspect import Parameter, Signature

import pytest

import hicache_async

SIGNATURES = {
    "LoopRunner": "(make, *, uvloop=None)",
    "LoopRunner.step": "(self, batch)",
    "LoopRunner.step_nowait": "(self, batch)",
    "LoopRunner.post": "(self, fn, *, undo=None)",
    "LoopRunner.wait": "(self, timeout_s=None)",
    "TokenKey": "(tokens=())",
    "TokenKey.extend": "(self, tokens)",
    "TokenKey.fork": "(self)",
    "DeviceKV.from_layers": "(k, v=None, *, page_size=None, compute_stream=None, reserved_pages=())",
    "Fence.passed": "(self)",
    "Fence.block": "(self, stream=None)",
    "HostFence.set": "(self)",
    "HostFence.fail": "(self, error)",
    "PrefetchPolicy.best_effort": "()",
    "PrefetchPolicy.wait_complete": "()",
    "PrefetchPolicy.timeout": "(base_s=None, per_ki_token_s=None, cap_s=None)",
    "Prefetch.stop": "(self)",
    "Prefetch.settled": "async (self)",
    "Loading.block": "(self, layer, stream=None)",
    "Loading.ready": "async (self, layer)",
    "Loading.finished": "async (self)",
    "PrefixLease.__enter__": "(self)",
    "PrefixLease.keep": "(self)",
    "PrefixLease.prefetch": "async (self, policy=None, *, priority=0)",
    "PrefixLease.start_prefetch": "(self, policy=None, *, priority=0)",
    "PrefixLease.load": "async (self, total_tokens=None, *, wait_pending=True, priority=0)",
    "PrefixLease.allocate_nowait": "(self, total_tokens)",
    "PrefixLease.allocate": "async (self, total_tokens)",
    "PrefixLease.extend": "(self, token_ids)",
    "PrefixLease.commit": "(self, num_tokens, *, after=None)",
    "PrefixLease.discard": "(self, from_token, *, after=None)",
    "PrefixLease.release": "(self, *, after=None, offload=False)",
    "StepBatch": "(*, commit=(), extend=(), discard=(), release=(), allocate=(), after=None)",
    "HiCache.open": "(config, *, kv, device=None, store=None, ranks=None, clock=None, threads=None, "
    "device_pool=None)",
    "HiCache.match_prefix": "(self, request_id, tokens, *, salt=b'', adapter=None, priority=0, "
    "output_priority=None, whole=False)",
    "HiCache.begin_step": "async (self, num_pages=0)",
    "HiCache.step": "(self, batch)",
    "HiCache.fence": "(self, stream=None)",
    "HiCache.host_fence": "(self)",
    "HiCache.stats": "(self)",
    "HiCache.audit": "(self)",
    "HiCache.events": "(self, *, snapshot=False, max_pending_pages=65536)",
    "Admin.flush": "async (self, tier=<Tier.STORE: 'store'>)",
    "Admin.clear": "async (self, tier=None)",
    "Admin.attach_store": "async (self, store)",
    "Admin.detach_store": "async (self, *, force=False)",
    "Admin.explain": "async (self, tokens, *, salt=b'', adapter=None)",
    "Admin.pin": "(self, tokens, *, ttl_s, salt=b'', adapter=None)",
    "Admin.unpin": "(self, tokens, *, salt=b'', adapter=None)",
    "EvictionPolicy.key": "(self, candidate, /)",
    "Store.count_prefix": "async (self, keys)",
    "Store.read": "async (self, keys, into, stop)",
    "Store.write": "async (self, keys, pages)",
    "Store.aclose": "async (self)",
    "SupportsListing.list_keys": "async (self)",
    "SupportsDelete.delete": "async (self, keys)",
    "open_store": "(url, **options)",
    "register_store": "(scheme, target)",
    "Device.host_buffer": "async (self, nbytes)",
    "Device.fence": "(self, stream=None)",
    "Device.host_to_device": "(self, plan, after)",
    "Device.device_to_host": "(self, plan, after)",
    "Device.wait": "async (self, fence)",
    "Device.aclose": "async (self)",
    "Ranks.cast": "(self, ticket, vote, *, patient=False)",
    "Ranks.agree": "async (self, ticket, vote, *, patient=False)",
    "Ranks.when_lost": "(self, callback)",
    "Ranks.aclose": "async (self)",
}

ATTRIBUTES = {
    "PrefetchResult": {"hit_tokens", "fetched_tokens", "stop"},
    "Loading": {"tokens", "reserved_tokens", "pages", "done"},
    "Allocation": {"pages", "after"},
    "Books": {"prompt", "device", "host", "store", "computed"},
    "PrefixLease": {
        "request_id", "key", "device_tokens", "local_tokens", "pages", "books", "pending_tokens",
    },
    "StepGrant": {"num_pages", "loaded"},
    "StepResult": {"allocations"},
    "HiCache": {"state"},
}  # fmt: skip

MEMBERS = {
    "State": {"open", "no_reuse", "failed", "closed"},
    "Tier": {"device", "host", "store"},
    "Residency": {"device", "both", "host", "ghost"},
    "Stop": {
        "complete", "nothing_missing", "not_stored", "below_threshold", "rate_limited", "no_host_room",
        "deadline", "stopped", "peer_shorter", "vanished", "corrupt", "store_fault", "breaker_open",
        "anchor_not_backed", "detached",
    },
}  # fmt: skip

PARENTS = {
    "ConfigError": "HiCacheError",
    "NamespaceError": "ConfigError",
    "ClosedError": "HiCacheError",
    "WrongLoopError": "HiCacheError",
    "LeaseError": "HiCacheError",
    "CapacityError": "HiCacheError",
    "StoreError": "HiCacheError",
    "StoreUnavailable": "StoreError",
    "CorruptObject": "StoreError",
    "ConsensusError": "HiCacheError",
    "InvariantError": "HiCacheError",
}


def find(path: str) -> object:
    found: object = hicache_async
    for name in path.split("."):
        found = getattr(found, name)
    return found


def without_annotations(signature: Signature) -> Signature:
    parameters = [each.replace(annotation=Parameter.empty) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=Signature.empty)


@pytest.mark.parametrize(("path", "expected"), SIGNATURES.items())
def test_signatures(path: str, expected: str) -> None:
    """A public callable takes these arguments, and is awaited or not."""
    found = find(path)
    assert callable(found)
    signature = str(without_annotations(inspect.signature(found)))
    prefix = "async " if inspect.iscoroutinefunction(found) else ""
    assert prefix + signature == expected


@pytest.mark.parametrize(("name", "attributes"), ATTRIBUTES.items())
def test_attributes(name: str, attributes: set[str]) -> None:
    """A public class has these attributes, slots or properties of the class."""
    assert attributes <= set(dir(find(name)))


@pytest.mark.parametrize(("name", "words"), MEMBERS.items())
def test_words(name: str, words: set[str]) -> None:
    """An enumeration has exactly these words, and each compares equal to its text."""
    found = find(name)
    assert isinstance(found, type)
    assert set(found) == words  # type: ignore[call-overload]


@pytest.mark.parametrize(("name", "parent"), PARENTS.items())
def test_errors(name: str, parent: str) -> None:
    """Errors form two levels under one root, and a wrong value is a ValueError too."""
    error, root = find(name), find("HiCacheError")
    assert isinstance(error, type) and isinstance(root, type)
    assert error.__bases__[0] is find(parent)
    assert issubclass(error, root)
    assert issubclass(find("ConfigError"), ValueError)  # type: ignore[arg-type]


def test_all_is_complete() -> None:
    """``__all__`` names everything that is named here."""
    named = {path.split(".")[0] for path in (*SIGNATURES, *ATTRIBUTES, *MEMBERS, *PARENTS)}
    assert named <= set(hicache_async.__all__)
