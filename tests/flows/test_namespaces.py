"""Namespaces: each is written down in its store once, and a store that is full of others only is said to be."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from hicache_async import State, Tier
from hicache_async.abc import Store
from hicache_async.core.keys import Namespace, namespace_of
from hicache_async.core.manifest import decode, encode, is_manifest_key, manifest_key, manifest_of
from hicache_async.flows.namespaces import MAX_MANIFESTS
from hicache_async.stores import FileStore
from hicache_async.stores.memory import MemoryStore
from hicache_async.types import Stop, StopToken
from tests.flows.rig import Opener, Rig, driven, page_hashes, tokens, turns
from tests.flows.stores import namespaces_met
from tests.flows.test_close import Logs, events

pytestmark = [pytest.mark.asyncio, pytest.mark.every_loop]

WARNING = "store.other_namespaces"


class Counted(MemoryStore):
    """Count the calls for manifests and lists, and go wrong in those of one verb where a test says how.

    Attributes:
        calls: by verb: "read" and "write" of manifests, "list_keys", "list_namespaces".
        faults: what a verb does instead.
    """

    list_namespaces = None  # it can only list its keys

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_manifests_read = 0
        self.faults: dict[str, Callable[[], Any]] = {}

    async def _strike(self, verb: str) -> None:
        self.calls[verb] += 1
        if verb in self.faults:
            await self.faults[verb]()

    async def read(self, keys: Sequence[str], into: Sequence[memoryview], stop: StopToken) -> int:
        if is_manifest_key(keys[0]):
            self.num_manifests_read += len(keys)
            await self._strike("read")
        return await super().read(keys, into, stop)

    async def write(self, keys: Sequence[str], pages: Sequence[memoryview]) -> int:
        if is_manifest_key(keys[0]):
            await self._strike("write")
        return await super().write(keys, pages)

    async def list_keys(self) -> Sequence[str]:
        await self._strike("list_keys")
        return await super().list_keys()


class Knowing(Counted):
    """The same, of a store that knows its namespaces."""

    async def list_namespaces(self) -> Sequence[str]:
        await self._strike("list_namespaces")
        return sorted({namespace_of(key) for key in self._objects} - {""})


class FourMethods:
    """A store that can do nothing but what every store can."""

    def __init__(self) -> None:
        self._inner = MemoryStore()
        self.count_prefix = self._inner.count_prefix
        self.read = self._inner.read
        self.write = self._inner.write
        self.aclose = self._inner.aclose


STORES = [MemoryStore, Counted, Knowing]


async def filled(open_cache: Opener, store: Store, letters: str = "abc", **options: object) -> Rig:
    """Store a prompt as another cache would, and close that."""
    rig = await open_cache(store=store, **options)  # type: ignore[arg-type]
    if letters:
        await rig.serve(letters, prefetch=False)
        await rig.cache.admin.flush()
    await turns()
    await rig.cache.close()
    return rig


async def opened(open_cache: Opener, store: Store | None, **options: object) -> Rig:
    """Open a cache and let it get to know its store."""
    rig = await open_cache(store=store, **options)  # type: ignore[arg-type]
    await turns()
    return rig


def others(rig: Rig, count: int, **changes: object) -> list[Namespace]:
    """Return namespaces that differ from a rig's in their fingerprint, and in ``changes``."""
    own = rig.ctx.keys.namespace
    return [msgspec.structs.replace(own, fingerprint=f"other {number}", **changes) for number in range(count)]


async def put(store: Store, *namespaces: Namespace, num_pages: int = 1) -> None:
    """Put manifests and some pages into a store."""
    for namespace in namespaces:
        await store.write([manifest_key(namespace.digest)], [memoryview(encode(namespace))])
        keys = [f"{page:064x}_{namespace.digest}_model_0_1" for page in range(num_pages)]
        await store.write(keys, [memoryview(b"page")] * num_pages)


# Written down


@pytest.mark.parametrize("make", STORES)
async def test_a_namespace_is_written_down_once(open_cache: Opener, make: Callable[[], MemoryStore]) -> None:
    """After the first open the manifest is there, and the second finds and leaves it as it is."""
    store = make()
    for _ in range(2):
        rig = await opened(open_cache, store)
        namespace = rig.ctx.keys.namespace
        data = bytearray(4096)
        key = manifest_key(namespace.digest)
        assert await store.read([key], [memoryview(data)], StopToken()) == 1
        assert decode(namespace.digest, data) == manifest_of(namespace)
        assert list(await store.list_keys()) == [key]
        await rig.cache.close()


async def test_the_file_store_keeps_it(open_cache: Opener, tmp_path: Any) -> None:
    """A manifest is an object as any other, read back by the next process."""
    store = FileStore(tmp_path)
    rig = await open_cache(store=store)
    await namespaces_met()
    digest = rig.ctx.keys.namespace.digest
    await rig.cache.close()
    await store.aclose()
    again = FileStore(tmp_path)
    assert list(await again.list_keys()) == [manifest_key(digest)]
    data = bytearray(4096)
    assert await again.read([manifest_key(digest)], [memoryview(data)], StopToken()) == 1
    assert decode(digest, data) is not None
    await again.aclose()


async def test_a_store_of_four_methods_gets_it_too(open_cache: Opener) -> None:
    """Nothing is looked for where a store can list nothing, and the manifest is written all the same."""
    store = FourMethods()
    rig = await opened(open_cache, store)
    assert await store.count_prefix([manifest_key(rig.ctx.keys.namespace.digest)]) == 1
    assert rig.counters.get("namespace_faults", 0) == 0


async def test_a_rank_that_never_writes_leaves_none(open_cache: Opener) -> None:
    """Of ranks that hold the same bytes only the first writes, manifests included."""
    rig = await open_cache()
    rig.ctx.keys.writes = False
    store = Counted()
    await rig.cache.admin.attach_store(store)
    await turns()
    assert store.calls["write"] == 0 and store.calls["list_keys"] == 1


async def test_an_attached_store_gets_it(open_cache: Opener) -> None:
    """Each store that comes later has its manifest, too."""
    rig = await opened(open_cache, None)
    for store in (Counted(), Counted()):
        await rig.cache.admin.attach_store(store)
        await turns()
        assert await store.list_keys() == (manifest_key(rig.ctx.keys.namespace.digest),)
        await rig.cache.admin.detach_store()


# The warning


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("make", STORES)
async def test_a_store_full_of_others_is_said_to_be(
    open_cache: Opener, logs: Logs, make: Callable[[], MemoryStore], attached: bool
) -> None:
    """One warning names the field, both values, what to set, and the command that shows more."""
    store = make()
    other = await filled(open_cache, store, fingerprint="v2")
    if attached:
        rig = await opened(open_cache, None)
        await rig.serve("xyz")
        await rig.cache.admin.attach_store(store)
        await rig.cache.admin.flush()
        await turns()
    else:
        rig = await opened(open_cache, store)
        await rig.serve("abc")
    (line,) = events(logs, WARNING)
    assert line["log_level"] == "warning"
    assert line["nearest"] == other.ctx.keys.namespace.digest
    assert line["different"] == ['fingerprint is "" here and "v2" there']
    assert any('set fingerprint = "v2"' in advice for advice in line["advice"])
    assert "hicache doctor" in line["hint"]


async def test_the_nearest_of_several_is_named(open_cache: Opener, logs: Logs) -> None:
    """There is one warning for all, about what is most easily shared, with the names of the rest."""
    store = Knowing()
    digests = set()
    for options in (
        {"fingerprint": "v2", "host_layout": "page_first_direct", "io_mode": "direct"},
        {"fingerprint": "v3"},
    ):
        digests.add((await filled(open_cache, store, **options)).ctx.keys.namespace.digest)
    logs.clear()
    await opened(open_cache, store)
    (line,) = events(logs, WARNING)
    assert set(line["others"]) == digests
    assert line["different"] == ['fingerprint is "" here and "v3" there']


@pytest.mark.parametrize("make", STORES)
async def test_own_data_is_silent(open_cache: Opener, logs: Logs, make: Callable[[], MemoryStore]) -> None:
    """Where this cache has objects of its own nothing is said, whatever else is there."""
    store = make()
    await filled(open_cache, store)
    await filled(open_cache, store, fingerprint="v2")
    logs.clear()
    await opened(open_cache, store)
    assert not events(logs, WARNING)


@pytest.mark.parametrize("make", STORES)
async def test_a_manifest_alone_is_no_data(
    open_cache: Opener, logs: Logs, make: Callable[[], MemoryStore]
) -> None:
    """A cache that was opened before and stored nothing is warned again; others that stored nothing warn nobody."""
    store = make()
    await filled(open_cache, store, "", fingerprint="v2")
    await filled(open_cache, store, "")
    assert not events(logs, WARNING)
    await filled(open_cache, store, "abc", fingerprint="v2")
    logs.clear()
    await opened(open_cache, store)
    assert len(events(logs, WARNING)) == 1


@pytest.mark.parametrize("make", STORES)
async def test_other_models_and_nothing_are_silent(
    open_cache: Opener, logs: Logs, make: Callable[[], MemoryStore]
) -> None:
    """An empty store, one of other models, and one of things that are nobody's cause no warning."""
    store = make()
    await store.write(["manifest_x", "x", "manifest_ukv1-0123456789abcdef"], [memoryview(b"?")] * 3)
    await filled(open_cache, store, model_id="other")
    logs.clear()
    rig = await opened(open_cache, store)
    assert not events(logs, WARNING)
    assert rig.counters.get("namespace_faults", 0) == 0


@pytest.mark.parametrize(
    ("layers", "first", "is_warned"), [(2, 2, False), (5, 2, False), (4, 0, True), (1, 0, True), (4, 1, True)]
)
async def test_another_stage_of_the_pipeline_is_no_other(
    open_cache: Opener, logs: Logs, layers: int, first: int, is_warned: bool
) -> None:
    """What holds none of our layers belongs to another stage; what holds some is of a pipeline cut otherwise."""
    store = Knowing()
    own = (await opened(open_cache, None, pp_size=2)).ctx.keys.namespace
    assert own.layer_partition == 2
    place = f";first_layer={first}" if first else ""
    other = msgspec.structs.replace(own, layer_partition=layers, object_layout=own.object_layout + place)
    await put(store, other)
    await opened(open_cache, store, pp_size=2)
    assert len(events(logs, WARNING)) == is_warned
    logs.clear()
    await opened(open_cache, store, pp_size=2, fingerprint="mine")
    assert len(events(logs, WARNING)) == 1


GRIDS = {
    "copies of heads": ({"tp_size": 4, "total_kv_heads": 8}, "_model_0_2", "tp 0 of 2"),
    "copies of pages": ({"cp_size": 2}, "_model_0_1", "cp 0 of 1"),
    "the same layers": ({"pp_size": 2}, "_model_0_1_4_0", "pp 0 of 4"),
}


@pytest.mark.parametrize("make", STORES)
@pytest.mark.parametrize("grid", GRIDS)
async def test_pages_of_another_grid_are_said_to_be(
    open_cache: Opener, logs: Logs, make: Callable[[], MemoryStore], grid: str
) -> None:
    """Where the namespace is ours and every page another grid's, both grids are named, until one page is ours."""
    options, tail, words = GRIDS[grid]
    store = make()
    rig = await filled(open_cache, store, "", **options)
    names = rig.ctx.keys
    await store.write([f"{0:064x}_{names.namespace.digest}{tail}"], [memoryview(b"page")])
    assert not events(logs, WARNING)
    await opened(open_cache, store, **options)
    (line,) = events(logs, WARNING)
    (told,) = line["different"]
    assert words in told.partition(";")[0] and "this rank is tp 0 of" in told
    assert "same tp_size, pp_size and cp_size" in line["advice"][0]
    logs.clear()
    await store.write([f"{0:064x}{names.suffix}"], [memoryview(b"page")])
    await opened(open_cache, store, **options)
    assert not events(logs, WARNING)


@pytest.mark.parametrize("make", STORES)
async def test_pages_of_our_own_fleet_are_silent(
    open_cache: Opener, logs: Logs, make: Callable[[], MemoryStore]
) -> None:
    """The other ranks of this grid may have stored before this one, which is no reason to say anything."""
    store = make()
    await filled(open_cache, store, tp_rank=1, tp_size=2)
    await opened(open_cache, store, tp_rank=0, tp_size=2)
    assert len(await store.list_keys()) == 4
    assert not events(logs, WARNING)


async def test_keys_are_listed_once(open_cache: Opener) -> None:
    """However much there is to find out, no open asks for all names twice; a rank that is alone asks for none."""
    for options, count in (({}, 0), ({"tp_size": 2}, 1)):
        store: Counted = Knowing()
        await filled(open_cache, store, **options)
        assert store.calls["list_keys"] == 0
        await opened(open_cache, store, **options)
        assert store.calls["list_keys"] == count
    store = Counted()
    await filled(open_cache, store, fingerprint="v2")
    store.calls.clear()
    await opened(open_cache, store)
    assert store.calls["list_keys"] == 1


async def test_looking_is_cheap(open_cache: Opener, logs: Logs) -> None:
    """Keys are listed only where it matters, and no more manifests are read than a bound."""
    rig = await opened(open_cache, None)
    store = Knowing()
    await rig.cache.admin.attach_store(store)
    await turns()
    assert store.calls == {"list_namespaces": 1, "write": 1}
    await rig.cache.admin.detach_store()
    await put(store, *others(rig, 100, model_id="other"))
    store.calls.clear()
    await rig.cache.admin.attach_store(store)
    await turns()
    assert store.calls == {"list_namespaces": 1, "read": 1, "write": 1}
    assert store.num_manifests_read == MAX_MANIFESTS
    assert not events(logs, WARNING)


async def test_manifests_that_cannot_be_read_are_passed_over(open_cache: Opener, logs: Logs) -> None:
    """A missing, damaged or edited manifest hides no other, and is nobody's fault."""
    rig = await opened(open_cache, None)
    store = Knowing()
    found = sorted(others(rig, 4), key=lambda namespace: namespace.digest)
    await put(store, *found)
    missing, edited, empty, _ = (manifest_key(namespace.digest) for namespace in found)
    await store.delete([missing, edited, empty])
    await store.write([edited, empty], [memoryview(encode(found[0])), memoryview(bytes(4096))])
    await rig.cache.admin.attach_store(store)
    await turns()
    (line,) = events(logs, WARNING)
    assert line["others"] == [found[3].digest]
    assert rig.counters.get("namespace_faults", 0) == 0


# Faults


async def broken() -> None:
    raise OSError("the disk is gone")


async def hanging() -> None:
    await asyncio.get_running_loop().create_future()


async def cancelled_within() -> None:
    raise asyncio.CancelledError


VERBS = ["list_namespaces", "read", "list_keys", "write"]


@pytest.mark.parametrize("fault", [broken, cancelled_within])
@pytest.mark.parametrize("verb", VERBS)
async def test_a_fault_is_counted_and_nobodys(
    open_cache: Opener, logs: Logs, verb: str, fault: Callable[[], Any]
) -> None:
    """Whichever call fails, requests are served and stored as ever; it is counted, and logged once."""
    store = Knowing()
    await filled(open_cache, store, fingerprint="v2")
    store.faults[verb] = fault
    logs.clear()
    rig = await opened(open_cache, store)
    assert (await rig.serve("abc")).books.computed == 13
    await rig.cache.admin.flush()
    assert rig.counters["namespace_faults"] == 1
    assert rig.cache.state is State.OPEN
    assert len([line for line in events(logs, "store.fault") if line["call"] == "namespaces"]) == 1
    has_own = await store.count_prefix([manifest_key(rig.ctx.keys.namespace.digest)])
    assert has_own == (verb != "write")


async def test_two_faults_are_logged_once(open_cache: Opener, logs: Logs) -> None:
    """A store that fails at every call fills no log."""
    store = Knowing()
    store.faults = dict.fromkeys(VERBS, broken)
    rig = await opened(open_cache, store)
    assert rig.counters["namespace_faults"] == 2
    assert len(events(logs, "store.fault")) == 1


@pytest.mark.parametrize("verb", VERBS)
async def test_a_store_that_hangs_keeps_nobody(open_cache: Opener, logs: Logs, verb: str) -> None:
    """While a call hangs requests are served and the cache closes without the time moving at all."""
    store = Knowing()
    await filled(open_cache, store, fingerprint="v2")
    store.faults[verb] = hanging
    rig = await opened(open_cache, store)
    assert store.calls[verb] >= 1
    await rig.serve("abc")
    await rig.cache.admin.flush()
    await rig.cache.admin.detach_store()
    await rig.cache.admin.attach_store(store)
    await turns()
    start_s = rig.clock.monotonic()
    await rig.cache.close()
    assert rig.clock.monotonic() == start_s
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("hicache:namespaces")]


@pytest.mark.parametrize("verb", ["list_namespaces", "write"])
async def test_a_call_that_hangs_is_given_up(open_cache: Opener, logs: Logs, verb: str) -> None:
    """After store_timeout_s a call is a fault; the manifest is written although the look came to nothing."""
    store = Knowing()
    store.faults[verb] = hanging
    rig = await opened(open_cache, store)
    await turns()
    rig.clock.advance(rig.ctx.config.store_timeout_s)
    await turns()
    assert rig.counters["namespace_faults"] == 1
    assert "store_timeout_s" in events(logs, "store.fault")[0]["fault"]
    assert store.calls["write"] == 1
    assert await store.count_prefix([manifest_key(rig.ctx.keys.namespace.digest)]) == (verb != "write")


async def test_a_store_that_refuses_is_not_asked(open_cache: Opener) -> None:
    """Where a store says that it is no use asking nothing is asked or written."""

    class Refusing(Knowing):
        def refusal(self) -> Stop | None:
            return Stop.BREAKER_OPEN

        def why_refused(self) -> str:
            return "it rests"

    store = Refusing()
    await opened(open_cache, store)
    assert not store.calls


async def test_a_store_that_leaves_is_not_written_to(open_cache: Opener) -> None:
    """A detach ends the look, and what was not written yet is not written any more."""
    store = Knowing()
    store.faults["list_namespaces"] = hanging
    rig = await opened(open_cache, store)
    await driven(rig.cache.admin.detach_store(), rig.clock)
    rig.clock.advance(2 * rig.ctx.config.store_timeout_s)
    await turns()
    assert store.calls == {"list_namespaces": 1}
    assert rig.counters.get("namespace_faults", 0) == 0


async def test_fields_that_are_too_long_are_a_fault_and_no_failure(open_cache: Opener) -> None:
    """A model whose name fills a manifest has none; the cache works."""
    store = Knowing()
    rig = await opened(open_cache, store, model_id="m" * 5000)
    assert rig.counters["namespace_faults"] == 1
    assert not store.calls["write"]
    await rig.serve("ab")
    assert rig.cache.state is State.OPEN


# What others make of it


async def test_an_explanation_names_the_exact_fields(open_cache: Opener) -> None:
    """Where the other namespace is written down, its values stand in the hint; else what the names tell."""
    store = MemoryStore()
    other = await filled(open_cache, store, "abc", fingerprint="v2")
    rig = await opened(open_cache, store)
    explanation = await rig.cache.admin.explain(tokens("abc"))
    assert explanation.other_fields == manifest_of(other.ctx.keys.namespace).fields
    (hint,) = [hint for hint in explanation.hints if "another name" in hint]
    assert 'fingerprint is "" here and "v2" there' in hint and 'set fingerprint = "v2"' in hint
    await store.delete([manifest_key(other.ctx.keys.namespace.digest)])
    explanation = await rig.cache.admin.explain(tokens("abc"))
    assert explanation.other_fields is None
    (hint,) = [hint for hint in explanation.hints if "another name" in hint]
    assert "another fingerprint, dtype" in hint


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ("{other}_L0-2_H1_T0-4", "another key_scheme"),
        ("{own}_model_1_2", "rank grid"),
        ("{own}_L0-2_H1", "another part of the same page"),
        ("{other}_model_0_1", "another fingerprint"),
        ("{other}_model_1_2", "rank grid"),
        ("{other}_else_0_1", "another model_id"),
    ],
)
async def test_names_without_a_manifest_are_guessed_from(open_cache: Opener, tail: str, words: str) -> None:
    """Whatever a name ends in, the hint says what may differ."""
    store = MemoryStore()
    rig = await opened(open_cache, store)
    suffix = "_" + tail.format(own=rig.ctx.keys.namespace.digest, other="ukv1-0123456789abcdef")
    await store.write([page_hashes("a")[0].hex() + suffix], [memoryview(b"page")])
    explanation = await rig.cache.admin.explain(tokens("ab"))
    assert explanation.other_namespace == suffix
    assert any("another name" in hint and words in hint for hint in explanation.hints), explanation.hints


async def test_a_clear_leaves_others_and_all_manifests(open_cache: Opener) -> None:
    """Objects of another namespace, what is nobody's, and what is written down of both stay."""
    store = MemoryStore()
    other = await filled(open_cache, store, "abc", fingerprint="v2")
    foreign = ["README", f"{0:064x}", "manifest_of_mine"]
    await store.write(foreign, [memoryview(b"mine")] * 3)
    before = set(await store.list_keys())
    rig = await opened(open_cache, store)
    await rig.serve("abc")
    await rig.cache.admin.flush()
    digest = rig.ctx.keys.namespace.digest
    assert sum(namespace_of(key) == digest for key in await store.list_keys()) == 4
    await rig.cache.admin.clear(Tier.STORE)
    assert set(await store.list_keys()) == before | {manifest_key(digest)}
    assert await other.check_stored("abc", store) == 3


async def test_a_clear_leaves_foreign_files(open_cache: Opener, tmp_path: Any) -> None:
    """In a directory of a file store whatever is not an object of this namespace stays as it is."""
    store = FileStore(tmp_path)
    rig = await open_cache(store=store)
    await rig.serve("abc", prefetch=False)
    await rig.cache.admin.flush()
    foreign = [tmp_path / "README", tmp_path / "v2" / "notes.kv", tmp_path / "v2" / "objects" / "x.kv"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    num_pages = sum(not is_manifest_key(key) for key in await store.list_keys())
    assert num_pages == 3
    await rig.cache.admin.clear(Tier.STORE)
    assert [path.read_text() for path in foreign] == ["mine"] * 3
    assert all(is_manifest_key(key) for key in await store.list_keys())
    await rig.cache.close()
    await store.aclose()
