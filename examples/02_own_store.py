"""A store of one's own: pages as rows of an SQLite table, compressed. A restarted cache finds them there."""

import asyncio
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import torch

from hicache_async import Books, CacheConfig, DeviceKV, HiCache, StopToken, register_store


class SqliteStore:
    """Four methods make a store. It sees keys and bytes, and it may fail: that is a miss, never an error."""

    @classmethod
    def from_url(cls, url: str, **options: object) -> "SqliteStore":
        return cls(urlsplit(url).path)

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._db.execute("CREATE TABLE IF NOT EXISTS pages (key TEXT PRIMARY KEY, page BLOB)")
        self._thread = ThreadPoolExecutor(1)  # what blocks must not run on the event loop

    async def count_prefix(self, keys: Sequence[str]) -> int:
        """Return how many keys exist, consecutive from the first."""
        return await self._in_thread(lambda: sum(1 for _ in self._rows(keys)))

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        """Fill whole pages, consecutive from the first, and return how many."""

        def read() -> int:
            count = 0
            for page, buffer in zip(self._rows(keys), into, strict=False):
                if stop.stopped:
                    break
                buffer[:] = zlib.decompress(page)  # its checksum is verified here
                count += 1
            return count

        loop, job = asyncio.get_running_loop(), self._thread.submit(read)
        # A cancel ends this coroutine, not the thread: the token says when the buffers are quiet.
        stop.job_started()
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(stop.job_ended))
        return await asyncio.wrap_future(job)

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Store pages, consecutive from the first, and return how many; each is seen whole or not at all."""

        def write() -> int:
            rows = [(key, zlib.compress(page, level=1)) for key, page in zip(keys, pages, strict=True)]
            with self._db:  # one transaction
                self._db.executemany("INSERT OR IGNORE INTO pages VALUES (?, ?)", rows)
            return len(rows)

        return await self._in_thread(write)

    async def aclose(self) -> None:
        self._thread.submit(self._db.close)  # behind what still runs
        self._thread.shutdown(wait=False)

    def _rows(self, keys: Sequence[str]) -> Iterator[bytes]:
        for key in keys:
            row = self._db.execute("SELECT page FROM pages WHERE key = ?", (key,)).fetchone()
            if row is None:
                return
            yield row[0]

    async def _in_thread(self, call: Callable[[], int]) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


async def serve(url: str) -> Books:
    """Open a cache with nothing in memory, serve one request, and say where its prompt came from."""
    k, v = ([torch.zeros(32, 64, 2, 64) for _ in range(2)] for _ in "kv")  # 2 layers of 32 pages of 64 tokens
    config = CacheConfig(host_reserve_bytes=0, write_policy="write_through")
    prompt = list(range(1000))
    async with HiCache.open(config, kv=DeviceKV.from_layers(k, v), store=url) as cache:
        with cache.match_prefix("request", prompt) as lease:
            await lease.prefetch()
            await (await lease.load()).finished()
            lease.allocate_nowait(len(prompt)).block()
            # Here your model computes the rest.
            lease.commit(len(prompt))  # write_through: from here the pages go to the host and to the store
            return lease.books


async def main() -> None:
    register_store("sqlite", f"{__name__}:SqliteStore")  # a package does it by an entry point
    with tempfile.TemporaryDirectory() as directory:
        for run in ("first", "restarted"):
            books = await serve(f"sqlite://{directory}/pages.db")
            print(f"{run}: {books.store} of {books.prompt} tokens from the store, {books.computed} computed")


asyncio.run(main())
