"""Sharing: in what two namespaces differ, and what to set so that both become one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .manifest import Manifest

Facts = Mapping[str, object]

_UNIFIED_ORDER = "group_cell_layer_kv_token"
_HOST_LAYOUTS = {
    "layer_kv_token": "page_first",
    "kv_layer_token": "page_first_direct",
    "group_layer_kv_token": "head_grouped",
}
"""Order of a whole page's bytes: a host layout that gives it (layer_first gives the first one, too)."""

_LAYOUT = re.compile(r"(?P<order>[a-z_]+):(?P<widths>[0-9+]+)(?P<rest>(;[a-z_]+=[0-9]+)*)")


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that keeps two caches from sharing.

    Attributes:
        field: of the config, of the table ``kv`` that describes its tensors, or of the namespace.
        ours, theirs: its two values; None: there is none.
        advice: what to set on our side, or why that is no use.
    """

    field: str
    ours: object
    theirs: object
    advice: str

    def __str__(self) -> str:
        return f"{self.field} is {shown(self.ours)} here and {shown(self.theirs)} there"

    @property
    def can_be_shared(self) -> bool:
        """Whether a setting makes both equal; False: the bytes are really different."""
        return not self.advice.startswith(_NEVER)


_NEVER = "cannot be shared"


def differences(ours: Manifest, theirs: Manifest) -> tuple[Difference, ...]:
    """Return every field in which two namespaces differ, in the order of the fields."""
    mine, other = facts(ours), facts(theirs)
    names = [name for name in dict.fromkeys((*mine, *other)) if name not in _implied(mine, other)]
    return tuple(
        Difference(name, mine.get(name), other.get(name), _advice(name, mine, other))
        for name in names
        if not _same(mine.get(name), other.get(name))
    )


def _implied(ours: Facts, theirs: Facts) -> set[str]:
    # What says nothing more once the key scheme, or MLA, differs: advice for these names it all.
    names: set[str] = set()
    if ours["key_scheme"] != theirs["key_scheme"]:
        names |= ours.keys() ^ theirs.keys() | {"host_layout", "head_group", "layer_partition"}
    if ours.get("rank_replicated") != theirs.get("rank_replicated"):
        names |= {"total_kv_heads", "head_group"}
    return names


def is_other_stage(ours: Manifest, theirs: Manifest) -> bool:
    """Return whether ``theirs`` is of another stage of the pipeline that ``ours`` is of.

    Under rank_suffix it is one where nothing but its layers differs, and none of them is also here.
    """
    mine, other = facts(ours), facts(theirs)
    different = {name for name in mine.keys() | other.keys() if not _same(mine.get(name), other.get(name))}
    if mine["key_scheme"] != "rank_suffix" or not different or not different <= _LAYER_FIELDS:
        return False
    first, second = _layers(mine), _layers(other)
    return first.stop <= second.start or second.stop <= first.start


_LAYER_FIELDS = {"layer_partition", "first_layer"}


def _layers(found: Facts) -> range:
    first, num = found.get("first_layer"), found.get("layer_partition")
    if not isinstance(first, int) or not isinstance(num, int):
        return range(0)
    return range(first, first + num)


def nearest(ours: Manifest, others: Iterable[Manifest]) -> list[tuple[Manifest, tuple[Difference, ...]]]:
    """Return the others with their differences: what can be shared first, then what differs in least."""
    found = [(other, differences(ours, other)) for other in others]
    return sorted(found, key=lambda pair: (_num_never(pair[1]), len(pair[1]), pair[0].digest))


def facts(manifest: Manifest) -> dict[str, object]:
    """Return the fields of a namespace, with the byte order taken apart into what an operator sets.

    ``object_layout`` becomes ``key_scheme``, ``host_layout``, ``head_dims`` and the numbers that follow.
    """
    found = dict(manifest.fields)
    layout = _LAYOUT.fullmatch(str(found.get("object_layout", "")))
    found["key_scheme"] = None
    if layout is None:
        return found
    del found["object_layout"]
    order = layout["order"]
    found["key_scheme"] = "unified" if order == _UNIFIED_ORDER else "rank_suffix"
    if order != _UNIFIED_ORDER:
        found["host_layout"] = _HOST_LAYOUTS.get(order, order)
        found["first_layer"] = 0
    found["head_dims"] = [int(width) for width in layout["widths"].split("+")]
    for pair in layout["rest"].split(";")[1:]:
        name, _, number = pair.partition("=")
        found[_LAYOUT_NUMBERS.get(name, name)] = int(number)
    return found


_LAYOUT_NUMBERS = {"layers": "total_layers", "tokens": "kv_page_size"}


class RankGrid(NamedTuple):
    """The place in a rank grid that the name of an object tells under rank_suffix; MLA: tp 0 of 1."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How large the grid is: tp, pp, cp."""
        return self.tp_size, self.pp_size, self.cp_size

    def __str__(self) -> str:
        return (
            f"tp {self.tp_rank} of {self.tp_size}, pp {self.pp_rank} of {self.pp_size}, "
            f"cp {self.cp_rank} of {self.cp_size}"
        )


_GRID = re.compile(
    r"_ukv[0-9]+-[0-9a-f]{16}_[^_]*(_(?P<tp_rank>[0-9]+)_(?P<tp_size>[0-9]+))?"
    r"(_(?P<pp_size>[0-9]+)_(?P<pp_rank>[0-9]+))?(_cp(?P<cp_rank>[0-9]+)_(?P<cp_size>[0-9]+))?"
)
_MLA_GRID = re.compile(_GRID.pattern.replace("(_(?P<tp_rank>[0-9]+)_(?P<tp_size>[0-9]+))?", "", 1))


def rank_grid(suffix: str, *, is_mla: bool) -> RankGrid | None:
    """Return the rank whose objects end in ``suffix`` under rank_suffix; None: those of no rank do."""
    found = (_MLA_GRID if is_mla else _GRID).fullmatch(suffix)
    if found is None:
        return None
    told = {name: int(number) for name, number in found.groupdict().items() if number is not None}
    return RankGrid(*(told.get(name, int(name.endswith("size"))) for name in RankGrid._fields))


def shown(value: object) -> str:
    """Return a field's value as an operator would write it."""
    if value is None:
        return "not there"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _same(ours: object, theirs: object) -> bool:
    return ours == theirs and type(ours) is type(theirs)


def _num_never(found: Iterable[Difference]) -> int:
    return sum(not difference.can_be_shared for difference in found)


# What to do about each


def _advice(name: str, ours: Facts, theirs: Facts) -> str:
    advise = _ADVICE.get(name)
    if advise is None:
        return f"{_NEVER}: {name} is of another version of hicache_async; run the same version on both sides"
    return advise(shown(theirs.get(name)), ours, theirs)


def _is_unified(found: Facts) -> bool:
    return found["key_scheme"] == "unified"


def _of_total_kv_heads(value: str, ours: Facts, theirs: Facts) -> str:
    if _is_unified(theirs):
        return (
            f"set tp_size so that kv_heads x tp_size = {value}, or total_kv_heads = {value} where ranks hold copies "
            "of heads; another number of KV heads is another model"
        )
    return (
        f"run with the tp_size of those that wrote it, so that kv_heads x tp_size = {value}: its objects are of single "
        'ranks; where ranks hold copies of heads, set key_scheme = "unified" and the same total_kv_heads on both '
        "sides, and store anew; another number of KV heads is another model"
    )


def _of_head_group(value: str, ours: Facts, theirs: Facts) -> str:
    total, group = theirs.get("total_kv_heads"), theirs.get("head_group")
    tp_size = total // group if isinstance(total, int) and isinstance(group, int) and group else None
    if _is_unified(theirs):
        other_way = "" if tp_size is None else f", or tp_lcm_size = {tp_size}, and leave the other unset"
        return f"set head_group = {value}{other_way}"
    if theirs.get("host_layout") == "head_grouped":  # whatever the tp_size
        return f'set head_group = {value}, with host_layout = "head_grouped", and run with the same tp_size'
    unset = "leave head_group and tp_lcm_size unset, " if ours.get("host_layout") == "head_grouped" else ""
    copies = " (more where ranks hold copies of heads: the same as those that wrote it)" if group == 1 else ""
    return (
        f"its pages hold the {value} heads of one rank: {unset}run with tp_size = "
        f'{"that of those that wrote it" if tp_size is None else tp_size}{copies}, or set key_scheme = "unified" and '
        "the same head_group on both sides, and store anew"
    )


def _of_layer_partition(value: str, ours: Facts, theirs: Facts) -> str:
    if _is_unified(theirs):
        return f"set layer_partition = {value}"
    return (
        f"its pages hold the {value} layers of one stage; run with the same pp_size and num_layers, or set "
        'key_scheme = "unified" and the same layer_partition on both sides, and store anew'
    )


def _of_first_layer(value: str, ours: Facts, theirs: Facts) -> str:
    return (
        f"its pages begin at layer {value} of the model: split the layers among the same stages, so that this one has "
        f'first_layer = {value}, or set key_scheme = "unified" and the same layer_partition on both sides, and store '
        "anew"
    )


def _of_kv_page_size(value: str, ours: Facts, theirs: Facts) -> str:
    mine, other = ours.get("kv_page_size"), theirs.get("kv_page_size")
    if other is None:
        told = f"this rank's pages are slices of {mine} tokens, and its pages are whole"
    elif mine is None:
        told = f"its pages are slices of {value} tokens, and this rank's are whole"
    else:
        told = f"its pages are slices of {value} tokens, and this rank's are slices of {mine}"
    return (
        f"{told}; run with the same cp_size and the same slices, or set "
        'key_scheme = "unified" and the same token_group on both sides, and store anew'
    )


def _of_host_layout(value: str, ours: Facts, theirs: Facts) -> str:
    settings = f"set host_layout = {value}"
    if "direct" in value:
        settings += ' and io_mode = "direct"'
    elif "direct" in str(ours.get("host_layout")) or "head_grouped" in value:
        settings += ' and io_mode = "kernel"'
    if "head_grouped" in value:
        return f"{settings} and head_group = {theirs.get('head_group')}"
    grouped = ours.get("host_layout") == "head_grouped"
    return f"{settings}; leave head_group and tp_lcm_size unset" if grouped else settings


def _of_key_scheme(value: str, ours: Facts, theirs: Facts) -> str:
    is_mla = theirs.get("rank_replicated") is True
    heads = () if is_mla else ("head_group",)
    if _is_unified(theirs):
        names = (*heads, "layer_partition", "token_group", "total_layers")
        settings = "".join(f", {name} = {theirs.get(name)}" for name in names)
        unset = "; leave head_group, tp_lcm_size and total_kv_heads unset, as the KV is MLA" if is_mla else ""
        return f"set key_scheme = {value}{settings}{unset}"
    if theirs["key_scheme"] is None:
        return f"{_NEVER}: its byte order is of another version of hicache_async; run the same version on both sides"
    layout = theirs.get("host_layout")
    settings = f"{shown(layout)} and io_mode = " + (
        '"direct"' if layout == "page_first_direct" else '"kernel"'
    )
    is_grouped = layout == "head_grouped"
    settings += f" and head_group = {theirs.get('head_group')}" if is_grouped else ""
    unset = "" if is_grouped else "head_group, tp_lcm_size, "
    return (
        f"set key_scheme = {value} and host_layout = {settings}, leave {unset}layer_partition, total_layers and "
        "token_group unset, and run with the tp_size, pp_size and cp_size of those that wrote it"
    )


_PREFIXES = {
    "zstd": "zstd+",
    "fp8": "fp8+ (with the same dtype and options)",
    "aesgcm": "aesgcm+ (with the same key)",
}
"""By family of codec: what stands before the URL of a store with it."""


def _of_codec(value: str, ours: Facts, theirs: Facts) -> str:
    parts = [_PREFIXES.get(re.split("[-_]", part)[0]) for part in str(theirs.get("codec")).split("+")]
    mine = [re.split("[-_]", part)[0] for part in str(ours.get("codec")).split("+")]
    if value == '"raw"':
        known = "".join(f"{family}+" for family in mine if family in _PREFIXES)
        return "open the store without a codec: take " + (
            f"{known} out of its URL" if known else "it out of its URL"
        )
    if "|" in value or None in parts:  # of tiers, each with its own, or made by others
        return f"open the store as the others do, so that its codec is {value}: by the same URL, with the same tiers"
    prefixes = ", then ".join(str(part) for part in parts)
    replaced = "" if mine == ["raw"] else ", in place of what stands there"
    return f"open the store as the others do, with codec {value}: by its URL behind {prefixes}{replaced}"


_ADVICE: dict[str, Callable[[str, Facts, Facts], str]] = {
    "schema_version": lambda value, ours, theirs: (
        f"{_NEVER}: its format is version {value}; run the same version of hicache_async on both sides"
    ),
    "model_id": lambda value, ours, theirs: (
        f"set model_id = {value}, if it is the same model under another name"
    ),
    "fingerprint": lambda value, ours, theirs: (
        f"set fingerprint = {value}, if revision, rope scaling and quantisation are the same there"
    ),
    "dtype": lambda value, ours, theirs: (
        f"{_NEVER}: its bytes are {value}; run the engine with a KV cache of dtype {value}"
    ),
    "page_size": lambda value, ours, theirs: (
        f"set page_size = {value}, in the config and in the engine's tensors"
    ),
    "rank_replicated": lambda value, ours, theirs: (
        f"{_NEVER}: a latent of MLA (mla = true) is not K and V (mla = false); it has mla = {value}"
    ),
    "total_kv_heads": _of_total_kv_heads,
    "head_group": _of_head_group,
    "layer_partition": _of_layer_partition,
    "first_layer": _of_first_layer,
    "key_scheme": _of_key_scheme,
    "host_layout": _of_host_layout,
    "head_dims": lambda value, ours, theirs: (
        f"{_NEVER}: a head has {value} elements there; it is another model"
    ),
    "total_layers": lambda value, ours, theirs: (
        f"set total_layers = {value}; another number of layers is another model"
    ),
    "token_group": lambda value, ours, theirs: f"set token_group = {value}",
    "kv_page_size": _of_kv_page_size,
    "codec": _of_codec,
}
"""By field: what returns the advice for their value, as shown, and the facts of both."""
