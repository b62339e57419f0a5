"""Names of stored objects: equal exactly when the bytes behind them may be exchanged."""

from __future__ import annotations

from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_async.config import CacheConfig
from hicache_async.core.keys import SCHEMA_VERSION, Namespace, RankSuffixKeys, escape_model_id
from tests.core.world import QUICK

NAMESPACE = Namespace(
    model_id="org/model",
    fingerprint="rev-1",
    dtype="bfloat16",
    page_size=64,
    rank_replicated=False,
    total_kv_heads=8,
    head_group=0,
    layer_partition="0-32/1",
    object_layout="page_first",
    codec="none",
)
GOLDEN_DIGEST = "ukv1-b49a887ab8341159"

OTHER_VALUES = {
    "schema_version": SCHEMA_VERSION + 1,
    "model_id": "org-model",
    "fingerprint": "rev-2",
    "dtype": "float8_e4m3fn",
    "page_size": 32,
    "rank_replicated": True,
    "total_kv_heads": 4,
    "head_group": 2,
    "layer_partition": "0-16/2",
    "object_layout": "layer_first",
    "codec": "zstd",
}

HASHES = [bytes(32), bytes(range(32))]
MLA = msgspec.structs.replace(NAMESPACE, rank_replicated=True)


def suffix_of(namespace: Namespace = NAMESPACE, **grid: int) -> str:
    """Return what follows the hash in the names of one rank."""
    key = RankSuffixKeys(namespace, CacheConfig(**grid)).keys(HASHES[:1])[0]
    assert key.startswith("00" * 32 + "_")
    return key.removeprefix("00" * 32 + "_")


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


def test_hash_stands_first_and_order_is_kept() -> None:
    """A name is the page's hash in hex and one suffix for all pages of the rank."""
    keys = RankSuffixKeys(NAMESPACE, CacheConfig()).keys(HASHES)
    assert keys == [page_hash.hex() + "_" + suffix_of() for page_hash in HASHES]
    assert RankSuffixKeys(NAMESPACE, CacheConfig()).keys([]) == []


@pytest.mark.parametrize(
    ("grid", "tail"),
    [
        ({}, "0_1"),
        ({"tp_size": 4, "tp_rank": 3}, "3_4"),
        ({"pp_size": 2, "pp_rank": 1}, "0_1_2_1"),
        ({"cp_size": 2, "cp_rank": 1}, "0_1_cp1_2"),
        (
            {"tp_size": 2, "tp_rank": 1, "pp_size": 4, "pp_rank": 3, "cp_size": 8, "cp_rank": 5},
            "1_2_4_3_cp5_8",
        ),
    ],
)
def test_name_forms(grid: dict[str, int], tail: str) -> None:
    """The suffix is digest, model, tp rank and size, then pp size and rank, then cp rank and size."""
    assert suffix_of(**grid) == f"{GOLDEN_DIGEST}_org%2fmodel_{tail}"


@pytest.mark.parametrize(
    ("grid", "tail"),
    [
        ({}, ""),
        ({"tp_size": 4, "tp_rank": 3}, ""),
        ({"tp_size": 4, "tp_rank": 3, "pp_size": 2, "pp_rank": 1}, "_2_1"),
        ({"tp_size": 4, "tp_rank": 3, "cp_size": 2, "cp_rank": 0}, "_cp0_2"),
    ],
)
def test_replicated_pages_have_one_name_on_all_tp_ranks(grid: dict[str, int], tail: str) -> None:
    """With replicated KV the tensor-parallel rank and size are not in the name."""
    assert suffix_of(MLA, **grid) == f"{MLA.digest}_org%2fmodel{tail}"


@pytest.mark.parametrize("replicated", [False, True])
def test_ranks_share_a_name_exactly_when_they_hold_the_same_bytes(replicated: bool) -> None:
    """Over a grid of 2 x 2 x 2 ranks: own names for own bytes; of ranks with one name exactly one writes."""
    writers: dict[str, int] = {}
    names: dict[str, set[tuple[int, int]]] = {}
    for tp, pp, cp in ((tp, pp, cp) for tp in range(2) for pp in range(2) for cp in range(2)):
        config = CacheConfig(tp_size=2, pp_size=2, cp_size=2, tp_rank=tp, pp_rank=pp, cp_rank=cp)
        keys = RankSuffixKeys(MLA if replicated else NAMESPACE, config)
        writers[keys.suffix] = writers.get(keys.suffix, 0) + keys.writes
        names.setdefault(keys.suffix, set()).add((pp, cp))
    assert len(names) == (4 if replicated else 8)
    assert all(len(shards) == 1 for shards in names.values())
    assert set(writers.values()) == {1}


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
