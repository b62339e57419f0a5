"""Bad input gets an error that names the field, the value and what would be right, and loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hicache_async import (
    CacheConfig,
    CapacityError,
    ClosedError,
    ConfigError,
    DeviceKV,
    HiCache,
    HiCacheError,
    LeaseError,
    PrefetchPolicy,
    StepBatch,
    Tier,
    TokenKey,
    WrongLoopError,
    open_store,
    register_store,
)
from tests.toy_engine import PAGE_SIZE, make_config, make_kv, open_cache, prompt, serve

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def refused(error: type[HiCacheError], *parts: str) -> Iterator[None]:
    """Expect ``error`` with a message that has all of ``parts``, in this order."""
    pattern = ".*".join(re.escape(part) for part in parts)
    with pytest.raises(error, match=re.compile(pattern, re.DOTALL)):
        yield


# Configuration and tensors

CONFIGS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"page_size": 0}, ("page_size is 0", "integer >= 1")),
    ({"host_ratio": -1.0}, ("host_ratio is -1.0", "> 0")),
    ({"host_bytes": 2.5}, ("host_bytes is 2.5", "integer")),
    ({"prefetch_capacity_fraction": 1.5}, ("prefetch_capacity_fraction is 1.5", "<= 1")),
    ({"close_timeout_s": float("nan")}, ("close_timeout_s is nan", "finite number >= 0")),
    ({"write_policy": "write_never"}, ("write_policy is 'write_never'", "choose one of write_through")),
    ({"host_layout": "page_first", "io_mode": "direct"}, ("page_first", "io_mode direct", "these do: layer")),
    ({"host_layout": "page_first_direct"}, ("page_first_direct", "io_mode kernel", "direct")),
    ({"tp_rank": 2, "tp_size": 2}, ("tp_rank is 2", "0 .. tp_size-1 = 1")),
    ({"ranks_on_host": 0}, ("ranks_on_host is 0", "integer >= 1 and <= 65536")),
    ({"write_back_low_water": 1.5}, ("write_back_low_water is 1.5", ">= 0 and <= 1")),
    ({"pin_capacity_fraction": -0.1}, ("pin_capacity_fraction is -0.1", ">= 0 and <= 1")),
    (
        {"device_eviction_policy": "mru"},
        ("device_eviction_policy is 'mru'", "give one of lru", "key(candidate)"),
    ),
    ({"host_eviction_policy": dict}, ("host_eviction_policy is <class 'dict'>", "give one of lru")),
]


@pytest.mark.parametrize(("options", "parts"), CONFIGS)
def test_config_out_of_range(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    """An option that cannot work is refused when the config is built."""
    with refused(ConfigError, *parts):
        CacheConfig(**options)


def layer(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape or (4, PAGE_SIZE, 2, 8), dtype=dtype, device=device)


TENSORS: list[tuple[Callable[[], object], tuple[str, ...]]] = [
    (lambda: DeviceKV.from_layers([], []), ("k is empty", "one tensor per layer")),
    (lambda: DeviceKV.from_layers([layer()], [layer()] * 2), ("k has 1 layers and v has 2", "as many")),
    (
        lambda: DeviceKV.from_layers([layer(), layer(5, 4, 2, 8)], [layer()] * 2),
        ("k[1] has num_pages 5", "must be 4, as k[0]"),
    ),
    (
        lambda: DeviceKV.from_layers([layer()], [layer(4, 4, 3, 8)]),
        ("v[0] has kv_heads 3", "must be 2, as k[0]"),
    ),
    (
        lambda: DeviceKV.from_layers([layer()], [layer(4, 8, 2, 8)]),
        ("v[0] has page_size 8", "must be 4, as k[0]"),
    ),
    (
        lambda: DeviceKV.from_layers([layer()], [layer(dtype=torch.float16)]),
        ("v[0] has dtype torch.float16", "must be torch.float32, as k[0]"),
    ),
    (
        lambda: DeviceKV.from_layers([layer(device="meta")], [layer()]),
        ("k[0] is", "on meta", "a dense tensor that has memory"),
    ),
    (
        lambda: DeviceKV.from_layers([layer(32, 2, 8)], [layer(32, 2, 8)]),
        ("page_size is None", "give page_size"),
    ),
    (
        lambda: DeviceKV.from_layers([layer(30, 2, 8)], [layer(30, 2, 8)], page_size=4),
        ("k[0] has 30 tokens", "multiple of page_size 4"),
    ),
    (
        lambda: DeviceKV.from_layers([layer().transpose(1, 2)], [layer().transpose(1, 2)]),
        ("k[0] has strides", "must be contiguous"),
    ),
    (
        lambda: DeviceKV.from_layers([layer()], [layer()], reserved_pages=[4]),
        ("reserved_pages names page 4", "pages are 0 .. 3"),
    ),
]


@pytest.mark.parametrize(("build", "parts"), TENSORS)
def test_tensors_that_disagree(build: Callable[[], object], parts: tuple[str, ...]) -> None:
    """K and V of which one differs in shape, dtype or device are refused by name."""
    with refused(ConfigError, *parts):
        build()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"page_size": 8}, ("page_size is 8 in the config and 4 in kv", "make them equal")),
        (
            {"host_bytes": 1023},
            ("host_bytes is 1023, less than one page", "takes 1024 bytes", "raise host_bytes"),
        ),
        ({"host_ratio": 0.01}, ("host_ratio is 0.01, less than one page", "16 pages", "raise host_ratio")),
        (
            {"host_ratio": 1.0},
            ("host pool of 16 pages", "device pool has 16", "raise host_ratio or set allow"),
        ),
        ({"host_reserve_bytes": 1 << 60}, ("bytes are free and host_reserve_bytes keeps", "lower")),
        (
            {"host_layout": "head_grouped", "head_group": 3},
            (
                "head_group is 3; it must divide the model's 2 KV heads and the 2 of this rank",
                "set it to 2 /",
            ),
        ),
        (
            {"key_scheme": "unified", "pp_size": 2},
            ("total_layers is not set", "pp_size 2", "set total_layers to that of the model"),
        ),
    ],
)
async def test_parts_that_do_not_fit_together(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    """What only shows when config and tensors meet is refused at open; after it, another open works."""
    kv = make_kv()
    with refused(ConfigError, *parts):
        async with open_cache(kv=kv, **options):
            pass
    async with open_cache(kv=kv) as cache:
        await serve(cache, "r", prompt(1))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("redis", ("no store opens 'redis'", "must be one of: ", "file", "memory", "null")),
        ("file:relative/path", ("relative path 'relative/path'", "file:///absolute/path")),
        ("file://host/path", ("names a host, 'host'", "file:///absolute/path")),
        ("file:///x?existence_ttl_s=soon", ("existence_ttl_s is 'soon'", "a number")),
        ("file:///x?lanes=3", ("'lanes' is not an option", "num_lanes")),
    ],
)
async def test_store_urls(url: str, parts: tuple[str, ...]) -> None:
    """A URL that opens no store is refused, by open_store and by the cache alike."""
    with refused(ConfigError, *parts):
        open_store(url)
    with refused(ConfigError, *parts):
        async with open_cache(store=url):
            pass


def test_store_names() -> None:
    """A scheme or a target that cannot be one is refused."""
    with refused(ConfigError, "scheme is 'My Store'"):
        register_store("My Store", "module:Class")
    with refused(ConfigError, "target is 'module'", "module:Class"):
        register_store("mine", "module")


# Arguments of a request

TOKENS: list[tuple[Any, tuple[str, ...]]] = [
    ([1, -1, 2], ("token 1 is -1", "0 .. 2**32-1")),
    ([1, 2, 2**32], ("token 2 is 4294967296", "0 .. 2**32-1")),
    ([2**70], ("token 0 is 1180591620717411303424", "0 .. 2**32-1")),
    ([1, 2.0], ("token 1 is 2.0", "integers")),
    ([1, None], ("token 1 is None", "integers")),
    (["a"], ("token 0 is 'a'", "integers")),
    ([[1, 2]], ("token 0 is [1, 2]", "integers")),
    (np.array([1, -5]), ("token 1 is -5", "0 .. 2**32-1")),
    (np.array([2**32]), ("token 0 is 4294967296", "0 .. 2**32-1")),
    (np.array([2**63], np.uint64), ("token 0 is 9223372036854775808", "0 .. 2**32-1")),
    (np.array([1.0]), ("dtype float64", "integers")),
    (np.array([[1, 2]]), ("shape (1, 2)", "one dimension")),
    (torch.tensor([3, -1]), ("token 1 is -1", "0 .. 2**32-1")),
    (torch.tensor([2**32]), ("token 0 is 4294967296", "0 .. 2**32-1")),
    (torch.tensor([1.5]), ("dtype float32", "integers")),
    (torch.tensor([True]), ("dtype bool", "integers")),
    (torch.zeros(2, dtype=torch.int64, device="meta"), ("cannot be read", "host memory")),
    ("text", ("shape ()", "one dimension")),
    (7, ("shape ()", "one dimension")),
    (None, ("shape ()", "one dimension")),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("tokens", "parts"), TOKENS, ids=lambda value: None)
async def test_token_ids(tokens: Any, parts: tuple[str, ...]) -> None:
    """Ids that are no uint32 are refused wherever they are given, by position, and nothing is appended."""
    key = TokenKey([1])
    for act in (TokenKey, key.extend):
        with refused(ConfigError, *parts):
            act(tokens)
    assert len(key) == 1
    async with open_cache() as cache:
        with refused(ConfigError, *parts):
            cache.match_prefix("r", tokens)
        with cache.match_prefix("r", prompt(1, 9)) as lease:
            await lease.load()
            lease.allocate_nowait(9)
            for extend in (lease.extend, lambda ids: cache.step(StepBatch(extend=[(lease, ids)]))):
                with refused(ConfigError, *parts):
                    extend(tokens)
            assert (lease.num_tokens, len(lease.key)) == (9, 9)
            assert cache.stats().leases == 1
            lease.commit(9)


@pytest.mark.parametrize(
    "tokens",
    [[1, 2, 2**32 - 1], (1, 2, 2**32 - 1), [np.int64(1), 2, 2**32 - 1], np.array([1, 2, 2**32 - 1]),
     np.array([1, 2, 2**32 - 1], np.uint32), torch.tensor([1, 2, 2**32 - 1])],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_the_same_ids_in_any_form(tokens: Any) -> None:
    """Every form of the same ids is the same key."""
    assert TokenKey(tokens).data == bytes([1, 0, 0, 0, 2, 0, 0, 0, 255, 255, 255, 255])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"request_id": ""}, ("request_id is ''", "non-empty string")),
        ({"request_id": 7}, ("request_id is 7", "non-empty string")),
        ({"salt": "tenant"}, ("salt is 'tenant'", "bytes")),
        ({"adapter": b"lora"}, ("adapter is b'lora'", "string or None")),
        ({"priority": "high"}, ("priority is 'high'", "an integer", "the higher the more worth")),
        ({"priority": 1.5}, ("priority is 1.5", "an integer")),
        ({"priority": None}, ("priority is None", "an integer")),
        ({"output_priority": True}, ("output_priority is True", "an integer")),
        ({"priority": 1, "output_priority": "low"}, ("output_priority is 'low'", "an integer")),
    ],
)
async def test_names_of_a_request(arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    """A request needs a name; salt, adapter and priorities have their types."""
    async with open_cache() as cache:
        with refused(ConfigError, *parts):
            cache.match_prefix(**({"request_id": "r", "tokens": [1]} | arguments))
        assert cache.stats().leases == 0


COUNTS = [-1, 1.5, "8", None, True]


@pytest.mark.asyncio
@pytest.mark.parametrize("count", COUNTS)
async def test_token_counts(count: Any) -> None:
    """A number of tokens or pages is an integer >= 0; anything else is refused and nothing is done."""
    async with open_cache() as cache:
        lease = cache.match_prefix("r", prompt(1, 9))
        if count is not None:  # load: as many as the prompt has
            with refused(ConfigError, f"total_tokens is {count!r}", "integer >= 0"):
                await lease.load(count)
        await lease.load()
        lease.allocate_nowait(9)
        acts: list[tuple[str, Callable[[], object]]] = [
            ("total_tokens", lambda: lease.allocate_nowait(count)),
            ("num_tokens", lambda: lease.commit(count)),
            ("from_token", lambda: lease.discard(count)),
            ("num_tokens", lambda: cache.step(StepBatch(commit=[(lease, count)]))),
            ("from_token", lambda: cache.step(StepBatch(discard=[(lease, count)]))),
            ("total_tokens", lambda: cache.step(StepBatch(allocate=[(lease, count)]))),
        ]
        for name, act in acts:
            with refused(ConfigError, f"{name} is {count!r}", "integer >= 0"):
                act()
        with refused(ConfigError, f"total_tokens is {count!r}"):
            await lease.allocate(count)
        with refused(ConfigError, f"num_pages is {count!r}", "integer >= 0"):
            await cache.begin_step(count)
        cache.audit()
        assert lease.commit(np.int64(8)) == 8  # type: ignore[arg-type]
        lease.release()


@pytest.mark.asyncio
async def test_counts_beyond_what_there_is() -> None:
    """A commit beyond what the lease knows or holds, and an allocation beyond the pool, say which it was."""
    async with open_cache() as cache:
        lease = cache.match_prefix("r", prompt(1, 9))
        with refused(LeaseError, "'r' of 9 tokens", "call load() first"):
            lease.commit(0)
        with refused(LeaseError, "'r' of 9 tokens", "call load() first"):
            lease.allocate_nowait(4)
        await lease.load()
        with refused(LeaseError, "commit of 4 tokens", "holds pages for 0", "allocate add"):
            lease.commit(4)
        lease.allocate_nowait(40)
        with refused(LeaseError, "commit of 10 tokens", "knows 9 (extend adds)"):
            lease.commit(10)
        with refused(CapacityError, "more device pages are needed to hold 17", "preempt a request"):
            lease.allocate_nowait(65)
        cache.audit()
        assert lease.commit(9) == 8
        with refused(LeaseError, "discard from token 7", "8 tokens are committed"):
            lease.discard(7)
        lease.release()
        assert (await serve(cache, "again", prompt(2))).computed == 25


@pytest.mark.parametrize("name", ["base_s", "per_ki_token_s", "cap_s"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "1"])
def test_times_of_a_policy(name: str, value: Any) -> None:
    """The times of a prefetch policy are finite numbers >= 0."""
    with refused(ConfigError, f"{name} is {value!r}", "finite number >= 0"):
        PrefetchPolicy.timeout(**{name: value})


@pytest.mark.asyncio
@pytest.mark.parametrize("tier", [Tier.DEVICE, "disk", None])
async def test_a_tier_that_nothing_moves_down_to(tier: Any) -> None:
    """Flush knows the two tiers that have something above them, as words too."""
    async with open_cache() as cache:
        with refused(ConfigError, f"tier is {tier!r}", "host or store"):
            await cache.admin.flush(tier)
        await cache.admin.flush("host")  # type: ignore[arg-type]


# At a wrong time or place


@pytest.mark.asyncio
async def test_use_after_release() -> None:
    """A released lease refuses everything but another release, and says where a new one comes from."""
    async with open_cache() as cache:
        lease = cache.match_prefix("r", prompt(1))
        await lease.load()
        lease.release()
        acts: list[Callable[[], object]] = [
            lambda: lease.allocate_nowait(4),
            lambda: lease.extend([1]),
            lambda: lease.commit(4),
            lambda: lease.discard(4),
            lease.start_prefetch,
        ]
        for act in acts:
            with refused(LeaseError, "'r' of 25 tokens", "was released", "match_prefix"):
                act()
        for call in (lease.load, lease.prefetch, lambda: lease.allocate(4)):
            with refused(LeaseError, "'r' of 25 tokens", "was released"):
                await call()
        with refused(LeaseError, "'r'", "no live lease of this cache"):
            cache.step(StepBatch(commit=[(lease, 4)]))
        assert (lease.pages.tolist(), lease.pending_tokens) == ([], 0)
        lease.release()
        cache.audit()


@pytest.mark.asyncio
async def test_a_lease_of_another_cache() -> None:
    """A step with the lease of another cache is refused whole."""
    async with open_cache() as one, open_cache() as two:
        with one.match_prefix("mine", prompt(1)) as mine, two.match_prefix("yours", prompt(1)) as yours:
            await mine.load()
            await yours.load()
            with refused(LeaseError, "'yours'", "another cache made it"):
                one.step(StepBatch(allocate=[(mine, 25), (yours, 25)]))
            assert len(mine.pages) == 0


@pytest.mark.asyncio
async def test_use_after_close() -> None:
    """A closed cache says so and how to get another; closing again and looking inside are no errors."""
    async with open_cache() as cache:
        await serve(cache, "r", prompt(1))
    acts: list[Callable[[], object]] = [
        lambda: cache.match_prefix("r", [1]),
        lambda: cache.step(StepBatch()),
        cache.fence,
        cache.host_fence,
    ]
    for act in acts:
        with refused(ClosedError, "the cache is closed", "HiCache.open"):
            act()
    for call in (cache.begin_step, cache.admin.flush):
        with refused(ClosedError, "the cache is closed"):
            await call()
    await cache.close()
    assert cache.stats().state == "closed"


@pytest.mark.asyncio
async def test_a_flush_that_waits_hears_of_the_close() -> None:
    """Who waits for a flush when the cache is closed is not left waiting."""
    async with open_cache(store="memory:") as cache:
        pass
    cache = await HiCache.open(make_config(), kv=make_kv()).__aenter__()
    cache._movers.backups.is_idle.clear()  # something never ends
    flushing = asyncio.create_task(cache.admin.flush())
    await asyncio.sleep(0)
    cache._movers.backups.is_idle.set()
    await cache.close()
    with refused(ClosedError, "the cache is closed"):
        await flushing


def uses(cache: HiCache, lease: Any) -> list[Callable[[], object]]:
    """Return one call of everything that belongs on the cache's loop."""
    return [
        lambda: cache.match_prefix("r", [1]),
        lambda: cache.step(StepBatch()),
        lambda: asyncio.run(cache.begin_step()),
        lambda: asyncio.run(cache.close()),
        lambda: asyncio.run(cache.admin.flush()),
        cache.fence,
        cache.host_fence,
        cache.stats,
        cache.audit,
        lease.start_prefetch,
        lambda: asyncio.run(lease.prefetch()),
        lambda: asyncio.run(lease.load()),
        lambda: lease.allocate_nowait(4),
        lambda: asyncio.run(lease.allocate(4)),
        lambda: lease.extend([1]),
        lambda: lease.commit(4),
        lambda: lease.discard(4),
        lease.release,
    ]


@pytest.mark.asyncio
async def test_use_from_another_thread() -> None:
    """Everything but what is documented for any thread refuses a foreign one, and names the way in."""
    errors: list[BaseException] = []

    def run() -> None:
        for use in uses(cache, lease):
            try:
                use()
            except WrongLoopError as error:
                errors.append(error)

    async with open_cache() as cache:
        lease = cache.match_prefix("r", prompt(1))
        thread = threading.Thread(target=run)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert len(errors) == len(uses(cache, lease))
        for error in errors:
            assert re.search("belongs to .* was used from .*; call it on its loop, e.g. with", str(error))
        await lease.load()
        lease.release()


@pytest.mark.asyncio
async def test_use_from_another_loop() -> None:
    """A second loop in a second thread is refused too, as is whatever it awaits."""
    refusals: list[str] = []

    async def use_all() -> None:
        for use in (lambda: cache.match_prefix("r", [1]), lease.release, cache.stats):
            with refused(WrongLoopError, "was used from another event loop"):
                use()
            refusals.append("sync")
        for call in (cache.begin_step, cache.close, lease.load, lease.prefetch, cache.admin.flush):
            with refused(WrongLoopError, "was used from another event loop"):
                await call()
            refusals.append("async")

    async with open_cache() as cache:
        lease = cache.match_prefix("r", prompt(1))
        await asyncio.to_thread(asyncio.run, use_all())
        assert refusals == ["sync"] * 3 + ["async"] * 5
        await lease.load()
        lease.release()


# In other processes


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the modules of this process; its output must say what happened."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd="/",
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


AFTER_FORK = """
import asyncio, os, sys
from hicache_async import WrongLoopError
from tests.toy_engine import open_cache, prompt, serve

async def main():
    async with open_cache() as cache:
        await serve(cache, "before", prompt(1))
        lease = cache.match_prefix("r", prompt(1))
        child = os.fork()
        if child == 0:
            uses = [lambda: cache.match_prefix("r", [1]), cache.stats, lambda: lease.commit(0), lease.release]
            for use in uses:
                try:
                    use()
                except WrongLoopError as error:
                    print(error, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        await lease.load()
        lease.release()
        await serve(cache, "after", prompt(1))

asyncio.run(main())
print("parent goes on")
"""


def test_use_after_fork() -> None:
    """A forked child is refused and told so; its parent goes on."""
    done = run_script(AFTER_FORK)
    assert done.returncode == 0, done.stderr
    *refusals, last = done.stdout.splitlines()
    assert last == "parent goes on"
    assert len(refusals) == 4
    for line in refusals:
        assert re.fullmatch(
            r"this cache belongs to process \d+, this is its fork \d+: open a cache of its .*", line
        )


WITHOUT_L3 = """
import asyncio, json, os, resource, sys
from tests.toy_engine import open_cache, prompt, serve
from hicache_async.stores import FileStore
from structlog.testing import capture_logs

unwritable, full = sys.argv[1:]
if os.geteuid() == 0:  # may write anywhere
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

async def serve_all(directory):
    async with open_cache(store=f"file://{directory}/kv") as cache:
        for turn in range(3):
            for number in range(4):
                books = await serve(cache, f"{turn} {number}", prompt(number))
                assert books.computed in (1, 25), books
                await cache.admin.flush()
        cache.audit()
        counters = cache.stats().counters
        assert counters["backup_pages_failed"] and not counters["backed_up_pages"], counters

for directory in (unwritable, full):
    if directory == full:  # no file can grow to a page, as if the disk were full
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
    with capture_logs() as lines:
        asyncio.run(serve_all(directory))
    print(json.dumps([line for line in lines if line["log_level"] not in ("debug", "info")]))
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Give a directory that every user can reach: those of pytest are for one user only."""
    with tempfile.TemporaryDirectory() as path:
        Path(path).chmod(0o755)
        yield Path(path)


def test_directories_that_cannot_be_written(directory: Path) -> None:
    """Requests go on without the third tier, one log line says so, and no half of a file is left."""
    unwritable, full = directory / "unwritable", directory / "full"
    for path, mode in ((unwritable, 0o555), (full, 0o777)):
        path.mkdir()
        path.chmod(mode)
    done = run_script(WITHOUT_L3, str(unwritable), str(full))
    unwritable.chmod(0o755)
    assert done.returncode == 0, done.stderr
    of_unwritable, of_full = (json.loads(line) for line in done.stdout.splitlines())
    for lines, path, reason in (
        (of_unwritable, unwritable, "Permission denied"),
        (of_full, full, "File too large"),
    ):
        # the backup, and the manifest of the namespace
        assert sorted(line["event"] for line in lines) == ["backup.stopped", "store.fault"]
        assert all(str(path) in line["fault"] and reason in line["fault"] for line in lines)
        assert any("requests go on" in line.get("hint", "") for line in lines)
    assert [path for path in directory.rglob("*") if path.is_file()] == []
