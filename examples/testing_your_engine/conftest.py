"""What the tests share: a cache over the engine's own tensors, and the engine on top of it."""

from __future__ import annotations

import pytest
import torch
from engine import Engine

from hicache_async import DeviceKV, HiCache


@pytest.fixture
def engine_kv() -> tuple[torch.Tensor, DeviceKV]:
    """The engine's tensor, and the description of it."""
    return Engine.new_kv()


@pytest.fixture
def hicache_kv(engine_kv: tuple[torch.Tensor, DeviceKV]) -> DeviceKV:
    """Give the cache of the fixtures the tensors of the engine."""
    return engine_kv[1]


@pytest.fixture
def engine(hicache: HiCache, engine_kv: tuple[torch.Tensor, DeviceKV]) -> Engine:
    """An engine; what it leaves behind fails its test."""
    return Engine(hicache, engine_kv[0])
