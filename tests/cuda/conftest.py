"""A CudaDevice on a stand-in for a GPU, and pages for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_async.cuda import CudaDevice
from hicache_async.testing._device_bench import Bench
from tests.cuda.fake_cuda import FakeCuda


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    cuda = FakeCuda()
    yield cuda
    for stream in cuda.streams:
        cuda.hold(stream, held=False)
    cuda.end()


@pytest.fixture
def device(cuda: FakeCuda) -> CudaDevice:
    return CudaDevice(runtime=cuda)


@pytest.fixture
def bench(device: CudaDevice) -> Bench:
    return Bench(device, "cpu")
