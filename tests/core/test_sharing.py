"""Sharing: every field that differs is named with both values and something that can be done."""

from __future__ import annotations

import msgspec
import pytest

from hicache_async import CacheConfig
from hicache_async.cli._config import TensorShape
from hicache_async.core.keys import Namespace, key_names
from hicache_async.core.manifest import Manifest, manifest_of
from hicache_async.core.sharing import differences, nearest, shown


def manifest(kv: dict[str, object] | None = None, *, codec: str = "raw", **options: object) -> Manifest:
    """Return the manifest of a cache."""
    config = CacheConfig.from_mapping({"model_id": "llama", **options})
    shape = {
        "num_layers": 4,
        "page_size": config.page_size,
        "dtype": "bfloat16",
        "kv_heads": 8,
        "head_dims": (128, 128),
        "is_mla": False,
    } | (kv or {})
    return manifest_of(key_names(config, TensorShape(**shape), codec=codec).namespace)  # type: ignore[arg-type]


UNIFIED = {"key_scheme": "unified", "host_layout": "head_grouped", "io_mode": "kernel"}

CASES = {
    "model_id": ({}, {}, {"model_id": "qwen"}, {}, 'model_id = "qwen"'),
    "fingerprint": ({}, {}, {"fingerprint": "v2"}, {}, 'fingerprint = "v2"'),
    "dtype": ({}, {}, {}, {"dtype": "float16"}, "cannot be shared"),
    "page_size": ({}, {}, {"page_size": 16}, {}, "page_size = 16"),
    "head_dims": ({}, {}, {}, {"head_dims": (128, 64)}, "cannot be shared"),
    "rank_replicated": ({}, {}, {}, {"is_mla": True, "kv_heads": 1, "head_dims": (576,)}, "cannot be shared"),
    "total_kv_heads": ({}, {}, {}, {"kv_heads": 4}, "tp_size"),
    "head_group": (UNIFIED, {}, {**UNIFIED, "head_group": 2}, {}, "head_group = 2, or tp_lcm_size = 4"),
    "layer_partition": (UNIFIED, {}, {**UNIFIED, "layer_partition": 2}, {}, "layer_partition = 2"),
    "token_group": (UNIFIED, {}, {**UNIFIED, "token_group": 16}, {}, "token_group = 16"),
    "total_layers": (
        UNIFIED,
        {},
        {**UNIFIED, "total_layers": 8, "layer_partition": 4, "pp_size": 2},
        {},
        "= 8",
    ),
    "key_scheme": ({}, {}, UNIFIED, {}, 'key_scheme = "unified", head_group = 8, layer_partition = 4'),
    "host_layout": (
        {},
        {},
        {"host_layout": "page_first_direct", "io_mode": "direct"},
        {},
        'host_layout = "page_first_direct" and io_mode = "direct"',
    ),
    "kv_page_size": ({}, {}, {"cp_size": 2}, {"page_size": 32}, "cp_size"),
}


@pytest.mark.parametrize("field", CASES)
def test_each_field_is_named_with_what_to_set(field: str) -> None:
    """A cache that differs in one option differs in that field, with both values and advice for it."""
    ours_options, ours_kv, theirs_options, theirs_kv, words = CASES[field]
    ours, theirs = manifest(ours_kv, **ours_options), manifest(theirs_kv, **theirs_options)
    found = {difference.field: difference for difference in differences(ours, theirs)}
    assert field in found
    assert words in found[field].advice
    assert shown(found[field].ours) in str(found[field]) and shown(found[field].theirs) in str(found[field])


def test_codecs_are_named_by_the_url() -> None:
    """A store with a codec is to be opened by its prefix, and one without it without."""
    (there,) = differences(manifest(), manifest(codec="zstd"))
    assert (there.field, there.ours, there.theirs) == ("codec", "raw", "zstd")
    assert "zstd+" in there.advice
    (back,) = differences(manifest(codec="zstd"), manifest())
    assert "without a codec" in back.advice


def test_every_field_of_a_namespace_has_advice() -> None:
    """No field of this version is taken for one of another version."""
    theirs = Manifest("ukv1-0", dict.fromkeys(Namespace.__struct_fields__, "other"))
    for difference in differences(manifest(), theirs):
        assert "another version" not in difference.advice or difference.field == "object_layout"


def test_a_field_of_a_later_version_cannot_be_shared() -> None:
    """What only the other side knows is named, and no setting is promised to help."""
    ours = manifest()
    theirs = Manifest("ukv2-0", {**ours.fields, "attention": "gqa"})
    (difference,) = differences(ours, theirs)
    assert str(difference) == 'attention is not there here and "gqa" there'
    assert not difference.can_be_shared and "same version" in difference.advice


def test_the_same_namespace_differs_in_nothing() -> None:
    """Equal namespaces have no difference, and true is not taken for 1."""
    ours = manifest()
    assert differences(ours, manifest()) == ()
    fields = {**ours.fields, "schema_version": True}
    assert [each.field for each in differences(ours, Manifest("ukv1-0", fields))] == ["schema_version"]


def test_the_nearest_is_what_can_be_shared() -> None:
    """Before what differs in bytes comes what a setting makes equal, however many; then the fewest fields."""
    ours = manifest()
    one_dtype = manifest({"dtype": "float16"})
    two_settings = manifest(page_size=16, fingerprint="v2")
    one_setting = manifest(page_size=32)
    found = nearest(ours, [one_dtype, two_settings, one_setting])
    assert [other for other, _ in found] == [one_setting, two_settings, one_dtype]
    assert [len(different) for _, different in found] == [1, 2, 1]


def test_advice_leads_to_sharing() -> None:
    """Setting what the advice for two unified shapes says makes one namespace of both."""
    theirs = manifest({"kv_heads": 2}, **UNIFIED, tp_size=4, page_size=32)
    ours = manifest({"kv_heads": 4}, **UNIFIED, tp_size=2)
    settings = {each.field: each.theirs for each in differences(ours, theirs)}
    assert settings == {"page_size": 32, "head_group": 2, "token_group": 32}
    assert manifest({"kv_heads": 4}, **UNIFIED, tp_size=2, **settings) == theirs


def test_values_are_shown_as_they_are_written() -> None:
    """Texts are quoted, truth is written as TOML does, and what is not there is said to be so."""
    assert [shown(value) for value in ("a", True, 3, None, [1, 2])] == [
        '"a"',
        "true",
        "3",
        "not there",
        "[1, 2]",
    ]
    assert msgspec.json.encode(manifest().fields)
