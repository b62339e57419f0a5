"""Fixtures for pytest: a small cache on a virtual device, which must leave nothing behind. See docs/testing.md.

pytest finds this module by its entry point in every project where the library is installed. So nothing is
imported here but pytest: torch and the cache are, when a fixture is used first.

PYTEST_DONT_REWRITE: no assertion of a test stands here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Literal, cast

import pytest

if TYPE_CHECKING:
    from ..abc import Clock, Device, DevicePool, Store
    from ..cache import HiCache
    from ..config import CacheConfig
    from ..memory.device_kv import DeviceKV
    from .leaks import LeakChecks
    from .small_caches import SmallCaches

ScopeName = Literal["function", "class", "module", "package", "session"]
SCOPES: tuple[ScopeName, ...] = ("function", "class", "module", "package", "session")
"""From the shortest to the longest."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.addini(
        "hicache_scope", f"how long the cache of a test lives: {', '.join(SCOPES)}", default="function"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Add the fixture that runs on a loop, where pytest-asyncio is there to run it."""
    cache_scope(fixture_name="hicache", config=config)
    plugin = sys.modules.get("pytest_asyncio.plugin")
    if plugin is not None and config.pluginmanager.is_registered(plugin):
        from ._loop_fixtures import fixtures_for

        config.pluginmanager.register(fixtures_for(config), "hicache_async.testing.fixtures")
    else:
        config.pluginmanager.register(_without_asyncio(), "hicache_async.testing.fixtures")


def cache_scope(fixture_name: str, config: pytest.Config) -> ScopeName:
    """Return the scope of all fixtures here. Raises: UsageError: ``hicache_scope`` names none."""
    scope = config.getini("hicache_scope")
    if scope not in SCOPES:
        raise pytest.UsageError(f"hicache_scope is {scope!r}; choose one of {', '.join(SCOPES)}")
    return cast(ScopeName, scope)


def _without_asyncio() -> ModuleType:
    @pytest.fixture(scope=cache_scope)
    def make_hicache() -> None:
        pytest.fail(
            "the fixtures of hicache_async need pytest-asyncio: pip install pytest-asyncio", pytrace=False
        )

    @pytest.fixture(scope=cache_scope)
    def _hicache_lifetime() -> None: ...

    plugin = ModuleType("hicache_fixtures")
    vars(plugin).update(make_hicache=make_hicache, _hicache_lifetime=_hicache_lifetime)
    return plugin


@pytest.fixture(scope=cache_scope)
def hicache(make_hicache: SmallCaches) -> HiCache:
    """A cache of 16 device and 32 host pages of 4 tokens, open; at the end all must have been given back."""
    return make_hicache.first


@pytest.fixture(scope=cache_scope)
def hicache_kv(_hicache_lifetime: None) -> DeviceKV:
    """The tensors of a tiny model. Override it to give the cache the tensors of your engine."""
    from .small_caches import small_kv

    return small_kv()


@pytest.fixture(scope=cache_scope)
def hicache_config(hicache_kv: DeviceKV) -> CacheConfig:
    """The options of the cache: all that is committed is copied down at once. Override to change some."""
    from .small_caches import small_config

    return small_config(hicache_kv)


@pytest.fixture(scope=cache_scope)
def hicache_device(_hicache_lifetime: None) -> Device | None:
    """A VirtualDevice, which moves at once; after ``hicache_device.auto = False`` when told to."""
    from .virtual_device import VirtualDevice

    return VirtualDevice(auto=True)


@pytest.fixture(scope=cache_scope)
def hicache_store(_hicache_lifetime: None) -> Store | None:
    """A HeldStore around a MemoryStore, open: ``hicache_store.hold("read")`` stops the next read at the door."""
    from ..stores.memory import MemoryStore
    from .faults import HeldStore

    return HeldStore(MemoryStore(), held=())


@pytest.fixture(scope=cache_scope)
def hicache_clock(_hicache_lifetime: None) -> Clock | None:
    """A ManualClock: no deadline passes before ``advance``. Override it with None for the time of the loop."""
    from .manual import ManualClock

    return ManualClock()


@pytest.fixture(scope=cache_scope)
def hicache_pool(_hicache_lifetime: None, hicache_kv: DeviceKV) -> DevicePool | None:
    """The book of free device pages. Override it where your engine keeps its own."""
    from ..core.pool import FreeList

    return FreeList(hicache_kv.num_pages, hicache_kv.reserved_pages)


@pytest.fixture(scope=cache_scope)
def hicache_checks() -> LeakChecks:
    """What counts as left behind: everything. Override it with ``LeakChecks(leases=False)`` and the like."""
    from .leaks import LeakChecks

    return LeakChecks()


@pytest.fixture(scope=cache_scope)
def hicache_directories(request: pytest.FixtureRequest) -> Sequence[str]:
    """Where to look for temporary files, beside the directories of the stores: the test's ``tmp_path``."""
    if request.scope == "function" and "tmp_path" in request.fixturenames:
        return [str(request.getfixturevalue("tmp_path"))]
    return []
