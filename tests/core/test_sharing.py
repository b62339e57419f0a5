"""Sharing: every field that differs is named with both values and something that can be done."""

from __future__ import annotations

import msgspec
import pytest

from hicache_async import CacheConfig
from hicache_async.cli._config import TensorShape
from hicache_async.core.keys import Namespace, key_names
from hicache_async.core.manifest import Manifest, manifest_of
from hicache_async.core.sharing import RankGrid, differences, is_other_stage, nearest, rank_grid, shown


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
    "head_group": (
        UNIFIED,
        {},
        {**UNIFIED, "head_group": 2},
        {},
        "head_group = 2, or tp_lcm_size = 4, and leave the other",
    ),
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
        assert "another version" not in difference.advice or difference.field == "key_scheme"


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


# Advice that can be followed


def advice(ours: Manifest, theirs: Manifest) -> dict[str, str]:
    """Return the advice by field."""
    return {each.field: each.advice for each in differences(ours, theirs)}


DIRECT = {"host_layout": "page_first_direct", "io_mode": "direct"}
GROUPED = {"host_layout": "head_grouped", "head_group": 2}
MLA = {"is_mla": True, "kv_heads": 1, "head_dims": (576,)}


def test_a_host_layout_is_advised_with_what_goes_with_it() -> None:
    """The io mode and the head group that the other layout takes are told, and so is what it does not take."""
    assert advice(manifest(**DIRECT), manifest()) == {
        "host_layout": 'set host_layout = "page_first" and io_mode = "kernel"'
    }
    found = advice(manifest(), manifest(**GROUPED))
    assert (
        found["host_layout"] == 'set host_layout = "head_grouped" and io_mode = "kernel" and head_group = 2'
    )
    assert "tp_size =" not in found["head_group"], "its group says nothing of its ranks"
    assert "leave head_group" in advice(manifest(**GROUPED), manifest())["host_layout"]


def test_mla_is_never_told_to_set_heads() -> None:
    """Options about heads are refused with MLA, so they are to be left unset, under whichever name."""
    (found,) = advice(manifest(MLA), manifest(MLA, key_scheme="unified")).values()
    assert found.startswith('set key_scheme = "unified", layer_partition = 4')
    assert "head_group =" not in found and "leave head_group, tp_lcm_size and total_kv_heads unset" in found
    assert set(advice(manifest(), manifest(MLA))) == {"rank_replicated", "head_dims"}


@pytest.mark.parametrize(
    ("theirs", "unset"),
    [
        ({}, ["head_group", "tp_lcm_size", "layer_partition", "total_layers", "token_group"]),
        (GROUPED, ["layer_partition", "total_layers", "token_group"]),
    ],
)
def test_options_of_the_unified_scheme_are_to_be_unset(theirs: dict[str, object], unset: list[str]) -> None:
    """Going back to rank_suffix takes out what only the other scheme knows, and following that is enough."""
    ours = {**UNIFIED, "head_group": 1, "layer_partition": 2, "token_group": 32, "total_layers": 4}
    (found,) = advice(manifest(**ours), manifest(**theirs)).values()
    assert all(name in found.partition("leave")[2] for name in unset)
    kept = {name: value for name, value in ours.items() if name not in unset}
    settings = {"host_layout": "page_first", **theirs, "key_scheme": "rank_suffix"}
    assert all(f"{name} = {shown(value)}" in found for name, value in settings.items())
    assert manifest(**{**kept, **settings}) == manifest(**theirs)


def test_slices_are_said_to_be_on_the_side_that_has_them() -> None:
    """Whose pages are slices of a cp rank, ours or theirs, is told apart."""
    whole, slices = manifest(), manifest({"page_size": 32}, cp_size=2)
    assert advice(whole, slices)["kv_page_size"].startswith("its pages are slices of 32 tokens")
    assert advice(slices, whole)["kv_page_size"].startswith("this rank's pages are slices of 32 tokens")


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ("raw", "zstd", "behind zstd+"),
        ("raw", "fp8_e4m3-bfloat16-128", "behind fp8+"),
        ("raw", "aesgcm-0123abcd", "aesgcm+ (with the same key)"),
        ("aesgcm-0123abcd", "aesgcm-89abcdef", "aesgcm+ (with the same key), in place of"),
        ("raw", "fp8_e4m3-bfloat16-128+zstd", "dtype and options), then zstd+"),
        ("fp8_e4m3-bfloat16-128", "raw", "take fp8+ out"),
        ("raw", "zstd|raw", "by the same URL"),
        ("raw", "packed", "by the same URL"),
    ],
)
def test_a_codec_is_named_by_its_own_prefix(ours: str, theirs: str, words: str) -> None:
    """The prefix is that of the codec that made the objects, and of none where there is no telling."""
    found = advice(manifest(codec=ours), manifest(codec=theirs))["codec"]
    assert words in found
    assert ("zstd+" in found) == (theirs.split("+")[-1] == "zstd")


def test_copied_heads_are_promised_nothing_under_rank_suffix() -> None:
    """Where ranks hold copies of heads only the unified scheme shares between tp sizes, and that is said."""
    four, eight = ({"tp_size": size, "total_kv_heads": size} for size in (4, 8))
    found = advice(manifest({"kv_heads": 1}, **eight), manifest({"kv_heads": 1}, **four))["total_kv_heads"]
    assert "total_kv_heads = 4" not in found and 'key_scheme = "unified"' in found


# Stages and ranks


def stage(first: int, num_layers: int, **options: object) -> Manifest:
    """Return the manifest of a stage that holds these layers."""
    rank = {"pp_size": 9, "pp_rank": 1, "first_layer": first} if first else {}
    return manifest({"num_layers": num_layers}, **rank, **options)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_other"),
    [
        ((0, 4), (4, 4), True),
        ((4, 4), (0, 4), True),
        ((0, 3), (3, 5), True),
        ((0, 2), (0, 4), False),
        ((4, 2), (4, 4), False),
        ((2, 2), (0, 8), False),
        ((3, 3), (5, 3), False),
        ((0, 4), (0, 4), False),
    ],
)
def test_a_stage_is_another_where_no_layer_is_in_both(
    ours: tuple[int, int], theirs: tuple[int, int], is_other: bool
) -> None:
    """Stages of one pipeline hold different layers; what overlaps is of a pipeline that was cut otherwise."""
    assert is_other_stage(stage(*ours), stage(*theirs)) is is_other
    assert not is_other_stage(stage(*ours), stage(*theirs, fingerprint="v2"))


def test_unified_chunks_are_of_no_stage() -> None:
    """Chunks of other numbers of layers are shared by nobody, however the stages lie."""
    ours = manifest(**UNIFIED, total_layers=8, layer_partition=4, pp_size=2)
    theirs = manifest(**UNIFIED, total_layers=8, layer_partition=2, pp_size=2)
    assert not is_other_stage(ours, theirs)


def test_where_the_layers_begin_has_advice() -> None:
    """A stage that begins elsewhere is told to be one, with 0 where nothing is written down."""
    (there,) = differences(stage(0, 4), stage(4, 4))
    assert (there.field, there.ours, there.theirs) == ("first_layer", 0, 4)
    assert "first_layer = 4" in there.advice and there.can_be_shared


@pytest.mark.parametrize(
    ("options", "is_mla", "grid"),
    [
        ({"tp_rank": 1, "tp_size": 4}, False, RankGrid(1, 4, 0, 1, 0, 1)),
        ({"pp_rank": 1, "pp_size": 2, "first_layer": 4}, False, RankGrid(0, 1, 1, 2, 0, 1)),
        ({"cp_rank": 1, "cp_size": 2}, False, RankGrid(0, 1, 0, 1, 1, 2)),
        ({"pp_rank": 1, "pp_size": 2, "first_layer": 4, "tp_size": 2}, True, RankGrid(0, 1, 1, 2, 0, 1)),
    ],
)
def test_a_name_tells_its_rank(options: dict[str, object], is_mla: bool, grid: RankGrid) -> None:
    """Names as they are made are read back as the grid they were made for."""
    config = CacheConfig.from_mapping({"model_id": "a_b/cp1", **options})
    heads, dims = (1, (576,)) if is_mla else (8, (128, 128))
    shape = TensorShape(4, 64, "bfloat16", heads, dims, is_mla)
    assert rank_grid(key_names(config, shape).suffix, is_mla=is_mla) == grid
    assert rank_grid("_else", is_mla=is_mla) is None
