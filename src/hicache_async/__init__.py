"""An asyncio-native three-tier KV cache for LLM serving: device, host memory, and a store.

The names below are imported when first used, so that ``import hicache_async`` and its stores do not
wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .abc import (
        Clock,
        CopyPlan,
        Device,
        DevicePool,
        Fence,
        HostFence,
        PagedBytes,
        Ranks,
        Store,
        SupportsCodec,
        SupportsDelete,
        SupportsListing,
        SupportsNamespaces,
        SupportsRefusal,
        SupportsStat,
        SupportsStats,
        SupportsSweep,
    )
    from .admin import Admin
    from .cache import HiCache
    from .config import (
        CacheConfig,
        HostLayout,
        IoMode,
        KeyScheme,
        PrefetchMode,
        PrefetchOverflow,
        PrefetchPolicy,
        RankLoss,
        WritePolicy,
    )
    from .core.tokens import TokenKey
    from .device.cpu import CpuDevice
    from .errors import (
        CapacityError,
        ClosedError,
        ConfigError,
        ConsensusError,
        CorruptObject,
        HiCacheError,
        InvariantError,
        LeaseError,
        NamespaceError,
        StoreError,
        StoreUnavailable,
        WrongLoopError,
    )
    from .eviction import EvictionPolicy
    from .explanation import Explanation
    from .kv_events import Cleared, EventReader, Gap, KVEvent, Removed, Stored
    from .lease import Allocation, Loading, Prefetch, PrefixLease
    from .memory.budget import host_memory_budget
    from .memory.device_kv import DeviceKV
    from .ranks.hub import HubRanks
    from .ranks.solo import SoloRanks
    from .runner import LoopRunner
    from .step import StepBatch, StepGrant, StepResult
    from .stores.registry import open_store, register_store
    from .types import (
        Books,
        CacheStats,
        ObjectStat,
        PrefetchResult,
        Residency,
        State,
        Stop,
        StopToken,
        Tier,
        TierStats,
    )

_HOMES = {
    "abc": (
        "Clock",
        "CopyPlan",
        "Device",
        "DevicePool",
        "Fence",
        "HostFence",
        "PagedBytes",
        "Ranks",
        "Store",
        "SupportsCodec",
        "SupportsDelete",
        "SupportsListing",
        "SupportsNamespaces",
        "SupportsRefusal",
        "SupportsStat",
        "SupportsStats",
        "SupportsSweep",
    ),
    "admin": ("Admin",),
    "cache": ("HiCache",),
    "config": (
        "CacheConfig",
        "HostLayout",
        "IoMode",
        "KeyScheme",
        "PrefetchMode",
        "PrefetchOverflow",
        "PrefetchPolicy",
        "RankLoss",
        "WritePolicy",
    ),
    "core.tokens": ("TokenKey",),
    "device.cpu": ("CpuDevice",),
    "errors": (
        "CapacityError",
        "ClosedError",
        "ConfigError",
        "ConsensusError",
        "CorruptObject",
        "HiCacheError",
        "InvariantError",
        "LeaseError",
        "NamespaceError",
        "StoreError",
        "StoreUnavailable",
        "WrongLoopError",
    ),
    "eviction": ("EvictionPolicy",),
    "explanation": ("Explanation",),
    "kv_events": (
        "Cleared",
        "EventReader",
        "Gap",
        "KVEvent",
        "Removed",
        "Stored",
    ),
    "lease": (
        "Allocation",
        "Loading",
        "Prefetch",
        "PrefixLease",
    ),
    "memory.budget": ("host_memory_budget",),
    "memory.device_kv": ("DeviceKV",),
    "ranks.hub": ("HubRanks",),
    "ranks.solo": ("SoloRanks",),
    "runner": ("LoopRunner",),
    "step": (
        "StepBatch",
        "StepGrant",
        "StepResult",
    ),
    "stores.registry": (
        "open_store",
        "register_store",
    ),
    "types": (
        "Books",
        "CacheStats",
        "ObjectStat",
        "PrefetchResult",
        "Residency",
        "State",
        "Stop",
        "StopToken",
        "Tier",
        "TierStats",
    ),
}
"""Where each public name lives."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})


__all__ = [
    "Admin",
    "Allocation",
    "Books",
    "CacheConfig",
    "CacheStats",
    "CapacityError",
    "Cleared",
    "Clock",
    "ClosedError",
    "ConfigError",
    "ConsensusError",
    "CopyPlan",
    "CorruptObject",
    "CpuDevice",
    "Device",
    "DeviceKV",
    "DevicePool",
    "EventReader",
    "EvictionPolicy",
    "Explanation",
    "Fence",
    "Gap",
    "HiCache",
    "HiCacheError",
    "HostFence",
    "HostLayout",
    "HubRanks",
    "InvariantError",
    "IoMode",
    "KVEvent",
    "KeyScheme",
    "LeaseError",
    "Loading",
    "LoopRunner",
    "NamespaceError",
    "ObjectStat",
    "PagedBytes",
    "Prefetch",
    "PrefetchMode",
    "PrefetchOverflow",
    "PrefetchPolicy",
    "PrefetchResult",
    "PrefixLease",
    "RankLoss",
    "Ranks",
    "Removed",
    "Residency",
    "SoloRanks",
    "State",
    "StepBatch",
    "StepGrant",
    "StepResult",
    "Stop",
    "StopToken",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "Stored",
    "SupportsCodec",
    "SupportsDelete",
    "SupportsListing",
    "SupportsNamespaces",
    "SupportsRefusal",
    "SupportsStat",
    "SupportsStats",
    "SupportsSweep",
    "Tier",
    "TierStats",
    "TokenKey",
    "WritePolicy",
    "WrongLoopError",
    "host_memory_budget",
    "open_store",
    "register_store",
]
