"""CacheConfig: defaults, ranges, words, aliases, and the pairs that are refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from hicache_async.config import (
    IO_MODES,
    CacheConfig,
    HostLayout,
    IoMode,
    KeyScheme,
    PrefetchMode,
    PrefetchOverflow,
    PrefetchPolicy,
    RankLoss,
    WritePolicy,
)
from hicache_async.errors import ConfigError, NamespaceError
from hicache_async.eviction import Candidate, Slru

DEFAULTS: dict[str, object] = {
    "model_id": "model",
    "fingerprint": "",
    "page_size": 64,
    "host_ratio": 2.0,
    "host_bytes": None,
    "host_reserve_bytes": 10 << 30,
    "ranks_on_host": None,
    "allow_small_host": False,
    "host_layout": "page_first",
    "io_mode": "kernel",
    "device_eviction_policy": "lru",
    "host_eviction_policy": "lru",
    "write_policy": "write_through_selective",
    "write_back_low_water": 0.1,
    "pin_capacity_fraction": 0.5,
    "prefetch_policy": "timeout",
    "prefetch_threshold_tokens": 256,
    "prefetch_timeout_base_s": 1.0,
    "prefetch_timeout_per_ki_token_s": 0.25,
    "prefetch_timeout_cap_s": 8.0,
    "prefetch_capacity_fraction": 0.5,
    "prefetch_overflow": "shrink",
    "store_batch_pages": 128,
    "load_threshold_tokens": None,
    "max_prefetches_in_flight": 64,
    "max_loads_in_flight": 3,
    "max_offloads_in_flight": 64,
    "max_backups_pending": 1024,
    "existence_ttl_s": 5.0,
    "close_timeout_s": 10.0,
    "store_timeout_s": 5.0,
    "consensus_timeout_s": 1.0,
    "ticket_timeout_s": 30.0,
    "group_timeout_s": 60.0,
    "on_rank_loss": "no_reuse",
    "key_scheme": "rank_suffix",
    "total_kv_heads": None,
    "head_group": None,
    "tp_lcm_size": None,
    "layer_partition": None,
    "first_layer": None,
    "total_layers": None,
    "token_group": None,
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "cp_rank": 0,
    "cp_size": 1,
}

TINY = 5e-324
"""The smallest number above 0."""

# field: values at the ends of its range, then the bound that its message names, then values beyond it
INTEGERS: dict[str, tuple[list[int], str, list[int]]] = {
    "page_size": ([1, 1 << 20], ">= 1 and <= 1048576", [0, -1, (1 << 20) + 1]),
    "host_bytes": ([1, 1 << 50], "> 0", [0, -1]),
    "host_reserve_bytes": ([0, 1 << 50], ">= 0", [-1]),
    "ranks_on_host": ([1, 1 << 16], ">= 1 and <= 65536", [0, -1, (1 << 16) + 1]),
    "prefetch_threshold_tokens": ([0, 1 << 40], ">= 0", [-1]),
    "store_batch_pages": ([1, 1 << 16], ">= 1 and <= 65536", [0, (1 << 16) + 1]),
    "load_threshold_tokens": ([0, 1 << 40], ">= 0", [-1]),
    "max_prefetches_in_flight": ([1, 1 << 16], ">= 1 and <= 65536", [0, (1 << 16) + 1]),
    "max_loads_in_flight": ([1, 1 << 10], ">= 1 and <= 1024", [0, (1 << 10) + 1]),
    "max_offloads_in_flight": ([1, 1 << 16], ">= 1 and <= 65536", [0, (1 << 16) + 1]),
    "max_backups_pending": ([1, 1 << 24], ">= 1 and <= 16777216", [0, (1 << 24) + 1]),
    "total_kv_heads": ([1, 1 << 20], ">= 1 and <= 1048576", [0, -1, (1 << 20) + 1]),
    "head_group": ([1, 1 << 20], ">= 1 and <= 1048576", [0, -1, (1 << 20) + 1]),
    "tp_lcm_size": ([1, 1 << 20], ">= 1 and <= 1048576", [0, -1, (1 << 20) + 1]),
    "layer_partition": ([1, 1 << 20], ">= 1 and <= 1048576", [0, -1, (1 << 20) + 1]),
    "first_layer": ([0, 1 << 20], ">= 0 and <= 1048576", [-1, (1 << 20) + 1]),
    "total_layers": ([1, 1 << 20], ">= 1 and <= 1048576", [0, -1, (1 << 20) + 1]),
    "token_group": ([1, 1 << 20], ">= 1 and <= 1048576", [0, -1, (1 << 20) + 1]),
    "tp_size": ([1, 1 << 16], ">= 1 and <= 65536", [0, (1 << 16) + 1]),
    "pp_size": ([1, 1 << 16], ">= 1 and <= 65536", [0, (1 << 16) + 1]),
    "cp_size": ([1, 1 << 16], ">= 1 and <= 65536", [0, (1 << 16) + 1]),
}
NUMBERS: dict[str, tuple[list[float], str, list[float]]] = {
    "host_ratio": ([TINY, 1e9], "> 0", [0, -0.5]),
    "prefetch_timeout_base_s": ([0, 1e9], ">= 0", [-TINY]),
    "prefetch_timeout_per_ki_token_s": ([0, 1e9], ">= 0", [-TINY]),
    "prefetch_timeout_cap_s": ([0, 1e9], ">= 0", [-TINY]),
    "prefetch_capacity_fraction": ([TINY, 1], "> 0 and <= 1", [0, 1.0001, -1]),
    "write_back_low_water": ([0, TINY, 1], ">= 0 and <= 1", [-TINY, 1.0001]),
    "pin_capacity_fraction": ([0, TINY, 1], ">= 0 and <= 1", [-TINY, 1.0001]),
    "existence_ttl_s": ([-1, 0, 1e9], ">= 0", [-TINY, -2]),
    "close_timeout_s": ([0, 1e9], ">= 0", [-TINY]),
    "store_timeout_s": ([TINY, 1e9], "> 0", [0, -1]),
    "consensus_timeout_s": ([TINY, 1e9], "> 0", [0, -1]),
    "ticket_timeout_s": ([TINY, 1e9], "> 0", [0, -1]),
    "group_timeout_s": ([TINY, 1e9], "> 0", [0, -1]),
}
WORDS = {
    "host_layout": HostLayout,
    "io_mode": IoMode,
    "write_policy": WritePolicy,
    "prefetch_policy": PrefetchMode,
    "prefetch_overflow": PrefetchOverflow,
    "on_rank_loss": RankLoss,
    "key_scheme": KeyScheme,
}
RANKS = {"tp_rank", "pp_rank", "cp_rank"}
EVICTION_POLICIES = {"device_eviction_policy", "host_eviction_policy"}

PAIRS = {
    ("layer_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("head_grouped", "kernel"),
}


UNIFIED_ONLY = {"head_group", "tp_lcm_size", "layer_partition", "total_layers", "token_group"}
"""What says how objects are cut for ranks of other shapes."""


def config_with(**options: Any) -> CacheConfig:
    """Return a config of these options, under the key scheme that takes them."""
    return CacheConfig(**({"key_scheme": "unified"} if UNIFIED_ONLY & set(options) else {}) | options)


def cases(table: dict[str, tuple[list[Any], str, list[Any]]], column: int) -> list[tuple[Any, ...]]:
    return [(name, value, row[1]) for name, row in table.items() for value in row[column]]


def test_defaults() -> None:
    """Every option has the default that its documentation gives."""
    assert dataclasses.asdict(CacheConfig()) == DEFAULTS


def test_every_option_is_in_a_table_here() -> None:
    """No option escapes these tests: each is a number, a word, a rank, a policy, a string or a switch."""
    tables = {*INTEGERS, *NUMBERS, *WORDS, *RANKS, *EVICTION_POLICIES}
    covered = {*tables, "model_id", "fingerprint", "allow_small_host"}
    assert covered == {field.name for field in dataclasses.fields(CacheConfig)}


@pytest.mark.parametrize(("name", "value", "bound"), cases(INTEGERS, 0) + cases(NUMBERS, 0))
def test_ends_of_the_range_are_taken(name: str, value: float, bound: str) -> None:
    """A value at either end of its range is kept as it is."""
    assert getattr(config_with(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value", "bound"), cases(INTEGERS, 2) + cases(NUMBERS, 2))
def test_beyond_the_range_is_refused(name: str, value: float, bound: str) -> None:
    """A value just beyond its range raises, naming the field, the value and the bound."""
    with pytest.raises(ConfigError) as caught:
        config_with(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}; it must be ")
    assert str(caught.value).endswith(f" {bound}")


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, "1", True, math.nan])
def test_a_count_is_an_integer(name: str, value: object) -> None:
    """Counts refuse floats, strings and booleans, and say that an integer is wanted."""
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}; it must be an integer "):
        config_with(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["1", True, None, math.nan, math.inf, -math.inf])
def test_a_quantity_is_a_finite_number(name: str, value: object) -> None:
    """Times and ratios refuse strings, booleans and what is not finite."""
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}; it must be a finite number "):
        config_with(**{name: value})


@pytest.mark.parametrize("name", WORDS)
def test_words_are_taken_with_either_dash(name: str) -> None:
    """Each word of an option is taken as a member, as a string and with hyphens."""
    for word in WORDS[name]:
        # the partner that makes the pair legal, where there is one
        pair = next(({"host_layout": p[0], "io_mode": p[1]} for p in PAIRS if word in p), {})
        for form in (word, word.value, word.value.replace("_", "-")):
            assert getattr(config_with(**{**pair, name: form}), name) is word


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("value", ["sideways", "", 3, None])
def test_unknown_words_are_refused(name: str, value: object) -> None:
    """Another word raises, naming the field, the value and all that can be chosen."""
    with pytest.raises(ConfigError) as caught:
        config_with(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}; choose one of {', '.join(WORDS[name])}"


class Newest:
    """An eviction policy of one's own."""

    def key(self, candidate: Candidate, /) -> int:
        return -candidate.created


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo", "priority", Slru(3), Newest()])
def test_an_eviction_policy_is_a_name_or_an_object(name: str, policy: object) -> None:
    """Each name is taken, and so is any object that says how to order candidates; it is kept as it is."""
    assert getattr(config_with(**{name: policy}), name) is policy


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
@pytest.mark.parametrize("policy", ["mru", "", "LRU", None, 3, Newest, object()], ids=str)
def test_what_cannot_order_candidates_is_no_eviction_policy(name: str, policy: object) -> None:
    """Another name, a class or an object without ``key`` raises, naming the field, the value and what there is."""
    with pytest.raises(ConfigError) as caught:
        config_with(**{name: policy})
    assert str(caught.value).startswith(
        f"{name} is {policy!r}; give one of lru, lfu, slru, fifo, priority, or"
    )


@pytest.mark.parametrize(
    ("grid", "ranks_on_host", "effective"),
    [
        ({}, None, 1),
        ({"tp_size": 4, "pp_size": 2, "cp_size": 3}, None, 24),
        ({"tp_size": 4, "pp_size": 2}, 4, 4),
        ({}, 8, 8),
    ],
)
def test_ranks_on_host_default_to_all_of_the_grid(
    grid: dict[str, int], ranks_on_host: int | None, effective: int
) -> None:
    """Unset, all ranks are taken to share this machine's memory, which is safe; set, it is what was set."""
    assert config_with(**grid, ranks_on_host=ranks_on_host).effective_ranks_on_host == effective


@pytest.mark.parametrize(("layout", "mode"), list(itertools.product(HostLayout, IoMode)))
def test_layout_and_io_mode(layout: HostLayout, mode: IoMode) -> None:
    """Exactly the five pairs work; another raises naming both words and every pair that does."""
    if (layout, mode) in PAIRS:
        config = CacheConfig(host_layout=layout, io_mode=mode)
        assert (config.host_layout, config.io_mode) == (layout, mode)
        return
    with pytest.raises(ConfigError) as caught:
        CacheConfig(host_layout=layout, io_mode=mode)
    assert f"host_layout {layout} does not go with io_mode {mode}" in str(caught.value)
    assert "layer_first: kernel, direct; page_first: kernel" in str(caught.value)


@pytest.mark.parametrize("name", sorted(UNIFIED_ONLY))
@pytest.mark.parametrize("layout", HostLayout)
def test_how_objects_are_cut_is_said_to_the_unified_scheme_only(name: str, layout: HostLayout) -> None:
    """Under rank_suffix it would change nothing, and is refused; but head_grouped groups its heads by it."""
    options: dict[str, Any] = {"host_layout": layout, "io_mode": IO_MODES[layout][0], name: 2}
    if layout is HostLayout.HEAD_GROUPED and name in {"head_group", "tp_lcm_size"}:
        assert getattr(CacheConfig(**options), name) == 2
        return
    with pytest.raises(
        NamespaceError, match=f"^{name} is 2 and key_scheme is rank_suffix, .*set key_scheme to unif"
    ):
        CacheConfig(**options)


def test_the_lcm_is_a_multiple() -> None:
    """A least common multiple of tp sizes that this tp size does not divide was computed without it."""
    assert config_with(tp_lcm_size=8, tp_size=4, tp_rank=3).tp_lcm_size == 8
    with pytest.raises(
        NamespaceError, match=r"^tp_lcm_size is 8, no multiple of tp_size 3; set it to the least"
    ):
        config_with(tp_lcm_size=8, tp_size=3)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
@pytest.mark.parametrize("rank", [-1, 4, 1.0, True, "0"])
def test_rank_lies_in_its_grid(axis: str, rank: object) -> None:
    """A rank outside 0 .. size-1 raises NamespaceError with the value and the highest rank."""
    with pytest.raises(NamespaceError) as caught:
        config_with(**{f"{axis}_rank": rank, f"{axis}_size": 4})
    assert str(caught.value).startswith(f"{axis}_rank is {rank!r}; ")
    assert str(caught.value).endswith(f"{axis}_size-1 = 3")


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_highest_rank_is_taken(axis: str) -> None:
    """The last rank of each axis is in the grid."""
    assert getattr(config_with(**{f"{axis}_rank": 3, f"{axis}_size": 4}), f"{axis}_rank") == 3


@pytest.mark.parametrize(("name", "value"), [("model_id", ""), ("model_id", 7), ("fingerprint", None)])
def test_strings(name: str, value: object) -> None:
    """The model must be named, and what names it is a string."""
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}; give "):
        config_with(**{name: value})


@pytest.mark.parametrize("value", ["no", 0, 1, None])
def test_switches(value: object) -> None:
    """A switch is True or False: a string that reads "no" would have meant yes."""
    with pytest.raises(ConfigError, match=f"^allow_small_host is {value!r}; give True or False$"):
        config_with(allow_small_host=value)


def test_from_mapping_takes_aliases_and_hyphens() -> None:
    """``io_backend`` stands for io_mode, ``mem_layout`` for host_layout, a hyphen for an underscore."""
    config = CacheConfig.from_mapping(
        {
            "io-backend": "direct",
            "mem_layout": "page-first-direct",
            "page-size": 16,
            "key_scheme": "rank-suffix",
        }
    )
    assert config == CacheConfig(
        io_mode=IoMode.DIRECT, host_layout=HostLayout.PAGE_FIRST_DIRECT, page_size=16
    )
    assert CacheConfig.from_mapping({}) == CacheConfig()


@pytest.mark.parametrize("name", ["pagesize", "io_mod", "_alias", 7])
def test_from_mapping_refuses_unknown_names(name: Any) -> None:
    """An unknown option raises, naming it and the options there are."""
    with pytest.raises(ConfigError, match=f"^{name} is not an option; .*host_layout.*page_size"):
        CacheConfig.from_mapping({name: 1})


def test_from_mapping_refuses_one_option_twice() -> None:
    """A name and its alias together raise instead of one winning silently."""
    with pytest.raises(ConfigError, match=r"^io_backend is 'direct', but io_mode was given already"):
        CacheConfig.from_mapping({"io_mode": "kernel", "io_backend": "direct"})


def test_from_mapping_checks_values() -> None:
    """A value out of range raises as it does for the constructor."""
    with pytest.raises(ConfigError, match=r"^page_size is 0; "):
        CacheConfig.from_mapping({"page_size": 0})


@pytest.mark.parametrize(
    ("page_size", "threshold", "effective"), [(64, 256, 256), (512, 256, 512), (64, 0, 64)]
)
def test_prefetch_threshold_is_at_least_a_page(page_size: int, threshold: int, effective: int) -> None:
    """A prefetch of less than one page is never worth a look."""
    config = CacheConfig(page_size=page_size, prefetch_threshold_tokens=threshold)
    assert config.effective_prefetch_threshold_tokens == effective


@pytest.mark.parametrize(("threshold", "effective"), [(None, 32), (0, 0), (100, 100)])
def test_load_threshold_defaults_to_a_page(threshold: int | None, effective: int) -> None:
    """Unset, loads below one page are recomputed; set, it is what was set."""
    config = CacheConfig(page_size=32, load_threshold_tokens=threshold)
    assert config.effective_load_threshold_tokens == effective


def test_config_is_frozen() -> None:
    """A checked config cannot be changed into an unchecked one."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig().page_size = 0  # type: ignore[misc]


@pytest.mark.parametrize("name", ["model_id", "fingerprint"])
def test_text_that_has_no_bytes_is_refused(name: str) -> None:
    """A lone surrogate cannot be part of a key."""
    with pytest.raises(ConfigError, match=f"{name} is .*valid Unicode"):
        CacheConfig(**{name: "a\ud800"})  # type: ignore[arg-type]


def test_a_policy_knows_its_words() -> None:
    """A policy made from a word ends as that word says; another word is refused."""
    assert PrefetchPolicy("timeout", 0.1).deadline_s(0, CacheConfig()) == 0.1  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mode is 'nonsense'"):
        PrefetchPolicy("nonsense")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["host_bytes", "host_reserve_bytes", "store_batch_pages"])
def test_huge_integers_are_numbers_too(name: str) -> None:
    """An integer beyond every float is compared, not converted."""
    if name == "store_batch_pages":
        with pytest.raises(ConfigError, match=name):
            CacheConfig(**{name: 10**400})  # type: ignore[arg-type]
    else:
        assert getattr(CacheConfig(**{name: 10**400}), name) == 10**400  # type: ignore[arg-type]
