# mypy: disable-error-code="import-not-found"
"""LMCache's side of the files: its adapters ``fs``, on aiofiles, and ``fs_native``, threads in C++.

Tasks are submitted to an adapter, which signals a file descriptor when one has ended, as its own benchmark
does; the thread that waits has nothing else to do.
"""

from __future__ import annotations

import json
import os
import select
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # read when it is imported
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from .files_sides import ALIGNMENT, Rows, files_records
from .samples import report

TIMEOUT_S = 60.0


class LMCache:
    """One task of an adapter for each batch."""

    def __init__(self, adapter: Any, rows: Rows) -> None:
        objects = [
            _memory_object(torch.from_numpy(row), number * row.nbytes) for number, row in enumerate(rows)
        ]
        self._adapter = adapter
        self._stored, self._loaded = objects[: len(objects) // 2], objects[len(objects) // 2 :]

    def _keys(self, batch: int) -> list[ObjectKey]:
        return [
            ObjectKey(chunk_hash=(batch << 64 | number).to_bytes(32, "big"), model_name="model", kv_rank=0)
            for number in range(len(self._stored))
        ]

    async def write(self, batch: int) -> None:
        """Store by one task."""
        adapter = self._adapter
        done: dict[int, Any] = {}
        task = adapter.submit_store_task(self._keys(batch), self._stored)
        while task not in done:
            _wait(adapter.get_store_event_fd())
            done |= adapter.pop_completed_store_tasks()
        assert done[task].is_successful()

    async def read(self, batch: int) -> None:
        """Load by one task."""
        adapter = self._adapter
        task = adapter.submit_load_task(self._keys(batch), self._loaded)
        found = _result(adapter.get_load_event_fd(), partial(adapter.query_load_result, task))
        assert found.popcount() == len(self._loaded)

    async def look_up(self, batch: int) -> None:
        """Look up by one task."""
        adapter, keys = self._adapter, self._keys(batch)
        task = adapter.submit_lookup_and_lock_task(keys, {})
        found = _result(
            adapter.get_lookup_and_lock_event_fd(), partial(adapter.query_lookup_and_lock_result, task)
        )
        assert found.popcount() == len(keys)
        adapter.submit_unlock(keys)


@asynccontextmanager
async def open_lmcache(adapter_type: str, directory: str, rows: Rows) -> AsyncIterator[LMCache]:
    """Open an adapter with its defaults."""
    spec = json.dumps({"type": adapter_type, "base_path": directory})
    parsed = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[spec]))
    memory = L1MemoryDesc(ptr=rows.ctypes.data, size=rows.nbytes, align_bytes=ALIGNMENT)
    adapter = create_l2_adapter(parsed.adapters[0], memory)
    yield LMCache(adapter, rows)
    adapter.close()


def _memory_object(row: torch.Tensor, address: int) -> TensorMemoryObj:
    metadata = MemoryObjMetadata(
        shape=row.shape,
        dtype=row.dtype,
        address=address,
        phy_size=row.nbytes,
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return TensorMemoryObj(raw_data=row, metadata=metadata, parent_allocator=None)


def _result(event_fd: int, query: Callable[[], Any]) -> Any:
    while True:
        _wait(event_fd)
        if (found := query()) is not None:
            return found


def _wait(event_fd: int) -> None:
    poller = select.poll()
    poller.register(event_fd, select.POLLIN)
    if not poller.poll(TIMEOUT_S * 1000):
        raise TimeoutError(f"no task has ended within {TIMEOUT_S} s")
    consume_fd(event_fd)


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(files_records({name: partial(open_lmcache, name) for name in ("fs", "fs_native")}))
