"""L3 stores: where objects of bytes outlive the process."""

from .codec import AesGcm, CodecStore, Fp8, Zstd
from .file import FileStore
from .guard import GuardedStore
from .memory import MemoryStore
from .null import NullStore
from .registry import open_store, register_store
from .tiered import TieredStore

__all__ = [
    "AesGcm",
    "CodecStore",
    "FileStore",
    "Fp8",
    "GuardedStore",
    "MemoryStore",
    "NullStore",
    "TieredStore",
    "Zstd",
    "open_store",
    "register_store",
]
