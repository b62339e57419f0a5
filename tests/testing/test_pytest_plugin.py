"""The pytest plugin: its fixtures in suites of every mode, scope and loop, and the leaks that fail their tests."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# Loaded before a suite is run in this process: what a suite imports itself is forgotten after it.
import hicache_async.testing._loop_fixtures
import hicache_async.testing.small_caches  # noqa: F401

pytest_plugins = ["pytester"]

PLUGIN = "hicache_async.testing.pytest_plugin"
SCOPES = ("function", "session")

IMPATIENT = """
import pytest
from hicache_async.testing.leaks import LeakChecks

@pytest.fixture(scope="session")
def hicache_checks():
    return LeakChecks(grace_s=0.0)
"""
LOOPS = """
import asyncio
import uvloop

class DebugLoop(asyncio.SelectorEventLoop):
    def set_debug(self, enabled):
        super().set_debug(True)

def pytest_asyncio_loop_factories(item):
    return {"asyncio": asyncio.new_event_loop, "debug": DebugLoop, "uvloop": uvloop.new_event_loop}
"""
NUM_LOOPS = 3

ENGINE = """
async def serve(cache, tokens):
    with cache.match_prefix("request", tokens) as lease:
        await lease.prefetch()
        loading = await lease.load()
        await loading.finished()
        await lease.allocate(len(tokens))
        lease.commit(len(tokens))
        return lease.books
"""

HEALTHY = """
import asyncio
import anyio
import pytest
from engine import serve

{mark}

async def test_a_prompt_is_found_again(hicache):
    tokens = [1] * 13
    assert (await serve(hicache, tokens)).computed == 13
    assert (await serve(hicache, tokens)).device == 12

async def test_a_prefetch_is_cancelled_in_the_middle(hicache, make_hicache, hicache_store):
    tokens = [2] * 13
    await serve(hicache, tokens)
    await hicache.admin.flush()
    restarted = await make_hicache()
    hicache_store.hold("read")
    with restarted.match_prefix("cancelled", tokens) as lease:
        prefetch = asyncio.create_task(lease.prefetch())
        await hicache_store.arrived(verb="read")
        prefetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prefetch
    restarted.audit()
    hicache_store.open()
    assert (await serve(restarted, tokens)).store == 12

async def test_no_scope_is_left_open(hicache, hicache_device):
    hicache_device.auto = False
    with anyio.move_on_after(0.0) as scope:
        await serve(hicache, [1] * 13)
        await hicache.admin.flush()
    assert scope.cancelled_caught
    hicache_device.advance_all()
    hicache_device.auto = True
"""
NUM_HEALTHY = 3

LEAKY = """
import asyncio
import os
import pytest

{mark}
stray_tasks = []

class Engine:
    def __init__(self, cache):
        self.cache = cache

    def admit(self, request_id):
        return self.cache.match_prefix(request_id, [3] * 13)

async def wait_for_ever():
    await asyncio.Event().wait()

async def test_forgotten_lease(hicache):
    Engine(hicache).admit("forgotten")

async def test_lost_page(hicache, hicache_pool):
    hicache_pool.take(1)

async def test_late_write(hicache, hicache_kv):
    hicache_kv.planes(1)[0][3, 5] = 1

async def test_stray_task(hicache):
    stray_tasks.append(asyncio.create_task(wait_for_ever()))
    await asyncio.sleep(0)

async def test_open_file(hicache):
    os.open("/dev/null", os.O_RDONLY)

async def test_temp_file(hicache, tmp_path):
    (tmp_path / "half.tmp").write_bytes(b"half")
"""
LEAKS = {
    "test_forgotten_lease": "*left behind: lease: <PrefixLease 'forgotten' of 13 tokens*> was not released; "
    "made at */test_leaky.py:13 in Engine.admit < */test_leaky.py:19 in test_forgotten_lease",
    "test_lost_page": "*left behind: pages: device: 15 free and * do not add up to 16",
    "test_late_write": "*left behind: freed page: *DeviceKV pages [[]3], layer 1",
    "test_stray_task": "*left behind: task: *wait_for_ever*waits at * in Event.wait",
    "test_open_file": "*left behind: descriptor: * is open: /dev/null",
    "test_temp_file": "*left behind: temporary file: */half.tmp of 4 bytes",
}


def write_suite(pytester: pytest.Pytester, *, mark: str = "", **options: str) -> None:
    """Write an engine, a suite of tests that leave nothing behind, and one of tests that do."""
    settings = {
        "asyncio_mode": "strict",
        "asyncio_default_fixture_loop_scope": "function",
        "filterwarnings": "error",
        **options,
    }
    pytester.makeini("\n".join(["[pytest]", *(f"{name} = {value}" for name, value in settings.items())]))
    pytester.makeconftest(IMPATIENT + LOOPS)
    pytester.makepyfile(
        engine=ENGINE,
        test_healthy=HEALTHY.replace("{mark}", mark),
        test_leaky=LEAKY.replace("{mark}", mark),
    )


def run_here(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    """Run a suite in this process, which has torch already."""
    return pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", *args)


def run_apart(pytester: pytest.Pytester, *args: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, with ``path`` before everything else that can be imported."""
    search = os.pathsep.join(filter(None, [path, *sys.path]))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args],
        cwd=pytester.path,
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def marked(mode: str, loop_scope: str | None = None) -> str:
    """Return the line that makes a module's tests async ones; in auto mode it takes none."""
    if loop_scope is not None:
        return f"pytestmark = pytest.mark.asyncio(loop_scope={loop_scope!r})"
    return "" if mode == "auto" else "pytestmark = pytest.mark.asyncio"


@pytest.mark.parametrize(
    ("mode", "fixture_loop", "test_loop"), [*itertools.product(("strict", "auto"), SCOPES, SCOPES)]
)
def test_a_cache_for_each_test(
    pytester: pytest.Pytester, mode: str, fixture_loop: str, test_loop: str
) -> None:
    """In every mode and loop scope and on every loop, healthy tests pass, and each leak fails the test that made it."""
    write_suite(
        pytester,
        mark=marked(mode),
        asyncio_mode=mode,
        asyncio_default_fixture_loop_scope=fixture_loop,
        asyncio_default_test_loop_scope=test_loop,
    )
    result = run_here(pytester)
    result.assert_outcomes(passed=NUM_LOOPS * (NUM_HEALTHY + len(LEAKS)), errors=NUM_LOOPS * len(LEAKS))
    for loop, (name, message) in itertools.product(("asyncio", "debug", "uvloop"), LEAKS.items()):
        result.stdout.fnmatch_lines([f"*ERROR at teardown of {name}[[]{loop}[]]*", message], consecutive=True)


@pytest.mark.parametrize("mode", ["strict", "auto"])
@pytest.mark.parametrize("scope", ["module", "session"])
def test_a_cache_that_tests_share(pytester: pytest.Pytester, mode: str, scope: str) -> None:
    """A cache of a longer scope serves all tests on its loop, and is looked at when it ends with that."""
    write_suite(
        pytester,
        mark=marked(mode),
        asyncio_mode=mode,
        asyncio_default_test_loop_scope=scope,
        hicache_scope=scope,
    )
    run_here(pytester, "test_healthy.py").assert_outcomes(passed=NUM_LOOPS * NUM_HEALTHY)
    result = run_here(pytester, "test_leaky.py")
    # The end of one loop is the beginning of the first test on the next, which is therefore not run.
    result.assert_outcomes(passed=NUM_LOOPS * len(LEAKS) - (NUM_LOOPS - 1), errors=NUM_LOOPS)
    result.stdout.fnmatch_lines(
        [
            LEAKS["test_forgotten_lease"],
            LEAKS["test_lost_page"].replace("left behind:", "and").replace("15", "1?"),
            LEAKS["test_late_write"].replace("left behind:", "and"),
            LEAKS["test_stray_task"].replace("left behind:", "and"),
            LEAKS["test_open_file"].replace("left behind:", "and"),
        ]
    )


@pytest.mark.parametrize("loop_scope", ["module", "package", "session"])
def test_the_mark_of_a_test_decides_on_its_loop(pytester: pytest.Pytester, loop_scope: str) -> None:
    """The cache is on the loop that the mark of a test names, whatever the options of the run say."""
    write_suite(pytester, mark=marked("strict", loop_scope))
    run_here(pytester, "test_healthy.py").assert_outcomes(passed=NUM_LOOPS * NUM_HEALTHY)


def test_a_test_on_another_loop_than_its_cache_is_refused(pytester: pytest.Pytester) -> None:
    """Where a cache outlives the loop of a test, the test is not begun, and its author told what to write."""
    write_suite(pytester, mark=marked("strict"), hicache_scope="session")
    result = run_here(pytester, "test_healthy.py")
    result.assert_outcomes(errors=NUM_LOOPS * NUM_HEALTHY)
    result.stdout.fnmatch_lines(
        [
            "hicache_scope is session, so the cache runs on the session loop, and this test on the function loop; "
            'set asyncio_default_test_loop_scope = session, or mark the test with *(loop_scope="session")'
        ]
    )


def test_a_scope_that_is_none_is_refused(pytester: pytest.Pytester) -> None:
    """A misspelt hicache_scope ends the run, with the words that there are."""
    write_suite(pytester, hicache_scope="tset")
    result = run_here(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*hicache_scope is 'tset'; choose one of function, class, *, session"])


OVERRIDES = """
import dataclasses
import pytest
import torch
from hicache_async import DeviceKV
from hicache_async.testing.leaks import LeakChecks
from hicache_async.testing.small_caches import small_config

@pytest.fixture
def hicache_kv():
    return DeviceKV.from_layers([torch.zeros(6, 8, 5, dtype=torch.bfloat16) for _ in range(3)])

@pytest.fixture
def hicache_config(hicache_config):
    return dataclasses.replace(hicache_config, write_policy="write_back")

@pytest.fixture
def hicache_clock():
    return None

@pytest.fixture
def hicache_checks():
    return LeakChecks(leases=False, failures=False)
"""

OVERRIDDEN = """
import asyncio
import pytest
from hicache_async import WritePolicy
from hicache_async.testing.small_caches import small_config, small_kv
from engine import serve

pytestmark = pytest.mark.asyncio

async def test_parts_are_those_of_the_suite(hicache, hicache_kv, hicache_config):
    assert hicache_config.write_policy is WritePolicy.WRITE_BACK
    assert hicache.stats().device.capacity == hicache_kv.num_pages == 6
    assert (await serve(hicache, range(17))).computed == 17
    assert (await serve(hicache, range(17))).device == 16

async def test_leases_may_be_left(hicache):
    await hicache.match_prefix("left", range(17)).load()

async def test_further_caches(make_hicache, tmp_path):
    like_the_first = await make_hicache(write_policy="write_through_selective", store=None)
    assert like_the_first.stats().device.capacity == 6
    kv = small_kv(num_pages=5)
    first = await make_hicache(small_config(kv), kv=kv, store=f"file://{tmp_path}")
    assert (await serve(first, range(13))).computed == 13
    await first.close()
    kv = small_kv(num_pages=5)
    second = await make_hicache(small_config(kv), kv=kv, store=f"file://{tmp_path}")
    assert (await serve(second, range(13))).store == 12

async def test_a_test_may_close_its_cache(hicache):
    await serve(hicache, range(17))
    await hicache.close()
"""


def test_every_part_can_be_overridden(pytester: pytest.Pytester) -> None:
    """A conftest replaces parts of the cache as it does with any fixture, and later caches are made like it."""
    write_suite(pytester)
    pytester.makeconftest(OVERRIDES)
    pytester.makepyfile(test_overridden=OVERRIDDEN)
    run_here(pytester, "test_overridden.py").assert_outcomes(passed=4)


HUNG = """
import asyncio
import pytest
from hicache_async.testing.faults import HangingStore, HeldStore, StoreWrapper
from hicache_async.stores.memory import MemoryStore
from engine import serve

pytestmark = pytest.mark.asyncio

class BusyStore(StoreWrapper):
    def __init__(self, inner):
        super().__init__(inner)
        self.is_read = asyncio.Event()

    async def around(self, verb, call, stop):
        if verb == "read":
            stop.job_started()
            self.is_read.set()
            raise OSError("gone, and its thread never comes back")
        return await call()

@pytest.fixture
def hicache_store():
    return BusyStore(HangingStore(MemoryStore(), "write", after_calls=2))

@pytest.fixture
def hicache_config(hicache_config):
    import dataclasses
    return dataclasses.replace(hicache_config, close_timeout_s=0.05)

async def test_a_store_that_hangs_is_let_go(hicache, hicache_store):
    for first in (0, 100, 200):
        await serve(hicache, range(first, first + 13))
    await hicache_store.inner.hung()

async def test_what_is_held_is_let_go(hicache, make_hicache, hicache_device):
    store = HeldStore(MemoryStore(), held=["write"])
    await serve(await make_hicache(store=store), range(13))
    await store.arrived(verb="write")
    hicache_device.auto = False
    await serve(hicache, range(13))
    assert hicache_device.pending

async def test_a_store_whose_thread_stays(hicache, make_hicache, hicache_store):
    await serve(hicache, range(13))
    await hicache.admin.flush()
    other = await make_hicache()
    with other.match_prefix("request", range(13)) as lease:
        prefetch = lease.start_prefetch()
        await hicache_store.is_read.wait()
        prefetch.stop()

async def test_half_an_object(make_hicache, tmp_path_factory):
    root = tmp_path_factory.mktemp("objects")
    await serve(await make_hicache(store=f"file://{root}"), range(13))
    (root / "half.tmp").touch()

async def test_a_bug(hicache):
    hicache._ctx.fail(ValueError("no such page"))
"""


def test_what_hangs_and_what_failed_is_named(pytester: pytest.Pytester) -> None:
    """What is held on purpose is let go; a move that outlives the close, half an object, and a bug fail the test."""
    write_suite(pytester)
    pytester.makeconftest(IMPATIENT)
    pytester.makepyfile(test_hung=HUNG)
    result = run_here(pytester, "test_hung.py")
    result.stdout.fnmatch_lines(["*left behind: move: store.read is not over, and keeps its pages for ever"])
    result.stdout.fnmatch_lines(["*temporary file: */objects0/half.tmp of 0 bytes"])
    result.stdout.fnmatch_lines(["*left behind: failure: the cache has failed: ValueError('no such page')"])
    result.assert_outcomes(passed=5, errors=3)


COUNTING = f"""
import sys

def pytest_sessionfinish(session):
    plugins = session.config.pluginmanager.get_plugins()
    print("REGISTERED", [vars(plugin).get("__name__") for plugin in plugins].count("{PLUGIN}"))
    print("LOADED", sorted(name for name in sys.modules if name.split(".")[0] in ("hicache_async", "torch", "numpy")))
"""


def test_a_suite_that_does_not_use_it_loads_next_to_nothing(pytester: pytest.Pytester) -> None:
    """Where the plugin is registered and no fixture used, neither torch, nor numpy, nor the cache are imported."""
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makeconftest(COUNTING)
    pytester.makepyfile(test_other="def test_other():\n    pass\n")
    done = run_apart(pytester, "-p", PLUGIN, "-W", "error", "-s")
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = next(line for line in done.stdout.splitlines() if "LOADED" in line)
    names = ["hicache_async", "hicache_async.testing", "hicache_async.testing._loop_fixtures", PLUGIN]
    assert loaded.endswith(f"LOADED {sorted(names)}")


def test_it_is_registered_once_however_often_it_is_named(pytester: pytest.Pytester) -> None:
    """By its entry point, by -p and by a conftest, and by all of them at once, the plugin is the same one."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (name, value), *others = project["entry-points"]["pytest11"].items()
    assert (name, value, others) == (PLUGIN, PLUGIN, [])
    info = pytester.mkdir("site") / "hicache_async_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hicache-async-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[pytest11]\n{name} = {value}\n")
    write_suite(pytester, mark=marked("strict"))
    done = run_apart(pytester, "test_healthy.py", "-p", PLUGIN, path=str(info.parent))
    assert f" {NUM_LOOPS * NUM_HEALTHY} passed" in done.stdout, done.stdout + done.stderr
    pytester.makepyfile(test_other="def test_other():\n    pass\n")
    for args, conftest in [((), ""), (("-p", PLUGIN), f"pytest_plugins = [{PLUGIN!r}]\n")]:
        pytester.makeconftest(conftest + COUNTING)
        done = run_apart(pytester, "test_other.py", "-s", *args, path=str(info.parent))
        assert "REGISTERED 1" in done.stdout, done.stdout + done.stderr


def test_without_pytest_asyncio(pytester: pytest.Pytester) -> None:
    """Where pytest-asyncio is absent, other tests run, and a test that needs it is told so."""
    pytester.makepyfile(
        pytest_asyncio="raise ImportError('not installed')",
        test_other="def test_other():\n    pass\n\ndef test_cache(hicache):\n    pass\n",
    )
    done = run_apart(pytester, "-p", PLUGIN, "-p", "no:asyncio", "-W", "error", path=str(pytester.path))
    assert "1 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "the fixtures of hicache_async need pytest-asyncio: pip install pytest-asyncio" in done.stdout


EXAMPLE = Path(__file__).parents[2] / "examples" / "testing_your_engine"


def test_the_example(pytester: pytest.Pytester) -> None:
    """The tests of the example pass; where its engine forgets to release, or to wait, they fail and say so."""
    shutil.copytree(EXAMPLE, pytester.path, dirs_exist_ok=True)
    run_here(pytester).assert_outcomes(passed=4)
    engine = pytester.path / "engine.py"
    code = engine.read_text()
    engine.write_text(code.replace("(request_id, tokens) as lease", "(request_id, tokens).keep() as lease"))
    result = run_here(pytester, "-k", "not_computed_again")
    result.assert_outcomes(passed=1, errors=1, deselected=3)
    made_at = "*/engine.py:* in Engine.answer < */test_engine.py:* in test_what_was_*"
    result.stdout.fnmatch_lines(
        [f"left behind: lease: <PrefixLease 'first' * was not released; made at {made_at}"]
    )
    engine.write_text(code.replace("await loading.finished()", "pass"))
    result = run_here(pytester)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["FAILED *test_nothing_is_read_before_it_is_there*"])
