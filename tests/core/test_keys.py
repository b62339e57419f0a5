"""Names of stored objects: equal exactly when the bytes behind them may be exchanged."""

from __future__ import annotations

from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_async.config import CacheConfig, HostLayout
from hicache_async.core.keys import (
    SCHEMA_VERSION,
    KeyNames,
    Namespace,
    escape_model_id,
    key_names,
    namespace_of,
)
from hicache_async.errors import NamespaceError
from tests.core.shapes import Shape
from tests.core.world import QUICK

NAMESPACE = Namespace(
    model_id="org/model",
    fingerprint="rev-1",
    dtype="bfloat16",
    page_size=64,
    rank_replicated=False,
    total_kv_heads=8,
    head_group=8,
    layer_partition=32,
    object_layout="layer_kv_token:128+128",
    codec="raw",
)
GOLDEN_DIGEST = "ukv1-f437042cc05ccd3e"

OTHER_VALUES = {
    "schema_version": SCHEMA_VERSION + 1,
    "model_id": "org-model",
    "fingerprint": "rev-2",
    "dtype": "float8_e4m3fn",
    "page_size": 32,
    "rank_replicated": True,
    "total_kv_heads": 4,
    "head_group": 2,
    "layer_partition": 16,
    "object_layout": "kv_layer_token:128+128",
    "codec": "zstd",
}

HASHES = [bytes(32), bytes(range(32))]
HEADS = Shape(num_layers=32, page_size=64, kv_heads=8, head_dims=(128, 128))
MLA = Shape(num_layers=32, page_size=64, kv_heads=1, head_dims=(576,), is_mla=True)


def names(shape: Shape = HEADS, **options: object) -> KeyNames:
    """Return the names of one rank."""
    given = {"model_id": "org/model", "fingerprint": "rev-1", **options}
    return key_names(CacheConfig.from_mapping(given), shape)


def parts_of(keys: KeyNames) -> tuple[str, str]:
    """Return the digest in the names of one rank, and what follows it."""
    (key,) = keys.keys(HASHES[:1])
    assert key.startswith("00" * 32 + "_")
    digest, rest = key.removeprefix("00" * 32 + "_").split("_", 1)
    assert digest == keys.namespace.digest == namespace_of(key)
    return digest, rest


def test_golden_digest() -> None:
    """The short name of a namespace never changes: stores of any age are found by it."""
    assert NAMESPACE.digest == GOLDEN_DIGEST


def test_every_field_has_another_value_here() -> None:
    """The table of other values covers the namespace: a field added later has to be added to it."""
    assert set(OTHER_VALUES) == set(Namespace.__struct_fields__)


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_each_field_changes_the_digest(name: str) -> None:
    """Bytes that differ in any one respect are never found under each other's names."""
    other = msgspec.structs.replace(NAMESPACE, **{name: OTHER_VALUES[name]})
    assert getattr(other, name) != getattr(NAMESPACE, name)
    assert other.digest != NAMESPACE.digest
    assert other.digest.startswith("ukv1-") and len(other.digest) == len("ukv1-") + 16


def test_fields_do_not_run_together() -> None:
    """A character that moves from one field to its neighbour makes another digest."""
    one = msgspec.structs.replace(NAMESPACE, model_id="ab", fingerprint="c")
    two = msgspec.structs.replace(NAMESPACE, model_id="a", fingerprint="bc")
    assert one.digest != two.digest


def test_the_namespace_of_a_rank() -> None:
    """What a page is, and what part of it a rank stores, is written down field by field."""
    assert names().namespace == NAMESPACE
    assert names(tp_size=4).namespace == msgspec.structs.replace(NAMESPACE, total_kv_heads=32)
    latent = names(MLA, tp_size=4).namespace
    assert (latent.rank_replicated, latent.total_kv_heads, latent.head_group) == (True, 0, 0)
    assert latent.object_layout == "layer_kv_token:576"


def test_hash_stands_first_and_order_is_kept() -> None:
    """A name is the page's hash in hex and one suffix for all pages of the rank."""
    keys = names()
    assert keys.keys(HASHES) == [page_hash.hex() + keys.suffix for page_hash in HASHES]
    assert keys.keys([]) == []
    assert (keys.num_chunks, keys.spans(4096)) == (1, [slice(0, 4096)])


@pytest.mark.parametrize(
    ("grid", "tail"),
    [
        ({}, "0_1"),
        ({"tp_size": 4, "tp_rank": 3}, "3_4"),
        ({"pp_size": 2, "pp_rank": 1, "first_layer": 4}, "0_1_2_1"),
        ({"cp_size": 2, "cp_rank": 1}, "0_1_cp1_2"),
        (
            {
                "tp_size": 2,
                "tp_rank": 1,
                "pp_size": 4,
                "pp_rank": 3,
                "first_layer": 12,
                "cp_size": 8,
                "cp_rank": 5,
            },
            "1_2_4_3_cp5_8",
        ),
    ],
)
def test_name_forms(grid: dict[str, int], tail: str) -> None:
    """The suffix is digest, model, tp rank and size, then pp size and rank, then cp rank and size."""
    assert parts_of(names(**grid))[1] == f"org%2fmodel_{tail}"


@pytest.mark.parametrize(
    ("grid", "tail"),
    [
        ({}, ""),
        ({"tp_size": 4, "tp_rank": 3}, ""),
        ({"tp_size": 4, "tp_rank": 3, "pp_size": 2, "pp_rank": 1, "first_layer": 4}, "_2_1"),
        ({"tp_size": 4, "tp_rank": 3, "cp_size": 2, "cp_rank": 0}, "_cp0_2"),
    ],
)
def test_replicated_pages_have_one_name_on_all_tp_ranks(grid: dict[str, int], tail: str) -> None:
    """With replicated KV the tensor-parallel rank and size are not in the name."""
    alone = names(MLA, **grid | {"tp_size": 1, "tp_rank": 0})
    assert parts_of(names(MLA, **grid)) == (alone.namespace.digest, f"org%2fmodel{tail}")


@pytest.mark.parametrize("shape", [HEADS, MLA], ids=["heads", "mla"])
@pytest.mark.parametrize("tokens", [64, 32], ids=["copies", "slices"])
def test_ranks_share_a_name_exactly_when_they_hold_the_same_bytes(shape: Shape, tokens: int) -> None:
    """Over a grid of 2 x 2 x 2 ranks: own names for own bytes; of ranks with one name exactly one writes."""
    writers: dict[str, int] = {}
    places: dict[str, set[tuple[int, int]]] = {}
    for tp, pp, cp in ((tp, pp, cp) for tp in range(2) for pp in range(2) for cp in range(2)):
        grid = {
            "tp_size": 2,
            "pp_size": 2,
            "cp_size": 2,
            "tp_rank": tp,
            "pp_rank": pp,
            "cp_rank": cp,
            "first_layer": 4 * pp,
        }
        keys = names(shape.with_(page_size=tokens), **grid)
        writers[keys.suffix] = writers.get(keys.suffix, 0) + keys.writes
        places.setdefault(keys.suffix, set()).add((pp, cp))
    assert len(places) == (4 if shape.is_mla else 8)
    assert all(len(shards) == 1 for shards in places.values())
    assert set(writers.values()) == {1}


def test_uneven_pipelines_share_no_name() -> None:
    """Stage 1 of (1, 3, 4) layers and of (2, 3, 3) holds other layers, so its pages have other names."""
    grid = {"pp_size": 3, "pp_rank": 1}
    one, other = (names(Shape(3), page_size=8, **grid, first_layer=first) for first in (1, 2))
    assert one.namespace != other.namespace


def test_a_stage_says_where_it_begins() -> None:
    """From its tensors nobody can tell which layers they hold."""
    with pytest.raises(NamespaceError, match="first_layer is not set, and this is stage 1 of pp_size 3"):
        names(Shape(3), page_size=8, pp_size=3, pp_rank=1)


def test_slices_of_a_page_are_no_copies_of_it() -> None:
    """A cp rank that holds a slice of each page, and one that holds all of it, have no name in common."""
    grid = {"cp_size": 2, "cp_rank": 1}
    whole, part = names(**grid), names(HEADS.with_(page_size=32), **grid)
    assert part.namespace.object_layout == "layer_kv_token:128+128;tokens=32"
    assert parts_of(whole)[1] == parts_of(part)[1]
    assert whole.namespace.digest != part.namespace.digest


LAYOUTS = {
    "layer_first": ({"host_layout": "layer_first"}, "layer_kv_token"),
    "page_first": ({}, "layer_kv_token"),
    "page_first_direct": ({"host_layout": "page_first_direct", "io_mode": "direct"}, "kv_layer_token"),
    "head_grouped": ({"host_layout": "head_grouped"}, "layer_kv_token"),
    "head_grouped by 2": ({"host_layout": "head_grouped", "head_group": 2}, "group_layer_kv_token"),
}


def test_layouts_share_exactly_when_they_store_the_same_bytes() -> None:
    """Four host layouts, three orders: equal bytes have equal names, and an order of its own has its own."""
    assert {row[0].get("host_layout", "page_first") for row in LAYOUTS.values()} == set(HostLayout)
    digests: dict[str, set[str]] = {}
    for options, order in LAYOUTS.values():
        namespace = names(**options).namespace
        assert namespace.object_layout == f"{order}:128+128"
        digests.setdefault(order, set()).add(namespace.digest)
        assert names(MLA, **{**options, "head_group": None}).namespace.digest == names(MLA).namespace.digest
    assert [len(found) for found in digests.values()] == [1, 1, 1]
    assert len(set.union(*digests.values())) == 3
    by_two, by_four = (names(host_layout="head_grouped", head_group=size).namespace for size in (2, 4))
    assert (by_two.head_group, by_four.head_group) == (2, 4)
    assert by_two.digest != by_four.digest


def test_copied_heads_are_counted_once() -> None:
    """Where ranks hold copies of fewer heads each still has a name of its own, and the model's heads are known."""
    one = HEADS.with_(kv_heads=1)
    stated = [names(one, tp_size=8, tp_rank=rank, total_kv_heads=4) for rank in range(8)]
    assert {keys.namespace.total_kv_heads for keys in stated} == {4}
    assert len({keys.suffix for keys in stated}) == 8
    assert all(keys.writes for keys in stated)
    assert names(one, tp_size=8).namespace.total_kv_heads == 8, "unstated each is another head"


def test_another_codec_is_another_namespace() -> None:
    """Names for a store of another codec differ in the digest alone, and back again they are the same."""
    keys = names()
    packed = keys.with_codec("zstd")
    assert packed.namespace == msgspec.structs.replace(keys.namespace, codec="zstd")
    assert parts_of(packed)[1] == parts_of(keys)[1]
    assert packed.namespace.digest != keys.namespace.digest
    assert packed.with_codec("raw").suffixes == keys.suffixes
    assert keys.with_codec("raw") is keys


MODEL_ID = st.text(
    st.sampled_from("ab/-_.%2fF5 é\x00") | st.characters(exclude_categories=["Cs"]), max_size=8
)


@given(MODEL_ID)
@QUICK
def test_escaping_can_be_undone(model_id: str) -> None:
    """The escaped name gives back the model id, so no two ids share one; it is safe in a file's name."""
    escaped = escape_model_id(model_id)
    assert unquote(escaped, errors="strict") == model_id
    assert escaped.isascii() and not set(escaped) & set('/_ \x00\\:*?"<>|')


@given(MODEL_ID, MODEL_ID)
@QUICK
def test_escaping_is_injective(one: str, two: str) -> None:
    """Two model ids share an escaped name only if they are equal."""
    assert (escape_model_id(one) == escape_model_id(two)) == (one == two)


def test_slash_and_dash_stay_apart() -> None:
    """a/b, a-b, a_b and a%2fb are four models."""
    assert len({escape_model_id(model_id) for model_id in ("a/b", "a-b", "a_b", "a%2fb")}) == 4
