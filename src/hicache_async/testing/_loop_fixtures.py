"""The fixture of the pytest plugin that runs on a loop: it opens and closes the caches on the loop of the test.

pytest-asyncio runs an async fixture on the loop of a scope that is fixed when the fixture is defined, and a
test on the loop of the scope that its mark names. A cache belongs to one loop, so one fixture is defined for
each, and the test is given the one of its own. A cache that outlives a test has no test to ask: its loop is
that of ``asyncio_default_test_loop_scope``, or of its own scope where that is longer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, cast

import pytest
import pytest_asyncio

from .pytest_plugin import SCOPES, ScopeName, cache_scope

if TYPE_CHECKING:
    from ..abc import Clock, Device, DevicePool, Store
    from ..config import CacheConfig
    from ..memory.device_kv import DeviceKV
    from .leaks import LeakChecks
    from .small_caches import SmallCaches


def fixtures_for(config: pytest.Config) -> ModuleType:
    """Return a plugin with the fixture ``make_hicache``, and what it needs, for the scopes of this run."""
    plugin = ModuleType("hicache_fixtures")
    scope = cache_scope("make_hicache", config)
    if scope == "function":
        on_loops = {_name_on(loop_scope): _caches_fixture(loop_scope, scope) for loop_scope in SCOPES}
        vars(plugin).update(on_loops, make_hicache=_of_test, hicache_lifetime=_test_lifetime)
    else:
        loop_scope = max(scope, _default_loop_scope(config), key=SCOPES.index)
        vars(plugin).update(
            make_hicache=_caches_fixture(loop_scope, scope, "make_hicache"),
            hicache_lifetime=_loop_lifetime(loop_scope, scope),
            pytest_runtest_setup=_loop_check(scope, loop_scope),
        )
    return plugin


def _name_on(loop_scope: ScopeName) -> str:
    return f"_hicache_on_{loop_scope}_loop"


def _default_loop_scope(config: pytest.Config) -> ScopeName:
    return cast(ScopeName, config.getini("asyncio_default_test_loop_scope"))


def _loop_scope_of(item: pytest.Item) -> ScopeName:
    marker = item.get_closest_marker("asyncio")
    named = None if marker is None else marker.kwargs.get("loop_scope")
    return _default_loop_scope(item.config) if named is None else cast(ScopeName, named)


@pytest.fixture(name="make_hicache")
def _of_test(request: pytest.FixtureRequest) -> SmallCaches:
    """Open further caches with ``await make_hicache(...)``; see :class:`SmallCaches`."""
    return cast("SmallCaches", request.getfixturevalue(_name_on(_loop_scope_of(request.node))))


@pytest.fixture(name="_hicache_lifetime")
def _test_lifetime() -> None:
    """What the parts of a cache depend on: they end with the test, or else with the loop."""


def _loop_lifetime(loop_scope: ScopeName, scope: ScopeName) -> object:
    @pytest_asyncio.fixture(name="_hicache_lifetime", scope=scope, loop_scope=loop_scope)
    async def lifetime() -> None:
        """See above. Where tests run on several loops, one after the other, nothing is taken from one to the next."""

    return lifetime


def _caches_fixture(loop_scope: ScopeName, scope: ScopeName, name: str | None = None) -> object:
    @pytest_asyncio.fixture(name=name or _name_on(loop_scope), scope=scope, loop_scope=loop_scope)
    async def caches(
        hicache_kv: DeviceKV,
        hicache_config: CacheConfig,
        hicache_store: Store | None,
        hicache_device: Device | None,
        hicache_clock: Clock | None,
        hicache_pool: DevicePool | None,
        hicache_checks: LeakChecks,
        hicache_directories: Sequence[str],
    ) -> AsyncIterator[SmallCaches]:
        """Open further caches with ``await make_hicache(...)``; see :class:`SmallCaches`."""
        from .leaks import LeakError
        from .small_caches import SmallCaches

        caches = SmallCaches(
            hicache_kv,
            hicache_config,
            store=hicache_store,
            device=hicache_device,
            clock=hicache_clock,
            device_pool=hicache_pool,
            checks=hicache_checks,
            directories=hicache_directories,
        )
        await caches()
        yield caches
        try:
            await caches.finish()
        except LeakError as error:
            message = str(error)
        else:
            return
        pytest.fail(message, pytrace=False)  # a traceback would show nothing but pytest

    return caches


def _loop_check(scope: ScopeName, loop_scope: ScopeName) -> Callable[[pytest.Item], None]:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(item: pytest.Item) -> None:
        """Refuse a test on another loop than that of the cache that it shares with others."""
        uses_cache = isinstance(item, pytest.Function) and "make_hicache" in item.fixturenames
        if uses_cache and item.get_closest_marker("asyncio") and _loop_scope_of(item) != loop_scope:
            pytest.fail(
                f"hicache_scope is {scope}, so the cache runs on the {loop_scope} loop, and this test on the "
                f"{_loop_scope_of(item)} loop; set asyncio_default_test_loop_scope = {loop_scope}, or mark the "
                f'test with pytest.mark.asyncio(loop_scope="{loop_scope}")',
                pytrace=False,
            )

    return pytest_runtest_setup
