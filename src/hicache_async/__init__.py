"""An asyncio-native three-tier KV cache for LLM serving: device, host memory, and a store."""

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
    SupportsDelete,
    SupportsListing,
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
from .lease import Allocation, Loading, Prefetch, PrefixLease
from .memory.device_kv import DeviceKV
from .ranks.solo import SoloRanks
from .step import StepBatch, StepGrant, StepResult
from .stores.registry import open_store, register_store
from .types import Books, CacheStats, PrefetchResult, Residency, State, Stop, StopToken, Tier, TierStats

__all__ = [
    "Admin",
    "Allocation",
    "Books",
    "CacheConfig",
    "CacheStats",
    "CapacityError",
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
    "Fence",
    "HiCache",
    "HiCacheError",
    "HostFence",
    "HostLayout",
    "InvariantError",
    "IoMode",
    "KeyScheme",
    "LeaseError",
    "Loading",
    "NamespaceError",
    "PagedBytes",
    "Prefetch",
    "PrefetchMode",
    "PrefetchOverflow",
    "PrefetchPolicy",
    "PrefetchResult",
    "PrefixLease",
    "RankLoss",
    "Ranks",
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
    "SupportsDelete",
    "SupportsListing",
    "Tier",
    "TierStats",
    "TokenKey",
    "WritePolicy",
    "WrongLoopError",
    "open_store",
    "register_store",
]
