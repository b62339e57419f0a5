"""L3 stores: where objects of bytes outlive the process."""

from .file import FileStore
from .guard import GuardedStore
from .memory import MemoryStore
from .null import NullStore
from .registry import open_store, register_store

__all__ = ["FileStore", "GuardedStore", "MemoryStore", "NullStore", "open_store", "register_store"]
