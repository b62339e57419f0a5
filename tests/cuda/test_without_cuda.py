"""Where there is no GPU nothing of CUDA is touched, and no cache blocks its loop while it opens."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from hicache_async.cuda import CudaDevice
from hicache_async.cuda.torch_runtime import RecordedEvent
from hicache_async.errors import ConfigError


def said_by_child(script: str) -> list[str]:
    """Run ``script`` in a new interpreter and return the words it prints."""
    head = f"import sys\nsys.path[:0] = {sys.path!r}\n"
    command = [sys.executable, "-c", head + textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


OPEN = """
import asyncio, resource, sys
import torch
from hicache_async import CacheConfig, DeviceKV, HiCache

async def opened(host_pages, around):
    layer = torch.zeros(8, 16, 2, 64, dtype=torch.float16)
    kv = DeviceKV.from_layers([layer.clone() for _ in range(4)], [layer.clone() for _ in range(4)])
    options = {"page_size": 16, "host_bytes": host_pages * kv.page_nbytes, "host_reserve_bytes": 0}
    before = around()
    async with HiCache.open(CacheConfig.from_mapping(options), kv=kv):
        return [after - first for after, first in zip(around(), before)]
"""


def test_import_and_open_on_a_cpu_touch_no_cuda() -> None:
    """CUDA is not initialized, and neither Triton nor the CUDA device is imported."""
    script = """
    asyncio.run(opened(32, lambda: ()))
    names = [name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith("hicache_async.cuda")]
    print(torch.cuda.is_initialized(), len(names))
    """
    assert said_by_child(OPEN + textwrap.dedent(script)) == ["False", "0"]


@pytest.mark.skipif(sys.platform != "linux", reason="page faults of one thread are counted by Linux only")
def test_the_first_touch_of_the_arena_is_no_work_of_the_loop() -> None:
    """Of the page faults of an arena of 256 MiB the loop's thread takes next to none; a worker takes them."""
    script = """
    import ctypes
    PR_SET_THP_DISABLE = 41  # so that every page of 4 KiB is a fault of its own
    assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0

    def faults():
        return [resource.getrusage(who).ru_minflt for who in (resource.RUSAGE_THREAD, resource.RUSAGE_SELF)]

    print(*asyncio.run(opened(8192, faults)))
    """
    of_the_loop, of_all = map(int, said_by_child(OPEN + textwrap.dedent(script)))
    assert of_all > 60_000 and of_the_loop < of_all / 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_a_cuda_device_says_that_there_is_none() -> None:
    """And what to do; so it does for a device of another kind."""
    with pytest.raises(ConfigError, match="finds no CUDA device; check nvidia-smi"):
        CudaDevice()
    with pytest.raises(ConfigError, match="device is cpu"):
        CudaDevice("cpu")
    assert not torch.cuda.is_initialized()


def test_a_question_that_is_refused_during_a_capture_is_no_loss() -> None:
    """While a graph is captured CUDA answers no question; a device that is lost says something else."""

    class Refused:
        message = "CUDA error: operation not permitted when stream is capturing"

        def query(self) -> bool:
            raise RuntimeError(self.message)

    event = RecordedEvent(refused := Refused())  # type: ignore[arg-type]
    assert event.query() is False
    refused.message = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal"):
        event.query()
