from hicache_async.testing.store_suite import StoreSuite
from hicache_async.stores.shm import ShmStore
from hicache_async.stores.mmap import MmapStore
class TestShm(StoreSuite):
    persists = shared = processes = True
    async def open(self, directory):
        return ShmStore("kv", directory=directory, max_bytes=128<<20, slot_bytes=1<<18)
    async def open_bounded(self, directory, max_bytes):
        return ShmStore("kv", directory=directory, max_bytes=max_bytes, slot_bytes=4096)
class TestMmap(StoreSuite):
    persists = shared = processes = True
    async def open(self, directory):
        return MmapStore(directory / "kv", max_bytes=128<<20, slot_bytes=1<<18)
    async def open_bounded(self, directory, max_bytes):
        return MmapStore(directory / "kv", max_bytes=max_bytes, slot_bytes=4096)
