"""CudaDevice passes the exam for devices, on a stand-in stricter than a GPU."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from hicache_async.cuda import CudaDevice
from hicache_async.testing.device_exam import CHECKS, check_device
from tests.cuda.fake_cuda import FakeCuda
from tests.testing.loops import each_loop


@each_loop
@pytest.mark.parametrize("low_latency", [False, True], ids=["loop", "thread"])
def test_it_passes_the_exam(low_latency: bool, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """All checks, in every layout and io mode, and nothing is asked of CUDA that it would answer with silence."""
    seeds = itertools.count()

    class Examined(CudaDevice):
        """One that takes its GPU with it."""

        def __init__(self) -> None:
            self.cuda = FakeCuda(seed=next(seeds))
            super().__init__(runtime=self.cuda, low_latency=low_latency)

        async def aclose(self) -> None:
            await super().aclose()
            self.cuda.end()

    assert check_device(Examined, loop_factory=loop_factory).passed == tuple(CHECKS)
    assert next(seeds) == len(CHECKS)
